"""Record the metrics of a run in `metrics.jsonl`, and report them to wandb:
`python -m pretrain.tracking RUN_DIR [key=value ...]` sends a whole record to its wandb run.

During a run, a separate process reads the record as it grows and reports it. So training never
waits for wandb, and whatever wandb misses can be sent again from the record.
"""

import argparse
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from data_pipeline.common.errors import UserError, check, run_command
from data_pipeline.common.folders import write_file
from data_pipeline.common.reading import COUNT, check_regular, find_mismatch
from data_pipeline.config_file import load_config
from pretrain.config import Config

PATIENCE = 30  # seconds that the end of a run waits for wandb

LINE = {"step": COUNT, "fillings?": [{"sentence": str, "masks": [[list]]}]}  # shape of a line
METRICS = {str: (None, float)}  # shape of those of its values whose name has a slash


def is_evaluation(line: dict) -> bool:
    return any(name.startswith("eval/") for name in line)


class Tracker:
    """Append metrics to `run_dir/metrics.jsonl`, and start their report to wandb, if asked for.

    Removes lines after `step`, which a resumed run writes again, and the evaluation of `step` if it
    `is_due`; moves damaged ones to `metrics.jsonl.damaged`, with a warning.
    """

    def __init__(self, run_dir: Path, step: int, reports: bool, is_due: bool = False):
        self.path = run_dir / "metrics.jsonl"
        lines, damaged = read_lines(self.path)
        kept = [line for line in lines if line["step"] <= step]
        if is_due:  # the evaluation of the last step is made again
            kept = [line for line in kept if line["step"] < step or not is_evaluation(line)]
        if damaged:
            aside = self.path.with_name(self.path.name + ".damaged")
            with open(aside, "ab") as file:
                file.writelines(line + b"\n" for line in damaged)
            print(f"warning: {len(damaged)} damaged lines of {self.path} are now in {aside}")
        text = "".join(to_json(line) + "\n" for line in kept)
        write_file(self.path, text.encode(), lasting=True)
        self.file = open(self.path, "a")
        self.reporter = None
        if reports:
            command = [sys.executable, "-m", "pretrain.tracking", str(run_dir), "--follow"]
            self.reporter = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def log(self, step: int, metrics: dict[str, float], **others) -> None:
        """Record metrics after `step` finished steps, and `others`, such as `fillings`."""
        try:
            self.file.write(to_json({"step": step} | metrics | others) + "\n")
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # or the rest of the line would be tried again at the end
                self.file.close()
            raise UserError(
                f"{self.path} cannot be written at step {step:,}: {error.strerror}; once it can, "
                "such as after freeing space, run the same command again, which goes on from the "
                "newest checkpoint"
            ) from None

    def close(self) -> None:
        """Close the record, and give wandb `PATIENCE` seconds to take the rest of it."""
        self.file.close()
        if self.reporter is None:
            return
        try:
            self.reporter.communicate(b"over", timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.reporter.pid, signal.SIGKILL)
            self.reporter.wait()
            print(
                f"warning: wandb did not receive the whole record within {PATIENCE} s; python -m "
                f"pretrain.tracking {self.path.parent} sends it again"
            )


def report(run_dir: Path, config: Config, lines: Iterable[dict]) -> None:
    """Send the lines of a record to the wandb run of `run_dir`, but for those that it has."""
    import wandb

    identity = run_dir / "wandb_id.txt"  # a resumed run continues its wandb run
    if not identity.exists():
        identity.write_text(secrets.token_hex(4))
    settings = config.tracking
    run = wandb.init(
        project=settings.wandb,
        entity=settings.entity,
        name=settings.name or run_dir.name,
        group=settings.group,
        tags=settings.tags,
        id=identity.read_text(),
        dir=str(run_dir),
        config=asdict(config),
        resume="allow",
        settings=wandb.Settings(init_timeout=60),
    )
    first = run.step  # 0, or the first that it lacks
    exit_code = 0
    try:
        for line in lines:
            metrics = {name: value for name, value in metrics_in(line).items() if value is not None}
            if rows := [[one["sentence"], say_fillings(one)] for one in line.get("fillings", ())]:
                metrics["fillings"] = wandb.Table(["sentence", "likeliest"], rows)
            if metrics and line["step"] >= first:
                run.log(metrics, step=line["step"])
    except EOFError:
        exit_code = 1
    run.finish(exit_code)


