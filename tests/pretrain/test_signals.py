"""A signal ends a run in time: all ranks at one step, with a checkpoint and exit code 75, and the
same command goes on to the same end."""

import signal
from pathlib import Path

import pytest
from helpers import assert_same_run, command, fork, newest, run, train_here

from pretrain.checkpoint import list_checkpoints, newest_checkpoint, read_state

SEND = """
import os, runpy
import {module} as module
real, calls = module.{name}, []
def planted(*arguments, **options):
    calls.append(arguments)
    if {condition} and int(os.environ.get("RANK", 0)) == {rank}:
        for number in {numbers}:
            os.kill(os.getpid(), number)
    return real(*arguments, **options)
module.{name} = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""
LOOP = {"module": "pretrain.train", "name": "dropout_seed"}  # called in each step with its number


def run_with(prepared: Path, run_dir: Path, *options: str, processes: int = 1, **plant):
    """Train in forks, one of which sends itself signals; the completed process."""
    words = ["-c", SEND.format(**{"rank": 0} | plant), *command(prepared, run_dir, *options)[2:]]
    return fork(*[words] * processes)


def checkpoints(run_dir: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run_dir / "checkpoints")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_run_that_a_signal_stops_goes_on_to_the_same_end(
    prepared: Path, straight: Path, tmp_path: Path, number: signal.Signals
) -> None:
    plant = {"condition": "arguments[1] == 6", "numbers": [int(number)]}
    done = run_with(prepared, tmp_path, **LOOP, **plant)
    assert done.returncode == 75, done.stderr
    line = f"stopped at step 7 on {number.name}; the checkpoint is {tmp_path}/checkpoints/step-"
    assert line + "00000007; start the same command again" in done.stderr.splitlines()[-1]
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000007"]
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize("step", [6, 12])
def test_an_evaluation_that_a_signal_cuts_short_is_made_when_the_run_goes_on(
    prepared: Path, straight: Path, tmp_path: Path, step: int
) -> None:
    """The second of four batches is asked for a signal of the first; step 12 is the last."""
    score = {"module": "pretrain.models.bert", "name": "PretrainingModel.score"}
    first = 1 if step == 6 else 5  # call of it in this evaluation
    plant = {"condition": f"len(calls) == {first}", "numbers": [int(signal.SIGTERM)]}
    done = run_with(prepared, tmp_path, **score, **plant)
    assert done.returncode == 75 and f"stopped at step {step} on SIGTERM" in done.stderr
    assert not (tmp_path / "export").exists()
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)
    cut, whole = (
        read_state(newest_checkpoint(one / "checkpoints")) for one in (tmp_path, straight)
    )
    assert cut.keys() == whole.keys() and cut["evaluation"] == whole["evaluation"]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(prepared: Path, tmp_path: Path) -> None:
    plant = {"condition": "arguments[1] == 6", "rank": 1, "numbers": [int(signal.SIGUSR1)]}
    done = run_with(prepared, tmp_path / "a", processes=2, **LOOP, **plant)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("stopped at step 7 on SIGUSR1") == 1
    assert "Traceback" not in done.stderr
    assert checkpoints(tmp_path / "a")[-1] == "step-00000007"
    for name in ("a", "b"):
        assert run(prepared, tmp_path / name, processes=2).returncode == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_second_sigint_ends_a_run_at_once(prepared: Path, tmp_path: Path) -> None:
    plant = {"condition": "arguments[1] == 6", "numbers": [int(signal.SIGINT)] * 2}
    done = run_with(prepared, tmp_path, **LOOP, **plant)
    assert done.returncode == -signal.SIGINT
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_further_signals_change_nothing(prepared: Path, tmp_path: Path) -> None:
    numbers = [int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGTERM)]
    done = run_with(prepared, tmp_path, **LOOP, condition="arguments[1] == 6", numbers=numbers)
    assert done.returncode == 75 and "stopped at step 7 on SIGTERM" in done.stderr
    assert newest(tmp_path)


def test_a_signal_before_the_first_step_ends_the_command_at_once(
    prepared: Path, tmp_path: Path
) -> None:
    build = {"module": "pretrain.run_setup", "name": "build_model"}
    done = run_with(prepared, tmp_path, **build, condition="True", numbers=[int(signal.SIGTERM)])
    assert done.returncode == 75
    assert done.stderr == (
        "stopped on SIGTERM; no step of this start is done; start the same command again\n"
    )
    assert not (tmp_path / "checkpoints").exists()
