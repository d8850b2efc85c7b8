"""model -> **one model on many processes**: DDP, or FSDP2 where the launcher's config asks for it.

Under FSDP2 (Zhao et al. 2023, arXiv:2304.11277) weights, gradients and optimizer states lie in
shards of float32, a layer's weights being gathered while it computes; products are of autocast's
type, as under DDP, so the numbers are the same. Checkpoints hold whole tensors: they do not tell
how many processes wrote them.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from data_pipeline.config import check


def asks_for_shards() -> bool:
    """Whether the launcher's config says FSDP; raises `UserError` for FSDP1."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    check(
        not asked or os.environ.get("FSDP_VERSION") == "2",
        "FSDP is asked for, and not version 2; set fsdp_config: {fsdp_version: 2} in accelerate's "
        "config, as configs/accelerate/fsdp_8.yaml does",
    )
    return asked


def wrap_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """`model` (with `.layers`) on this process's device, wrapped for many; its parameters are then
    the ones to optimize."""
    if not asks_for_shards():
        return accelerator.prepare(model.to(accelerator.device))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    device = accelerator.device.type
    mesh = init_device_mesh(device, (accelerator.num_processes,))
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "score")
    bf16 = accelerator.mixed_precision == "bf16"
    model.forward = torch.autocast(device, torch.bfloat16, enabled=bf16)(model.forward)
    return model


def no_sync(model: nn.Module, accelerator: Accelerator) -> AbstractContextManager:
    """Gradients of a micro-batch that is not the step's last stay on their process; shards have no
    room for that and are summed each time."""
    return nullcontext() if asks_for_shards() else accelerator.no_sync(model)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm they had."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sharded = any(isinstance(grad, DTensor) for grad in grads)
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    if sharded:
        squared = norm.square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def unshard(tensor: Tensor) -> Tensor:
    """A tensor as it is without shards; all processes must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole tensor, laid out as the parameter `like` if of its shape."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor
