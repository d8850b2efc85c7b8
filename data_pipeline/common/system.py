"""Handle differences between operating systems, and show the progress of long work."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm


def count_cpus() -> int:
    """Count the cores that this process may use; all cores where the system cannot tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Return the memory of this machine in bytes, or of its container if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of control groups 2 and 1
        with suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(found)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make this process receive a signal when its parent ends, even if the parent is killed; Linux
    only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), number)


def start_thread(function: Callable, *arguments) -> Future:
    """Call a function in a thread of its own; the process does not end before it returns."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(function, *arguments)
    threads.shutdown(wait=False)
    return future


class LogBar(tqdm):
    """A progress bar in a log file: a line of its own every ten seconds, after ten minutes every
    minute."""

    write = staticmethod(print)  # tqdm's would draw the bar again after each message

    def display(self, msg=None, pos=None) -> None:
        print(self, end="" if self.disable else "\n", file=self.fp, flush=True)  # close ends a line
        self.mininterval = 10 if self.format_dict["elapsed"] < 600 else 60


def progress_bar(
    what: str,
    total: int,
    unit: str,
    done: int = 0,
    disable: bool = False,
    delay: float = 0,
    tells_remaining: bool = True,
) -> tqdm:
    """Create a progress bar with rate and remaining time, shown after `delay` seconds.

    Redraws itself every half second in a terminal; in a log file it is a `LogBar`.
    tells_remaining: False if the caller adds a better estimate.
    """
    terminal = sys.stderr.isatty()
    shape = "{l_bar}{bar}|" if terminal else "{l_bar}"
    times = "{elapsed}<{remaining}" if tells_remaining else "{elapsed}"
    return (tqdm if terminal else LogBar)(
        None,
        what,
        total,
        initial=done,
        unit=unit,
        unit_scale=unit == "B",
        bar_format=shape + " {n_fmt}/{total_fmt} [" + times + ", {rate_fmt}{postfix}]",
        mininterval=0.5 if terminal else 10,
        disable=disable,
        delay=delay,
    )
