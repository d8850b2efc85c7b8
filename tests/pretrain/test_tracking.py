"""wandb gets what the record has, and stops no run, whatever it does."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, assert_same_run, metrics, run, train_here

from data_pipeline.common.errors import UserError
from pretrain import tracking
from pretrain.tracking import Tracker, read_metrics

WANDB = """
import json, time
from types import SimpleNamespace
Settings = SimpleNamespace

def note(*call):
    with open({calls!r}, "a") as file:
        print(json.dumps(call, default=str), file=file)

class Run:
    step = {step}
    def log(self, metrics, step):
        {on_log}
        note("log", step, metrics)
    def finish(self, code):
        note("finish", code)

def Table(columns, data):
    return [columns, data]

def init(**options):
    {on_init}
    note("init", options)
    return Run()
"""


class FakeWandb:
    """A module `wandb` for the processes that are started from here, which writes its calls."""

    def __init__(self, folder: Path, monkeypatch):
        folder.mkdir()
        self.folder, self.file = folder, folder / "calls.jsonl"
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.becomes()

    def becomes(self, on_log: str = "pass", on_init: str = "pass", step: int = 0) -> None:
        code = WANDB.format(calls=str(self.file), on_log=on_log, on_init=on_init, step=step)
        (self.folder / "wandb.py").write_text(code)

    def take_calls(self) -> list[list]:
        """What was called since the last time."""
        calls = [json.loads(line) for line in self.file.read_text().splitlines()]
        self.file.unlink()
        return calls


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch) -> FakeWandb:
    return FakeWandb(tmp_path / "fake", monkeypatch)


def sent(run_dir: Path, first: int = 0) -> list[list]:
    """The calls that send a record, from its own lines."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        ["log", line["step"], {k: v for k, v in line.items() if "/" in k}]
        for line in lines
        if line["step"] >= first
    ]


def replay(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pretrain.tracking", str(run_dir), *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_wandb_gets_the_record_while_it_grows_and_as_a_whole_afterwards(
    prepared: Path, tmp_path: Path, wandb: FakeWandb
) -> None:
    run_dir = tmp_path / "run"
    options = ("tracking.wandb=p", "tracking.entity=e", "tracking.group=g", "tracking.tags=[a, b]")
    train_here(prepared, run_dir, *options)
    (name, settings), *others = wandb.take_calls()
    assert name == "init" and settings["config"]["train"]["max_steps"] == 12
    chosen = [settings[key] for key in ("project", "entity", "group", "tags", "name", "resume")]
    assert chosen == ["p", "e", "g", ["a", "b"], "run", "allow"]
    assert others == [*sent(run_dir), ["finish", 0]]

    wandb.becomes(step=8)  # it has lost what came then
    assert replay(run_dir, "tracking.name=n").returncode == 0
    (_, again), *others = wandb.take_calls()
    assert again == settings | {"name": "n", "config": again["config"]}  # its id too
    assert others == [*sent(run_dir, 8), ["finish", 0]] and len(others) == 5


