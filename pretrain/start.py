"""What happens before the first step: processes, the folder of the run, and the checkpoint to go on
from."""

import ctypes
import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)

from data_pipeline.batches import Batch, BatchSource
from data_pipeline.config import check
from data_pipeline.errors import UserError
from data_pipeline.processes import die_with_parent
from data_pipeline.token_store import TokenStore, Vocabulary, read_vocabulary
from pretrain.checkpoint import check_contract, newest_checkpoint, read_state
from pretrain.config import Config, Phase, TrainConfig, phase_at
from pretrain.evaluate import HeldOut
from pretrain.metrics import TALLY
from pretrain.model import BertForPreTraining


def build_accelerator(settings: TrainConfig, phases: list[Phase]) -> Accelerator:
    """Devices and processes; raises `UserError` if fewer processes run than the launcher was asked
    for, or if they do not divide the batch of a phase."""
    launched = "WORLD_SIZE" in os.environ
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and not launched:
        raise UserError(
            "accelerate launch was asked for several processes and started one, as it does with "
            "--cpu; use accelerate launch --config_file configs/accelerate/cpu_2.yaml -m pretrain "
            "CONFIG, or torchrun"
        )
    if launched:
        die_with_parent(os.getppid())
    cuda = torch.cuda.is_available()
    if not cuda:
        keep_freed_memory()
    if not cuda and platform.machine() == "x86_64" and not torch.cpu._is_amx_tile_supported():
        # float32 products by oneDNN instead of MKL, 1.1 to 1.3 x as fast on AMD and as exact; other
        # CPUs would take bf16 products, which `precision: bf16` asks for
        torch.set_float32_matmul_precision("medium")
    precision = settings.precision
    if precision == "auto":
        if cuda:
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = torch.cpu._is_avx512_bf16_supported()
        precision = "bf16" if fast else "fp32"
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision={"fp32": "no"}.get(precision, precision),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=settings.timeout_s)),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    world_size = accelerator.num_processes
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if asked != world_size:
        raise UserError(f"the launcher was asked for {asked} processes, {world_size} run")
    for phase in phases:
        size, micro = phase.train.global_batch_size, phase.train.micro_batch_size
        share = micro * world_size
        check(
            size % share == 0,
            f"train.global_batch_size {size} is not a multiple of train.micro_batch_size {micro} x "
            f"{world_size} processes = {share}; try {max(1, round(size / share)) * share}",
        )
    return accelerator


