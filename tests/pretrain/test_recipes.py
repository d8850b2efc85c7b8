"""`python -m pretrain configs` lists every recipe and copies one, and replaces nothing unasked."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

FILES = sorted((ROOT / "configs").rglob("*.yaml"))
NAMES = [path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in FILES]


def configs(folder, *arguments: object) -> subprocess.CompletedProcess:
    """Run the command in a folder."""
    command = [sys.executable, "-c", "from pretrain.__main__ import run; run()", "configs"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_every_recipe_and_launch_file_is_listed_with_a_line_of_its_own(tmp_path) -> None:
    done = configs(tmp_path)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(NAMES)
    described = [line.split(maxsplit=1)[1] for line in lines]
    assert all(len(text) > 20 and text[0].isupper() for text in described), described
    assert "configs NAME" in last


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_first_line_of_a_header_is_a_whole_sentence(path) -> None:
    """It is what the list shows: it must not go on in the next line, nor hold two sentences."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and first[-1] in ".:"
    assert not re.search(r"\. [A-Z]", first)


def test_a_recipe_is_copied_as_it_is_to_the_current_folder_or_a_file(tmp_path) -> None:
    recipe = (ROOT / "configs/mini.yaml").read_bytes()
    for arguments, copy in (
        (["mini"], "mini.yaml"),
        (["mini.yaml", "my.yaml"], "my.yaml"),
        (["mini", "configs/mini.yaml"], "configs/mini.yaml"),
    ):
        done = configs(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / copy).read_bytes() == recipe
        assert copy in done.stdout
    assert configs(tmp_path, "accelerate/gpu_8").returncode == 0
    launch = ROOT / "configs/accelerate/gpu_8.yaml"
    assert (tmp_path / "gpu_8.yaml").read_bytes() == launch.read_bytes()


def test_a_file_is_replaced_only_with_overwrite(tmp_path) -> None:
    (tmp_path / "mini.yaml").write_text("mine")
    done = configs(tmp_path, "mini")
    assert done.returncode == 2
    assert done.stderr == (
        "error: mini.yaml exists; give another FILE, or replace it with --overwrite\n"
    )
    assert (tmp_path / "mini.yaml").read_text() == "mine"
    assert configs(tmp_path, "mini", "--overwrite").returncode == 0
    assert (tmp_path / "mini.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "error: no recipe 'absent'; choose from albert_base, "),
        (["../pyproject"], "error: no recipe '../pyproject'; choose from albert_base, "),
        (["mini", "."], "error: . is a folder; give a file name, such as mini.yaml"),
        (["mini", "file/mini.yaml"], "error: file cannot be read or written"),
    ],
)
def test_a_mistake_ends_in_one_line_and_leaves_nothing(tmp_path, arguments, message) -> None:
    (tmp_path / "file").write_text("")
    done = configs(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
