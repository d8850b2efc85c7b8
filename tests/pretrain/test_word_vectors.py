"""The word vectors that a new run starts from, by comparison with slow renderings of the rules."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary
from pretrain import word_vectors as module
from pretrain.word_vectors import WINDOW, count_neighbours, to_information, word_vectors

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]


def build_store(documents: list[list[list[int]]], pieces: list[str] = PIECES) -> TokenStore:
    """Build a store of documents of sentences of token ids."""
    sentences = [sentence for document in documents for sentence in document]
    return TokenStore(
        Vocabulary.of(pieces),
        np.array([token for sentence in sentences for token in sentence], np.uint16),
        np.cumsum([0, *map(len, sentences)]),
        np.cumsum([0, *map(len, documents)]),
    )


def count_slowly(documents: list[list[list[int]]]) -> Counter:
    """Count (token, neighbour), weighted by distance, one pair of places at a time."""
    found = Counter()
    for document in documents:
        tokens = [token for sentence in document for token in sentence]
        for i, token in enumerate(tokens):
            for j, other in enumerate(tokens):
                if i != j and abs(i - j) <= WINDOW:
                    found[token, other] += 1 - (abs(i - j) - 1) / WINDOW
    return found


tokens = st.integers(5, len(PIECES) - 1)
texts = st.lists(
    st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


@given(texts, st.integers(3, 50))
@settings(max_examples=60)
def test_neighbours_are_those_of_the_slow_rule_in_blocks_of_any_size(documents, block) -> None:
    store = build_store(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 1 << 20)
        table = count_neighbours(store)
        patch.setattr(module, "BLOCK", block)
        parts = count_neighbours(store)
    wanted = count_slowly(documents)
    frequent = np.argsort(-np.bincount(store.tokens, minlength=len(PIECES)), kind="stable")
    for token in range(len(PIECES)):
        for column, other in enumerate(frequent):
            assert table[token, column] == pytest.approx(wanted[token, other], rel=1e-5)  # float32
    assert (parts <= table + 1e-4).all()  # only neighbours across the edge of a block are missing
    n_edges = -(-len(store) // block) - 1
    edge = 2 * sum(d * (1 - (d - 1) / WINDOW) for d in range(1, WINDOW + 1))  # pairs across an edge
    assert table.sum() - parts.sum() <= n_edges * edge + 1e-3


def test_a_large_store_is_sampled_from_its_start_to_its_end(monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 10)
    monkeypatch.setattr(module, "SAMPLE_BLOCKS", 3)
    store = build_store([[[5 + i // 10] * 10] for i in range(0, 100, 10)])  # a token a block
    counted = count_neighbours(store).sum(1).nonzero()[0]
    assert counted.tolist() == [5, 9, 14]


def test_the_table_keeps_the_most_frequent_contexts_when_memory_is_short(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_CELLS", 2 * len(PIECES))
    table = count_neighbours(build_store([[[5, 6, 5, 6, 5, 7]]]))
    assert table.shape == (len(PIECES), 2)
    assert table[7].tolist() == pytest.approx([1 + 0.6 + 0.2, 0.8 + 0.4])  # of 5, and of 6


def test_information_is_that_of_the_slow_formula() -> None:
    counts = np.random.default_rng(0).poisson(0.8, (12, 7)).astype(np.float32)
    counts[3] = 0  # a token without neighbours
    found = torch.from_numpy(counts.copy())
    to_information(found)
    smoothed = counts.sum(0, dtype=np.float64) ** 0.75
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            wanted = 0.0
            if count:
                share = smoothed[j] / smoothed.sum()
                wanted = max(np.log(count / row.sum(dtype=np.float64) / share), 0)
            assert found[i, j].item() == pytest.approx(wanted, abs=1e-5)


def test_vectors_of_full_size_have_the_angles_of_the_exact_factors() -> None:
    rng = np.random.default_rng(1)
    store = build_store([[rng.integers(5, len(PIECES), 300).tolist()]])
    table = torch.from_numpy(count_neighbours(store))
    to_information(table)
    left, strength, _ = np.linalg.svd(table.numpy().astype(np.float64))
    exact = (left * np.sqrt(strength))[5:]
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    torch.manual_seed(0)
    found = word_vectors(store, 40, torch.device("cpu"))  # more columns than tokens
    assert found.shape == (len(PIECES), 40) and not found[:5].any()
    assert np.allclose(found[5:] @ found[5:].T, exact @ exact.T, atol=1e-3)


def test_words_used_alike_have_vectors_alike() -> None:
    rng = np.random.default_rng(2)
    animals, places = [5, 6, 7, 8], [9, 10, 11, 12]  # never beside each other, in one frame each
    documents = []
    for _ in range(400):
        frame, words = ((13, 14), animals) if rng.random() < 0.5 else ((15, 16), places)
        documents.append([[frame[0], int(rng.choice(words)), frame[1]]])
    torch.manual_seed(0)
    vectors = word_vectors(build_store(documents), 4, torch.device("cpu"))
    within = vectors[animals] @ vectors[animals].T
    across = vectors[animals] @ vectors[places].T
    assert within.min() > 0.9 and across.max() < 0.5
