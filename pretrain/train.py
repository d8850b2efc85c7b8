"""The training loop: the file to open first. Batches -> model -> loss -> update, and once in a
while the rest."""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

from data_pipeline.batches import Batch, BatchSource, prefetch
from data_pipeline.hashing import Stream, draws, key
from data_pipeline.processes import progress_bar
from pretrain.checkpoint import load_model, load_optimizers, newest_checkpoint, save_checkpoint
from pretrain.config import Config, Phase, phase_at, phases_of
from pretrain.describe import (
    TimeLeft,
    describe_end,
    describe_start,
    say_evaluation,
    say_progress,
)
from pretrain.evaluate import evaluate, sample_counts
from pretrain.export import check_export_folder, export_checkpoint
from pretrain.metrics import Clock, compiled_graphs, count_flops, peak_flops, to_metrics
from pretrain.monitor import Monitor
from pretrain.objectives import ROW
from pretrain.optim import build_optimizers, learning_rate
from pretrain.sharding import clip_gradients, no_sync, wrap_model
from pretrain.start import (
    build_accelerator,
    build_held_out,
    build_model,
    fingerprint_run,
    keep_in_run,
    load_resume_state,
    lock_run,
    open_data,
    shake_hands,
    stop_all,
)
from pretrain.tracking import Tracker, draw_curves


def train(config: Config) -> None:
    """Train the model of a config on its token store, from where `run_dir` stands, and export it.

    Raises `UserError` for what the user can put right, before anything is written.
    """
    settings, run_dir = config.train, Path(config.run_dir)
    phases = phases_of(config)
    accelerator = build_accelerator(settings, phases)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    device, main = accelerator.device, accelerator.is_main_process
    if main:
        check_export_folder(run_dir / "export")

    # data
    store, sources = open_data(config, phases)
    vocabulary = store.vocabulary
    held_out = build_held_out(config, store, accelerator)
    fingerprint = fingerprint_run(config, store, accelerator)
    shake_hands(config, fingerprint, accelerator)
    lock = lock_run(run_dir, accelerator)
    checkpoint, state = load_resume_state(
        run_dir, fingerprint, settings.micro_batch_size, settings.extend, accelerator
    )
    for source, sizes in zip(sources, state["part_sizes"], strict=False):  # none in a new run
        source.part_sizes = sizes

    # model and optimizers
    bare = build_model(config, len(vocabulary))
    if checkpoint:
        load_model(checkpoint, bare)
    compiled = device.type == "cuda" if settings.compile is None else settings.compile
    if compiled:
        bare.compile_layers()
    model = wrap_model(bare, accelerator)
    optimizers = build_optimizers(bare, settings)
    if checkpoint:
        load_optimizers(checkpoint, bare, optimizers)
    if main:
        OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
        keep_in_run(run_dir, Path(config.data_dir) / "vocab", fingerprint)
        tracker = Tracker(run_dir, state["step"], config.tracking.wandb, asdict(config))
        describe_start(config, bare, phases, sources, state["step"], accelerator)

    # training loop
    steps = range(state["step"], settings.max_steps)
    flops = partial(count_flops, model=config.model, vocab_size=len(vocabulary))
    batches = prefetch(
        ([batch.to(device) for batch in micro_batches], sum(map(flops, micro_batches)))
        for micro_batches in read_steps(phases, sources, state["step"], rank, world_size)
    )
    running = torch.tensor(read_sums(state, bare.objectives), dtype=torch.float64, device=device)
    weights = torch.tensor([one.weight for one in bare.objectives], device=device)
    clock = Clock(world_size, peak_flops(device))
    left = TimeLeft(phases, state["step"])
    bar = progress_bar("training", settings.max_steps, "step", state["step"], disable=not main)
    say = bar.write if main else lambda line: None
    counts = sample_counts(store)
    monitor = Monitor(phases[0].train, counts, vocabulary["[UNK]"], state.get("monitor", {}), say)
    model.train()
    for step, micro_batches in zip(steps, clock.waiting(batches), strict=True):
        phase = phase_at(phases, step)
        counts = count_asked(bare.objectives, micro_batches, accelerator)
        sums = torch.zeros_like(running)
        for i, batch in enumerate(micro_batches):
            torch.manual_seed(dropout_seed(config.seed, step, rank * len(micro_batches) + i))
            last = i == len(micro_batches) - 1
            with nullcontext() if last else no_sync(model, accelerator):
                rows = model(batch)
                # by the counts of the whole step: however it is divided, it has one gradient
                loss = (weights * rows[:, 0] / counts).sum()
                accelerator.backward(loss * world_size)  # DDP averages over processes
            sums += rows.detach()
        grad_norm = clip_gradients(bare.parameters(), settings.max_grad_norm or math.inf).item()
        rate = learning_rate(step - phase.schedule_start, phase.train)
        sums = accelerator.reduce(sums)
        if monitor.is_sound(step, grad_norm):  # the same on all ranks, as the gradient is
            update(optimizers, rate)
            running += sums
        zero_gradients(optimizers)

        # once in a while
        done, ended = step + 1, step + 1 == settings.max_steps
        bar.update()
        if monitor.is_lost():
            bar.close()
            why = monitor.give_up(run_dir, step, phases, sums[:, 0].tolist()) if main else ""
            stop_all(why, accelerator)
        if done % settings.log_every == 0 or ended:
            metrics = to_metrics(running, "train", bare.objectives) | clock.speed()
            metrics |= {"train/learning_rate": rate, "train/grad_norm": grad_norm}
            if compiled:
                metrics["perf/compiled_graphs"] = compiled_graphs()
            metrics |= monitor.judge(done, metrics, running[-1, -1].item())
            running.zero_()
            if main:
                tracker.log(done, metrics)
                bar.set_postfix_str(say_progress(metrics, left.seconds(done)), refresh=False)
        if held_out and (done % settings.eval_every == 0 or ended):
            with clock.paused():
                state["evaluation"] = evaluate(bare, held_out, accelerator)
            if main:
                tracker.log(done, state["evaluation"])
                bar.write(f"step {done:,}: {say_evaluation(state['evaluation'])}")
        if done % settings.save_every == 0 or ended:
            sizes = [source.part_sizes for source in sources]
            state |= {"step": done, "running_sums": running.tolist(), "part_sizes": sizes}
            state["monitor"] = monitor.state
            with clock.paused():
                folder, keep = run_dir / "checkpoints", settings.keep_checkpoints
                save_checkpoint(folder, bare, optimizers, state, keep, writes=main)
                accelerator.wait_for_everyone()
    bar.close()

    # export
    if main:
        tracker.close()
        draw_curves(run_dir)
        checkpoint = newest_checkpoint(run_dir / "checkpoints")
        export_checkpoint(checkpoint, config, run_dir / "export")
        describe_end(run_dir, state["step"], time.perf_counter() - left.began, state["evaluation"])
    accelerator.wait_for_everyone()
    del model, bare, optimizers
    accelerator.free_memory()
    gc.collect()  # a gloo process that ends with its model alive may abort
    accelerator.end_training()
    lock.close()


