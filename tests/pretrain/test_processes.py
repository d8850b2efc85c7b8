"""Ranks that are not of one run stop before the first step, with one line that says why."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers import TWO_STEPS, assert_same_run, command, fork, run, train_here

from data_pipeline.common.errors import UserError
from data_pipeline.config_file import load_config
from pretrain import __main__ as main
from pretrain.config import Config
from pretrain.processes import check_compiler, check_ranks_agree, trains_on_gpu


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


@pytest.mark.parametrize(
    ("patched", "value", "named"),
    [
        ("torch.__version__", "2.99", "torch is '2.99'"),
        (
            "accelerate.Accelerator.device",
            torch.device("cuda"),
            "device is 'cuda'",
        ),
    ],
)
def test_a_rank_with_another_torch_or_device_is_named(
    patched: str, value: object, named: str, prepared: Path, monkeypatch
) -> None:
    """Both ranks here, one after the other."""
    config, accelerator = load_config(Config, str(prepared / "config.yaml")), Accelerator(cpu=True)
    ranks: list[tuple] = []

    def gather(mine: list) -> list:
        ranks.extend(mine)
        return ranks

    monkeypatch.setattr("pretrain.processes.gather_object", gather)
    check_ranks_agree(config, {}, accelerator)
    monkeypatch.setattr(patched, value)
    with pytest.raises(UserError, match=f"rank 1 on .* has a different .*: {named}, on rank 0"):
        check_ranks_agree(config, {}, accelerator)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("train.max_stepz=2", "unknown key train.max_stepz"),
        ("train.global_batch_size=1", "global_batch_size 1 is too small for 2 processes"),
    ],
)
def test_a_mistake_in_the_config_is_one_line_of_all_processes(
    prepared: Path, tmp_path: Path, mistake: str, said: str
) -> None:
    launch = "-m torch.distributed.run --nproc-per-node 2 --standalone".split()
    words = [sys.executable, *launch, *command(prepared, tmp_path / "run", mistake)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "stopped"))]
    assert done.returncode == 1 and len(lines) == 1 and said in lines[0], done.stderr


def test_a_process_tells_a_mistake_that_the_first_of_its_machine_has_not_made(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(main, "PATIENCE", 0.1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="unknown key seeds"):
        main.tell_once(lambda: load_config(Config, str(prepared / "config.yaml"), ["seeds=1"]))


def test_a_rank_that_would_evaluate_otherwise_is_named(prepared: Path, tmp_path: Path) -> None:
    options = (*TWO_STEPS, "train.phases=[{steps: 2, max_seq_length: 64}]")
    other = ["data.max_seq_length=32"]
    done = run(prepared, tmp_path / "run", *options, processes=2, rank_1=other)
    assert done.returncode == 2
    assert "data.max_seq_length is 32, on rank 0 64" in done.stderr


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


@pytest.mark.parametrize(
    "what", ["is in use by", "no export.json says", "cannot be read", "metrics.jsonl"]
)
def test_what_only_the_main_process_finds_is_one_line_and_no_traceback_of_the_others(
    prepared: Path, tmp_path: Path, what: str
) -> None:
    train_here(prepared, tmp_path, *TWO_STEPS)
    with open(tmp_path / "lock", "a") as lock:
        if "use" in what:
            fcntl.flock(lock, fcntl.LOCK_EX)
        elif "says" in what:
            shutil.rmtree(tmp_path / "export")
            (tmp_path / "export").mkdir()
            (tmp_path / "export/config.json").write_text("{}")
        elif "metrics" in what:  # found after the last collective call before the first step
            (tmp_path / what).unlink()
            (tmp_path / what).mkdir()
        else:
            shutil.rmtree(tmp_path / "checkpoints")
            (tmp_path / "checkpoints").touch()
        done = run(prepared, tmp_path, *TWO_STEPS, processes=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert what in line


SLOW_CHECK = """
import os, runpy, time
import data_pipeline.sampling.soundness as soundness
real = soundness.hash_file
def planted(path, *arguments):
    time.sleep(12 * (path.name == "tokens.npy" and "train" in str(path)))
    return real(path, *arguments)
soundness.hash_file = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


