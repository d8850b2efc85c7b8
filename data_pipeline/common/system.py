"""What differs between systems, and what is shown of long work."""

import ctypes
import os
import signal
import sys

from tqdm import tqdm


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
