"""Which examples a step has: example i of epoch e is the same whoever asks for it: alone, in any
batch, on any rank, at any step, prefetched or not."""

import dataclasses
import itertools
import random
import threading
import time
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pairs import make_store, rows

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.sampling import token_store
from data_pipeline.sampling.batch_source import (
    BatchSource,
    count_passes,
    cut_evenly,
    largest_pass,
    prefetch,
)
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.pairs import deal_documents
from data_pipeline.sampling.token_store import StoreView, TokenStore

SEED = 7
DATA = PairsConfig(max_seq_length=64)


def rows_at(source: BatchSource, start: int, count: int) -> list[dict]:
    return rows(source.batch(start, count))


def same(one: Batch, other: Batch) -> bool:
    values = [(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(Batch)]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b
        for a, b in values
    )


@pytest.fixture(scope="module")
def source(store) -> BatchSource:
    return BatchSource(store, DATA, SEED)


# --- the same example for everyone ----------------------------------------------------------------


def test_an_example_is_the_same_alone_and_in_any_batch(store, source) -> None:
    whole = rows_at(source, 0, 48)
    assert [row for i in range(48) for row in rows_at(source, i, 1)] == whole
    assert rows_at(source, 17, 13) == whole[17:30]
    assert rows_at(BatchSource(store, DATA, SEED), 40, 8) == whole[40:]
    assert rows_at(BatchSource(store, DATA, SEED + 1), 0, 48) != whole


@pytest.mark.parametrize("masking", ["span", "ngram", "token"])
def test_an_example_of_any_masking_is_the_same_alone_and_in_any_batch(store, masking) -> None:
    source = BatchSource(store, dataclasses.replace(DATA, masking=masking), SEED)
    assert [row for i in range(24) for row in rows_at(source, i, 1)] == rows_at(source, 0, 24)


def test_a_step_of_another_batch_size_is_not_the_one_that_was_kept(store) -> None:
    source = BatchSource(store, DATA, SEED)
    for size, world_size in ((8, 1), (16, 2)):  # eight sequences for rank 0 in both
        found = source.step(1, size, 8, 0, world_size)
        assert rows(*found) == rows_at(source, size, 8)


