"""model -> **loss** -> optimizer: sums, never means, so that any way of dividing a step gives the
same gradient.

The scores of the whole vocabulary at M masked positions are the largest tensor of a step: they are
made for some rows at a time and gone again, their gradient being known as soon as they are.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = {"cpu": 1 << 23, "cuda": 1 << 27}  # float32 scores, or twice as many in bf16, in memory
BLOCK = {"cpu": 1 << 19, "cuda": 1 << 25}  # of them that become probabilities at once: in a cache


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """`F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")` in nats, and how many
    labels had the highest score (be it with others); both scalars, of no rows 0.

    x (M, D), weight (V, D), bias (V,), labels int64 (M,). Under autocast the products are of its
    type; the loss is float32 at least, and the loss alone has a gradient.
    """
    return LinearCrossEntropy.apply(x, weight, bias, labels, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, needs_grad: bool):
        loss, right = x.new_zeros((), dtype=sum_type(x)), labels.new_zeros(())
        if needs_grad:
            grads = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for rows, few, scores, matrix in chunks(x, weight, bias):
            size = max(BLOCK.get(x.device.type, BLOCK["cuda"]) // len(weight), 1)
            blocks = zip(scores.split(size), labels[rows, None].split(size), strict=True)
            for block, label in blocks:
                exact = block.to(sum_type(block))
                wanted, highest = exact.gather(1, label), exact.amax(1, keepdim=True)
                right += (wanted == highest).sum()
                probabilities = exact.softmax(1)
                rest = probabilities.amax(1, keepdim=True).log()  # no label's, which may be 0
                loss += (highest - rest - wanted).sum()
                if needs_grad:  # of the losses to the scores: the probabilities, less the truth
                    block.copy_(probabilities.scatter_add_(1, label, -torch.ones_like(wanted)))
                    grads[2].add_(probabilities.sum(0))
            if needs_grad:
                grads[0][rows] = scores @ matrix
                grads[1].add_(scores.t() @ few)
        if needs_grad:
            ctx.grads = grads
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        grads, ctx.grads = ctx.grads, None
        return *(grad.mul_(grad_loss) for grad in grads), None, None


def score_labels(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: the cross-entropy in nats (M,), and how many others score higher than the label
    int64 (M,); shapes as above, no gradient.

    The scores are float32 even under autocast: in bf16 the highest ones often tie.
    """
    losses, ranks = x.new_empty(len(x), dtype=sum_type(x)), torch.empty_like(labels)
    with torch.autocast(x.device.type, enabled=False):
        for rows, _, scores, _ in chunks(x.to(losses.dtype), weight, bias):
            wanted = scores.gather(1, labels[rows, None])
            losses[rows] = scores.logsumexp(1) - wanted[:, 0]
            ranks[rows] = scores.gt_(wanted).sum(1)  # as floats: ten times as fast
    return losses, ranks


def chunks(
    x: Tensor, weight: Tensor, bias: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, x of the rows, their scores, weight), all in the type of autocast."""
    device, kind = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        x, weight, bias = x.to(kind), weight.to(kind), bias.to(kind)
        size = max(4 * CHUNK.get(device, CHUNK["cuda"]) // kind.itemsize // len(weight), 1)
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            yield rows, x[rows], F.linear(x[rows], weight, bias), weight


def sum_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def next_sentence_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same of (B, 2) scores of pairs: summed cross-entropy in nats, and how many are right."""
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return loss, (logits.argmax(-1) == labels).sum()
