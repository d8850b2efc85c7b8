"""A sample of the vocabulary estimates the loss of all of it: right on average, and a part of a
training step only."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import NO_DROPOUT, assert_same_run, newest, train_here
from test_loss import VOCAB, inputs

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from pretrain.config import ModelConfig
from pretrain.loss import linear_cross_entropy
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import objectives_of
from pretrain.sampled_softmax import (
    draw_sample,
    sample_chances,
    sample_start,
    sampled_cross_entropy,
    take_sample,
)

COUNTS = (1e6 / torch.arange(1, VOCAB + 1)).floor()  # Zipf's
SIZE, DRAWS = 100, 4000
SMALL = ModelConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
)


def estimate(x, weight, bias, labels, chances, start: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the loss of labels, each predicted by its own row of x."""
    sample = take_sample(weight, bias, labels, chances, start)
    return sampled_cross_entropy(x, torch.arange(len(labels)), sample)


def test_chances_add_up_to_the_size_and_fall_with_the_root_of_the_frequency() -> None:
    chances = sample_chances(COUNTS, SIZE)
    assert chances.sum() == pytest.approx(SIZE) and chances.max() <= 1
    assert (chances.diff() <= 0).all()
    rare = chances < 1 - 1e-9
    assert 0 < rare.sum() < VOCAB
    roots = (COUNTS.double() + 0.1 * COUNTS.double().mean()).sqrt()[rare]
    torch.testing.assert_close(chances[rare] / chances[-1], roots / roots[-1])
    # of tokens that the corpus lacks, too
    assert sample_chances(torch.tensor([0, 0, 1e9]), 2).min() == pytest.approx(0.5)
    assert torch.equal(sample_chances(COUNTS, VOCAB), torch.ones(VOCAB).double())


def test_each_token_is_drawn_once_at_most_and_as_often_as_its_chance_says() -> None:
    torch.manual_seed(0)
    chances, found = sample_chances(COUNTS, SIZE), torch.zeros(VOCAB)
    for _ in range(DRAWS):
        sample = draw_sample(chances, torch.rand(()).item())
        assert abs(len(sample) - SIZE) <= 1 and (sample.diff() > 0).all()
        found[sample] += 1
    errors = (DRAWS * chances * (1 - chances)).sqrt()
    # five standard errors: of 301 tokens one in 6,000 tests would be beyond
    assert ((found - DRAWS * chances).abs() <= 5 * errors + 1e-6).all()


