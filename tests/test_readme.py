"""The README is true: its commands run, on a small corpus, and the files it names are there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALL = (
    "vocab.size=512 data.max_seq_length=32 train.max_steps=4 train.warmup_steps=1 "
    "train.eval_every=4 train.save_every=4 train.eval_examples=64"
)


def shell(line: str, **env: str) -> subprocess.CompletedProcess:
    """Run a line of the README from the project's root, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def commands() -> list[str]:
    """The lines of the README's unnamed code blocks that are commands."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(bash|python|accelerate) ", line)]


def test_quickstart_goes_from_a_file_to_a_filled_mask(prepared: Path) -> None:
    assert "bash scripts/quickstart.sh" in commands()
    before = {path for name in ("data", "runs") for path in (ROOT / name).glob("*")}
    line = f"bash scripts/quickstart.sh {prepared}/topics.txt"
    done = shell(line, OVERRIDES=SMALL, PYTHON=sys.executable)
    for name in ("data", "runs"):
        for path in set((ROOT / name).glob("*")) - before:  # named after the file
            shutil.rmtree(path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"%(, \S+ \d+%){4}\n", done.stdout), done.stdout
    assert "held-out MLM loss" in done.stdout + done.stderr


def test_every_file_that_the_readme_names_is_there() -> None:
    names = re.findall(r"\b[\w/]+\.(?:yaml|py|sh)\b", README)
    known = {p.name for p in ROOT.rglob("*") if ".venv" not in p.parts}
    missing = [
        n for n in names if Path(n).name not in known and not n.startswith(("runs/", "config"))
    ]
    assert len(names) > 20 and not missing


@pytest.mark.parametrize("name", ["test.sh", "quickstart.sh"])
def test_ci_and_readme_call_the_same_scripts(name: str) -> None:
    assert f"bash scripts/{name}" in README
    assert "bash scripts/test.sh" in (ROOT / ".ci/run").read_text()