def follow(path: Path) -> Iterator[dict]:
    """Yield the lines of a record as they are written, until the input of this process ends.

    Raises `EOFError` at the end if the run has not said that it is over. From the end on, this
    process lives for `PATIENCE` seconds at most.
    """
    rest, is_over = b"", []
    with open(path, "rb") as file:
        while not is_over:
            is_over, _, _ = select.select([sys.stdin], [], [], 1.0)
            *whole, rest = (rest + file.read()).split(b"\n")
            yield from parse_lines(whole)[0]
    signal.alarm(PATIENCE)
    if not sys.stdin.read():
        raise EOFError("the run ended without a word")


def read_metrics(path: Path, most: int | None = None, recent: int = 0) -> list[dict]:
    """Read the lines of a `metrics.jsonl` that are not damaged.

    most: of more lines, read about as many of training, evenly spaced, the `recent` newest, and all
    of the others. The lines of a million steps would take 6 s and 0.4 GB.
    """
    if most is None:
        return read_lines(path)[0]
    check_regular(path)
    with open(path, "rb") as file:
        count = sum(1 for _ in file)
    stride = -(-count // most)
    with open(path, "rb") as file:
        few = [
            line
            for i, line in enumerate(file)
            if i % stride == 0 or i >= count - recent or b'"train/' not in line
        ]
    return parse_lines(few)[0]


def read_lines(path: Path) -> tuple[list[dict], list[bytes]]:
    """Read a `metrics.jsonl`: the parsed lines of the record, and the bytes of the damaged ones.

    What follows the last line break and is no line is neither: a killed run leaves it, and writes
    that line again.
    """
    if not path.exists():
        return [], []
    check_regular(path)
    *whole, rest = path.read_bytes().split(b"\n")
    lines, damaged = parse_lines(whole)
    return lines + parse_lines([rest])[0], damaged


def parse_lines(whole: list[bytes]) -> tuple[list[dict], list[bytes]]:
    """Parse whole lines of a record; returns those that are sound, and the bytes of the others."""
    lines, damaged = [], []
    for line in whole:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if find_mismatch(found, LINE) is None and not find_mismatch(metrics_in(found), METRICS):
            lines.append(found)
        else:
            damaged.append(line)
    return lines, damaged


def metrics_in(line: dict) -> dict[str, float | None]:
    """Leave out of a line what is not a metric."""
    return {name: value for name, value in line.items() if "/" in name}


def say_fillings(filling: dict) -> str:
    """Write the likeliest tokens of each [MASK] of a probe sentence, with their probabilities.

    These are null of a model whose scores are not finite.
    """
    of_masks = (
        ", ".join(f"{word} {math.nan if p is None else p:.0%}" for word, p in mask)
        for mask in filling["masks"]
    )
    return "; ".join(of_masks)


def to_json(value, indent: int | None = None) -> str:
    """Encode a value as JSON, with null for NaN and infinities, which JSON lacks."""

    def finite(part):
        if isinstance(part, dict):
            return {name: finite(item) for name, item in part.items()}
        if isinstance(part, list | tuple):
            return [finite(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pretrain.tracking", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    config = load_config(Config, str(args.run_dir / "config.yaml"), args.overrides)
    check(
        config.tracking.wandb,
        f"{args.run_dir / 'config.yaml'} has no wandb project; add tracking.wandb=PROJECT",
    )
    record = args.run_dir / "metrics.jsonl"
    try:
        report(args.run_dir, config, follow(record) if args.follow else read_metrics(record))
    except Exception as error:  # of any kind: what wandb raises has no common class
        line = f"wandb did not receive the record: {error}"
        if not args.follow:
            raise UserError(line) from None
        print(
            f"warning: {line}; metrics.jsonl is still written, and python -m pretrain.tracking "
            f"{args.run_dir} sends it",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
