"""Attention of each sequence to itself: the padded path that reads like the paper, the varlen
kernel of a GPU, and the choice between them.

Shapes: B sequences, T tokens in total, S tokens of the longest sequence, H heads, d = D / H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.sampling.batches import Batch
from pretrain.models.cpu import attend_groups


def attend(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention within each sequence on the fastest path of the device.

    qkv: (T, 3, H, d), sequences end to end.
    Returns (T, H, d).
    """
    return (attend_groups if qkv.device.type == "cpu" else attend_on_gpu)(qkv, batch, dropout)


def attend_on_gpu(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention as `attend` does, on the fastest path of this process's GPU."""
    is_fast = has_varlen(qkv.dtype, qkv.shape[-1], gpu_generation())
    return (attend_varlen if is_fast else attend_padded)(qkv, batch, dropout)


def has_varlen(dtype: torch.dtype, head_size: int, generation: int) -> bool:
    """Tell whether a GPU of this generation has a varlen kernel for such heads."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and head_size % 8 == 0 and head_size <= 192 and generation >= 8


@torch.compiler.assume_constant_result
def gpu_generation() -> int:
    """Return the major compute capability of this process's GPU: 8 is an A100, 9 an H100.

    A number, because torch 2.11 cannot compile a comparison of tuples that are assumed constant.
    """
    return torch.cuda.get_device_capability()[0]


def attend_padded(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention on rows padded to the longest sequence, with padded keys masked.

    qkv: (T, 3, H, d).
    Returns (T, H, d).
    """
    size, longest = len(batch.cu_seqlens) - 1, batch.max_length
    places = batch.sequence_ids * longest + batch.position_ids  # (T,)
    rows = qkv.new_zeros(size * longest, *qkv.shape[1:]).index_copy(0, places, qkv)
    q, k, v = rows.view(size, longest, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)  # (B, H, S, d)
    columns = torch.arange(longest, device=qkv.device)
    is_key = (columns < batch.cu_seqlens.diff()[:, None])[:, None, None]  # (B, 1, 1, S)
    out = F.scaled_dot_product_attention(q, k, v, is_key, dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def attend_varlen(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention without padding, by torch's kernel for sequences of varying length.

    qkv: (T, 3, H, d), bf16 or fp16, d a multiple of 8.
    Returns (T, H, d).
    """
    # an upper bound in steps of 128, so that few distinct values reach the kernel
    longest = -(-batch.max_length // 128) * 128
    cu_seqlens, is_causal = batch.cu_seqlens.int(), False
    # private: the public `varlen_attn` calls it without dropout
    return torch.ops.aten._flash_attention_forward.default(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, longest, longest, dropout, is_causal,
        return_debug_mask=False,
    )[0]  # fmt: skip
