"""Checkpoints that are damaged, unreadable or all gone, and those that are kept."""

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_same_run, contents, fork, metrics, newest, run, train_here
from safetensors.torch import load_file, save_file

import pretrain.checkpoint
import pretrain.train
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import atomic_folder, hash_file
from data_pipeline.config_file import load_config
from pretrain.checkpoint import (
    list_checkpoints,
    load_optimizers,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from pretrain.config import Config
from pretrain.fingerprint import build_fingerprint
from pretrain.optim import learning_rate
from pretrain.run_folder import find_start
from pretrain.tracking import Tracker


@pytest.fixture
def run_dir(straight: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, with checkpoints of steps 8 and 12."""
    return shutil.copytree(straight, tmp_path / "run")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_all(run_dir: Path) -> None:
    damage(run_dir / "checkpoints/step-00000012/model.safetensors")
    (run_dir / "checkpoints/step-00000008/optimizer.safetensors").unlink()


def without_locks(run_dir: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(run_dir).items() if name != "lock"}


# ------------------------------------------------------------------------------ writing


def test_steps_go_on_while_a_checkpoint_is_written_and_older_ones_go_after_it(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch
) -> None:
    two_steps_later, seen, real = threading.Event(), [], pretrain.checkpoint.save_file

    def save_late(tensors: dict, path: Path) -> None:
        assert "step-00000008" not in str(path) or two_steps_later.wait(60)
        real(tensors, path)

    def rate(step: int, *others) -> float:
        if step == 10:
            two_steps_later.set()
        return learning_rate(step, *others)

    def note(path: Path) -> None:
        seen.append((path.name, [p.name[-2:] for p in list_checkpoints(tmp_path / "checkpoints")]))

    monkeypatch.setattr("pretrain.checkpoint.save_file", save_late)
    monkeypatch.setattr("pretrain.train.learning_rate", rate)
    monkeypatch.setattr("pretrain.checkpoint.sync", note)
    train_here(prepared, tmp_path, "train.save_every=4")
    assert_same_run(tmp_path, straight)
    written = Path("checkpoints/step-00000008/model.safetensors")
    assert (tmp_path / written).read_bytes() == (straight / written).read_bytes()
    assert [names for name, names in seen if name == "step-00000008.tmp"] == [["04"]]
    renamed = [names for name, names in seen if name == "checkpoints"]
    assert renamed == [["04"], ["04", "08"], ["04", "08", "12"]]
    assert [p.name[-2:] for p in list_checkpoints(tmp_path / "checkpoints")] == ["08", "12"]


def test_a_save_slower_than_the_launcher_waits_is_told_once(
    prepared: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    real = pretrain.checkpoint.save_file
    monkeypatch.setattr("pretrain.checkpoint.save_file", lambda *a: (time.sleep(0.2), real(*a)))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for patience, times in (("30", 0), ("0.3", 1)):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", patience)
        train_here(prepared, tmp_path / patience, "train.save_every=4")
        out = "".join(capfd.readouterr())
        assert out.count("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=") == times
    assert "kills the run 0.3 s after a signal" in out
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # nobody kills a run without a launcher
    train_here(prepared, tmp_path / "alone", "train.save_every=4")
    assert "TORCH_ELASTIC" not in "".join(capfd.readouterr())


def test_a_checkpoint_that_cannot_be_written_stops_the_run_soon(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    failed, steps = threading.Event(), []

    def fail(*_) -> None:
        failed.set()
        raise OSError("disk full")

    def rate(step: int, *others) -> float:
        steps.append(step)
        assert step < 4 or failed.wait(60)
        return learning_rate(step, *others)

    monkeypatch.setattr("pretrain.checkpoint.save_file", fail)
    monkeypatch.setattr("pretrain.train.learning_rate", rate)
    with pytest.raises(UserError, match="no checkpoint at .*step-00000004: disk full"):
        train_here(prepared, tmp_path, "train.save_every=4")
    assert 4 in steps and steps[-1] < 7
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_without_a_sound_checkpoint_stops_and_changes_nothing(
    prepared: Path, run_dir: Path, processes: int
) -> None:
    damage_all(run_dir)
    before = without_locks(run_dir)
    options = ("train.micro_batch_size=8",)
    for _ in "ab":  # the second start does not take what the first has left for a new run
        done = run(prepared, run_dir, *options, processes=processes)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
        assert "step-00000012 (model.safetensors is not what was written)" in line
        assert "step-00000008 (optimizer.safetensors is missing)" in line
        assert "train.restart=true" in line and "Traceback" not in done.stderr
    assert without_locks(run_dir) == before


@pytest.mark.parametrize(
    "kept, told", [("export", "the export of a run"), ("metrics.jsonl", "the record of 12 steps")]
)
def test_a_run_whose_checkpoints_are_gone_stops_and_changes_nothing(
    prepared: Path, straight: Path, run_dir: Path, kept: str, told: str
) -> None:
    """As of a disk that is not mounted, or a copy that left them out."""
    for name in {"checkpoints", "export", "metrics.jsonl"} - {kept}:
        path = run_dir / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    before = without_locks(run_dir)
    for prepare_folder in (lambda: None, (run_dir / "checkpoints").mkdir):  # empty: no better
        prepare_folder()
        with pytest.raises(UserError, match=f"holds {told}, but no checkpoint"):
            train_here(prepared, run_dir)
        assert without_locks(run_dir) == before
    train_here(prepared, run_dir, "train.restart=true")
    assert_same_run(run_dir, straight)
    assert (run_dir / "before-1" / kept).exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    prepared: Path, straight: Path, run_dir: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    shutil.rmtree(run_dir / "export")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 8]  # a checkpoint every 4
    assert json.loads(kept[-1])["step"] == 8
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    train_here(prepared, run_dir)
    assert_same_run(run_dir, straight)


@pytest.mark.parametrize("left", ["step-00000012.corrupt", "step-00000012-of-mine"])
def test_what_was_set_aside_counts_as_a_run_that_was(
    prepared: Path, run_dir: Path, left: str
) -> None:
    shutil.rmtree(run_dir / "checkpoints/step-00000008")
    (run_dir / "checkpoints/step-00000012").rename(run_dir / "checkpoints" / left)
    with pytest.raises(UserError, match=f"is intact: {left};"):
        train_here(prepared, run_dir)


def test_a_link_to_a_checkpoint_is_not_passed_over(
    prepared: Path, run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "checkpoints").rename(tmp_path / "elsewhere")
    (run_dir / "checkpoints").mkdir()
    link = run_dir / "checkpoints/step-00000012"
    link.symlink_to(tmp_path / "elsewhere/step-00000012")
    with pytest.raises(UserError, match="is intact: step-00000012;"):
        train_here(prepared, run_dir)


def test_a_link_to_a_disk_that_is_not_there_stops_the_run_and_changes_nothing(
    prepared: Path, run_dir: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").symlink_to(tmp_path / "scratch")
    before = without_locks(run_dir)
    with pytest.raises(UserError, match="is a link to .* which does not exist"):
        train_here(prepared, run_dir)
    assert without_locks(run_dir) == before


def write_again(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint, and the hash in its manifest, as somebody might."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = hash_file(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        {"running_sums": [[1.0]]},
        {"part_sizes": [{"a": "b"}]},
        {"part_sizes": [["a"]]},
        {"monitor": {"said": 3}},
        {"monitor": {"losses": "x"}},
        {"monitor": {"went_back_to": "x"}},
        {"fingerprint": {"schema": 3, "vocab_sha256": "", "data_sha256": "", "phases": []}},
    ],
    ids=str,
)
def test_a_state_of_another_shape_is_one_line_although_its_hash_fits(
    prepared: Path, run_dir: Path, change: dict
) -> None:
    for checkpoint in list_checkpoints(run_dir / "checkpoints"):
        state = json.loads((checkpoint / "state.json").read_text()) | change
        write_again(checkpoint, "state.json", json.dumps(state).encode())
    with pytest.raises(UserError, match="checkpoint"):
        train_here(prepared, run_dir, "train.max_steps=14", "train.extend=true")


def test_moments_of_another_shape_are_one_line_and_nothing_is_written_beyond_them(
    prepared: Path, straight: Path, run_dir: Path, tmp_path: Path
) -> None:
    def shorten(tensors: dict, name: str) -> None:
        tensors[name] = torch.zeros(3)

    def drop(tensors: dict, name: str) -> None:
        del tensors[name]

    def round_down(tensors: dict, name: str) -> None:
        tensors[name] = tensors[name].long()

    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    of_straight = newest_checkpoint(straight / "checkpoints")
    sound = load_file(of_straight / "optimizer.safetensors")  # mapped, so not that to be changed
    for change in (shorten, drop, round_down):
        tensors = dict(sound)
        change(tensors, "embeddings.word.weight/exp_avg_sq")
        save_file(tensors, tmp_path / "changed")
        data = (tmp_path / "changed").read_bytes()
        write_again(checkpoint, "optimizer.safetensors", data)
        with pytest.raises(UserError, match="of embeddings.word.weight that do not fit AdamW"):
            train_here(prepared, run_dir, "train.max_steps=14", "train.extend=true")


def test_moments_that_a_checkpoint_lacks_are_dropped(tmp_path: Path) -> None:
    """Such as those of pair heads, after a return to a checkpoint from before the pairs."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    optimizer.step()
    folder = save_checkpoint(tmp_path, model, [optimizer], {"step": 1}, keep=1).result()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert list(optimizer.state) == [model.weight, model.bias]
    load_optimizers(folder, model, [optimizer])
    assert list(optimizer.state) == [model.weight]
    assert optimizer.state[model.weight]["step"] == 1


def test_a_run_whose_folder_is_moved_away_says_so_at_the_next_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    with pytest.raises(UserError, match="run was moved or removed; put it back, and run the same"):
        save_checkpoint(folder, torch.nn.Linear(2, 2), [], {"step": 1}, keep=1).result()
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_nine_digits_come_after_those_of_eight(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 99_000_000):
        (tmp_path / f"step-{step:08d}").mkdir()
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-99000000", "step-99999999", "step-100000000"]


def test_a_checkpoint_that_cannot_be_read_stops_the_run_and_stays(
    prepared: Path, run_dir: Path, monkeypatch
) -> None:
    """A link to itself is of no user that may read it, not even of root."""
    path = run_dir / "checkpoints/step-00000012/model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.symlink_to(path)
    names = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    with pytest.raises(
        UserError, match=f"{path} cannot be read: Too many levels of symbolic links"
    ):
        train_here(prepared, run_dir)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    path.unlink()
    path.write_bytes(data)
    monkeypatch.setattr("pretrain.checkpoint.hash_file", fail)
    with pytest.raises(UserError, match="step-00000012 cannot be read: Input/output error"):
        train_here(prepared, run_dir)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == names


# ------------------------------------------------------------------------------ restart


def test_a_restart_keeps_the_earlier_run_and_the_same_command_goes_on(
    prepared: Path, straight: Path, run_dir: Path, capsys
) -> None:
    damage_all(run_dir)
    (run_dir / "metrics.jsonl.damaged").write_text("torn")
    before = without_locks(run_dir)
    train_here(prepared, run_dir, "train.restart=true")
    assert f"the earlier run is now in {run_dir / 'before-1'}" in capsys.readouterr().out
    assert without_locks(run_dir / "before-1").items() <= before.items()
    assert len(before) - len(without_locks(run_dir / "before-1")) == 1  # the marker of the folder
    assert_same_run(run_dir, straight)
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    train_here(prepared, run_dir, "train.restart=true")
    assert_same_run(run_dir, straight)
    assert not (run_dir / "before-2").exists()


def test_a_sound_run_can_be_restarted_with_other_settings_too(
    prepared: Path, run_dir: Path
) -> None:
    train_here(prepared, run_dir, "train.restart=true", "seed=5", "train.max_steps=4")
    assert read_state(newest_checkpoint(run_dir / "checkpoints"))["step"] == 4
    assert [line["step"] for line in metrics(run_dir)][-1] == 4
    assert newest(run_dir / "before-1")
    train_here(prepared, run_dir, "train.restart=true", "train.max_steps=4")
    assert newest(run_dir / "before-2")


@pytest.mark.parametrize(
    "change", [{}, {"train.sampled_softmax": None}, {"train.precision": "bf16"}]
)
def test_a_restart_that_began_the_run_goes_on_by_another_version_and_machine(
    prepared: Path, tmp_path: Path, change: dict
) -> None:
    """None: a setting that an earlier version did not know."""
    config = load_config(Config, str(prepared / "config.yaml"))
    fingerprint = build_fingerprint(config, "v", "d", "fp32")
    saved = {n: v for n, v in (fingerprint | change).items() if v is not None}
    state = {"step": 900, "running_sums": [], "evaluation": {}, "part_sizes": []}
    state |= {"fingerprint": saved, "restarted": True}
    save_checkpoint(tmp_path / "checkpoints", torch.nn.Linear(2, 2), [], state, 2).result()
    assert find_start(tmp_path, fingerprint, True).name == "step-00000900"


def test_no_file_of_a_checkpoint_stays_mapped(prepared: Path, run_dir: Path, monkeypatch) -> None:
    """Its space would stay taken when it is removed, and NFS would not let it go."""
    seen, export = [], pretrain.train.export_checkpoint

    def look(*arguments, **options) -> None:
        seen.append(Path("/proc/self/maps").read_text())
        export(*arguments, **options)

    monkeypatch.setattr(pretrain.train, "export_checkpoint", look)
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    train_here(prepared, run_dir)
    assert seen and "optimizer.safetensors" not in seen[0]


def test_a_restart_of_nothing_is_a_start(prepared: Path, straight: Path, tmp_path: Path) -> None:
    train_here(prepared, tmp_path, "train.restart=true")
    assert_same_run(tmp_path, straight)
    assert not (tmp_path / "before-1").exists()


# ------------------------------------------------------------------------------ what is kept


def test_every_nth_checkpoint_is_kept_for_good(prepared: Path, tmp_path: Path) -> None:
    options = ("train.save_every=1", "train.keep_every=5", "train.keep_checkpoints=2")
    train_here(prepared, tmp_path, *options)
    kept = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept == [5, 10, 11, 12]


# ------------------------------------------------------------------------------ export


def export(run_dir: Path, out: Path):
    return fork(["-m", "pretrain.export", str(run_dir), str(out)])


def test_an_export_takes_the_newest_sound_checkpoint_and_changes_none(
    run_dir: Path, tmp_path: Path
) -> None:
    damage(run_dir / "checkpoints/step-00000012/state.json")
    before = contents(run_dir)
    done = export(run_dir, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "step-00000012 is damaged (state.json is not what was written)" in done.stdout
    assert "exported " in done.stdout and "step-00000008 to " in done.stdout
    assert contents(run_dir) == before
    damage_all(run_dir)
    before = contents(run_dir)
    done = export(run_dir, tmp_path / "none")
    assert done.returncode == 2
    assert "has no intact checkpoint; put an intact copy of one back" in done.stderr
    assert contents(run_dir) == before


def test_files_of_a_run_can_be_read_by_those_whom_the_umask_lets(straight: Path) -> None:
    """safetensors writes its files for their owner alone."""
    weights = [*straight.rglob("*.safetensors")]
    wanted = (straight / "export/config.json").stat().st_mode
    assert len(weights) > 2 and {path.stat().st_mode for path in weights} == {wanted}


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_finite_are_not_saved(tmp_path: Path, name: str) -> None:
    """From the next step on they would be in the weights, and in every checkpoint that is kept."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight][name][0, 0] = torch.nan
    with pytest.raises(UserError, match=f"weight/{name} is not finite at step 3"):
        save_checkpoint(tmp_path, model, [optimizer], {"step": 3}, keep=1).result()
    assert list(tmp_path.iterdir()) == []


def test_what_a_power_failure_must_not_take_is_flushed_to_the_disk(
    tmp_path: Path, monkeypatch
) -> None:
    """The files of a checkpoint before its folder is renamed, and the name after it; the files of
    a store or an export; the record of a run."""
    flushed = set()  # inodes, which a file keeps when it is renamed

    def note(file) -> None:
        flushed.add(os.fstat(file if isinstance(file, int) else file.fileno()).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    model = torch.nn.Linear(2, 2)
    final = save_checkpoint(tmp_path / "checkpoints", model, [], {"step": 3}, keep=1).result()
    with atomic_folder(tmp_path / "store") as folder:
        (folder / "tokens.npy").write_bytes(b"1")
    Tracker(tmp_path, 0, False).close()
    wanted = [*final.iterdir(), final, final.parent, tmp_path / "store/tokens.npy"]
    wanted.append(tmp_path / "metrics.jsonl")
    assert len(wanted) == 8
    assert [path.name for path in wanted if path.stat().st_ino not in flushed] == []
