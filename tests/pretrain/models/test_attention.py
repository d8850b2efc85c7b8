"""Attention in groups, and by the kernel of a GPU, is attention, padding and all, and dropout drops
as often as it should."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from card import register_kernels
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from data_pipeline.config_file import load_config
from data_pipeline.sampling.batches import Batch
from pretrain.config import Config, ModelConfig
from pretrain.models import attention, cpu
from pretrain.models.attention import (
    attend,
    attend_on_gpu,
    attend_padded,
    attend_varlen,
    has_varlen,
)
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import model_of
from pretrain.models.cpu import LENGTH_MULTIPLE, AttendGroups, Dropout, dropout_noise, lay_out

LENGTHS = (3, 9, 5, 9, 8, 1)


def tokens(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS), *shape, generator=generator, dtype=torch.float64)


def plain(qkv: torch.Tensor) -> torch.Tensor:
    """Attention by the book, one sequence and one head after the other."""
    out = []
    for sequence in qkv.split(LENGTHS):
        heads = []
        for q, k, v in zip(*sequence.permute(1, 2, 0, 3), strict=True):
            heads.append((q @ k.t() / q.shape[-1] ** 0.5).softmax(1) @ v)
        out.append(torch.stack(heads, 1))
    return torch.cat(out)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_every_token_has_a_place_of_its_own_in_the_row_of_its_sequence(lengths) -> None:
    layout = lay_out(tuple(lengths))
    assert len(set(layout.places.tolist())) == sum(lengths)
    assert all(0 <= place < sum(layout.sizes) for place in layout.places.tolist())
    starts = []
    for places in layout.places.split(lengths):
        assert places.diff().unique().tolist() in ([], [1])
        starts.append(places[0].item())
    row, found = 0, []
    for group in layout.groups:
        for i in range(group.count):
            length = lengths[starts.index(row)]
            found.append(length)
            assert length <= group.length and group.length % LENGTH_MULTIPLE == 0
            if group.bias is None:
                assert length == group.length
            else:
                assert group.bias[i].flatten().isfinite().sum() == length
            row += group.length
    assert sorted(found) == sorted(lengths)


@pytest.mark.parametrize("filler", [0, 7])
@pytest.mark.parametrize("group_tokens", [1, 18, 960])  # groups of one, of two, of all
def test_attention_in_groups_is_attention_by_the_book(filler, group_tokens, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "GROUP_TOKENS", group_tokens)
    lay_out.cache_clear()
    layout, qkv = lay_out(LENGTHS), tokens(3, 2, 4).requires_grad_()
    assert len(layout.groups) == {1: 6, 18: 3, 960: 1}[group_tokens]
    found = AttendGroups.apply(F.pad(qkv, (0, 0, 0, 0, 0, 0, 0, filler)), layout, 0.0)
    assert len(found) == len(qkv) + filler and (found[len(qkv) :] == 0).all()
    found, wanted = found[: len(qkv)], plain(qkv)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    what = tokens(2, 4)
    (a,), (b,) = (torch.autograd.grad(out, qkv, what) for out in (found, wanted))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_attention_with_dropout_is_that_of_finite_differences() -> None:
    lay_out.cache_clear()
    layout, qkv = lay_out(LENGTHS), tokens(3, 2, 4).requires_grad_()

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # the same draws each time
        return AttendGroups.apply(qkv, layout, 0.3)

    assert not torch.allclose(attend(qkv), plain(qkv))
    assert torch.autograd.gradcheck(attend, qkv)


# --------------------------------------------------------------------------- the path of a GPU

VOCABULARY = 40
SMALL = ModelConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=200,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> Iterator[torch.device]:
    """A GPU, and a CPU that takes its path by reference kernels."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    library = register_kernels()
    monkeypatch.setattr("pretrain.models.layers.attend", attend_on_gpu)
    hopper = torch.compiler.assume_constant_result(lambda: 9)
    monkeypatch.setattr("pretrain.models.attention.gpu_generation", hopper)
    monkeypatch.setattr("pretrain.models.bert.TOKEN_MULTIPLE", 1)
    monkeypatch.setattr(Dropout, "forward", nn.Dropout.forward)
    yield torch.device(request.param)
    library._destroy()


