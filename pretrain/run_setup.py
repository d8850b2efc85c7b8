"""Set up a run before its first step: processes, run folder, data, model, and the checkpoint to
resume from."""

import fcntl
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NoReturn, TextIO

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from omegaconf import OmegaConf
from torch.distributed import PrefixStore, TCPStore, init_process_group

from data_pipeline.common.errors import UserError, red
from data_pipeline.common.folders import (
    check_space,
    claim_folder,
    hash_file,
    install_files,
    write_file,
)
from data_pipeline.common.reading import read_json
from data_pipeline.common.signals import die_with_launcher
from data_pipeline.common.system import machine_memory
from data_pipeline.config import PROBES_FILE, check
from data_pipeline.sampling.batches import BatchSource, count_passes
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import (
    TOKENIZER_FILES,
    TokenStore,
    held_out_shortfall,
    read_vocabulary,
)
from pretrain.checkpoint import (
    find_sound,
    list_checkpoints,
    list_others,
    load_model,
    load_optimizers,
    read_state,
    resume_checkpoint,
)
from pretrain.config import Config, Phase, TrainConfig, count_kept, phases_of
from pretrain.describe import describe_start
from pretrain.evaluate import HeldOut, sample_counts
from pretrain.export_folder import check_export_folder
from pretrain.fingerprint import build_fingerprint, check_fingerprint, read_fingerprint
from pretrain.init_from import hash_weights, start_from
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import check_memory, model_of
from pretrain.models.cpu import configure_cpu, cpu_supports, return_freed_memory
from pretrain.optim import build_optimizers
from pretrain.probes import Probes
from pretrain.sharding import wrap_model
from pretrain.watch import start_watch
from pretrain.word_vectors import word_vectors

RUN_FILES = ("config.yaml", "fingerprint.json", "metrics.jsonl", "report.html", "checkpoints")
RUN_FILES += ("export", "vocab", "ranks")


@dataclass
class Run:
    """Everything that the training loop needs."""

    config: Config
    phases: list[Phase]
    accelerator: Accelerator
    store: TokenStore
    sources: list[BatchSource]  # one for each phase
    held_out: dict[int, HeldOut]  # by length
    probes: Probes | None
    bare: PretrainingModel
    model: torch.nn.Module  # `bare`, wrapped for many processes
    compiled: bool
    optimizers: list[torch.optim.Optimizer]
    state: dict  # what a checkpoint holds besides tensors
    lock: TextIO

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def main(self) -> bool:
        """Tell whether this is the main process, which alone writes and prints."""
        return self.accelerator.is_main_process

    @property
    def is_evaluated(self) -> bool:
        """Tell whether there is anything to evaluate the model by."""
        return bool(self.held_out or self.probes)

    def announce_stop(self) -> None:
        """Write beside the lock that a signal is stopping the run, so that the next start waits."""
        if not self.lock.closed:
            print("stopping", file=self.lock, flush=True)


def set_up(config: Config) -> Run:
    """Set up processes, data, model and optimizers, and load the newest checkpoint, if any.

    Raises `UserError` for mistakes of config or data, before anything is written.
    """
    settings, run_dir = config.train, Path(config.run_dir)
    phases = phases_of(config)
    accelerator = build_accelerator(settings, phases)
    if accelerator.is_main_process:
        check_export_folder(run_dir / "export")

    # data
    store, sources = open_token_store(config, phases)
    held_out = build_held_out(config, phases, store, accelerator)
    probes = build_probes(config, store)
    fingerprint = fingerprint_run(config, store, accelerator)
    check_ranks_agree(config, fingerprint, accelerator)
    lock = lock_run(run_dir, accelerator)
    checkpoint, state = load_resume_state(run_dir, fingerprint, settings, accelerator)
    for source, sizes in zip(sources, state["part_sizes"], strict=False):  # empty in a new run
        source.recall_sizes(sizes)

    # model and optimizers
    bare = build_model(config, len(store.vocabulary))
    if checkpoint:
        load_model(checkpoint, bare)
    else:
        bare.start_at_frequencies(torch.from_numpy(sample_counts(store)))
        if config.init_from:
            folder = Path(config.init_from).expanduser()
            accelerator.print(*start_from(folder, bare, store.vocabulary.pieces), sep="\n")
        else:
            start_at_neighbours(bare, store, accelerator)
    compiled = is_compiled(settings, accelerator)
    if compiled:
        bare.compile_layers()
    model = wrap_model(bare, accelerator)
    optimizers = build_optimizers(bare, settings, matrix_dtype(accelerator))
    if checkpoint:
        load_optimizers(checkpoint, bare, optimizers)
    if accelerator.is_main_process:
        OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
        keep_in_run(run_dir, Path(config.data_dir) / "vocab", fingerprint)
        describe_start(config, bare, phases, sources, state["step"], accelerator)
    start_watch(run_dir, accelerator, settings.timeout_s)
    return Run(
        config, phases, accelerator, store, sources, held_out, probes, bare, model, compiled,
        optimizers, state, lock,
    )  # fmt: skip


