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


def test_the_commands_of_a_real_run_run(prepared: Path, tmp_path: Path) -> None:
    """As in the README, but for the size of the model and the number of processes."""
    prepare, plan, train, export = commands()[2:6]
    places = f"data_dir={tmp_path}/data run_dir={tmp_path}/run"
    model = "model.num_hidden_layers=1 model.hidden_size=32 model.num_attention_heads=2"
    steps = "train.global_batch_size=8 train.micro_batch_size=4 train.log_every=1"
    phases = "'train.phases=[{steps: 3}, {steps: 1, max_seq_length: 64}]'"
    sizes = f"{SMALL} {model} model.intermediate_size=64 {steps} {phases}"
    files = f"corpus.files={prepared}/topics.txt"
    prepare = prepare.replace("corpus.files='texts/*.txt.xz'", files)
    done = shell(f"{prepare} {places} {sizes}")
    assert done.returncode == 0, done.stderr
    done = shell(f"{plan} {files} {places} {sizes}")
    assert done.returncode == 0 and "FLOPs a token" in done.stdout, done.stderr
    two = train.replace("gpu_8.yaml", "cpu_2.yaml")
    done = shell(f"{two} {files} {places} {sizes}")
    assert done.returncode == 0, done.stderr
    done = shell(
        export.replace("runs/bert_base", f"{tmp_path}/run").replace(" exported", f" {tmp_path}/x")
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x/model.safetensors").exists()


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
