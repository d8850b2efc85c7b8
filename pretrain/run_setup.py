"""Set up a run before its first step: processes, run folder, data, model, and the checkpoint to
resume from."""

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TextIO

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast
from omegaconf import OmegaConf

from data_pipeline.common.errors import check, red
from data_pipeline.common.folders import check_space, write_file
from data_pipeline.common.signals import received_signal
from data_pipeline.common.system import machine_memory
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.manifest import held_out_shortfall, list_other_settings
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.checkpoint import load_model, load_optimizers
from pretrain.config import Config, Phase, count_kept, known_positions, phases_of, trained_positions
from pretrain.describe import describe_start
from pretrain.evaluate import HeldOut, build_held_out, sample_counts
from pretrain.export_folder import check_export_folder
from pretrain.fingerprint import build_fingerprint
from pretrain.init_from import hash_weights, start_from
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import check_memory, model_of
from pretrain.models.cpu import return_freed_memory
from pretrain.optim import build_optimizers
from pretrain.probes import Probes, build_probes
from pretrain.processes import (
    build_accelerator,
    call_on_all,
    check_on_each_machine,
    check_ranks_agree,
    is_compiled,
    matrix_dtype,
    share_from_main,
    trains_on_gpu,
)
from pretrain.run_folder import keep_in_run, load_resume_state, lock_run
from pretrain.sampled_softmax import sample_chances
from pretrain.sharding import asks_for_shards, wrap_model
from pretrain.watch import start_watch
from pretrain.word_vectors import word_vectors


@dataclass
class Run:
    """Everything that the training loop needs."""

    config: Config
    phases: list[Phase]
    accelerator: Accelerator
    store: TokenStore
    sources: list[BatchSource]  # one for each phase
    held_out: dict[tuple[int, bool], HeldOut]  # by length, and whether of single segments
    probes: Probes | None
    bare: PretrainingModel
    model: torch.nn.Module  # `bare`, wrapped for many processes
    compiled: bool
    optimizers: list[torch.optim.Optimizer]
    state: dict  # what a checkpoint holds besides tensors
    lock: TextIO
    writing: Future | None = None  # the checkpoint that the main process writes, or wrote last

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def is_main(self) -> bool:
        """Tell whether this is the main process, which alone writes and prints."""
        return self.accelerator.is_main_process

    @property
    def is_evaluated(self) -> bool:
        """Tell whether there is anything to evaluate the model on."""
        return bool(self.held_out or self.probes)

    def stop_signal(self) -> Signals | None:
        """Return the signal that this process has caught, SIGTERM if its last checkpoint could not
        be written, or None: all ranks have to stop on it."""
        failed = self.writing and self.writing.done() and self.writing.exception()
        return received_signal() or (Signals.SIGTERM if failed else None)

    def announce_stop(self) -> None:
        """Write beside the lock that a signal is stopping the run, so that the next start waits."""
        if not self.lock.closed:
            with suppress(OSError):  # such as a full disk
                print("stopping", file=self.lock, flush=True)


def set_up(config: Config) -> Run:
    """Set up processes, data, model and optimizers, and load the newest checkpoint, if any.

    Raises `UserError` for errors in config or data, before anything is written.
    """
    settings, run_dir = config.train, Path(config.run_dir)
    phases = phases_of(config)
    accelerator = build_accelerator(settings, phases)
    share_from_main(lambda: check_export_folder(run_dir / "export"), accelerator)

    # data
    store, sources = open_token_store(config, phases)
    held_out = build_held_out(config, phases, store, accelerator)
    longest = [source.longest for source in sources]
    at_end = {"step": settings.max_steps, "longest": longest}
    known, processes = known_positions(config, at_end), accelerator.num_processes
    probes = call_on_all(lambda: build_probes(config, store, known, processes))
    fingerprint = call_on_all(lambda: fingerprint_run(config, store, accelerator))
    check_ranks_agree(config, fingerprint, accelerator)

    # model, new or with the weights of init_from
    bare, taken, new_heads = call_on_all(lambda: start_model(config, store))
    lock = lock_run(run_dir, accelerator)  # nothing is written before
    checkpoint, state = load_resume_state(run_dir, fingerprint, settings, accelerator)
    state["longest"] = longest
    for source, sizes in zip(sources, state["part_sizes"], strict=False):  # empty in a new run
        if sizes[:1] == source.part_sizes[:1]:  # else the phase had other settings, and lies ahead
            source.recall_sizes(sizes)
    if checkpoint:
        call_on_all(lambda: load_model(checkpoint, bare))
    elif config.init_from:
        state["new_heads"] = new_heads
        accelerator.print(*taken, sep="\n")
    else:
        bare.start_at_positions()
        start_at_neighbours(bare, store, accelerator)
    compiled = is_compiled(settings, accelerator)
    if compiled:
        bare.compile_layers()
    model = wrap_model(bare, accelerator)
    optimizers = build_optimizers(bare, settings, matrix_dtype(accelerator))
    if checkpoint:
        load_optimizers(checkpoint, bare, optimizers)
    if accelerator.is_main_process:
        settings_file = OmegaConf.to_yaml(OmegaConf.structured(config)).encode()
        write_file(run_dir / "config.yaml", settings_file)
        keep_in_run(run_dir, Path(config.data_dir) / "vocab", fingerprint)
        describe_start(config, bare, phases, sources, state["step"], accelerator)
    start_watch(run_dir, accelerator, settings.timeout_s, state["step"])
    return Run(
        config, phases, accelerator, store, sources, held_out, probes, bare, model, compiled,
        optimizers, state, lock,
    )  # fmt: skip


