"""Span masking: lengths of spans, what they may cross, the shares of what stands in their place."""

import random
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.common.streams import random_u64
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.masking import SPANS, starts_span

SPAN = PairsConfig(max_seq_length=64, masking="span")
WEIGHTS = {"span": [0.8**k for k in range(10)], "ngram": [1, 1 / 2, 1 / 3]}


def slow_starts(sizes: list[int], streams: np.ndarray, weights: list[float]) -> list[bool]:
    """The rule, span after span, for segments of so many words."""
    out = []
    for number, size in enumerate(sizes):
        starts, place, j = [False] * size, 0, 0
        while place < size:
            starts[place] = True
            counter = np.array([(number % 2 + 1) * (1 << 40) + j])
            u = int(random_u64(streams[[number // 2]], counter)[0] >> np.uint64(11)) * 2.0**-53
            length, passed = 1, weights[0] / sum(weights)
            while u >= passed:
                passed += weights[length] / sum(weights)
                length += 1
            place, j = place + length, j + 1
        out += starts
    return out


@pytest.mark.parametrize("masking", WEIGHTS)
def test_spans_are_laid_out_as_by_hand(masking: str) -> None:
    draw = random.Random(0)
    sizes = [draw.randrange(0, 40) for _ in range(60)]
    streams = random_u64(np.uint64(1), np.arange(30))
    segment = np.repeat(np.arange(60), sizes)
    found = starts_span(segment, streams, SPANS[masking])
    assert found.tolist() == slow_starts(sizes, streams, WEIGHTS[masking])


@pytest.mark.parametrize("masking", WEIGHTS)
def test_lengths_of_spans_are_those_of_the_papers(masking: str) -> None:
    streams = random_u64(np.uint64(2), np.arange(500))
    starts = starts_span(np.repeat(np.arange(1000), 200), streams, SPANS[masking])
    ends = np.append(np.flatnonzero(starts)[1:], len(starts))
    # the last span of a segment may be cut: only those that end before its last ten words
    whole = np.flatnonzero(starts)
    lengths = (ends - whole)[whole % 200 < 190]
    weights = np.array(WEIGHTS[masking])
    for length, share in enumerate(weights / weights.sum(), 1):
        found = np.mean(lengths == length)
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / len(lengths))
    assert lengths.max() == len(weights)


@pytest.mark.parametrize(("masking", "mean"), [("span", 2.5), ("ngram", 1.9)])
def test_masked_spans_are_whole_words_of_one_segment_and_15_percent(store, masking, mean) -> None:
    batch = BatchSource(store, replace(SPAN, masking=masking), seed=0).batch(0, 600)
    plain = BatchSource(store, replace(SPAN, masking="whole_word"), seed=0).batch(0, 600)
    original = plain.input_ids.clone()
    original[plain.masked_positions] = plain.masked_labels  # the same pairs, unmasked
    masked = np.zeros(len(original), bool)
    masked[batch.masked_positions] = True
    assert (original[batch.masked_positions] == batch.masked_labels).all()
    special = original.numpy() < 5
    assert not (masked & special & (original.numpy() != 1)).any()  # [UNK] is text
    continues = store.vocabulary.continues[original.numpy()]
    # a piece that continues a word is masked with the piece before it
    assert (masked[1:] == masked[:-1])[continues[1:] & ~special[:-1]].all()
    share = masked.sum() / (~special).sum()
    assert abs(share - 0.15) < 0.01  # 600 sequences, to within a span of 10 words each way
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], masked, [0]]))))[::2]
    assert runs.mean() > mean  # whole words alone: about 1.5


def test_the_tokens_of_a_span_become_mask_together_and_those_of_an_n_gram_each_for_itself(
    store,
) -> None:
    for masking, together in (("span", True), ("ngram", False)):
        data = replace(SPAN, masking=masking, mask_replace_prob=0.5, random_replace_prob=0.0)
        batch = BatchSource(store, data, seed=0).batch(0, 300)
        place = batch.masked_positions.numpy()
        is_mask = (batch.input_ids == 4).numpy()[place]
        beside = np.flatnonzero(np.diff(place) == 1)
        alike = (is_mask[beside] == is_mask[beside + 1]).mean()
        assert (alike > 0.8) == together and alike > 0.4


def test_the_shares_of_mask_random_and_kept_are_parameters(store) -> None:
    for shares in ((1.0, 0.0), (0.0, 0.0), (0.5, 0.5)):
        data = replace(SPAN, mask_replace_prob=shares[0], random_replace_prob=shares[1])
        batch = BatchSource(store, data, seed=0).batch(0, 300)
        now = batch.input_ids[batch.masked_positions]
        assert abs(float((now == 4).double().mean()) - shares[0]) < 0.1
        kept = float((now == batch.masked_labels).double().mean())
        assert abs(kept - (1 - sum(shares))) < 0.1
