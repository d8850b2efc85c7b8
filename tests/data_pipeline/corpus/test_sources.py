"""sources: every kind of file gives the same documents, each source its weight and its line, and
what is not text is named with the way out."""

import csv
import gzip
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import floor
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.build.prepare import prepare
from data_pipeline.build.sentences import MAX_CHARACTERS, sentence_splitter, split_sentences
from data_pipeline.common.errors import UserError
from data_pipeline.config import (
    CorpusConfig,
    DataConfig,
    DatasetConfig,
    PairsConfig,
    SourceConfig,
    VocabConfig,
)
from data_pipeline.config_file import load_config
from data_pipeline.corpus import readers
from data_pipeline.corpus.selection import choose_extra_copies, hash_limit, hash_text
from data_pipeline.corpus.sources import list_file_chunks
from data_pipeline.sampling.pairs import number_texts
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary

FEW = settings(max_examples=100)
ROWS = ['One, 中.\nTwo "quoted".', "NA", "12", "Three.\n\n Four.\x07", ""]
READ_ROWS = ['One, 中.\nTwo "quoted".', "NA", "12", "Three.\n Four. "]


def read_all(config: CorpusConfig) -> list[str]:
    return [
        document
        for piece in list_file_chunks(config)
        for document in readers.read_documents(
            piece, config.each_source()[piece.source], readers.Rejects()
        )
    ]


def write_rows(path: Path, rows: list[str]) -> str:
    """The rows as column `body` of a table whose kind the suffix says."""
    table = datasets.Dataset.from_dict({"id": list(range(len(rows))), "body": rows})
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".arrow":
        table.save_to_disk(path.with_suffix(""))
        next(path.with_suffix("").glob("*.arrow")).rename(path)
    elif path.suffix == "":
        table.save_to_disk(path, num_shards=2)
    else:
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([["id", "body"], *enumerate(rows)])
    return str(path)


# ---------------------------------------------------------------------------------- kinds of files


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow", "[a] b.parquet", "saved"])
def test_a_table_is_read_by_its_suffix(tmp_path: Path, name: str):
    file = write_rows(tmp_path / name, ROWS)
    assert read_all(CorpusConfig(files=file, text_field="body")) == READ_ROWS
    with pytest.raises(
        UserError, match="no column 'text' .columns: id, body.; set corpus.text_field"
    ):
        read_all(CorpusConfig(files=file))


def test_a_column_that_is_no_text_is_named(tmp_path: Path):
    file = write_rows(tmp_path / "a.parquet", ROWS)
    with pytest.raises(UserError, match=r"a\.parquet: column 'id' is not text: '0'"):
        read_all(CorpusConfig(files=file, text_field="id"))


@FEW
@given(st.lists(st.text("ab,;\"'é中 \n", min_size=1).filter(str.strip), max_size=5))
def test_a_csv_file_holds_what_was_written_to_it(tmp_path_factory, rows: list[str]):
    file = write_rows(tmp_path_factory.getbasetemp() / "rows.csv", rows)
    expected = [re.sub(r"\n\s*\n", "\n", row) for row in rows]
    assert read_all(CorpusConfig(files=file, text_field="body")) == expected


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_the_header_of_a_csv_file_tells_what_separates_its_columns(tmp_path: Path, mark: str):
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        rows = [["n, m", "text"], ["1,5", "Eins; zwei, drei."], ["2", "Vier\tund 5;6,7."]]
        csv.writer(file, delimiter=mark).writerows(rows)
    documents = read_all(CorpusConfig(files=str(tmp_path / "*.csv")))
    assert documents == ["Eins; zwei, drei.", "Vier\tund 5;6,7."]