def open_token_store(config: Config, phases: list[Phase]) -> tuple[TokenStore, list[BatchSource]]:
    """Open the training split and build the data of each phase (a collective call).

    Warns if the store was built with other settings, and if the held-out split is too small for its
    losses to be trusted.
    Raises `UserError` if there is no store, or a damaged one.
    """
    folder = Path(config.data_dir)
    store = call_on_all(
        lambda: TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    )
    check_on_each_machine(lambda: check_data(folder))
    sources = call_on_all(lambda: build_sources(phases, store))
    warnings = [*list_short(phases, sources), held_out_shortfall(store.manifest)]
    if differences := list_other_settings(config, store.manifest):
        built = f"{config.data_dir} was built with other settings than the config's"
        warnings.insert(0, f"{built} ({'; '.join(differences)}); it is used as it is")
    for line in filter(None, warnings):
        PartialState().print(red(f"warning: {line}"))
    return store, sources


def build_sources(phases: list[Phase], store: TokenStore) -> list[BatchSource]:
    """Build the data of each phase; raises `UserError` if the corpus has no pairs of its length."""
    sources = [BatchSource(store, phase.data, phase.seed) for phase in phases]
    for phase, source in zip(phases, sources, strict=True):
        source.part_size(0)
        source.find_longest()
        if phase.start:
            source.free_pairs()  # drawn again when the phase starts; takes 3.3 bytes per token
    return sources


def list_short(phases: list[Phase], sources: list[BatchSource]) -> list[str]:
    """Describe the phase lengths that no sequence comes close to, without repetitions."""
    lengths = [
        (phase.data.max_seq_length, one.longest) for phase, one in zip(phases, sources, strict=True)
    ]
    return [
        f"no sequence of the first epoch has more than {longest} of {length} tokens, so the "
        "export will have no further positions; lower max_seq_length, or use longer documents"
        for length, longest in dict.fromkeys(lengths)
        if trained_positions(length, longest) < length
    ]


def check_resources(config: Config, vocab_size: int) -> None:
    """Raise `UserError` if the weights, gradients and moments of a model do not fit in memory, or
    its checkpoints on the disk, without building it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpu := trains_on_gpu():
        memory = torch.cuda.get_device_properties(0).total_memory
        if asks_for_shards():
            memory *= int(os.environ.get("WORLD_SIZE", 1))
    else:
        memory = machine_memory() // ranks
    train = config.train
    copies = 3 if train.optimizer == "muon" else 4  # Muon has one moment of a matrix
    # on a CPU also the main process's copy for a checkpoint: all but the gradients
    held = copies if on_gpu else copies + (copies - 1) / ranks
    number = check_memory(config.model, vocab_size, config.data.objective, held, memory)
    files = Path(config.run_dir).glob("checkpoints/step-*/*")
    there = sum(path.stat().st_size for path in files if path.is_file())
    wanted = 4 * (copies - 1) * number * count_kept(train) - there
    run_dir, linked = Path(config.run_dir), Path(config.run_dir, "checkpoints")
    folder = linked if linked.is_symlink() else run_dir  # perhaps to another disk
    check_space(folder, wanted, "a run with its checkpoints", "run_dir")


def build_model(config: Config, counts: torch.Tensor) -> PretrainingModel:
    """Build the initial model, with the heads of its objectives.

    counts: of each token of the vocabulary in the corpus, (V,).
    Raises `UserError` if this machine is too small for it.
    """
    check_resources(config, len(counts))
    torch.manual_seed(config.seed)
    train = config.train
    model = model_of(config.model, len(counts), config.data.objective, train.bag_of_words_weight)
    model.gradient_checkpointing = train.gradient_checkpointing
    if 0 < train.sampled_softmax < len(counts):
        model.sample_chances = sample_chances(counts, train.sampled_softmax)
    return model


def start_model(config: Config, store: TokenStore) -> tuple[PretrainingModel, list[str], list[str]]:
    """Build the initial model, and give it the weights of `init_from`, if any; returns what
    `start_from` says of them too."""
    counts = torch.from_numpy(sample_counts(store))
    model = build_model(config, counts)
    model.start_at_frequencies(counts)
    taken = ([], [])
    if config.init_from:
        taken = start_from(config.init_from, model, store.vocabulary.pieces)
    return model, *taken


def start_at_neighbours(
    model: PretrainingModel, store: TokenStore, accelerator: Accelerator
) -> None:
    """Initialize the word embeddings of a new model from the neighbours of each token in its corpus
    (a collective call)."""
    accelerator.print("initializing the word embeddings from the neighbours of each token")
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
    advice = f"set model.pad_token_id={pad}"
    if config.init_from:
        advice = f"prepare the data of another data_dir with the vocabulary of {config.init_from}"
    check(
        config.model.pad_token_id == pad,
        f"model.pad_token_id is {config.model.pad_token_id}, but [PAD] has id {pad} in the "
        f"vocabulary; {advice}",
    )
    precision = accelerator.mixed_precision.replace("no", "fp32")
    hashes = store.vocabulary.sha256, store.manifest["data_sha256"]
    folder = config.init_from and Path(config.init_from).expanduser()
    return build_fingerprint(config, *hashes, precision, folder and hash_weights(folder))
