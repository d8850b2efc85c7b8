"""Allocate the memory of the largest micro-batch at the start of a run, as PyTorch's tuning guide
recommends for inputs of variable length, and say what to do if there is not enough.

Each micro-batch has a different number of tokens, and a larger one does not fit into memory that a
smaller one freed. So without this a process grows for hours, and a run that does not fit fails only
then.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import numpy as np
import torch
from torch import Tensor

from data_pipeline.common.errors import UserError
from data_pipeline.sampling.batch_source import count_passes, largest_pass
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from pretrain.config import Phase
from pretrain.metrics import Clock
from pretrain.run_setup import Run


def preallocate_memory(run: Run, weights: Tensor, step: int, clock: Clock) -> None:
    """Pass the largest micro-batch of each phase that ends after `step` through the model and back,
    as a step does, and drop the gradients (a collective call).

    weights: of the objectives, (objectives,). clock: does not count the time.
    """
    with clock.paused():
        for phase in run.phases:
            if phase.end > step:
                processes = run.accelerator.num_processes
                sizes = phase.train.global_batch_size, phase.train.micro_batch_size
                passes = count_passes(*sizes, processes)
                batch = largest_batch(run.store, phase, processes).to(run.accelerator.device)
                torch.manual_seed(run.config.seed)
                for _ in range(min(passes, 2)):  # the second has the gradients of the first
                    rows = run.model(batch)
                    (weights * rows[:, 0]).sum().backward()
                run.bare.zero_grad()


def largest_batch(store: TokenStore, phase: Phase, world_size: int) -> Batch:
    """Build as many sequences as a process has in one pass of a phase, each of full length, with
    the phase's share of masked positions."""
    train, data = phase.train, phase.data
    count = largest_pass(train.global_batch_size, train.micro_batch_size, world_size)
    length = data.max_seq_length
    most = ceil(data.masked_lm_prob * length)
    masked = torch.arange(1, 1 + min(most, data.max_predictions_per_seq or most, length - 2))
    masked_positions = (length * torch.arange(count)[:, None] + masked).flatten()
    input_ids = torch.from_numpy(np.resize(store.tokens[: count * length], count * length)).long()
    is_pair = data.objective != "none" and data.single_segment_prob < 1
    pairs = torch.full((count,), 0 if is_pair else -100)
    lengths = torch.full((count,), length)
    return Batch.of(input_ids, lengths, masked_positions, next_sentence_label=pairs)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Raise `UserError` if torch cannot allocate a tensor."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
            raise
        wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        raise UserError(
            f"out of memory{f' at a tensor of {wanted[1]}' if wanted else ''}; lower "
            "train.micro_batch_size, also in a phase, or set train.gradient_checkpointing=true, "
            "and run the same command again: the results stay the same"
        ) from None
