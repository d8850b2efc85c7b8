"""The loop: one gradient however a step is divided, exact resume, refusals, what a run leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers import (
    NO_DROPOUT,
    ROOT,
    TWO_STEPS,
    assert_same_run,
    command,
    fork,
    metrics,
    newest,
    run,
    train_here,
)
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForPreTraining

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling import batch_source, token_store
from data_pipeline.sampling.batch_source import BatchSource
from pretrain import agreement
from pretrain.checkpoint import list_checkpoints, newest_checkpoint, save_checkpoint
from pretrain.config import Config, ModelConfig
from pretrain.models.attention import attend_padded
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import objectives_of
from pretrain.tracking import read_metrics
from pretrain.train import count_labels

# ------------------------------------------------------------------------------ one gradient


def test_a_step_has_one_gradient_however_it_is_divided(prepared: Path, tmp_path: Path) -> None:
    """1 x 1, 1 x 4, 2 x 1 and 2 x 4; after one step Adam's first moment is the gradient."""
    one_step = ("train.max_steps=1", "train.warmup_steps=0", "train.max_grad_norm=0", *NO_DROPOUT)
    gradients = []
    for processes, micro_batch in ((1, 16), (1, 4), (2, 8), (2, 2)):
        run_dir = tmp_path / f"{processes}x{micro_batch}"
        done = run(
            prepared,
            run_dir,
            *one_step,
            f"train.micro_batch_size={micro_batch}",
            processes=processes,
        )
        assert done.returncode == 0, done.stderr
        moments = {k: v for k, v in newest(run_dir).items() if k.endswith("/exp_avg")}
        gradients.append(torch.cat([moments[name].flatten() for name in sorted(moments)]).double())
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


def test_two_and_four_processes_draw_what_one_would(prepared: Path, tmp_path: Path) -> None:
    """With dropout, and four micro-batches a step in all: losses of the whole run within 1e-5."""
    runs = []
    for processes in (1, 2, 4):
        run_dir = tmp_path / str(processes)
        done = run(prepared, run_dir, "train.micro_batch_size=4", processes=processes)
        assert done.returncode == 0, done.stderr
        runs.append(metrics(run_dir))
    for one, *others in zip(*runs, strict=True):
        for other in others:
            assert one.keys() == other.keys()
            assert all(abs(one[k] - other[k]) < 1e-5 * max(1, abs(one[k])) for k in one)
    assert "4 x cpu" in done.stdout


def test_a_step_without_labels_is_divided_by_one(store) -> None:
    batch = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 2)
    batch.masked_labels, batch.pairs = batch.masked_labels[:0], 0
    counts = count_labels(objectives_of("nsp"), [batch, batch], Accelerator(cpu=True))
    assert counts.tolist() == [1, 1]


def test_a_run_learns(prepared: Path, tmp_path: Path) -> None:
    size = "model.hidden_size=64", "train.global_batch_size=32", "train.micro_batch_size=32"
    rate = "train.optimizer=muon", "train.learning_rate=1e-2", *NO_DROPOUT
    steps = "train.max_steps=300", "train.save_every=300", "train.eval_every=300"
    data = "data.max_seq_length=32", "data.masked_lm_prob=0.3"
    train_here(prepared, tmp_path, *size, *rate, *steps, *data)
    last = metrics(tmp_path)[-1]
    assert last["eval/mlm_loss"] < last["eval/unigram_entropy"] - 0.4


def test_gradient_checkpointing_gives_the_same_bits_and_keeps_no_insides_of_layers(store) -> None:
    """With dropout, whose draws the second computation has to repeat."""
    model = PretrainingModel(ModelConfig("bert", 64, 3, 2, max_position_embeddings=64), 1024)
    batch = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 8)
    kept: list[weakref.ref] = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda _, inputs, out: kept.append(weakref.ref(out)))
    found = []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        losses = model(batch)[:, 0]
        alive = sum(ref() is not None for ref in kept)
        losses.sum().backward()
        found.append((losses.detach(), [p.grad for p in model.parameters()], alive, len(kept)))
        model.zero_grad()
        kept.clear()
    (losses, grads, alive, computed), (losses_2, grads_2, alive_2, computed_2) = found
    assert torch.equal(losses, losses_2)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_2, strict=True))
    assert (alive, alive_2, computed, computed_2) == (3, 0, 3, 6)


