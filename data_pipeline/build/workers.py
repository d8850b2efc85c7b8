"""Run tasks in parallel, on processes of this machine or on a dask cluster.

The processes end with the command, however it ends. Tasks write atomic folders, so a command that
was stopped can be run again and does only the tasks that are missing.
"""

import multiprocessing
import os
import signal
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

from data_pipeline.common.errors import UserError
from data_pipeline.common.system import die_with_parent, progress_bar

CLUSTER_WINDOW = 1024  # tasks to submit to a scheduler at once
PATIENCE = 30  # timeout in seconds for connecting to the scheduler


@dataclass(frozen=True)
class Task:
    """One call of a function; `name` is for messages, `size` for the progress bar."""

    function: Callable
    arguments: tuple
    name: str
    size: int = 1


def run_tasks(
    verb: str,
    tasks: list[Task],
    workers: int,
    cluster: str | None = None,
    done: int = 0,
) -> None:
    """Call `function(*arguments)` of each task.

    workers: number of processes on this machine. cluster: address of a dask scheduler to use
    instead. done: bytes finished earlier, at which the progress bar starts.
    The first error stops the remaining tasks; finished ones stay finished. Raises `UserError` if a
    worker is killed, and names the tasks it may have been running; a cluster first retries the task
    on other workers.
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
                    running[executor.submit(task.function, *task.arguments)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    bar.update(running.pop(future).size)
                    finished += 1
                    bar.set_postfix_str(f"{finished}/{len(tasks)} file chunks")
        except losses:
            lost = [running[future]] if cluster else running.values()
            raise UserError(
                f"a worker was killed while {verb} {', '.join(task.name for task in lost)} (out "
                "of memory?); run the same command again to do the remaining tasks, perhaps with "
                "fewer workers"
            ) from None


@contextmanager
def open_executor(
    workers: int, cluster: str | None
) -> Iterator[tuple[Executor, int, tuple[type[BaseException], ...]]]:
    """Open the executor for the tasks, and close it on exit.

    Yields (executor, number of tasks to submit at once, errors that mean a lost worker).
    """
    if cluster:
        with connect(cluster) as client:  # on exit, cancels the tasks that still run
            from distributed import KilledWorker

            try:
                yield client.get_executor(pure=False), CLUSTER_WINDOW, (KilledWorker,)
            except CancelledError:
                raise UserError(
                    f"the dask scheduler at {cluster} has stopped; start one and run the same "
                    "command again to do the remaining tasks"
                ) from None
    elif workers <= 1:
        yield ThisProcess(), 1, ()
    else:
        context = multiprocessing.get_context("spawn")  # forking breaks the threads of tokenizers
        with ProcessPoolExecutor(workers, context, begin_worker, (os.getpid(),)) as pool:
            yield pool, workers, (BrokenProcessPool,)  # so that all submitted tasks run


def begin_worker(command: int) -> None:
    """Make a worker end with its command, and ignore the signals that the command handles.

    command: its process id.
    SIGTERM stays, by which the executor ends its workers.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(command)


def connect(address: str):
    """Connect to the dask scheduler at `address`; raises `UserError` if there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise UserError("--cluster needs dask: pip install -e '.[cluster]'") from None
    try:
        return Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(f"no dask scheduler at {address}: {error}") from None


class ThisProcess(Executor):
    """An executor that runs each task in this process, when it is submitted."""

    def submit(self, function: Callable, /, *arguments) -> Future:
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future
