"""What lets work be stopped at any moment and be done anywhere: folders written beside and renamed,
one command at a time in a folder, tasks on processes that end with the command, or on a cluster."""

import multiprocessing
import os
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

CLUSTER_WINDOW = 1024  # tasks that a scheduler is told of at once
PATIENCE = 30  # seconds to find the scheduler


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
