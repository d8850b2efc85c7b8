"""The floors of the house: imports point down, training needs five packages, the loop fits a
screen."""

import ast
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

# Each module imports only modules before it; a new one has to find its place here.
FLOORS = [
    (
        "data_pipeline.common",
        "arguments errors streams system signals reading arrays plug_ins folders pages",
    ),
    ("data_pipeline", "config config_file"),
    (
        "data_pipeline.sampling",
        "manifest vocabulary token_store soundness exchange pairs masking batches batch_source "
        "baselines",
    ),
    ("data_pipeline.corpus", "python_docs files encodings readers sources selection"),
    ("data_pipeline.vocabulary", "words id_words training existing coverage"),
    ("data_pipeline.build", "workers identity sentences encode assemble probes stages prepare"),
    ("data_pipeline.report", "audit checks page __main__"),
    ("data_pipeline", "__main__"),
    ("pretrain.models", "cpu"),
    ("pretrain", "families config tracking loss sampled_softmax objectives"),
    ("pretrain.models", "attention layers neighbours bert electra build"),
    ("pretrain", "watch sharding agreement optim fingerprint"),
    (
        "pretrain",
        "checkpoint metrics evaluate probes monitor describe model_card processes read_run",
    ),
    ("pretrain", "run_folder export_folder read_export export_gate export init_from"),
    (
        "pretrain",
        "run_record report word_vectors run_setup memory train assumed plan recipes __main__",
    ),
]
NAMES = [f"{room}.{name}" for room, names in FLOORS for name in names.split()]
RANKS = {name: rank for rank, name in enumerate(NAMES)}
PACKAGES = ("data_pipeline", "pretrain")
# What loads pickles, evaluates text or starts programs; numpy loads pickles only if it is told to.
runs_code = re.compile(
    r"(pickle|marshal|shelve|dill|cloudpickle|joblib|runpy|code|pty|subprocess)\.\w+"
    r"|os\.(system|popen|startfile|exec\w+|spawn\w+|posix_spawn\w*)|torch\.load|yaml\.\w*load\w*"
    r"|eval|exec|compile|__import__|import_module|importlib\.import_module|.*\.exec_module"
).fullmatch
RUN_CODE = {
    "data_pipeline.__init__": {"importlib.import_module"},  # of this project, by its own table
    "pretrain.__init__": {"importlib.import_module"},
    # a plug-in, which the config names and lists, or which lies beside it
    "data_pipeline.common.plug_ins": {"importlib.import_module", "exec", "compile"},
    "pretrain.tracking": {"subprocess.Popen"},  # itself, without a shell
    "pretrain.init_from": {"torch.load"},  # tensors alone: `weights_only`
    "pretrain.export_gate": {"torch.load"},
}
NOT_IN_TRAINING = ("tokenizers", "datasets", "sentencex", "transformers", "wandb")


def read_modules(*folders: str) -> dict[str, ast.Module]:
    """Dotted name -> syntax tree, of the modules in the folders and those below."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): ast.parse(p.read_text("utf-8"))
        for p in paths
    }


MODULES = read_modules(*PACKAGES)


def imports_of(tree: ast.Module) -> set[str]:
    """Dotted names of all imports, at any depth; `from a import b` counts as `a`, or as `a.b` where
    that is a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import relative to its folder"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return found


def run_python(code: str, *args: object, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


# ------------------------------------------------------------------------------------- imports


def test_every_module_has_its_floor() -> None:
    names = {name for name in MODULES if not name.endswith(".__init__")}
    assert len(names) > 20
    assert names <= RANKS.keys()


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name) -> None:
    ours = {item for item in imports_of(MODULES[name]) if item.split(".")[0] in PACKAGES}
    if name.endswith(".__init__"):
        assert not ours
    up = {item for item in ours if RANKS[item] >= RANKS[name]}
    assert not up, f"{name} imports {', '.join(sorted(up))}"


def test_data_pipeline_never_imports_pretrain() -> None:
    for name, tree in MODULES.items():
        if name.startswith("data_pipeline."):
            assert not {item for item in imports_of(tree) if item.split(".")[0] == "pretrain"}, name


def test_packages_import_neither_scripts_nor_tests() -> None:
    for name, tree in MODULES.items():
        assert not {"scripts", "tests"} & {i.split(".")[0] for i in imports_of(tree)}, name


def test_in_data_pipeline_torch_begins_where_tensors_do() -> None:
    users = {name for name, tree in MODULES.items() if "torch" in imports_of(tree)}
    assert {name for name in users if name.startswith("data_pipeline.")} == {
        "data_pipeline.sampling.batches"
    }


def test_training_needs_only_the_room_of_sampling_and_the_common_one() -> None:
    """On a GPU machine nothing of how a store is built has to be there."""
    needed, todo = set(), ["pretrain.train"]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += [item for item in imports_of(MODULES[name]) if item in MODULES]
    rooms = {name.rpartition(".")[0] for name in needed if name.startswith("data_pipeline")}
    assert rooms == {"data_pipeline", "data_pipeline.sampling", "data_pipeline.common"}
    assert {n for n in needed if n.count(".") == 1 and n.startswith("data")} == {
        "data_pipeline.config",
        "data_pipeline.config_file",
    }