def test_a_compiled_run_is_the_plain_one_and_records_its_graphs_which_do_not_grow(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(PretrainingModel.compile_layers, "__defaults__", ("eager",))
    torch._dynamo.reset()
    settings = ("train.compile=true", "train.log_every=1", "train.eval_every=100")
    train_here(prepared, tmp_path, *settings)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    graphs = [line["perf/compiled_graphs"] for line in lines if "train/loss" in line]
    assert graphs[0] > 0 and len(graphs) > 4 and len(set(graphs)) == 1
    plain, found = newest(straight), newest(tmp_path)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-3, atol=1e-4)


class Waits(TorchFunctionMode):
    """Count the calls for which a host waits until a GPU has finished all that is queued.

    `numpy` is none of them: it fails for a tensor on a GPU.
    """

    READS = ("item", "tolist", "cpu", "nonzero", "new_tensor")
    READS += ("__bool__", "__float__", "__int__", "__index__")

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        name = getattr(function, "__name__", "")
        if name in self.READS or name in ("tensor", "as_tensor") and "device" in (options or ()):
            self.calls.append(name)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_the_host_waits_for_a_gpu_once_a_step_however_many_micro_batches(
    prepared: Path, tmp_path: Path, monkeypatch, optimizer: str
) -> None:
    monkeypatch.setattr("pretrain.models.layers.attend", attend_padded)  # as on a GPU
    monkeypatch.setattr("pretrain.models.bert.TOKEN_MULTIPLE", 1)
    monkeypatch.setattr("pretrain.models.cpu.Dropout.forward", torch.nn.Dropout.forward)
    monkeypatch.setattr("pretrain.optim.skips_there", lambda *_: optimizer == "adamw")
    never = (
        f"train.optimizer={optimizer}",
        "train.log_every=100",
        "train.eval_every=100",
        "train.save_every=100",
    )
    found, read = [], "pretrain.train.read_step"
    for size in (16, 4):
        waits, steps = Waits(), []

        def read_step(*arguments, steps=steps, waits=waits):
            steps.append(len(waits.calls))
            return agreement.read_step(*arguments)

        monkeypatch.setattr(read, read_step)
        with waits:
            train_here(prepared, tmp_path / str(size), *never, f"train.micro_batch_size={size}")
        found.append([waits.calls[a:b] for a, b in pairwise(steps)])
    # the norm and the loss are read on the CPU, which `fetch` has waited for
    once = ["tolist", "item"]
    if optimizer != "adamw":  # the host looks at the norm before the next update
        once += ["__bool__"]
    assert found[0] == found[1] == [once] * 11