def test_a_tsv_file_with_quotes_is_told_to_be_csv(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('label\ttext\n1\t"Two\nlines."\n')
    config = CorpusConfig(files=str(tmp_path / "*.tsv"))
    with pytest.raises(UserError, match="is not tsv .*=csv if fields are quoted"):
        read_all(config)
    assert read_all(replace(config, layout="csv")) == ["Two\nlines."]


def test_a_tsv_file_has_no_quotes(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('label\ttext\n1\t"Half a quote\n0\tNo, thanks\n')
    documents = read_all(CorpusConfig(files=str(tmp_path / "*.tsv")))
    assert documents == ['"Half a quote', "No, thanks"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('text\nfine\n"never closed\nmore\n', r"a\.csv: line \d+ is not csv \(unexpected end"),
        (
            "text,b\nfine,1\nshort\n",
            r"a\.csv: line 3 is not csv \(1 fields, but the header has 2\)",
        ),
        (
            "text,b\nfine,1\nlong,1,2\n",
            r"a\.csv: line 3 is not csv \(3 fields, but the header has 2\)",
        ),
        (
            "a;body\n1;fine\n",
            r"a\.csv has no column 'text' \(columns: a, body\); set",
        ),
        (
            "",
            r"a\.csv has no column 'text' \(columns: none, the first line is empty\); set",
        ),
    ],
)
def test_a_broken_table_is_named_with_the_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_all(CorpusConfig(files=str(tmp_path / "a.csv")))


@pytest.mark.parametrize("values", [[0, 0], [False], [[], []]], ids=["numbers", "flags", "lists"])
def test_a_column_of_zeros_is_no_column_of_empty_texts(tmp_path: Path, values: list):
    datasets.Dataset.from_dict({"text": values}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: column 'text' is not text"):
        read_all(CorpusConfig(files=str(tmp_path / "a.parquet")))


def test_a_damaged_parquet_file_is_named(tmp_path: Path):
    file = write_rows(tmp_path / "a.parquet", ROWS)
    Path(file).write_bytes(Path(file).read_bytes()[:-20])
    with pytest.raises(UserError, match=r"(a\.parquet|parquet) cannot be (read|opened)"):
        read_all(CorpusConfig(files=file, text_field="body"))


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path):
    table = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=r"several splits \(test, train\); name one: .*d/test"):
        read_all(CorpusConfig(files=str(tmp_path / "d")))
    assert read_all(CorpusConfig(files=str(tmp_path / "d/train"))) == ["a"]


def read_paragraphs(chunk: readers.FileChunk, source: SourceConfig) -> Iterator[str]:
    """A made-up format: `%%` on a line of its own ends a document."""
    yield from "".join(readers.read_text(chunk, source)).removesuffix("\n%%\n").split("\n%%\n")


def test_a_format_is_added_by_a_row_of_the_table(tmp_path: Path, monkeypatch, capsys):
    row = readers.Reader(read_paragraphs, (".pars",), re.compile(rb"\n%%\n"), is_costly=True)
    monkeypatch.setitem(readers.READERS, "paragraphs", row)
    texts = [f"This is text {i}.\nIt has two sentences." for i in range(100)]
    file = tmp_path / "a.pars.gz"
    file.write_bytes(gzip.compress("\n%%\n".join([*texts, " "]).encode()))
    plain = tmp_path / "b.txt"
    plain.write_text("\n%%\n".join(text.replace("text", "string") for text in texts))
    sources = [SourceConfig(files=str(file)), SourceConfig(files=str(plain), layout="paragraphs")]
    monkeypatch.setattr("data_pipeline.corpus.sources.CHUNK_BYTES", 500)
    config = CorpusConfig(sources=sources)
    assert len(list_file_chunks(config)) > 5  # the compressed file, and ranges of the other
    assert read_all(config) == [
        text.replace("text", w) for w in ("text", "string") for text in texts
    ]
    prepare(
        DataConfig(data_dir=str(tmp_path / "data"), corpus=config, vocab=VocabConfig(size=48)), 1
    )
    printed = capsys.readouterr().out
    assert "a.pars.gz (layout paragraphs, weight 1): " in printed and "1 empty" in printed
    with pytest.raises(UserError, match="corpus.layout is 'pars'; it can be auto, .*, paragraphs"):
        read_all(CorpusConfig(files=str(plain), layout="pars"))


# ---------------------------------------------------------------------------------- not UTF-8


CHINESE = "简体中文的网页常常不是这个编码，而是国家标准。它们应该被认出来。\n"
FRENCH = "Voilà l'été: où êtes-vous passé, élève?\n"
BYTES = {
    "encoding=utf-16": FRENCH.encode("utf-16"),
    "encoding=utf-16-le": (FRENCH * 9).encode("utf-16-le"),
    "encoding=utf-16-be": (FRENCH * 9).encode("utf-16-be"),
    "encoding=latin-1": FRENCH.encode("latin-1"),
    "encoding=cp1252": FRENCH.replace("'", "’").encode("cp1252"),
    "encoding=gb18030": CHINESE.encode("gb18030"),
}