def test_a_sample_of_all_tokens_gives_the_loss_and_its_gradients() -> None:
    tensors = inputs()
    chances = torch.ones(VOCAB).double()
    found, right = estimate(*tensors, chances, 0.5)
    wanted, wanted_right, _ = linear_cross_entropy(*tensors)
    torch.testing.assert_close(found, wanted)
    assert right == wanted_right
    grads = [torch.autograd.grad(loss, tensors[:3]) for loss in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_the_sum_of_the_softmax_is_right_on_average_and_so_nearly_is_the_gradient() -> None:
    torch.manual_seed(0)
    x, weight, bias, labels = inputs(1)
    wanted, *_ = linear_cross_entropy(x, weight, bias, labels)
    gradient = torch.autograd.grad(wanted, weight)[0]
    chances, sums, total = sample_chances(COUNTS, SIZE), [], torch.zeros_like(weight)
    for _ in range(DRAWS):
        loss, _ = estimate(x, weight, bias, labels, chances, torch.rand(()).item())
        sums.append(loss.detach().exp())  # the sum over the label's part of it
        total += torch.autograd.grad(loss, weight)[0]
    sums = torch.stack(sums)
    error = sums.std() / math.sqrt(DRAWS)
    assert 0 < error and abs(sums.mean() - wanted.exp()) < 5 * error
    assert (total / DRAWS - gradient).norm() < 0.1 * gradient.norm()


def test_a_label_in_the_sample_counts_once_and_others_do_not_see_it_missing() -> None:
    x, weight, bias, labels = inputs()
    chances = torch.zeros(VOCAB).double()
    chances[:50] = 1
    found, _ = estimate(x, weight, bias, labels, chances, 0.5)
    wanted = 0.0
    for row, label in zip(x, labels.tolist(), strict=True):
        tokens = sorted({*range(50), label})
        scores = weight[tokens] @ row + bias[tokens]
        wanted -= scores.log_softmax(0)[tokens.index(label)].item()
    assert found.item() == pytest.approx(wanted)


def test_a_label_is_right_if_it_scores_as_high_as_the_sample_whatever_their_chances() -> None:
    x, weight, bias, labels = (tensor.detach() for tensor in inputs())
    bias[:] = 0  # rows that fill x up would have scores as high
    chances = torch.linspace(0.2, 0.8, VOCAB).double()
    _, right = estimate(x, weight, bias, labels, chances, 0.5)
    scores = x @ weight.T
    highest = scores[:, draw_sample(chances, 0.5)].amax(1)
    assert right == (scores.gather(1, labels[:, None])[:, 0] >= highest).sum()


def test_training_samples_and_evaluation_scores_all(store, vocabulary) -> None:
    model = PretrainingModel(SMALL, len(vocabulary))
    batch = BatchSource(store, PairsConfig(max_seq_length=48), seed=5).batch(0, 6)
    everything, wanted = model(batch)[0], model.score(batch)[0]
    operations = model.count_flops(batch)
    model.sample_chances = sample_chances(torch.ones(model.vocab_size), 100)
    first = model(batch)[0]
    assert torch.equal(model(batch)[0], first)
    model.sample_start = 0.5
    assert len({row[0].item() for row in (everything, first, model(batch)[0])}) == 3
    assert first[2] == everything[2] and abs(first[0] / everything[0] - 1) < 0.1
    assert torch.equal(model.score(batch)[0], wanted)
    assert torch.equal(model.eval()(batch)[0], everything)
    left_out = 6 * len(batch.masked_labels) * (model.vocab_size - 101) * 32
    assert model.count_flops(batch) == operations - left_out


def test_rows_that_predict_several_labels_have_the_loss_of_each() -> None:
    x, weight, bias, labels = inputs()
    rows = torch.arange(len(labels)) // 3
    chances = sample_chances(COUNTS, SIZE)
    found, right = sampled_cross_entropy(x, rows, take_sample(weight, bias, labels, chances, 0.5))
    wanted, wanted_right = estimate(x[rows], weight, bias, labels, chances, 0.5)
    torch.testing.assert_close(found, wanted)
    assert right == wanted_right
    grads = [torch.autograd.grad(loss, (x, weight, bias)) for loss in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_bag_of_words_is_estimated_from_the_same_sample(store, vocabulary) -> None:
    model = PretrainingModel(SMALL, len(vocabulary), objectives_of("nsp", 0.5))
    batch = BatchSource(store, PairsConfig(max_seq_length=48), seed=5).batch(0, 6)
    everything = model(batch)[-1]
    model.sample_chances = torch.ones(model.vocab_size).double()
    torch.testing.assert_close(model(batch)[-1], everything, rtol=1e-5, atol=0)
    model.sample_chances = sample_chances(torch.ones(model.vocab_size), 300)
    losses = []
    for i in range(50):
        model.sample_start = i / 50
        losses.append(model(batch)[-1, 0].item())
    assert len(set(losses)) > 1
    # the spread of one draw is 0.3 %, and the log of a sum is biased by far less
    assert sum(losses) / 50 == pytest.approx(everything[0].item(), rel=2e-3)


def test_a_step_has_one_sample_however_it_is_divided(prepared: Path, tmp_path: Path) -> None:
    starts = [sample_start(seed, step) for seed in range(5) for step in range(200)]
    assert len(set(starts)) == 1000 and 0 <= min(starts) < 0.01 and 0.99 < max(starts) < 1
    options = ("train.max_steps=2", "train.warmup_steps=1", "train.sampled_softmax=100")
    for size in (16, 4):
        train_here(
            prepared, tmp_path / str(size), *options, *NO_DROPOUT, f"train.micro_batch_size={size}"
        )
    one, other = newest(tmp_path / "16"), newest(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_resumed_run_draws_the_same_samples_and_the_size_is_part_of_the_fingerprint(
    prepared: Path, tmp_path: Path
) -> None:
    sampled = ["train.sampled_softmax=300", "train.bag_of_words_weight=0.5"]
    train_here(prepared, tmp_path / "a", *sampled)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000012")
    with pytest.raises(UserError, match="sampled_softmax was 300, is 0"):
        train_here(prepared, tmp_path / "b", sampled[1])
    train_here(prepared, tmp_path / "b", *sampled)
    assert_same_run(tmp_path / "a", tmp_path / "b")
