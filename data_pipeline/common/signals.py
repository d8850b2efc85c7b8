"""Stop on a signal or with the launcher: at once, or at a point where no work is lost.

Handlers run in the main thread, between two instructions of Python. Their state is global, like the
handlers of a process.
"""

import io
import math
import os
import signal
import sys
from collections.abc import Callable
from signal import Signals

from data_pipeline.common.errors import Stopped
from data_pipeline.common.system import die_with_parent

LAUNCHED = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")  # torchrun or accelerate launch sets them
CAUGHT = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGUSR1, Signals.SIGHUP)

received: Signals | None = None
on_hold: Callable[[], None] | None = None  # if signals are held: called at the first


def catch_signals(advice: str) -> None:
    """Raise `Stopped` in the main thread at the first signal of `CAUGHT`, unless they are held.

    A second SIGINT ends the process at once; other further signals change nothing. Ignored signals
    stay ignored: a shell ignores SIGINT for background jobs, and nohup ignores SIGHUP.

    advice: what the message says after the name of the signal.
    """

    terminals = [number for number in (1, 2) if os.isatty(number)]  # of stdout and stderr

    def note(number: int, frame) -> None:
        global received
        if number == Signals.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if number == Signals.SIGHUP:  # writing to a terminal that is gone raises an error
            for terminal in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        is_first, received = received is None, received or Signals(number)
        if is_first and on_hold:
            on_hold()
        elif is_first:
            is_main = os.environ.get("RANK", "0") == "0"
            raise Stopped(f"stopped on {received.name}; {advice}" if is_main else "")

    for number in CAUGHT:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)


def hold_signals(announce: Callable[[], None]) -> None:
    """From now on, only call `announce` at the first signal; `received_signal` returns that
    signal."""
    global on_hold
    on_hold = announce


def received_signal() -> Signals | None:
    """Return the first signal that this process has caught, or None."""
    return received


def die_with_launcher() -> None:
    """Make this process receive SIGTERM when the launcher that started it ends; Linux only.

    A launcher that is killed leaves its processes behind, and so does `accelerate launch` of one
    process at any signal.
    """
    if any(name in os.environ for name in LAUNCHED):
        die_with_parent(os.getppid(), Signals.SIGTERM)


def launcher_patience() -> float:
    """Return how many seconds after a signal torchrun kills its processes; infinity: it does
    not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


class Lasting(io.FileIO):
    """An output that outlives its reader, such as a `tee` that ends by the same Ctrl-C."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Continue silently if nobody reads stdout or stderr any more."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:  # else it is closed
            output = io.BufferedWriter(Lasting(number, "w", closefd=False))
            how = ("utf-8", "backslashreplace")  # a name of a file may be no text
            setattr(sys, name, io.TextIOWrapper(output, *how, line_buffering=True))
