"""Make the same decision on all ranks: a signal or a NaN on one rank counts for all.

A rank that decided alone would skip a step that the others take, or wait for ranks that have
stopped.
"""

import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from signal import Signals

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from data_pipeline.common.signals import CAUGHT, received_signal
from data_pipeline.sampling.batches import fetch, send
from pretrain.objectives import ROW
from pretrain.sharding import asks_for_shards
from pretrain.watch import mark


def agree_on_step(
    sums: Tensor, norm: Tensor, stop: Signals | None, accelerator: Accelerator
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Sum the results of a step over all ranks, for `read_step` (a collective call).

    sums: float64 (objectives, ROW).
    norm: scalar, the gradient norm, which is the same on all ranks unless one of them is faulty.
    stop: the signal that this rank has to stop on, if any.
    Returns float64 (found, and what waits for it and gives it on the CPU): the mean of the norms,
    which is not finite if that of any rank is not; the signals that ranks have caught; the sums.
    A GPU is waited for only up to here, not for the update that it is given next.
    """
    # exact: float64 holds the sum of some million equal float32
    norm = norm.double().view(1) / accelerator.num_processes
    flags = flag_signal(stop, accelerator)
    found = accelerator.reduce(torch.cat([norm, flags, sums.flatten()]))
    return found, fetch(found)


def read_step(found: Tensor) -> tuple[Tensor, float, Signals | None]:
    """Read what `agree_on_step` has found, once it is on the CPU: the sums, the gradient norm and
    the signal."""
    norm, *counts = found[: 1 + len(CAUGHT)].tolist()
    return found[1 + len(CAUGHT) :].view(-1, ROW), norm, name_signal(counts)


def agree_on_signal(accelerator: Accelerator) -> Signals | None:
    """Return the signal that any rank has caught, or None (a collective call)."""
    mark()
    if accelerator.num_processes == 1:
        return received_signal()
    return name_signal(accelerator.reduce(flag_signal(received_signal(), accelerator)).tolist())


def turns(n: int, accelerator: Accelerator) -> Iterator[tuple[int, bool]]:
    """Deal n passes out to the ranks: yields (index of a pass, whether it counts).

    Each rank gets equally many, since a sharded model needs all ranks in each pass; passes repeated
    for this at the end do not count.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for i in range(rank, -(-n // ranks) * ranks, ranks):
        yield i % n, i < n


def flag_signal(stop: Signals | None, accelerator: Accelerator) -> Tensor:
    """Tell which signal this rank has to stop on: float64, 0 or 1 for each of `CAUGHT`."""
    flags = [float(number == stop) for number in CAUGHT]
    return send(torch.tensor(flags, dtype=torch.float64), accelerator.device)


def name_signal(counts: Sequence[float]) -> Signals | None:
    """Name the signal that ranks have caught, from the number of them for each of `CAUGHT`."""
    return next((number for number, count in zip(CAUGHT, counts, strict=True) if count), None)


def processor(device: torch.device) -> str:
    """Name the kind of processor that computes; two of the same kind round in the same way."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def explain_difference(model: nn.Module, accelerator: Accelerator) -> str:
    """Compare the weights of all ranks, unless each holds only its shard (a collective call).

    model: float32. Sums of the bits do not depend on the order of addition. Ranks on another kind
    of processor than rank 0 are left out: it may round otherwise.
    Returns "", or the error message that names a rank with other weights than rank 0.
    """
    if accelerator.num_processes == 1 or asks_for_shards():
        return ""
    parameters = (parameter.detach() for parameter in model.parameters())
    bits = sum(p.view(torch.int32).sum(dtype=torch.int64) for p in parameters).item()
    mine = socket.gethostname(), processor(accelerator.device), bits
    (_, kind, first), *others = gather_object([mine])
    for rank, (host, other_kind, other) in enumerate(others, 1):
        if other_kind == kind and other != first:
            return (
                f"rank {rank} on {host} has other weights than rank 0, so no checkpoint is "
                "written; the memory or the GPU of one of them is faulty. Start the same command "
                "again, on another machine if this recurs, to resume from the previous checkpoint"
            )
    return ""
