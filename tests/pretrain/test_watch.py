"""A rank that dies, stops or hangs is named by the others, with stacks, and a launcher can have the
run go on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, assert_same_run, command, fork, run

from pretrain.checkpoint import list_checkpoints
from pretrain.watch import end_watch, explain_loss, start_watch

FAULT = """
import os, runpy, signal, time
import pretrain.train as loop
real = loop.dropout_seed
def planted(seed, step, number):
    if step == 6 and os.environ["RANK"] == "{rank}":
        {fault}
    return real(seed, step, number)
loop.dropout_seed = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""
RESTARTED = int(os.environ.get("RESTARTED", 2))  # runs; RESTARTED=10 takes ten minutes
OPTIONS = ("train.micro_batch_size=8", "train.timeout_s=20")
SLOW = "time.sleep(1.5)"
KILL, STOP = (f"os.kill(os.getpid(), signal.SIG{name})" for name in ("KILL", "STOP"))
HANG = "time.sleep(1000)"


def test_a_step_may_take_longer_than_ranks_wait_for_each_other(
    prepared: Path, tmp_path: Path
) -> None:
    """Its four passes take 6 s, and a rank that makes no progress ends after 4 s."""
    options = ("train.micro_batch_size=2", "train.timeout_s=8")
    scripts = (FAULT.format(rank=rank, fault=SLOW) for rank in (0, 1))
    words = command(prepared, tmp_path, *options)[2:]
    done = fork(*(["-c", script, *words] for script in scripts))
    assert done.returncode == 0, done.stderr


SLOW_DISK = """
import runpy, time
import pretrain.checkpoint as checkpoint
real = checkpoint.write_checkpoint
def planted(*arguments):
    time.sleep(12)
    return real(*arguments)
checkpoint.write_checkpoint = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


def test_a_checkpoint_may_take_longer_to_write_than_ranks_wait_for_each_other(
    prepared: Path, tmp_path: Path
) -> None:
    options = ("train.micro_batch_size=8", "train.timeout_s=8", "train.max_steps=4")
    words = command(prepared, tmp_path, *options, "train.save_every=2", "train.eval_every=4")[2:]
    done = fork(*(["-c", SLOW_DISK, *words] for _ in range(2)))
    assert done.returncode == 0, done.stderr
    assert list_checkpoints(tmp_path / "checkpoints")


def error_lines(stderr: str) -> list[str]:
    return [line.split("error: ", 1)[1] for line in stderr.splitlines() if "error: " in line]


COLLECT = """
import faulthandler, gc, sys, threading, time
from pathlib import Path
from pretrain.watch import Watch

class Slow:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.01)  # others run meanwhile

def planted(file, real=faulthandler.dump_traceback):
    real(file)
    for _ in range(100):
        Slow()
    gc.set_threshold(1)

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

gc.set_threshold(0)
faulthandler.dump_traceback = planted
watch = Watch(Path(sys.argv[1]), 0, 1, 1000)
threading.Thread(target=start_threads, daemon=True).start()
threading.Timer(1, watch.end_process).start()
time.sleep(1000)
"""


def test_a_process_is_ended_although_its_memory_is_collected_meanwhile(tmp_path: Path) -> None:
    words = [sys.executable, "-c", COLLECT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    (line,) = error_lines(done.stderr)
    assert "last seen in step 0 at <module> of <string>. See" in line


@pytest.mark.parametrize(("rank", "fault"), [(0, KILL), (1, KILL), (1, STOP), (0, HANG)])
def test_the_rank_at_fault_is_named_once(
    prepared: Path, tmp_path: Path, rank: int, fault: str
) -> None:
    words = ["-c", FAULT.format(rank=rank, fault=fault), *command(prepared, tmp_path, *OPTIONS)[2:]]
    done = fork(words, words)
    assert done.returncode in (1, -signal.SIGKILL), done.stderr
    (line,) = error_lines(done.stderr)
    named = re.findall(r"rank (\d) on (\S+) \(process \d+\) ([\w ]+), last seen in step (\d)", line)
    ranks, hosts, what, steps = zip(*named, strict=True)
    assert set(hosts) == {os.uname().nodename} and set(steps) <= set("0123456")
    if fault == HANG:  # both are in step 6: only the place tells
        assert ranks == ("0", "1") and set(what) == {"makes no progress"}
        assert "6 at planted of <string>; rank 1" in line
    else:
        assert ranks == (str(rank),) and what == ("has died or is stopped",)
    assert "Traceback" not in done.stderr
    stacks = {path.stem: path.read_text() for path in (tmp_path / "ranks").glob("*.stack")}
    if fault == HANG:
        assert "in planted" in stacks["rank-00000"] and len(stacks) == 2
    elif fault == STOP:
        assert stacks.keys() == {"rank-00000"} and "train.py" in stacks["rank-00000"]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]


def test_a_rank_that_dies_before_its_first_step_was_last_seen_in_the_one_that_it_resumed_at(
    tmp_path: Path,
) -> None:
    start_watch(tmp_path, SimpleNamespace(process_index=0, num_processes=2), 1000, 110)
    try:
        assert json.loads((tmp_path / "ranks/rank-00000").read_text())["step"] == 110
    finally:
        end_watch()


def state(step: int, at: str = "") -> dict:
    return {"host": "here", "pid": 7, "step": step, "at": at, "beats": 3}


def test_a_rank_that_is_behind_is_named() -> None:
    line = explain_loss(
        {0: state(7), 1: state(6, " at get of queue.py"), 2: state(7)}, set(), Path()
    )
    assert line.startswith(
        "rank 1 on here (process 7) is behind, and others wait for it in step 7, "
        "last seen in step 6 at get of queue.py. See"
    )


KILLED = """
import json, os, runpy, signal
import pretrain.train as loop
kills = json.loads(os.environ["KILLS"]).get(os.environ["TORCHELASTIC_RESTART_COUNT"])
real = loop.dropout_seed
def planted(seed, step, number):
    if [step, os.environ["RANK"]] == kills:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(seed, step, number)
loop.dropout_seed = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run(prepared, folder, *OPTIONS[:1], processes=2).returncode == 0
    return folder


def assert_restarts(prepared: Path, whole: Path, folder: Path, kills: list[list]) -> None:
    """The launcher restarts a run whose ranks are killed, [step, rank] in each start but the last,
    and it ends as the whole one does."""
    folder.mkdir(exist_ok=True)
    (folder / "main.py").write_text(KILLED)
    launch = f"-m torch.distributed.run --nproc-per-node 2 --max-restarts {len(kills)} --standalone"
    words = [folder / "main.py", *command(prepared, folder / "run", *OPTIONS[:1])[2:]]
    env = {"KILLS": json.dumps(dict(enumerate(kills))), "PYTHONPATH": str(ROOT)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launch.split(), *map(str, words)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = error_lines(done.stderr)
    assert [line[:7] for line in lines] == [f"rank {rank} " for _, rank in kills], lines
    assert_same_run(whole, folder / "run")


def test_a_launcher_that_may_restart_has_the_run_go_on_to_the_same_end(
    prepared: Path, whole: Path, tmp_path: Path
) -> None:
    assert_restarts(prepared, whole, tmp_path, [[6, "1"]])


@pytest.mark.slow
def test_runs_that_are_killed_in_three_starts_each_go_on_to_the_same_end(
    prepared: Path, whole: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    for number in range(RESTARTED):
        steps = sorted(draw.sample(range(2, 12), 3))  # each start does something
        kills = [[step, draw.choice("01")] for step in steps]
        assert_restarts(prepared, whole, tmp_path / str(number), kills)