def batch_of(*lengths: int) -> Batch:
    """Sequences of these lengths, with every fifth token masked."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(len(sequence)) - cu_seqlens[sequence]
    ids = torch.randint(5, VOCABULARY, position.shape)
    masked = torch.arange(0, len(ids), 5)
    labels = ids[masked], torch.arange(len(lengths)) % 2
    return Batch(
        ids, position % 2, position, sequence, cu_seqlens, masked, *labels, max_length=max(lengths)
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("lengths", [(3, 9, 5, 9, 8, 1), (130, 7, 200, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_a_gpu_is_attention_in_float64(device, dtype, lengths) -> None:
    torch.manual_seed(0)
    batch, exact = batch_of(*lengths), torch.randn(sum(lengths), 3, 2, 16, dtype=torch.float64)
    qkv, exact = exact.to(device, dtype, copy=True).requires_grad_(), exact.requires_grad_()
    found, wanted = attend_varlen(qkv, batch.to(device), 0.0), attend_padded(exact, batch, 0.0)
    what = torch.randn_like(wanted)
    (a,), (b,) = (
        torch.autograd.grad(found, qkv, what.to(found)),
        torch.autograd.grad(wanted, exact, what),
    )
    assert relative_error(found, wanted) < 1e-2 and relative_error(a, b) < 1e-2


def test_dropout_of_the_kernel_is_of_the_seed_and_keeps_the_mean(device) -> None:
    torch.manual_seed(0)
    batch, draws = batch_of(3, 9, 5, 40), []
    qkv = torch.randn(57, 3, 2, 16).to(device, torch.bfloat16).requires_grad_()
    batch = batch.to(device)
    what = torch.randn(57, 2, 16).to(qkv)

    def draw(seed: int, dropout: float) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        out = attend_varlen(qkv, batch, dropout)
        return out.detach().double(), torch.autograd.grad(out, qkv, what)[0].double()

    assert all(map(torch.equal, draw(1, 0.2), draw(1, 0.2)))
    assert not torch.equal(draw(1, 0.2)[0], draw(2, 0.2)[0])
    draws = [draw(seed, 0.2) for seed in range(200)]
    for found, wanted in zip(zip(*draws, strict=True), draw(0, 0.0), strict=True):
        mean, one = torch.stack(found).mean(0), found[0]
        # the error of a mean of 200 is a fourteenth of that of one
        assert (mean - wanted).norm() < (one - wanted).norm() / 10


def test_compiled_layers_with_dropout_are_two_graphs_to_train_and_two_to_evaluate(device) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    plain = PretrainingModel(SMALL, VOCABULARY).to(device)
    compiled = PretrainingModel(SMALL, VOCABULARY).to(device)
    compiled.load_state_dict(plain.state_dict())
    compiled.compile_layers(backend="aot_eager")
    for lengths in ((9, 30, 4), (11, 3), (150, 20, 7, 7)):
        batch, found = batch_of(*lengths).to(device), []
        for model in (plain, compiled):
            model.zero_grad()
            torch.manual_seed(1)
            with torch.autocast(device.type, torch.bfloat16):
                losses = model(batch)[:, 0]
            losses.sum().backward()
            found.append((losses.detach(), *(p.grad for p in model.parameters())))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        with torch.autocast(device.type, torch.bfloat16):
            compiled.eval().score(batch_of(5, 17, len(lengths)).to(device))
        compiled.train()
    # the last layer, which computes on fewer tokens, has a graph of its own
    assert counters["stats"]["unique_graphs"] == 4


def test_no_layer_is_left_uncompiled_although_torch_makes_eight_graphs_by_default(
    device, monkeypatch
) -> None:
    """An ELECTRA of two widths, in float32, where a single sequence is padded in a way of its own:
    to train and to evaluate, first layers and the last one have 2 x 2 x 2 graphs and more."""
    from torch._dynamo.utils import counters

    old = torch.compiler.assume_constant_result(lambda: 7)
    monkeypatch.setattr("pretrain.models.attention.gpu_generation", old)
    torch._dynamo.reset()
    counters.clear()
    model = model_of(replace(SMALL, architecture="electra"), VOCABULARY, "none").to(device)
    model.compile_layers(backend="eager")
    for lengths in ((9, 30, 4), (11, 3), (50,), (9,)):
        model(batch_of(*lengths).to(device))[:, 0].sum().backward()
        model.eval().score(batch_of(*lengths).to(device))
        model.train()
    assert counters["stats"]["unique_graphs"] > 8


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradient_checkpointing_draws_the_same_dropout_in_the_kernel(device, is_compiled) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, grads = PretrainingModel(SMALL, VOCABULARY).to(device), []
    if is_compiled:
        model.compile_layers(backend="aot_eager")
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        with torch.autocast(device.type, torch.bfloat16):
            model(batch_of(9, 30, 4).to(device))[:, 0].sum().backward()
        grads.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


def test_only_float32_and_odd_heads_are_padded_on_a_gpu(monkeypatch) -> None:
    taken = []
    for path in ("varlen", "padded"):
        monkeypatch.setattr(attention, f"attend_{path}", lambda *_, path=path: taken.append(path))
    gpu, turing = 9, 7
    for generation, dtype, size in (
        *((gpu, torch.bfloat16, 64), (gpu, torch.float16, 128), (gpu, torch.float32, 64)),
        *((gpu, torch.bfloat16, 20), (gpu, torch.bfloat16, 256), (turing, torch.float16, 64)),
    ):
        monkeypatch.setattr(attention, "gpu_generation", lambda generation=generation: generation)
        attend(torch.empty(7, 3, 2, size, dtype=dtype, device="meta"), None, 0.1)
    assert taken == ["varlen"] * 2 + ["padded"] * 4


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_takes_the_kernel_of_a_gpu(recipe) -> None:
    model = load_config(Config, str(recipe)).model
    size = model.hidden_size // model.num_attention_heads
    assert has_varlen(torch.bfloat16, size, 8)


# ---------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_noise_drops_as_often_as_asked_everywhere_and_keeps_the_mean(p) -> None:
    torch.manual_seed(0)
    size = 400_003  # no multiple of the four that are drawn at once
    noise = dropout_noise(torch.empty(size), p)
    kept = noise != 0
    values = noise[kept].unique()
    assert len(values) == 1 and abs(values.item() * (1 - p) - 1) < 1e-4
    error = 5 * (p * (1 - p) / (size / 4)) ** 0.5  # standard errors
    for lane in range(4):  # each has other bits of a draw
        assert abs(kept[lane::4].double().mean() - (1 - p)) < error
    both = (kept[1:] & kept[:-1]).double().mean()  # neighbours know nothing of each other
    assert abs(both - (1 - p) ** 2) < error


def test_noise_is_of_the_seed_and_of_the_shape_and_type_of_what_it_is_for() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(dropout_noise(torch.empty(3, 5, 7, dtype=torch.bfloat16), 0.5))
    assert draws[0].shape == (3, 5, 7) and draws[0].dtype == torch.bfloat16
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_dropout_multiplies_by_noise_in_train_mode_and_the_gradient_too() -> None:
    x = torch.randn(50, 8, requires_grad=True)
    layer = Dropout(0.25)
    assert layer.eval()(x) is x and Dropout(0.0).train()(x) is x
    out = layer.train()(x)
    kept = out != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.75)
