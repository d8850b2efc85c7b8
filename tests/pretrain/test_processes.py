"""Ranks that are not of one run stop before the first step, with one line that says why."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import TWO_STEPS, run, train_here


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
    done = run(prepared, tmp_path / "run", *TWO_STEPS, processes=2, rank_1=[other])
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1 and "rank 1 on" in lines[0] and named in lines[0], done.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_with_other_data_is_named_and_one_with_a_copy_is_not(
    prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    other = [f"data_dir={tmp_path}/data"]
    done = run(prepared, tmp_path / "run", *TWO_STEPS, processes=2, rank_1=other)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2 on " in done.stdout
    path = tmp_path / "data/store/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data_sha256": "0" * 64}))
    done = run(prepared, tmp_path / "run", *TWO_STEPS, processes=2, rank_1=other)
    assert done.returncode != 0
    assert "data_sha256 is '00000000" in done.stderr


def test_a_single_process_says_nothing_of_ranks(prepared: Path, tmp_path: Path, capsys) -> None:
    train_here(prepared, tmp_path, "train.max_steps=1", "train.warmup_steps=0")
    assert "ranks:" not in capsys.readouterr().out
