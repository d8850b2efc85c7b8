"""What lets work be stopped at any moment and be done anywhere: folders written beside and renamed,
one command at a time in a folder, tasks on processes that end with the command, or on a cluster."""

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from uuid import uuid4

from tqdm import tqdm

from data_pipeline.errors import UserError

CLUSTER_WINDOW = 1024  # tasks that a scheduler is told of at once
PATIENCE = 30  # seconds to find the scheduler


@contextmanager
def written_beside(out: Path, shared: bool = False) -> Iterator[Path]:
    """A folder to write in that becomes `out` when all went well, and else is removed.

    With `shared`, others may write the same result at the same moment (a cluster gives a task away
    when it takes a slow worker for dead): each has a folder of its own and the first one stays.
    """
    temporary = out.with_name(f"{out.name}.{uuid4().hex}.tmp" if shared else f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_files(temporary)
        if not shared:
            shutil.rmtree(out, ignore_errors=True)
        try:
            temporary.rename(out)
        except OSError:
            if not (shared and out.exists()):
                raise
            shutil.rmtree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_files(folder: Path) -> None:
    """Have the files of a folder on the disk before its new name is: a machine may stop as well."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file)


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """Hold `folder/lock` as the only command, or as one of those that share it.

    The lock ends with the process, however that ends. Raises `UserError` if another holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another command is at work in {folder}; wait for it or choose another data_dir"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"{folder} cannot be locked ({error.strerror}): start nothing else in it")
        yield


@dataclass(frozen=True)
class Task:
    """A call to be made somewhere: `name` says what it is about, `size` is its share of the bar."""

    arguments: tuple
    name: str
    size: int = 1


def run_tasks(
    verb: str,
    function: Callable,
    tasks: list[Task],
    workers: int,
    cluster: str | None = None,
    done: int = 0,
) -> None:
    """Call `function(*task.arguments)` for each task, on `workers` processes of this machine or on
    the dask cluster whose scheduler is at address `cluster`; the bar starts at `done` bytes.

    The first error stops the rest; finished tasks stay done. A worker that is killed is a
    `UserError` that names the tasks it can have been at; a cluster gives its task to others first.
    """
    todo, running, finished = iter(tasks), {}, 0
    total = done + sum(task.size for task in tasks)
    with (
        progress_bar(verb, total, "B", done) as bar,
        open_executor(min(workers, len(tasks)), cluster) as (executor, window, losses),
    ):
        try:
            while True:
                for task in islice(todo, window - len(running)):
                    running[executor.submit(function, *task.arguments)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    bar.update(running.pop(future).size)
                    finished += 1
                    bar.set_postfix_str(f"{finished}/{len(tasks)} pieces")
        except losses:
            at = [running[future]] if cluster else running.values()
            raise UserError(
                f"a worker was killed while {verb} {', '.join(task.name for task in at)} (out of "
                "memory?); run the same command again to go on with what is missing, perhaps with "
                "fewer workers"
            ) from None


@contextmanager
def open_executor(
    workers: int, cluster: str | None
) -> Iterator[tuple[Executor, int, tuple[type[BaseException], ...]]]:
    """(executor, tasks it is given at once, errors that say that a worker was lost)."""
    if cluster:
        with connect(cluster) as client:  # to leave it gives up what still runs
            from distributed import KilledWorker

            try:
                yield client.get_executor(pure=False), CLUSTER_WINDOW, (KilledWorker,)
            except CancelledError:
                raise UserError(
                    f"the dask scheduler at {cluster} is gone; start one and run the same command "
                    "again to go on with what is missing"
                ) from None
    elif workers <= 1:
        yield ThisProcess(), 1, ()
    else:
        context = multiprocessing.get_context("spawn")  # a fork would break tokenizers' threads
        with ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),)) as pool:
            yield pool, workers, (BrokenProcessPool,)  # no more at once, to know where they are


def connect(address: str):
    """The dask client of the scheduler at `address`; raises `UserError` if there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise UserError("--cluster needs dask: pip install -e '.[cluster]'") from None
    try:
        return Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(f"no dask scheduler at {address}: {error}") from None


class ThisProcess(Executor):
    """Runs a task here, when it is submitted."""

    def submit(self, function: Callable, /, *arguments) -> Future:
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def progress_bar(
    what: str, total: int, unit: str, done: int = 0, disable: bool = False, delay: float = 0
) -> tqdm:
    """A bar with rate and time left, shown after `delay` seconds; a line every ten seconds where
    nobody watches it move."""
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(
        None,
        what,
        total,
        initial=done,
        unit=unit,
        unit_scale=unit == "B",
        mininterval=interval,
        disable=disable,
        delay=delay,
    )


def count_cpus() -> int:
    """Cores that this process may use; all of the machine's where it does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent(parent: int) -> None:
    """Let a worker end when the command does, even by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
