"""Measure and print the figures of the benchmarks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

from data_pipeline.common.errors import UserError

ROOT = Path(__file__).parent.parent


def rates(
    runs: int, *works: Callable[[], int], clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """Measure functions in turns; a call returns its units of work.

    Returns the units per second of each run, for each function: of CPU time, unless `clock` is
    another.
    """
    found: list[list[float]] = [[] for _ in works]
    for run in range(runs + 1):
        for work, kept in zip(works, found, strict=True):
            start, units = clock(), work()
            if run > 0:  # the first is the warm-up
                kept.append(units / (clock() - start))
    return found


def show(
    figure: str,
    unit: str,
    target: str,
    ours: list[float],
    peer: list[float] = (),
    *,
    smaller_is_better: bool = False,
    threads: int = 1,
) -> None:
    """Print a figure as a JSON line, from the values of each run."""
    medians = [median(values) if values else None for values in (ours, peer)]
    ratio = None
    if peer:
        ratio = medians[1] / medians[0] if smaller_is_better else medians[0] / medians[1]
    spread = [(max(v) - min(v)) / (median(v) or 1) if v else None for v in (ours, peer)]
    line = {"figure": figure, "unit": unit, "ours": medians[0], "peer": medians[1], "ratio": ratio}
    line |= {"target": target, "runs": len(ours), "spread": spread, "threads": threads}
    print(json.dumps(rounded(line)), flush=True)


def rounded(value):
    """Round floats at any depth to three significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def watch(command: list[str], until: Path | None = None) -> tuple[float, float, float, float]:
    """Run a command and measure its time and memory until file `until` exists, and to the end.

    Returns (seconds, peak bytes, seconds, peak bytes). The peak is the proportional set size of all
    its processes, sampled every 50 ms (Linux).
    """
    start, peak, early = time.perf_counter(), 0, None
    env = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, start_new_session=True
    )
    while process.poll() is None:
        peak = max(peak, session_memory(process.pid))
        if early is None and until is not None and until.exists():
            early = time.perf_counter() - start, peak
        time.sleep(0.05)
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {process.stderr.read().decode()}")
    whole = time.perf_counter() - start, peak
    return (*(early or whole), *whole)


def session_memory(session: int) -> int:
    """Sum the memory of all processes of a session, in bytes."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session:
                rollup = (entry / "smaps_rollup").read_text()
                total += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
        except (OSError, IndexError):  # the process has ended
            continue
    return total


def quiet():
    """Redirect stdout to stderr, since stdout is for figures."""
    return redirect_stdout(sys.stderr)
