"""Batches: a slow assembly of each sequence, and tensors that agree with each other."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pairs import draw, gives_no_pairs, key, make_store, reference_example, rows

from data_pipeline.common.errors import UserError
from data_pipeline.common.streams import random_u64
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch, build_batch, fetch, send
from data_pipeline.sampling.pairs import PAIR

SEED = 7
DATA = PairsConfig(max_seq_length=64)


def rows_at(source: BatchSource, start: int, count: int) -> list[dict]:
    return rows(source.batch(start, count))


@pytest.fixture(scope="module")
def source(store) -> BatchSource:
    return BatchSource(store, DATA, SEED)


def slow_rows(source: BatchSource, epoch: int, numbers: range) -> list[dict]:
    """Those examples of an epoch, by the slow assembly of each."""
    return [
        reference_example(
            source.store,
            source.pairs(epoch)[i].tolist(),
            draw(key(SEED, epoch, 4), i),
            masking=source.data.masking,
            masked_lm_prob=0.15,
            max_predictions=source.data.max_predictions_per_seq,
        )
        for i in numbers
    ]


@pytest.mark.parametrize(
    "objective, share", [("nsp", 0.0), ("nsp", 0.5), ("nsp", 1.0), ("sop", 0.2), ("none", 0.0)]
)
@pytest.mark.parametrize("masking", ["whole_word", "token"])
@pytest.mark.parametrize("max_predictions", [None, 5])
def test_a_batch_of_real_text_is_that_of_the_slow_assembly(
    store, objective, share, masking, max_predictions
) -> None:
    data = PairsConfig(
        max_seq_length=64,
        objective=objective,
        single_segment_prob=share,
        masking=masking,
        max_predictions_per_seq=max_predictions,
    )
    source = BatchSource(store, data, SEED)
    first = source.epoch_size(0) + 11  # in epoch 1
    assert rows_at(source, first, 20) == slow_rows(source, 1, range(11, 31))


@settings(max_examples=60, derandomize=True)
@given(
    corpus=st.lists(
        st.lists(
            st.lists(st.one_of(st.just(1), st.integers(1, 30)), min_size=1, max_size=12),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=8,
    ),
    objective=st.sampled_from(["nsp", "sop", "none"]),
    masking=st.sampled_from(["whole_word", "token"]),
)
def test_a_batch_of_any_corpus_is_that_of_the_slow_assembly(corpus, objective, masking) -> None:
    store = make_store(corpus)
    data = PairsConfig(max_seq_length=16, objective=objective, masking=masking)
    try:
        source = BatchSource(store, data, SEED)
        n = min(source.epoch_size(0), 12)
    except UserError:
        rules = {"short_seq_prob": data.short_seq_prob, "seed": SEED, "epoch": 0}
        assert gives_no_pairs(corpus, max_seq_length=16, objective=objective, **rules)
        return
    assert rows_at(source, 0, n) == slow_rows(source, 0, range(n))


@pytest.mark.parametrize("objective, share", [("nsp", 0.0), ("sop", 0.5), ("none", 0.0)])
def test_the_arrays_of_a_batch_agree_with_each_other(store, objective, share) -> None:
    data = PairsConfig(max_seq_length=64, objective=objective, single_segment_prob=share)
    batch = BatchSource(store, data, SEED).batch(5, 40)
    lengths = batch.cu_seqlens.diff()
    for item in dataclasses.fields(Batch):
        value = getattr(batch, item.name)
        assert not torch.is_tensor(value) or value.dtype == torch.int64
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == len(batch.input_ids)
    assert len(lengths) == len(batch.next_sentence_label) == 40
    assert batch.max_length == lengths.max() <= 64
    assert batch.sequence_ids.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert batch.position_ids.tolist() == [p for n in lengths for p in range(n)]
    assert len(batch.masked_positions) == len(batch.masked_labels)
    assert batch.pairs == sum(row["label"] >= 0 for row in rows(batch))
    assert batch.pairs == {"nsp": 40, "none": 0}.get(objective, batch.pairs)
    for row in rows(batch):
        assert row["ids"][0] == 2 and row["ids"][-1] == 3
        separators = [i for i, token in enumerate(row["ids"]) if token == 3]
        if row["label"] == -100:
            assert len(separators) == 1 and not any(row["types"])
        else:
            after = len(row["ids"]) - separators[0] - 1
            assert len(separators) == 2 and row["label"] in (0, 1)
            assert row["types"] == [0] * (separators[0] + 1) + [1] * after


def test_the_padded_view_is_the_batch_in_rows(source) -> None:
    batch = source.batch(3, 9)
    padded = batch.padded(pad_id=0)
    shape = (9, batch.max_length)
    assert torch.equal(padded["next_sentence_label"], batch.next_sentence_label)
    for number, row in enumerate(rows(batch)):
        n, rest = len(row["ids"]), shape[1] - len(row["ids"])
        labels = [-100] * n
        for place, label in zip(row["masked"], row["labels"], strict=True):
            labels[place] = label
        assert padded["input_ids"][number].tolist() == row["ids"] + [0] * rest
        assert padded["token_type_ids"][number].tolist() == row["types"] + [0] * rest
        assert padded["attention_mask"][number].tolist() == [1] * n + [0] * rest
        assert padded["labels"][number].tolist() == labels + [-100] * rest
    assert (batch.padded(pad_id=9)["input_ids"] == 9).sum() >= (padded["attention_mask"] == 0).sum()


def test_a_slice_of_a_batch_is_the_batch_of_these_examples(store) -> None:
    source = BatchSource(store, dataclasses.replace(DATA, single_segment_prob=0.5), SEED)
    whole = source.batch(0, 30)
    for first, last in ((0, 30), (0, 1), (4, 9), (29, 30)):
        found, wanted = whole.slice(first, last), source.batch(first, last - first)
        for item in dataclasses.fields(Batch):
            one, other = getattr(found, item.name), getattr(wanted, item.name)
            assert torch.equal(one, other) if torch.is_tensor(one) else one == other, item.name


@pytest.mark.parametrize("objective, specials", [("sop", 3), ("none", 2)])
def test_a_sequence_may_be_as_long_as_asked_and_no_longer(objective, specials) -> None:
    # sentences as long as a sequence leaves room for
    store = make_store([[[1] * (64 - specials)] * 3] * 4)
    data = PairsConfig(max_seq_length=64, objective=objective, short_seq_prob=0.0)
    source = BatchSource(store, data, SEED)
    assert source.epoch_size(0) == 12
    assert source.batch(0, 12).cu_seqlens.diff().tolist() == [64] * 12


def test_the_words_of_bits_are_those_of_pieces_at_both_ends_of_a_store() -> None:
    store = make_store([[[1, 3, 2]], [[2, 1, 1, 5, 1]]])
    assert len(store) == 16  # no bit is left beyond the last token
    bits = np.packbits(~store.vocabulary.continues[store.tokens], bitorder="little")
    with_bits = dataclasses.replace(store, word_starts=bits)
    pairs = np.array([(0, 4, 4, 6, 0), (6, 9, 9, 16, 0)] * 20, PAIR)
    streams = random_u64(np.uint64(1), np.arange(len(pairs)))
    one, other = (build_batch(each, DATA, pairs, streams) for each in (store, with_bits))
    assert rows(one) == rows(other)


def test_a_batch_on_the_cpu_is_itself(source) -> None:
    batch = source.batch(0, 2)
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_fetched_from_a_gpu_is_there_before_the_work_that_is_queued_after_it() -> None:
    sent = send(torch.arange(5), torch.device("cuda"))
    fetched = fetch(sent * 2)
    torch.cuda._sleep(10**9)  # cycles
    assert fetched().tolist() == [0, 2, 4, 6, 8]
    assert not torch.cuda.current_stream().query()
