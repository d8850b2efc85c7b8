"""The training loop. Start reading here: micro-batches, model, loss, backward pass, clipping,
update, and at their intervals logging, evaluation and checkpoints.

Counts are global. The loss of a step divides each objective's sum by the number of its labels in
the whole step, over all micro-batches and processes, not by those of one micro-batch. Example: a
step has two micro-batches with 10 and 30 masked tokens, whose losses sum to 50 and 60 nats.

    mean of the two means:   (50 / 10 + 60 / 30) / 2 = 3.50
    global count:            (50 + 60) / (10 + 30)   = 2.75

The first weighs a token of the small micro-batch three times as much as one of the large, so the
gradient would change with `micro_batch_size` and the number of processes. The second does not.
"""

import gc
import math
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from signal import Signals
from typing import NoReturn

import numpy as np
import torch
from accelerate import Accelerator

from data_pipeline.common.errors import Stopped, check
from data_pipeline.common.signals import hold_signals, launcher_patience
from data_pipeline.common.streams import Stream, derive_stream, random_u64
from data_pipeline.common.system import progress_bar
from data_pipeline.sampling.batch_source import BatchSource, prefetch
from data_pipeline.sampling.batches import Batch, send
from pretrain.agreement import agree_on_signal, agree_on_step, explain_difference, read_step
from pretrain.checkpoint import (
    last_good,
    load_model,
    load_optimizers,
    newest_checkpoint,
    save_checkpoint,
    step_of,
)
from pretrain.config import Config, Phase, phase_at
from pretrain.describe import (
    TimeLeft,
    describe_end,
    say_duration,
    say_evaluation,
    say_progress,
)
from pretrain.evaluate import evaluate, judged_by, name_length, sample_counts
from pretrain.export import export_checkpoint
from pretrain.memory import explain_out_of_memory, preallocate_memory
from pretrain.metrics import Clock, compiled_graphs, peak_flops, to_metrics
from pretrain.models.bert import PretrainingModel, continue_positions
from pretrain.monitor import SPIKE_STEPS, Monitor
from pretrain.objectives import ROW
from pretrain.optim import learning_rate, update, zero_gradients
from pretrain.processes import share_from_main, stop_all
from pretrain.report import refresh_report
from pretrain.run_folder import release_lock
from pretrain.run_setup import Run, set_up
from pretrain.sampled_softmax import sample_start
from pretrain.sharding import clip_gradients, no_sync, shard_like, unshard
from pretrain.tracking import Tracker
from pretrain.watch import end_watch, mark, name_lost_ranks


@release_lock()
@name_lost_ranks()
@explain_out_of_memory()
def train(config: Config) -> None:
    """Train a model as the config says, resuming from the newest checkpoint of `run_dir`, and
    export it.

    Raises `UserError` for errors in config or data, before anything is written, and `Stopped` after
    a signal that `catch_signals` has caught, with a checkpoint of the step in which it came.
    """
    run = set_up(config)
    # from here on, all ranks finish a step after a signal, and the next start waits for that
    run.accelerator.wait_for_everyone()
    hold_signals(run.announce_stop)
    record = Record(run)
    make_due_evaluation(run, record)
    settings, accelerator = config.train, run.accelerator
    weights = torch.tensor([one.weight for one in run.bare.objectives], device=accelerator.device)
    run.model.train()
    steps = range(run.state["step"], settings.max_steps)
    for step, micro_batches in zip(steps, record.clock.waiting(read_ahead(run)), strict=True):
        mark(step)
        phase = enter_phase(run, step)
        run.bare.sample_start = sample_start(config.seed, step)
        counts = count_labels(run.bare.objectives, micro_batches, accelerator)
        sums = torch.zeros(record.sums.shape, dtype=torch.float64, device=accelerator.device)
        for i, batch in enumerate(micro_batches):
            mark()
            number = accelerator.process_index * len(micro_batches) + i
            torch.manual_seed(dropout_seed(config.seed, step, number))
            with nullcontext() if batch is micro_batches[-1] else no_sync(run.model, accelerator):
                rows = run.model(batch)
                # global counts: the same gradient however the step is divided
                loss = (weights * rows[:, 0] / counts).sum()
                (loss * accelerator.num_processes).backward()  # DDP averages
            sums += rows.detach()
        norm = clip_gradients(run.bare.parameters(), settings.max_grad_norm or math.inf)
        drop_pair_gradients(run.bare, phase)
        rate = learning_rate(step - phase.schedule_start, phase.train)
        found, fetched = agree_on_step(sums, norm, run.stop_signal(), accelerator)  # all alike
        update(run.optimizers, rate, found)
        sums, grad_norm, stop = read_step(fetched())
        if record.monitor.has_finite_gradient(step, grad_norm):
            record.sums += sums
        else:
            record.log_skipped(run, step, sums)
        zero_gradients(run.optimizers)

        # once in a while
        if step == steps.start:  # the optimizers have their moments now
            preallocate_memory(run, weights, step, record.clock)
        done, ended = step + 1, step + 1 == settings.max_steps
        record.bar.update()
        answer_trouble(run, record, step, (sums[0, 0] / sums[0, -1]).item())
        if done % settings.log_every == 0 or ended:
            record.log(run, done, {"train/learning_rate": rate, "train/grad_norm": grad_norm})
        if run.is_evaluated and (done % settings.eval_every == 0 or ended):
            evaluate_run(run, record, done)
        if stop:
            stop_run(run, record, done, stop)
        if done % settings.save_every == 0 or ended:
            save_run(run, record, done)
    finish(run, record)