def test_a_step_of_another_number_of_ranks_is_not_the_one_that_was_kept(store) -> None:
    source = BatchSource(store, DATA, SEED)
    for world_size in (1, 2):
        found = source.step(1, 8, 8, 0, world_size)
        assert rows(*found) == rows_at(source, 8, 8 // world_size)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_step(source, world_size, micro_batch_size) -> None:
    for step in (0, 3):
        shares = [source.step(step, 32, micro_batch_size, r, world_size) for r in range(world_size)]
        assert [len(share) for share in shares] == [
            32 // micro_batch_size // world_size
        ] * world_size
        batches = list(itertools.chain(*shares))
        assert {len(batch.next_sentence_label) for batch in batches} == {micro_batch_size}
        assert rows(*batches) == rows_at(source, step * 32, 32)


@given(st.integers(1, 70), st.integers(1, 80), st.integers(1, 40))
@settings(max_examples=200)
def test_any_batch_is_divided_evenly_among_processes_and_passes(size, most, world_size) -> None:
    if size < world_size:
        with pytest.raises(UserError, match="too small for"):
            count_passes(size, most, world_size)
        return
    passes = count_passes(size, most, world_size)
    shares = np.diff(cut_evenly(size, world_size))
    sizes = np.concatenate([np.diff(cut_evenly(int(share), passes)) for share in shares])
    assert sizes.sum() == size and len(sizes) == passes * world_size
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    assert sizes.max() == largest_pass(size, most, world_size)
    assert sizes.max() <= most + (
        most * world_size < size and -(-size // world_size) > passes * most
    )
    assert passes == 1 or -(-size // world_size) > most * (passes - 1)  # one less would not do


def test_no_pass_of_a_rank_is_empty_where_another_rank_has_a_sequence_more() -> None:
    """Three and two sequences, one at a time: two passes of two, one, one and one."""
    assert count_passes(5, 1, 2) == 2 == largest_pass(5, 1, 2)


@pytest.mark.parametrize("world_size", [3, 5, 7])
def test_processes_that_do_not_divide_the_batch_share_it_all_the_same(source, world_size) -> None:
    shares = [source.step(2, 32, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1  # they meet in each pass
    assert rows(*itertools.chain(*shares)) == rows_at(source, 64, 32)


def test_a_step_asked_cold_is_the_step_asked_after_others(store, source) -> None:
    size = source.epoch_size(0)
    late = 2 * size // 64 + 3  # in epoch 2
    wanted = {}
    warm = BatchSource(store, DATA, SEED)
    for step in range(late + 1):
        if step in (0, 1, size // 64, late):
            wanted[step] = rows(*warm.step(step, 64, 32, 0, 1))
    for step, expected in wanted.items():
        assert rows(*BatchSource(store, DATA, SEED).step(step, 64, 32, 0, 1)) == expected
    # and backwards, on one source
    for step in sorted(wanted, reverse=True):
        assert rows(*warm.step(step, 64, 32, 0, 1)) == wanted[step]


def test_epochs_follow_each_other_without_gap_or_repeat(store) -> None:
    source = BatchSource(store, DATA, SEED)
    sizes = [source.epoch_size(epoch) for epoch in range(3)]
    starts = np.cumsum([0, *sizes])
    wanted = np.concatenate([source.pairs(epoch).copy() for epoch in range(3)])
    found, streams = [], []
    for start in range(0, starts[-1], 100):
        pairs, stream = source.examples(start, min(100, int(starts[-1]) - start))
        found.append(pairs)
        streams.append(stream)
    assert (np.concatenate(found) == wanted).all()
    streams = np.concatenate(streams)
    assert len(np.unique(streams)) == len(streams)  # no two examples share their masks
    # one step over the border of two epochs, and one that is longer than an epoch
    border = int(starts[1])
    assert rows_at(source, border - 3, 8) == rows_at(source, border - 3, 3) + rows_at(
        source, border, 5
    )
    pairs, _ = source.examples(border - 5, sizes[1] + 10)
    assert (pairs == wanted[border - 5 : border + sizes[1] + 5]).all()


def test_masks_of_the_same_text_are_drawn_afresh(store) -> None:
    # with short_seq_prob 0 and single segments many examples come back in the next epoch
    data = PairsConfig(max_seq_length=64, objective="none", short_seq_prob=0.0)
    source = BatchSource(store, data, SEED)
    epochs = []
    for epoch in (0, 1):
        first = sum(source.epoch_size(e) for e in range(epoch))
        texts = {}
        for row in rows_at(source, first, source.epoch_size(epoch)):
            before = list(row["ids"])
            for place, label in zip(row["masked"], row["labels"], strict=True):
                before[place] = label
            texts[tuple(before)] = tuple(row["masked"])
        epochs.append(texts)
    both = [text for text in set(epochs[0]) & set(epochs[1]) if len(text) > 30]
    assert len(both) > 100
    assert sum(epochs[0][text] == epochs[1][text] for text in both) < 0.02 * len(both)


def test_known_epoch_sizes_change_nothing_but_the_work(store, source) -> None:
    sizes = [source.epoch_size(epoch) for epoch in range(3)]
    start = sizes[0] + sizes[1] + 5
    cached = BatchSource(store, DATA, SEED)
    cached.recall_sizes(sizes)
    assert same(cached.batch(start, 10), BatchSource(store, DATA, SEED).batch(start, 10))
    assert list(cached.drawn_parts) == [2]  # the epochs before were not drawn
    sizes.append(0)  # the list given stays the caller's
    assert len(cached.part_sizes) == 3


def test_at_most_two_epochs_are_kept(store) -> None:
    source = BatchSource(store, DATA, SEED)
    for epoch in range(5):
        source.batch(sum(source.epoch_size(e) for e in range(epoch)) + 1, 2)
        assert len(source.drawn_parts) <= 2


# --- parts ----------------------------------------------------------------------------------------


def in_parts(store: TokenStore, n_parts: int, objective: str = "nsp") -> BatchSource:
    with mock.patch.object(token_store, "PART_TOKENS", -(-len(store) // n_parts)):
        data = PairsConfig(max_seq_length=64, objective=objective)
        return BatchSource(store, data, SEED)


def places(pairs: np.ndarray) -> np.ndarray:
    """The tokens of all segments of the pairs."""
    spans = [pairs[[f"{name}_start", f"{name}_end"]].tolist() for name in "ab"]
    return np.concatenate([np.arange(*span) for span in spans[0] + spans[1]])


def documents(store: TokenStore, pairs: np.ndarray) -> list[int]:
    starts = store.sentence_offsets[store.document_offsets]
    return np.searchsorted(starts, pairs["a_start"], side="right").tolist()


@pytest.fixture(scope="module")
def many() -> TokenStore:
    """A store of 600 documents of 1 to 20 sentences."""
    draw = random.Random(1)
    return make_store(
        [
            [[1] * draw.randint(3, 40) for _ in range(draw.randint(1, 20))]
            for document in range(600)
        ],
    )


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_an_epoch_in_parts_keeps_what_holds_for_one(many, objective) -> None:
    source = in_parts(many, 5, objective)
    assert source.n_parts == 5
    starts = many.sentence_offsets[many.document_offsets]
    for epoch in range(2):
        pairs = source.pairs(epoch)
        used = places(pairs)
        assert len(np.unique(used)) == len(used) >= 0.99 * len(many)
        a, b, a_last, b_last = (
            np.searchsorted(starts, pairs[name] - last, side="right")
            for name, last in (("a_start", 0), ("b_start", 0), ("a_end", 1), ("b_end", 1))
        )
        assert (a == a_last).all() and ((b == b_last) | (objective == "none")).all()
        if objective == "nsp":
            assert ((a != b) == (pairs["label"] == 1)).all()
        for part in map(source.epoch_part, source.parts_of(epoch)):
            assert (part["label"] == 1).sum() == (len(part) // 2 if objective != "none" else 0)
            assert 0.5 < len(part) * 5 / len(pairs) < 1.5
            # a part is a sample of all of the store
            assert part["a_start"].min() < len(many) / 5
            assert part["a_start"].max() > len(many) * 4 / 5
    first, again = (set(source.epoch_part(n)["a_start"].tolist()) for n in (0, 5))
    assert len(first & again) < 0.5 * len(first)  # and another one in each epoch


def test_each_part_of_an_epoch_has_random_numbers_of_its_own() -> None:
    source = in_parts(make_store([[[1] * 10] * 8] * 512), 2, "none")  # documents of one shape
    first, second = (part["a_end"] - part["a_start"] for part in map(source.epoch_part, (0, 1)))
    assert first[:500].tolist() != second[:500].tolist()


def test_steps_go_on_over_parts_and_epochs(many) -> None:
    source = in_parts(many, 3)
    wanted = np.concatenate([source.pairs(epoch) for epoch in range(2)])
    found, streams = in_parts(many, 3).examples(0, len(wanted))
    assert (found == wanted).all() and len(np.unique(streams)) == len(wanted)
    border = source.part_size(0) + source.part_size(1)
    cold = in_parts(many, 3)
    assert rows_at(cold, border - 3, 8) == rows_at(source, border - 3, 3) + rows_at(
        source, border, 5
    )
    cold.recall_sizes(source.part_sizes)
    cold.free_pairs()
    cold.batch(source.epoch_size(0) + 1, 2)
    assert list(cold.drawn_parts) == [3]  # known sizes: nothing before is drawn


def test_the_next_part_is_drawn_while_the_second_half_of_one_is_trained_on(
    many, monkeypatch
) -> None:
    monkeypatch.setattr("data_pipeline.sampling.batch_source.BLOCK_TOKENS", 1)
    cold, ahead = in_parts(many, 3), in_parts(many, 3)
    sizes = [cold.part_size(number) for number in range(3)]
    ahead.recall_sizes(sizes)
    may_draw, drawn, draw_part = threading.Event(), [], ahead.draw_part

    def draw_late(number: int) -> np.ndarray:
        assert number == 1 or may_draw.wait(10)
        drawn.append(number)
        return draw_part(number)

    ahead.draw_part = draw_late

    def step(source: BatchSource, example: int) -> Batch:
        return source.step(example // 4, 4, 4, 0, 1)[0]

    half, end = sizes[0] + sizes[1] // 2, sizes[0] + sizes[1]
    assert same(step(ahead, half - 8), step(cold, half - 8))
    assert drawn == [1] and list(ahead.drawn_parts) == [1]
    assert same(step(ahead, half + 8), step(cold, half + 8))  # although the next is not drawn yet
    assert drawn == [1] and list(ahead.drawn_parts) == [1, 2]
    may_draw.set()
    ahead.drawn_parts[2].result()
    assert same(step(ahead, end + 4), step(cold, end + 4)) and drawn == [1, 2]
    assert list(ahead.drawn_parts) == [1, 2]


def test_an_error_in_drawing_ahead_is_raised_where_the_part_begins(many, monkeypatch) -> None:
    monkeypatch.setattr("data_pipeline.sampling.batch_source.BLOCK_TOKENS", 1)
    source = in_parts(many, 3)
    size, draw_part = source.part_size(0), source.draw_part

    def fail(number: int) -> np.ndarray:
        if number == 1:
            raise MemoryError("no room for part 1")
        return draw_part(number)

    source.draw_part = fail
    for step in range(size // 4):
        source.step(step, 4, 4, 0, 1)
    assert source.drawn_parts[1].exception()
    with pytest.raises(MemoryError, match="part 1"):
        source.step(size // 4 + 1, 4, 4, 0, 1)


def test_parts_of_a_store_read_what_the_store_has_there(many) -> None:
    (documents,) = deal_documents(many, 1, np.uint64(0))
    assert documents[0, 0] == 0 and documents[-1, 1] == many.n_documents
    part = StoreView(many, np.array([[2, 5], [9, 10]]))
    starts = many.sentence_offsets[many.document_offsets]
    wanted = np.concatenate([np.arange(starts[2], starts[5]), np.arange(starts[9], starts[10])])
    assert part.sentence_offsets[-1] == len(wanted) and len(part.document_offsets) == 5
    everywhere = np.arange(len(wanted))
    assert (part.in_store(everywhere) == wanted).all()
    assert (part.starts_word(everywhere) == many.starts_word(wanted)).all()
    edges = part.sentence_offsets[part.document_offsets]
    spans = [span.tolist() for span in part.spans(edges[:-1], edges[1:])]
    assert sum(spans, []) == many.take(wanted).tolist()


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_long_sentences_are_cut_from_both_ends_where_the_order_is_asked(objective) -> None:
    # of 70 tokens, in sequences of 32: 29 29 12, or 12 29 29
    store = make_store([[[1] * 70] * 2] * 3)
    source = BatchSource(store, PairsConfig(max_seq_length=32, objective=objective), SEED)
    sizes = np.diff(source.segments.offsets).reshape(-1, 3)
    assert sizes[::2].tolist() == [[29, 29, 12]] * 3
    assert sizes[1::2].tolist() == [[12, 29, 29] if objective == "sop" else [29, 29, 12]] * 3


def test_a_part_without_documents_is_passed_over() -> None:
    # a document of nine tenths of the store begins in one part, and the next one is empty
    store = make_store([[[1] * 20] * 200, *[[[1] * 20] * 2] * 10])
    source = in_parts(store, 4, "none")
    sizes = [source.part_size(number) for number in source.parts_of(0)]
    assert 0 in sizes and sorted(places(source.pairs(0))) == list(range(len(store)))
    assert len(rows_at(source, 0, sum(sizes) + 5)) == sum(sizes) + 5


def test_other_seeds_and_epochs_deal_documents_otherwise(many) -> None:
    source, other = in_parts(many, 5), in_parts(many, 5)
    other.seed += 1
    dealt = [set(documents(many, part)) for part in map(source.epoch_part, (0, 5))]
    dealt.append(set(documents(many, other.epoch_part(0))))
    for one, two in itertools.combinations(dealt, 2):
        assert len(one & two) < 0.5 * len(one)  # by chance a fifth


@pytest.mark.parametrize("others", [2, 40])
def test_a_part_is_large_enough_for_the_longest_document(others: int) -> None:
    long, short = [[[1] * 10] * 100], [[[1] * 10] * 20] * others
    source = in_parts(make_store(long + short + long), 8)
    assert source.n_parts == {2: 1, 40: 2}[others]
    for epoch in range(10):
        n_random = (source.pairs(epoch)["label"] == 1).sum()
        assert abs(n_random - len(source.pairs(epoch)) / 2) <= 1  # a part of an odd number each
    assert in_parts(make_store(long + short + long), 8, "none").n_parts == 8


def test_a_stored_division_of_another_number_of_parts_is_not_used(many) -> None:
    with_edges = dataclasses.replace(many, run_edges=np.array([[0, 0], [600, len(many)]]))
    wanted = deal_documents(many, 5, np.uint64(1))
    found = deal_documents(with_edges, 5, np.uint64(1))
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_share_of_single_segments_holds_in_one_part_and_in_many(many, share) -> None:
    data = dataclasses.replace(DATA, single_segment_prob=share)
    with mock.patch.object(token_store, "PART_TOKENS", len(many) // 2):
        sources = BatchSource(many, data, SEED), BatchSource(many, DATA, SEED)
    in_one = BatchSource(many, data, SEED)
    for source, wanted in ((in_one, share), (sources[0], share), (sources[1], 0.0)):
        assert abs((source.pairs(0)["label"] == -100).mean() - wanted) < 0.01


def test_a_part_is_planned_in_the_memory_of_a_part() -> None:
    corpus = [[[1] * 20 for _ in range(40)] for _ in range(800)]
    store = make_store(corpus)

    def peak(n_parts: int) -> int:
        tracemalloc.start()
        in_parts(store, n_parts).epoch_part(n_parts // 2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(16) < peak(1) / 8


# --- prefetch -------------------------------------------------------------------------------------


def until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_prefetch_yields_the_same_items_in_order(source) -> None:
    steps = [source.batch(8 * k, 8) for k in range(10)]
    ahead = prefetch((source.batch(8 * k, 8) for k in range(10)), depth=2)
    assert all(same(a, b) for a, b in zip(ahead, steps, strict=True))
    assert list(prefetch(iter([]))) == []
    assert list(prefetch(iter([None, 0, None]))) == [None, 0, None]


def test_prefetch_passes_an_error_on_where_the_item_would_have_been() -> None:
    def items():
        yield 1
        yield 2
        raise UserError("the disk is gone")

    ahead = prefetch(items())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(UserError, match="the disk is gone"):
        next(ahead)


def test_prefetch_works_ahead_but_only_as_deep_as_asked() -> None:
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    ahead = prefetch(items(), depth=3)
    assert next(ahead) == 0
    # one taken, three in the queue, one in hand
    assert until(lambda: len(made) == 5)
    time.sleep(0.15)
    assert len(made) == 5
    ahead.close()


@pytest.mark.parametrize("taken", [1, 3])
def test_prefetch_stops_its_thread_when_closed_early(taken) -> None:
    before = set(threading.enumerate())
    ahead = prefetch(itertools.count(), depth=2)
    assert [next(ahead) for _ in range(taken)] == list(range(taken))
    assert len(set(threading.enumerate()) - before) == 1
    ahead.close()
    assert not set(threading.enumerate()) - before


def test_prefetch_stops_its_thread_after_the_last_item_and_after_an_error() -> None:
    before = set(threading.enumerate())
    assert list(prefetch(iter(range(5)))) == list(range(5))
    assert not set(threading.enumerate()) - before
    with pytest.raises(ZeroDivisionError):
        list(prefetch(1 // x for x in (1, 0)))
    assert not set(threading.enumerate()) - before
