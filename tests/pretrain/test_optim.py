"""The learning rate, which parameters decay, one step of AdamW by hand, and sums into metrics."""

import math
from dataclasses import replace

import pytest
import torch

from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig, TrainConfig
from pretrain.metrics import Clock, peak_flops, to_metrics
from pretrain.models.bert import PretrainingModel
from pretrain.models.cpu import lay_out
from pretrain.objectives import ROW, MaskedLM, SentencePairs, objectives_of
from pretrain.optim import build_optimizers, learning_rate, skips_there, update

TINY = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
TRAIN = TrainConfig(max_steps=100, warmup_steps=10, learning_rate=3e-3, weight_decay=0.1)


def build_model() -> PretrainingModel:
    torch.manual_seed(0)
    return PretrainingModel(TINY, 64)


def fill_gradients(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------ learning rate


def test_learning_rate_climbs_to_its_top_and_falls_to_nothing() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, TRAIN)

    assert rate(0) == pytest.approx(3e-3 / 10)  # not 0: the first update counts
    assert rate(4) == pytest.approx(3e-3 / 2)
    assert rate(9) == pytest.approx(3e-3)  # end of the warm-up
    assert rate(10) == pytest.approx(3e-3)
    assert rate(55) == pytest.approx(3e-3 / 2)
    assert rate(99) == pytest.approx(3e-3 / 90)  # the last update
    assert rate(100) == 0


def test_learning_rate_rises_in_the_warm_up_and_falls_after_it() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(101)]
    assert all(a < b for a, b in zip(rates[:10], rates[1:10], strict=False))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert min(rates[:100]) > 0 and max(rates) == pytest.approx(3e-3)
    rising = {round(b - a, 12) for a, b in zip(rates[:9], rates[1:10], strict=True)}
    falling = {round(a - b, 12) for a, b in zip(rates[10:-1], rates[11:], strict=True)}
    assert len(rising) == len(falling) == 1  # both pieces are straight


def test_learning_rate_without_warm_up_starts_at_its_top() -> None:
    train = replace(TRAIN, warmup_steps=0)
    assert learning_rate(0, train) == 3e-3
    assert learning_rate(50, train) == pytest.approx(1.5e-3)
    assert learning_rate(99, train) == pytest.approx(3e-5)


SCHEDULES = {
    "linear": TRAIN,
    "cosine": replace(TRAIN, schedule="cosine"),
    "polynomial": replace(TRAIN, schedule="polynomial"),
    "trapezoid": replace(TRAIN, schedule="trapezoid", decay_steps=30),
}