def test_fillings_are_sent_as_a_table(straight: Path, tmp_path: Path, wandb: FakeWandb) -> None:
    shutil.copytree(straight, tmp_path / "run")
    masks = [[["cat", 0.25], ["dog", 0.01]], [["sat", None]]]
    line = {"step": 13, "fillings": [{"sentence": "a [MASK] [MASK]", "masks": masks}]}
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    assert replay(tmp_path / "run", "tracking.wandb=p").returncode == 0
    table = [["sentence", "likeliest"], [["a [MASK] [MASK]", "cat 25%, dog 1%; sat nan%"]]]
    assert wandb.take_calls()[-2] == ["log", 13, {"fillings": table}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"on_log": "time.sleep(1000)"}, "wandb did not receive the whole record within 2 s"),
        ({"on_init": "time.sleep(1000)"}, "wandb did not receive the whole record within 2 s"),
        ({"on_init": "raise RuntimeError('no network')"}, "the record: no network; metrics.jsonl"),
        (
            {"on_log": "raise OSError('gone')"},
            "wandb did not receive the record: gone; metrics.jsonl",
        ),
    ],
)
def test_a_wandb_that_hangs_or_fails_stops_no_run(
    prepared: Path, straight: Path, tmp_path: Path, wandb, monkeypatch, capfd, wrong, said
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", 2)
    wandb.becomes(**wrong)
    before = time.monotonic()
    train_here(prepared, tmp_path / "run", "tracking.wandb=p")
    assert time.monotonic() - before < 60
    out = capfd.readouterr().out
    assert said in out and f"python -m pretrain.tracking {tmp_path / 'run'} sends it" in out
    assert_same_run(tmp_path / "run", straight)
    assert not [p for p in psutil.process_iter() if is_reporter(p, tmp_path / "run")]


def is_reporter(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return str(run_dir) in process.cmdline() and "--follow" in process.cmdline()
    except psutil.Error:
        return False


def test_the_report_of_a_run_that_is_killed_ends_too(
    tmp_path: Path, wandb: FakeWandb, straight: Path
) -> None:
    """With what the record has, and as one that failed."""
    (tmp_path / "config.yaml").write_bytes((straight / "config.yaml").read_bytes())
    (tmp_path / "metrics.jsonl").write_bytes((straight / "metrics.jsonl").read_bytes())
    command = [sys.executable, "-m", "pretrain.tracking", str(tmp_path), "tracking.wandb=p"]
    process = subprocess.Popen([*command, "--follow"], cwd=ROOT, stdin=subprocess.PIPE)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "train/loss": 1.0}\n{"step": 14, "tra')
    process.stdin.close()
    assert process.wait(60) == 0
    _, *logged, end = wandb.take_calls()
    assert logged == sent_whole(tmp_path) and logged[-1] == ["log", 13, {"train/loss": 1.0}]
    assert end == ["finish", 1]


def sent_whole(run_dir: Path) -> list[list]:
    whole = (run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
    (run_dir / "metrics.jsonl").write_text("\n".join(whole) + "\n")
    return sent(run_dir)


def test_wandb_works_offline(prepared: Path, tmp_path: Path) -> None:
    options = ("tracking.wandb=some-project", "train.max_steps=4")
    done = run(prepared, tmp_path, *options, WANDB_MODE="offline")
    assert done.returncode == 0 and "wandb did not" not in done.stdout, done.stdout
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert metrics(tmp_path)


def test_a_run_without_a_project_is_sent_to_none(straight: Path) -> None:
    done = replay(straight)
    assert done.returncode == 2
    assert done.stderr.endswith("config.yaml has no wandb project; add tracking.wandb=PROJECT\n")


def test_a_run_without_wandb_starts_no_process(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, 0, reports=False)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert tracker.reporter is None
    assert metrics(tmp_path) == [{"step": 1, "train/loss": 1.0}]


def test_a_last_line_without_its_line_break_is_kept_and_a_part_of_one_is_not(
    tmp_path: Path,
) -> None:
    record = tmp_path / "metrics.jsonl"
    for rest, steps in ((b'{"step": 4}', [2, 4]), (b'{"step": 4', [2])):
        record.write_bytes(b'{"step": 2}\n' + rest)
        tracker = Tracker(tmp_path, 4, reports=False)
        tracker.close()
        assert [line["step"] for line in read_metrics(record)] == steps
        assert not (tmp_path / "metrics.jsonl.damaged").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_disk_that_fills_while_a_line_is_logged_names_the_record_and_what_to_do(tmp_path):
    tracker = Tracker(tmp_path, 0, reports=False)
    tracker.file.close()
    tracker.file = open("/dev/full", "a")
    said = r"metrics\.jsonl cannot be written at step 7: No space .* from the newest checkpoint"
    with pytest.raises(UserError, match=said):
        tracker.log(7, {"train/mlm_loss": 1.0})
    assert tracker.file.closed
