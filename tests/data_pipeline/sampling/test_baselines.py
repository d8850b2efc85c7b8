"""Guesses without a model: shares of words by a slow count, and tables that tell what they see."""

import numpy as np
import pytest
from reference_pairs import make_store

from data_pipeline.sampling import baselines
from data_pipeline.sampling.baselines import (
    accuracy,
    half_of,
    share_of_words,
    unigram_entropy,
    unigram_loss,
)
from data_pipeline.sampling.pairs import PAIR
from data_pipeline.sampling.token_store import TokenStore


def words(store: TokenStore, start: int, end: int) -> list[tuple[int, ...]]:
    """The words of a segment, which starts with one whatever its first token is."""
    out: list[tuple[int, ...]] = []
    for place in range(start, end):
        token = int(store.tokens[place])
        if place > start and store.vocabulary.continues[token]:
            out[-1] += (token,)
        else:
            out.append((token,))
    return out


@pytest.mark.parametrize("block", [3, 4096])
def test_the_share_of_words_is_that_of_a_slow_count(block, monkeypatch) -> None:
    monkeypatch.setattr(baselines, "BLOCK", block)
    rng = np.random.default_rng(0)
    store = make_store([[rng.integers(1, 4, 400).tolist()]])
    # few different pieces, so that words meet, and their pieces in another order too
    store.tokens[:] = np.where(store.tokens < 47, 7 + store.tokens % 4, 47 + store.tokens % 3)
    edges = np.sort(rng.integers(0, len(store), (50, 4)), axis=1)
    edges = edges[(np.diff(edges) > 0).all(1)]  # many within a word
    pairs = np.array([(*row, 0) for row in edges.tolist()], PAIR)
    wanted = []
    for a_start, a_end, b_start, b_end in edges.tolist():
        of_b = words(store, b_start, b_end)
        wanted.append(np.mean([word in of_b for word in words(store, a_start, a_end)]))
    assert share_of_words(store, pairs).tolist() == pytest.approx(wanted)
    assert len(set(wanted)) > 10


def test_two_pieces_in_another_order_are_another_word() -> None:
    store = make_store([[[3], [3], [3]]])
    store.tokens[:] = [7, 47, 48, 7, 48, 47, 7, 47, 48]
    pairs = np.array([(0, 3, 3, 6, 0), (0, 3, 6, 9, 0)], PAIR)
    assert share_of_words(store, pairs).tolist() == [0, 1]


def test_of_one_document_every_second_pair_is_fitted_on() -> None:
    assert half_of(np.array([4, 4, 4, 4])).tolist() == [True, False, True, False]
    assert half_of(np.array([4, 4, 9, 9])).tolist() == [True, True, False, False]


def test_a_table_of_two_features_tells_what_neither_tells() -> None:
    rng = np.random.default_rng(0)
    features = list(rng.integers(0, 2, (2, 4000)))
    label, fit = features[0] != features[1], np.arange(4000) % 2 == 0
    assert accuracy(features, label, fit) == {"accuracy": 1.0, "balanced": 1.0}
    assert accuracy(features[:1], label, fit)["accuracy"] < 0.6


def test_the_entropy_of_tokens_knows_none_that_do_not_occur() -> None:
    assert unigram_entropy(np.array([1, 0, 1, 2])) == pytest.approx(1.5 * np.log(2))


def test_frequencies_of_another_text_cost_its_entropy_and_what_they_differ_by() -> None:
    text, known = np.array([3, 1, 0, 0]), np.array([1, 2, 4, 0])
    p, q = text / 4, (known + 0.1) / 7.4
    apart = sum(p[i] * np.log(p[i] / q[i]) for i in (0, 1))
    assert unigram_loss(text, known) == pytest.approx(unigram_entropy(text) + apart)
    assert unigram_loss(known, known * 10**6) == pytest.approx(unigram_entropy(known))
    assert np.isfinite(unigram_loss(np.array([0, 0, 0, 1]), known))
