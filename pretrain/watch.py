"""Watch the ranks of a run, and name a rank that has died or hangs, not those that wait for it.

A thread of each rank increments a counter in the rank's file in `run_dir/ranks` once a second, so a
file that no longer changes means a process that is dead, stopped or cut off. The watch of a process
is global, like its signals.
"""

import faulthandler
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from accelerate import Accelerator

from data_pipeline.common.errors import Stopped, UserError
from data_pipeline.common.folders import write_file

BEAT, SILENCE = 1.0, 4.0  # seconds between counts; seconds without one that mean a loss
MARGIN = 12.0  # seconds that a report comes before a collective call fails, which names no rank

watch: "Watch | None" = None  # of a run on several ranks, while it trains


class Watch(Thread):
    """Count for this rank, and end it if no step or batch has finished for too long.

    timeout_s: seconds after which a collective call fails.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, timeout_s: float, step: int = 0):
        super().__init__(daemon=True)
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.patience = max(timeout_s - MARGIN, timeout_s / 2)
        self.is_over = Event()
        self.state = {"host": socket.gethostname(), "pid": os.getpid(), "at": ""}
        self.state["beats"] = 0
        self.mark(step)
        folder.mkdir(exist_ok=True)
        self.beat()

    def mark(self, step: int | None = None) -> None:
        """Note that work continues, and its current step."""
        self.marked = time.monotonic()
        if step is not None:
            self.state["step"] = step

    def beat(self) -> None:
        self.state["beats"] += 1
        with suppress(OSError):  # such as a full disk, which the next checkpoint reports
            write_file(self.path_of(self.rank), json.dumps(self.state).encode())

    def run(self) -> None:
        while not self.is_over.wait(BEAT):
            self.beat()
            if time.monotonic() - self.marked > self.patience:
                self.end_process()

    def end_process(self) -> None:
        """Write the stacks of this process, have one rank say what is wrong, and exit."""
        path = self.path_of(self.rank).with_suffix(".stack")
        with open(path, "w") as file:
            faulthandler.dump_traceback(file)
        self.state["at"] = place_of_main(path.read_text())
        self.beat()
        lost = self.find_silent()
        self.say(explain_loss(self.read_ranks(), lost, self.folder), lost)
        os._exit(1)

    def say(self, message: str, lost: set[int]) -> None:
        """Print a message on the first rank that is not lost; the others wait for that."""
        if self.rank == min(set(range(self.ranks)) - lost, default=self.rank):
            print(f"error: {message}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)

    def find_silent(self) -> set[int]:
        """Find the ranks whose count stands still for `SILENCE` seconds.

        A rank that has ended normally has no count, and is not among them.
        """
        before, end = self.read_ranks(), time.monotonic() + SILENCE
        while time.monotonic() < end:  # the others ask too
            self.beat()
            time.sleep(BEAT)
        after = self.read_ranks()
        still = {r for r in before.keys() & after.keys() if before[r] == after[r]}
        return still - {self.rank}

    def read_ranks(self) -> dict[int, dict]:
        """Read what the ranks have written last."""
        found = {}
        for rank in range(self.ranks):
            try:
                found[rank] = json.loads(self.path_of(rank).read_bytes())
            except (OSError, ValueError):
                continue
        return found

    def path_of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}"


def place_of_main(stacks: str) -> str:
    """Find where the main thread is in the stacks that `faulthandler` wrote, which lists it last.

    `sys._current_frames` would also tell, but before Python 3.11.9 and 3.12.3 it may never return
    if garbage collection runs in it.
    """
    main = stacks.rpartition("hread 0x")[2]
    found = re.search(r'File "(.*)", line \d+ in (.*)', main)
    return f" at {found[2]} of {Path(found[1]).name}" if found else ""


def explain_loss(ranks: dict[int, dict], silent: set[int], folder: Path) -> str:
    """Return the message that names the ranks at fault: those that are silent, else those whose
    step is behind, else where each of them is.

    ranks: what each has written last.
    """
    last = max(state["step"] for state in ranks.values())
    if silent:
        named, what = silent, "has died or is stopped"
    elif named := {rank for rank, state in ranks.items() if state["step"] < last}:
        what = f"is behind, and others wait for it in step {last:,}"
    else:
        named, what = ranks.keys(), "makes no progress"
    found = "; ".join(
        f"rank {rank} on {state['host']} (process {state['pid']}) {what}, last seen in step "
        f"{state['step']:,}{state['at']}"
        for rank, state in sorted(ranks.items())
        if rank in named
    )
    return (
        f"{found}. See the end of its output, dmesg on its host for lack of memory, nvidia-smi "
        f"for its GPU, and the stacks of the ranks that respond in {folder}; start the same "
        "command again to resume from the last checkpoint"
    )


def start_watch(run_dir: Path, accelerator: Accelerator, timeout_s: float, step: int) -> None:
    """Watch this rank and the others from a step on, if there are others."""
    global watch
    if accelerator.num_processes > 1:
        numbers = accelerator.process_index, accelerator.num_processes
        watch = Watch(run_dir / "ranks", *numbers, timeout_s, step)
        watch.start()


def mark(step: int | None = None) -> None:
    """Note that the work of this rank continues."""
    if watch:
        watch.mark(step)


def end_watch() -> None:
    """End the watch of a rank that ends normally: its silence means nothing."""
    global watch
    if watch:
        watch.is_over.set()
        watch.join()
        watch.path_of(watch.rank).unlink(missing_ok=True)
        watch = None


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """Exit with code 1, and one line that names the rank that has died, where a collective call
    fails for that reason."""
    try:
        yield
    except RuntimeError:
        lost = watch.find_silent() if watch else set()
        if watch and not lost and len(watch.read_ranks()) < watch.ranks:
            sys.exit(1)  # a rank has ended normally, and said why
        if not lost:
            raise
        watch.say(explain_loss(watch.read_ranks(), lost, watch.folder), lost)
        sys.exit(1)
    except (UserError, OSError, Stopped, SystemExit):
        end_watch()
        raise
