"""Cross-entropy in chunks is cross-entropy, and the scores of all rows are never there at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain import loss
from pretrain.loss import linear_cross_entropy

ROWS, SIZE, VOCAB = 37, 24, 301


def inputs(rows: int = ROWS, kind: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, SIZE, generator=generator, dtype=kind)
    weight = torch.randn(VOCAB, SIZE, generator=generator, dtype=kind)
    bias = torch.randn(VOCAB, generator=generator, dtype=kind)
    labels = torch.randint(VOCAB, (rows,), generator=generator)
    labels[::3] = F.linear(x, weight, bias)[::3].argmax(1)  # every third is right
    return *(t.requires_grad_() for t in (x, weight, bias)), labels


def plain(x, weight, bias, labels):
    scores = F.linear(x, weight, bias).float()
    return F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()


@pytest.mark.parametrize("chunk", [1, 20 * VOCAB, 2 * ROWS * VOCAB, 1 << 23])
@pytest.mark.parametrize("block", [1, 4 * VOCAB, 1 << 19])
@pytest.mark.parametrize("columns", [1, 8])
def test_loss_gradients_and_right_ones_are_those_of_torch_whatever_the_chunk(
    chunk, block, columns, monkeypatch
) -> None:
    monkeypatch.setitem(loss.COLUMN_MULTIPLE, "cpu", columns)
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    monkeypatch.setitem(loss.BLOCK, "cpu", block)
    tensors = inputs()
    found, right, _ = linear_cross_entropy(*tensors)
    scores = F.linear(*tensors[:3])
    wanted = F.cross_entropy(scores, tensors[3], reduction="sum")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert right == (scores.argmax(1) == tensors[3]).sum() >= ROWS // 3
    grads = torch.autograd.grad(found / 7, tensors[:3])
    for a, b in zip(grads, torch.autograd.grad(wanted / 7, tensors[:3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_in_bf16_the_loss_is_summed_in_float32_and_close(monkeypatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 10 * VOCAB)
    tensors = inputs(kind=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, right, _ = linear_cross_entropy(*tensors)
        wanted, wanted_right = plain(*tensors)
    assert found.dtype == torch.float32
    assert wanted_right <= right <= wanted_right + 2  # ties, which bf16 makes, count as right
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    grads = torch.autograd.grad(found, tensors[:3])
    for a, b in zip(grads, torch.autograd.grad(wanted, tensors[:3]), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-2 * b.norm()


def test_extreme_scores_do_not_overflow() -> None:
    x, weight, bias, labels = inputs(kind=torch.float32)
    found, *_ = linear_cross_entropy(x * 1e4, weight, bias, labels)
    wanted, _ = plain(x * 1e4, weight, bias, labels)
    torch.testing.assert_close(found, wanted)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(found, (x, weight, bias)))


def test_of_no_rows_the_loss_is_zero_and_so_are_the_gradients() -> None:
    tensors = inputs(rows=0)
    found, right, _ = linear_cross_entropy(*tensors)
    assert found == right == 0
    assert all((g == 0).all() for g in torch.autograd.grad(found, tensors[:3]))


def test_the_scores_of_all_rows_are_never_in_memory_at_once(monkeypatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 10 * VOCAB)  # ROW_MULTIPLE rows, the fewest
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t)
            )
            return out

    tensors = inputs(rows=3 * loss.ROW_MULTIPLE)
    with Sizes():
        linear_cross_entropy(*tensors)[0].backward()
    assert max(sizes) == loss.ROW_MULTIPLE * VOCAB


def test_a_token_without_any_chance_is_not_drawn_even_by_the_lowest_number() -> None:
    x, weight, bias, labels = (t.detach() for t in inputs())
    bias[[0, 1, VOCAB - 1]] = -torch.inf
    labels[:] = 2
    for chance, drawn in ((0.0, 2), (1 - 2**-53, VOCAB - 2)):
        chances = torch.full((ROWS,), chance, dtype=x.dtype)
        found = linear_cross_entropy(x * 0, weight, bias, labels, chances)
        assert found[2].tolist() == [drawn] * ROWS


def test_the_highest_number_draws_no_token_without_a_chance_where_rounded_shares_miss_1() -> None:
    x, weight, bias, labels = (t.detach() for t in inputs(kind=torch.float32))
    bias[VOCAB - 1] = -torch.inf
    labels[:] = 0
    highest = 1 - 2**-24
    sums = F.linear(x, weight, bias).softmax(1).cumsum(1)[:, -1]
    assert (sums <= highest).any()
    drawn = linear_cross_entropy(x, weight, bias, labels, torch.full((ROWS,), highest))[2]
    assert drawn.max() < VOCAB - 1


@pytest.mark.parametrize("columns", [1, 8])
def test_scores_that_are_not_finite_draw_a_token_that_there_is(columns: int, monkeypatch) -> None:
    """A generator that has diverged is evaluated all the same."""
    monkeypatch.setitem(loss.COLUMN_MULTIPLE, "cpu", columns)
    x, weight, bias, labels = (t.detach() for t in inputs())
    drawn = linear_cross_entropy(x * torch.nan, weight, bias, labels, torch.rand(ROWS))[2]
    assert ((0 <= drawn) & (drawn < VOCAB)).all()


def test_a_token_that_scores_0_looks_original() -> None:
    is_replaced = torch.tensor([False, False, False, True])
    assert loss.replaced_token_loss(torch.zeros(4), is_replaced)[1] == 3


def test_scores_beyond_a_curve_are_in_its_outer_bins() -> None:
    counts = loss.count_scores(torch.tensor([-1e3, 1e3]), torch.tensor([False, True]))
    assert counts.shape == (2, loss.BINS) and counts[0, 0] == counts[1, -1] == 1


def test_labels_with_the_highest_score_of_many_are_right() -> None:
    x, weight, bias, labels = inputs()
    assert linear_cross_entropy(x, weight * 0, bias * 0, labels)[1] == ROWS


def test_sequences_without_a_pair_add_nothing_to_the_loss_of_pairs() -> None:
    logits, labels = torch.randn(5, 2), torch.tensor([1, -100, 0, -100, 1])
    found, right = loss.next_sentence_loss(logits, labels)
    pairs = labels >= 0
    wanted, wanted_right = plain(logits[pairs], torch.eye(2), torch.zeros(2), labels[pairs])
    torch.testing.assert_close(found, wanted)
    assert right == wanted_right
    assert loss.next_sentence_loss(logits, torch.full((5,), -100)) == (0, 0)
