"""The processes of a run: their device, precision and group, and their collective calls."""

import os
import shutil
import socket
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore, init_process_group

from data_pipeline.common.errors import UserError, check, explain
from data_pipeline.common.signals import die_with_launcher
from data_pipeline.sampling.batch_source import count_passes
from pretrain.config import Config, Phase, TrainConfig
from pretrain.models.cpu import configure_cpu, cpu_supports

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # for one rank that hashes a store, at 100 MB/s or less


def build_accelerator(settings: TrainConfig, phases: list[Phase]) -> Accelerator:
    """Configure the device, the precision and the process group.

    Raises `UserError` if fewer processes run than were asked for, or more than a batch has
    sequences, and for plug-ins of Accelerate that wrap the model in their own way.
    """
    launched = "WORLD_SIZE" in os.environ
    # set by accelerate launch for several processes; an address alone may come from the shell
    asked_for_several = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}
    if asked_for_several <= os.environ.keys() and not launched:
        raise UserError(
            "accelerate launch was asked for several processes but started one, as it does with "
            "--cpu; use accelerate launch --config_file configs/accelerate/cpu_2.yaml -m pretrain "
            "CONFIG, or torchrun"
        )
    given = os.environ.get("WORLD_SIZE", "1")
    check(
        given.isdecimal() and int(given) > 0,
        f"WORLD_SIZE is {given!r}, not a number of processes; unset it, or launch with torchrun "
        "or a file of configs/accelerate",
    )
    asked = int(given)
    if asked > 1:
        missing = sorted({"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys())
        check(
            not missing,
            f"WORLD_SIZE is {asked}, but not set are {', '.join(missing)}; launch with torchrun or "
            "a file of configs/accelerate, or unset WORLD_SIZE to train with one process",
        )
    for plug_in in ("DEEPSPEED", "MEGATRON_LM"):
        check(
            not parse_flag_from_env(f"ACCELERATE_USE_{plug_in}"),
            f"the launcher asks for {plug_in.lower()}, which is not supported; use DDP or FSDP2, "
            "as configs/accelerate/gpu_8.yaml and fsdp_8.yaml do",
        )
    die_with_launcher()
    cuda = trains_on_gpu()
    if not cuda:
        configure_cpu()
    precision = choose_precision(settings.precision, cuda)
    timeout = timedelta(seconds=settings.timeout_s)
    join_restarted(timeout)
    wanted = {"fp32": "no"}.get(precision, precision)
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != wanted:
        AcceleratorState._reset_state()  # of a run before this one in the same process
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision=wanted,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timeout),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    world_size = accelerator.num_processes
    if asked != world_size:
        raise UserError(
            f"the launcher was asked for {asked} processes, but {world_size} are running; launch "
            "with torchrun or a file of configs/accelerate"
        )
    sizes = [(one.train.global_batch_size, one.train.micro_batch_size) for one in phases]
    call_on_all(lambda: [count_passes(*pair, world_size) for pair in sizes])
    if cuda and is_compiled(settings, accelerator):
        call_on_all(check_compiler)
    return accelerator


def trains_on_gpu() -> bool:
    """Tell whether there is a GPU that `accelerate launch --cpu` has not disabled."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def choose_precision(asked: str, on_gpu: bool) -> str:
    """Resolve `auto` to bf16 if there are instructions for it, else fp32."""
    if asked != "auto":
        return asked
    if on_gpu:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if cpu_supports("avx512_bf16") else "fp32"


def join_restarted(timeout: timedelta) -> None:
    """Join the process group of a run that its launcher has restarted, under keys of its own.

    torch 2.13 reads the keys that the earlier processes left in the launcher's store, and waits for
    addresses that no longer exist.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timeout)
        init_process_group(
            "nccl" if trains_on_gpu() else "gloo",
            store=PrefixStore(f"attempt-{attempt}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )


def matrix_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the dtype of matrix products under a run's precision."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def is_compiled(settings: TrainConfig, accelerator: Accelerator) -> bool:
    """Tell whether a run compiles its layers, as `train.compile` says or by default on a GPU."""
    on_gpu = accelerator.device.type == "cuda"
    return on_gpu if settings.compile is None else settings.compile


def check_compiler() -> None:
    """Raise `UserError` if there is nothing to compile C with.

    In the first step of a compiled model Triton builds the C code that launches its kernels.
    """
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler")
    headers = sysconfig.get_path("include", "posix_prefix")
    if not (Path(headers, "Python.h").exists() or os.environ.get("CPATH")):
        missing.append(f"{headers}/Python.h")
    check(
        not missing,
        f"torch.compile needs {' and '.join(missing)}, which this machine lacks; install gcc and "
        "the headers of Python (apt install gcc python3-dev), or set train.compile=false, which "
        "trains more slowly",
    )


def stop_all(message: str, accelerator: Accelerator | PartialState) -> NoReturn:
    """Exit with code 2 on all ranks (a collective call); the main process prints the message."""
    if accelerator.is_main_process:
        raise UserError(message)
    time.sleep(1)  # a launcher kills all ranks when one exits, so the message must come first
    sys.exit(2)


def try_call(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Call a function; returns what it returns, and the message of an error of the user or the
    operating system."""
    try:
        return function(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, explain(error)


def call_on_all(function: Callable[[], T]) -> T:
    """Call a function on all ranks and return what it returns there (a collective call); an error
    of the user or the operating system on any of them stops all."""
    state, (found, message) = PartialState(), try_call(function)
    for rank, (host, said) in enumerate(gather_object([(socket.gethostname(), message)])):
        if said:
            stop_all(said if rank == 0 else f"rank {rank} on {host}: {said}", state)
    return found


def check_on_each_machine(function: Callable[[], object]) -> None:
    """Call a function on one rank of each machine (a collective call); an error of the user or the
    operating system in any of them stops all.

    The others wait for it for up to `PATIENCE`, unlike in other collective calls.
    """
    state, message = PartialState(), None
    messages = [None] * state.num_processes
    patient = dist.new_group(backend="gloo", timeout=PATIENCE) if len(messages) > 1 else None
    if state.is_local_main_process:
        _, message = try_call(function)
    if patient:
        dist.all_gather_object(messages, message, patient)
        dist.destroy_process_group(patient)
    else:
        messages = [message]
    if any(messages):
        stop_all(next(filter(None, messages)), state)


def share_from_main(function: Callable[[], object], accelerator: Accelerator) -> object:
    """Call a function on the main process and return what it returns on all (a collective call);
    an error of the user or the operating system that it raises stops them all."""
    shared = [*try_call(function)] if accelerator.is_main_process else [None, None]
    found, message = broadcast_object_list(shared)
    if message:
        stop_all(message, accelerator)
    return found


def check_ranks_agree(config: Config, fingerprint: dict, accelerator: Accelerator) -> None:
    """Stop all ranks if their settings or data differ, naming the first rank that differs.

    Paths may differ between hosts: data are compared by the hashes in the fingerprint.
    """
    mine = {
        f"{section}.{name}": value
        for section in ("data", "eval", "train")  # evaluations are collective calls too
        for name, value in asdict(getattr(config, section)).items()
    }
    mine |= fingerprint | {"device": accelerator.device.type, "torch": torch.__version__}
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
                "start all ranks with the same config and data",
                accelerator,
            )
    if len(ranks) > 1:
        hosts = Counter(host for host, _ in ranks)
        accelerator.print("ranks: " + ", ".join(f"{n} on {host}" for host, n in hosts.items()))
