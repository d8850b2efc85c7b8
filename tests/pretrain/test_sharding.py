"""FSDP2 is DDP with less memory: the same losses, checkpoints that do not tell, and clipping."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT, metrics, newest, run, train_here

from data_pipeline.common.errors import UserError
from pretrain.sharding import asks_for_shards, clip_gradients

SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def assert_near(a: Path, b: Path) -> None:
    """Losses of a whole run within 1e-5, weights within 1e-4: sums in another order."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one.keys() == two.keys()
        assert all(abs(one[name] - two[name]) < 1e-5 * max(1, abs(one[name])) for name in one)
    first, second = newest(a), newest(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def in_shards(prepared: Path, run_dir: Path, processes: int, *options: str) -> None:
    done = run(prepared, run_dir, *options, processes=processes, **SHARDS)
    assert done.returncode == 0, done.stderr


def half_of(run_dir: Path, copy: Path) -> Path:
    """A copy of a run of 12 steps that stopped after 6."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints/step-00000012")
    return copy


def test_a_run_in_shards_is_that_of_one_process_which_can_go_on_with_it(
    prepared: Path, tmp_path: Path
) -> None:
    options = ("train.micro_batch_size=4", "train.optimizer=lamb", "train.save_every=6")
    train_here(prepared, tmp_path / "one", *options)
    in_shards(prepared, tmp_path / "four", 4, *options)
    assert_near(tmp_path / "one", tmp_path / "four")
    assert (tmp_path / "four/export/model.safetensors").exists()
    train_here(prepared, half_of(tmp_path / "four", tmp_path / "then one"), *options)
    assert_near(tmp_path / "one", tmp_path / "then one")


def test_a_run_of_one_process_goes_on_in_shards(prepared: Path, tmp_path: Path) -> None:
    # eleven batches to evaluate, which two processes do not divide
    options = ("train.micro_batch_size=4", "train.save_every=6", "train.eval_examples=44")
    train_here(prepared, tmp_path / "one", *options)
    in_shards(prepared, half_of(tmp_path / "one", tmp_path / "then two"), 2, *options)
    assert_near(tmp_path / "one", tmp_path / "then two")


def test_the_launch_file_asks_for_version_2(monkeypatch) -> None:
    settings = yaml.safe_load((ROOT / "configs/accelerate/fsdp_8.yaml").read_text())
    assert settings["distributed_type"] == "FSDP" and settings["fsdp_config"]["fsdp_version"] == 2
    assert not asks_for_shards()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="not version 2"):
        asks_for_shards()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asks_for_shards()


@pytest.mark.parametrize("max_norm", [0.5, 1e3, float("inf")])
def test_clipping_is_torchs(max_norm: float) -> None:
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(5, n)) for n in (3, 1, 7)] for _ in "ab")
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    unused = torch.nn.Parameter(torch.zeros(2))
    norm = clip_gradients([*ours, unused], max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
