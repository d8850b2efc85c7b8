"""Text that would take much memory, and rows that are none: capped or counted, in one line."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, VocabConfig

PEAK = """
import re, runpy, sys
from pathlib import Path
try:
    runpy.run_module("data_pipeline", run_name="__main__", alter_sys=True)
finally:
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory
    print("peak", int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) >> 10)
"""
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa. "


def peak_of(path: Path, layout: str) -> tuple[int, str]:
    """Peak memory of a preparation of a file in MB, and what it said."""
    config = path.with_suffix(".yaml")
    config.write_text(
        f"data_dir: {path.parent / 'data'}\ncorpus: {{files: {path}, layout: {layout}}}\n"
        "vocab: {size: 30, min_frequency: 1}\ndata: {objective: none}\n"
    )
    words = [sys.executable, "-c", PEAK, str(config), "--workers", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return int(done.stdout.split()[-1]), done.stderr


@pytest.mark.parametrize("layout", ["line", "file", "blank_line"])
@pytest.mark.parametrize("block", [b"a" * (1 << 20), WORDS.encode() * 20000], ids=["a", "words"])
def test_a_megabyte_that_unpacks_to_a_gigabyte_is_refused_in_little_memory(
    tmp_path: Path, layout: str, block: bytes
) -> None:
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb") as file:
        for _ in range((1 << 30) // len(block)):
            file.write(block)
    peak, said = peak_of(path, layout)
    assert "error: " in said and "more than" in said
    assert peak < 120


def test_a_line_of_a_megabyte_takes_little_memory(tmp_path: Path) -> None:
    peaks = []
    for length in (1000, 1 << 20):
        path = tmp_path / f"{length}.txt"
        path.write_text("\n".join([(WORDS * 20000)[:length]] * ((4 << 20) // length)))
        peaks.append(peak_of(path, "line")[0])
    assert peaks[1] - peaks[0] < 60


def rows(bad: int, total: int = 1000) -> str:
    good = [json.dumps({"text": f"{WORDS} {i}"}) for i in range(total - bad)]
    return "\n".join([*good, *["null", '{"text": 3}', "{"][:bad], *["null"] * (bad - 3)])


@pytest.mark.parametrize("bad", [3, 10, 11])
def test_bad_rows_are_skipped_and_counted_up_to_one_percent(
    tmp_path: Path, capsys, bad: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(rows(bad))
    corpus = CorpusConfig(files=str(path), deduplicate=False)
    config = DataConfig(data_dir=str(tmp_path / "data"), corpus=corpus)
    config.vocab, config.data = VocabConfig(size=48), PairsConfig(objective="none")
    with pytest.raises(UserError, match=f"line {1001 - bad} is not an object.*on_bad_row=skip"):
        prepare(config, workers=1)
    corpus.on_bad_row = "skip"
    if bad > 10:
        with pytest.raises(UserError, match="11 of 1,000 rows of .* are bad, above 1%"):
            prepare(config, workers=1)
        return
    prepare(config, workers=1)
    assert f"left out: {bad} bad rows" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    assert manifest["sources"][0]["rejects"] == {"bad rows": bad}
