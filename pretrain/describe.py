"""Describe a run on the terminal: at its start, at each evaluation, and at its end."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from data_pipeline.common.errors import red
from data_pipeline.sampling.batch_source import BatchSource, count_passes, largest_pass
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.pairs import LABELS
from data_pipeline.sampling.vocabulary import Vocabulary
from pretrain.checkpoint import list_checkpoints
from pretrain.config import Config, Phase, phase_at
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import count_weights


def describe_start(
    config: Config,
    model: PretrainingModel,
    phases: list[Phase],
    sources: list[BatchSource],
    start: int,
    accelerator: Accelerator,
) -> None:
    """Print the size of the model, how each step is divided, and one input sequence."""
    processes, steps = accelerator.num_processes, config.train.max_steps
    print(f"run: {config.run_dir}, whose config.yaml has all settings; step {start:,} to {steps:,}")
    print(
        f"model: {count_weights(model):,} parameters, on {processes} x "
        f"{accelerator.device.type} in {accelerator.mixed_precision.replace('no', 'fp32')}"
    )
    for phase, source in zip(phases, sources, strict=True):
        size, most = phase.train.global_batch_size, phase.train.micro_batch_size
        passes = count_passes(size, most, processes)
        sequences = source.part_size(0) * source.n_parts
        print(
            f"step {phase.start:,} to {phase.end:,}: {size:,} sequences of at most "
            f"{phase.data.max_seq_length} tokens per step = {processes} x {passes} passes of at "
            f"most {largest_pass(size, most, processes)}; {sequences:,} per epoch, "
            f"{(phase.end - phase.start) * size / sequences:,.1f} epochs"
        )
    phase = phase_at(phases, start)
    example = (start - phase.start) * phase.train.global_batch_size
    batch = sources[phases.index(phase)].batch(example, 1)
    print("a sequence as the model sees it, with the tokens to predict in parentheses:")
    print("    " + show_sequence(batch, sources[0].store.vocabulary, config.data.objective))


def show_sequence(batch: Batch, vocabulary: Vocabulary, objective: str) -> str:
    """Format a batch of one sequence: pair label, tokens, and MLM labels in parentheses."""
    show = vocabulary.show
    labels = dict(zip(batch.masked_positions.tolist(), batch.masked_labels.tolist(), strict=True))
    words = [
        show(token) + (f"({show(labels[i])})" if i in labels else "")
        for i, token in enumerate(batch.input_ids.tolist())
    ]
    if batch.pairs:
        words.insert(0, f"{LABELS[objective][int(batch.next_sentence_label)]}:")
    return " ".join(words)


@dataclass
class TimeLeft:
    """Estimate the remaining time of a run from its speed since `start`."""

    phases: list[Phase]
    start: int
    began: float = field(default_factory=time.perf_counter)

    def seconds(self, done: int) -> float:
        elapsed = time.perf_counter() - self.began
        left = count_work(self.phases, done, self.phases[-1].end)
        return elapsed * left / count_work(self.phases, self.start, done)


def count_work(phases: list[Phase], first: int, last: int) -> int:
    """Count the tokens of the steps from `first` to `last` if all sequences had full length, so
    that a last phase of long ones counts for more."""
    return sum(
        max(0, min(last, phase.end) - max(first, phase.start))
        * phase.train.global_batch_size
        * phase.data.max_seq_length
        for phase in phases
    )


def say_duration(seconds: float) -> str:
    """Format a time in the largest unit that it has at least two of."""
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next((u for u in units if seconds >= 2 * u[1]), units[-1])
    value = seconds / size
    return f"{round(value, 1):g} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def say_evaluation(metrics: dict[str, float], objective: str) -> str:
    """Summarize the held-out results beside their baselines.

    objective: `data.objective`, what the metrics of pairs are called by.
    """
    phrases = []
    if "eval/mlm_loss" in metrics:
        phrases.append(
            f"held-out MLM loss {metrics['eval/mlm_loss']:.3f} nats (unigram entropy "
            f"{metrics['eval/unigram_entropy']:.3f}), accuracy {metrics['eval/mlm_accuracy']:.3f}"
        )
    for name, loss in metrics.items():
        if name.startswith("eval/mlm_loss_at_"):
            phrases.append(f"at length {name.rpartition('_')[2]} {loss:.3f} nats")
    if "eval/nsp_accuracy" in metrics:
        phrases.append(
            f"{objective.upper()} accuracy {metrics['eval/nsp_accuracy']:.3f} (majority "
            f"{metrics['eval/nsp_majority']:.3f})"
        )
    if "eval/rtd_auc" in metrics:
        phrases.append(f"RTD AUC {metrics['eval/rtd_auc']:.3f} (guessing 0.5)")
    if "eval/minimal_pairs" in metrics:
        phrases.append(
            f"minimal pairs {metrics['eval/minimal_pairs']:.3f} (unigram "
            f"{metrics['eval/minimal_pairs_unigram']:.3f})"
        )
    return "; ".join(phrases) or "sentences filled in"


def say_progress(metrics: dict[str, float], objective: str, seconds_left: float) -> str:
    """Summarize recent losses, speed and remaining time for the progress bar."""
    losses = f"MLM {metrics['train/mlm_loss']:.3f}"
    if "train/nsp_loss" in metrics:
        losses += f", {objective.upper()} {metrics['train/nsp_loss']:.3f}"
    if "train/rtd_loss" in metrics:
        losses += f", RTD {metrics['train/rtd_loss']:.3f}"
    speed = f"{metrics['perf/tokens_per_second']:,.0f} tokens/s"
    return f"loss: {losses}; {speed}; {say_duration(seconds_left)} left"


def say_quality(metrics: dict[str, float]) -> str:
    """Summarize in words how good the model is on held-out text."""
    phrases, who = [], "its generator" if "eval/rtd_auc" in metrics else "it"
    if "eval/mlm_loss" in metrics:
        entropy, loss = metrics["eval/unigram_entropy"], metrics["eval/mlm_loss"]
        compared = "better" if loss < entropy else "worse"
        phrases.append(
            f"on held-out text {who} predicts masked tokens {abs(entropy - loss):.2f} nats "
            f"{compared} than token frequencies alone do ({loss:.3f}, {entropy:.3f}), and "
            f"{metrics['eval/mlm_accuracy']:.1%} of them correctly"
        )
    if "eval/mlm_bits_per_byte" in metrics:
        phrases.append(f"its loss is {metrics['eval/mlm_bits_per_byte']:.3f} bits per byte of text")
    if "eval/rtd_auc" in metrics:
        phrases.append(
            "the model tells replaced tokens from others with an area under the curve of "
            f"{metrics['eval/rtd_auc']:.3f} (guessing: 0.5)"
        )
    if "eval/nsp_accuracy" in metrics:
        phrases.append(
            f"it classifies {metrics['eval/nsp_accuracy']:.1%} of the pairs correctly (always the "
            f"same answer: {metrics['eval/nsp_majority']:.1%})"
        )
    if "eval/minimal_pairs" in metrics:
        phrases.append(
            f"it prefers the acceptable sentence in {metrics['eval/minimal_pairs']:.1%} of the "
            f"minimal pairs (token frequencies alone: {metrics['eval/minimal_pairs_unigram']:.1%})"
        )
    return "; ".join(phrases) or "no text is held out to evaluate the model on"


def describe_end(
    run_dir: Path,
    step: int,
    seconds: float,
    evaluation: dict[str, float],
    trouble: str,
) -> None:
    """Print the results of a run, its output files, and how to train further.

    evaluation: None stands for a number that was not finite.
    trouble: the verdict of the run report, if it is no praise, else "".
    """
    print(
        f"done: {step:,} step{'s' * (step != 1)}; this command trained for {say_duration(seconds)}"
    )
    print(say_quality({name: value for name, value in evaluation.items() if value is not None}))
    if trouble:
        print(red(trouble))
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    rows = {
        "export": "the model; load it with from_pretrained of transformers",
        "metrics.jsonl": "the record: losses, accuracies and speed by step",
        "report.html": "the page of the run: its state and its curves",
        "checkpoints": f"{len(checkpoints)} to resume from, the newest {checkpoints[-1].name}",
    }
    width = max(len(str(run_dir / name)) for name in rows)
    for name, what in rows.items():
        if (run_dir / name).exists():
            print(f"  {run_dir / name!s:{width}}  {what}")
    print(
        "for more steps, run the same command with a larger train.max_steps; it says what else is "
        "needed"
    )