@pytest.mark.parametrize("before", [b"", b"Plain ASCII.\n" * 100_000])
@pytest.mark.parametrize("looks", BYTES)
def test_another_encoding_is_recognised_and_read_when_said(tmp_path: Path, looks, before):
    if "utf-16" in looks:
        before = b""
    file, encoding = tmp_path / "a.txt", looks.removeprefix("encoding=")
    file.write_bytes(before + BYTES[looks])
    with pytest.raises(UserError, match=rf"a\.txt: byte \d+ is not utf-8 .* corpus\.{looks}$"):
        read_all(CorpusConfig(files=str(file), layout="line"))
    text = (before + BYTES[looks]).decode(encoding)
    read = read_all(CorpusConfig(files=str(file), layout="line", encoding=encoding))
    assert read == text.split("\n")[:-1]


SENTENCES = {  # language -> a sentence, and the encodings that its files may have
    "ru": ("Старые файлы часто записаны в другой кодировке.", ("cp1251", "koi8-r", "cp866")),
    "uk-UA": ("Це речення має літери, яких інші мови не мають: ґанок, їжак.", ("cp1251",)),
    "pl": ("Gęślą jaźń ścisnął żółw, łącząc świeże źródła.", ("cp1250", "iso-8859-2")),
    "tr": ("Eski dosyalarda ışık, ağaç ve şeker böyle yazılır.", ("cp1254",)),
    "el": ("Τα παλιά αρχεία έχουν συχνά άλλη κωδικοποίηση.", ("cp1253",)),
    "ar": ("الملفات القديمة لها ترميز آخر في الغالب.", ("cp1256",)),
    "ja": ("古いファイルは、別の文字コードで書かれていることが多い。", ("euc_jp", "cp932")),
    "ko": ("옛 파일은 다른 부호로 적힌 것이 많다.", ("cp949",)),
    "zh-Hant": ("舊的檔案常常用別的編碼寫成，應該認得出來。", ("big5",)),
    "th": ("แฟ้มเก่ามักเขียนด้วยรหัสอื่น", ("cp874",)),
}


@pytest.mark.parametrize("language", SENTENCES)
def test_the_language_tells_the_encoding_of_old_files(tmp_path: Path, language: str):
    """As cp1252, which an English file would be taken for, most of their letters are others."""
    text, encodings = SENTENCES[language]
    config = CorpusConfig(files=str(tmp_path / "a.txt"), language=language, layout="line")
    for encoding in encodings:
        (tmp_path / "a.txt").write_bytes(f"Plain.\n{text}\n".encode(encoding))
        with pytest.raises(
            UserError, match=f"looks like {encoding}: set corpus.encoding={encoding}$"
        ):
            read_all(config)
        assert read_all(replace(config, encoding=encoding)) == ["Plain.", text]
    (tmp_path / "a.txt").write_bytes(text.encode() * 2 + b"\xff\n")
    with pytest.raises(UserError, match="looks like UTF-8 with errors: repair the file"):
        read_all(config)


def test_korean_is_not_taken_for_chinese(tmp_path: Path):
    text = "한국어로 쓴 글은 중국어가 아니다. 그래서 다른 이름을 불러야 한다.\n"
    (tmp_path / "a.txt").write_bytes(text.encode("euc-kr"))
    with pytest.raises(UserError, match=r"a\.txt: byte 0 is not utf-8") as error:
        read_all(CorpusConfig(files=str(tmp_path / "a.txt"), layout="line"))
    assert "gb18030" not in str(error.value)


