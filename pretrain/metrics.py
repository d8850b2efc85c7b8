"""Numbers about training: losses and accuracies from sums over any number of batches, and speed."""

import math
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from data_pipeline.sampling.batches import Batch

# dense bf16 operations a second, from NVIDIA's data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


def to_metrics(sums: Tensor, prefix: str, objectives: tuple) -> dict[str, float]:
    """Mean losses (nats) and accuracies from the summed rows of the objectives, (objectives, ROW).

    Means over no masked tokens are 0; where nothing was asked at all they are NaN.
    """
    metrics, total = {}, 0.0
    nothing = not sums[:, -1].any()  # every step was skipped
    for one, (loss, right, count) in zip(objectives, sums.tolist(), strict=True):
        count = math.nan if nothing else max(count, 1)
        metrics |= {f"{one.name}_loss": loss / count, f"{one.name}_accuracy": right / count}
        total += one.weight * loss / count
    return {f"{prefix}/{name}": value for name, value in (metrics | {"loss": total}).items()}


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process. More after the first steps and the first
    evaluation than at them would mean that other shapes have it compile again."""
    from torch._dynamo.utils import counters  # seconds, for those only who compile

    return counters["stats"]["unique_graphs"]


def peak_flops(device: torch.device) -> float | None:
    """What MFU is a share of: the card's dense bf16 operations a second; None if unknown."""
    if device.type != "cuda":
        return None
    words = re.findall(r"\w+", torch.cuda.get_device_name(device))  # NVIDIA A100-SXM4-80GB
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


class Clock:
    """Real tokens, sequences and operations a second of all processes, and the share of time spent
    waiting for data.

    MFU is `count_flops` a second, divided by `peak_flops` of the cards (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """

    def __init__(self, world_size: int, peak: float | None = None):
        self.world_size, self.peak = world_size, peak
        self.reset()

    def reset(self) -> None:
        self.started, self.waited = time.perf_counter(), 0.0
        self.tokens = self.sequences = self.flops = 0

    def waiting(self, steps: Iterable[tuple[list[Batch], int]]) -> Iterator[list[Batch]]:
        """The batches of `steps`, which come with their operations; the wait for each and what is
        in it are added up."""
        steps, asked = iter(steps), time.perf_counter()
        for batches, flops in steps:
            self.waited += time.perf_counter() - asked
            self.tokens += sum(len(batch.input_ids) for batch in batches)
            self.sequences += sum(len(batch.next_sentence_label) for batch in batches)
            self.flops += flops
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
            "perf/tflops": 1e-12 * self.flops * self.world_size / seconds,
            "perf/data_wait": self.waited / seconds,
            "perf/memory_gb": peak_memory() / 1e9,
        }
        if self.peak:
            rates["perf/mfu"] = self.flops / seconds / self.peak
        self.reset()
        return rates


def peak_memory() -> int:
    """Most bytes that this process has held at once: of its card, or without one of the machine."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
