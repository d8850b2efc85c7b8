"""Measure what guesses without a model reach: tokens by frequency, labels of pairs by lengths.

The evaluation shows these beside the model's figures, and the data report compares the lengths with
chance: a sampler whose labels show in them would teach the model nothing else.
"""

import numpy as np

from data_pipeline.sampling.token_store import TokenStore


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """List the integers of all ranges [start, end), one range after another: int64."""
    sizes = ends - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def half_of(document: np.ndarray) -> np.ndarray:
    """Select the half of the pairs that a baseline is fitted on, from their documents: bool (n,).

    Takes every second document, or every second pair where all are from one document.
    """
    names, number = np.unique(document, return_inverse=True)
    return (number if len(names) > 1 else np.arange(len(document))) % 2 == 0


def accuracy(features: list[np.ndarray], label: np.ndarray, fit: np.ndarray) -> dict:
    """Measure how well a table over the features' quantiles predicts the labels.

    The table has about 100 pairs of `fit` in each cell and predicts a cell's most frequent label.
    Returns its accuracy on the pairs not in `fit`: `accuracy` over all of them, and `balanced`, the
    mean of the accuracies on each label, which is 0.5 for features that tell nothing.
    """
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


def unigram_entropy(counts: np.ndarray) -> float:
    """Compute the loss (nats) of a model that knows token frequencies and uses no context."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def accuracy_by_lengths(store: TokenStore, pairs: np.ndarray) -> float:
    """Compute the NSP accuracy that the lengths of A and B alone allow.

    Fits the best guess on the pairs of one half of the documents, measures it on the other half,
    and averages over both directions.
    """
    starts = store.sentence_offsets[store.document_offsets]
    half = half_of(np.searchsorted(starts, pairs["a_start"], side="right"))
    label = pairs["label"].astype(bool)
    lengths = [pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]]
    if half.all():  # one pair
        return 0.5
    return float(np.mean([accuracy(lengths, label, fit)["accuracy"] for fit in (half, ~half)]))
