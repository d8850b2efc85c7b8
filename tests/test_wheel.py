"""A wheel carries all that an installation needs: the code, its types, the recipes and commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SOURCES = ("configs", "data_pipeline", "pretrain", "pyproject.toml", "README.md", "LICENSE")
COMMANDS = ("bert-pretrain", "bert-pretrain-data", "bert-pretrain-export")
SMALL = (
    *("vocab.size=512", "corpus.builtin=null", "corpus.held_out_fraction=0.2"),
    *("model.hidden_size=32", "train.max_steps=4", "train.micro_batch_size=8"),
)


def call(*command: object, folder: Path, **env: str) -> str:
    """Run a command in a folder outside the clone; returns its output, and fails if it does."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in, with `bin/`; built from a copy, with no network."""
    root = tmp_path_factory.mktemp("wheel")
    source, site = root / "source", root / "site"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    alone = ("--no-deps", "--no-index", "--no-cache-dir")
    call(*pip, "wheel", *alone, "--no-build-isolation", "-w", root, source, folder=root)
    (wheel,) = root.glob("*.whl")
    call(*pip, "install", *alone, "--target", site, wheel, folder=root)
    return site


def test_a_wheel_carries_every_module_and_recipe(site: Path) -> None:
    wanted = {
        path.relative_to(ROOT)
        for name in ("data_pipeline", "pretrain")
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    }
    recipes = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    wanted |= {"pretrain" / path for path in recipes}
    installed = {
        path.relative_to(site)
        for path in site.rglob("*")
        if path.is_file() and path.relative_to(site).parts[0] in ("data_pipeline", "pretrain")
    }
    assert {path for path in installed if path.suffix != ".pyc"} == wanted
    assert len(recipes) > 10
    assert sorted(path.name for path in (site / "bin").iterdir()) == sorted(COMMANDS)


def test_a_copied_recipe_is_prepared_and_planned_by_the_installed_commands(
    site: Path, prepared: Path, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = call(
        *(sys.executable, "-c", "import pretrain; print(pretrain.__file__)"), folder=tmp_path, **env
    )
    assert Path(where.strip()).is_relative_to(site)
    listed = call(site / "bin/bert-pretrain", "configs", folder=tmp_path, **env)
    assert "quickstart " in listed and "accelerate/gpu_8 " in listed
    call(site / "bin/bert-pretrain", "configs", "quickstart", "my.yaml", folder=tmp_path, **env)
    recipe = (ROOT / "configs/quickstart.yaml").read_bytes()
    assert (tmp_path / "my.yaml").read_bytes() == recipe
    text = f"corpus.files=[{prepared}/topics.txt]"
    call(site / "bin/bert-pretrain-data", "my.yaml", text, *SMALL, folder=tmp_path, **env)
    assert (tmp_path / "data/quickstart/store/manifest.json").is_file()
    plan = call(
        *(sys.executable, "-m", "pretrain.plan", "my.yaml", text, *SMALL), folder=tmp_path, **env
    )
    assert "4 steps of 64 sequences" in plan


@pytest.mark.parametrize("name", COMMANDS)
def test_each_installed_command_says_how_to_use_it(site: Path, tmp_path: Path, name: str) -> None:
    said = call(site / "bin" / name, "--help", folder=tmp_path, PYTHONPATH=str(site))
    assert said.startswith("usage: ")
