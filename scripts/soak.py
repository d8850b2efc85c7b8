"""Train for a while at full speed and see whether memory, descriptors and threads grow (Linux):
`python scripts/soak.py CONFIG [key=value ...] [--minutes 30] [--processes 2] [--page FILE]`.

The data of CONFIG are prepared; the run goes to a temporary folder. Prints JSON: for each process
the slope of its anonymous memory after the first third of the time, in MB a minute, and what it
had at the start and at the end of the rest; --page draws all of it. Exits with code 1 above
0.2 MB a minute.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import check, run_command
from data_pipeline.common.folders import check_writable, write_file
from data_pipeline.common.pages import Line, draw_chart, render_template

MOST = 0.2  # MB a minute
MINUTES = 0.1  # a shorter time shows no growth
ENDLESS = ("train.max_steps=1000000000", "train.warmup_steps=100")


def soak(
    config: str, overrides: list[str], minutes: float, processes: int
) -> tuple[dict, list[np.ndarray]]:
    """Train for some minutes; returns the figures of each process, and its samples: (seconds, MB,
    descriptors, threads)."""
    launcher = []
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    with TemporaryDirectory() as folder:
        words = [*launcher, "pretrain", config, *ENDLESS, *overrides, f"run_dir={folder}/run"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        record, samples = Path(folder, "run/metrics.jsonl"), {}
        try:
            while process.poll() is None and not (record.exists() and record.stat().st_size):
                time.sleep(0.5)
            start = time.monotonic()
            while process.poll() is None and (now := time.monotonic() - start) < 60 * minutes:
                for pid in children(process.pid) if launcher else [process.pid]:
                    samples.setdefault(pid, []).append((now, *measure(pid)))
                time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(f"the run ended early, with exit code {process.returncode}")
            last = json.loads(record.read_text().splitlines()[-1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    rows = [np.array(some) for some in samples.values()]
    found = {"minutes": minutes, "steps": last["step"], "processes": [*map(summarize, rows)]}
    return found, rows


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(pid: int) -> tuple[float, int, int]:
    """Measure a process: anonymous memory in MB, open descriptors, threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    memory = int(values["RssAnon"].split()[0]) / 1024
    return memory, len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"])


def summarize(rows: np.ndarray) -> dict:
    """Summarize samples (seconds, MB, descriptors, threads) after the first third of the time.

    The slope is the median of those between all pairs (Theil 1950, Sen 1968), which short peaks
    do not move.
    """
    rest = rows[rows[:, 0] >= rows[-1, 0] / 3]
    some = rest[:: max(1, len(rest) // 600)]
    first, second = np.triu_indices(len(some), 1)
    slopes = (some[second, 1] - some[first, 1]) / (some[second, 0] - some[first, 0])
    names = ("memory_mb", "descriptors", "threads")
    ends = {name: [rest[0, i], rest[-1, i]] for i, name in enumerate(names, 1)}
    highest = {"highest_memory_mb": rest[:, 1].max()}
    return {"mb_a_minute": round(60 * float(np.median(slopes)), 3)} | highest | ends


def draw_page(config: str, found: dict, samples: list[np.ndarray]) -> str:
    """Draw the memory, descriptors and threads of each process over the time."""
    charts, names = [], [f"process {i}" for i in range(len(samples))]
    for column, title, unit in (
        (1, "Anonymous memory", "MB"),
        (2, "Open descriptors", ""),
        (3, "Threads", ""),
    ):
        lines = [
            Line(
                name,
                list(zip((rows[:, 0] / 60).tolist(), rows[:, column].tolist(), strict=True)),
                i,
            )
            for i, (name, rows) in enumerate(zip(names, samples, strict=True))
        ]
        charts.append(draw_chart(title, unit, lines, x_unit="minutes", from_zero=True))
    table = [
        [name, one["mb_a_minute"], f"{one['highest_memory_mb']:.0f}"]
        + [" to ".join(f"{n:.0f}" for n in one[kind]) for kind in ("descriptors", "threads")]
        for name, one in zip(names, found["processes"], strict=True)
    ]
    facts = {"config": config, "steps": found["steps"], "minutes": found["minutes"]}
    return render_template(ROOT / "scripts/soak.html", rows=table, charts=charts, **facts)


def main() -> None:
    parser = config_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", type=Path, metavar="FILE", help="draw the samples")
    args = parser.parse_intermixed_args()
    check(args.minutes >= MINUTES, f"--minutes {args.minutes:g}: wanted {MINUTES:g} or more")
    check(args.processes > 0, f"--processes {args.processes}: wanted 1 or more")
    if args.page:
        args.page = check_writable(args.page)
    found, samples = soak(args.config, args.overrides, args.minutes, args.processes)
    print(json.dumps(found, indent=1))
    if args.page:
        write_file(args.page, draw_page(args.config, found, samples).encode())
    sys.exit(0 if all(one["mb_a_minute"] < MOST for one in found["processes"]) else 1)


if __name__ == "__main__":
    run_command(main)