class Record:
    """The bookkeeping of a run: sums for the log, speed, health checks, tracker, progress bar."""

    def __init__(self, run: Run):
        settings, state = run.config.train, run.state
        sums = read_sums(state, run.bare.objectives)
        self.sums = torch.tensor(sums, dtype=torch.float64)  # (objectives, ROW)
        self.clock = Clock(run.accelerator.num_processes, peak_flops(run.accelerator.device))
        self.left = TimeLeft(run.phases, state["step"])
        total, done = settings.max_steps, state["step"]
        self.bar = progress_bar(
            "training", total, "step", done, disable=not run.is_main, tells_remaining=False
        )
        self.log_line = self.bar.write if run.is_main else lambda line: None
        counts, unknown = sample_counts(run.store), run.store.vocabulary["[UNK]"]
        kept = state.get("monitor", {})
        self.monitor = Monitor(run.phases, counts, unknown, kept, self.log_line, state["step"])
        if run.is_main:
            reports = run.config.tracking.wandb is not None
            # step 0 has been evaluated if a run was killed before its first checkpoint
            is_due = state.get("evaluation_due", False) or not state["step"]
            self.tracker = Tracker(run.run_dir, state["step"], reports, is_due)
        self.patience = launcher_patience()

    def note_saved(self, seconds: float) -> None:
        """Warn, once, if a checkpoint took longer to write than the launcher waits on a signal."""
        if seconds > self.patience:
            self.log_line(
                f"the checkpoint took {say_duration(seconds)} to write, but the launcher kills "
                f"the run {self.patience:g} s after a signal: the steps since the previous "
                "checkpoint would be lost. Start it with "
                f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(3 * seconds)}"
            )
            self.patience = math.inf

    def log(self, run: Run, done: int, others: dict[str, float]) -> None:
        """Log the means since the last log line and reset the sums."""
        metrics = to_metrics(self.sums, "train", run.bare.objectives) | self.clock.speed() | others
        if run.compiled:
            metrics["perf/compiled_graphs"] = compiled_graphs()
        names = [one.name for one in run.bare.objectives]
        counts = dict(zip(names, self.sums[:, -1].tolist(), strict=True))
        metrics |= self.monitor.check_health(done, metrics, counts.get("nsp", 0))
        self.sums.zero_()
        if run.is_main:
            self.tracker.log(done, metrics)
            said = say_progress(metrics, run.config.data.objective, self.left.seconds(done))
            self.bar.set_postfix_str(said, refresh=False)

    def log_skipped(self, run: Run, step: int, sums: torch.Tensor) -> None:
        """Record the examples of a skipped step, which `BatchSource.batch` of its phase can
        rebuild."""
        if run.is_main:
            phase = phase_at(run.phases, step)
            size = phase.train.global_batch_size
            skipped = {"step": step, "phase": run.phases.index(phase)}
            skipped |= {"first": (step - phase.start) * size, "count": size}
            self.tracker.log(step + 1, {}, skipped=skipped | {"losses": sums[:, 0].tolist()})


