"""What evaluation says: each masked token counted once, by kind, by word and by frequency."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from data_pipeline.config import PairsConfig
from data_pipeline.sampling import baselines
from data_pipeline.sampling.baselines import accuracy_by_lengths, accuracy_by_shared_words
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.manifest import read_manifest
from data_pipeline.sampling.token_store import TokenStore
from pretrain import loss
from pretrain.config import ModelConfig
from pretrain.evaluate import GROUPS, HeldOut, evaluate, frequency_bands, token_groups, word_sizes
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import MaskedLM, SentencePairs

TINY = ModelConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3
)


def build_held_out(prepared: Path, store: TokenStore, **settings) -> HeldOut:
    data = PairsConfig(max_seq_length=64, **settings)
    return HeldOut(prepared / "data/store", store, data, 40, 16, Accelerator(cpu=True))


def build_model(store: TokenStore) -> PretrainingModel:
    torch.manual_seed(0)
    return PretrainingModel(TINY, len(store.vocabulary))


def test_metrics_are_those_of_a_plain_count_over_tokens(prepared: Path, store: TokenStore) -> None:
    """One token after the other, with the words found by reading the pieces from the left."""
    model, vocabulary = build_model(store), store.vocabulary
    held_out = build_held_out(prepared, store)
    with torch.no_grad():  # some must be right
        for batch, _, _ in held_out.batches:
            batch.masked_labels[::4] = model.eval().logits(batch)[0][::4].argmax(1)
    counts = store.token_counts()
    order = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    band = {piece: rank / len(counts) for rank, piece in enumerate(order)}
    rows = []
    for batch, groups, _ in held_out.batches:
        scores = model.logits(batch)[0].detach().double()
        for i, place in enumerate(batch.masked_positions.tolist()):
            label, seen = int(batch.masked_labels[i]), int(batch.input_ids[place])
            higher = int((scores[i] > scores[i, label]).sum())
            cross = -float(scores[i].log_softmax(0)[label])
            rows.append((cross, higher, seen, label, groups[:, i].tolist()))
    metrics = evaluate(model, held_out, Accelerator(cpu=True))
    assert model.training
    assert metrics["eval/mlm_loss"] == pytest.approx(np.mean([r[0] for r in rows]), rel=1e-5)
    assert metrics["eval/mlm_perplexity"] == pytest.approx(math.exp(metrics["eval/mlm_loss"]))
    counts = read_manifest(prepared / "data/store")["held_out"]
    bits = metrics["eval/mlm_loss"] / math.log(2)
    wanted = bits * counts["tokens"] / counts["bytes"]
    assert metrics["eval/mlm_bits_per_byte"] == pytest.approx(wanted)
    held_out.tokens_per_byte = None  # as in a store of an earlier version
    assert "eval/mlm_bits_per_byte" not in evaluate(model, held_out, Accelerator(cpu=True))
    assert metrics["eval/mlm_accuracy"] == np.mean([r[1] == 0 for r in rows]) >= 0.25
    assert metrics["eval/mlm_top5"] == np.mean([r[1] < 5 for r in rows])
    masked = [r for r in rows if r[2] == vocabulary["[MASK]"]]
    assert metrics["eval/mlm_loss_mask"] == pytest.approx(np.mean([r[0] for r in masked]))
    for number, name in enumerate(GROUPS):
        inside = [r for r in rows if r[4][number]]
        assert inside and metrics[f"eval/mlm_loss{name}"] == pytest.approx(
            np.mean([r[0] for r in inside]), rel=1e-5
        )
        assert metrics[f"eval/mlm_accuracy{name}"] == np.mean([r[1] == 0 for r in inside])
    fresh = build_held_out(prepared, store)
    for batch, groups, _ in fresh.batches:
        for label, *wanted in zip(batch.masked_labels.tolist(), *groups[7:].tolist(), strict=True):
            rank = band[label]
            assert wanted == [rank < 0.01, 0.01 <= rank < 0.11, rank >= 0.11]


@pytest.mark.parametrize("masking", ["whole_word", "token", "span"])
@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_the_word_of_a_masked_token_has_as_many_pieces_as_one_reads(
    store: TokenStore, masking: str, objective: str
) -> None:
    data = PairsConfig(max_seq_length=64, masking=masking, objective=objective)
    source = BatchSource(store, data, seed=0)
    batch = source.batch(0, 24)
    found = word_sizes(store, source.examples(0, 24)[0], batch)
    original = batch.input_ids.clone()
    original[batch.masked_positions] = batch.masked_labels
    pieces = [store.vocabulary.pieces[token] for token in original.tolist()]
    for place, size in zip(batch.masked_positions.tolist(), found.tolist(), strict=True):
        start = end = place
        while pieces[start].startswith("##") and pieces[start - 1] not in ("[CLS]", "[SEP]"):
            start -= 1
        while end + 1 < len(pieces) and pieces[end + 1].startswith("##"):
            end += 1
        assert size == end - start + 1
    assert {1, 2, 3} <= set(found.tolist())


def test_kinds_words_and_bands_each_hold_every_token_once(store: TokenStore) -> None:
    source = BatchSource(store, PairsConfig(max_seq_length=64), seed=0)
    batch = source.batch(0, 400)
    sizes = word_sizes(store, source.examples(0, 400)[0], batch)
    groups = token_groups(batch, sizes, frequency_bands(store.token_counts()), store.vocabulary)
    assert groups.shape == (len(GROUPS), len(batch.masked_labels)) and groups[0].all()
    for first in (1, 4, 7):
        assert (groups[first : first + 3].sum(0) == 1).all()
    shares = groups.double().mean(1)
    assert shares[1] == pytest.approx(0.8, abs=0.03) and shares[2] == pytest.approx(0.1, abs=0.02)


def test_ranks_and_losses_are_those_of_all_scores_at_once_whatever_the_chunk(
    store: TokenStore, monkeypatch
) -> None:
    model = build_model(store).eval()
    batch = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 6)
    monkeypatch.setitem(loss.CHUNK, "cpu", 7 * len(store.vocabulary))
    losses, ranks, (pairs,), none = model.score(batch)
    scores, nsp_scores = model.logits(batch)
    wanted = F.cross_entropy(scores, batch.masked_labels, reduction="none")
    torch.testing.assert_close(losses, wanted)
    nsp = F.cross_entropy(nsp_scores, batch.next_sentence_label, reduction="sum")
    torch.testing.assert_close(pairs[0], nsp.detach())
    assert pairs[2] == 6
    order = scores.argsort(1, descending=True)
    assert torch.equal(ranks, (order == batch.masked_labels[:, None]).int().argmax(1))
    alone, _, rows, _ = model.score(batch, mlm_only=True)
    assert torch.equal(alone, losses) and len(rows) == 0


def test_under_autocast_the_last_product_is_float32_and_nothing_ties(store: TokenStore) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator) for n in (50, 4096))
    bias, labels = torch.zeros(4096), torch.arange(50)
    with torch.autocast("cpu", torch.bfloat16):
        _, ranks = loss.score_labels(x, weight, bias, labels)
        tied = F.linear(x, weight).float()
    exact = x.double() @ weight.double().t()
    assert torch.equal(ranks, (exact > exact.gather(1, labels[:, None])).sum(1))
    assert not torch.equal(ranks, (tied > tied.gather(1, labels[:, None])).sum(1))


def test_without_masked_tokens_there_are_zeros_and_no_nan(
    prepared: Path, store: TokenStore
) -> None:
    held_out = build_held_out(prepared, store)
    empty = torch.zeros(0, dtype=torch.int64)
    for batch, _, _ in held_out.batches:
        batch.masked_positions = batch.masked_labels = empty
    held_out.batches = [(batch, groups[:, :0], True) for batch, groups, _ in held_out.batches]
    metrics = evaluate(build_model(store), held_out, Accelerator(cpu=True))
    assert metrics["eval/mlm_loss"] == metrics["eval/mlm_top5"] == 0
    assert "eval/mlm_loss_rare" not in metrics


def test_baselines_say_what_no_model_is_needed_for(prepared: Path, store: TokenStore) -> None:
    held_out = build_held_out(prepared, store)
    tokens = TokenStore.open(prepared / "data/store", "held_out", store.vocabulary)
    seen = tokens.take(np.arange(len(tokens))).astype(int)
    known = np.bincount(store.take(np.arange(len(store))), minlength=len(store.vocabulary))
    common = (seen == known.argmax()).mean()
    assert held_out.baselines["eval/unigram_accuracy"] == pytest.approx(common)
    chance = (known + 0.1) / (known + 0.1).sum()
    loss = -np.log(chance[seen]).mean()
    assert held_out.baselines["eval/unigram_entropy"] == pytest.approx(loss)
    rare = np.zeros(len(known)) + (np.arange(len(known)) == seen[-1])
    found = MaskedLM().baselines(tokens, rare, *[np.zeros(0)] * 2)
    assert found["unigram_accuracy"] == pytest.approx((seen == seen[-1]).mean())
    without_pairs = build_held_out(prepared, store, objective="none").baselines
    for name in ("majority", "by_lengths", "by_shared_words"):
        assert f"eval/nsp_{name}" in held_out.baselines
        assert f"eval/nsp_{name}" not in without_pairs


def test_lengths_that_tell_the_label_are_found_and_ours_tell_nothing(store: TokenStore) -> None:
    pairs = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).pairs(0).copy()
    assert abs(accuracy_by_lengths(store, pairs) - 0.5) < 0.05
    lengths = 1 + np.arange(len(pairs)) % 20 + 20 * (pairs["label"] == 0)
    pairs["b_end"] = pairs["b_start"] + lengths
    assert accuracy_by_lengths(store, pairs) > 0.9


def test_the_majority_is_of_the_label_that_most_pairs_have(store: TokenStore) -> None:
    pairs = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).pairs(0)[:40].copy()
    for ones in (10, 30):
        pairs["label"] = np.arange(40) < ones
        assert SentencePairs().baselines(store, np.ones(1), pairs, pairs)["nsp_majority"] == 0.75


def test_shared_words_tell_a_copy_from_a_stranger(store: TokenStore) -> None:
    pairs = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).pairs(0).copy()
    assert 0.5 < accuracy_by_shared_words(store, pairs) < 0.9
    for name in ("start", "end"):
        same = pairs["label"] == 0
        pairs[f"b_{name}"][same] = pairs[f"a_{name}"][same]
    assert accuracy_by_shared_words(store, pairs) > 0.95


def test_a_masked_token_is_in_the_groups_of_its_kind_its_word_and_its_band(store) -> None:
    mask, labels = store.vocabulary["[MASK]"], torch.tensor([7, 8, 9])
    one, seen = torch.zeros(3, dtype=torch.int64), torch.tensor([mask, 5, 9])
    batch = Batch(seen, one, one, one, one, torch.arange(3), labels, one, 3)
    bands = np.full(len(store.vocabulary), 2)
    bands[[8, 9]] = 1, 0
    found = token_groups(batch, np.array([2, 4, 1]), bands, store.vocabulary)
    names = [
        {name for name, is_in in zip(GROUPS, column, strict=True) if is_in}
        for column in found.T.tolist()
    ]
    assert names == [
        {"", "_mask", "_2_pieces", "_rare"},
        {"", "_random", "_3_or_more_pieces", "_medium"},
        {"", "_kept", "_1_piece", "_frequent"},
    ]


def test_a_band_ends_where_its_share_of_the_vocabulary_does() -> None:
    """Of 100 tokens one is frequent, and ten are medium."""
    counts = np.arange(100, 0, -1)
    assert frequency_bands(counts).tolist() == [0] + [1] * 10 + [2] * 89
    assert frequency_bands(counts[::-1]).tolist() == [2] * 89 + [1] * 10 + [0]


def test_a_batch_that_is_repeated_for_other_ranks_changes_no_metric(
    prepared: Path, store: TokenStore
) -> None:
    model, held_out = build_model(store), build_held_out(prepared, store)
    wanted = evaluate(model, held_out, Accelerator(cpu=True))
    batch, groups, _ = held_out.batches[0]
    held_out.batches.append((batch, groups, False))
    assert evaluate(model, held_out, Accelerator(cpu=True)) == wanted


def test_of_the_labels_the_fifth_is_among_the_five_highest_and_the_sixth_is_not(
    prepared: Path, store: TokenStore
) -> None:
    model, held_out = build_model(store).eval(), build_held_out(prepared, store)
    shares, counts = [], []
    for rank in (4, 5):
        for batch, _, _ in held_out.batches:
            batch.masked_labels[:] = model.logits(batch)[0].topk(6).indices[:, rank]
            counts.append(len(batch.next_sentence_label))
        shares.append(evaluate(model, held_out, Accelerator(cpu=True))["eval/mlm_top5"])
        model.eval()
    assert shares == [1, 0]
    assert sum(counts) == 2 * 40  # as many pairs as were asked for


def test_a_baseline_is_judged_on_other_documents_than_it_is_fitted_on(store) -> None:
    fit = np.arange(4000) % 2 == 0
    feature = np.arange(4000) // 2 % 2
    label = (feature == 1) == fit  # what the one half teaches is wrong in the other
    assert baselines.accuracy([feature], label, fit) == {"accuracy": 0.0, "balanced": 0.0}
    pairs = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).pairs(0)
    starts = store.sentence_offsets[store.document_offsets]
    document = np.searchsorted(starts, pairs["a_start"], side="right")
    fits = []

    def note(features, label, fit):
        fits.append(fit)
        return {"accuracy": float(len(fits))}

    with mock.patch.object(baselines, "accuracy", note):
        assert accuracy_by_lengths(store, pairs) == 1.5
    one, other = fits
    assert (one == ~other).all() and 0.2 < one.mean() < 0.8
    assert not set(document[one]) & set(document[other])
