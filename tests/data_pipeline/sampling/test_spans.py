"""Span masking: lengths of spans, what they may cross, the shares of what stands in their place."""

import random
from dataclasses import replace

import numpy as np

from data_pipeline.common.streams import random_u64
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batches import BatchSource
from data_pipeline.sampling.masking import LONGEST_SPAN, SPAN_P, starts_span

SPAN = PairsConfig(max_seq_length=64, masking="span")


def slow_starts(sizes: list[int], streams: np.ndarray) -> list[bool]:
    """The rule, span after span, for segments of so many words."""
    weights = [(1 - SPAN_P) ** k for k in range(LONGEST_SPAN)]
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


def test_spans_are_laid_out_as_by_hand() -> None:
    draw = random.Random(0)
    sizes = [draw.randrange(0, 40) for _ in range(60)]
    streams = random_u64(np.uint64(1), np.arange(30))
    segment = np.repeat(np.arange(60), sizes)
    assert starts_span(segment, streams).tolist() == slow_starts(sizes, streams)


def test_lengths_of_spans_are_geometric() -> None:
    streams = random_u64(np.uint64(2), np.arange(500))
    starts = starts_span(np.repeat(np.arange(1000), 200), streams)
    ends = np.append(np.flatnonzero(starts)[1:], len(starts))
    # the last span of a segment may be cut: only those that end before its last ten words
    whole = np.flatnonzero(starts)
    lengths = (ends - whole)[whole % 200 < 190]
    weights = (1 - SPAN_P) ** np.arange(LONGEST_SPAN)
    for length, share in enumerate(weights / weights.sum(), 1):
        found = np.mean(lengths == length)
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / len(lengths))
    assert lengths.max() == LONGEST_SPAN


def test_masked_spans_are_whole_words_of_one_segment_and_15_percent(store) -> None:
    source = BatchSource(store, SPAN, seed=0)
    batch = source.batch(0, 600)
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
    assert runs.mean() > 2.5  # whole words alone: about 1.5


def test_the_shares_of_mask_random_and_kept_are_parameters(store) -> None:
    for shares in ((1.0, 0.0), (0.0, 0.0), (0.5, 0.5)):
        data = replace(SPAN, mask_replace_prob=shares[0], random_replace_prob=shares[1])
        batch = BatchSource(store, data, seed=0).batch(0, 300)
        now = batch.input_ids[batch.masked_positions]
        assert abs(float((now == 4).double().mean()) - shares[0]) < 0.1
        kept = float((now == batch.masked_labels).double().mean())
        assert abs(kept - (1 - sum(shares))) < 0.1