def read_steps(
    phases: list[Phase], sources: list[BatchSource], start: int, rank: int, world_size: int
) -> Iterator[list[Batch]]:
    """What one rank trains on from step `start` to the end: the micro-batches of a step at a
    time."""
    for phase, source in zip(phases, sources, strict=True):
        sizes = (phase.train.global_batch_size, phase.train.micro_batch_size)
        for step in range(max(start, phase.start), phase.end):
            yield source.step(step - phase.start, *sizes, rank, world_size)
        source.parts.clear()  # its turn is over


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Dropout seed of one micro-batch of the global batch, so that a resumed run needs no generator
    state."""
    return int(draws(key(seed, step, Stream.DROPOUT), np.array([micro_batch]))[0] >> np.uint64(1))


def count_asked(
    objectives: tuple, micro_batches: list[Batch], accelerator: Accelerator
) -> torch.Tensor:
    """How many tokens, pairs, ... each objective asks of in the whole step, over all micro-batches
    and processes, at least 1: int64 (objectives,)."""
    counts = [sum(one.count(batch) for batch in micro_batches) for one in objectives]
    return accelerator.reduce(torch.tensor(counts, device=accelerator.device)).clamp(min=1)


def read_sums(state: dict, objectives: tuple) -> list[list[float]]:
    """The sums since the last log line, (objectives, ROW); a state of schema 1 had them of two
    objectives, by column."""
    if "window" in state:
        both = state.pop("window")
        return [both[i::2] for i in range(len(objectives))]
    return state["running_sums"] or [[0.0] * ROW for _ in objectives]


def zero_gradients(optimizers: list[torch.optim.Optimizer]) -> None:
    """Free the gradients, used or not."""
    for optimizer in optimizers:
        optimizer.zero_grad()


def update(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Make one step with the gradients, at this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
