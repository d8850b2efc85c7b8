"""Turn sums over batches into losses and accuracies, and measure the speed of training."""

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

# dense bf16 FLOP/s, from NVIDIA's data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12}
PEAK_FLOPS |= {"L40S": 362e12, "L4": 121e12}
PEAK_FLOPS_OF_CARDS = {("H100", "PCIe"): 756e12}  # slower than SXM, as all these
PEAK_FLOPS_OF_CARDS |= dict.fromkeys((("H100", "NVL"), ("H200", "NVL")), 835e12)


def to_metrics(sums: Tensor, prefix: str, objectives: tuple) -> dict[str, float]:
    """Compute mean losses (nats) and accuracies from the summed rows of the objectives.

    sums: (objectives, ROW).
    Without labels, MLM has means of 0, or NaN if no objective has any labels; other objectives have
    none, such as NSP if all sequences are single segments.
    """
    metrics, total = {}, 0.0
    nothing = not sums[:, -1].any()  # every step since the last log line was skipped
    for one, (loss, right, count) in zip(objectives, sums.tolist(), strict=True):
        if not count and one.name != "mlm":
            continue
        count = math.nan if nothing else max(count, 1)
        metrics |= {f"{one.name}_loss": loss / count, f"{one.name}_accuracy": right / count}
        total += one.weight * loss / count
    return {f"{prefix}/{name}": value for name, value in (metrics | {"loss": total}).items()}


def area_under_curve(counts: Tensor) -> float:
    """Compute how often a replaced token scores higher than an original one; 0.5 is chance.

    counts: (2, BINS), as `loss.count_scores` returns; ties count half. NaN if either kind has no
    token.
    """
    original, replaced = counts.double().cpu()  # a GPU has no deterministic cumsum
    lower = original.cumsum(0) - original / 2
    return float((lower * replaced).sum() / (original.sum() * replaced.sum()))


def compiled_graphs() -> int:
    """Count the graphs that torch.compile has built in this process.

    A count that grows after the first steps and the first evaluation means recompilation.
    """
    # private: torch has no public counter; imported here because it takes seconds
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def peak_flops(device: torch.device) -> float | None:
    """Look up the peak dense bf16 FLOP/s of a GPU; None if it is unknown."""
    if device.type != "cuda":
        return None
    words = re.findall(r"\w+", torch.cuda.get_device_name(device))  # as in NVIDIA A100-SXM4-80GB
    for names, flops in PEAK_FLOPS_OF_CARDS.items():
        if set(names) <= set(words):
            return flops
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


class Clock:
    """Measure tokens, sequences and FLOPs per second, and the share of time spent on data.

    Rates are over all processes; padding does not count. MFU is FLOP/s by the FLOP count of the
    model divided by `peak_flops` (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """

    def __init__(self, world_size: int, peak: float | None = None):
        self.world_size, self.peak = world_size, peak
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.started, self.waited, self.away = time.perf_counter(), 0.0, 0.0
        self.tokens = self.sequences = self.flops = 0

    def waiting(self, steps: Iterable[tuple[list[Batch], int, int]]) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, adding up their sizes and the time spent waiting.

        steps: (micro-batches and their FLOPs, of this process; sequences of all processes), since
        one process may have more of the sequences than another.
        """
        steps, asked = iter(steps), time.perf_counter()
        for batches, flops, sequences in steps:
            self.waited += time.perf_counter() - asked
            scale = sequences / sum(len(batch.next_sentence_label) for batch in batches)
            self.tokens += scale * sum(len(batch.input_ids) for batch in batches)
            self.sequences += sequences
            self.flops += scale * flops
            yield batches
            asked = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the rates."""
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.started, self.away = self.started + seconds, self.away + seconds

    def speed(self) -> dict[str, float]:
        """Compute the rates since the last call and start a new interval."""
        seconds = time.perf_counter() - self.started
        rates = {
            "perf/tokens_per_second": self.tokens / seconds,
            "perf/sequences_per_second": self.sequences / seconds,
            "perf/tflops": 1e-12 * self.flops / seconds,
            "perf/data_wait": self.waited / seconds,
            "perf/paused": self.away / (self.away + seconds),
            "perf/memory_gb": peak_memory() / 1e9,
        }
        if self.peak:
            rates["perf/mfu"] = self.flops / self.world_size / seconds / self.peak
        self.reset()
        return rates


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, on the GPU if it uses one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
