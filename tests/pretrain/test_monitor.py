"""A sick run is named, a step without a gradient skipped, and a run that is lost stops."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NO_DROPOUT, assert_same_run, command, fork, metrics, newest, run, train_here

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain.checkpoint import list_checkpoints, newest_checkpoint, read_state
from pretrain.config import Config, PhaseConfig, TrainConfig, phases_of
from pretrain.models.bert import PretrainingModel, continue_positions
from pretrain.monitor import MOST_SKIPPED, RECENT, SPIKE_STEPS, Monitor

TRAIN = TrainConfig(max_steps=1000, warmup_steps=100, log_every=10)
NOTHING = {"train/skipped_steps": 0, "train/rollbacks": 0}
SOUND = {"train/mlm_loss": 0.5, "train/nsp_accuracy": 0.7, "perf/data_wait": 0.0}


def build(
    state: dict | None = None, unknown: int = 0, train: TrainConfig = TRAIN, start: int = 0
) -> tuple[Monitor, list[str]]:
    """A monitor of a text with four pieces, equally frequent but for the first, [UNK]."""
    said: list[str] = []
    phases = phases_of(Config(train=train))
    counts = np.array([unknown, 100, 100, 100])
    return Monitor(phases, counts, 0, state or {}, said.append, start), said


def plant(
    monkeypatch, store: TokenStore, *steps: int, data: PairsConfig | None = None, seed: int = 0
) -> None:
    """The losses of some steps of the run of `prepared` become NaN; a function of their batches.

    steps: of the phase with this data and seed.
    """
    source = BatchSource(store, data or PairsConfig(max_seq_length=64), seed)
    bad = [source.batch(16 * step, 16).input_ids for step in steps]
    forward = PretrainingModel.forward

    def planted(self, batch):
        rows = forward(self, batch)
        if any(torch.equal(batch.input_ids, ids) for ids in bad):
            rows = rows * torch.tensor([math.nan, 1, 1])
        return rows

    monkeypatch.setattr(PretrainingModel, "forward", planted)


# ------------------------------------------------------------------------------ skipped steps


@pytest.mark.parametrize("skips_there", [False, True])  # on a GPU, where AdamW skips by itself
def test_a_step_without_a_gradient_leaves_weights_and_optimizer_as_they_were(
    skips_there, prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("pretrain.optim.skips_there", lambda *_: skips_there)
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
    (tmp_path / "a").rename(tmp_path / "b")
    train_here(prepared, tmp_path / "a")
    for path in (tmp_path / "b/checkpoints").glob("step-00000012"):
        path.rename(tmp_path / "last")
    train_here(prepared, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    state = read_state(newest_checkpoint(tmp_path / "b/checkpoints"))
    assert state["monitor"]["skipped"] == 3 and state["monitor"]["in_a_row"] == 0


NAN = """
import os, runpy
import pretrain.train as loop
real, calls = loop.clip_gradients, []
def planted(*arguments):
    calls.append(arguments)
    norm = real(*arguments)
    return norm * float("nan") if {when} else norm
loop.clip_gradients = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


def test_a_run_without_gradients_stops_in_one_line(prepared: Path, tmp_path: Path) -> None:
    done = fork(["-c", NAN.format(when="len(calls) > 3"), *command(prepared, tmp_path)[2:]])
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the gradients of 5 steps in a row")
    assert "the last good checkpoint is none" in last  # the step before that of step 4 was skipped
    assert not re.search("NaN|Infinity", (tmp_path / "metrics.jsonl").read_text())  # are no JSON


def test_the_record_keeps_the_examples_of_each_skipped_step(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch
) -> None:
    plant(monkeypatch, store, 2)
    phases = "train.phases=[{steps: 4}, {steps: 8, masked_lm_prob: 0.2}]"
    train_here(prepared, tmp_path, "train.log_every=1", phases)
    (batch,) = [line["skipped"] for line in metrics(tmp_path) if "skipped" in line]
    assert batch.pop("losses") == [None, None]  # NaN, which JSON lacks
    assert batch == {"step": 2, "phase": 0, "first": 32, "count": 16}


