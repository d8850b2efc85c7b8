"""The training loop: the file to open first. Batches -> model -> loss -> update, and once in a while the rest."""

import fcntl
import gc
import json
import math
import os
import socket
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from omegaconf import OmegaConf
from tqdm import tqdm

from data_pipeline.batches import Batch, BatchSource, prefetch
from data_pipeline.errors import UserError
from data_pipeline.hashing import key
from data_pipeline.processes import die_with_parent
from data_pipeline.token_store import TokenStore, Vocabulary, read_vocabulary
from pretrain.checkpoint import (
    check_contract,
    load_model,
    load_optimizers,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from pretrain.config import Config, TrainConfig
from pretrain.evaluate import HeldOut, evaluate
from pretrain.export import export_checkpoint
from pretrain.loss import pretraining_loss
from pretrain.metrics import TALLY, Clock, tally, to_metrics
from pretrain.model import BertForPreTraining
from pretrain.optim import build_optimizer, learning_rate
from pretrain.tracking import Tracker, draw_curves

DROPOUT = 5  # stream of `hashing.key`; 0 to 4 make the data


def train(config: Config) -> None:
    """Train the model of a config on its token store, from where `run_dir` stands, and export it.

    Raises `UserError` for what the user can put right, before anything is written.
    """
    settings, run_dir, data_dir = config.train, Path(config.run_dir), Path(config.data_dir)
    accelerator = build_accelerator(settings)
    rank, world_size, device = (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.device,
    )
    main = accelerator.is_main_process

    # data
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore(data_dir / "store", "train", vocabulary)
    contract = build_contract(config, store, accelerator)
    lock = lock_run(run_dir, accelerator)
    checkpoint = find_checkpoint(run_dir, contract, accelerator)
    state = (
        read_state(checkpoint)
        if checkpoint
        else {"step": 0, "window": [0.0] * TALLY, "evaluation": {}}
    )
    state["contract"] = contract
    start = state["step"]
    source = BatchSource(store, config.data, config.seed, state.get("epoch_sizes"))
    held_out = build_held_out(config, vocabulary, accelerator)

    # model and optimizer
    torch.manual_seed(config.seed)
    model = BertForPreTraining(config.model, len(vocabulary))
    if config.data.objective == "none":
        model.pooler.requires_grad_(False)
        model.nsp.requires_grad_(False)
    if checkpoint:
        load_model(checkpoint, model)
    bare = model.to(device)
    model = accelerator.prepare(bare)
    optimizers = build_optimizer(bare, settings)
    if checkpoint:
        load_optimizers(checkpoint, bare, optimizers)
    if main:
        OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
        tracker = Tracker(run_dir, start, config.tracking.wandb, asdict(config))
        describe(config, bare, source, start, accelerator)

    # training loop
    steps = range(start, settings.max_steps)
    batch_sizes = (settings.global_batch_size, settings.micro_batch_size, rank, world_size)
    steps_of_batches = prefetch(source.step(step, *batch_sizes) for step in steps)
    window = torch.tensor(state["window"], dtype=torch.float64, device=device)
    clock = Clock(world_size)
    bar = tqdm(
        clock.waiting(steps_of_batches), "training", settings.max_steps, initial=start, unit="step",
        disable=not main, mininterval=1,
    )  # fmt: skip
    model.train()
    for step, micro_batches in zip(steps, bar, strict=True):
        micro_batches = [batch.to(device) for batch in micro_batches]
        masked = count_masked(micro_batches, accelerator)
        sums = torch.zeros_like(window)
        for i, batch in enumerate(micro_batches):
            torch.manual_seed(dropout_seed(config.seed, step, rank * len(micro_batches) + i))
            last = i == len(micro_batches) - 1
            with nullcontext() if last else accelerator.no_sync(model):
                logits = model(batch)
                losses = pretraining_loss(*logits, batch)
                # divided by the counts of the whole step: however it is divided, the gradient is one
                loss = losses[0] / masked
                if config.data.objective != "none":
                    loss = loss + losses[1] / settings.global_batch_size
                accelerator.backward(loss * world_size)  # DDP averages over processes
            sums += tally(losses, *logits, batch)
        grad_norm = accelerator.clip_grad_norm_(
            bare.parameters(), settings.max_grad_norm or math.inf
        )
        rate = learning_rate(step, settings)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        window += accelerator.reduce(sums)

        # once in a while
        done, ended = step + 1, step + 1 == settings.max_steps
        if done % settings.log_every == 0 or ended:
            metrics = to_metrics(window, "train", config.data.objective) | clock.speed()
            metrics |= {"train/learning_rate": rate, "train/grad_norm": grad_norm.item()}
            window.zero_()
            if main:
                tracker.log(done, metrics)
                bar.set_postfix_str(
                    f"loss {metrics['train/loss']:.3f}, {metrics['perf/tokens_per_second']:,.0f} tokens/s"
                )
        if held_out and (done % settings.eval_every == 0 or ended):
            with clock.paused():
                state["evaluation"] = evaluate(model, held_out, accelerator)
            if main:
                tracker.log(done, state["evaluation"])
                bar.write(evaluation_line(done, state["evaluation"]))
        if done % settings.save_every == 0 or ended:
            state |= {"step": done, "window": window.tolist(), "epoch_sizes": source.epoch_sizes}
            with clock.paused():
                if main:
                    save_checkpoint(
                        run_dir / "checkpoints", bare, optimizers, state, settings.keep_checkpoints
                    )
                accelerator.wait_for_everyone()

    # export
    if main:
        tracker.close()
        draw_curves(run_dir)
        checkpoint = newest_checkpoint(run_dir / "checkpoints")
        export_checkpoint(checkpoint, config, data_dir / "vocab", run_dir / "export")
        print(f"export: {run_dir / 'export'}")
    accelerator.wait_for_everyone()
    del model, bare, optimizers, optimizer
    accelerator.free_memory()
    gc.collect()  # a gloo process that ends with its model alive may abort
    accelerator.end_training()
    lock.close()


def build_accelerator(settings: TrainConfig) -> Accelerator:
    """Devices and processes; raises `UserError` if fewer processes run than the launcher was asked for."""
    launched = "WORLD_SIZE" in os.environ
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and not launched:
        raise UserError(
            "accelerate launch was asked for several processes and started one (it does so with --cpu); use "
            "accelerate launch --config_file configs/accelerate/cpu_2.yaml -m pretrain CONFIG, or torchrun"
        )
    if launched:
        die_with_parent(os.getppid())
    cuda = torch.cuda.is_available()
    precision = settings.precision
    if precision == "auto":
        fast = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if fast else "fp32"
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision={"fp32": "no"}.get(precision, precision),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=settings.timeout_s)),
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    world_size = accelerator.num_processes
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if asked != world_size:
        raise UserError(f"the launcher was asked for {asked} processes, {world_size} run")
    share = settings.micro_batch_size * world_size
    if settings.global_batch_size % share:
        nearest = max(1, round(settings.global_batch_size / share)) * share
        raise UserError(
            f"train.global_batch_size {settings.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{settings.micro_batch_size} x {world_size} processes = {share}; try {nearest}"
        )
    return accelerator