@pytest.mark.parametrize("train", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_is_whole_where_the_warm_up_ends_and_never_climbs_again(train) -> None:
    """NVIDIA's polynomial falls at once to 0.85 of the top there, after a warm-up of 28 %."""
    train.validate()
    rates = [learning_rate(step, train) for step in range(101)]
    assert rates[9] == rates[10] == max(rates) == pytest.approx(3e-3)
    assert all(a >= b > 0 for a, b in zip(rates[10:], rates[11:100], strict=False))
    assert rates[100] == 0


@pytest.mark.parametrize(
    "name, shares",  # of the top, at half, at four fifths of the steps after the warm-up
    [
        ("linear", (0.5, 0.2)),
        ("cosine", (0.5, (1 + math.cos(0.8 * math.pi)) / 2)),
        ("polynomial", (math.sqrt(0.5), math.sqrt(0.2))),
        ("trapezoid", (1.0, 18 / 30)),
    ],
)
def test_the_decay_of_a_schedule_is_the_one_of_its_name(name: str, shares) -> None:
    train = SCHEDULES[name]
    for step, share in zip((55, 82), shares, strict=True):
        assert learning_rate(step, train) == pytest.approx(3e-3 * share)


def test_a_polynomial_of_power_one_is_linear() -> None:
    polynomial = replace(TRAIN, schedule="polynomial", decay_power=1)
    for step in range(101):
        assert learning_rate(step, polynomial) == pytest.approx(learning_rate(step, TRAIN))


# --------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_every_trainable_parameter_is_in_one_optimizer_and_biases_and_norms_do_not_decay(
    optimizer,
) -> None:
    model = build_model()
    names = {id(p): name for name, p in model.named_parameters()}
    decay: dict[str, float] = {}
    for one in build_optimizers(model, replace(TRAIN, optimizer=optimizer)):
        for group in one.param_groups:
            for p in group["params"]:
                assert names[id(p)] not in decay, "twice"
                decay[names[id(p)]] = group["weight_decay"]
    assert decay.keys() == set(names.values())
    for name, value in decay.items():
        wanted = 0.0 if name.endswith("bias") or "norm" in name else 0.1
        assert value == wanted, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_an_update_sets_the_learning_rate_of_all_parameters(optimizer: str) -> None:
    model = build_model()
    optimizers = build_optimizers(model, replace(TRAIN, optimizer=optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    fill_gradients(model, 0)
    update(optimizers, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("skips_there", [False, True])  # on a GPU, where AdamW skips by itself
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_no_update_follows_a_gradient_whose_norm_is_not_finite(
    norm: float, skips_there: bool, monkeypatch
) -> None:
    monkeypatch.setattr("pretrain.optim.skips_there", lambda *_: skips_there)
    model = build_model()
    optimizers = build_optimizers(model, TRAIN)
    before = [p.detach().clone() for p in model.parameters()]
    fill_gradients(model, 0)
    for found, is_same in ((norm, True), (1.0, False)):
        update(optimizers, 0.1, torch.tensor([found]))
        both = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(a, b) == is_same for a, b in both)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_only_adamw_alone_and_on_a_gpu_skips_by_itself(optimizer: str) -> None:
    """Beside Muon, which would take the step, it must not."""
    optimizers = build_optimizers(build_model(), replace(TRAIN, optimizer=optimizer))
    found = [skips_there(optimizers, device) for device in ("cpu", "cuda")]
    assert found == [False, optimizer == "adamw"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_gradients_of_zero_leave_finite_weights(optimizer: str) -> None:
    """As those of a first step without labels, which have no direction."""
    model = build_model()
    optimizers = build_optimizers(model, replace(TRAIN, optimizer=optimizer))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update(optimizers, 0.1)
    assert all(p.isfinite().all() for p in model.parameters())


def test_muon_takes_the_matrices_of_the_encoder_and_adamw_the_rest() -> None:
    model = build_model()
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = build_optimizers(model, replace(TRAIN, optimizer="muon"))
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    parts = [f"attention.{name}" for name in ("query", "key", "value", "out")]
    matrices = (*parts, "up", "down")
    assert taken == {f"layers.{n}.{name}.weight" for n in range(2) for name in matrices}
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_frozen_parameters_are_in_no_optimizer(optimizer) -> None:
    model = build_model()
    model.pooler.requires_grad_(False)
    model.nsp.requires_grad_(False)
    frozen = {id(p) for part in (model.pooler, model.nsp) for p in part.parameters()}
    optimizers = build_optimizers(model, replace(TRAIN, optimizer=optimizer))
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} - frozen


# -------------------------------------------------------------------------------------- steps


def test_three_steps_are_those_of_adamw_written_by_hand() -> None:
    model = build_model()
    train = replace(TRAIN, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-3)
    (optimizer,) = build_optimizers(model, train)
    wanted = {name: p.detach().double() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in wanted.items()}
    v = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for step in range(3):
        gradients = fill_gradients(model, seed=step)
        rate = learning_rate(step, train)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, gradient in gradients.items():
            g = gradient.double()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            mean = m[name] / (1 - 0.8 ** (step + 1))
            root = (v[name] / (1 - 0.95 ** (step + 1))).sqrt()
            decay = 0.0 if name.endswith("bias") or "norm" in name else 0.1
            wanted[name] = wanted[name] * (1 - rate * decay) - rate * mean / (root + 1e-3)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), wanted[name], rtol=1e-5, atol=1e-7)


def plain_norm(values: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in values))


