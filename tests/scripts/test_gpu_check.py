"""The check of a GPU machine runs on a CPU, needs nothing that prepares data, and says what is
wrong."""

import json

import gpu_check
import pytest
import torch
from gpu_check import Check, check_attention
from helpers import ROOT, fork

from data_pipeline.config_file import load_config
from pretrain.config import Config


def run(tmp_path, *arguments: object, **env: str):
    words = [str(ROOT / "scripts/gpu_check.py"), "--out", str(tmp_path / "found.json")]
    done = fork([*words, "--device", "cpu", *map(str, arguments)], **env)
    return done, json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
def test_all_stages_pass_without_what_prepares_data(prepared, tmp_path) -> None:
    for package in ("sentencex", "datasets"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not on a GPU machine')\n")
    done, found = run(tmp_path, "--data", prepared / "data", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = [row["name"] for row in found if row["name"].endswith(": seconds")]
    assert seconds == [f"{stage}: seconds" for stage in gpu_check.STAGES]
    right = [row["name"] for row in found if row["verdict"] == "right"]
    assert len(right) == 6 + 3 + 1 + 4 and len(found) > len(right)
    assert done.stdout.count(" right") == len(right)


def test_a_checkpoint_is_judged_by_the_interval_of_the_recipe() -> None:
    recipe = load_config(Config, str(ROOT / "configs/bert_base.yaml"))
    assert gpu_check.SAVE_EVERY == recipe.train.save_every


def test_a_stage_that_fails_is_wrong_and_the_others_run(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    done, found = run(tmp_path, "--data", tmp_path / "data", "--only", "base", "trainer")
    assert done.returncode == 1 and "no vocabulary" in done.stderr
    verdicts = {row["name"]: row["verdict"] for row in found}
    assert verdicts["base"] == "WRONG" and verdicts["trainer: seconds"] == ""


def test_attention_that_is_a_little_off_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "DRAWS", 2)
    monkeypatch.setattr(gpu_check, "attend", lambda *a: 1.05 * gpu_check.attend_padded(*a))
    check = Check(torch.device("cpu"), tmp_path)
    check_attention(check)
    wrong = [row["name"] for row in check.rows if row["verdict"] == "WRONG"]
    assert wrong and all(name.startswith(("attend, ", "dropout")) for name in wrong)
    assert not check.is_gpu and check.is_wrong


@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_a_kernel_leaves_unwritten_are_found(tmp_path, monkeypatch, which: int) -> None:
    """In the output, or in the gradient: NaN is no maximum."""

    def spoil(*arguments):
        found = list(with_gradient(*arguments))
        found[which] = found[which].index_fill(0, torch.tensor([3]), torch.nan)
        return tuple(found)

    with_gradient = gpu_check.with_gradient
    monkeypatch.setattr(gpu_check, "DRAWS", 2)
    monkeypatch.setattr(
        gpu_check,
        "with_gradient",
        lambda path, *a, **o: (
            spoil(path, *a) if path is gpu_check.attend_padded else with_gradient(path, *a, **o)
        ),
    )
    check = Check(torch.device("cpu"), tmp_path)
    check_attention(check)
    wrong = {row["name"] for row in check.rows if row["verdict"] == "WRONG"}
    assert {name.partition(":")[0] for name in wrong} >= {
        "attend_padded, float32",
        "attend_padded, bfloat16",
    }


@pytest.mark.parametrize("factor", [0.7, 1.3, 1.0])
def test_a_gradient_norm_of_one_shard_alone_is_found(tmp_path, monkeypatch, factor: float) -> None:
    weights = {3: {"w": torch.zeros(2)}, 6: {"w": torch.ones(2)}}
    monkeypatch.setattr(gpu_check, "STEPS", 6)
    monkeypatch.setattr(gpu_check, "train", lambda *_: None)
    monkeypatch.setattr(gpu_check, "read_weights", lambda _, step: weights[step])
    norms = {"one": [1.0, 1.2], "DDP": [1.0, 1.2], "FSDP2": [factor, 1.2]}
    monkeypatch.setattr(gpu_check, "read_norms", lambda folder: norms[folder.name])
    check = Check(torch.device("cpu"), tmp_path)
    gpu_check.check_processes(check)
    wrong = [row["name"] for row in check.rows if row["verdict"] == "WRONG"]
    of_norm = "FSDP2, 2 processes beside one: difference of the gradient norm"
    assert wrong == ([] if factor == 1 else [of_norm])


def test_a_machine_without_a_card_is_told_so(prepared, tmp_path) -> None:
    words = [str(ROOT / "scripts/gpu_check.py"), "--data", str(prepared / "data")]
    done = fork([*words, "--out", str(tmp_path / "found.json")], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "torch finds no GPU here; --device cpu" in done.stderr


def test_full_sequences_have_the_masks_of_those_they_repeat(prepared) -> None:
    task = gpu_check.make_task(prepared / "data", "tiny", 64, "cpu", is_full=True, count=1)
    (batch,) = task.batches
    (source,) = gpu_check.make_task(prepared / "data", "tiny", 64, "cpu", count=1).batches
    assert set(batch.cu_seqlens.diff().tolist()) == {64}
    assert len(batch.cu_seqlens) == len(source.cu_seqlens)
    first = batch.masked_positions < len(source.input_ids)
    assert torch.equal(batch.masked_positions[first], source.masked_positions)
    assert torch.equal(batch.masked_labels[: first.sum()], source.masked_labels)
    assert len(batch.masked_labels) > first.sum() and not first.all()