def keep_freed_memory() -> None:
    """Let the large tensors that one step frees serve the next: the C library gives them back to
    the system and gets zeroed pages instead, 5 to 20 % of a step on a CPU (glibc; else nothing)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: None)
    mmap_threshold, trim_threshold = -3, -1  # malloc.h
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


def stop_all(message: str, accelerator: Accelerator) -> NoReturn:
    """End the run with exit code 2 on all ranks, each of which must come here; one says why."""
    if accelerator.is_main_process:
        raise UserError(message)
    time.sleep(1)  # a launcher ends all processes when one has: the first has to speak before
    sys.exit(2)


def shake_hands(config: Config, contract: dict, accelerator: Accelerator) -> None:
    """Stop all ranks, naming the first that differs and in what, if they are not of one run.

    Places may differ: what is in `data_dir` is compared, by the hashes in the contract.
    """
    train = {f"train.{name}": value for name, value in asdict(config.train).items()}
    device = accelerator.device.type
    mine = train | contract | {"device": device, "torch": torch.__version__}
    ranks = gather_object([(socket.gethostname(), mine)])
    first = ranks[0][1]
    for rank, (host, other) in enumerate(ranks):
        differences = [
            f"{name} is {other.get(name)!r}, on rank 0 {first.get(name)!r}"
            for name in sorted(first.keys() | other.keys())
            if other.get(name) != first.get(name)
        ]
        if differences:
            stop_all(
                f"rank {rank} on {host} is of another run: {'; '.join(differences)}; start all "
                "ranks with one config and the same data",
                accelerator,
            )
    if len(ranks) > 1:
        hosts = Counter(host for host, _ in ranks)
        accelerator.print("ranks: " + ", ".join(f"{n} on {host}" for host, n in hosts.items()))


def open_data(config: Config, phases: list[Phase]) -> tuple[TokenStore, list[BatchSource]]:
    """The training split and the data of each phase; raises `UserError` if there is none."""
    vocabulary = read_vocabulary(Path(config.data_dir) / "vocab")
    store = TokenStore.open(Path(config.data_dir) / "store", "train", vocabulary)
    return store, build_sources(phases, store)


def build_sources(phases: list[Phase], store: TokenStore) -> list[BatchSource]:
    """The data of each phase; raises `UserError` if the corpus cannot give pairs of its length."""
    sources = [BatchSource(store, phase.data, phase.seed) for phase in phases]
    for phase, source in zip(phases, sources, strict=True):
        source.part_size(0)
        if phase.start:
            source.parts.clear()  # until its turn: 3.3 bytes a token
    return sources


def build_model(config: Config, vocab_size: int) -> BertForPreTraining:
    """The model as a run starts with it; without pairs to judge, the NSP head does not train."""
    torch.manual_seed(config.seed)
    model = BertForPreTraining(config.model, vocab_size)
    model.gradient_checkpointing = config.train.gradient_checkpointing
    if config.data.objective == "none":
        model.pooler.requires_grad_(False)
        model.nsp.requires_grad_(False)
    return model


def build_contract(config: Config, store: TokenStore, accelerator: Accelerator) -> dict:
    """What must stay the same from the first step of a run to its last, flat.

    Raises `UserError` if the model has another id of [PAD] than the vocabulary.
    """
    pad = store.vocabulary["[PAD]"]
    check(
        config.model.pad_token_id == pad,
        f"model.pad_token_id is {config.model.pad_token_id}, and [PAD] has id {pad} in the "
        f"vocabulary; set model.pad_token_id={pad}",
    )
    free = (
        "compile",
        "gradient_checkpointing",
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
            f"{run_dir} is in use by {lock.read().strip() or 'another process'}; stop it or choose "
            "another run_dir"
        ) from None
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    return lock


def find_state(run_dir: Path, contract: dict, accelerator: Accelerator) -> tuple[Path | None, dict]:
    """(checkpoint to go on from or None, state of the run), the same for all ranks.

    Raises `UserError` if the run is of another config.
    """
    found = [newest_checkpoint(run_dir / "checkpoints") if accelerator.is_main_process else None]
    broadcast_object_list(found)
    if found[0] is None:
        state = {"step": 0, "window": [0.0] * TALLY, "evaluation": {}, "part_sizes": []}
    else:
        state = read_state(found[0])
        check_contract(state["contract"], contract, run_dir)
    return found[0], state | {"contract": contract}


def build_held_out(config: Config, store: TokenStore, accelerator: Accelerator) -> HeldOut | None:
    """The held-out pairs beside the training split `store`; None, with a warning, if there are too
    few documents for any."""
    settings = config.train
    try:
        return HeldOut(
            Path(config.data_dir) / "store",
            store,
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
    phases: list[Phase],
    sources: list[BatchSource],
    start: int,
    accelerator: Accelerator,
) -> None:
    """Print the run at its start: config, size, phases, and one pair as the model sees it."""
    print(json.dumps(asdict(config)))
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {accelerator.num_processes} x "
        f"{accelerator.device.type}, {accelerator.mixed_precision.replace('no', 'fp32')}; "
        f"from step {start:,} to {config.train.max_steps:,}"
    )
    for phase, source in zip(phases, sources, strict=True):
        pairs = source.part_size(0) * source.n_parts
        print(
            f"step {phase.start:,} to {phase.end:,}: {phase.train.global_batch_size:,} sequences "
            f"of at most {phase.data.max_seq_length} tokens a step, {pairs:,} pairs an epoch"
        )
    phase = phase_at(phases, start)
    example = (start - phase.start) * phase.train.global_batch_size
    batch = sources[phases.index(phase)].batch(example, 1)
    print(show_pair(batch, sources[0].store.vocabulary))


def show_pair(batch: Batch, vocabulary: Vocabulary) -> str:
    """A batch of one sequence as the model sees it, what is to be predicted in parentheses."""
    pieces = vocabulary.pieces
    labels = dict(zip(batch.masked_positions.tolist(), batch.masked_labels.tolist(), strict=True))
    words = (
        pieces[token] + (f"({pieces[labels[i]]})" if i in labels else "")
        for i, token in enumerate(batch.input_ids.tolist())
    )
    return ("IsNext: ", "random: ")[int(batch.next_sentence_label)] + " ".join(words)