def plain_lamb_step(w, g, m, v, t, rate, decay) -> list[float]:
    """Algorithm 2 of You et al. 2020 on one flat parameter, a number at a time; betas 0.8 and 0.95,
    epsilon 1e-3; m and v are changed in place. Without decay the ratio is 1."""
    for i, x in enumerate(g):
        m[i] = 0.8 * m[i] + (1 - 0.8) * x
        v[i] = 0.95 * v[i] + (1 - 0.95) * x * x
    r = [
        a / (1 - 0.8**t) / (math.sqrt(b / (1 - 0.95**t)) + 1e-3) for a, b in zip(m, v, strict=True)
    ]
    update = [x + decay * y for x, y in zip(r, w, strict=True)]
    ratio = 1.0
    if decay and plain_norm(w) and plain_norm(update):
        ratio = plain_norm(w) / plain_norm(update)
    return [y - rate * ratio * x for x, y in zip(update, w, strict=True)]


def test_five_steps_are_those_of_lamb_written_out() -> None:
    """With a matrix of zeros, which has no norm, and one that neither is nor moves."""
    model = build_model()
    zero, still = model.layers[0].up.weight, model.layers[1].up.weight
    with torch.no_grad():
        zero.zero_()
        still.zero_()
    train = replace(TRAIN, optimizer="lamb", adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-3)
    (optimizer,) = build_optimizers(model, train)
    w = {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
    m, v = ({name: [0.0] * len(x) for name, x in w.items()} for _ in range(2))
    for step in range(5):
        fill_gradients(model, seed=step)
        still.grad.zero_()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.01 / (step + 1)
        for name, p in model.named_parameters():
            decay = 0.0 if name.endswith("bias") or "norm" in name else 0.1
            g, rate = p.grad.flatten().tolist(), 0.01 / (step + 1)
            w[name] = plain_lamb_step(w[name], g, m[name], v[name], step + 1, rate, decay)
        optimizer.step()
    for name, p in model.named_parameters():
        wanted = torch.tensor(w[name], dtype=torch.float64).view_as(p)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-7)
    assert zero.any() and not still.any()


def test_a_parameter_that_lamb_meets_late_moves_as_in_a_new_run() -> None:
    """As the pair heads do where pairs begin after a phase of single segments."""
    late, fresh = build_model(), build_model()
    heads = ["pooler.weight", "pooler.bias", "nsp.weight", "nsp.bias"]
    start = {name: fresh.get_parameter(name).detach().clone() for name in heads}
    train = replace(TRAIN, optimizer="lamb")
    lambs = [build_optimizers(model, train)[0] for model in (late, fresh)]
    for step in range(50):
        fill_gradients(late, seed=step)
        for name in heads:
            late.get_parameter(name).grad = None
        lambs[0].step()
    for step in range(3):
        for model, lamb in zip((late, fresh), lambs, strict=True):
            fill_gradients(model, seed=step)
            lamb.step()
    for name in heads:
        moved = late.get_parameter(name)
        assert not torch.equal(moved, start[name])
        torch.testing.assert_close(moved, fresh.get_parameter(name), rtol=1e-6, atol=0)


def test_lamb_moves_a_matrix_by_the_learning_rate_times_its_norm() -> None:
    model = build_model()
    (lamb,) = build_optimizers(model, replace(TRAIN, optimizer="lamb"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model, seed=0)
    lamb.step()
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).norm().item()
        norm = before[name].norm().item() if p.dim() > 1 else p.numel() ** 0.5  # Adam's signs
        assert moved == pytest.approx(3e-3 * norm, rel=1e-3), name


