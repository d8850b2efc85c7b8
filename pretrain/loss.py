"""Compute the losses of a batch as sums, which `train.py` divides by the counts of the whole step.

The scores of the vocabulary at M masked positions would be the largest tensor of a step. They are
computed and freed in chunks of rows, and their gradient is computed with them.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.models.cpu import ROW_MULTIPLE, fill_rows

CHUNK = {"cpu": 1 << 23, "cuda": 1 << 27}  # float32 scores in memory at once; twice as many bf16
BLOCK = {"cpu": 1 << 19, "cuda": 1 << 25}  # scores per softmax, so that a block fits the cache
# A GPU's fastest products need rows of a multiple of 16 bytes, unlike the scores of BERT's 30,522
# tokens. NVIDIA's recipe adds six tokens to the model; here they are added for each pass only.
COLUMN_MULTIPLE = {"cpu": 1, "cuda": 8}
BINS, MOST_LOGIT = 4096, 16.0  # of a curve: resolves scores from -16 to 16


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the summed cross-entropy of a linear layer, count the correct predictions, and draw a
    class for each row by its softmax.

    The loss equals `F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")` without
    ever holding all M x V scores.

    x: (M, D). weight: (V, D). bias: (V,). labels: int64 (M,).
    chance: (M,), uniform in [0, 1); None: draw nothing. A row's draw is the first class at which
    the sum of the probabilities exceeds its number, so it takes one random number, where Gumbel
    noise would take V, and does not depend on the chunk size.
    Returns two scalars: the loss in nats, and the number of labels with the highest score (ties
    count as correct), both 0 if M = 0; and the draws, int64 (M,), 0 where nothing was drawn. Under
    autocast the products use its dtype; the loss is at least float32. Only it has a gradient.
    """
    return LinearCrossEntropy.apply(x, weight, bias, labels, torch.is_grad_enabled(), chance)


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of a linear layer whose forward pass computes the gradients too.

    The scores are freed chunk by chunk, so the backward pass only scales saved gradients.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, labels, needs_grad: bool, chance: Tensor | None):
        loss, right = x.new_zeros((), dtype=sum_type(x)), labels.new_zeros(())
        drawn, vocab_size = torch.zeros_like(labels), len(weight)
        weight, bias = fill_columns(weight, bias)
        if needs_grad:
            grads = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for rows, few, scores, matrix in chunks(x, weight, bias):
            size = max(BLOCK.get(x.device.type, BLOCK["cuda"]) // len(weight), 1)
            of_row = labels if chance is None else chance
            count = len(labels[rows])
            columns = (scores[:count], labels[rows, None], of_row[rows, None], drawn[rows])
            for block, label, number, draw in zip(*(c.split(size) for c in columns), strict=True):
                exact = block.to(sum_type(block))
                wanted, highest = exact.gather(1, label), exact.amax(1, keepdim=True)
                right += (wanted == highest).sum()
                probabilities = exact.softmax(1)
                rest = probabilities.amax(1, keepdim=True).log()  # the label's could be log 0
                loss += (highest - rest - wanted).sum()
                if chance is not None:
                    sums = probabilities.cumsum(1)
                    first = torch.searchsorted(sums, number * sums[:, -1:], right=True)
                    draw.copy_(first[:, 0].clamp_(max=vocab_size - 1))
                if needs_grad:  # gradient of the scores: softmax - one-hot
                    block.copy_(probabilities.scatter_add_(1, label, -torch.ones_like(wanted)))
                    grads[2].add_(probabilities.sum(0))
            if needs_grad:
                grads[0][rows] = (scores @ matrix)[:count]
                grads[1].add_(scores.t() @ few)  # to which filler rows add 0
        if needs_grad:
            ctx.grads = grads[0], grads[1][:vocab_size], grads[2][:vocab_size]
        ctx.mark_non_differentiable(right, drawn)
        return loss, right, drawn

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_):
        grads, ctx.grads = ctx.grads, None
        return *(grad.mul_(grad_loss) for grad in grads), None, None, None


def score_labels(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss and the rank of each label, without a gradient.

    Shapes as in `linear_cross_entropy`.
    Returns the cross-entropy in nats, (M,), and the number of tokens that score higher than the
    label, int64 (M,). Scores are float32 even under autocast, since the highest ones often tie in
    bf16.
    """
    losses, ranks = x.new_empty(len(x), dtype=sum_type(x)), torch.empty_like(labels)
    with torch.autocast(x.device.type, enabled=False):
        for rows, _, scores, _ in chunks(x.to(losses.dtype), weight, bias):
            scores = scores[: len(labels[rows])]
            wanted = scores.gather(1, labels[rows, None])
            losses[rows] = scores.logsumexp(1) - wanted[:, 0]
            ranks[rows] = scores.gt_(wanted).sum(1)  # in place, as floats: ten times as fast
    return losses, ranks


def chunks(
    x: Tensor, weight: Tensor, bias: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield (rows, x[rows], scores of the rows, weight) chunk by chunk, in the autocast dtype.

    Filler rows follow `x[rows]` and the scores on a CPU: zeros, and the scores of zeros.
    """
    device, kind = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        x, weight, bias = x.to(kind), weight.to(kind), bias.to(kind)
        size = 4 * CHUNK.get(device, CHUNK["cuda"]) // kind.itemsize // len(weight)
        size = max(size // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            some = fill_rows(x[rows])
            yield rows, some, F.linear(some, weight, bias), weight


def fill_columns(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Pad with classes of probability 0 to a multiple on a GPU: (V, D), (V,) -> (W, D), (W,)."""
    multiple = COLUMN_MULTIPLE.get(weight.device.type, COLUMN_MULTIPLE["cuda"])
    filler = -len(weight) % multiple
    if not filler:
        return weight, bias
    return F.pad(weight, (0, 0, 0, filler)), F.pad(bias, (0, filler), value=-math.inf)


def sum_type(x: Tensor) -> torch.dtype:
    """Choose the dtype to sum in: that of `x`, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def next_sentence_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the summed cross-entropy of sentence pairs and count the correct predictions.

    logits: (B, 2). labels: int64 (B,).
    Returns two scalars: the loss in nats and the count.
    """
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return loss, (logits.argmax(-1) == labels).sum()


def replaced_token_loss(logits: Tensor, is_replaced: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the summed binary cross-entropy of tokens and count the correct predictions.

    logits: (T,), above 0 for a token that looks replaced. is_replaced: bool (T,).
    Returns two scalars: the loss in nats and the count.
    """
    wanted = is_replaced.float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), wanted, reduction="sum")
    return loss, ((logits > 0) == is_replaced).sum()


def count_scores(logits: Tensor, is_replaced: Tensor) -> Tensor:
    """Build histograms of token scores for `metrics.area_under_curve`.

    logits: (T,), in which a diverged model's NaN counts as 0. is_replaced: bool (T,).
    Returns float64 (2, BINS), of original and of replaced tokens.
    """
    share = (logits.float() / MOST_LOGIT).nan_to_num(0).clamp(-1, 1) / 2 + 0.5
    bins = (share * (BINS - 1)).long() + BINS * is_replaced
    return bins.bincount(minlength=2 * BINS).view(2, BINS).double()
