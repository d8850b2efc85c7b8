"""Ranks that are not of one run stop before the first step, with one line that says why."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CPU_2, train_here

# what a user does who starts ranks by hand, with a mistake in one of them
APART = """
import os, sys
from data_pipeline.config import load_config
from data_pipeline.common.errors import run_command
from pretrain.config import Config
from pretrain.train import train
config, other, *overrides = sys.argv[1:]
overrides += [other] * (os.environ["RANK"] == "1")
run_command(lambda: train(load_config(Config, config, overrides)))
"""


def run_apart(root: Path, folder: Path, other: str) -> subprocess.CompletedProcess:
    """Two processes, the second of which is given `other` too."""
    (folder / "apart.py").write_text(APART)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CPU_2)]
    small = ("train.max_steps=2", "train.warmup_steps=1", "train.micro_batch_size=8")
    return subprocess.run(
        [*launch, str(folder / "apart.py"), str(root / "config.yaml"), other]
        + [f"run_dir={folder}/run", *small],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CPU_2.parents[2])},
    )


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("seed=1", "seed is 1, on rank 0 0"),
        ("train.save_every=1", "train.save_every is 1, on rank 0 4"),
    ],
)
def test_a_rank_with_another_config_is_named_once(
    prepared: Path, tmp_path: Path, other: str, named: str
) -> None:
    done = run_apart(prepared, tmp_path, other)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1 and "rank 1 on" in lines[0] and named in lines[0], done.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_with_other_data_is_named_and_one_with_a_copy_is_not(
    prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    done = run_apart(prepared, tmp_path, f"data_dir={tmp_path}/data")
    assert done.returncode == 0, done.stderr
    assert "ranks: 2 on " in done.stdout
    path = tmp_path / "data/store/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data_sha256": "of another text"}))
    done = run_apart(prepared, tmp_path, f"data_dir={tmp_path}/data")
    assert done.returncode != 0
    assert "data_sha256 is 'of another text', on rank 0" in done.stderr


def test_a_single_process_says_nothing_of_ranks(prepared: Path, tmp_path: Path, capsys) -> None:
    train_here(prepared, tmp_path, "train.max_steps=1", "train.warmup_steps=0")
    assert "ranks:" not in capsys.readouterr().out


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what another C library does is its")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    script = """
import re, sys, torch
from pathlib import Path
from pretrain.models.cpu import keep_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

keep_freed_memory()
before = resident()
torch.ones(50 << 20)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert 190 < int(done.stdout) < 250  # MB, of 200 that were freed