def build_accelerator(settings: TrainConfig, phases: list[Phase]) -> Accelerator:
    """Configure the device, the precision and the process group.

    Raises `UserError` if fewer processes run than the launcher was asked for, or more than a batch
    has sequences.
    """
    launched = "WORLD_SIZE" in os.environ
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and not launched:
        raise UserError(
            "accelerate launch was asked for several processes and started one, as it does with "
            "--cpu; use accelerate launch --config_file configs/accelerate/cpu_2.yaml -m pretrain "
            "CONFIG, or torchrun"
        )
    die_with_launcher()
    cuda = torch.cuda.is_available()
    if not cuda:
        configure_cpu()
    precision = settings.precision
    if precision == "auto":
        if cuda:
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = cpu_supports("avx512_bf16")
        precision = "bf16" if fast else "fp32"
    timeout = timedelta(seconds=settings.timeout_s)
    join_restarted(timeout)
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision={"fp32": "no"}.get(precision, precision),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timeout),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    world_size = accelerator.num_processes
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if asked != world_size:
        raise UserError(f"the launcher was asked for {asked} processes, {world_size} run")
    for phase in phases:
        count_passes(phase.train.global_batch_size, phase.train.micro_batch_size, world_size)
    return accelerator


def join_restarted(timeout: timedelta) -> None:
    """Join the process group of a run that its launcher has restarted, under keys of its own.

    torch 2.13 reads those that the processes before have left in the launcher's store, and waits
    for addresses that nobody has.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timeout)
        init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"attempt-{attempt}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )


def matrix_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the type that matrix products have under a run's precision."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def is_compiled(settings: TrainConfig, accelerator: Accelerator) -> bool:
    """Tell whether a run compiles its layers, as `train.compile` says or by default on a GPU."""
    on_gpu = accelerator.device.type == "cuda"
    return on_gpu if settings.compile is None else settings.compile


def stop_all(message: str, accelerator: Accelerator | PartialState) -> NoReturn:
    """Exit with code 2 on all ranks (a collective call); the main process prints the message."""
    if accelerator.is_main_process:
        raise UserError(message)
    time.sleep(1)  # a launcher kills all ranks when one exits, so the message must come first
    sys.exit(2)


def check_on_each_machine(function: Callable[[], object]) -> None:
    """Call a function on one rank of each machine (a collective call); a `UserError` in any of them
    stops all."""
    state, message = PartialState(), None
    if state.is_local_main_process:
        try:
            function()
        except UserError as error:
            message = str(error)
    if messages := list(filter(None, gather_object([message]))):
        stop_all(messages[0], state)


def check_ranks_agree(config: Config, fingerprint: dict, accelerator: Accelerator) -> None:
    """Stop all ranks if their settings or data differ, naming the first rank that differs.

    Paths may differ between hosts: data are compared by the hashes in the fingerprint.
    """
    train = {f"train.{name}": value for name, value in asdict(config.train).items()}
    device = accelerator.device.type
    mine = train | fingerprint | {"device": device, "torch": torch.__version__}
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
                f"rank {rank} on {host} has a different config or data: {'; '.join(differences)}; "
                "start all ranks with one config and the same data",
                accelerator,
            )
    if len(ranks) > 1:
        hosts = Counter(host for host, _ in ranks)
        accelerator.print("ranks: " + ", ".join(f"{n} on {host}" for host, n in hosts.items()))


def open_token_store(config: Config, phases: list[Phase]) -> tuple[TokenStore, list[BatchSource]]:
    """Open the training split and build the data of each phase (a collective call).

    Warns if the held-out split is too small for its losses to be trusted.
    Raises `UserError` if there is no store, or a damaged one.
    """
    vocabulary = read_vocabulary(Path(config.data_dir) / "vocab")
    store = TokenStore.open(Path(config.data_dir) / "store", "train", vocabulary)
    check_on_each_machine(lambda: check_data(Path(config.data_dir)))
    sources = build_sources(phases, store)
    if shortfall := held_out_shortfall(store.manifest):
        PartialState().print(red(f"warning: {shortfall}"))
    return store, sources


def build_sources(phases: list[Phase], store: TokenStore) -> list[BatchSource]:
    """Build the data of each phase; raises `UserError` if the corpus has no pairs of its length."""
    sources = [BatchSource(store, phase.data, phase.seed) for phase in phases]
    for phase, source in zip(phases, sources, strict=True):
        source.part_size(0)
        if phase.start:
            source.free_pairs()  # drawn again when the phase starts; takes 3.3 bytes per token
    return sources


def check_resources(config: Config, vocab_size: int) -> None:
    """Raise `UserError` if memory cannot hold the weights, gradients and moments of a model, or the
    disk its checkpoints, without building it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            memory *= int(os.environ.get("WORLD_SIZE", 1))
    else:
        memory = machine_memory() // ranks
    train = config.train
    copies = 3 if train.optimizer == "muon" else 4  # Muon has one moment of a matrix
    number = check_memory(config.model, vocab_size, config.data.objective, copies, memory)
    there = sum(p.stat().st_size for p in Path(config.run_dir).glob("checkpoints/step-*/*"))
    wanted = 4 * (copies - 1) * number * count_kept(train) - there
    check_space(Path(config.run_dir), wanted, "a run with its checkpoints", "run_dir")


