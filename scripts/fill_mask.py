"""Print the most likely tokens for each [MASK]:

python scripts/fill_mask.py EXPORT_DIR [SENTENCE ...]
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from data_pipeline.common.errors import UserError, run_command
from data_pipeline.sampling.batches import Batch
from pretrain.export import load_export
from pretrain.models.bert import BertForPreTraining

SENTENCES = (
    "This method returns a new [MASK].",
    "The name of the [MASK] is a string.",
    "If the file does not [MASK], an exception is raised.",
    "It can be used to [MASK] the value of the object.",
)


def fill_mask(
    model: BertForPreTraining, tokenizer: Tokenizer, sentence: str, k: int = 5
) -> list[list[tuple[str, float]]]:
    """Predict the `k` most likely tokens, with probabilities, for each [MASK] of a sentence."""
    encoding = tokenizer.encode(sentence)
    ids, types = torch.tensor(encoding.ids), torch.tensor(encoding.type_ids)
    masked = torch.nonzero(ids == tokenizer.token_to_id("[MASK]"))[:, 0]
    if not len(masked):
        raise UserError(f"no [MASK] in {sentence!r}")
    if len(ids) > model.config.max_position_embeddings:
        longest = model.config.max_position_embeddings
        raise UserError(f"{len(ids)} tokens, and the model takes {longest}: {sentence[:40]!r}...")
    zeros, ends = torch.zeros(len(ids), dtype=torch.int64), torch.tensor([0, len(ids)])
    batch = Batch(
        ids, types, torch.arange(len(ids)), zeros, ends, masked, ids[masked], zeros[:1], len(ids)
    )
    with torch.no_grad():
        probabilities = model.logits(batch)[0].softmax(-1)
    best = probabilities.topk(k)
    return [
        [(tokenizer.id_to_token(i), p) for i, p in zip(row, values, strict=True)]
        for row, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export_dir", type=Path)
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    args = parser.parse_args()
    model = load_export(args.export_dir)
    tokenizer = Tokenizer.from_file(str(args.export_dir / "tokenizer.json"))
    for sentence in args.sentences:
        print(sentence)
        for candidates in fill_mask(model, tokenizer, sentence):
            print("    " + ", ".join(f"{piece} {p:.0%}" for piece, p in candidates))


if __name__ == "__main__":
    run_command(main)
