"""Beside the loop: names a sick run in one line, each kind of trouble once, and counts the steps
whose gradient is no number, which are skipped.

What it sees is the same on all ranks, so what it says is too; all it keeps is in the checkpoint.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrain.checkpoint import to_json
from pretrain.config import Phase, TrainConfig, phase_at
from pretrain.evaluate import unigram_entropy

MOST_SKIPPED = 5  # steps in a row: a sixth would not be better
PLATEAU = 0.1  # nats below the unigram entropy that a model which reads its context has passed
EXPLODING, NORMS = 10, 100  # times the median of so many gradient norms
MUCH_WAITING, MUCH_UNKNOWN = 0.05, 0.05  # shares of the time, and of the tokens


class Monitor:
    """`counts` int64 (V,) are the pieces of the training split, `unknown` the id of [UNK], `state`
    what an earlier run kept; `say` is called with each line."""

    def __init__(
        self,
        train: TrainConfig,
        counts: np.ndarray,
        unknown: int,
        state: dict,
        say: Callable[[str], None],
    ):
        self.state = {"skipped": 0, "in_a_row": 0, "norms": [], "said": []} | state
        self.train, self.say, self.entropy = train, say, unigram_entropy(counts)
        # a model that learns has left the plateau by then, slow recipes like BERT's included
        self.late = min(train.max_steps // 2, train.warmup_steps + 5000)
        share = counts[unknown] / counts.sum()
        if share > MUCH_UNKNOWN:
            self.warn("unknown", f"[UNK] is {share:.0%} of the training tokens; vocab misses much")

    def warn(self, kind: str, line: str) -> None:
        if kind not in self.state["said"]:
            self.state["said"].append(kind)
            self.say(f"warning: {line}")

    def has_finite_gradient(self, step: int, norm: float) -> bool:
        """Whether update `step` may be made with a gradient of this norm."""
        state, norms = self.state, self.state["norms"]
        if not math.isfinite(norm):
            state["skipped"] += 1
            state["in_a_row"] += 1
            self.warn("skipped", f"the gradient of step {step:,} is {norm}; it is skipped")
            return False
        state["in_a_row"] = 0
        if len(norms) == NORMS and norm > EXPLODING * (usual := statistics.median(norms)):
            line = f"the gradient of step {step:,} has norm {norm:.3g}, the median is {usual:.3g}"
            self.warn("exploding", f"{line}; does train.learning_rate suit?")
        state["norms"] = [*norms, norm][-NORMS:]
        return True

    def should_abort(self) -> bool:
        """Whether so many steps in a row were skipped that the run has to stop."""
        return self.state["in_a_row"] >= MOST_SKIPPED

    def check_health(self, done: int, metrics: dict[str, float], pairs: float) -> dict[str, float]:
        """Look at the metrics that are logged after `done` steps, means over so many pairs; those
        to log beside them."""
        wait = metrics["perf/data_wait"]
        # the first batches are always waited for
        if wait > MUCH_WAITING and done > self.train.log_every:
            self.warn("data_wait", f"{wait:.0%} of the time is spent waiting for data")
        loss, right = metrics["train/mlm_loss"], metrics.get("train/nsp_accuracy", 1.0)
        is_late = done - self.train.log_every < self.late <= done  # true once
        if is_late and loss > self.entropy - PLATEAU:
            line = f"after {done:,} steps the MLM loss is {loss:.3f}, no context is used yet"
            self.warn("plateau", f"{line} (unigram entropy {self.entropy:.3f})")
        two_sigma = 1 / math.sqrt(max(pairs, 1))  # of a coin
        if is_late and right < 0.5 + two_sigma:
            self.warn("nsp", f"after {done:,} steps NSP accuracy is {right:.3f}, that of guessing")
        said = {f"monitor/{kind}": 1.0 for kind in self.state["said"] if kind != "data_wait"}
        return {"train/skipped_steps": self.state["skipped"]} | said

    def give_up(self, run_dir: Path, step: int, phases: list[Phase], losses: list[float]) -> str:
        """Write `bad_batch.json`, what it takes to build the last batch again by
        `BatchSource.batch(first, count)` of its phase; the line to stop with."""
        phase = phase_at(phases, step)
        size, number = phase.train.global_batch_size, phases.index(phase)
        found = {"step": step, "phase": number, "first": (step - phase.start) * size}
        found |= {"count": size, "losses": losses}
        (run_dir / "bad_batch.json").write_text(to_json(found) + "\n")
        return (
            f"the gradients of {MOST_SKIPPED} steps in a row are no numbers, the last is step "
            f"{step:,} (its examples are in {run_dir / 'bad_batch.json'}); lower "
            "train.learning_rate or lengthen train.warmup_steps, in another run_dir"
        )