def build_model(config: Config, vocab_size: int) -> PretrainingModel:
    """Build the initial model, with the heads of its objectives.

    Raises `UserError` if this machine is too small for it.
    """
    check_resources(config, vocab_size)
    torch.manual_seed(config.seed)
    asked = config.data.objective, config.train.bag_of_words_weight
    model = model_of(config.model, vocab_size, *asked)
    model.gradient_checkpointing = config.train.gradient_checkpointing
    return model


def start_at_neighbours(
    model: PretrainingModel, store: TokenStore, accelerator: Accelerator
) -> None:
    """Start the word embeddings of a new model from the neighbours of each token in its corpus (a
    collective call)."""
    accelerator.print("starting the word embeddings from the neighbours of each token")
    vectors = torch.zeros_like(model.embeddings.word.weight.detach(), device=accelerator.device)
    if accelerator.is_main_process:
        vectors = word_vectors(store, vectors.shape[1], accelerator.device)
        return_freed_memory()
    # from one rank, because another machine may round otherwise
    model.start_at_vectors(broadcast(vectors).to(model.embeddings.word.weight.device))


def fingerprint_run(config: Config, store: TokenStore, accelerator: Accelerator) -> dict:
    """Build the fingerprint of a run from its config, its data and the precision in use.

    Raises `UserError` if model and vocabulary have different ids of [PAD], or if there are no
    weights to start from.
    """
    pad = store.vocabulary["[PAD]"]
    check(
        config.model.pad_token_id == pad,
        f"model.pad_token_id is {config.model.pad_token_id}, and [PAD] has id {pad} in the "
        f"vocabulary; set model.pad_token_id={pad}",
    )
    precision = accelerator.mixed_precision.replace("no", "fp32")
    hashes = store.vocabulary.sha256, store.manifest["data_sha256"]
    folder = config.init_from and Path(config.init_from).expanduser()
    return build_fingerprint(config, *hashes, precision, folder and hash_weights(folder))


def is_run(run_dir: Path) -> bool:
    """Recognize the folder of a run that lacks the marker file, as earlier versions wrote it."""
    record = (run_dir / "metrics.jsonl").exists()
    known = (run_dir / "lock").exists() or (run_dir / "fingerprint.json").exists()
    return record and known or any(run_dir.glob("checkpoints/step-*/manifest.json"))