def test_the_examples_of_a_skipped_step_are_counted_from_the_start_of_its_phase(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch
) -> None:
    phases = "train.phases=[{steps: 4}, {steps: 8, masked_lm_prob: 0.2}]"
    _, phase = phases_of(load_config(Config, str(prepared / "config.yaml"), [phases]))
    plant(monkeypatch, store, 2, data=phase.data, seed=phase.seed)
    train_here(prepared, tmp_path, phases)
    (batch,) = [line["skipped"] for line in metrics(tmp_path) if "skipped" in line]
    assert (batch["step"], batch["phase"]) == (6, 1)
    assert (batch["first"], batch["count"]) == (32, 16)  # as `BatchSource.batch` was asked above


def test_a_nan_on_one_rank_alone_skips_the_step_on_all(prepared: Path, tmp_path: Path) -> None:
    """As after a fault of its memory: the gradients were the same on both before."""
    for ranks in ("01", "1", "0"):
        words = command(prepared, tmp_path / ranks, "train.micro_batch_size=8")[2:]
        when = f"len(calls) == 7 and os.environ['RANK'] in {list(ranks)}"
        done = fork(*[["-c", NAN.format(when=when), *words]] * 2)
        assert done.returncode == 0, done.stderr
        assert metrics(tmp_path / ranks)[-2]["train/skipped_steps"] == 1
    assert_same_run(tmp_path / "01", tmp_path / "1")
    assert_same_run(tmp_path / "01", tmp_path / "0")


def test_five_skips_in_a_row_name_the_last_good_checkpoint(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch
) -> None:
    """Those of steps 8 and 10 were written between skips, and have not replaced it."""
    plant(monkeypatch, store, *range(7, 12))
    options = ("train.save_every=2", "train.keep_checkpoints=1")
    with pytest.raises(UserError, match="last good checkpoint is .*/step-00000006. Lower"):
        train_here(prepared, tmp_path, *options)
    kept = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept == ["step-00000006", "step-00000008", "step-00000010"]