@pytest.mark.parametrize("encoding", ["gb18030", "latin-1", "cp866", "cp1251"])
def test_utf_8_that_is_read_as_another_encoding_is_recognised(tmp_path: Path, encoding: str):
    """Where some files of a folder are in one and some in the other; latin-1 would take any."""
    (tmp_path / "a.txt").write_bytes(b"Plain. " + CHINESE.encode())
    with pytest.raises(UserError, match=rf"7 is not {encoding} .* utf-8: set corpus.encoding=utf"):
        read_all(CorpusConfig(files=str(tmp_path / "a.txt"), layout="line", encoding=encoding))
    with pytest.raises(UserError, match=r"if only some files have it, convert these to UTF-8 or g"):
        read_all(CorpusConfig(files=str(tmp_path / "*.txt"), layout="line", encoding=encoding))


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(SENTENCES[language][0], f"utf-16-{order}") for language in ("ru", "el", "ar", "th")
     for order in ("le", "be")] + [(SENTENCES["ja"][0], "iso2022_jp")],
)  # fmt: skip
def test_what_a_decoder_of_utf_8_may_take_is_recognised(tmp_path: Path, text: str, encoding: str):
    """Each byte of most of these is one of ASCII, so that no decoder of UTF-8 complains."""
    (tmp_path / "a.txt").write_bytes(f"{text}\n{text}\n".encode(encoding))
    config = CorpusConfig(files=str(tmp_path / "a.txt"), layout="line")
    with pytest.raises(
        UserError, match=rf"byte 0 is not utf-8 .*: set corpus.encoding={encoding}$"
    ):
        read_all(config)
    assert read_all(replace(config, encoding=encoding)) == [text, text]


@pytest.mark.parametrize(
    "data, message",
    [
        (bytes(range(256)) * 9, r"byte 128 .* binary data: remove it from corpus\.files"),
        (bytes(1000), "byte 0 .*NUL.* binary data"),
        (b"\x1f\x8b\x08" + bytes(50), r"byte 1 .*rename it to end in \.gz"),
        (
            b"PK\x03\x04" + bytes(80) + b"\xff",
            "byte .* looks like a zip archive: extract",
        ),
        (b"%PDF-1.7\n%\xe2\xe3\xcf", "byte 10 .*looks like a PDF: extract its text to a file"),
        (b"PAR1\x15\xff", r"byte 5 .*rename it to end in \.parquet"),
        (
            (CHINESE * 3).encode() + b"\xff\n" + CHINESE.encode(),
            r"byte 291 .* errors: repair .*errors=replace",
        ),
        (CHINESE.encode()[:-2], r"byte 93 .*end of data.* errors: repair .*errors=replace"),
        (b"A caf\xc3", r"byte 5 .*end of data.* errors: repair .*errors=replace"),
    ],
)
def test_what_is_no_text_at_all_is_named(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.txt: {message}"):
        read_all(CorpusConfig(files=str(tmp_path / "a.txt")))


# ---------------------------------------------------------------------------------- several sources


def document(i: int) -> str:
    return f"Document {i} is here. It has the number {i}."


def config_of(folder: Path, sources: list[SourceConfig], size: int = 48, **settings) -> DataConfig:
    return DataConfig(
        data_dir=str(folder / "data"),
        corpus=CorpusConfig(sources=sources, **{"held_out_fraction": 0.3} | settings),
        vocab=VocabConfig(size=size, min_frequency=1, character_coverage=1.0),
        data=PairsConfig(objective="none"),
    )


def numbers_of(data_dir: str, split: str) -> Counter[int]:
    """How often each `document(i)` is in a split of a store."""
    vocabulary = read_vocabulary(Path(data_dir) / "vocab")
    store = TokenStore.open(Path(data_dir) / "store", split, vocabulary)
    offsets = store.sentence_offsets[store.document_offsets]
    texts = []
    for start, end in zip(offsets, offsets[1:], strict=False):
        ids = store.take(np.arange(start, end))
        pieces = (vocabulary.pieces[i] for i in ids)
        texts.append("".join(p[2:] if p.startswith("##") else f" {p}" for p in pieces))
    return Counter(int(re.search(r"document (\d+)", text)[1]) for text in texts)


@pytest.mark.parametrize("weight", [0.5, 1, 2, 2.5])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_a_weight_takes_documents_exactly(tmp_path: Path, weight: float, deduplicate: bool):
    for name, numbers in (("a", range(101)), ("b", range(200, 240))):
        text = "\n".join(map(document, numbers)) + "\n"
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [
        SourceConfig(files=str(tmp_path / "a.txt"), weight=weight),
        SourceConfig(files=str(tmp_path / "b.txt")),
    ]
    prepare(config_of(tmp_path, sources, deduplicate=deduplicate), workers=1)
    train, held_out = (numbers_of(tmp_path / "data", split) for split in ("train", "held_out"))
    hashes = [hash_text(document(i)) for i in range(240)]
    is_held_out = [number < hash_limit(0.3) for number in hashes]
    n = is_held_out[:101].count(False)
    assert sum(times for i, times in train.items() if i < 200) == floor(weight * n + 0.5)
    assert {times for i, times in train.items() if i < 200} <= {floor(weight), floor(weight) + 1}
    once = floor(min(1, weight) * (101 - n) + 0.5)
    assert sum(i < 200 for i in held_out) == once and set(held_out.values()) == {1}
    assert not any(is_held_out[i] for i in train) and all(is_held_out[i] for i in held_out)
    assert sum(i >= 200 for i in train) == is_held_out[200:].count(False)
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    store = TokenStore.open(tmp_path / "data/store", "train", vocabulary)
    assert number_texts(store)[-1] + 1 == len(train)  # copies are known to be one text
    # the rule: those with the lowest hashes
    order = sorted((i for i in range(101) if not is_held_out[i]), key=hashes.__getitem__)
    more = {i for i in order if train[i] > floor(weight)}
    assert more == set(order[: len(more)])


@FEW
@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=9), min_size=1),
    st.floats(0.01, 5),
    st.sampled_from([0.0, 0.01, 0.5]),
)
def test_shares_of_pieces_add_up_whatever_the_ties(pieces, weight: float, held_out: float):
    arrays = [np.sort(np.array(piece, np.uint64)) for piece in pieces]
    shares = choose_extra_copies(arrays, weight, hash_limit(held_out))
    taken: list[list[int]] = [[], []]
    for piece, both in zip(pieces, shares, strict=True):
        for number in piece:
            kind = number < held_out * 2**64
            if both[kind].claim_place(number):
                taken[kind].append(number)
    for kind in (0, 1):
        of_kind = sorted(n for piece in pieces for n in piece if (n < held_out * 2**64) == kind)
        count = floor(weight * len(of_kind) + 0.5) - floor(weight) * len(of_kind)
        assert sorted(taken[kind]) == of_kind[:count]