def read_ahead(run: Run) -> Iterator[tuple[list[Batch], int, int]]:
    """Prefetch the remaining steps: (micro-batches on the device, their FLOPs, sequences of all
    processes)."""
    device, start = run.accelerator.device, run.state["step"]
    place = run.accelerator.process_index, run.accelerator.num_processes
    flops = run.bare.count_flops
    steps = read_steps(run.phases, run.sources, start, *place)
    return prefetch(
        (
            [batch.to(device) for batch in batches],
            sum(map(flops, batches)),
            phase_at(run.phases, step).train.global_batch_size,
        )
        for step, batches in enumerate(steps, start)
    )


def enter_phase(run: Run, step: int) -> Phase:
    """Find the phase of a step; on its first step, initialize the positions that it adds."""
    phase = phase_at(run.phases, step)
    if step == phase.start:
        start_positions(run, phase)
    return phase


def start_positions(run: Run, phase: Phase) -> None:
    """Continue the trained position embeddings to the positions that a phase adds (a collective
    call).

    Tokens there then attend to their neighbours at once, as elsewhere; with random embeddings they
    would take longer to learn this than a short phase lasts. A model of `init_from` has all
    positions.
    """
    trained = max((p.data.max_seq_length for p in run.phases if p.end <= phase.start), default=0)
    size = phase.data.max_seq_length
    if 0 < trained < size and run.config.init_from is None:
        # by `state_dict`, since an evaluation under FSDP2 leaves in the modules a copy of the
        # weights, which the next backward pass drops
        table = run.bare.state_dict()["embeddings.position.weight"]
        first = run.config.model.first_position
        whole = unshard(table).clone()
        whole[first : first + size] = continue_positions(whole[first : first + trained], size)
        table.copy_(shard_like(whole, table))


def answer_trouble(run: Run, record: Record, step: int, loss: float) -> None:
    """Stop all ranks after too many skipped steps in a row, and answer a spike of the MLM loss."""
    if record.monitor.should_abort():
        record.bar.close()
        finish_writing(run)
        stop_all(
            record.monitor.explain_skips(step, run.run_dir) if run.is_main else "", run.accelerator
        )
    if record.monitor.has_spiked(loss, step == phase_at(run.phases, step).start):
        answer_spike(run, record, step + 1)


def answer_spike(run: Run, record: Record, done: int) -> None:
    """Return to the weights of a checkpoint before a spike, or warn, or stop all ranks, as
    `train.on_spike` says (a collective call).

    The data since that checkpoint are skipped, since they may be the cause. Stops if there is no
    such checkpoint, or if the run went back to it before.
    """
    monitor, action = record.monitor, run.config.train.on_spike
    if action == "warn":
        return monitor.accept_spike(done)
    finish_writing(run)
    latest = done - 2 * SPIKE_STEPS  # damage can be older than the loss that shows it
    good = share_from_main(
        lambda: last_good(run.run_dir / "checkpoints", latest, monitor.passed_over),
        run.accelerator,
    )
    if action == "rollback" and good and good.name != monitor.state["went_back_to"]:
        load_model(good, run.bare)
        load_optimizers(good, run.bare, run.optimizers)
        for phase in run.phases:  # phases whose positions the checkpoint has not trained
            if step_of(good) <= phase.start < done:
                start_positions(run, phase)
        monitor.note_rollback(done, good.name)
        if run.is_main:
            record.tracker.log(done, {}, rollback={"to": good.name, "done": done})
        return
    kept = f"the last good checkpoint is {good}"
    if not good:
        kept = f"no good checkpoint is at least {2 * SPIKE_STEPS} steps old"
    stop_all(
        f"{monitor.explain_spike(done)}; {kept}. Lower train.learning_rate or lengthen "
        "train.warmup_steps, in another run_dir, or continue with train.on_spike=warn",
        run.accelerator,
    )