def lock_run(run_dir: Path, accelerator: Accelerator):
    """Create and lock the run folder, so that two jobs cannot overwrite each other's files.

    Waits for a job that a signal is stopping. Returns the open lock file. Raises `UserError` if the
    folder is in use, or holds the user's own files under names that a run writes.
    """
    if not accelerator.is_main_process:
        return open(os.devnull, "w")
    claim_folder(run_dir, RUN_FILES, "run_dir", is_run)
    lock = open(run_dir / "lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder, *stopping = lock.read().splitlines() or ["another process"]
        check(stopping, f"{run_dir} is in use by {holder}; stop it or choose another run_dir")
        print(f"waiting for {holder}, which a signal is stopping", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    return lock


def load_resume_state(
    run_dir: Path, fingerprint: dict, settings: TrainConfig, accelerator: Accelerator
) -> tuple[Path | None, dict]:
    """Find the checkpoint to resume from and read its state (a collective call).

    Returns (checkpoint or None, state), the same on all ranks. Raises `UserError` if the run has a
    different fingerprint, or checkpoints that are all damaged.
    """
    is_main = accelerator.is_main_process
    checkpoint = share_from_main(
        lambda: is_main and find_start(run_dir, fingerprint, settings.restart), accelerator
    )
    state = {"step": 0, "running_sums": [], "evaluation": {}, "part_sizes": []}
    if checkpoint is not None:
        state = read_state(checkpoint)
        saved = read_fingerprint(state)
        for line in check_fingerprint(saved, fingerprint, state["step"], run_dir, settings.extend):
            accelerator.print(line)
        was, now = state.get("micro_batch_size"), settings.micro_batch_size
        if was not in (None, now):
            accelerator.print(
                f"train.micro_batch_size was {was}, is {now}: the same gradients, but for dropout, "
                "which is drawn per pass"
            )
    state.pop("contract", None)
    state |= {"fingerprint": fingerprint, "micro_batch_size": settings.micro_batch_size}
    return checkpoint, state | {"restarted": settings.restart}


def share_from_main(function: Callable[[], object], accelerator: Accelerator) -> object:
    """Call a function on all ranks and return what it returns on the main process (a collective
    call); a `UserError` that it raises there stops them all."""
    shared = [None, None]
    try:
        shared[0] = function()
    except UserError as error:
        shared[1] = str(error)
    broadcast_object_list(shared)
    if shared[1] is not None:
        stop_all(shared[1], accelerator)
    return shared[0]


def find_start(run_dir: Path, fingerprint: dict, restart: bool) -> Path | None:
    """Find the checkpoint that a run goes on from; None starts it at step 0.

    restart: move the run to `before-N` in its folder, unless a restart of this fingerprint began
    it, so that the same command goes on with what it began.
    Raises `UserError` if there are checkpoints and all of them are damaged.
    """
    folder = run_dir / "checkpoints"
    if restart and list_checkpoints(folder) + list_others(folder):
        checkpoint, _ = find_sound(folder)
        state = read_state(checkpoint) if checkpoint else {}
        if not (state.get("restarted") and state["fingerprint"] == fingerprint):
            before = next(path for i in count(1) if not (path := run_dir / f"before-{i}").exists())
            before.mkdir()
            for name in (*RUN_FILES, "wandb_id.txt"):
                if (run_dir / name).exists():
                    (run_dir / name).rename(before / name)
            print(f"train.restart: the run so far is in {before}, and a new one starts at step 0")
    return resume_checkpoint(folder)


def keep_in_run(run_dir: Path, vocab_dir: Path, fingerprint: dict) -> None:
    """Copy the vocabulary and the fingerprint into the run folder.

    The folder can then be moved and exported without its `data_dir`.
    """
    install_files(vocab_dir, run_dir / "vocab", TOKENIZER_FILES)
    hashes = {name: hash_file(run_dir / "vocab" / name) for name in TOKENIZER_FILES}
    fingerprint = fingerprint | {"vocab_files": hashes}
    write_file(run_dir / "fingerprint.json", json.dumps(fingerprint, indent=1).encode() + b"\n")


def build_held_out(
    config: Config, phases: list[Phase], store: TokenStore, accelerator: Accelerator
) -> dict[int, HeldOut]:
    """Build the held-out batches at `data.max_seq_length` and at the other lengths of the phases.

    Returns length -> batches, about as many tokens at each length, without those lengths for which
    the held-out split gives no pairs; a warning says so.
    """
    if not store.manifest["held_out"]["documents"]:
        return {}  # `open_token_store` has warned
    settings, base, found = config.train, config.data.max_seq_length, {}
    for length in dict.fromkeys([base, *(phase.data.max_seq_length for phase in phases)]):
        try:
            found[length] = HeldOut(
                Path(config.data_dir) / "store",
                store,
                replace(config.data, max_seq_length=length),
                max(settings.eval_examples * base // length, 1),
                max(settings.micro_batch_size * base // length, 1),
                accelerator,
            )
        except UserError as error:
            accelerator.print(red(f"warning: no evaluation at length {length}: {error}"))
    return found


def build_probes(config: Config, store: TokenStore) -> Probes | None:
    """Read the probes that preparation has encoded; None if `eval.probes` is empty.

    Raises `UserError` if they are missing, encode another config or vocabulary, or are too long.
    """
    settings = config.eval.probes
    if not (settings.minimal_pairs or settings.sentences):
        return None
    path = Path(config.data_dir) / PROBES_FILE
    ids = [[range(len(store.vocabulary))]]
    shape = {"settings": dict, "vocab_sha256": str, "paradigms": [[str]]}
    shape |= {"good": ids, "bad": ids, "sentences": ids}
    advice = "encode eval.probes with python -m data_pipeline CONFIG"
    found = read_json(path, shape, advice) if path.exists() else {}
    expected = {"settings": asdict(settings), "vocab_sha256": store.vocabulary.sha256}
    check(
        found
        and expected.items() <= found.items()
        and len(found["good"]) == len(found["bad"]) == len(found["paradigms"])
        and all(len(names) == 3 for names in found["paradigms"]),
        f"{path} {'was made from other probes or another vocabulary' if found else 'is missing'}; "
        + advice,
    )
    longest = config.model.max_position_embeddings
    return Probes(found, store.vocabulary, sample_counts(store), longest)
