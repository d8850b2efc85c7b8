"""A sick run is named, a step without a gradient skipped, and a run that is lost stops."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same_run, metrics, newest, run, train_here

from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batches import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain.checkpoint import newest_checkpoint, read_state
from pretrain.config import TrainConfig
from pretrain.models.bert import PretrainingModel
from pretrain.monitor import MOST_SKIPPED, NORMS, Monitor

TRAIN = TrainConfig(max_steps=1000, warmup_steps=100, log_every=10)
SOUND = {"train/mlm_loss": 0.5, "train/nsp_accuracy": 0.7, "perf/data_wait": 0.0}


def build(state: dict | None = None, unknown: int = 0) -> tuple[Monitor, list[str]]:
    """A monitor of a text with four pieces, equally frequent but for the first, [UNK]."""
    said: list[str] = []
    counts = np.array([unknown, 100, 100, 100])
    return Monitor(TRAIN, counts, 0, state or {}, said.append), said


def plant(monkeypatch, store: TokenStore, *steps: int) -> None:
    """The losses of some steps of the run of `prepared` become NaN; a function of their batches."""
    source = BatchSource(store, PairsConfig(max_seq_length=64), seed=0)
    bad = [source.batch(16 * step, 16).input_ids for step in steps]
    forward = PretrainingModel.forward

    def planted(self, batch):
        rows = forward(self, batch)
        if any(torch.equal(batch.input_ids, ids) for ids in bad):
            rows = rows * torch.tensor([math.nan, 1, 1])
        return rows

    monkeypatch.setattr(PretrainingModel, "forward", planted)


# ------------------------------------------------------------------------------ skipped steps


def test_a_step_without_a_gradient_leaves_weights_and_optimizer_as_they_were(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch, capsys
) -> None:
    every = ("train.save_every=1", "train.keep_checkpoints=12")
    train_here(prepared, tmp_path / "sound", *every)
    plant(monkeypatch, store, 11)
    train_here(prepared, tmp_path / "planted", *every, "train.log_every=1")
    for path in (tmp_path / "sound/checkpoints").glob("step-00000012"):
        path.rename(tmp_path / "last")
    before, after = newest(tmp_path / "sound"), newest(tmp_path / "planted")
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    assert "warning: the gradient of step 11 is nan" in capsys.readouterr().out
    last = [line for line in metrics(tmp_path / "planted") if "train/skipped_steps" in line][-2:]
    assert [line["train/skipped_steps"] for line in last] == [0, 1]
    assert "monitor/skipped" in last[1] and "monitor/skipped" not in last[0]


def test_a_skipped_step_is_skipped_again_on_resume_and_its_losses_counted_in_neither(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch
) -> None:
    plant(monkeypatch, store, 2, 6, 9)
    train_here(prepared, tmp_path / "a")
    assert all(math.isfinite(line.get("train/loss", 0)) for line in metrics(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    for name in ("checkpoints", "metrics.jsonl"):
        (tmp_path / "a" / name).rename(tmp_path / "b" / name)
    train_here(prepared, tmp_path / "a")
    for path in (tmp_path / "b/checkpoints").glob("step-00000012"):
        path.rename(tmp_path / "last")
    train_here(prepared, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    state = read_state(newest_checkpoint(tmp_path / "b/checkpoints"))
    assert state["monitor"]["skipped"] == 3 and state["monitor"]["in_a_row"] == 0


def test_a_run_that_diverges_stops_in_one_line_with_the_batch_in_a_file(
    prepared: Path, tmp_path: Path
) -> None:
    done = run(prepared, tmp_path, "train.learning_rate=1e30", "train.warmup_steps=0")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the gradients of 5 steps in a row") and "bad_batch" in last
    found = json.loads((tmp_path / "bad_batch.json").read_text())
    assert (
        found["phase"] == 0
        and found["step"] >= 5
        and found["count"] == 16
        and found["first"] == 16 * found["step"]
    )
    assert len(found["losses"]) == 2
    for name in ("metrics.jsonl", "bad_batch.json"):
        assert not re.search("NaN|Infinity", (tmp_path / name).read_text())  # they are no JSON


def test_two_processes_stop_together_and_one_says_why(prepared: Path, tmp_path: Path) -> None:
    overrides = ("train.learning_rate=1e30", "train.warmup_steps=0", "train.micro_batch_size=8")
    done = run(prepared, tmp_path, *overrides, processes=2)
    assert done.returncode != 0
    assert done.stderr.count("error: the gradients of 5 steps") == 1, done.stderr


def test_skips_stop_a_run_only_when_they_follow_each_other() -> None:
    monitor, said = build()
    for step in range(100):
        monitor.has_finite_gradient(step, math.inf if step % MOST_SKIPPED else 1.0)
        assert not monitor.should_abort()
    assert monitor.has_finite_gradient(100, 1.0)
    for step in range(101, 101 + MOST_SKIPPED):
        assert not monitor.should_abort()
        assert not monitor.has_finite_gradient(step, math.nan)
    assert monitor.should_abort() and len(said) == 1


# ------------------------------------------------------------------------------ warnings


def test_a_sound_run_is_told_nothing() -> None:
    monitor, said = build()
    for step in range(1000):
        assert monitor.has_finite_gradient(step, 1 + step % 3)
        if step % 10 == 9:
            assert monitor.check_health(step + 1, SOUND, 1000) == {"train/skipped_steps": 0}
    assert not said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train/mlm_loss": math.log(3)}, "no context is used yet"),
        ({"train/nsp_accuracy": 0.51}, "that of guessing"),
        ({"perf/data_wait": 0.2}, "20% of the time is spent waiting"),
    ],
)
def test_each_trouble_is_named_once_and_no_other(change: dict, named: str) -> None:
    monitor, said = build()
    for done in range(10, 1001, 10):
        monitor.check_health(done, SOUND | change, 1000)
    assert len(said) == 1 and named in said[0]
    again, more = build(monitor.state)
    again.check_health(500, SOUND | change, 1000)
    assert not more


def test_what_is_slow_to_learn_is_given_half_of_the_run() -> None:
    monitor, said = build()
    for done in range(10, 500, 10):
        monitor.check_health(done, SOUND | {"train/mlm_loss": 2.0, "train/nsp_accuracy": 0.5}, 1000)
    assert not said
    monitor.check_health(500, SOUND | {"train/mlm_loss": 2.0, "train/nsp_accuracy": 0.5}, 1000)
    assert len(said) == 2


def test_a_gradient_far_above_the_usual_is_named_and_used() -> None:
    monitor, said = build()
    for step in range(NORMS):
        monitor.has_finite_gradient(
            step, 100.0 if step == 3 else 1.0
        )  # early steps may be anything
    assert not said
    assert monitor.has_finite_gradient(NORMS, 11.0)
    assert "has norm 11, the median is 1" in said[0]


def test_a_text_full_of_unknown_tokens_is_named_at_the_start() -> None:
    assert build(unknown=10)[1] == []
    assert "[UNK] is 25% of the training tokens" in build(unknown=100)[1][0]
