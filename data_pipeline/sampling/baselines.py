"""What needs no model: how well the label of a pair is guessed from a few numbers, such as lengths.

The evaluation shows it beside the model's accuracy, the report holds it against chance.
"""

import numpy as np


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers of all [start, end), one range after another."""
    sizes = ends - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def half_of(document: np.ndarray) -> np.ndarray:
    """Whether each is of the half that classifiers are fitted on: of every second document, or, in
    a single one, every second."""
    names, number = np.unique(document, return_inverse=True)
    return (number if len(names) > 1 else np.arange(len(document))) % 2 == 0


def accuracy(features: list[np.ndarray], label: np.ndarray, fit: np.ndarray) -> dict:
    """Accuracies on `~fit` of the best guess for each cell of a table of the features' quantiles,
    with some 100 pairs of `fit` a cell: as it is, and with both labels at equal weight."""
    n = int(np.clip((fit.sum() / 100) ** (1 / len(features)), 2, 32))
    cell = np.zeros(len(label), np.int64)
    for values in features:
        edges = np.unique(np.quantile(values[fit], np.arange(1, n) / n))
        cell = cell * n + np.searchsorted(edges, values, side="right")
    is_next, is_random = fit & ~label, fit & label
    following, random = (
        np.bincount(cell[x], minlength=cell.max() + 1) for x in (is_next, is_random)
    )
    even = is_next.sum() / max(is_random.sum(), 1)  # what a random pair weighs then
    right, right_even = ((w * random > following)[cell] == label for w in (1, even))
    each = [right_even[~fit & (label == x)] for x in (False, True)]
    return {
        "accuracy": float(right[~fit].mean()),
        "balanced": float(np.mean([part.mean() for part in each if len(part)])),
    }