def test_ranks_wait_for_the_first_check_of_a_store_however_long_it_takes(
    prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    (tmp_path / "data/checked.json").unlink(missing_ok=True)
    options = (*TWO_STEPS, f"data_dir={tmp_path}/data", "train.timeout_s=8")
    words = ["-c", SLOW_CHECK, *command(prepared, tmp_path / "run", *options)[2:]]
    done = fork(words, words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data/checked.json").exists()


CHECK = """
import os, sys
machines, damaged = sys.argv[1:]
if machines == "2":
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
from accelerate import PartialState
from data_pipeline.common.errors import UserError, run_command
from pretrain.processes import check_on_each_machine

def check():
    # in one piece, whatever the other rank writes
    os.write(1, f"checked by {os.environ['RANK']}\\n".encode())
    if os.environ["RANK"] == damaged:
        raise UserError("the store of this machine is damaged")

PartialState(cpu=True)
run_command(lambda: check_on_each_machine(check))
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_one_rank_of_each_machine_checks_its_store_and_damage_stops_all(machines: int) -> None:
    for damaged in ("none", str(machines - 1)):
        done = fork(*[["-c", CHECK, str(machines), damaged]] * 2)
        checked = [line for line in done.stdout.splitlines() if "checked by" in line]
        assert sorted(checked) == [f"checked by {rank}" for rank in range(machines)]
        said = [line for line in done.stderr.splitlines() if "error: " in line]
        assert len(said) == (damaged != "none") and "Traceback" not in done.stderr, done.stderr
        assert done.returncode == (0 if damaged == "none" else 2)


def test_a_single_process_says_nothing_of_ranks(prepared: Path, tmp_path: Path, capsys) -> None:
    train_here(prepared, tmp_path, "train.max_steps=1", "train.warmup_steps=0")
    assert "ranks:" not in capsys.readouterr().out


def test_no_rank_waits_for_one_that_finds_no_data(prepared: Path, tmp_path: Path) -> None:
    other = [f"data_dir={tmp_path}/elsewhere"]
    done = run(prepared, tmp_path / "run", *TWO_STEPS, processes=2, rank_1=other)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "error: rank 1 on " in line and "no vocabulary at" in line


def test_a_process_of_an_earlier_start_is_not_named(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    killed = {"host": "there", "pid": 7, "step": 46, "at": "", "beats": 7}
    (tmp_path / "ranks/rank-00000").write_text(json.dumps(killed))
    (tmp_path / ".bert-pretrain").touch()
    (tmp_path / "config.yaml.tmp").mkdir()  # by which the main process fails before its watch
    done = run(prepared, tmp_path, *TWO_STEPS, processes=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "config.yaml.tmp cannot be read or written" in line


def test_a_run_that_is_asked_for_no_gpu_takes_none(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert trains_on_gpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # by accelerate launch --cpu
    assert not trains_on_gpu()


@pytest.mark.parametrize("lacks", ["a C compiler", "Python.h"])
def test_a_machine_that_cannot_compile_for_its_gpu_is_told_before_anything_is_written(
    prepared: Path, tmp_path: Path, monkeypatch, lacks: str
) -> None:
    """Triton would end in a traceback, in the first step."""
    for name in ("CC", "CPATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    made = {"a C compiler": "bin/gcc", "Python.h": "include/Python.h"}
    for name, path in made.items():
        if name != lacks:
            (tmp_path / path).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path / "include"))
    monkeypatch.setattr("pretrain.processes.trains_on_gpu", lambda: True)
    options = ("train.compile=true", "train.precision=fp32")
    with pytest.raises(UserError, match=f"torch.compile needs [^ ]*{lacks}, which .*compile=false"):
        train_here(prepared, tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()
    (tmp_path / made[lacks]).touch(mode=0o755)
    check_compiler()


@pytest.mark.parametrize("plug_in", ["DEEPSPEED", "MEGATRON_LM"])
def test_plug_ins_that_wrap_the_model_in_their_own_way_are_refused(
    plug_in: str, prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{plug_in}", "true")
    with pytest.raises(UserError, match=f"asks for {plug_in.lower()}, which is not supported"):
        train_here(prepared, tmp_path / "run", *TWO_STEPS)
    assert not (tmp_path / "run").exists()


def test_a_number_of_processes_that_no_launcher_has_set_is_refused(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    lacks = "WORLD_SIZE is 2, but not set are LOCAL_RANK, MASTER_ADDR, MASTER_PORT; launch with"
    with pytest.raises(UserError, match=lacks):
        train_here(prepared, tmp_path / "run", *TWO_STEPS)
    for unlikely in ("two", "0", ""):
        monkeypatch.setenv("WORLD_SIZE", unlikely)
        with pytest.raises(UserError, match=f"WORLD_SIZE is '{unlikely}', not a number of proc"):
            train_here(prepared, tmp_path / "run", *TWO_STEPS)
    assert not (tmp_path / "run").exists()


def test_accelerate_does_not_divide_the_gradient(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


def test_runs_of_several_precisions_can_follow_each_other_in_a_process(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    for precision in ("bf16", "fp32"):
        train_here(prepared, tmp_path / precision, f"train.precision={precision}")
    assert_same_run(tmp_path / "fp32", straight)
    cards = [(tmp_path / name / "export/README.md").read_text() for name in ("bf16", "fp32")]
    assert ["bfloat16 autocast" in card for card in cards] == [True, False]


def test_the_config_of_a_run_that_was_moved_begins_no_new_run(tmp_path, monkeypatch) -> None:
    moved, old = tmp_path / "new", tmp_path / "old"
    (moved / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"was {old}; add run_dir={moved} to resume it"):
        main.check_moved(moved / "config.yaml", old)
    main.check_moved(tmp_path / "config.yaml", old)
    monkeypatch.chdir(moved)
    main.check_moved(Path("config.yaml"), moved)
    with pytest.raises(UserError, match=r"add run_dir=\. to resume"):
        main.check_moved(Path("config.yaml"), Path("old"))
