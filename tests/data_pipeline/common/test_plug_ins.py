"""Functions of the user's own: only from modules that the config lists or files beside it, and one
line where they fail."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers import TWO_STEPS, command, fork

from data_pipeline.build.sentences import sentence_splitter
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.vocabulary.words import load_segmenter
from pretrain.config import Config

MODULES = {
    "raises": "def cut(text): raise KeyError('x')",
    "raises_later": "def cut(text): return [text] if text.startswith('A first') else 1 / 0",
    "exits": "def cut(text): raise SystemExit(3)",
    "no_python": "def cut(text",
    "raises_on_import": "1 / 0",
    "exits_on_import": "import sys; sys.exit(0)",
    "numbers": "def cut(text): return [1, 2]",
    "nothing": "def cut(text): return None",
    "deep": "def cut(text): return cut(text)",
    "no_function": "cut = 3",
}


@pytest.mark.parametrize("load", [lambda name: sentence_splitter("en", name), load_segmenter])
@pytest.mark.parametrize("name", MODULES)
def test_a_plug_in_that_fails_is_one_line(tmp_path: Path, monkeypatch, name: str, load) -> None:
    (tmp_path / f"plug_in_{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"plug_in_{name}:cut"):
        load(f"plug_in_{name}:cut")("Some text.")
    sys.modules.pop(f"plug_in_{name}", None)
    path = tmp_path / f"plug_in_{name}.py"
    with pytest.raises(UserError, match=f"{path}:cut"):
        load(f"{path}:cut")("Some text.")


@pytest.mark.parametrize("key", ["sentence_splitter", "word_segmenter"])
@pytest.mark.parametrize("source", ["corpus.", "corpus.sources[0]."])
def test_no_module_runs_that_the_config_does_not_list(
    tmp_path: Path, key: str, source: str
) -> None:
    """`os:system` ran each paragraph as a command of the shell."""
    (tmp_path / "a.txt").write_text(f"touch {tmp_path / 'ran'}\n")
    section = f"files: {tmp_path / 'a.txt'}, {key}: 'os:system'"
    if "sources" in source:
        section = f"sources: [{{{section}}}]"
    (tmp_path / "c.yaml").write_text(f"data_dir: {tmp_path / 'data'}\ncorpus: {{{section}}}\n")
    done = fork(["-m", "data_pipeline", str(tmp_path / "c.yaml")])
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    assert "os:system runs code of the module os; if you trust it, list it" in done.stderr
    load_config(DataConfig, str(tmp_path / "c.yaml"), ["corpus.plug_ins=[os]"])


RULES = "def split(text): return text.split({mark!r})\n"


def test_a_file_beside_the_config_is_a_plug_in_and_its_content_counts(
    prepared: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    text = (prepared / "config.yaml").read_text().replace(str(prepared), str(tmp_path))
    text = text.replace(f"{tmp_path}/topics.txt", f"{prepared}/topics.txt")
    text = text.replace("corpus: {", "corpus: {sentence_splitter: 'rules.py:split', ")
    (home / "config.yaml").write_text(text)
    (home / "rules.py").write_text(RULES.format(mark="e "))
    prepare = ["-m", "data_pipeline", "home/config.yaml", "--workers", "2"]
    done = fork(prepare, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(manifest["settings"])
    usual = json.loads((prepared / "data/store/manifest.json").read_text())
    assert manifest["train"]["sentences"] > 1.2 * usual["train"]["sentences"]
    shutil.move(home, tmp_path / "moved")
    moved = [word.replace("home", "moved") for word in prepare]
    assert "exists already" in fork(moved, folder=tmp_path).stdout
    (tmp_path / "moved/rules.py").write_text(RULES.format(mark=". "))  # of the same size
    done = fork(moved, folder=tmp_path)
    assert done.returncode == 2 and "sentence_splitter was 'split of a file with" in done.stderr
    (tmp_path / "moved/rules.py").unlink()  # training needs none
    done = fork(command(tmp_path / "moved", tmp_path / "run", *TWO_STEPS))
    assert done.returncode == 0, done.stderr
    load_config(Config, str(tmp_path / "run/config.yaml"))


def test_a_file_that_changes_is_run_as_it_is(tmp_path: Path) -> None:
    """Python would run the bytecode of a file that has its size and its second."""
    for mark, wanted in ((",", ["a", "b;c"]), (";", ["a,b", "c"])):
        (tmp_path / "rules.py").write_text(RULES.format(mark=mark))
        assert sentence_splitter("en", f"{tmp_path}/rules.py:split")("a,b;c") == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["rules.py"]


def test_a_file_may_have_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Cut:\n    mark: str\n"
        "def split(text):\n    return text.split(Cut(',').mark)\n"
    )
    assert sentence_splitter("en", f"{tmp_path}/rules.py:split")("a,b") == ["a", "b"]
