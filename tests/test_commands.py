"""Every command that is shipped runs as it is written: in README, docs, the contributor's page, the
headers of recipes and launch files, and scripts. Recipes are shrunk beforehand, commands are not
touched; what needs eight GPUs or several machines is checked by its arithmetic."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, fork, write_tasks

from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import count_passes, cut_evenly
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import Config, phases_of
from pretrain.export import export_checkpoint

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
]
RECIPES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
COMMAND = re.compile(
    r"(?:^#? *|`)((?:bash|python3?|accelerate|sbatch|source|pip|dask) [^`\n]+)", re.M
)
PLACEHOLDER = re.compile(r"\b(CONFIG|FILE|HEAD|FOLDER|N|DIR|RUN_DIR|OUT_DIR)\b")


def shipped() -> dict[str, str]:
    """Command -> the file that ships it, in the order of reading."""
    headers = [
        *sorted((ROOT / "configs").rglob("*.yaml")),
        *sorted((ROOT / "scripts").glob("*.slurm")),
    ]
    found: dict[str, str] = {}
    for path in PAGES + headers:
        text = path.read_text(encoding="utf-8")
        if path in headers:
            text = "".join(line for line in text.splitlines(True) if line.startswith("#"))
        for command in COMMAND.findall(join_lines(text)):
            command = re.split(r"  +#| {4,}#", command)[0].strip()
            found.setdefault(re.sub(r" \[key=value \.\.\.\]", "", command), path.name)
    return found


def join_lines(text: str) -> str:
    """Join the lines of a command that goes on after a backslash."""
    return re.sub(r" \\\n\s*", " ", text)


def kind_of(command: str) -> str:
    """How a command is proved."""
    if re.search(r"gpu_8|fsdp_8|multi_node|^sbatch --nodes", command):
        return "arithmetic"
    if (
        PLACEHOLDER.search(command)
        or "..." in command
        or command.startswith("accelerate launch --cpu")
    ):
        return "placeholder"
    if re.match(r"bash scripts/|python (scripts/benchmark|tests/google_rule|-m pytest)", command):
        return "elsewhere"  # test_readme, test_benchmark, test_report, on a GPU machine
    if re.match(r"source|pip|python3? -m venv|\.venv", command):
        return "install"
    return "run"


COMMANDS = shipped()


def of_kind(kind: str) -> list[str]:
    return [command for command in COMMANDS if kind_of(command) == kind]


ENTRY_POINTS = {  # what a command of each kind can begin with
    "run": r"python -m (data_pipeline|pretrain)|python scripts/|accelerate launch --config_file ",
    "arithmetic": r"accelerate launch --config_file configs/accelerate/|sbatch --nodes ",
    "placeholder": r"python -m (data_pipeline|pretrain|pytest)|python (scripts|tests)/"
    r"|bash scripts/|accelerate launch |sbatch |dask worker ",
    "install": r"source \.venv/bin/activate$|pip (install -e|wheel) |python3 -m venv ",
    "elsewhere": r"bash scripts/(quickstart|test)\.sh|python scripts/benchmark\.py "
    r"|python -m pytest -m gpu$",
}


def test_every_kind_of_command_is_found() -> None:
    wanted = {"run": 17, "arithmetic": 12, "placeholder": 18, "install": 4, "elsewhere": 3}
    for kind, least in wanted.items():
        assert len(of_kind(kind)) >= least, (kind, of_kind(kind))
    assert "bash scripts/quickstart.sh" in of_kind("elsewhere")


def test_every_command_is_one_of_its_kind() -> None:
    """A line of prose that begins like a command would be run as one."""
    strange = [c for c in COMMANDS if not re.match(ENTRY_POINTS[kind_of(c)], c)]
    assert not strange


def test_every_line_of_an_unnamed_block_is_a_command() -> None:
    for path in PAGES:
        blocks = re.split(r"^```(.*)\n", path.read_text(encoding="utf-8"), flags=re.M)
        for language, block in zip(blocks[1::4], blocks[2::4], strict=True):
            for line in join_lines(block).splitlines() if language in ("", "bash") else ():
                command = re.split(r"  +#", line)[0].strip()
                assert command in COMMANDS or command.startswith(".venv/bin/python -m pip "), line


def test_the_line_that_unwraps_text_makes_a_line_of_each_paragraph(tmp_path: Path) -> None:
    page = (ROOT / "docs/corpus.md").read_text(encoding="utf-8")
    command = re.search("^tr .*", page, re.M)[0]
    paragraphs = ["to be, or not", "a  b", "x"]
    wrapped = "\n \t\n\n".join("\n".join(text.split(" ")) for text in paragraphs) + "\n"
    (tmp_path / "FILE").write_bytes(wrapped.replace("\n", "\r\n").encode())
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    found = (tmp_path / "UNWRAPPED.txt").read_text().splitlines()
    assert found == ["to be, or not", "a", "b", "x"]


def test_a_real_run_goes_from_the_plan_to_the_export() -> None:
    commands = [c for c in of_kind("run") if COMMANDS[c] == "README.md"]
    modules = [re.match(r"python -m ([\w.]+) ", c)[1] for c in commands[:4]]
    assert modules == ["pretrain.plan", "data_pipeline", "pretrain", "pretrain.export"]


# --- what runs here -------------------------------------------------------------------------------


def shrink(path: Path) -> None:
    """Make a recipe a matter of seconds: a small model and vocabulary and few steps. Batches,
    lengths, phases, objectives and optimizers stay."""
    recipe = yaml.safe_load(path.read_text())
    recipe["corpus"].pop("builtin", None)
    recipe["corpus"] |= {
        "files": recipe["corpus"].get("files", ["corpus/*.txt"]),
        "held_out_fraction": 0.2,
    }
    if "init_from" not in recipe:  # which sets both
        recipe["vocab"]["size"] = 512
        recipe["model"] |= {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    steps = 4 if recipe["train"]["global_batch_size"] < 1000 else 1
    recipe["train"] |= {"max_steps": steps, "eval_examples": 16, "precision": "fp32"}
    header = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    path.write_text(header + yaml.safe_dump(recipe))


@pytest.fixture(scope="module")
def project(prepared: Path, straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project beside some text and a model to start from, with small recipes."""
    root = tmp_path_factory.mktemp("project")
    for name in ("configs", "data_pipeline", "pretrain", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = load_config(Config, str(prepared / "config.yaml"))
    checkpoint = newest_checkpoint(straight / "checkpoints")
    export_checkpoint(checkpoint, config, root / "pretrained", positions=128)
    for name in ("corpus", "corpus_zh", "corpus_domain"):
        (root / name).mkdir()
        shutil.copy(prepared / "topics.txt", root / name / "topics.txt")
    for name in RECIPES:
        shrink(root / "configs" / name)
    write_tasks(root, train=32, dev=16)
    return root


def type_in(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a line, the parts of it that call `python` in forks and the others in a shell."""
    for part in line.split(" && "):
        name, *words = shlex.split(part)
        if name == "python" and "<<<" not in part:
            done = fork(words, folder=folder)
        else:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            options = {"cwd": folder, "env": env, "timeout": 300}
            done = subprocess.run(["bash", "-c", part], capture_output=True, text=True, **options)
        if done.returncode:
            break
    return done


def recipe_of(command: str) -> str:
    """The recipe that a command runs; what names none uses the export of `mini`."""
    return (re.findall(r"configs/(\w+)\.yaml", command) or ["mini"])[-1]


@pytest.mark.parametrize("recipe", sorted({recipe_of(c) for c in of_kind("run")}))
def test_every_command_runs_as_it_is_written(project: Path, recipe: str) -> None:
    """In the order of the journey: what plans and prepares, then what trains, then what exports."""
    order = ("pretrain.plan", "data_pipeline ", "pretrain ", "")
    commands = sorted(
        (c for c in of_kind("run") if recipe_of(c) == recipe),
        key=lambda c: next(i for i, name in enumerate(order) if name in f"{c} "),
    )
    if not any("-m data_pipeline configs" in command for command in commands):
        commands.insert(0, f"python -m data_pipeline configs/{recipe}.yaml")
    for command in commands:
        done = type_in(command, project)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    if any(re.search(r"-m pretrain configs/\w+\.yaml$", command) for command in commands):
        assert (project / "runs" / recipe / "export/config.json").exists()


def test_the_commands_of_five_recipes_train() -> None:
    trained = {recipe_of(c) for c in of_kind("run") if "-m pretrain " in c}
    assert trained >= {"quickstart", "mini", "tiny", "small", "bert_base_24h"}


# --- what needs more machines ---------------------------------------------------------------------


def world_size_of(command: str) -> int:
    """Processes that a launch command starts, on all machines."""
    if command.startswith("sbatch"):
        gpus = int(
            re.search(r"--gpus-per-node=(\d+)", (ROOT / "scripts/pretrain.slurm").read_text())[1]
        )
        nodes = re.search(r"--nodes (\d+)", command)
        return gpus * (int(nodes[1]) if nodes else 2)
    asked = re.search(r"--num_processes (\d+)", command)
    launch = yaml.safe_load((ROOT / re.search(r"--config_file (\S+)", command)[1]).read_text())
    return int(asked[1]) if asked else launch["num_processes"]


@pytest.mark.parametrize("command", of_kind("arithmetic"))
def test_a_launch_on_many_gpus_divides_its_batches_evenly(command: str) -> None:
    recipe = re.search(r"configs/\w+\.yaml", command.split("-m pretrain")[-1])
    world_size = world_size_of(command.replace("N", "3"))
    for name in [Path(recipe[0]).name] if recipe else RECIPES:
        for phase in phases_of(load_config(Config, str(ROOT / "configs" / name))):
            size, most = phase.train.global_batch_size, phase.train.micro_batch_size
            passes = count_passes(size, most, world_size)
            for first, last in pairwise(cut_evenly(size, world_size)):
                sizes = [b - a for a, b in pairwise(cut_evenly(last - first, passes))]
                assert 1 <= min(sizes) and max(sizes) <= most


def test_sixteen_and_thirty_two_processes_are_among_them() -> None:
    assert {16, 32} <= {world_size_of(c) for c in of_kind("arithmetic") if "N" not in c.split()}


# --- what installs --------------------------------------------------------------------------------


def test_every_extra_that_is_named_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = [*ROOT.glob("*/*.py"), ROOT / "README.md", *ROOT.glob("docs/*.md")]
    texts = [p.read_text(encoding="utf-8") for p in sources if "tests" not in p.parts]
    named = re.findall(r"pip install -e '?\.\[([\w,]+)\]", "\n".join(texts))
    assert len(named) >= 4
    assert {name for names in named for name in names.split(",")} <= extras.keys()
    assert not [text for text in texts if "pip install bert-pretrain" in text]
    assert not [text for text in texts if "pip install 'bert-pretrain" in text]


# --- shrinking a recipe ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_other_size_needs_one_change(name: str) -> None:
    """Warm-up and phases are shares of the steps, the feed-forward width is one of the width."""
    path = str(ROOT / "configs" / name)
    whole = phases_of(load_config(Config, path))
    small = load_config(Config, path, ["train.max_steps=100"])
    short = phases_of(small)
    assert [phase.end for phase in short][-1] == 100 and len(short) == len(whole)
    assert all(phase.train.warmup_steps < phase.train.max_steps for phase in short)
    assert small.model.intermediate_size is None
