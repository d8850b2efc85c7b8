"""Health checks of a run: warn once about each kind of problem, count the steps that are skipped
because their gradient is not finite, and explain why a run has failed.

All ranks see the same numbers and take the same decisions. The state is kept in the checkpoint.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.sampling.baselines import unigram_entropy
from pretrain.checkpoint import last_good, step_of
from pretrain.config import Phase

MOST_SKIPPED = 5  # steps in a row, after which the run stops
RECENT = 100  # steps, whose medians say what is usual
PLATEAU = 0.1  # nats below the unigram entropy; a model that uses context gets past this
EXPLODING = 10  # x the usual gradient norm, or MLM loss of one step
SPIKE, SPIKE_STEPS = 1.0, 10  # nats above the usual MLM loss, in each of as many steps in a row
DIVERGED = 2  # x the loss of a uniform guess, which no working model exceeds
FEWEST_PAIRS = 100  # of a log line, to judge their accuracy by
MUCH_WAITING, MUCH_UNKNOWN = 0.05, 0.05  # warn above: share of time, share of tokens


class Monitor:
    """Check gradients and metrics as a run goes on.

    counts: int64 (V,), occurrences of each token in the training split.
    unknown: id of [UNK].
    state: `Monitor.state` of the checkpoint; empty in a new run.
    log_line: called with each warning.
    start: step that this start of the run goes on from.
    """

    def __init__(
        self,
        phases: list[Phase],
        counts: np.ndarray,
        unknown: int,
        state: dict,
        log_line: Callable[[str], None],
        start: int,
    ):
        fresh = {"skipped": 0, "in_a_row": 0, "norms": [], "said": [], "loss": 0.0}
        fresh |= {"losses": [], "above": 0}
        fresh |= {"rollbacks": 0, "went_back_to": None, "rolled_back_at": 0}
        self.state = fresh | state
        train, self.log_line, self.entropy = phases[0].train, log_line, unigram_entropy(counts)
        self.log_every, self.start = train.log_every, start
        self.guessing = math.log(len(counts))
        # by this step even slow recipes like BERT's have left the plateau, if the model learns
        self.late = min(train.max_steps // 2, train.warmup_steps + 5000)
        # likewise for pairs, from the first phase that has any to the end of the last
        paired = [one for one in phases if one.data.single_segment_prob < 1] or phases
        first, end = paired[0].start, paired[-1].end
        self.late_for_pairs = first + min((end - first) // 2, train.warmup_steps + 5000)
        share = counts[unknown] / counts.sum()
        if share > MUCH_UNKNOWN:
            self.warn(
                "unknown", f"{share:.0%} of the training tokens are [UNK]; check the section vocab"
            )

    def warn(self, kind: str, line: str) -> None:
        """Log a warning, once for each kind."""
        if kind not in self.state["said"]:
            self.state["said"].append(kind)
            self.log_line(f"warning: {line}")

    def has_finite_gradient(self, step: int, norm: float) -> bool:
        """Record the gradient norm of `step`, and tell whether it is finite; else counts the skip.

        Warns of a norm far above the usual one.
        """
        state, norms = self.state, self.state["norms"]
        if not math.isfinite(norm):
            state["skipped"] += 1
            state["in_a_row"] += 1
            self.warn("skipped", f"the gradient of step {step:,} is {norm}; the step is skipped")
            return False
        state["in_a_row"] = 0
        if len(norms) == RECENT and norm > EXPLODING * (usual := statistics.median(norms)):
            line = (
                f"the gradient of step {step:,} has norm {norm:.3g}, but the median is {usual:.3g}"
            )
            self.warn("exploding", f"{line}; train.learning_rate may be too high")
        state["norms"] = [*norms, norm][-RECENT:]
        return True

    def should_abort(self) -> bool:
        """Tell whether `MOST_SKIPPED` steps in a row were skipped."""
        return self.state["in_a_row"] >= MOST_SKIPPED

    def has_spiked(self, loss: float, is_new_phase: bool) -> bool:
        """Record the MLM loss of a step, and tell whether it is the last of `SPIKE_STEPS` in a row
        that are `SPIKE` nats above the usual loss.

        loss: of a step, in nats; a skipped step does not count.
        is_new_phase: forget the usual loss, which depends on the length and mask rate.
        """
        state = self.state
        if is_new_phase:
            state |= {"losses": [], "above": 0}
        losses = state["losses"]
        if state["in_a_row"]:  # the step was skipped
            return False
        if len(losses) == RECENT and loss > (usual := statistics.median(losses)) + SPIKE:
            state["above"] += 1
            if loss > EXPLODING * usual:
                line = f"the MLM loss of one step is {loss:.3g}, but the median is {usual:.3g}"
                self.warn("outlier", f"{line}; some of its text may not be text")
        elif math.isfinite(loss):
            state |= {"losses": [*losses, loss][-RECENT:], "above": 0}
        return state["above"] == SPIKE_STEPS

    def explain_spike(self, done: int) -> str:
        """Begin the message about a spike that the first `done` steps end with."""
        usual = statistics.median(self.state["losses"])
        return (
            f"the MLM loss of the {SPIKE_STEPS} steps to {done:,} is more than {SPIKE:g} nats "
            f"above the usual {usual:.3f}"
        )

    def accept_spike(self, done: int) -> None:
        """Warn, once, and take the loss from here on as the usual one."""
        self.warn("spike", self.explain_spike(done))
        self.state |= {"losses": [], "above": 0}

    def note_rollback(self, done: int, to: str) -> None:
        """Log and count a return to the weights of checkpoint `to`."""
        self.log_line(
            f"warning: {self.explain_spike(done)}; the run continues with the weights of {to} and "
            "skips the data since then"
        )
        self.state["rollbacks"] += 1
        self.state |= {"above": 0, "went_back_to": to, "rolled_back_at": done}

    @property
    def passed_over(self) -> range:
        """The steps after the checkpoint that the run went back to last, up to where it did."""
        to = self.state["went_back_to"]
        return range(step_of(Path(to)) + 1, self.state["rolled_back_at"] + 1) if to else range(0)

    @property
    def is_sick(self) -> bool:
        """Tell whether the last step was skipped, or its loss far above the usual."""
        return bool(self.state["in_a_row"] or self.state["above"])

    def check_health(self, done: int, metrics: dict[str, float], pairs: float) -> dict[str, float]:
        """Warn about slow data, a loss on the plateau and pair accuracy at chance.

        metrics: those logged after `done` steps, means over `pairs` sentence pairs.
        Returns further metrics to log: skipped steps, and 1 for each warning so far.
        """
        wait = metrics["perf/data_wait"]
        # the first interval of a start always waits, since prefetching starts with it
        if wait > MUCH_WAITING and done > self.start + self.log_every:
            self.warn("data_wait", f"{wait:.0%} of the time is spent waiting for data")
        loss, right = metrics["train/mlm_loss"], metrics.get("train/nsp_accuracy", 1.0)
        after = f"after {done:,} step{'s' * (done != 1)}"
        if math.isfinite(loss):  # else all steps since the last line were skipped
            self.state["loss"] = loss
        if self.is_reached(self.late, done) and loss > self.entropy - PLATEAU:
            line = f"{after} the MLM loss is {loss:.3f}, so the model does not use context yet"
            beside = f"unigram entropy of the training text {self.entropy:.3f}"
            self.warn("plateau", f"{line} ({beside})")
        # two standard errors of a coin toss; few pairs cannot show a difference
        two_sigma = 1 / math.sqrt(pairs) if pairs >= FEWEST_PAIRS else -math.inf
        if self.is_reached(self.late_for_pairs, done) and right < 0.5 + two_sigma:
            line = f"{after} the accuracy on pairs is {right:.3f}, no better than guessing"
            self.warn("nsp", line)
        said = {f"monitor/{kind}": 1.0 for kind in self.state["said"] if kind != "data_wait"}
        counts = {"skipped_steps": self.state["skipped"], "rollbacks": self.state["rollbacks"]}
        return {f"train/{name}": count for name, count in counts.items()} | said

    def is_reached(self, step: int, done: int) -> bool:
        """Tell whether a step belongs to the log line after `done` steps."""
        return done - self.log_every < step <= done

    def explain_skips(self, step: int, run_dir: Path) -> str:
        """Return the error message to stop with after `MOST_SKIPPED` skips, the last at `step`."""
        return (
            f"the gradients of {MOST_SKIPPED} steps in a row are not finite, the last that of "
            f"step {step:,} ({run_dir / 'metrics.jsonl'} has the examples of each); the last good "
            f"checkpoint is {last_good(run_dir / 'checkpoints') or 'none'}. Lower "
            "train.learning_rate or lengthen train.warmup_steps, in another run_dir"
        )

    def explain_divergence(self, evaluation: dict[str, float | None]) -> str:
        """Return the error message of a finished run whose model is lost; "" for any other.

        evaluation: the last one; without any the training loss decides. A checkpoint holds null for
        a loss that was not finite.
        """
        loss = evaluation.get("eval/mlm_loss", self.state["loss"])
        loss = math.nan if loss is None else loss
        if loss <= DIVERGED * self.guessing:
            return ""
        return (
            f"the run has diverged: its MLM loss is {loss:,.6g} nats, but a uniform guess has "
            f"{self.guessing:.3g}; no export is written. Lower train.learning_rate or lengthen "
            "train.warmup_steps, in another run_dir"
        )
