"""Decide alike on all ranks: a signal or a NaN that one rank alone has seen counts for all.

A rank that decided by itself would skip a step that the others make, or wait for others that have
stopped.
"""

from collections.abc import Sequence
from signal import Signals

import torch
from accelerate import Accelerator
from torch import Tensor

from data_pipeline.common.signals import CAUGHT, received_signal


def agree_on_step(sums: Tensor, accelerator: Accelerator) -> tuple[Tensor, Signals | None]:
    """Add up the sums of a step over all ranks (a collective call).

    sums: float64 (objectives, ROW).
    Returns the sums, and the signal that any rank has caught; one reduction carries both.
    """
    found = torch.cat([sums.flatten(), flag_signal(accelerator)])
    found = accelerator.reduce(found)
    return found[: sums.numel()].view_as(sums), name_signal(found[sums.numel() :].tolist())


def agree_on_signal(accelerator: Accelerator) -> Signals | None:
    """Return the signal that any rank has caught, or None (a collective call)."""
    if accelerator.num_processes == 1:
        return received_signal()
    return name_signal(accelerator.reduce(flag_signal(accelerator)).tolist())


def flag_signal(accelerator: Accelerator) -> Tensor:
    """Tell which signal this rank has caught: float64, 0 or 1 for each of `CAUGHT`."""
    flags = [float(number == received_signal()) for number in CAUGHT]
    return torch.tensor(flags, dtype=torch.float64, device=accelerator.device)


def name_signal(counts: Sequence[float]) -> Signals | None:
    """Name the signal that ranks have caught, from the number of them for each of `CAUGHT`."""
    return next((number for number, count in zip(CAUGHT, counts, strict=True) if count), None)
