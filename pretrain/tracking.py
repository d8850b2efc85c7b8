"""Record the metrics of a run in `metrics.jsonl`, and report them to wandb."""

import json
import secrets
from pathlib import Path

from pretrain.checkpoint import to_json


class Tracker:
    """Append metrics to `run_dir/metrics.jsonl` and report them to a wandb project, if given.

    Removes lines after `step`, which a resumed run writes again, and moves damaged ones to
    `metrics.jsonl.damaged`, with a warning. An error of wandb turns it off with a warning.
    """

    def __init__(self, run_dir: Path, step: int, project: str | None, config: dict):
        self.path = run_dir / "metrics.jsonl"
        lines, damaged = sort_lines(self.path)
        kept = [line for line in lines if line["step"] <= step]
        if damaged:
            aside = self.path.with_name(self.path.name + ".damaged")
            with open(aside, "ab") as file:
                file.writelines(line + b"\n" for line in damaged)
            print(f"warning: {len(damaged)} damaged lines of {self.path} are now in {aside}")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(to_json(line) + "\n" for line in kept))
        temporary.replace(self.path)
        self.file = open(self.path, "a")
        self.wandb = None
        if project:
            self.try_wandb(lambda: self.start_wandb(run_dir, project, config))

    def log(self, step: int, metrics: dict[str, float], **others) -> None:
        """Record metrics after `step` finished steps; wandb gets no `others`."""
        self.file.write(to_json({"step": step} | metrics | others) + "\n")
        self.file.flush()
        if self.wandb:
            self.try_wandb(lambda: self.wandb.log(metrics, step=step))

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.try_wandb(self.wandb.finish)

    def start_wandb(self, run_dir: Path, project: str, config: dict) -> None:
        import wandb

        name = run_dir / "wandb_id.txt"  # a resumed run continues its wandb run
        if not name.exists():
            name.write_text(secrets.token_hex(4))
        self.wandb = wandb.init(
            project=project,
            id=name.read_text(),
            name=run_dir.name,
            dir=run_dir,
            config=config,
            resume="allow",
            settings=wandb.Settings(init_timeout=60),
        )

    def try_wandb(self, action) -> None:
        try:
            action()
        except Exception as error:  # of any kind: tracking must not stop a run
            self.wandb = None
            print(f"warning: wandb is off for this run, metrics.jsonl is still written: {error}")


def read_metrics(path: Path) -> list[dict]:
    """Read the lines of a `metrics.jsonl` that are not damaged."""
    return sort_lines(path)[0]


def sort_lines(path: Path) -> tuple[list[dict], list[bytes]]:
    """Read a `metrics.jsonl`: the lines of the record, and those that are none, as they are.

    What follows the last line break is neither: a killed run leaves it, and writes that line again.
    """
    lines, damaged = [], []
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for line in whole:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        is_sound = isinstance(found, dict) and isinstance(found.get("step"), int)
        (lines if is_sound else damaged).append(found if is_sound else line)
    return lines, damaged