def evaluate_run(run: Run, record: Record, done: int) -> None:
    """Evaluate the model on the held-out pairs, also at the length of its phase, and with the
    probes; checkpoint and export record the metrics.

    A signal stops the run between two batches, or two passes of the probes; the next start then
    evaluates.
    """
    found, others = {}, {}
    keys = judged_by(run.config, phase_at(run.phases, max(done - 1, 0)))
    with record.clock.paused():
        for key in sorted(run.held_out.keys() & keys):
            one = evaluate(run.bare, run.held_out[key], run.accelerator)
            if one is None:
                leave_evaluation(run, record, done)
            length, _ = key
            is_base = length == run.config.data.max_seq_length
            found |= one if is_base else name_length(one, length)
        if run.probes:
            scored = run.probes.measure(run.bare, run.accelerator)
            if scored is None:
                leave_evaluation(run, record, done)
            found |= scored
            others = run.probes.fill(run.bare, run.accelerator)
        run.state |= {"evaluation": found, "evaluated_step": done}
        if run.is_main:
            if found or others:  # a phase may have no held-out text of its length
                record.tracker.log(done, found, **others)
                said = say_evaluation(found, run.config.data.objective)
                record.log_line(f"step {done:,}: {said}")
            refresh_report(run.run_dir, record.log_line)


def make_due_evaluation(run: Run, record: Record) -> None:
    """Repeat the evaluation that a signal interrupted before this start, if any. Evaluate a model
    of `init_from` before it is trained, and a run whose `max_steps` was lowered to the step that it
    has reached."""
    step = run.state["step"]
    if not step and run.is_evaluated and run.config.init_from:
        evaluate_run(run, record, 0)
    is_due = run.state.pop("evaluation_due", False)
    if run.is_evaluated and step == run.config.train.max_steps:
        # checkpoints of 0.2.0 do not say when they were evaluated
        is_due |= run.state.get("evaluated_step", step if run.state["evaluation"] else 0) < step
    if is_due:
        evaluate_run(run, record, step)
        save_run(run, record, step)
    record.left = TimeLeft(run.phases, step)  # without the time of these evaluations


def leave_evaluation(run: Run, record: Record, done: int) -> NoReturn:
    """Stop all ranks on a signal during an evaluation, which the next start repeats."""
    run.state["evaluation_due"] = True
    stop_run(run, record, done, agree_on_signal(run.accelerator))


def save_run(run: Run, record: Record, done: int) -> None:
    """Start to write a checkpoint when the one before it is written (a collective call).

    Stops all ranks if writing that one failed, or if their weights differ.
    """
    sizes = [source.part_sizes for source in run.sources]
    run.state |= {"step": done, "running_sums": record.sums.tolist(), "part_sizes": sizes}
    run.state["monitor"] = record.monitor.state
    settings = run.config.train
    # while steps are skipped or a spike begins, keep all checkpoints: one is the last good one
    keep = settings.max_steps if record.monitor.is_sick else settings.keep_checkpoints
    with record.clock.paused():
        finish_writing(run)
        if difference := explain_difference(run.bare, run.accelerator):
            stop_all(difference, run.accelerator)
        began = time.monotonic()
        run.writing = save_checkpoint(
            run.run_dir / "checkpoints",
            run.bare,
            run.optimizers,
            run.state,
            keep,
            settings.keep_every,
            writes=run.is_main,
        )
        if run.writing:
            run.writing.add_done_callback(lambda _: record.note_saved(time.monotonic() - began))


def finish_writing(run: Run) -> Path | None:
    """Wait until the last checkpoint of this start is on disk (a collective call); returns its
    folder, or None before the first. Stops all ranks if it could not be written.

    Ranks wait in many short collective calls, since a single long one would fail after
    `train.timeout_s`.
    """

    def is_written() -> bool:  # or failed; waits up to a second
        return not run.writing or bool(wait([run.writing], timeout=1).done)

    while not share_from_main(is_written, run.accelerator):
        mark()
    return share_from_main(lambda: run.writing and run.writing.result(), run.accelerator)


