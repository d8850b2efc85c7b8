"""Functions of the user's own: only from modules that the config lists, and one line where they
fail."""

import sys
from pathlib import Path

import pytest
from helpers import fork

from data_pipeline.build.sentences import sentence_splitter
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig, load_config
from data_pipeline.vocabulary.words import load_segmenter

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
