"""Reference kernels of attention, by which a CPU takes the path of a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import Library


def register_kernels() -> Library:
    """Give a CPU the flash attention of a GPU, by the book; `_destroy` of the result takes it
    away."""
    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, **options):
    """Attention with dropout of the weights, refusing what a GPU's kernel refuses."""
    assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k) and not is_causal
    assert q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and max_q == max_k >= cu_q.diff().max()
    rng = torch.randint(2**62, (2,))  # the state of torch's generator decides, as on a GPU
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, weights, noise in sequences(q, k, cu_q, dropout, rng):
        out[rows] = ((weights * noise) @ heads(v[rows])).transpose(0, 1).to(q.dtype)
    return out, lse, rng.to(torch.uint64), torch.empty((), dtype=torch.uint64), q.new_empty(0)


def backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, **options
):
    """The gradients of q, k and v, with the noise of the forward pass."""
    assert grad.dtype == q.dtype
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for rows, weights, noise in sequences(q, k, cu_q, dropout, rng.to(torch.int64)):
        g = heads(grad[rows])
        seen = (g @ heads(v[rows]).mT) * noise
        scores = weights * (seen - (seen * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        found = scores @ heads(k[rows]), scores.mT @ heads(q[rows]), (weights * noise).mT @ g
        for x, one in zip(grads, found, strict=True):
            x[rows] = one.transpose(0, 1).to(q.dtype)
    return tuple(grads)


def sequences(q, k, cu_seqlens, dropout: float, rng) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows of each sequence, its weights and the noise they are multiplied by."""
    generator = torch.Generator().manual_seed(int(rng[0]))
    for start, end in cu_seqlens.unfold(0, 2, 1).tolist():
        rows = slice(start, end)
        scores = heads(q[rows]) @ heads(k[rows]).mT * q.shape[-1] ** -0.5
        kept = torch.rand(scores.shape, generator=generator) >= dropout
        yield rows, scores.softmax(-1), kept / (1 - dropout)


def heads(x: Tensor) -> Tensor:
    """(S, H, d) -> (H, S, d), in float64."""
    return x.double().transpose(0, 1)
