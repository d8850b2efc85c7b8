"""Try an export on text that its run held out: fill a word in some sentences, and tell sentences
from their words in another order:

python scripts/try_held_out.py EXPORT_DIR DATA_DIR
"""

import argparse
from pathlib import Path

from needed import check_packages

check_packages("torch", "data_pipeline")

import numpy as np
import torch
from accelerate import Accelerator

from data_pipeline.common.errors import UserError, run_command
from data_pipeline.report.audit import decode, spell
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary
from pretrain.models.bert import PretrainingModel
from pretrain.probes import fill_masks, prefers_good, score_sentences
from pretrain.read_export import load_export

SHOWN, COMPARED = 5, 200  # sentences to fill, and to tell from their words in another order
SHORTEST, LONGEST = 6, 20  # tokens of a sentence


def choose_sentences(store: TokenStore, count: int, longest: int) -> list[np.ndarray]:
    """Choose sentences of `SHORTEST` to `longest` tokens without [UNK], evenly over a split.

    Returns at most `count` of them, int64 arrays of tokens.
    """
    ends = store.sentence_offsets
    sizes = np.diff(ends)
    fit = np.flatnonzero((sizes >= SHORTEST) & (sizes <= longest))
    chosen = fit[np.linspace(0, len(fit) - 1, min(count, len(fit))).astype(int)]
    found = [np.array(store.tokens[ends[i] : ends[i + 1]], np.int64) for i in chosen]
    return [tokens for tokens in found if store.vocabulary["[UNK]"] not in tokens]


def hide_word(
    tokens: np.ndarray, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[np.ndarray, int] | None:
    """Replace a random word of one piece by [MASK].

    Returns (tokens, the hidden one); None if the sentence has no word of one piece.
    """
    starts = np.append(~vocabulary.continues[tokens], True)
    words = np.flatnonzero(starts[:-1] & starts[1:])
    whole = [i for i in words if spell(vocabulary, tokens[i : i + 1]).isalpha()]
    if not whole:
        return None
    place, masked = rng.choice(whole), tokens.copy()
    masked[place] = vocabulary["[MASK]"]
    return masked, int(tokens[place])


def shuffle_words(
    tokens: np.ndarray, vocabulary: Vocabulary, rng: np.random.Generator
) -> np.ndarray:
    """Put the words of a sentence in a random order."""
    words = np.split(tokens, np.flatnonzero(~vocabulary.continues[tokens])[1:])
    return np.concatenate([words[i] for i in rng.permutation(len(words))])


def enclose(tokens: np.ndarray, vocabulary: Vocabulary) -> list[int]:
    return [vocabulary["[CLS]"], *tokens.tolist(), vocabulary["[SEP]"]]


def tell_order(
    model: PretrainingModel, sentences: list[np.ndarray], vocabulary: Vocabulary
) -> float:
    """Compute the share of sentences that a model finds likelier than their words shuffled; a tie
    counts half."""
    rng = np.random.default_rng(0)
    shuffled = [shuffle_words(tokens, vocabulary, rng) for tokens in sentences]
    both = [enclose(tokens, vocabulary) for tokens in (*sentences, *shuffled)]
    scores = score_sentences(model, both, vocabulary, Accelerator(cpu=True))
    return float(prefers_good(scores).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export_dir", type=Path)
    parser.add_argument("data_dir", type=Path, help="where the run's corpus was prepared")
    args = parser.parse_args()
    model, vocabulary = load_export(args.export_dir), read_vocabulary(args.export_dir)
    store = TokenStore.open(args.data_dir / "store", "held_out", vocabulary)
    longest = min(LONGEST, model.config.max_position_embeddings - 2)  # beside [CLS] and [SEP]
    sentences = choose_sentences(store, COMPARED, longest)
    if not sentences:
        raise UserError(
            f"{args.data_dir} holds out no sentence of {SHORTEST} to {longest} tokens; fill your "
            "own with python scripts/fill_mask.py EXPORT_DIR SENTENCE"
        )

    rng = np.random.default_rng(0)
    hidden = [pair for tokens in sentences if (pair := hide_word(tokens, vocabulary, rng))]
    hidden = hidden[:: max(len(hidden) // SHOWN, 1)][:SHOWN]
    if hidden:
        print("held-out sentences with a word hidden, and what the model would put there:")
        masked = [enclose(tokens, vocabulary) for tokens, _ in hidden]
        filled = fill_masks(model, masked, vocabulary, Accelerator(cpu=True))
        for (tokens, truth), (best,) in zip(hidden, filled, strict=True):
            print(f"  {decode(vocabulary, tokens)}")
            candidates = ", ".join(f"{piece} {p:.0%}" for piece, p in best)
            print(f"    {candidates}; the truth: {vocabulary.show(truth)}")

    torch.manual_seed(0)
    fresh = PretrainingModel(model.config, len(vocabulary), model.objectives)
    found, chance = (tell_order(one, sentences, vocabulary) for one in (model, fresh))
    print(
        f"it prefers {found:.0%} of {len(sentences)} held-out sentences to the same words in "
        f"another order; the same network with random weights prefers {chance:.0%}"
    )


if __name__ == "__main__":
    run_command(main)
