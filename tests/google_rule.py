"""The rules of google-research/bert for pairs and whole-word masks, slowly: the audit's contrast.

`python tests/google_rule.py CONFIG [key=value ...]` writes the report with what these rules make of
the same store beside it. Written from a description of them, one token and one draw at a time; not
meant to be used. A document is a list of (start, end), the tokens of its sentences.
"""

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.common.errors import run_command
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.report.audit import audit_rule
from data_pipeline.report.checks import check_results
from data_pipeline.report.page import measure, write_report
from data_pipeline.sampling.pairs import PAIR
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary

SEQUENCES = 50_000  # at most, that are masked

Span = tuple[int, int]


def documents_of(store: TokenStore) -> list[list[Span]]:
    offsets = store.sentence_offsets.tolist()
    sentences = list(zip(offsets, offsets[1:], strict=False))
    ends = store.document_offsets.tolist()
    return [sentences[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def google_pairs(
    documents: list[list[Span]], max_seq_length: int, short_seq_prob: float, draw: random.Random
) -> np.ndarray:
    """The pairs of one pass over the documents, in random order, as a `PAIR` array."""
    pairs = []
    for number, document in enumerate(documents):
        pairs += pairs_of_document(
            documents, number, document, max_seq_length - 3, short_seq_prob, draw
        )
    draw.shuffle(pairs)
    return np.array(pairs, PAIR)


def pairs_of_document(
    documents: list[list[Span]],
    number: int,
    document: list[Span],
    most: int,
    short_seq_prob: float,
    draw: random.Random,
) -> list[tuple[int, ...]]:
    """Sentences are gathered until they reach the target, or the document ends; the first of them
    are A. The others are B in half of the cases; else, and always where there is no other, B is
    from a random place of (nearly always) another document, and the others are used again."""
    target = draw.randint(2, most) if draw.random() < short_seq_prob else most  # for all of it
    pairs, chunk, i = [], [], 0
    while i < len(document):
        chunk.append(document[i])
        if i == len(document) - 1 or sum(end - start for start, end in chunk) >= target:
            for_a = draw.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = (chunk[0][0], chunk[for_a - 1][1])
            if len(chunk) == 1 or draw.random() < 0.5:
                b, label = random_b(documents, number, target - (a[1] - a[0]), draw), 1
                i -= len(chunk) - for_a
            else:
                b, label = (chunk[for_a][0], chunk[-1][1]), 0
            pairs.append((*cut_pair(a, b, most, draw), label))
            chunk = []
        i += 1
    return pairs


def random_b(documents: list[list[Span]], number: int, target: int, draw: random.Random) -> Span:
    """Sentences of `target` tokens or more from a random one on; ten tries to find another
    document."""
    for _ in range(10):
        other = draw.randrange(len(documents))
        if other != number:
            break
    sentences = documents[other]
    first = last = draw.randrange(len(sentences))
    while last < len(sentences) - 1 and sentences[last][1] - sentences[first][0] < target:
        last += 1
    return sentences[first][0], sentences[last][1]


def cut_pair(a: Span, b: Span, most: int, draw: random.Random) -> tuple[int, int, int, int]:
    """The longer segment loses a token at its front or its back, until both fit."""
    a, b = list(a), list(b)
    while a[1] - a[0] + b[1] - b[0] > most:
        longer = a if a[1] - a[0] > b[1] - b[0] else b
        if draw.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return (*a, *b)


def google_masks(
    store: TokenStore, pairs: np.ndarray, max_predictions: int, draw: random.Random
) -> tuple[np.ndarray, ...]:
    """Tokens, what the model sees, whether predicted, whether a word starts, number of the
    sequence: as `audit_masks` wants them, special tokens left out."""
    rows, continues = [], store.vocabulary.continues
    for number, pair in enumerate(pairs.tolist()):
        segments = [store.take(np.arange(*pair[k : k + 2])).tolist() for k in (0, 2)]
        tokens = [2, *segments[0], 3, *segments[1], 3]
        seen, masked = mask(tokens, continues, max_predictions, draw)
        rows += [
            (token, seen[i], masked[i], tokens[i - 1] in (2, 3) or not continues[token], number)
            for i, token in enumerate(tokens)
            if token not in (2, 3)
        ]
    original, seen, masked, starts, sequence = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return original, seen, masked.astype(bool), starts.astype(bool), sequence


def mask(
    tokens: list[int], continues: Sequence[bool], max_predictions: int, draw: random.Random
) -> tuple[list[int], list[bool]]:
    """Words in random order, each masked unless that exceeds 15 % of all tokens; a word ends at the
    next that starts, not at a special token between; the fate is drawn for each token, a random one
    from the whole vocabulary."""
    budget = min(max_predictions, max(1, round(0.15 * len(tokens))))
    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if token in (2, 3):
            continue
        if words and continues[token]:
            words[-1].append(i)
        else:
            words.append([i])
    draw.shuffle(words)
    seen, masked, used = list(tokens), [False] * len(tokens), 0
    for word in words:
        if used + len(word) > budget:
            continue
        used += len(word)
        for i in word:
            masked[i] = True
            if draw.random() < 0.8:
                seen[i] = 4
            elif draw.random() < 0.5:
                seen[i] = draw.randrange(len(continues))
    return seen, masked


def audit_google(store: TokenStore, data: PairsConfig, seed: int, dupe_factor: int = 1) -> dict:
    """The figures of these rules on a store, as `audit_rule` gives them; `dupe_factor`: passes."""
    draw = random.Random(seed)
    documents, settings = documents_of(store), (data.max_seq_length, data.short_seq_prob, draw)
    pairs = np.concatenate([google_pairs(documents, *settings) for _ in range(dupe_factor)])
    most = math.ceil(data.masked_lm_prob * data.max_seq_length)
    masks = google_masks(store, pairs[:SEQUENCES], most, draw)
    return audit_rule(store, pairs, masks)


def main() -> None:
    config = load_config(DataConfig, sys.argv[1], sys.argv[2:])
    folder = Path(config.data_dir)
    store = TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    result = measure(config)
    google = audit_google(store, config.data, config.seed)
    checks = check_results(google | {"settings": result["settings"]})
    write_report(result | {"beside": {"google-research/bert": checks}})


if __name__ == "__main__":
    run_command(main)
