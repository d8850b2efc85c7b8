"""Attention in groups is attention, padding and all, and dropout drops as often as it should."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pretrain.models import cpu
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
