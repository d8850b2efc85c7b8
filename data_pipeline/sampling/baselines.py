"""Measure baselines that need no model: tokens guessed by frequency, labels of pairs by lengths.

The evaluation shows them beside the model's figures, and the data report compares the length
baseline with chance: if lengths reveal the labels, the model learns nothing but lengths.
"""

import numpy as np

from data_pipeline.common.arrays import ranges
from data_pipeline.common.streams import derive_stream, random_u64
from data_pipeline.sampling.token_store import TokenStore

BLOCK = 4096  # pairs to process at once


def half_of(document: np.ndarray) -> np.ndarray:
    """Select the half of the pairs that a baseline is fitted on, from their documents: bool (n,).

    Takes every second document, or every second pair if all are from one document.
    """
    names, number = np.unique(document, return_inverse=True)
    return (number if len(names) > 1 else np.arange(len(document))) % 2 == 0


def accuracy(features: list[np.ndarray], label: np.ndarray, fit: np.ndarray) -> dict:
    """Measure how well a table over the features' quantiles predicts the labels.

    The table has about 100 pairs of `fit` in each cell and predicts a cell's most frequent label.
    Returns its accuracy on the pairs not in `fit`: `accuracy` over all of them, and `balanced`, the
    mean of the accuracies on each label, which is 0.5 for uninformative features. Both are 0.5 if
    all pairs are in `fit`, as with a single pair.
    """
    if fit.all():
        return {"accuracy": 0.5, "balanced": 0.5}
    n = int(np.clip((fit.sum() / 100) ** (1 / len(features)), 2, 32))
    cell = np.zeros(len(label), np.int64)
    for values in features:
        edges = np.unique(np.quantile(values[fit], np.arange(1, n) / n))
        cell = cell * n + np.searchsorted(edges, values, side="right")
    is_next, is_random = fit & ~label, fit & label
    following, random = (
        np.bincount(cell[x], minlength=cell.max() + 1) for x in (is_next, is_random)
    )
    even = is_next.sum() / max(is_random.sum(), 1)  # weight of a random pair, for equal labels
    right, right_even = ((w * random > following)[cell] == label for w in (1, even))
    each = [right_even[~fit & (label == x)] for x in (False, True)]
    return {
        "accuracy": float(right[~fit].mean()),
        "balanced": float(np.mean([part.mean() for part in each if len(part)])),
    }


def share_of_words(store: TokenStore, pairs: np.ndarray) -> np.ndarray:
    """Compute the share of A's words that also occur in B, float64 (n,)."""
    shared = np.empty(len(pairs))
    for first in range(0, len(pairs), BLOCK):
        part = pairs[first : first + BLOCK]
        (a, of_a), (b, of_b) = (pair_words(store, part, name) for name in "ab")
        found = np.isin(random_u64(a, of_a), random_u64(b, of_b))  # the same word in the same pair
        words = np.bincount(of_a, minlength=len(part))
        shared[first : first + BLOCK] = np.bincount(of_a, found, len(part)) / words
    return shared


def pair_words(store: TokenStore, pairs: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Hash the words of segment `name` (a or b) of each pair.

    Returns uint64 (words,), the hashes, and int64 (words,), the index of each word's pair.
    """
    starts, ends = pairs[f"{name}_start"], pairs[f"{name}_end"]
    places = ranges(starts, ends)
    tokens, begins = store.take(places), store.starts_word(places)
    begins[(np.cumsum(ends - starts) - (ends - starts))[ends > starts]] = True
    word = np.flatnonzero(begins)
    place = np.arange(len(tokens)) - word[np.cumsum(begins) - 1]
    words = np.add.reduceat(random_u64(random_u64(derive_stream(1), place), tokens), word)
    return words, np.repeat(np.arange(len(pairs)), ends - starts)[word]


def accuracy_by_lengths(store: TokenStore, pairs: np.ndarray) -> float:
    """Compute the NSP accuracy that the lengths of A and B alone allow."""
    lengths = [pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]]
    return accuracy_by(lengths, store, pairs)


def accuracy_by_shared_words(store: TokenStore, pairs: np.ndarray) -> float:
    """Compute the NSP accuracy that the share of A's words in B alone allows.

    Unlike the lengths, shared words may be informative: a model that understands has to beat them.
    """
    return accuracy_by([share_of_words(store, pairs)], store, pairs)


def accuracy_by(features: list[np.ndarray], store: TokenStore, pairs: np.ndarray) -> float:
    """Compute the NSP accuracy that some features of each pair allow.

    Fits the best guess on the pairs of one half of the documents, measures it on the other half,
    and averages over both directions.
    """
    starts = store.document_starts
    half = half_of(np.searchsorted(starts, pairs["a_start"], side="right"))
    label = pairs["label"].astype(bool)
    if half.all():  # one pair
        return 0.5
    return float(np.mean([accuracy(features, label, fit)["accuracy"] for fit in (half, ~half)]))


def unigram_entropy(counts: np.ndarray) -> float:
    """Compute the loss (nats) of a model that knows token frequencies and uses no context."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def unigram_loss(counts: np.ndarray, known: np.ndarray) -> float:
    """Compute the loss (nats per token) of a model that knows only the token frequencies of another
    text.

    A small text has a lower entropy, but no model can know its frequencies.

    counts: (V,), of the tokens of the text that is judged.
    known: (V,), of those of the other; 0.1 is added, as where the MLM bias starts.
    """
    q = (known + 0.1) / (known + 0.1).sum()
    return float(-(counts * np.log(q)).sum() / counts.sum())
