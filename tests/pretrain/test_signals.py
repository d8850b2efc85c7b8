"""A signal ends a run in time: all ranks at one step, with a checkpoint and exit code 75, and the
same command goes on to the same end."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import CPU_2, ROOT, assert_same_run, command, fork, metrics, newest, run, train_here

from data_pipeline.common.errors import UserError
from pretrain.checkpoint import list_checkpoints, newest_checkpoint, read_state
from pretrain.run_folder import lock_run

SEND = """
import os, runpy, signal
import {module} as module
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
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
HANG_UP = """
import os, pty, select, sys
here, *words = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, *words])
while not os.path.exists(here):
    if select.select([terminal], [], [], 0.1)[0]:
        os.read(terminal, 1 << 16)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
LOOP = {"module": "pretrain.train", "name": "dropout_seed"}  # called in each step with its number


def run_with(prepared: Path, run_dir: Path, *options: str, processes: int = 1, **plant):
    """Train in forks, one of which sends itself signals; the completed process."""
    words = ["-c", SEND.format(**{"rank": 0} | plant), *command(prepared, run_dir, *options)[2:]]
    return fork(*[words] * processes)


def checkpoints(run_dir: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run_dir / "checkpoints")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
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


def test_an_evaluation_before_the_first_step_is_made_when_the_run_begins_again(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    score = {"module": "pretrain.models.bert", "name": "PretrainingModel.score"}
    plant = {"condition": "len(calls) == 1", "numbers": [int(signal.SIGTERM)]}
    start = f"init_from={straight / 'export'}"
    done = run_with(prepared, tmp_path / "a", start, **score, **plant)
    assert done.returncode == 75
    assert "stopped at step 0 on SIGTERM; no step is done yet; start the same" in done.stderr
    assert not checkpoints(tmp_path / "a") and not metrics(tmp_path / "a")
    for name in "ab":
        train_here(prepared, tmp_path / name, start)
    assert metrics(tmp_path / "a")[0]["step"] == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("first", [3, 7])
def test_a_run_that_is_cut_to_where_it_stands_is_evaluated_before_its_export(
    prepared: Path, tmp_path: Path, first: int
) -> None:
    """Evaluations are due at steps 6 and 12; a signal stops the run before or after the first."""
    plant = {"condition": f"arguments[1] == {first - 1}", "numbers": [int(signal.SIGTERM)]}
    assert run_with(prepared, tmp_path, **LOOP, **plant).returncode == 75
    for _ in range(2):  # the second start has nothing left to do
        train_here(prepared, tmp_path, f"train.max_steps={first}", "train.extend=true")
        steps = [row["step"] for row in metrics(tmp_path) if "eval/mlm_loss" in row]
        assert steps == [first] if first < 6 else [6, first]
    state = read_state(newest_checkpoint(tmp_path / "checkpoints"))
    row = next(row for row in metrics(tmp_path) if row["step"] == first and "eval/mlm_loss" in row)
    assert state["evaluation"]["eval/mlm_loss"] == row["eval/mlm_loss"]


def test_a_kill_while_the_same_step_is_saved_again_loses_nothing(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    """It is saved before the evaluation that a signal cuts short, and after it."""
    score = {"module": "pretrain.models.bert", "name": "PretrainingModel.score"}
    plant = {"condition": "len(calls) == 1", "numbers": [int(signal.SIGTERM)]}
    keep = "train.keep_checkpoints=1"
    assert run_with(prepared, tmp_path, keep, **score, **plant).returncode == 75
    rename = {"module": "pretrain.checkpoint", "name": "Path.rename"}
    plant = {"condition": "arguments[0].suffix == '.tmp'", "numbers": [int(signal.SIGKILL)]}
    assert run_with(prepared, tmp_path, keep, **rename, **plant).returncode == -signal.SIGKILL
    assert "step-00000006" not in checkpoints(tmp_path)
    train_here(prepared, tmp_path, keep)
    assert_same_run(tmp_path, straight)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000012"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_run_whose_reader_ends_by_the_same_signal_saves_and_ends(
    prepared: Path, straight: Path, tmp_path: Path, slow: bool
) -> None:
    """As in `2>&1 | tee log`; a slow run writes its bar at each step, and so between the two."""
    pipe = "import os\nreader, writer = os.pipe()\n"
    pipe += "os.dup2(writer, 1), os.dup2(writer, 2), os.close(writer)\n"
    if slow:
        pipe += "import tqdm\ntqdm.tqdm.monitor_interval = 0\nimport pretrain.train as loop\n"
        pipe += "make = loop.progress_bar\ndef quick(*words, **options):\n    bar = make(*words, "
        pipe += "**options)\n    bar.mininterval = bar.miniters = 0\n    return bar\n"
        pipe += "loop.progress_bar = quick\n"
    condition = "arguments[1] == 6 and not os.close(reader)"
    code = pipe + SEND.format(**LOOP, condition=condition, rank=0, numbers=[int(signal.SIGINT)])
    done = fork(["-c", code, *command(prepared, tmp_path)[2:]])
    assert done.returncode == 75
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000007"]
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(prepared: Path, tmp_path: Path) -> None:
    plant = {"condition": "arguments[1] == 6", "rank": 1, "numbers": [int(signal.SIGUSR1)]}
    done = run_with(prepared, tmp_path / "a", processes=2, **LOOP, **plant)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("stopped at step 7 on SIGUSR1") == 1
    assert "Traceback" not in done.stderr
    assert checkpoints(tmp_path / "a")[-1] == "step-00000007"
    assert "stopping" in (tmp_path / "a/lock").read_text()  # for a start that comes meanwhile
    for name in ("a", "b"):
        assert run(prepared, tmp_path / name, processes=2).returncode == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_second_sigint_ends_a_run_at_once(prepared: Path, tmp_path: Path) -> None:
    plant = {"condition": "arguments[1] == 6", "numbers": [int(signal.SIGINT)] * 2}
    done = run_with(prepared, tmp_path, **LOOP, **plant)
    assert done.returncode == -signal.SIGINT
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_a_run_whose_terminal_is_closed_saves_and_ends(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    """Closing the other end of a terminal sends SIGHUP, and fails all further writing to it."""
    wait = f"arguments[1] == 6 and (open('{tmp_path}/here', 'w'), signal.pause())"
    code = SEND.format(**LOOP, condition=wait, rank=0, numbers=[])
    words = ["-c", code, *command(prepared, tmp_path / "run")[2:]]
    done = fork(["-c", HANG_UP, str(tmp_path / "here"), *words])
    assert done.returncode == 75, done.stderr
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000007"]
    train_here(prepared, tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)


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
        "stopped on SIGTERM; no new step is done yet; start the same command again\n"
    )
    assert not (tmp_path / "checkpoints").exists()


# ------------------------------------------------------------------------------ launchers

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no process is told of the end of its parent"
)
ONE = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", sys.executable]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def end_launcher(
    launcher: list[str], number: signal.Signals, prepared: Path, run_dir: Path, **env: str
) -> str:
    """Send a signal to the launcher of a long run; what its trainers say until they end."""
    options = ("train.max_steps=100000", "train.micro_batch_size=8", "train.save_every=100000")
    log = run_dir.with_suffix(".log")
    with open(log, "w") as stderr:
        process = psutil.Popen(
            [*launcher, *command(prepared, run_dir, *options)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    wait_for(lambda: "train/loss" in read(run_dir / "metrics.jsonl") or process.poll())
    trainers = process.children()
    process.send_signal(number)
    process.wait()
    _, alive = psutil.wait_procs(trainers, timeout=60)
    for trainer in alive:
        trainer.kill()
    assert trainers and not alive
    return read(log)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@on_linux
def test_a_trainer_whose_launcher_is_killed_saves_and_ends(prepared: Path, tmp_path: Path) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "no"}  # as accelerate launch sets for one process
    said = end_launcher(ONE, signal.SIGKILL, prepared, tmp_path / "run", **env)
    (saved,) = checkpoints(tmp_path / "run")
    step = int(saved.removeprefix("step-"))
    assert f"stopped at step {step:,} on SIGTERM; the checkpoint is" in said.splitlines()[-1]


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "KILL"])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_trainer_outlives_a_launcher(
    prepared: Path, tmp_path: Path, processes: int, name: str
) -> None:
    """accelerate launch; torchrun is what it starts several processes by."""
    file = CPU_2 if processes == 2 else ROOT / "configs/accelerate/gpu_1.yaml"
    number = signal.Signals[f"SIG{name}"]
    said = end_launcher([*ACCELERATE, str(file)], number, prepared, tmp_path / "run")
    assert said.count("stopped at step") == 1
    assert len(checkpoints(tmp_path / "run")) == 1


def test_a_file_system_without_locks_is_told_and_used(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(*_) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    lock_run(tmp_path, SimpleNamespace(is_main_process=True)).close()
    assert f"{tmp_path} cannot be locked (Function not" in capsys.readouterr().out


def test_a_start_waits_for_a_run_that_a_signal_is_stopping(tmp_path: Path, capsys) -> None:
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("process 7 on here\nstopping", file=lock, flush=True)
        threading.Timer(0.2, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        lock_run(tmp_path, SimpleNamespace(is_main_process=True)).close()
    assert "waiting for process 7 on here, which a signal is stopping" in capsys.readouterr().out


def test_of_two_starts_that_wait_the_second_is_told_of_the_first(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("process 7 on here\nstopping", file=lock, flush=True)

        def become_first() -> None:
            lock.truncate(0)
            lock.seek(0)
            print("process 8 on here", file=lock, flush=True)

        threading.Timer(0.2, become_first).start()
        release = threading.Timer(5, fcntl.flock, (lock, fcntl.LOCK_UN))  # of one that waits on
        release.start()
        with pytest.raises(UserError, match="is in use by process 8 on here"):
            lock_run(tmp_path, SimpleNamespace(is_main_process=True))
        release.cancel()
