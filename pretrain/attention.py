"""model -> **attention** -> model: each sequence attends to itself, by what a device does fastest.

Shapes: B sequences of T tokens in all, S of the longest, H heads of d = D / H each.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.sampling.batches import Batch
from pretrain.dropout import dropout_noise

GROUP_TOKENS = 960  # at most, all of the longest of a batch; one of 512 tokens is enough work alone
LENGTH_MULTIPLE = (
    8  # that their lengths are of: the first product of a shape takes four times as long
)


def attend(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Attention within each sequence: (T, 3, H, d) -> (T, H, d)."""
    if qkv.device.type == "cpu":
        return attend_groups(qkv, batch, dropout)
    if dropout or qkv.dtype not in (torch.bfloat16, torch.float16) or qkv.shape[-1] % 8:
        return attend_padded(qkv, batch, dropout)  # what the kernel below cannot do
    from torch.nn.attention.varlen import varlen_attn

    longest = -(-batch.max_length // 128) * 128  # an upper bound, of which there are few
    cu_seqlens = batch.cu_seqlens.int()
    return varlen_attn(*qkv.unbind(1), cu_seqlens, cu_seqlens, longest, longest)


def attend_padded(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """In rows of the longest sequence, the keys beyond the end of each masked."""
    size, longest = len(batch.cu_seqlens) - 1, batch.max_length
    places = batch.sequence_ids * longest + batch.position_ids  # (T,)
    rows = qkv.new_zeros(size * longest, *qkv.shape[1:]).index_copy(0, places, qkv)
    q, k, v = rows.view(size, longest, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)  # (B, H, S, d)
    columns = torch.arange(longest, device=qkv.device)
    is_key = (columns < batch.cu_seqlens.diff()[:, None])[:, None, None]  # (B, 1, 1, S)
    out = F.scaled_dot_product_attention(q, k, v, is_key, dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


# ------------------------------------------------------------------------------------- on a CPU


@dataclass
class Group:
    """Sequences of similar length, padded to the longest of them."""

    count: int
    length: int
    bias: Tensor | None  # (count, 1, 1, length): 0, beyond the end -inf; None if all are as long


@dataclass
class Layout:
    """The sequences of a batch in groups: few products, and in them alone a little padding."""

    groups: list[Group]
    places: Tensor  # (T,) of each token among all padded ones

    @property
    def sizes(self) -> list[int]:
        """Padded tokens of each group."""
        return [group.count * group.length for group in self.groups]


@lru_cache(maxsize=1)  # the layers of a model ask for the same, one after the other
def lay_out(lengths: tuple[int, ...]) -> Layout:
    """Sequences of these lengths in groups, as many in each but the last."""
    ends, order = torch.tensor(lengths).sort()
    starts, groups, size = torch.empty_like(order), [], 0
    count = max(GROUP_TOKENS // max(lengths), 1)
    for numbers, some in zip(order.split(count), ends.split(count), strict=True):
        length = -(-int(some[-1]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        beyond = torch.arange(length) >= some[:, None]
        bias = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)[:, None, None]
        starts[numbers] = size + length * torch.arange(len(numbers))
        groups.append(Group(len(numbers), length, bias if beyond.any() else None))
        size += len(numbers) * length
    ends = torch.tensor(lengths)
    shift = starts - (ends.cumsum(0) - ends)
    return Layout(groups, shift.repeat_interleave(ends) + torch.arange(sum(lengths)))


@torch.compiler.disable
def attend_groups(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """In groups of similar length: on a CPU two to four times as fast as its kernels."""
    lengths = tuple(batch.cu_seqlens.diff().tolist())
    with torch.autocast("cpu", enabled=False):  # softmax would go to float32 and back
        return AttendGroups.apply(qkv, lay_out(lengths), dropout)


class AttendGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        heads, width = qkv.shape[2:]
        padded = qkv.new_zeros(sum(layout.sizes), 3, heads, width)
        padded.index_copy_(0, layout.places, qkv[: len(layout.places)])  # without the filler
        out, kept = [], []
        for group, rows in zip(layout.groups, padded.split(layout.sizes), strict=True):
            x = rows.unflatten(0, (group.count, group.length)).permute(2, 0, 3, 1, 4)
            x = x.reshape(3, group.count * heads, group.length, width)
            q, k, v = x
            scores = torch.bmm(q.mul_(width**-0.5), k.mT)
            if group.bias is not None:
                scores.unflatten(0, (-1, heads)).add_(group.bias.to(scores.dtype))
            weights = scores.softmax(-1)
            noise = dropout_noise(weights, dropout) if dropout else None
            seen = torch.bmm(weights if noise is None else weights * noise, v)
            out.append(seen.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1))
            kept += [x, weights, noise]
        ctx.layout = layout
        ctx.save_for_backward(*kept)
        return at_places(torch.cat(out), layout.places, len(qkv))

    @staticmethod
    def backward(ctx, grad: Tensor):
        layout, (heads, width) = ctx.layout, grad.shape[1:]
        padded = grad.new_zeros(sum(layout.sizes), heads, width)
        padded.index_copy_(0, layout.places, grad[: len(layout.places)])
        out, kept = [], iter(ctx.saved_tensors)
        for group, rows in zip(layout.groups, padded.split(layout.sizes), strict=True):
            (q, k, v), weights, noise = next(kept), next(kept), next(kept)
            rows = rows.unflatten(0, (group.count, group.length)).transpose(1, 2).flatten(0, 1)
            grad_weights = torch.bmm(rows, v.mT)
            dropped = weights
            if noise is not None:
                grad_weights.mul_(noise)
                dropped = weights * noise
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grads = torch.stack(
                [
                    torch.bmm(grad_scores, k).mul_(width**-0.5),
                    torch.bmm(grad_scores.mT, q),  # q is scaled already
                    torch.bmm(dropped.mT, rows),
                ]
            )
            grads = grads.unflatten(1, (-1, heads)).permute(1, 3, 0, 2, 4)
            out.append(grads.flatten(0, 1))
        return at_places(torch.cat(out), layout.places, len(grad)), None, None


def at_places(padded: Tensor, places: Tensor, size: int) -> Tensor:
    """The rows at these places, and 0 in as many more as are missing to `size`."""
    out = padded.new_zeros(size, *padded.shape[1:])
    torch.index_select(padded, 0, places, out=out[: len(places)])
    return out