@pytest.mark.parametrize("name", MODULES | read_modules("scripts"))
def test_nothing_loads_pickles_evaluates_text_or_starts_programs_but_what_is_listed(name) -> None:
    """Scripts may start the project's own commands, without a shell."""
    tree = MODULES.get(name) or read_modules("scripts")[name]
    homes = {  # what a name that is imported stands for
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        if isinstance(node, ast.ImportFrom)
        else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = set()
    for call in calls:
        first, *others = ast.unparse(call.func).split(".")
        called = ".".join([homes.get(first, first), *others])
        options = {one.arg: ast.unparse(one.value) for one in call.keywords}
        for option in ("shell", "allow_pickle", "trust_remote_code"):
            assert options.get(option, "False") == "False", ast.unparse(call)
        if called == "torch.load":
            assert options["weights_only"] == "True", ast.unparse(call)
        if runs_code(called):
            found.add(called)
    if name.startswith("scripts."):
        found = {called for called in found if not called.startswith("subprocess.")}
    assert found == RUN_CODE.get(name, set())


def test_nothing_but_the_report_imports_the_report() -> None:
    for name, tree in MODULES.items():
        if not name.startswith("data_pipeline.report."):
            assert not {i for i in imports_of(tree) if i.startswith("data_pipeline.report")}, name


def test_importing_the_loop_loads_nothing_that_training_does_not_need() -> None:
    code = "import sys, pretrain.train; print(*sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "accelerate" in loaded  # which may look for others, and must not load them
    assert not loaded & set(NOT_IN_TRAINING)


TRAIN_WITHOUT = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # looks not installed: no spec to find, and importing it fails
from data_pipeline.config_file import load_config
from pretrain.config import Config
from pretrain.train import train
train(load_config(Config, sys.argv[1], sys.argv[2:]))
"""


def test_two_steps_of_training_and_the_export_run_with_nothing_else_installed(
    prepared, tmp_path
) -> None:
    done = run_python(
        TRAIN_WITHOUT.format(blocked=NOT_IN_TRAINING),
        prepared / "config.yaml",
        f"run_dir={tmp_path / 'run'}",
        "train.max_steps=2",
        "train.warmup_steps=1",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").exists()
    assert (tmp_path / "run/export/model.safetensors").exists()
    assert "eval/mlm_loss" in (tmp_path / "run/metrics.jsonl").read_text()


# ------------------------------------------------------------------------------- what is installed


def test_every_version_that_is_pinned_has_its_hashes() -> None:
    """But torch, of which each kind of machine has another build."""
    pins = {line.lower().replace("_", "-") for line in read_lines("constraints.txt")}
    hashed = "".join(f"{line}\n" for line in read_lines("hashes.txt") if line[0] != "#")
    entries = re.findall(r"^(\S+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", hashed, re.M)
    assert "".join(name + hashes + "\n" for name, hashes in entries) == hashed
    assert {name for name, _ in entries} == {pin for pin in pins if not pin.startswith("torch==")}


@pytest.mark.slow
def test_pip_accepts_all_of_these_hashes() -> None:
    options = (
        "install --dry-run --ignore-installed --no-deps --require-hashes -r hashes.txt".split()
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert len(line.split()) - 2 > 80  # but those that this system has no use for


def read_lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()


# -------------------------------------------------------------------------------- for a reader


def test_every_module_and_script_opens_with_a_docstring() -> None:
    trees = MODULES | read_modules("scripts")
    assert not [name for name, tree in trees.items() if not ast.get_docstring(tree)]


def test_every_function_that_another_module_imports_has_a_docstring() -> None:
    """Those are the public ones; a helper beside its only caller may speak for itself."""
    public = {
        (node.module, alias.name)
        for tree in (MODULES | read_modules("scripts")).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
    }
    functions = [
        (name, node)
        for name, tree in MODULES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (name, node.name) in public
    ]
    assert len(functions) > 30
    bare = [f"{name}.{f.name}" for name, f in functions if not ast.get_docstring(f)]
    assert not bare, "no docstring: " + ", ".join(bare)


def test_the_training_loop_fits_on_one_screen() -> None:
    """Forward, loss, backward, clip, update: from `for step` to what happens once in a while."""
    lines = (ROOT / "pretrain/train.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    for step"))
    end = next(i for i, line in enumerate(lines) if line.strip() == "# once in a while")
    body = "\n".join(lines[start:end])
    for step in ("model(", "loss", "backward(", "clip_gradients(", "update("):
        assert step in body, step
    assert end - start <= 40


def test_training_is_one_function_of_sixty_lines() -> None:
    tree = MODULES["pretrain.train"]
    (function,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "train"]
    assert function.end_lineno - function.lineno < 60
