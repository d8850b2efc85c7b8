"""Text that would take much memory, and rows that are none: capped or counted, in one line."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard
from helpers import ROOT

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, SourceConfig, VocabConfig
from data_pipeline.corpus.readers import Rejects, read_documents
from data_pipeline.corpus.sources import list_source

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


@pytest.mark.parametrize("name", ["a.csv", "a.txt.bz2", "a.txt.xz", "a.txt.zst"])
def test_what_never_ends_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    """A field in quotes of many lines, and a line in every compression."""
    path = tmp_path / name
    opener = {".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst_to_write}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(b'text\n"' if name == "a.csv" else b"")
        for _ in range(1 << (8 if path.suffix == ".zst" else 6)):  # of a megabyte
            file.write((b"a" * 63 + b"\n" if name == "a.csv" else b"a" * 64) * (1 << 14))
    peak, said = peak_of(path, "csv" if name == "a.csv" else "line")
    assert "of more than 16,777,216 characters" in said
    assert peak < 170


def open_zst_to_write(path: Path, mode: str):
    return zstandard.ZstdCompressor().stream_writer(open(path, mode))


@pytest.mark.parametrize("name", ["recurring.parquet", "packed.parquet", "one.parquet", "a.arrow"])
def test_columns_that_unpack_to_much_are_refused(tmp_path: Path, name: str) -> None:
    """A text that is there once and named often, texts that compress well, and a long one."""
    path, texts = tmp_path / name, [f"{WORDS * 8000}{i}" for i in range(200)]
    texts = texts if name != "one.parquet" else ["a" * (1 << 27)]
    texts = texts if name != "recurring.parquet" else texts[:1] * 200
    table = pyarrow.table({"text": texts})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=name[0] == "r")
    else:
        packed = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_stream(path, table.schema, options=packed) as file:
            file.write_table(table, max_chunksize=64)
    peak, said = peak_of(path, path.suffix[1:])
    assert "more than 200 times its size" in said
    assert peak < 200


def test_no_flipped_bit_of_the_description_of_a_parquet_file_ends_the_process(
    tmp_path: Path,
) -> None:
    """pyarrow aborts where the statistics of a damaged column are looked at."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [WORDS] * 3, "n": [1, 2, 3]}), path)
    sound, source = path.read_bytes(), SourceConfig(files=str(path))
    (chunk,) = list_source(source)
    length = int.from_bytes(sound[-8:-4], "little")
    refused = 0
    for bit in range(8 * (len(sound) - 8 - length), 8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            list(read_documents(chunk, source, Rejects()))
        except UserError:
            refused += 1
    assert refused > length


def test_a_line_of_a_megabyte_takes_little_memory(tmp_path: Path) -> None:
    peaks = []
    for length in (1000, 1 << 20):
        path = tmp_path / f"{length}" / "a.txt"
        path.parent.mkdir()
        path.write_text("\n".join([(WORDS * 20000)[:length]] * ((4 << 20) // length)))
        peak, said = peak_of(path, "line")
        assert (path.parent / "data/store/manifest.json").exists(), said
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 40


@pytest.mark.parametrize("row", ['999,"ab"cd"', '999,"a quote that nothing closes'])
def test_a_row_of_csv_with_a_stray_quote_is_skipped_on_request(tmp_path: Path, row: str) -> None:
    lines = ["n,text", *(f'{i},"{WORDS} {i}"' for i in range(200)), row]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    source = SourceConfig(files=str(tmp_path / "a.csv"), text_field="text")
    with pytest.raises(UserError, match="line 20[23] is not csv"):
        list(read_documents(list_source(source)[0], source, Rejects()))
    rejects = Rejects()
    source.on_bad_row = "skip"
    assert len(list(read_documents(list_source(source)[0], source, rejects))) == 200
    assert rejects == {"bad rows": 1}


@pytest.mark.parametrize("end", ["", 'another "quote",1\nlast,1\n'])
def test_all_rows_that_a_stray_quote_takes_in_are_counted(tmp_path: Path, end: str) -> None:
    before, inside = "".join(f"text {i},1\n" for i in range(200)), "of several lines,1\n" * 300
    (tmp_path / "a.csv").write_text(f'text,n\n{before}"never closed,1\n{inside}{end}')
    source, rejects = SourceConfig(files=str(tmp_path / "a.csv"), on_bad_row="skip"), Rejects()
    documents = list(read_documents(list_source(source)[0], source, rejects))
    assert documents[:200] == [f"text {i}" for i in range(200)]
    assert documents[200:] == ["last"] * bool(end)
    assert rejects == {"bad rows": 301 + bool(end)}


def test_a_document_of_many_lines_is_refused_without_reading_it_whole(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("data_pipeline.corpus.readers.MOST_CHARACTERS", 1 << 18)
    source = SourceConfig(files=str(tmp_path / "a.txt"), layout="blank_line")
    for blank, refused in (("\n", False), ("", True)):
        (tmp_path / "a.txt").write_text(f"{WORDS}\n{blank}" * 20_000)
        documents = read_documents(list_source(source)[0], source, Rejects())
        if refused:
            with pytest.raises(UserError, match="a document of more than 262,144 characters"):
                next(documents)
        else:
            assert list(documents) == [WORDS] * 20_000


def test_a_long_cell_of_a_column_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("data_pipeline.corpus.readers.MOST_CHARACTERS", 10)
    table = pyarrow.table({"text": ["a" * 10, "b" * 11]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = SourceConfig(files=str(tmp_path / "a.parquet"))
    documents = read_documents(list_source(source)[0], source, Rejects())
    assert next(documents) == "a" * 10
    with pytest.raises(UserError, match="a document of more than 10 characters"):
        next(documents)


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
        with pytest.raises(UserError, match="11 of 1,000 rows of .* are bad, more than 1%"):
            prepare(config, workers=1)
        return
    if bad == 10:  # copies are rows too, but each row counts once
        copies = tmp_path / "copies.jsonl"
        copies.write_text(rows(11, 511) + "\n" + rows(0, 500))
        again = replace(config, data_dir=str(tmp_path / "copies"))
        again.corpus = replace(corpus, files=str(copies), deduplicate=True)
        with pytest.raises(UserError, match="11 of 1,011 rows of .* are bad, more than 1%"):
            prepare(again, workers=1)
    prepare(config, workers=1)
    assert f"left out: {bad} bad rows" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    assert manifest["sources"][0]["rejects"] == {"bad rows": bad}
