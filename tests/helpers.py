"""What tests of several rooms share: where things are, a run as a process or here, what it left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from data_pipeline.config import load_config
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import Config
from pretrain.train import train

ROOT = Path(__file__).parents[1]
SCHEMA_1 = ROOT / "tests/fixtures/schema_1"  # written by the last version before schema 2
CPU_2 = ROOT / "configs/accelerate/cpu_2.yaml"
TWO_STEPS = ("train.max_steps=2", "train.warmup_steps=1", "train.micro_batch_size=8")
NO_DROPOUT = ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0")


def command(root: Path, run_dir: Path, *overrides: str, processes: int = 1) -> list[str]:
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "accelerate.commands.launch", "--config_file", str(CPU_2)]
        launch += ["--num_processes", str(processes)]
    return [*launch, "-m", "pretrain", str(root / "config.yaml"), f"run_dir={run_dir}", *overrides]


def run(root: Path, run_dir: Path, *overrides: str, processes: int = 1, launcher=(), **options):
    """Run the command to its end; the completed process."""
    python, *arguments = command(root, run_dir, *overrides, processes=processes)
    return subprocess.run(
        [*(launcher or [python]), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {}),
        **options,
    )


def train_here(root: Path, run_dir: Path, *overrides: str) -> None:
    train(load_config(Config, str(root / "config.yaml"), [f"run_dir={run_dir}", *overrides]))


def metrics(run_dir: Path) -> list[dict]:
    """What was recorded, without speeds, which no two runs share."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines
    ]


def newest(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = newest_checkpoint(run_dir / "checkpoints")
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    first, second = newest(a), newest(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of all files in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