SPOIL = """
import math, os, runpy, torch
import pretrain.train as loop
real, calls = loop.update, []
def planted(optimizers, *arguments):
    found = real(optimizers, *arguments)
    calls.append(arguments)
    if len(calls) == 6:
        with torch.no_grad():
            weights = optimizers[0].param_groups[0]["params"][0].view(-1)
            {fault}
    return found
loop.update = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_that_are_not_finite_stop_all_ranks_and_are_not_saved(
    prepared: Path, tmp_path: Path, processes: int
) -> None:
    options = ("train.micro_batch_size=8", "train.save_every=3", "train.eval_every=12")
    script = SPOIL.format(fault="weights[0] = math.inf")
    words = ["-c", script, *command(prepared, tmp_path, *options)[2:]]
    done = fork(*[words] * processes)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "is not finite at step 6, so no checkpoint is written" in line
    assert "the last good one is step-00000003" in line
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert names == ["step-00000003"] and not (tmp_path / "export").exists()


def test_weights_that_differ_by_a_bit_on_one_rank_are_not_saved(
    prepared: Path, tmp_path: Path
) -> None:
    flip = "weights.view(torch.int32)[7] ^= int(os.environ['RANK'])"
    options = ("train.micro_batch_size=8", "train.save_every=3", "train.eval_every=12")
    words = ["-c", SPOIL.format(fault=flip), *command(prepared, tmp_path, *options)[2:]]
    done = fork(words, words)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "rank 1 on " in line and "has other weights than rank 0" in line
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_weights_may_differ_between_kinds_of_processors(prepared: Path, tmp_path: Path) -> None:
    flip = "weights.view(torch.int32)[7] ^= int(os.environ['RANK'])"
    kinds = "import os, pretrain.agreement as agreement\n"
    kinds += "agreement.processor = lambda device: os.environ['RANK']"
    script = kinds + SPOIL.format(fault=flip)
    words = ["-c", script, *command(prepared, tmp_path, "train.micro_batch_size=8")[2:]]
    done = fork(words, words)
    assert done.returncode == 0, done.stderr


def test_a_run_that_has_diverged_is_not_exported(prepared: Path, tmp_path: Path) -> None:
    """Nor when the same command is given again, which has nothing left to train."""
    for _ in "ab":
        with pytest.raises(
            UserError, match="has diverged: its MLM loss is .* a uniform guess has 6.93"
        ):
            train_here(prepared, tmp_path, "train.learning_rate=10", "train.warmup_steps=0")
    done = run(prepared, tmp_path, "train.learning_rate=10", "train.warmup_steps=0", processes=2)
    assert done.returncode == 2 and done.stderr.count("has diverged") == 1
    assert (tmp_path / "checkpoints/step-00000012").exists()
    assert not (tmp_path / "export").exists()


# ------------------------------------------------------------------------------ spikes


def shorten(monkeypatch) -> None:
    """A spike is two steps above the usual of four."""
    monkeypatch.setattr("pretrain.monitor.RECENT", 4)
    for module in ("monitor", "train"):
        monkeypatch.setattr(f"pretrain.{module}.SPIKE_STEPS", 2)


def raise_loss(monkeypatch, *steps: int) -> None:
    """The MLM loss of some steps that are trained here is 5 nats higher, for the monitor alone."""
    real = Monitor.has_spiked
    at = []  # of the run that trains now
    monkeypatch.setattr(
        "pretrain.train.learning_rate", lambda step, train: (at.append(step), 1e-3)[1]
    )

    def planted(self, loss: float, is_new_phase: bool) -> bool:
        return real(self, loss + 5 * (at[-1] in steps), is_new_phase)

    monkeypatch.setattr(Monitor, "has_spiked", planted)


def test_a_spike_takes_the_weights_back_and_passes_over_the_data_since(
    prepared: Path, store: TokenStore, tmp_path: Path, monkeypatch, capsys
) -> None:
    """As if the gradients of the four steps since the checkpoint had not been finite."""
    with monkeypatch.context() as patch:
        shorten(patch)
        raise_loss(patch, 6, 7)
        train_here(prepared, tmp_path / "spiked")
    assert "continues with the weights of step-00000004" in capsys.readouterr().out
    record = metrics(tmp_path / "spiked")
    (line,) = [line for line in record if "rollback" in line]
    assert line == {"step": 8, "rollback": {"to": "step-00000004", "done": 8}}
    assert [line["train/rollbacks"] for line in record if "train/rollbacks" in line][-2:] == [1, 1]

    plant(monkeypatch, store, 4, 5, 6, 7)
    raise_loss(monkeypatch)
    train_here(prepared, tmp_path / "skipped")
    spiked, skipped = newest(tmp_path / "spiked"), newest(tmp_path / "skipped")
    assert all(torch.equal(spiked[name], skipped[name]) for name in spiked | skipped)


def test_no_checkpoint_is_removed_while_a_spike_begins(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    shorten(monkeypatch)
    raise_loss(monkeypatch, 6, 7)
    # three of each step: step 4 would go when step 7 is saved, a step before it is needed
    train_here(prepared, tmp_path, "train.save_every=1", "train.keep_checkpoints=3")
    (line,) = [line for line in metrics(tmp_path) if "rollback" in line]
    assert line["rollback"] == {"to": "step-00000004", "done": 8}


def test_one_step_of_ten_times_the_loss_is_named_and_the_run_goes_on(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("pretrain.monitor.RECENT", 4)
    real, losses = Monitor.has_spiked, []

    def planted(self, loss: float, is_new_phase: bool) -> bool:
        losses.append(loss)
        return real(self, loss * (12 if len(losses) in (6, 8) else 1), is_new_phase)

    monkeypatch.setattr(Monitor, "has_spiked", planted)
    train_here(prepared, tmp_path)
    said = capsys.readouterr().out
    assert said.count("warning: the MLM loss of one step is ") == 1
    assert metrics(tmp_path)[-2]["monitor/outlier"] == 1
    before, after = newest(straight), newest(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_from_two_phases_ago_get_the_positions_of_both(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """As if the phase between had been passed over, whose positions the last one continues."""
    shorten(monkeypatch)
    raise_loss(monkeypatch, 10, 11)
    lengths = "{steps: 5, max_seq_length: 16}, {steps: 1, max_seq_length: 32}, {steps: 9}"
    options = ("train.max_steps=15", "train.save_every=5", f"train.phases=[{lengths}]")
    train_here(prepared, tmp_path, *options)
    assert [line["rollback"]["to"] for line in metrics(tmp_path) if "rollback" in line] == [
        "step-00000005"
    ]
    found = newest(tmp_path)["embeddings.position.weight"]
    for trained in (16, 32):  # three small steps leave them near
        wanted = continue_positions(found[:trained], 2 * trained)[trained:]
        assert torch.cosine_similarity(found[trained : 2 * trained], wanted).min() > 0.9


@pytest.mark.parametrize("after", [4, 7, 8])
def test_a_run_that_is_killed_around_a_spike_goes_on_to_the_same_end(
    prepared: Path, tmp_path: Path, monkeypatch, after: int
) -> None:
    """Before it, in it, and after it, when checkpoints that were written in it are still there."""
    shorten(monkeypatch)
    raise_loss(monkeypatch, 6, 7)
    options = ("train.save_every=1", "train.keep_checkpoints=12")
    for name in ("whole", "killed"):
        train_here(prepared, tmp_path / name, *options)
    for path in list_checkpoints(tmp_path / "killed/checkpoints")[after:]:
        path.rename(tmp_path / path.name)
    train_here(prepared, tmp_path / "killed", *options)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("every", [1, 4])  # with 1, newer checkpoints hold what was dropped
def test_a_second_spike_after_the_same_checkpoint_stops_the_run(
    prepared: Path, tmp_path: Path, monkeypatch, every: int
) -> None:
    shorten(monkeypatch)
    raise_loss(monkeypatch, 6, 7, 9, 10)
    with pytest.raises(UserError, match="2 steps to 11 is more than 1 nats .*/step-00000004. Low"):
        train_here(prepared, tmp_path, f"train.save_every={every}", "train.keep_checkpoints=12")
    assert not (tmp_path / "export").exists()


def test_a_spike_can_stop_a_run_or_be_accepted(
    prepared: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    shorten(monkeypatch)
    raise_loss(monkeypatch, 6, 7)
    with pytest.raises(UserError, match="last good checkpoint is .*/step-00000004. Lower"):
        train_here(prepared, tmp_path / "stop", "train.on_spike=stop")
    train_here(prepared, tmp_path / "warn", "train.on_spike=warn")
    assert capsys.readouterr().out.count("warning: the MLM loss of the 2 steps to 8") == 1
    assert metrics(tmp_path / "warn")[-2]["monitor/spike"] == 1
    raise_loss(monkeypatch)
    train_here(prepared, tmp_path / "sound")
    warned, sound = newest(tmp_path / "warn"), newest(tmp_path / "sound")
    assert all(torch.equal(warned[name], sound[name]) for name in warned | sound)


def test_a_spike_without_a_checkpoint_before_it_stops_the_run(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    shorten(monkeypatch)
    raise_loss(monkeypatch, 6, 7)
    with pytest.raises(UserError, match="no good checkpoint is at least 4 steps old. Lower"):
        train_here(prepared, tmp_path, "train.save_every=5")  # which is younger than 4 steps


SPIKE = """
import runpy
import pretrain.monitor, pretrain.train
from pretrain.monitor import Monitor
pretrain.monitor.RECENT, pretrain.monitor.SPIKE_STEPS, pretrain.train.SPIKE_STEPS = 4, 2, 2
real, calls = Monitor.has_spiked, []
def planted(self, loss, is_new_phase):
    calls.append(loss)
    return real(self, loss + 5 * (len(calls) in (7, 8)), is_new_phase)