def test_each_source_is_read_its_own_way_and_ends_in_a_line(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "b.txt").write_bytes("第一。第二。\n第三。\n".encode("gb18030"))
    rows = [{"text": "Three."}, {"text": " "}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = [
        SourceConfig(files=str(tmp_path / "a.txt")),
        SourceConfig(files=str(tmp_path / "b.txt"), encoding="gb18030", language="zh"),
        SourceConfig(
            dataset=DatasetConfig("json", data_files=str(tmp_path / "c.jsonl")), weight=2.0
        ),
    ]
    prepare(config_of(tmp_path, sources, size=24, held_out_fraction=0.0), workers=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("corpus: ")]
    assert [re.sub(r"^corpus: .*/|\d+ tokens, ", "", line) for line in lines] == [
        "a.txt (layout blank_line, weight 1): 8 bytes, 2 documents, 2 sentences, 4 words, "
        "left out: none",
        "b.txt (layout line, weight 1): 27 bytes, 2 documents, 3 sentences, 9 words, "
        "left out: none",
        "corpus: json (layout dataset, weight 2): 6 bytes, 2 documents, 2 sentences, 4 words, "
        "left out: 1 empty",
    ]
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    third = manifest["sources"][2]
    assert third["name"] == "json" and third["rejects"] == {"empty": 1} and third["words"] == 4
    tokens = sum(manifest[split]["tokens"] for split in ("train", "held_out"))
    assert sum(source["tokens"] for source in manifest["sources"]) == tokens


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_documents_without_words_are_counted_and_have_no_bytes(tmp_path: Path, weight: float):
    lines = ["One two."] * 3 + ["\u200b\u200b"] * 4 + ["Three."]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    source = SourceConfig(files=str(tmp_path / "a.txt"), layout="line", weight=weight)
    config = config_of(tmp_path, [source], size=20, held_out_fraction=0.0, deduplicate=False)
    prepare(config, workers=1)
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    assert manifest["sources"][0]["rejects"] == {"without words": 4}
    assert manifest["train"]["documents"] == 4 * weight
    assert manifest["train"]["bytes"] == (3 * 8 + 6) * weight


@pytest.mark.parametrize(
    ("text", "what"),
    [("One document.\n", "the only document is"), ("One.\n\nTwo.\n", "all 2 documents are")],
)
def test_a_corpus_that_is_held_out_as_a_whole_is_told(tmp_path: Path, text: str, what: str):
    (tmp_path / "a.txt").write_text(text)
    source = SourceConfig(files=str(tmp_path / "a.txt"))
    config = config_of(tmp_path, [source], held_out_fraction=0.999999)
    with pytest.raises(UserError, match=f"{what} held out.*lower corpus.held_out"):
        prepare(config, workers=1)


def test_an_empty_source_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "a.txt").write_text("Some text.\n")
    (tmp_path / "b.txt").write_text("\n \n")
    sources = [SourceConfig(files=str(tmp_path / name)) for name in ("a.txt", "b.txt")]
    with pytest.raises(UserError, match=r"corpus\.sources\[1\] holds no text \(.*b\.txt"):
        prepare(config_of(tmp_path, sources), workers=1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{files: a, sources: [{files: b}]}", "corpus.files is set beside corpus.sources"),
        ("{language: zh, sources: [{files: b}]}", "corpus.language is set beside"),
        ("{sources: [{file: b}]}", r"corpus\.sources\[0\]\.file; did you mean .*\[0\]\.files\?"),
        ("{sources: [{files: b}, {}]}", r"corpus\.sources\[1\] needs exactly one of"),
        ("{sources: [{files: b, weight: 0}]}", r"sources\[0\]\.weight 0\.0 is not in"),
        ("{sources: [{files: b, weight: .nan}]}", r"sources\[0\]\.weight nan is not in"),
        (
            "{builtin: python-docs, layout: line}",
            "corpus.layout applies to files only, but corpus has a bui",
        ),
        (
            "{sources: [{dataset: {path: json}, text_field: body}]}",
            r"sources\[0\]\.text_field applies to files only, .* remove it .*in text_column",
        ),
        ("{sources: [b.txt]}", r"c\.yaml, key corpus\.sources"),
        ("{sources: {files: b}}", r"c\.yaml: corpus\.sources is not a list of sources"),
        (
            "{files: a, sentence_splitter: nltk}",
            "corpus.sentence_splitter is 'nltk'; it can be null, package.module:function",
        ),
    ],
)
def test_a_slip_in_the_sources_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "c.yaml").write_text(f"corpus: {text}\n")
    with pytest.raises(UserError, match=message):
        load_config(DataConfig, str(tmp_path / "c.yaml"))


