"""README and docs are true: the quick start runs, and files, links, tests and configs that they
name are there. `tests/test_commands.py` runs the commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from data_pipeline.config_file import load_config
from pretrain.config import Config

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PROJECT_FILES = [
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.*")
    if not {"data", "runs", ".venv", ".git"} & set(path.relative_to(ROOT).parts[:1])
]
MADE_ELSEWHERE = {  # by tests of the report, of large stores, of scripts
    *("report.html", "compared.html", "report.json", "run_edges.npy"),
    *("probes.json", "results.json", "vectors.npy", "gpu_check.json"),
    *("train.json", "dev.json", "train.jsonl", "dev.jsonl"),  # a user's own data
    "rules.py",  # a user's own functions
}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


README = read(ROOT / "README.md")
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
    line = f"bash scripts/quickstart.sh {prepared}/topics.txt {SMALL}"
    done = shell(line, PYTHON=sys.executable)
    for name in ("data", "runs"):
        for path in set((ROOT / name).glob("*")) - before:  # named after the file
            shutil.rmtree(path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"%(, \S+ \d+%){4}; the truth: ", done.stdout), done.stdout
    assert "the same network with random weights" in done.stdout
    assert "held-out MLM loss" in done.stdout + done.stderr


def test_the_quick_start_says_its_usage_and_a_missing_file_without_installing(tmp_path) -> None:
    for name in ("quickstart.sh", "setup.sh"):
        (tmp_path / name).write_text((ROOT / "scripts" / name).read_text())
    for word, code, said in (
        ("--help", 0, "bash scripts/quickstart.sh [FILE...] [key=value...]"),
        ("gone.txt", 2, "error: no file at gone.txt; give files of text, or key=value"),
    ):
        done = shell(f"bash {tmp_path}/quickstart.sh {word}")
        assert done.returncode == code and said in done.stdout + done.stderr
        assert len(list(tmp_path.iterdir())) == 2


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 120]


def is_there(name: str) -> bool:
    """Whether a file of the project has this path or, of a path that is cut short, this end."""
    return any(f"/{path}".endswith(f"/{name}") for path in PROJECT_FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there_or_made_by_a_run(
    page: Path, prepared: Path, straight: Path
) -> None:
    made = {path.name for root in (prepared, straight) for path in root.rglob("*.*")}
    names = re.findall(
        r"[\w./-]*\w\.(?:yaml|py|sh|slurm|toml|md|jsonl?|html|png|npy)\b", read(page)
    )
    missing = {name for name in names if not is_there(name.lstrip("./"))}
    assert not {name for name in missing if Path(name).name not in made | MADE_ELSEWHERE}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            path = page.parent / name if name else page
            assert path.is_file(), target
            assert not heading or heading in anchors(read(path)), target


def anchors(text: str) -> set[str]:
    """The names by which a link finds the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_readme() -> None:
    linked = set(re.findall(r"\]\(([\w/.]+\.md)\)", README))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"}


def test_every_guarantee_names_tests_that_exist() -> None:
    text = read(ROOT / "docs/guarantees.md")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    promises = re.findall(r"^\*\*.+?(?=^\*\*|^## |\Z)", text, re.M | re.S)
    assert len(promises) > 20
    assert len(named) == text.count("::")
    assert all("::test_" in promise for promise in promises)
    missing = [name for path, name in named if f"\ndef {name}(" not in read(ROOT / path)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_config_of_a_page_can_be_loaded(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", read(page), re.M | re.S):
        for section in re.split(r"^(?=\w)", block, flags=re.M)[1:]:
            path = tmp_path / "config.yaml"
            path.write_text(section)
            corpus = [] if section.startswith("corpus") else ["corpus.builtin=python-docs"]
            load_config(Config, str(path), corpus)


@pytest.mark.parametrize("name", ["test.sh", "quickstart.sh"])
def test_ci_and_readme_call_the_same_scripts(name: str) -> None:
    assert f"bash scripts/{name}" in README
    assert "bash scripts/test.sh" in (ROOT / ".ci/run").read_text()
