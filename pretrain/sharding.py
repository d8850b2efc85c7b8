"""Distribute a model over processes: DDP, or FSDP2 if the launcher's config asks for it.

FSDP2 (Zhao et al. 2023, arXiv:2304.11277) shards weights, gradients and optimizer states, all in
float32, and gathers the weights of a layer while it computes. Products use the autocast dtype, as
under DDP, so the results agree. Checkpoints hold unsharded tensors and can be resumed on any number
of processes.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from data_pipeline.common.errors import check


def asks_for_shards() -> bool:
    """Tell whether the launcher's config asks for FSDP; raises `UserError` for FSDP1."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    check(
        not asked or os.environ.get("FSDP_VERSION") == "2",
        "the launcher asks for FSDP, but not for version 2; set fsdp_config: {fsdp_version: 2} in "
        "accelerate's config, as configs/accelerate/fsdp_8.yaml does",
    )
    return asked


def wrap_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Move a model to this process's device and wrap it in DDP or FSDP2.

    model: has `all_layers`, each of which becomes an FSDP2 unit.
    Build optimizers afterwards: FSDP2 replaces the parameters of `model`.
    """
    if not asks_for_shards():
        return accelerator.prepare(model.to(accelerator.device))
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    device = accelerator.device.type
    mesh = init_device_mesh(device, (accelerator.num_processes,))
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
    for layer in model.all_layers():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    for method in ("score", "logits", "replaced_logits"):
        register_fsdp_forward_method(model, method)
    bf16 = accelerator.mixed_precision == "bf16"
    model.forward = torch.autocast(device, torch.bfloat16, enabled=bf16)(model.forward)
    return model


def no_sync(model: nn.Module, accelerator: Accelerator) -> AbstractContextManager:
    """Defer the gradient reduction of a micro-batch that is not the last of its step.

    Does nothing under FSDP2, where deferring would need memory for the unsharded gradients.
    """
    return nullcontext() if asks_for_shards() else accelerator.no_sync(model)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their total norm is at most `max_norm`.

    A collective call under FSDP2. Returns the norm before scaling, a scalar.
    """
    return unshard(nn.utils.clip_grad_norm_(parameters, max_norm))


def share_matrices(function: Callable[[Tensor], Tensor], stack: Tensor, like: Tensor) -> Tensor:
    """Apply a function to a stack of matrices, each process to its share of them (a collective
    call).

    function: (n, A, B) -> (n, A, B).
    stack: (N, A, B), the same on all processes; under FSDP2 the local rows of each matrix.
    like: one of the parameters that the matrices are of.
    Returns the results, divided as `stack` is.
    """
    shape, place = torch.Size([len(stack), *like.shape]), Replicate()
    if isinstance(like, DTensor):
        mesh, place = like.device_mesh, Shard(1)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        mesh = mesh_of(stack.device.type, dist.group.WORLD)
    else:
        return function(stack)
    stride = (shape[1] * shape[2], shape[2], 1)

    def move(part: Tensor, before: Placement, after: Placement) -> Tensor:
        whole = DTensor.from_local(
            part, mesh, [before], run_check=False, shape=shape, stride=stride
        )
        return whole.redistribute(placements=[after]).to_local()

    return move(function(move(stack, place, Shard(0))), Shard(0), place)


@lru_cache(maxsize=1)  # building one takes a millisecond, for which Muon would wait in each step
def mesh_of(device: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Build the mesh of all processes of the default group."""
    return init_device_mesh(device, (group.size(),))


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unshard(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor (a collective call)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard an unsharded tensor like the parameter `like`, if their shapes agree.

    Other tensors, such as the step count of an optimizer, are only moved to its device.
    """
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor
