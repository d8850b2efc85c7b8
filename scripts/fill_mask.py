"""Print the most likely tokens for each [MASK]:

python scripts/fill_mask.py EXPORT_DIR SENTENCE ...
"""

import argparse
from pathlib import Path

from needed import check_packages

check_packages("torch", "data_pipeline")

from accelerate import Accelerator

from data_pipeline.build.probes import encode_texts
from data_pipeline.common.errors import UserError, run_command
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.models.bert import PretrainingModel
from pretrain.probes import check_lengths, fill_masks
from pretrain.read_export import load_export


def fill_mask(
    model: PretrainingModel, folder: Path, sentence: str, k: int = 5
) -> list[list[tuple[str, float]]]:
    """Predict the `k` most likely tokens, with probabilities, for each [MASK] of a sentence.

    folder: of the model, with its tokenizer.
    """
    vocabulary, (ids,) = read_vocabulary(folder), encode_texts(folder, [sentence])
    if vocabulary["[MASK]"] not in ids:
        raise UserError(f"no [MASK] in {sentence!r}; write [MASK] for the word to fill in")
    check_lengths([ids], vocabulary, model.config.max_position_embeddings)
    return fill_masks(model, [ids], vocabulary, Accelerator(cpu=True), k)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export_dir", type=Path)
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE")
    args = parser.parse_args()
    model = load_export(args.export_dir)
    for sentence in args.sentences:
        print(sentence)
        for candidates in fill_mask(model, args.export_dir, sentence):
            print("    " + ", ".join(f"{piece} {p:.0%}" for piece, p in candidates))


if __name__ == "__main__":
    run_command(main)
