"""The record of a run, read from its folder: its settings, and each metric by steps and tokens
seen.
"""

import statistics
from collections import defaultdict
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.common.errors import check
from pretrain.config import Phase, phase_at, phases_of
from pretrain.describe import count_work
from pretrain.read_run import read_run_config
from pretrain.tracking import read_metrics

RECENT = 20  # log lines that the present speed and loss are taken from
MOST_LINES = 3000  # log lines to read of a run without its evaluations; a chart shows no more


class RunRecord:
    """A run, read from its folder. Raises `UserError` if the folder is not a run folder."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        for name in ("metrics.jsonl", "config.yaml"):
            check(
                (self.run_dir / name).exists(),
                f"{self.run_dir} holds no {name}; give the run_dir of a run that has started",
            )
        self.name = self.run_dir.resolve().name
        self.config = read_run_config(self.run_dir)
        self.lines = read_metrics(self.run_dir / "metrics.jsonl", MOST_LINES, RECENT)

    @cached_property
    def phases(self) -> list[Phase]:
        return phases_of(self.config)

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self.lines[-1]["step"] if self.lines else 0

    @cached_property
    def columns(self) -> dict[str, list[tuple[int, float]]]:
        """Map each metric to its (step, value), without the values that were not finite."""
        columns: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for line in self.lines:
            step = line["step"]
            for name, value in line.items():
                if value is not None:
                    columns[name].append((step, value))
        return columns

    def series(self, name: str) -> list[tuple[int, float]]:
        """List (step, value) of a metric; empty if it was not recorded."""
        return self.columns.get(name, [])

    def losses(self, split: str) -> list[tuple[int, float]]:
        """List (step, MLM loss) of a split, `train` or `eval`, where comparable with the newest
        held-out loss: single segments, the only kind in some phases, are easier than pairs.
        """
        points, judged = self.series(f"{split}/mlm_loss"), self.series("eval/mlm_loss")
        if not judged:
            return []
        kind = self.is_single(judged[-1][0])
        return [(step, loss) for step, loss in points if self.is_single(step) == kind]

    def is_single(self, done: int) -> bool:
        """Tell whether step `done` had single segments only."""
        return phase_at(self.phases, max(done - 1, 0)).data.single_segment_prob == 1

    def curve(self, name: str) -> list[tuple[float, float]]:
        """List (tokens seen, value) of a metric."""
        steps, tokens = self.token_counts
        points = self.series(name)
        seen = np.interp([step for step, _ in points], steps, tokens)
        return [(x, value) for x, (_, value) in zip(seen.tolist(), points, strict=True)]

    @cached_property
    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Count the tokens seen: (steps, tokens seen after each).

        Each log line gives the mean tokens of a sequence, and the phases the sequences of a step.
        """
        rates = dict(self.series("perf/sequences_per_second"))
        steps, tokens = [0], [0.0]
        for step, of_tokens in self.series("perf/tokens_per_second"):
            sequences = sum(
                max(0, min(step, phase.end) - max(steps[-1], phase.start))
                * phase.train.global_batch_size
                for phase in self.phases
            )
            steps.append(step)
            tokens.append(tokens[-1] + sequences * of_tokens / max(rates.get(step, np.inf), 1e-9))
        return np.array(steps), np.array(tokens)

    @cached_property
    def tokens(self) -> float:
        """Return the number of tokens seen."""
        return float(np.interp(self.step, *self.token_counts))

    def seconds_left(self) -> float | None:
        """Estimate the time to the end from the present speed; None if it is not known."""
        rates = [rate for _, rate in self.series("perf/sequences_per_second")[-RECENT:] if rate]
        if not rates:
            return None
        phase = phase_at(self.phases, self.step - 1)
        longest = phase.data.max_seq_length  # sequences of a later phase take longer
        work = count_work(self.phases, self.step, self.config.train.max_steps)
        return work / longest / statistics.median(rates)