# ---------------------------------------------------------------------------------- sentences


def test_another_splitter_takes_the_place_of_sentencex(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cut_at_bars.py").write_text(
        "split = lambda text: text.split('|')\n"
        "def words(text): return text\n"
        "def lines(text): return ['a\\nb']\n"
    )
    split = sentence_splitter("en", "cut_at_bars:split")
    assert split_sentences("a.|b|\n c", split) == ["a.", "b", " c"]
    for name in ("words", "lines"):
        with pytest.raises(UserError, match=f"bars:{name} returned .* for 'A first .*; it must"):
            split_sentences("text", sentence_splitter("en", f"cut_at_bars:{name}"))
    for path in ("absent_module:split", "cut_at_bars:absent"):
        with pytest.raises(UserError, match=f"{path} cannot be imported"):
            sentence_splitter("en", path)
    del sys.modules["cut_at_bars"]


@pytest.mark.parametrize(
    "text",
    ["x" * 1_000_000, "word and more words " * 150_000, "One sentence. " * 200_000, "字" * 350_000],
    ids=["a word of a million letters", "3 MB of words", "3 MB of sentences", "1 MB of Chinese"],
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_line_of_megabytes_is_cut_and_whole(text: str, language: str):
    sentences = split_sentences(text, sentence_splitter(language))
    assert "".join(sentences).split() == text.split()
    assert max(map(len, sentences)) <= MAX_CHARACTERS
    assert io.StringIO(text).readline() == text
