"""What only a CPU needs: attention in groups of similar length, fast dropout noise, and process
settings for memory and matrix products.

Shapes: T tokens in total, H heads, d = D / H.
"""

import ctypes
import platform
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.sampling.batches import Batch

# The encoder pads the tokens of a batch to a multiple of this on a CPU: oneDNN compiles a kernel
# for each new shape, which took a sixth of a small model's step on two threads. With few sizes,
# tensors also fit into freed memory.
TOKEN_MULTIPLE = 128
# The rows of the heads are padded to a multiple of this; their number differs in each step.
ROW_MULTIPLE = 64
# Maximum padded tokens of an attention group; a sequence of 512 tokens is enough work alone.
GROUP_TOKENS = 960
# Group lengths are padded to a multiple of this: the first product of a new shape takes four times
# as long as the next.
LENGTH_MULTIPLE = 8


# ---------------------------------------------------------------------------------- the process


def configure_cpu() -> None:
    """Set the allocator and the float32 matrix products of this process for training on a CPU."""
    keep_freed_memory()
    if platform.machine() == "x86_64" and not cpu_supports("amx_tile"):
        # float32 products by oneDNN instead of MKL: 1.1 to 1.3 times as fast on AMD, and as exact.
        # A CPU with AMX would use bf16 products, which only `precision: bf16` asks for.
        torch.set_float32_matmul_precision("medium")


def cpu_supports(feature: str) -> bool:
    """Tell whether the CPU has an instruction set, given torch's name for it."""
    # private: torch has no public query; False if a version of torch drops this one
    ask = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return bool(ask and ask())


def keep_freed_memory() -> None:
    """Keep the large tensors that one step frees for the next one.

    glibc would return them to the system and fetch zeroed pages instead, which costs 5 to 20 % of a
    step. Other C libraries (macOS, musl) lack this setting, and nothing happens there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: None)
    mmap_threshold, trim_threshold = -3, -1  # malloc.h
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Return freed but retained memory to the system, after large work that no step repeats."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    trim(0)


def fill_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Pad rows with zeros to a multiple on a CPU, so that shapes recur: (N, ...) -> (M, ...)."""
    if x.device.type != "cpu":
        return x
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % multiple,))


# -------------------------------------------------------------------------------------- dropout


class Dropout(nn.Dropout):
    """Apply dropout in training, on a CPU in a quarter of the time of `nn.Dropout`.

    torch's kernel draws one float per element on a single thread.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * dropout_noise(x, self.p) if x.device.type == "cpu" else F.dropout(x, self.p)


def dropout_noise(x: Tensor, p: float) -> Tensor:
    """Draw the factors that dropout multiplies `x` by: 0 with probability p, else 1 / (1 - p).

    Uses 16 random bits per element, so p is rounded to a multiple of 1 / 65,536; the scale is that
    of the rounded p, in the dtype of `x`. Returns a tensor with the shape and dtype of `x`.
    """
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = bits.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = round(p * 65536)
    noise = torch.empty(x.shape, dtype=x.dtype)
    return torch.ge(bits, dropped - 32768, out=noise).mul_(65536 / max(65536 - dropped, 1))


# ------------------------------------------------------------------------------------ attention


@dataclass
class Group:
    """The shape of one group: sequences of similar length, padded to a common one."""

    count: int
    length: int
    bias: Tensor | None  # (count, 1, 1, length): -inf on padding, else 0; None without padding


@dataclass
class Layout:
    """The groups of a batch, and the place of each token among their padded rows."""

    groups: list[Group]
    places: Tensor  # int64 (T,), row of each token when all groups lie end to end

    @property
    def sizes(self) -> list[int]:
        """Count the padded tokens of each group."""
        return [group.count * group.length for group in self.groups]


@lru_cache(maxsize=1)  # all layers of a model ask for the same layout
def lay_out(lengths: tuple[int, ...]) -> Layout:
    """Divide sequences, sorted by length, into groups of equal count; the last group may be
    smaller.

    lengths: tokens of each sequence, in the order of the batch.
    """
    sizes = torch.tensor(lengths)
    ascending, order = sizes.sort()
    starts, groups, filled = torch.empty_like(order), [], 0
    count = max(GROUP_TOKENS // max(lengths), 1)
    for numbers, some in zip(order.split(count), ascending.split(count), strict=True):
        length = -(-int(some[-1]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        beyond = torch.arange(length) >= some[:, None]
        bias = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)[:, None, None]
        starts[numbers] = filled + length * torch.arange(len(numbers))
        groups.append(Group(len(numbers), length, bias if beyond.any() else None))
        filled += len(numbers) * length
    shift = starts - (sizes.cumsum(0) - sizes)
    return Layout(groups, shift.repeat_interleave(sizes) + torch.arange(sum(lengths)))


@torch.compiler.disable
def attend_groups(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention in groups of sequences of similar length.

    On a CPU two to four times as fast as torch's kernels on padded rows.
    qkv: (T, 3, H, d), optionally followed by filler rows, whose output is 0.
    Returns (T, H, d), filler rows included.
    """
    lengths = tuple(batch.cu_seqlens.diff().tolist())
    with torch.autocast("cpu", enabled=False):  # it would cast softmax to float32 and back
        return AttendGroups.apply(qkv, lay_out(lengths), dropout)


class AttendGroups(torch.autograd.Function):
    """Attention over the groups of a layout, with a backward pass that reuses the weights."""

    @staticmethod
    def forward(ctx, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        heads, width = qkv.shape[2:]
        padded = qkv.new_zeros(sum(layout.sizes), 3, heads, width)
        padded.index_copy_(0, layout.places, qkv[: len(layout.places)])  # without filler rows
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
            # private: the public way to this kernel is autograd, which this function replaces
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grads = torch.stack(
                [
                    torch.bmm(grad_scores, k).mul_(width**-0.5),
                    torch.bmm(grad_scores.mT, q),  # the saved q is scaled
                    torch.bmm(dropped.mT, rows),
                ]
            )
            grads = grads.unflatten(1, (-1, heads)).permute(1, 3, 0, 2, 4)
            out.append(grads.flatten(0, 1))
        return at_places(torch.cat(out), layout.places, len(grad)), None, None


def at_places(padded: Tensor, places: Tensor, size: int) -> Tensor:
    """Gather rows and zero-pad to `size`."""
    out = padded.new_zeros(size, *padded.shape[1:])
    torch.index_select(padded, 0, places, out=out[: len(places)])
    return out
