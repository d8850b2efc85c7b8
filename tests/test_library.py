"""The packages as a library, and the commands that an installation has."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from helpers import ROOT, fork

EXAMPLE = """
from pathlib import Path
from data_pipeline import BatchSource, DataConfig, TokenStore, load_config, prepare, read_vocabulary
from pretrain import Config, export, train
import sys

config, folder = sys.argv[1:]
overrides = [f"data_dir={folder}/data", f"run_dir={folder}/run", "train.max_steps=2",
             "train.warmup_steps=0"]
data = load_config(DataConfig, config, overrides)
prepare(data, workers=1)
place = Path(data.data_dir)
store = TokenStore.open(place / "store", "train", read_vocabulary(place / "vocab"))
assert BatchSource(store, data.data, data.seed).batch(0, 32).next_sentence_label.shape == (32,)
run = load_config(Config, config, overrides)
train.train(run)
checkpoint = Path(run.run_dir) / "checkpoints/step-00000002"
export.export_checkpoint(checkpoint, run, Path(folder) / "exported")
"""


def test_the_journey_can_be_made_from_python(prepared: Path, tmp_path: Path) -> None:
    done = fork(["-c", EXAMPLE, str(prepared / "config.yaml"), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exported/config.json").exists()


COMMANDS = ("data_pipeline", "pretrain", "pretrain.plan", "pretrain.export", "pretrain.report")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_outside_its_environment_says_what_to_do(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", command, "configs/mini.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "does not have omegaconf; run source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("package", ["data_pipeline", "pretrain"])
def test_every_public_name_is_there_and_documented(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
        assert name in module.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
    assert (ROOT / package / "py.typed").exists()


def test_importing_the_packages_loads_nothing_heavy() -> None:
    code = "import sys, data_pipeline, pretrain; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert not {"torch", "numpy", "tokenizers", "datasets"} & set(done.stdout.split())


def test_the_commands_of_an_installation_are_functions_that_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"bert-pretrain", "bert-pretrain-data", "bert-pretrain-export"}
    for place in scripts.values():
        module, name = place.split(":")
        assert callable(getattr(import_module(module), name))
