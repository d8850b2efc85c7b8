"""Health checks of a run: warn once about each kind of trouble, and count the steps that are
skipped because their gradient is not finite.

All ranks see the same numbers and take the same decisions. The state is kept in the checkpoint.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.sampling.baselines import unigram_entropy
from pretrain.checkpoint import to_json
from pretrain.config import Phase, TrainConfig, phase_at

MOST_SKIPPED = 5  # steps in a row, after which the run stops
PLATEAU = 0.1  # nats below the unigram entropy; a model that uses context gets past this
EXPLODING, NORMS = 10, 100  # warn above 10 x the median of the last 100 gradient norms
MUCH_WAITING, MUCH_UNKNOWN = 0.05, 0.05  # warn above: share of time, share of tokens


class Monitor:
    """Check gradients and metrics as a run goes on.

    counts: int64 (V,), occurrences of each token in the training split.
    unknown: id of [UNK].
    state: `Monitor.state` of the checkpoint; empty in a new run.
    log_line: called with each warning.
    """

    def __init__(
        self,
        train: TrainConfig,
        counts: np.ndarray,
        unknown: int,
        state: dict,
        log_line: Callable[[str], None],
    ):
        self.state = {"skipped": 0, "in_a_row": 0, "norms": [], "said": []} | state
        self.train, self.log_line, self.entropy = train, log_line, unigram_entropy(counts)
        # by this step even slow recipes like BERT's have left the plateau, if the model learns
        self.late = min(train.max_steps // 2, train.warmup_steps + 5000)
        share = counts[unknown] / counts.sum()
        if share > MUCH_UNKNOWN:
            self.warn("unknown", f"[UNK] is {share:.0%} of the training tokens; check vocab")

    def warn(self, kind: str, line: str) -> None:
        """Log a warning, once for each kind."""
        if kind not in self.state["said"]:
            self.state["said"].append(kind)
            self.log_line(f"warning: {line}")

    def has_finite_gradient(self, step: int, norm: float) -> bool:
        """Tell whether to make update `step`; False if the gradient norm is not finite."""
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
        """Tell whether `MOST_SKIPPED` steps in a row were skipped."""
        return self.state["in_a_row"] >= MOST_SKIPPED

    def check_health(self, done: int, metrics: dict[str, float], pairs: float) -> dict[str, float]:
        """Warn about slow data, a loss on the plateau and NSP at chance level.

        metrics: those logged after `done` steps, means over `pairs` sentence pairs.
        Returns further metrics to log: skipped steps, and 1 for each warning so far.
        """
        wait = metrics["perf/data_wait"]
        # the first interval always waits, since prefetching starts with it
        if wait > MUCH_WAITING and done > self.train.log_every:
            self.warn("data_wait", f"{wait:.0%} of the time is spent waiting for data")
        loss, right = metrics["train/mlm_loss"], metrics.get("train/nsp_accuracy", 1.0)
        is_late = done - self.train.log_every < self.late <= done  # true at one log line
        if is_late and loss > self.entropy - PLATEAU:
            line = f"after {done:,} steps the MLM loss is {loss:.3f}, no context is used yet"
            self.warn("plateau", f"{line} (unigram entropy {self.entropy:.3f})")
        two_sigma = 1 / math.sqrt(max(pairs, 1))  # of the accuracy of a fair coin
        if is_late and right < 0.5 + two_sigma:
            self.warn("nsp", f"after {done:,} steps NSP accuracy is {right:.3f}, that of guessing")
        said = {f"monitor/{kind}": 1.0 for kind in self.state["said"] if kind != "data_wait"}
        return {"train/skipped_steps": self.state["skipped"]} | said

    def dump_bad_batch(
        self, run_dir: Path, step: int, phases: list[Phase], losses: list[float]
    ) -> str:
        """Write `bad_batch.json`, from which the batch of `step` can be rebuilt.

        `BatchSource.batch(first, count)` of its phase builds it.
        Returns the error message to stop with.
        """
        phase = phase_at(phases, step)
        size, number = phase.train.global_batch_size, phases.index(phase)
        found = {"step": step, "phase": number, "first": (step - phase.start) * size}
        found |= {"count": size, "losses": losses}
        (run_dir / "bad_batch.json").write_text(to_json(found) + "\n")
        return (
            f"the gradients of {MOST_SKIPPED} steps in a row are not finite, the last is step "
            f"{step:,} (its examples are in {run_dir / 'bad_batch.json'}); lower "
            "train.learning_rate or lengthen train.warmup_steps, in another run_dir"
        )