def test_three_steps_of_muon_are_those_of_torch_to_the_bit() -> None:
    train = replace(TRAIN, optimizer="muon")
    models = build_model(), build_model()
    models[1].load_state_dict(models[0].state_dict())
    muon, _ = build_optimizers(models[0], train)
    matrices = [p for p in models[1].layers.parameters() if p.dim() == 2]
    rates = {"lr": 3e-3, "weight_decay": train.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    peer = torch.optim.Muon(matrices, **rates)
    for step in range(3):
        for model in models:
            fill_gradients(model, seed=step)
            model.layers[1].up.weight.grad = None  # as where nothing has used it
        muon.step()
        peer.step()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name
        assert muon.state[p].keys() == peer.state[q].keys()


def test_muon_in_float32_moves_every_matrix_as_in_bf16_but_for_rounding() -> None:
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model()
        before = [p.detach().clone() for p in model.layers.parameters()]
        muon, _ = build_optimizers(model, replace(TRAIN, optimizer="muon"), dtype)
        fill_gradients(model, seed=0)
        muon.step()
        pairs = zip(model.layers.parameters(), before, strict=True)
        moved.append([(p.detach() - q).double() for p, q in pairs if p.dim() == 2])
    for exact, rounded in zip(*moved, strict=True):
        assert not torch.equal(exact, rounded)
        assert (exact - rounded).norm() < 0.05 * exact.norm()
        singular = torch.linalg.svdvals(exact)
        assert singular.max() < 2 * singular.min()  # none is left small, as they are in a gradient


def test_a_step_of_muon_moves_every_matrix_by_about_one_learning_rate_an_entry() -> None:
    """`match_rms_adamw`: a root mean square of 0.2 learning rates, whatever the shape."""
    model = build_model()
    muon, _ = build_optimizers(model, replace(TRAIN, optimizer="muon", weight_decay=0.0))
    before = {name: p.detach().clone() for name, p in model.layers.named_parameters()}
    fill_gradients(model, seed=0)
    muon.step()
    for name, p in model.layers.named_parameters():
        moved = (p.detach() - before[name]).square().mean().sqrt() / 3e-3
        if p.dim() == 2:
            assert 0.1 < moved < 0.3, name
        else:
            assert moved == 0, name


# ------------------------------------------------------------------------------------ metrics


def plain_sums(scores, labels) -> tuple[float, int]:
    """Summed cross-entropy and right ones, one row at a time in Python's own floats."""
    loss, right = 0.0, 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        top = max(row)
        loss += top + math.log(sum(math.exp(x - top) for x in row)) - row[label]
        right += row.index(top) == label
    return loss, right


def test_rows_of_several_batches_add_up_to_means_over_tokens_and_pairs(store) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
    )
    model = PretrainingModel(replace(config, initializer_range=0.3), len(store.vocabulary)).eval()
    source = BatchSource(store, PairsConfig(max_seq_length=64), seed=0)
    sums, wanted = torch.zeros(2, ROW, dtype=torch.float64), [[0.0] * ROW for _ in "ab"]
    for start, count in ((0, 6), (6, 4)):
        batch = source.batch(start, count)
        mlm, nsp = model.logits(batch)
        for i in range(0, len(mlm), 3):  # every third is right
            batch.masked_labels[i] = mlm[i].argmax()
        sums += model(batch).detach()
        for i, (scores, labels) in enumerate(
            ((mlm, batch.masked_labels), (nsp, batch.next_sentence_label))
        ):
            found = (*plain_sums(scores, labels), len(labels))
            wanted[i] = [a + b for a, b in zip(wanted[i], found, strict=True)]
    for found, expected in zip(sums.tolist(), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    (mlm, mlm_right, masked), (nsp, nsp_right, pairs) = wanted
    assert pairs == 10 and 0 < mlm_right < masked
    assert to_metrics(sums, "eval", objectives_of("nsp")) == pytest.approx(
        {
            "eval/mlm_loss": mlm / masked,
            "eval/mlm_accuracy": mlm_right / masked,
            "eval/nsp_loss": nsp / 10,
            "eval/nsp_accuracy": nsp_right / 10,
            "eval/loss": mlm / masked + nsp / 10,
        },
        rel=1e-5,
    )


def test_without_pairs_to_judge_there_are_no_nsp_metrics() -> None:
    sums = torch.tensor([[6.0, 2.0, 3.0]], dtype=torch.float64)
    assert to_metrics(sums, "train", objectives_of("none")) == pytest.approx(
        {"train/mlm_loss": 2.0, "train/mlm_accuracy": 2 / 3, "train/loss": 2.0}
    )


def test_without_masked_tokens_the_metrics_are_zero_and_not_nan() -> None:
    sums = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    metrics = to_metrics(sums, "train", objectives_of("nsp"))
    assert metrics["train/mlm_loss"] == metrics["train/mlm_accuracy"] == 0
    assert metrics["train/loss"] == 0.5
    nothing = to_metrics(torch.zeros(2, ROW), "train", objectives_of("nsp"))
    assert all(math.isnan(value) for value in nothing.values())


def test_an_objective_counts_by_its_weight() -> None:
    heavy = (MaskedLM(), SentencePairs(weight=3.0))
    sums = torch.tensor([[6.0, 2.0, 3.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    assert to_metrics(sums, "train", heavy)["train/loss"] == 2.0 + 3 * 0.5


def test_only_losses_have_a_gradient(store) -> None:
    model = PretrainingModel(TINY, len(store.vocabulary))
    rows = model(BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 4))
    (gradient,) = torch.autograd.grad(rows[:, 1:].sum(), model.mlm.bias, allow_unused=True)
    assert gradient is None or not gradient.any()


# -------------------------------------------------------------------------------------- speed


def test_counted_operations_are_those_of_a_step_without_any_padding(store, monkeypatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("models.bert", "models.layers", "loss"):
        monkeypatch.setattr(f"pretrain.{name}.fill_rows", lambda x, multiple=1: x)
    monkeypatch.setattr("pretrain.models.cpu.LENGTH_MULTIPLE", 1)
    monkeypatch.setattr("pretrain.models.cpu.GROUP_TOKENS", 1)  # each sequence by itself
    lay_out.cache_clear()
    config = replace(TINY, hidden_size=32, intermediate_size=48, attention_probs_dropout_prob=0.0)
    model = PretrainingModel(config, len(store.vocabulary))
    batch = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 6)
    with FlopCounterMode(display=False) as counter:
        model(batch)[:, 0].sum().backward()
    assert model.count_flops(batch) == counter.get_total_flops()


def test_speed_counts_real_tokens_of_all_processes_and_mfu_the_mean_of_their_cards() -> None:
    clock = Clock(world_size=4, peak=1e6)
    one = torch.ones(7, dtype=torch.int64)
    batch = Batch(one, one, one, one, one, one, one, torch.ones(2), 1)
    clock.started -= 10.0
    # the batches of this process have 4 of 16 sequences, and then 2 of 7
    assert list(clock.waiting([([batch, batch], 1000, 16), ([batch], 500, 7)])) == [
        [batch, batch],
        [batch],
    ]
    speed = clock.speed()
    assert speed["perf/tokens_per_second"] == pytest.approx((16 + 7) * 3.5 / 10, rel=0.01)
    assert speed["perf/sequences_per_second"] == pytest.approx((16 + 7) / 10, rel=0.01)
    flops = (16 + 7) * 250
    assert speed["perf/tflops"] == pytest.approx(flops / 10 / 1e12, rel=0.01)
    assert speed["perf/mfu"] == pytest.approx(flops / 4 / 10 / 1e6, rel=0.01)
    assert 1e7 < speed["perf/memory_gb"] * 1e9 < 1e12


def test_what_pauses_a_run_is_a_share_of_its_time_and_none_of_its_rates(monkeypatch) -> None:
    times = iter([0.0, 10.0, 14.0, 20.0, 20.0, 25.0, 25.0])
    monkeypatch.setattr("pretrain.metrics.time.perf_counter", lambda: next(times))
    clock = Clock(world_size=1)
    clock.tokens = 160
    with clock.paused():  # from 10 to 14
        pass
    speed = clock.speed()
    assert speed["perf/paused"] == pytest.approx(4 / 20)
    assert speed["perf/tokens_per_second"] == pytest.approx(160 / 16)
    assert clock.speed()["perf/paused"] == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_card_is_that_of_its_kind(monkeypatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
