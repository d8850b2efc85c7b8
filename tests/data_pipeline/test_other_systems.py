"""Where Linux's own calls are missing, as on macOS with Apple silicon, everything still works."""

import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import fork

from data_pipeline.common.system import count_cpus, die_with_parent
from pretrain.models.cpu import cpu_supports, keep_freed_memory

# What a Mac lacks is taken away once everything is imported; then the journey from text to export.
MACOS = """
import ctypes, os, platform, sys
import accelerate, datasets, tokenizers, torch
import data_pipeline.build.prepare, pretrain.export, pretrain.train
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.common.errors import run_command
from pretrain.config import Config

class Library:  # libSystem: no prctl, no mallopt
    def __init__(self, name): pass
    def __getattr__(self, name): raise AttributeError(name)

def refuse(*_): raise AssertionError("a call that only Linux has")

ctypes.CDLL = Library
sys.platform, platform.machine = "darwin", lambda: "arm64"
sys.modules["transformers"] = None  # which would look for what a Mac has when it loads its parts
del os.sched_getaffinity
torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = refuse
if len(sys.argv) > 3:
    del torch.cpu._is_amx_tile_supported, torch.cpu._is_avx512_bf16_supported
else:
    torch.cpu._is_avx512_bf16_supported = lambda: False
config, run_dir = sys.argv[1:3]
overrides = [f"run_dir={run_dir}/run", f"data_dir={run_dir}/data", "train.max_steps=2",
             "train.warmup_steps=0", "train.precision=auto"]
run_command(lambda: data_pipeline.build.prepare.prepare(
    load_config(DataConfig, config, overrides), workers=1))
run_command(lambda: pretrain.train.train(load_config(Config, config, overrides)))
"""


@pytest.mark.parametrize("torch_drops", [(), ("its private questions",)])
def test_without_the_calls_of_linux_text_becomes_an_export(
    prepared: Path, tmp_path: Path, torch_drops: tuple[str, ...]
) -> None:
    done = fork(["-c", MACOS, str(prepared / "config.yaml"), str(tmp_path), *torch_drops])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/export/model.safetensors").exists()


def test_cores_are_counted_where_a_system_does_not_tell_which_are_ours(monkeypatch) -> None:
    assert count_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cpus() == os.cpu_count()


def test_a_worker_elsewhere_than_on_linux_asks_for_no_signal(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("a library was opened"))
    die_with_parent(-1)


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    keep_freed_memory()


def test_an_instruction_set_that_torch_does_not_know_is_absent(monkeypatch) -> None:
    assert not cpu_supports("abacus")
    monkeypatch.setattr(torch.cpu, "_is_abacus_supported", lambda: True, raising=False)
    assert cpu_supports("abacus")
