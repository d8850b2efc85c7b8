"""Stop on a signal: at once, or where the work has nothing to lose.

Handlers run in the main thread, between two instructions of Python. What they know is global, as
the handlers of a process are.
"""

import os
import signal
from signal import Signals

from data_pipeline.common.errors import Stopped

CAUGHT = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGUSR1)

received: Signals | None = None
is_held = False


def catch_signals(advice: str) -> None:
    """Raise `Stopped` in the main thread at the first signal of `CAUGHT`, unless they are held.

    A second SIGINT ends the process at once; other further signals change nothing. What is ignored
    stays so: a shell starts jobs in the background with SIGINT ignored.

    advice: what the message says after the name of the signal.
    """

    def note(number: int, frame) -> None:
        global received
        if number == Signals.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        is_first, received = received is None, received or Signals(number)
        if is_first and not is_held:
            is_main = os.environ.get("RANK", "0") == "0"
            raise Stopped(f"stopped on {received.name}; {advice}" if is_main else "")

    for number in CAUGHT:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)


def hold_signals() -> None:
    """Only note signals from now on; `received_signal` tells of them."""
    global is_held
    is_held = True


def received_signal() -> Signals | None:
    """Return the first signal that this process has caught, or None."""
    return received
