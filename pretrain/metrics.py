"""Numbers about training: losses and accuracies from sums over any number of batches, and speed."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from data_pipeline.batches import Batch

TALLY = 6  # MLM loss, NSP loss, MLM right, NSP right, masked tokens, pairs


def tally(losses: Tensor, right: Tensor, batch: Batch) -> Tensor:
    """The sums of a batch, from what the model says of it, to be added to those of others: float64
    (TALLY,)."""
    counts = losses.new_tensor([len(batch.masked_labels), len(batch.next_sentence_label)])
    return torch.cat([t.detach().double() for t in (losses, right, counts)])


def to_metrics(sums: Tensor, prefix: str, objective: str) -> dict[str, float]:
    """Mean losses (nats) and accuracies from a tally; without NSP's for objective "none"."""
    mlm, nsp, mlm_right, nsp_right, masked, pairs = sums.tolist()
    masked = max(masked, 1)
    metrics = {"mlm_loss": mlm / masked, "mlm_accuracy": mlm_right / masked}
    if objective != "none":
        metrics |= {"nsp_loss": nsp / pairs, "nsp_accuracy": nsp_right / pairs}
    metrics["loss"] = mlm / masked + metrics.get("nsp_loss", 0.0)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


class Clock:
    """Tokens and sequences a second of all processes, and the share of time spent waiting for
    data."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.reset()

    def reset(self) -> None:
        self.started, self.waited, self.tokens, self.sequences = time.perf_counter(), 0.0, 0, 0

    def waiting(self, steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """`steps`, with the wait for each and what is in it added up."""
        steps, asked = iter(steps), time.perf_counter()
        for batches in steps:
            self.waited += time.perf_counter() - asked
            self.tokens += sum(len(batch.input_ids) for batch in batches)
            self.sequences += sum(len(batch.next_sentence_label) for batch in batches)
            yield batches
            asked = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not training's."""
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def speed(self) -> dict[str, float]:
        """Rates since the last call; padding is never counted, there is none."""
        seconds = time.perf_counter() - self.started
        rates = {
            "perf/tokens_per_second": self.tokens * self.world_size / seconds,
            "perf/sequences_per_second": self.sequences * self.world_size / seconds,
            "perf/data_wait": self.waited / seconds,
        }
        self.reset()
        return rates