def test_a_run_may_go_on_with_gradient_checkpointing(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    train_here(prepared, tmp_path, "train.gradient_checkpointing=true")
    assert_same_run(tmp_path, straight)


# ------------------------------------------------------------------------------ resume


def test_a_killed_run_goes_on_to_the_same_end(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, *command(prepared, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not (tmp_path / "checkpoints/step-00000004").exists():
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert "step-00000012" not in steps
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    prepared: Path, straight: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints/step-00000012/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (tmp_path / "checkpoints/step-00000012.corrupt").touch()  # of a checkpoint that was a file
    train_here(prepared, tmp_path)
    assert "step-00000012.corrupt" in capsys.readouterr().out
    assert_same_run(tmp_path, straight)


def test_a_run_that_goes_on_between_two_lines_of_its_log_counts_the_steps_before(
    prepared: Path, tmp_path: Path
) -> None:
    """Saved after step 8, which the line of step 9 counts with step 7."""
    options = ("train.log_every=3", "train.save_every=4")
    train_here(prepared, tmp_path / "a", *options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000012")
    train_here(prepared, tmp_path / "b", *options)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_run_that_goes_on_draws_none_of_the_pairs_that_it_has_passed(
    prepared: Path, store, tmp_path: Path, monkeypatch
) -> None:
    """But those of the first epoch part, of which it looks for the longest sequence."""
    one_segment = "data.objective=none"  # which parts of any size can give
    drawn, draw_part = [], BatchSource.draw_part

    def note(source: BatchSource, number: int):
        if len(source.store) == len(store):  # of the training split
            drawn.append(number)
        return draw_part(source, number)

    monkeypatch.setattr(token_store, "PART_TOKENS", len(store) // 40)
    monkeypatch.setattr(batch_source, "BLOCK_TOKENS", 1)
    monkeypatch.setattr(BatchSource, "draw_part", note)
    train_here(prepared, tmp_path, one_segment)
    assert drawn[:3] == [0, 1, 2]
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    drawn.clear()
    train_here(prepared, tmp_path, one_segment)
    assert drawn == [0, 2]


def test_a_finished_run_only_exports_again(prepared: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "export")
    train_here(prepared, tmp_path)
    assert (tmp_path / "export/model.safetensors").exists()
    assert_same_run(tmp_path, straight)


def test_the_newest_checkpoints_are_kept(straight: Path) -> None:
    names = [path.name for path in list_checkpoints(straight / "checkpoints")]
    assert names == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_missing_or_short_file_makes_a_checkpoint_unsound(
    straight: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(straight / "checkpoints", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000012" / name
    path.write_bytes(path.read_bytes()[:10])
    assert newest_checkpoint(tmp_path).name == "step-00000008"
    (tmp_path / "step-00000008" / name).unlink()
    assert newest_checkpoint(tmp_path) is None


# Runs two tasks and returns the highest exit code, as srun does. Where $TIME_IS_UP names a file, it
# signals them once that is there, as the option --signal of sbatch does.
FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@" & done
while [ -n "$TIME_IS_UP" ] && [ ! -e "$TIME_IS_UP" ]; do sleep 0.1; done
[ -z "$TIME_IS_UP" ] || kill -USR1 $(jobs -p)
highest=0
for task in $(jobs -p); do
    wait "$task"
    code=$?
    (( code > highest )) && highest=$code
done
exit $highest
"""
FAKE_SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo localhost; fi
"""


def submit(prepared: Path, folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    """Run the SLURM script on two machines, both of them this one, with a process each."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": ROOT, "JOB_NODELIST": "here[1-2]", "JOB_ID": os.getpid()}
    slurm |= {"LOCALID": 0, "NTASKS": 2}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "scripts/pretrain.slurm", *command(prepared, folder / "run", *options)[2:]],
        cwd=ROOT,
        env=os.environ
        | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        | {"PATH": path, "OMP_NUM_THREADS": "1"}
        | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_slurm_script_trains_on_two_machines(prepared: Path, tmp_path: Path) -> None:
    done = submit(prepared, tmp_path, *TWO_STEPS)
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stdout and "requeued" not in done.stdout
    assert (tmp_path / "run/checkpoints/step-00000002").exists()


def test_the_slurm_script_saves_and_requeues_before_its_time_is_up(
    prepared: Path, tmp_path: Path
) -> None:
    options = ("train.max_steps=100000", "train.micro_batch_size=8", "train.save_every=100000")
    done = submit(prepared, tmp_path, *options, TIME_IS_UP=str(tmp_path / "run/metrics.jsonl"))
    assert done.returncode == 75, done.stderr
    assert "on SIGUSR1; the checkpoint is" in done.stderr
    assert done.stdout.splitlines()[-1] == f"requeued {os.getpid()}"
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1


def test_a_mistake_does_not_requeue_a_slurm_job(prepared: Path, tmp_path: Path) -> None:
    done = submit(prepared, tmp_path, "train.max_stepz=2")
    assert done.returncode == 2
    assert "did you mean" in done.stderr and "requeued" not in done.stdout


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.hidden_size=64", "model.hidden_size was 32, is 64"),
        ("seed=1", "seed was 0, is 1"),
        ("data.masked_lm_prob=0.2", "data.masked_lm_prob was 0.15, is 0.2"),
    ],
)
def test_the_run_folder_of_another_config_is_refused(
    prepared: Path, straight: Path, override: str, named: str
) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=named):
        train_here(prepared, straight, override)
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_shape_is_refused(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    from pretrain.checkpoint import load_model

    config = load_config(Config, str(prepared / "config.yaml"), ["model.hidden_size=64"])
    with pytest.raises(UserError, match="another shape"):
        load_model(
            newest_checkpoint(straight / "checkpoints"), PretrainingModel(config.model, 1024)
        )


def test_a_store_of_another_vocabulary_is_refused(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    vocab = tmp_path / "data/vocab/vocab.txt"
    vocab.write_text(vocab.read_text().replace("[unused0]", "unused"))
    pieces = vocab.read_text().splitlines()
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    vocab.write_text("\n".join(pieces) + "\n")
    with pytest.raises(UserError, match="a different vocabulary"):
        train_here(prepared, tmp_path / "run", f"data_dir={tmp_path / 'data'}")
    assert not (tmp_path / "run").exists()


def test_mistakes_end_in_one_line_and_exit_code_2(prepared: Path, tmp_path: Path) -> None:
    for overrides, named in (
        (["train.warmup_steps=12"], "not below the 12 steps"),
        (["train.max_stepz=5"], "did you mean train.max_steps?"),
        ([f"data_dir={tmp_path}/none"], "make one: python -m data_pipeline"),
    ):
        done = run(prepared, tmp_path / "run", *overrides)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
        assert named in done.stderr
        assert not (tmp_path / "run").exists()


def test_more_processes_than_sequences_are_refused(prepared: Path, tmp_path: Path) -> None:
    done = run(prepared, tmp_path / "run", "train.global_batch_size=1", processes=2)
    assert done.returncode != 0
    assert "train.global_batch_size 1 is too small for 2 processes; start at most 1" in done.stderr
    assert not (tmp_path / "run").exists()


def launch(processes: int, words: list[str], **env: str) -> subprocess.CompletedProcess:
    """Run a command by `accelerate launch --cpu`."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes"]
    return subprocess.run(
        [*launcher, str(processes), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | env,
    )


def test_an_address_of_the_shell_is_no_launcher_of_several(prepared: Path, tmp_path: Path) -> None:
    done = launch(1, command(prepared, tmp_path / "run"), MASTER_ADDR="login.cluster")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/export").is_dir()


def test_fewer_processes_than_asked_for_are_refused(prepared: Path, tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process, and says nothing."""
    done = launch(2, command(prepared, tmp_path / "run"))
    assert done.returncode != 0
    assert "asked for several processes but started one" in done.stderr
    assert not (tmp_path / "run").exists()


def test_two_jobs_cannot_use_one_run_folder(prepared: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *command(prepared, tmp_path, "train.max_steps=100000")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.02)
        with pytest.raises(UserError, match=f"in use by process {process.pid}"):
            train_here(prepared, tmp_path)
    finally:
        process.kill()
        process.wait()


def test_a_run_that_failed_can_be_started_again_in_the_same_process(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    """Where the error is kept, as a notebook does."""
    kept = []
    for place in ("pretrain.train.read_ahead", "pretrain.run_setup.build_optimizers"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError) as caught:
            patch.setattr(place, lambda *_: 1 / 0)
            train_here(prepared, tmp_path)
        kept.append(caught)
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_space_left_keeps_the_checkpoints_before(
    prepared: Path, straight: Path, tmp_path: Path, processes: int
) -> None:
    """The file size limit of the process makes the write itself fail, as a full disk does."""
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    limit = "import resource as r, runpy; r.setrlimit(r.RLIMIT_FSIZE, (200 << 10,) * 2); "
    limit += "runpy.run_module('pretrain', run_name='__main__')"
    options = ("train.micro_batch_size=8",)
    done = fork(*[["-c", limit, *command(prepared, tmp_path, *options)[2:]]] * processes)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "no checkpoint at" in line and "free space" in line
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


def test_a_disk_that_is_too_full_is_noticed_before_writing(tmp_path: Path, monkeypatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("pretrain.checkpoint.shutil.disk_usage", lambda path: full)
    with pytest.raises(UserError, match="0 MB free"):
        save_checkpoint(tmp_path, torch.nn.Linear(2, 2), [], {"step": 1}, keep=2).result()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ the record


def test_a_run_leaves_its_config_metrics_page_and_export(straight: Path) -> None:
    names = {path.name for path in straight.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "report.html", "checkpoints", "export"} <= names
    record = metrics(straight)
    assert [line["step"] for line in record if "train/loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in record if "eval/mlm_loss" in line] == [6, 12]
    last = record[-1]
    assert 4 < last["eval/unigram_entropy"] < 7 and 0.5 <= last["eval/nsp_majority"] < 0.65


def test_a_broken_last_line_of_metrics_is_taken_back(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "train/lo')
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)


DAMAGE = [
    b'{"step": 4, "train/lo',  # cut short
    b"\0" * 300,  # as a file system may leave after a power cut
    b'{"step": 4, "train/loss": 1.\xff}',
    b'{"stfp": 4, "train/loss": 1.5}',
    b'{"step": null, "train/loss": 1.5}',
    b"[4, 1.5]",
    b'{"step": 3, "fillings": [{"sentence": "a [MASK]", "masks": [1]}]}',
    b"",
]


def test_damaged_lines_of_metrics_are_kept_aside_and_those_after_them_stay(
    prepared: Path, straight: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in [first, *DAMAGE, *others]))
    assert read_metrics(path) == read_metrics(straight / "metrics.jsonl")
    train_here(prepared, tmp_path)
    assert_same_run(tmp_path, straight)
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == b"".join(line + b"\n" for line in DAMAGE)
    assert capsys.readouterr().out.count(f"8 damaged lines of {path} are now in {aside}") == 1
    train_here(prepared, tmp_path)
    assert "damaged lines" not in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["sop", "none"])
def test_the_other_objectives_train(prepared: Path, tmp_path: Path, objective: str) -> None:
    train_here(prepared, tmp_path, f"data.objective={objective}", "train.max_steps=4")
    assert ("eval/nsp_accuracy" in metrics(tmp_path)[-1]) == (objective == "sop")


def test_a_bag_of_words_trains_beside_the_others_and_is_part_of_the_fingerprint(
    prepared: Path, tmp_path: Path
) -> None:
    bag = ["train.max_steps=4", "train.bag_of_words_weight=0.5"]
    train_here(prepared, tmp_path, *bag)
    last = metrics(tmp_path)[-1]
    parts = last["eval/mlm_loss"] + last["eval/nsp_loss"] + 0.5 * last["eval/bag_loss"]
    assert last["eval/loss"] == pytest.approx(parts)
    assert list(AutoModelForPreTraining.from_pretrained(tmp_path / "export").cls._modules) == [
        "predictions",
        "seq_relationship",
    ]
    with pytest.raises(UserError, match="bag_of_words_weight was 0.5, is 0.0"):
        train_here(prepared, tmp_path, "train.max_steps=4")


@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_the_other_optimizers_train_and_resume(
    prepared: Path, tmp_path: Path, optimizer: str
) -> None:
    options = (f"train.optimizer={optimizer}", "train.learning_rate=5e-3")
    train_here(prepared, tmp_path / "a", *options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000012")
    train_here(prepared, tmp_path / "b", *options)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_store_that_cannot_give_pairs_is_refused_before_anything_is_written(
    prepared: Path, tmp_path: Path
) -> None:
    text = (prepared / "topics.txt").read_text().split("\n\n")[0]
    (tmp_path / "one.txt").write_text(text + "\n\n" + text.split("\n")[0] + "\n")
    files = (f"corpus.files={tmp_path}/one.txt", "corpus.held_out_fraction=0", "vocab.size=96")
    places = (f"data_dir={tmp_path}/data", "vocab.min_frequency=1")
    config = load_config(Config, str(prepared / "config.yaml"), [*files, *places])
    prepare(config, workers=1)
    with pytest.raises(UserError, match="from one document"):
        train_here(prepared, tmp_path / "run", *files, *places)
    assert not (tmp_path / "run").exists()


def test_the_gradient_of_an_objective_goes_with_its_weight(prepared: Path, tmp_path: Path) -> None:
    """After one step Adam's first moment is the gradient."""
    one_step = ("train.max_steps=1", "train.warmup_steps=0", "train.max_grad_norm=0", *NO_DROPOUT)
    moments = []
    for weight in (0, 1, 4):
        run_dir = tmp_path / str(weight)
        train_here(prepared, run_dir, *one_step, f"train.bag_of_words_weight={weight}")
        moments.append(newest(run_dir)["embeddings.word.weight/exp_avg"])
    without, once, four_times = moments
    bag = once - without
    assert bag.norm() > 0.01 * without.norm()
    torch.testing.assert_close(four_times - without, 4 * bag, rtol=1e-3, atol=1e-6)


def test_each_step_has_random_numbers_of_its_own_and_a_seed_changes_all_of_them(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """The sample of the softmax, dropout, the first weights and the text."""
    seen, forward = [], PretrainingModel.forward

    def note(model, batch):
        first = model.layers[0].up.weight.sum().item()
        ids = tuple(batch.input_ids.tolist())
        seen.append((model.sample_start, torch.initial_seed(), first, ids))
        return forward(model, batch)

    monkeypatch.setattr(PretrainingModel, "forward", note)
    monkeypatch.setattr("pretrain.train.preallocate_memory", lambda *_: None)
    options = ("train.max_steps=3", "train.warmup_steps=1", "train.sampled_softmax=100")
    for seed in (0, 1):
        train_here(prepared, tmp_path / str(seed), *options, f"seed={seed}")
    assert len(seen) == 6
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [6, 6, 6, 6]