Monitor.has_spiked = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("env", [{}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}])
def test_all_ranks_go_back_together(prepared: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """To the same losses as one process."""
    words = ["-c", SPIKE, *command(prepared, tmp_path / "one", *NO_DROPOUT)[2:]]
    assert fork(words).returncode == 0
    options = (*NO_DROPOUT, "train.micro_batch_size=8")
    words = ["-c", SPIKE, *command(prepared, tmp_path / "two", *options)[2:]]
    done = fork(words, words, **env)
    assert done.returncode == 0, done.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert sum("rollback" in line for line in one) == 1
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert all(a[key] == b[key] or abs(a[key] - b[key]) < 1e-5 * abs(a[key]) for key in a)


def test_only_steps_in_a_row_are_a_spike() -> None:
    monitor, _ = build()
    for step in range(1001):
        is_high = step >= RECENT and step % SPIKE_STEPS
        assert not monitor.has_spiked(9.0 if is_high else 2 + 0.1 * (-1) ** step, False)
    for loss in [math.nan] * 3 + [9.0] * (SPIKE_STEPS - 1):
        assert not monitor.has_spiked(loss, False)
    assert monitor.has_spiked(9.0, False)


def test_a_skipped_step_is_no_part_of_a_spike() -> None:
    monitor, lines = build()
    for _ in range(RECENT):
        monitor.has_spiked(2.0, False)
    for step in range(3 * SPIKE_STEPS):
        is_skipped = step % 3 == 0
        monitor.has_finite_gradient(step, math.inf if is_skipped else 1.0)
        spiked = monitor.has_spiked(math.inf if is_skipped else 9.0, False)
        assert spiked == (not is_skipped and step == 3 * SPIKE_STEPS // 2 - 1), step
    assert not any("the MLM loss of one step" in line for line in lines)


def test_an_accepted_spike_is_the_usual_loss_from_then_on() -> None:
    monitor, _ = build()
    for _ in range(RECENT):
        monitor.has_spiked(2.0, False)
    assert [monitor.has_spiked(9.0, False) for _ in range(SPIKE_STEPS)][-1]
    monitor.accept_spike(RECENT + SPIKE_STEPS)
    for _ in range(RECENT):
        assert not monitor.has_spiked(9.0, False) and not monitor.is_sick


def test_a_spike_is_sought_in_the_loss_of_masked_tokens_alone(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    losses: list[float] = []
    monkeypatch.setattr(Monitor, "has_spiked", lambda self, loss, _: losses.append(loss))
    train_here(prepared, tmp_path, "train.log_every=1")
    found = [line["train/mlm_loss"] for line in metrics(tmp_path) if "train/mlm_loss" in line]
    assert losses == pytest.approx(found) and len(found) == 12


def test_steps_after_the_checkpoint_that_a_run_went_back_to_are_passed_over() -> None:
    """The last of them too: its checkpoint has the weights of the one that it went back to."""
    monitor, _ = build({"losses": [2.0]})
    assert list(monitor.passed_over) == []
    monitor.note_rollback(8, "step-00000004")
    assert list(monitor.passed_over) == [5, 6, 7, 8]


def test_a_step_belongs_to_one_line_of_the_log() -> None:
    monitor, _ = build()  # a line every ten steps
    assert [done for done in range(480, 530) if monitor.is_reached(500, done)] == [*range(500, 510)]


def test_a_new_phase_forgets_what_was_usual() -> None:
    monitor, _ = build()
    for step in range(1000):
        assert not monitor.has_spiked(2.0 if step < 500 else 9.0, step == 500)


# ------------------------------------------------------------------------------ divergence


@pytest.mark.parametrize(
    ("evaluation", "trained", "is_lost"),
    [
        ({"eval/mlm_loss": 2.7}, math.nan, False),  # of four pieces: guessing has 1.386
        ({"eval/mlm_loss": 2.8}, 1.0, True),
        ({"eval/mlm_loss": math.nan}, 1.0, True),
        ({"eval/mlm_loss": None}, 1.0, True),  # as a checkpoint holds it
        ({}, 1.0, False),
        ({}, 103_877.0, True),
    ],
)
def test_a_loss_of_twice_that_of_guessing_is_no_model(evaluation, trained, is_lost: bool) -> None:
    monitor, _ = build({"loss": trained})
    assert bool(monitor.explain_divergence(evaluation)) == is_lost


def test_two_processes_stop_together_and_one_says_why(prepared: Path, tmp_path: Path) -> None:
    words = command(prepared, tmp_path, "train.micro_batch_size=8")[2:]
    done = fork(*[["-c", NAN.format(when="True"), *words]] * 2)
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
            assert monitor.check_health(step + 1, SOUND, 1000) == NOTHING
    assert not said


def test_a_run_without_pairs_is_told_nothing_of_pairs() -> None:
    monitor, said = build()
    sound = {name: value for name, value in SOUND.items() if "nsp" not in name}
    for done in range(10, 1001, 10):
        monitor.check_health(done, sound, 0)
    assert not said


def test_few_pairs_are_no_evidence_of_guessing() -> None:
    for pairs, warnings in ((99, 0), (100, 1)):
        monitor, said = build()
        for done in range(10, 1001, 10):
            monitor.check_health(done, SOUND | {"train/nsp_accuracy": 0.51}, pairs)
        assert len(said) == warnings


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train/mlm_loss": math.log(3)}, "so the model does not use context yet (unigram"),
        ({"train/nsp_accuracy": 0.51}, "no better than guessing"),
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


@pytest.mark.parametrize(
    ("name", "holds", "fails"),
    [
        ("train/mlm_loss", math.log(3) - 0.101, math.log(3) - 0.099),
        ("train/nsp_accuracy", 0.532, 0.531),  # two standard errors of 1,000 pairs are 0.0316
        ("perf/data_wait", 0.05, 0.051),
    ],
)
def test_a_warning_begins_where_its_figure_passes_its_limit(
    name: str, holds: float, fails: float
) -> None:
    for value, warnings in ((holds, 0), (fails, 1)):
        monitor, said = build()
        logged = monitor.check_health(500, SOUND | {name: value}, 1000)
        assert len(said) == warnings
        assert len(logged) == len(NOTHING) + (warnings if name != "perf/data_wait" else 0)


def test_the_last_loss_that_is_a_number_is_kept() -> None:
    """By which a run without evaluation is judged."""
    monitor, _ = build()
    for loss in (0.5, math.nan):
        monitor.check_health(10, SOUND | {"train/mlm_loss": loss}, 1000)
    assert monitor.state["loss"] == 0.5


@pytest.mark.parametrize("start, first", [(0, 10), (490, 500), (495, 500)])
def test_no_start_is_blamed_for_the_data_that_its_first_interval_waits_for(start, first) -> None:
    monitor, said = build(start=start)
    monitor.check_health(first, SOUND | {"perf/data_wait": 0.2}, 1000)
    assert not said
    monitor.check_health(first + 10, SOUND | {"perf/data_wait": 0.2}, 1000)
    assert len(said) == 1


def test_what_is_slow_to_learn_is_given_half_of_the_run() -> None:
    monitor, said = build()
    for done in range(10, 500, 10):
        monitor.check_health(done, SOUND | {"train/mlm_loss": 2.0, "train/nsp_accuracy": 0.5}, 1000)
    assert not said
    monitor.check_health(500, SOUND | {"train/mlm_loss": 2.0, "train/nsp_accuracy": 0.5}, 1000)
    assert len(said) == 2


def test_a_long_run_is_judged_5000_steps_after_its_warm_up() -> None:
    monitor, said = build(train=replace(TRAIN, max_steps=100_000, warmup_steps=1000))
    slow = SOUND | {"train/mlm_loss": 2.0, "train/nsp_accuracy": 0.5}
    monitor.check_health(5990, slow, 1000)
    assert not said
    monitor.check_health(6000, slow, 1000)
    assert len(said) == 2


def test_pairs_that_come_last_are_given_half_of_their_phase() -> None:
    phases = [PhaseConfig(steps=0.75, single_segment_prob=1.0), PhaseConfig(steps=0.25)]
    monitor, said = build(train=replace(TRAIN, phases=phases))
    for done in range(10, 870, 10):
        monitor.check_health(done, SOUND | {"train/nsp_accuracy": 0.5}, 1000 * (done > 750))
    assert not said
    monitor.check_health(880, SOUND | {"train/nsp_accuracy": 0.5}, 1000)  # step 875 is half of it
    assert len(said) == 1 and "after 880 steps the accuracy on pairs" in said[0]


def test_pairs_that_end_early_are_given_half_of_their_phase() -> None:
    phases = [PhaseConfig(steps=0.4), PhaseConfig(steps=0.6, single_segment_prob=1.0)]
    monitor, said = build(train=replace(TRAIN, phases=phases))
    for done in range(10, 1001, 10):
        monitor.check_health(done, SOUND | {"train/nsp_accuracy": 0.5}, 1000 * (done <= 400))
    assert len(said) == 1 and "after 200 steps the accuracy on pairs" in said[0]


def test_a_gradient_far_above_the_usual_is_named_and_used() -> None:
    monitor, said = build()
    for step in range(RECENT):
        monitor.has_finite_gradient(
            step, 100.0 if step == 3 else 1.0
        )  # early steps may be anything
    assert not said
    assert monitor.has_finite_gradient(RECENT, 11.0)
    assert "has norm 11, but the median is 1" in said[0]


def test_gradients_and_losses_are_told_from_the_usual_at_any_step_by_ten_times_as_much() -> None:
    for times, warnings in ((9.9, 0), (10.1, 2)):
        monitor, said = build()
        for step in range(2 * RECENT):
            monitor.has_finite_gradient(step, 1.0)
            monitor.has_spiked(2.0, False)
        monitor.has_finite_gradient(2 * RECENT, times)
        monitor.has_spiked(2 * times, False)
        assert len(said) == warnings


def test_the_usual_gradient_is_that_of_the_steps_before() -> None:
    monitor, said = build()
    for step in range(2 * RECENT):
        monitor.has_finite_gradient(step, 1.0 if step < RECENT else 5.0)
    monitor.has_finite_gradient(2 * RECENT, 40.0)
    assert not said


def test_a_text_full_of_unknown_tokens_is_named_at_the_start() -> None:
    assert build(unknown=15)[1] == []
    assert len(build(unknown=16)[1]) == 1  # of 316
    assert "25% of the training tokens are [UNK]" in build(unknown=100)[1][0]