def stop_run(run: Run, record: Record, done: int, stop: Signals) -> NoReturn:
    """Write a checkpoint, if a step is done, and end all ranks, after a signal."""
    run.announce_stop()  # the signal may have reached another rank only
    saved = "no step is done yet"
    if done:
        save_run(run, record, done)
        saved = f"the checkpoint is {finish_writing(run)}"
    record.bar.close()
    if run.is_main:
        record.tracker.close()
    leave_group(run)
    run.lock.close()
    message = f"stopped at step {done:,} on {stop.name}; {saved}; start the same command again to "
    message += "continue"
    raise Stopped(message if run.is_main else "")


def finish(run: Run, record: Record) -> None:
    """Export the last checkpoint, write the run report and print a summary.

    Stops all ranks instead if the run has diverged.
    """
    record.bar.close()
    finish_writing(run)
    state, run_dir = run.state, run.run_dir
    why_not = record.monitor.explain_divergence(state["evaluation"])
    leave_group(run)  # so that no rank waits for the main process, or fails with it
    with run.lock:
        if run.is_main:
            record.tracker.close()
        if why_not:
            stop_all(why_not, run.accelerator)
        if run.is_main:
            seconds = time.perf_counter() - record.left.began
            checkpoint = newest_checkpoint(run_dir / "checkpoints")
            export_checkpoint(checkpoint, run.config, run_dir / "export")
            trouble = refresh_report(run_dir, print)
            describe_end(run_dir, state["step"], seconds, state["evaluation"], trouble)


def leave_group(run: Run) -> None:
    """Leave the process group, and free the model (a collective call)."""
    end_watch()
    run.accelerator.wait_for_everyone()
    del run.model, run.bare, run.optimizers
    run.accelerator.free_memory()
    gc.collect()  # a gloo process that exits with its model alive may abort
    run.accelerator.end_training()


def read_steps(
    phases: list[Phase], sources: list[BatchSource], start: int, rank: int, world_size: int
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of one rank for each step from `start` to the end.

    In the second half of a phase, a thread draws the first pairs of the next.
    """
    for phase, source, following in zip(phases, sources, [*sources[1:], None], strict=True):
        sizes = (phase.train.global_batch_size, phase.train.micro_batch_size)
        for step in range(max(start, phase.start), phase.end):
            if following and 2 * step >= phase.start + phase.end:
                following.start_part(0)
            yield source.step(step - phase.start, *sizes, rank, world_size)
        source.free_pairs()  # the phase is over


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Draw the dropout seed of one micro-batch of the global batch, so that a resumed run needs no
    generator state."""
    (drawn,) = random_u64(derive_stream(seed, step, Stream.DROPOUT), np.array([micro_batch]))
    return int(drawn >> np.uint64(1))


def count_labels(
    objectives: tuple, micro_batches: list[Batch], accelerator: Accelerator
) -> torch.Tensor:
    """Count the labels of each objective in the whole step, over all micro-batches and processes.

    Returns int64 (objectives,), at least 1 each, so that a step without labels has loss 0.
    """
    counts = [sum(one.count(batch) for batch in micro_batches) for one in objectives]
    return accelerator.reduce(send(torch.tensor(counts), accelerator.device)).clamp(min=1)


def read_sums(state: dict, objectives: tuple) -> list[list[float]]:
    """Read the sums since the last log line from a checkpoint's state, (objectives, ROW).

    Schema 1 stored them under `window`, flat and column by column.
    """
    if "window" in state:
        both = state.pop("window")
        return [both[i::2] for i in range(len(objectives))]
    sums = state["running_sums"] or [[0.0] * ROW for _ in objectives]
    check(
        [len(row) for row in sums] == [ROW] * len(objectives),
        f"running_sums of the checkpoint are {sums}, not {ROW} numbers for each of "
        f"{len(objectives)} objectives; put an intact copy of the checkpoint back",
    )
    return [[math.nan if number is None else number for number in row] for row in sums]


def drop_pair_gradients(model: PretrainingModel, phase: Phase) -> None:
    """Free the gradients of the pair heads in a phase without pairs, in which they are 0.

    The optimizers then skip the heads. With zero gradients they would still decay the weights and
    advance the step counts.
    """
    if phase.data.single_segment_prob == 1 and model.nsp:
        for head in (model.pooler, model.nsp):
            head.zero_grad()
