"""What lets work be stopped at any moment: folders written beside and renamed, workers that end
with the command."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data_pipeline.errors import UserError


@contextmanager
def written_beside(out: Path) -> Iterator[Path]:
    """A folder to write in that becomes `out` when all went well, and else is removed."""
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def run_tasks(verb: str, function: Callable, tasks: list[tuple], workers: int) -> None:
    """Call `function(*task)` for each task on `workers` processes, with a progress bar.

    The first error stops the rest; a worker that is killed is an error too. Finished tasks stay
    done.
    """
    bar = progress_bar(verb, len(tasks), "piece")
    workers = min(workers, len(tasks))
    with bar:
        if workers <= 1:
            for task in tasks:
                function(*task)
                bar.update()
            return
        context = multiprocessing.get_context("spawn")  # a fork would break tokenizers' threads
        with ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),)) as pool:
            waiting = {pool.submit(function, *task) for task in tasks}
            try:
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        bar.update()
            except BrokenProcessPool:
                raise UserError(
                    f"a worker was killed while {verb} (out of memory?); run the same command "
                    "again to go on with what is missing, perhaps with --workers 1"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


def progress_bar(what: str, total: int, unit: str, done: int = 0, disable: bool = False) -> tqdm:
    """A bar with rate and time left; a line every ten seconds where nobody watches it move."""
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(None, what, total, initial=done, unit=unit, mininterval=interval, disable=disable)


def die_with_parent(parent: int) -> None:
    """Let a worker end when the command does, even by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