def build_contract(config: Config, store: TokenStore, accelerator: Accelerator) -> dict:
    """What must stay the same from the first step of a run to its last, flat."""
    free = (
        "log_every",
        "eval_every",
        "eval_examples",
        "save_every",
        "keep_checkpoints",
        "timeout_s",
    )
    sections = {
        "data": asdict(config.data),
        "model": asdict(config.model),
        "train": asdict(config.train),
    }
    contract = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
        if name not in free
    }
    contract["train.precision"] = accelerator.mixed_precision
    return contract | {
        "seed": config.seed,
        "vocab_sha256": store.vocabulary.sha256,
        "data_sha256": store.manifest["sha256"],
    }


def lock_run(run_dir: Path, accelerator: Accelerator):
    """The open lock file of a run: two jobs in one folder would write over each other."""
    if not accelerator.is_main_process:
        return open(os.devnull)
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / "lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UserError(
            f"{run_dir} is in use by {lock.read().strip() or 'another process'}; stop it, or choose another run_dir"
        ) from None
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    return lock


def find_checkpoint(run_dir: Path, contract: dict, accelerator: Accelerator) -> Path | None:
    """The checkpoint to go on from, the same for all ranks; raises `UserError` if it is of another config."""
    found = [newest_checkpoint(run_dir / "checkpoints") if accelerator.is_main_process else None]
    broadcast_object_list(found)
    if found[0]:
        check_contract(read_state(found[0])["contract"], contract, run_dir)
    return found[0]


def build_held_out(
    config: Config, vocabulary: Vocabulary, accelerator: Accelerator
) -> HeldOut | None:
    """The held-out pairs; None, with a warning, if there are too few documents for any."""
    store_dir, settings = Path(config.data_dir) / "store", config.train
    try:
        return HeldOut(
            store_dir,
            vocabulary,
            config.data,
            settings.eval_examples,
            settings.micro_batch_size,
            accelerator,
        )
    except UserError as error:
        accelerator.print(f"warning: no evaluation on held-out documents: {error}")
        return None


def describe(
    config: Config,
    model: BertForPreTraining,
    source: BatchSource,
    start: int,
    accelerator: Accelerator,
) -> None:
    """Print the run at its start: config, size, and one pair as the model sees it."""
    print(json.dumps(asdict(config)))
    train, pieces = config.train, source.store.vocabulary.pieces
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {accelerator.num_processes} x "
        f"{accelerator.device.type}, {accelerator.mixed_precision}; {train.global_batch_size} sequences a step, "
        f"{source.epoch_size(0):,} pairs an epoch, from step {start:,} to {train.max_steps:,}"
    )
    batch = source.batch(start * train.global_batch_size, 1)
    labels = dict(zip(batch.masked_positions.tolist(), batch.masked_labels.tolist(), strict=True))
    words = (
        pieces[token] + (f"({pieces[labels[i]]})" if i in labels else "")
        for i, token in enumerate(batch.input_ids.tolist())
    )
    print(("IsNext: ", "random: ")[int(batch.next_sentence_label)] + " ".join(words))


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Of the masks that dropout draws in one micro-batch of the global batch: nothing to save, or to restore."""
    return int(key(seed, DROPOUT, step, micro_batch) >> np.uint64(1))


def count_masked(micro_batches: list[Batch], accelerator: Accelerator) -> torch.Tensor:
    """Masked tokens of the whole step, over all micro-batches and processes; at least 1."""
    masked = sum(len(batch.masked_labels) for batch in micro_batches)
    return accelerator.reduce(torch.tensor(masked, device=accelerator.device)).clamp(min=1)


def evaluation_line(step: int, metrics: dict[str, float]) -> str:
    parts = [f"step {step:,}: held-out MLM loss {metrics['eval/mlm_loss']:.3f} nats"]
    parts.append(f"(unigram entropy {metrics['eval/unigram_entropy']:.3f})")
    parts.append(f"accuracy {metrics['eval/mlm_accuracy']:.3f}")
    if "eval/nsp_accuracy" in metrics:
        parts.append(
            f"NSP accuracy {metrics['eval/nsp_accuracy']:.3f} (majority {metrics['eval/nsp_majority']:.3f})"
        )
    return ", ".join(parts)
