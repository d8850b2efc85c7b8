"""corpus: every layout, compression and line end gives the same documents, and what is not text is
named.

The reference is the rule said plainly: decode the whole file, make line ends alike, split.
"""

import bz2
import gzip
import json
import lzma
import os
import re
import tarfile
from itertools import groupby
from math import sqrt
from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.build.prepare import DATA_FILES
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import MARKER
from data_pipeline.config import CorpusConfig, DatasetConfig, SourceConfig
from data_pipeline.corpus import readers, sources
from data_pipeline.corpus.selection import hash_limit, hash_text
from data_pipeline.corpus.sources import is_ours
from pretrain.run_folder import RUN_FILES

FEW = settings(max_examples=150)
TEXT = "First paragraph.\nSecond, with é and 中文.\n\nAnother document.\n \t\nA third 🐎.\n"
COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(*files: Path, **settings) -> list[str]:
    config = CorpusConfig(files=[str(file) for file in files], **settings)
    return read_all(config)


def read_all(config: CorpusConfig) -> list[str]:
    pieces = sources.list_file_chunks(config)
    return [d for piece in pieces for d in readers.read_documents(piece, config, readers.Rejects())]


def plain_documents(text: str, layout: str) -> list[str]:
    """The rule of the design page, on a whole text at once."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)
    if layout == "file":
        return [re.sub(r"\n\s*\n", "\n", text)] if text.strip() else []
    lines = text.split("\n")
    if layout == "line":
        return [line for line in lines if line.strip()]
    groups = groupby(lines, key=lambda line: bool(line.strip()))
    return ["\n".join(group) for has_text, group in groups if has_text]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# ---------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", ["blank_line", "line", "file"])
def test_a_layout_says_what_a_document_is(tmp_path: Path, layout: str):
    documents = read(write(tmp_path / "a.txt", TEXT), layout=layout)
    assert documents == plain_documents(TEXT, layout)
    assert len(documents) == {"blank_line": 3, "line": 4, "file": 1}[layout]


def test_a_json_line_is_a_document(tmp_path: Path):
    texts = ["One.\nTwo, é 中.", "Three.\n\n \nFour.", " \n"]
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)]
    file = write(tmp_path / "a.jsonl", "\n".join([lines[0], "", *lines[1:]]))
    # blank lines inside a document would make several of it elsewhere, so they go
    assert read(file, text_field="body") == ["One.\nTwo, é 中.", "Three.\nFour."]
    other = write(tmp_path / "a.txt", lines[0])
    assert read(other, text_field="body", layout="jsonl") == texts[:1]


@pytest.mark.parametrize(
    "lines, number",
    [
        (['{"text": "a"}', '{"body": "b"}'], 2),
        (['{"text": "a"}', "", "{broken"], 3),
        (['{"text": 3}'], 1),
        (['{"text": null}'], 1),
        (['["a list"]'], 1),
        (['"a string"'], 1),
        (["[" * 100_000], 1),
    ],
)
def test_a_json_line_without_the_text_is_named(tmp_path: Path, lines: list[str], number: int):
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    with pytest.raises(UserError, match=rf"a\.jsonl: JSON line {number} .*'text'"):
        read(file)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"body": "b", "id": 3}', "has no field 'text' among body, id; set corpus.text_field"),
        (
            '{"meta": {"text": "b"}}',
            r"'text' among meta \(nested fields are not read\); set",
        ),
        ('{"text": null}', "has null in 'text', which is not text"),
        ('{"text": ["a", "b"]}', r'has \["a", "b"\] in .text., which is not text'),
    ],
)
def test_a_json_line_is_told_by_its_fields(tmp_path: Path, line: str, said: str):
    with pytest.raises(UserError, match=f"JSON line 1 .*{said}"):
        read(write(tmp_path / "a.jsonl", line))


@pytest.mark.parametrize("text", ['[{"text": "a"},\n{"text": "b"}]\n', '[\n{"text": "a"}\n]\n'])
def test_an_array_of_json_is_told_with_the_way_out(tmp_path: Path, text: str):
    file = write(tmp_path / "a.json", text)
    with pytest.raises(UserError, match=r"a\.json is a JSON array; write its items as lines"):
        read(file)


def test_a_json_line_of_a_later_part_is_named_with_its_byte(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1)
    file = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"}\n{broken\n')
    with pytest.raises(UserError, match=r"a\.jsonl: JSON line 1 after byte 28 is not"):
        read(file)


def test_a_lone_surrogate_in_json_is_text_that_can_be_encoded(tmp_path: Path):
    # web crawls have halves of emoji as \ud83d; nothing after this step can take them
    file = write(tmp_path / "a.jsonl", r'{"text": "half \ud83d, whole \ud83d\udc34"}')
    (document,) = read(file)
    assert document.encode("utf-8").decode().endswith(", whole 🐴")
    assert document.startswith("half ")


def test_the_layout_is_detected(tmp_path: Path):
    blank = write(tmp_path / "blank.txt", "a\nb\n\nc\n")
    lines = write(tmp_path / "lines.txt", "\n\na\nb\nc\n\n")  # blank lines at the ends say nothing
    mac = write(tmp_path / "mac.txt", "a\rb\r\rc\r")
    assert read(blank) == ["a\nb", "c"]
    assert read(lines) == ["a", "b", "c"]
    assert read(mac) == ["a\nb", "c"]
    assert read(lines, lines.with_name("blank.txt")) == ["a\nb\nc", "a\nb", "c"]
    other = write(tmp_path / "other.txt", "d\ne\n")
    assert [d.split() for d in read(lines, other)] == [["a", "b", "c"], ["d", "e"]]


@pytest.mark.parametrize("blank", ["\x0c", "\u3000", "\xa0 "])
def test_a_line_is_blank_for_the_layout_where_it_is_for_the_reader(tmp_path: Path, blank: str):
    file = write(tmp_path / "a.txt", f"one\ntwo\n{blank}\nthree\nfour\n")
    assert read(file) == read(file, layout="blank_line") == ["one\ntwo", "three\nfour"]
    file = write(tmp_path / "b.txt", "\ufeff\n\none\ntwo\n")  # blank lines after a mark say nothing
    assert read(file) == ["one", "two"]


def test_a_blank_line_is_found_far_into_the_first_files(tmp_path: Path):
    """Corpora begin with a table of contents, or with a long article."""
    long = "a line of text\n" * 150_000  # 2.2 MB
    first = write(tmp_path / "a.txt", f"{long}\n{long}")
    assert len(read(first)) == 2
    second = write(tmp_path / "b.txt", long)
    assert len(read(second, first)) == 3
    at_ends = write(tmp_path / "c.txt", f"{long}\n\n\n")
    assert len(read(at_ends)) == 150_000


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("blank", ["\n\n", "\r\n\r\n", "\r\r", "\n\u3000\n"])
def test_a_blank_line_between_two_blocks_is_found(tmp_path: Path, blank, size, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", size)
    assert len(read(write(tmp_path / "a.txt", f"一{blank}b\n"))) == 2
    assert len(read(write(tmp_path / "b.txt", f"{blank}一\nb{blank}"))) == 2  # a line each


def test_a_blank_line_beyond_the_bytes_that_are_searched_is_not_sought(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
    monkeypatch.setattr(sources, "SEARCHED_BYTES", 16)
    late = write(tmp_path / "a.txt", "one line\nand another\n\nend\n")
    soon = write(tmp_path / "b.txt", "a\n\nb")
    assert [d.split() for d in read(late)] == [["one", "line"], ["and", "another"], ["end"]]
    assert len(read(late, soon)) == 4  # of each file the first block at least


def test_suffixes_in_capitals_say_what_small_ones_do(tmp_path: Path):
    (one,) = read(write(tmp_path / "A.JSONL", '{"text": "a text"}\n'))
    (other,) = read(write(tmp_path / "B.CSV", "text,n\nanother,1\n"))
    assert (one, other) == ("a text", "another")


def test_a_tar_archive_is_no_text(tmp_path: Path):
    file = tmp_path / "a.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.add(write(tmp_path / "a.txt", "a text\n"), "a.txt")
    with pytest.raises(UserError, match="a.tar.gz is a tar archive; unpack it"):
        read(file)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "a text\n")
    assert [chunk.path for chunk in sources.list_source(SourceConfig(files="~/a.txt"))] == [
        str(tmp_path / "a.txt")
    ]


def test_the_layout_of_a_file_in_another_encoding_is_detected(tmp_path: Path):
    text = "one\ntwo\n\nthree\n"
    file = write(tmp_path / "a.txt", text.encode("utf-16"))
    assert read(file, encoding="utf-16") == plain_documents(text, "blank_line")


def test_a_layout_that_is_said_beats_the_name_of_the_file(tmp_path: Path):
    file = write(tmp_path / "notes.json", "plain\nlines\n")
    assert read(file, layout="line") == ["plain", "lines"]


# ---------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_reads_as_the_plain_one(tmp_path: Path, suffix: str):
    data = (TEXT * 20_000).encode()  # above one block
    plain = write(tmp_path / "a.txt", data)
    packed = write(tmp_path / f"b.txt{suffix}", COMPRESSORS[suffix](data))
    assert read(packed) == read(plain)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_file_of_several_compressed_members_is_read_whole(tmp_path: Path, suffix: str):
    members = [COMPRESSORS[suffix](part.encode()) for part in ("a\n\nb", "c\n\n", "d\n")]
    assert read(write(tmp_path / f"a{suffix}", b"".join(members))) == ["a", "bc", "d"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("damage", ["cut", "changed", "plain"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, damage: str):
    text = "".join(f"{i * 7919 % 10007} words\n\n" for i in range(20_000))
    data = COMPRESSORS[suffix](text.encode())
    middle = len(data) // 2
    damaged = {
        "cut": data[:middle],
        "changed": data[:middle] + bytes(256) + data[middle + 256 :],
        "plain": text.encode(),
    }
    file = write(tmp_path / f"a.txt{suffix}", damaged[damage])
    with pytest.raises(UserError, match=re.escape(f"a.txt{suffix} is damaged")):
        read(file)


def test_files_come_in_the_order_given_and_each_once(tmp_path: Path):
    for name in "abc":
        write(tmp_path / f"{name}.txt", f"{name}\n")
    write(tmp_path / "d.md", "d\n")
    assert read(tmp_path / "c.txt", tmp_path / "*.txt", layout="line") == ["c", "a", "b"]
    (tmp_path / "again").symlink_to(tmp_path)  # a link to a folder above
    assert read(tmp_path / "**/*.txt", tmp_path / "./b.txt", layout="line") == ["a", "b", "c"]
    literal = write(tmp_path / "[a].txt", "brackets\n")  # a glob for a.txt, and a file's name
    assert read(literal, layout="line") == ["brackets"]


def test_a_glob_takes_in_nothing_that_preparation_has_written(tmp_path: Path):
    ours = ["vocab/vocab.txt", "work/abc/words.txt", "metrics.jsonl", "lock", "before-1/export/a"]
    for name in (*ours, "a.txt", "work.txt", "texts/lock"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "data" / name, f"{name}\n")
    (tmp_path / "other/vocab").mkdir(parents=True)
    write(tmp_path / "other/vocab/b.txt", "of the user\n")
    theirs = ["a.txt", "of the user", "texts/lock", "work.txt"]
    assert sorted(read(tmp_path / "**/*", layout="line")) == sorted(ours + theirs)
    (tmp_path / "data" / MARKER).touch()
    assert sorted(read(tmp_path / "**/*", layout="line")) == theirs
    named = read(tmp_path / "data/vocab/vocab.txt", layout="line")
    assert named == ["vocab/vocab.txt"]


def test_every_name_that_is_written_in_a_marked_folder_is_known(tmp_path: Path):
    (tmp_path / MARKER).touch()
    for name in (*DATA_FILES, *RUN_FILES, "wandb_id.txt", "lock", MARKER):
        assert is_ours(str(tmp_path / name)), name
        assert not is_ours(str(tmp_path / "texts" / name)), name


def test_a_link_to_nothing_is_named(tmp_path: Path):
    write(tmp_path / "a.txt", "a\n")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="b.txt is a broken or circular link"):
        read(tmp_path / "*.txt")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").symlink_to(tmp_path / "b.txt")
    with pytest.raises(UserError, match="b.txt is a broken or circular link"):
        read(tmp_path / "*.txt")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_of_no_bytes_is_damaged(tmp_path: Path, suffix: str):
    file = write(tmp_path / f"a.txt{suffix}", b"")
    with pytest.raises(UserError, match=re.escape(f"a.txt{suffix} is damaged")):
        read(file)


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".zst"])
def test_damage_in_a_later_frame_of_a_compressed_file_is_named(tmp_path: Path, suffix: str):
    """bz2 and lzma of Python take it for garbage that may follow a file."""
    lines = [f"{i} a line of text {i * i}\n" for i in range(300)]
    frames = [COMPRESSORS[suffix]("".join(lines[i::3]).encode()) for i in range(3)]
    whole = write(tmp_path / f"whole.txt{suffix}", b"".join(frames))
    kept = read(whole, layout="line")
    assert kept == [line.strip() for i in range(3) for line in lines[i::3]]
    for place in range(0, len(frames[1]), 7):
        damaged = bytearray(b"".join(frames))
        damaged[len(frames[0]) + place] ^= 0x10
        try:
            found = read(write(tmp_path / f"damaged.txt{suffix}", bytes(damaged)), layout="line")
        except UserError as error:
            assert re.search("is damaged.*; put an intact copy there", str(error))
        else:  # of .zst, which has no checksum here; and no bit of it may be unused
            assert suffix == ".zst" or found == kept
    for rest in (b"garbage", frames[2][:-3]):  # nor may what bzip2 ignores with a warning
        file = write(tmp_path / f"longer.txt{suffix}", b"".join([*frames, rest]))
        with pytest.raises(UserError, match="is damaged"):
            read(file, layout="line")


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
@pytest.mark.parametrize("padding", [4, 1 << 12])
def test_zeros_may_follow_the_streams_of_a_file(tmp_path: Path, padding: int, suffix: str):
    zeros = bytes(padding)
    packed = b"".join(COMPRESSORS[suffix](line) + zeros for line in (b"a\n", b"b\n"))
    assert read(write(tmp_path / f"a.txt{suffix}", packed), layout="line") == ["a", "b"]


def test_a_zst_file_of_a_long_window_is_read(tmp_path: Path):
    settings = zstandard.ZstdCompressionParameters(window_log=28)  # above the usual limit
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    file = write(tmp_path / "a.txt.zst", packer.compress(b"a\n") + packer.flush())
    assert read(file, layout="line") == ["a"]


def test_a_suffix_counts_in_capitals_too(tmp_path: Path):
    assert read(write(tmp_path / "A.TXT.GZ", gzip.compress(b"a\n")), layout="line") == ["a"]


def test_an_encoding_that_the_first_bytes_tell_is_read_whole(tmp_path: Path):
    text = "".join(f"{i} 한국어\n" for i in range(100))
    file = write(tmp_path / "a.txt", text.encode("iso2022_kr"))
    with patch("data_pipeline.corpus.sources.CHUNK_BYTES", 100):
        found = read(file, layout="line", encoding="iso2022_kr")
    assert found == text.splitlines()


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent.txt", "no corpus file at .*absent.txt"),
        ("*.md", r"no file matches .*\*\.md"),
        ("[1]*.md", r"no file matches .*, or write \[\[\] for a \["),
        ("", r"is a folder; name its files: '[^*]*[^/]/\*\.txt'"),
    ],
)
def test_files_that_are_not_there_are_named(tmp_path: Path, name: str, message: str):
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_pipe_is_named(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe is a pipe or a device; save its text in a file"):
        read(tmp_path / "pipe")


def test_an_unreadable_file_is_named(tmp_path: Path):
    file = write(tmp_path / "a.txt", "a\n")
    real = open

    def no_permission(path, *args):  # tests may run as root, whom no permission stops
        if path == str(file):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args)

    with patch("builtins.open", no_permission), pytest.raises(UserError, match="a.txt"):
        read(file, layout="line")


# ---------------------------------------------------------------------------------- text


@pytest.mark.parametrize("layout", ["blank_line", "line", "file"])
def test_marks_and_line_ends_of_any_system_read_alike(tmp_path: Path, layout: str):
    plain = read(write(tmp_path / "lf", TEXT), layout=layout)
    for name, text in {
        "bom": "\ufeff" + TEXT,
        "crlf": TEXT.replace("\n", "\r\n"),
        "cr": TEXT.replace("\n", "\r"),
    }.items():
        assert read(write(tmp_path / name, text), layout=layout) == plain, name


def test_control_characters_become_spaces_and_nothing_else_changes(tmp_path: Path):
    kept = [c for c in map(chr, range(0xA0, 0x110000)) if not "\ud800" <= c <= "\udfff"]
    text = "".join(kept) + "".join(map(chr, range(0x20, 0x7F))) + "\t"
    assert read(write(tmp_path / "kept", text), layout="file") == [text]
    control = [*range(9), 11, 12, *range(14, 32), *range(127, 160)]
    text = "".join(f"a{chr(code)}b" for code in control)
    assert read(write(tmp_path / "control", text), layout="line") == ["a b" * len(control)]


def test_another_encoding_is_decoded(tmp_path: Path):
    text = "简体中文。\n\n第二篇。\n"
    file = write(tmp_path / "a.txt", text.encode("gb18030"))
    assert read(file, encoding="gb18030") == ["简体中文。", "第二篇。"]


def test_characters_of_gb18030_that_utf8_could_continue_with_are_read(tmp_path: Path):
    text = "很好" * 12
    file = write(tmp_path / "a.txt", text.encode("gb18030"))
    assert read(file, encoding="gb18030", layout="file") == [text]


@pytest.mark.parametrize("encoding", ["cp1252", "gb18030", "latin-1"])
@pytest.mark.parametrize("shift", range(3))
def test_utf8_after_a_long_ascii_start_is_told_from_another_encoding(
    tmp_path: Path, encoding: str, shift: int
):
    """Wherever in a character a block begins."""
    start = "x" * shift + "only ASCII here\n" * 40
    file = write(tmp_path / "a.txt", start + "汉字、é und ü, « wie hier »\n" * 20)
    with patch.object(readers, "READ_BYTES", 100):
        with pytest.raises(UserError, match=f"is not {encoding} .*set corpus.encoding=utf-8"):
            read(file, encoding=encoding, layout="line")
        text = start + "é und ü, « wie hier »\n" * 20
        file = write(tmp_path / "b.txt", text.encode(encoding, "ignore"))
        assert len(read(file, encoding=encoding, layout="line")) == text.count("\n")


@pytest.mark.parametrize("name", ["utf-8", "UTF8", "utf-8-sig"])
def test_utf16_is_told_from_utf8_under_any_name(tmp_path: Path, name: str):
    file = write(tmp_path / "a.txt", ("one two\n" * 50).encode("utf-16-le"))
    with pytest.raises(UserError, match="many bytes are NUL"):
        read(file, encoding=name, layout="line")


def test_utf16_without_its_mark_is_an_error_that_names_the_file(tmp_path: Path):
    file = write(tmp_path / "a.txt", "one\ntwo\n".encode("utf-16-le"))
    with pytest.raises(UserError, match="a.txt"):
        read(file, encoding="utf-16", layout="line")
    for encoding in ("utf-16", "utf-32"):
        file = write(tmp_path / "a.txt", "one\n\ntwo\n\nthree, as ASCII")
        with pytest.raises(UserError, match=f"byte 0 is not {encoding} .*looks like utf-8: set"):
            read(file, encoding=encoding)


@FEW
@given(
    st.text(alphabet="ab \t\n\r\x0b\x85é中🐎\ufeff\u2028", max_size=60),
    st.sampled_from(["blank_line", "line", "file"]),
    st.integers(4, 40),
    st.integers(1, 30),
)
@example("a\r\n\r\nb\r\rc", "blank_line", 4, 2)
@example("abc\r\nd", "blank_line", 4, 30)  # a line end that two blocks share
def test_pieces_joined_are_the_whole_file(tmp_path_factory, text, layout, block, piece):
    file = write(tmp_path_factory.getbasetemp() / "pieces.txt", text)
    with (
        patch.multiple(sources, BLOCK_BYTES=block, CHUNK_BYTES=piece),
        patch.object(readers, "READ_BYTES", block),
    ):
        assert read(file, layout=layout) == plain_documents(text, layout)


def test_large_files_are_cut_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    text = "".join(f"line {i}\n" + "\n" * (i % 3 == 0) for i in range(2000))
    file = write(tmp_path / "a.txt", text)
    for layout, at_least in (("blank_line", 10), ("line", 10), ("file", 1)):
        pieces = sources.list_file_chunks(CorpusConfig(files=str(file), layout=layout))
        assert len(pieces) >= at_least
        assert read(file, layout=layout) == plain_documents(text, layout)
    rows = write(tmp_path / "a.jsonl", "".join(f'{{"text": "{i} é"}}\n' for i in range(500)))
    assert len(sources.list_file_chunks(CorpusConfig(files=str(rows)))) >= 10
    assert read(rows) == [f"{i} é" for i in range(500)]


@pytest.mark.parametrize("size", [1, 100, (1 << 20) + 1, 3 << 20])
def test_a_change_at_the_start_or_the_end_or_of_the_size_of_a_file_shows(tmp_path: Path, size: int):
    texts = [b"x" * size, b"y" + b"x" * (size - 1), b"x" * (size - 1) + b"z", b"x" * (size + 1)]
    found = [sources.sample_hash(write(tmp_path / "a.txt", text)) for text in texts]
    assert len(set(found)) == len(texts)


def test_a_large_utf16_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 100)
    text = "".join(f"line {i}\n" for i in range(100))
    file = write(tmp_path / "a.txt", text.encode("utf-16"))
    assert read(file, encoding="utf-16", layout="line") == plain_documents(text, "line")


def test_a_place_to_cut_is_sought_once_through_the_file(tmp_path: Path, monkeypatch):
    """One document of a GB must not be searched again with each MB that is read."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1 << 10)
    file = write(tmp_path / "a.txt", b"word word word\n" * 30_000)
    searched = 0

    class Pattern:
        def search(self, data: bytes):
            nonlocal searched
            searched += len(data)
            return re.search(rb"\n[ \t\r]*\n", data)

    with open(file, "rb") as opened:
        assert sources.next_match(opened, 0, Pattern()) is None
    assert searched < 3 * file.stat().st_size


def test_a_place_to_cut_is_found_where_two_blocks_meet(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
    with open(write(tmp_path / "a.txt", "abc\n \ndef"), "rb") as file:
        assert sources.next_match(file, 0, readers.BLANK_LINE) == 6


# ---------------------------------------------------------------------------------- not text


@pytest.mark.parametrize("offset", [0, 7, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2_500_000])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8"])  # no start of a character; half of one
def test_a_byte_that_is_not_utf8_is_named_by_file_and_offset(tmp_path: Path, offset, bad):
    data = b"x" * offset + bad + b"y" * 1000
    file = write(tmp_path / "a.txt", data)
    with pytest.raises(UserError, match=rf"a\.txt: byte {offset} is not utf-8"):
        read(file, layout="file")
    packed = write(tmp_path / "a.txt.gz", gzip.compress(data, 1))
    with pytest.raises(UserError, match=rf"a\.txt\.gz: byte {offset} is not utf-8"):
        read(packed, layout="file")


def test_a_character_that_two_blocks_share_is_read(tmp_path: Path):
    for before in range(1, 5):
        text = "x" * ((1 << 20) - before) + "🐎中" + "y" * 10
        assert read(write(tmp_path / "a.txt", text), layout="file") == [text]


@FEW
@given(st.binary(max_size=40), st.integers(1, 9), st.integers(1, 20))
@example(b"a\n\xe4\xb8\n", 3, 2)
def test_the_offset_is_that_of_the_whole_file(tmp_path_factory, data, block, piece):
    file = write(tmp_path_factory.getbasetemp() / "bytes.txt", data)
    try:
        data.decode("utf-8")
        expected = None
    except UnicodeDecodeError as error:
        expected = error.start
    with (
        patch.multiple(sources, BLOCK_BYTES=block, CHUNK_BYTES=piece),
        patch.object(readers, "READ_BYTES", block),
    ):
        try:
            read(file, layout="line")
            found = None
        except UserError as error:
            found = int(re.search(r"byte (\d+)", str(error))[1])
    assert found == expected


@FEW
@given(st.binary(max_size=40), st.integers(4, 9))
def test_bytes_that_are_not_text_are_replaced_on_request(tmp_path_factory, data, block):
    file = write(tmp_path_factory.getbasetemp() / "bytes.txt", data)
    with patch.object(readers, "READ_BYTES", block):
        documents = read(file, layout="file", errors="replace")
    assert documents == plain_documents(data.decode("utf-8", "replace"), "file")


# ---------------------------------------------------------------------------------- datasets


ROWS = ["One.\nTwo.", "Drei, é 中.", "Four.\n\nFive.\x07"]
READ_ROWS = ["One.\nTwo.", "Drei, é 中.", "Four.\nFive. "]


def write_rows(path: Path, rows: list[str]) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"body": rows}), path)
    else:
        write(path, "".join(json.dumps({"body": row}) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_local_file_is_read_through_datasets(tmp_path: Path, kind: str):
    file = write_rows(tmp_path / f"rows.{kind}", ROWS)
    dataset = DatasetConfig(path=kind, data_files=file, text_column="body")
    assert read_all(CorpusConfig(dataset=dataset)) == READ_ROWS


def test_a_dataset_of_lines_is_read_without_its_empty_rows(tmp_path: Path):
    file = write(tmp_path / "a.txt", "one\n\ntwo\n")
    dataset = DatasetConfig(path="text", data_files=[str(file)])
    assert read_all(CorpusConfig(dataset=dataset)) == ["one", "two"]


def test_a_dataset_is_streamed_in_shares_that_hold_each_row_once(tmp_path: Path):
    rows = [f"row {i}" for i in range(30)]
    files = [write_rows(tmp_path / f"{i}.json", rows[i::3]) for i in range(3)]
    dataset = DatasetConfig(path="json", data_files=files, text_column="body")
    assert len(sources.list_file_chunks(CorpusConfig(dataset=dataset))) == 3
    with patch("datasets.load_dataset", wraps=__import__("datasets").load_dataset) as load:
        assert sorted(read_all(CorpusConfig(dataset=dataset))) == sorted(rows)
    assert all(call.kwargs["streaming"] for call in load.call_args_list)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_two_columns_of_the_name_of_the_text_are_refused(tmp_path: Path, name: str):
    rows = ["text id text".split(), "a 1 b".split()]
    if name == "a.parquet":
        import pyarrow
        from pyarrow import parquet

        columns = [pyarrow.array([cell]) for cell in rows[1]]
        parquet.write_table(pyarrow.table(columns, names=rows[0]), tmp_path / name)
    else:
        mark = "," if name == "a.csv" else "\t"
        (tmp_path / name).write_text("\n".join(map(mark.join, rows)))
    with pytest.raises(
        UserError, match="has two columns named 'text'; rename the one that does not hold the text"
    ):
        read_all(CorpusConfig(files=str(tmp_path / name)))


def test_a_dataset_that_cannot_be_had_says_why(tmp_path: Path):
    file = write_rows(tmp_path / "rows.json", ROWS)
    with pytest.raises(UserError, match="no column 'text' .columns: body"):
        read_all(CorpusConfig(dataset=DatasetConfig(path="json", data_files=file)))
    absent = DatasetConfig(path="json", data_files=str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match="dataset json cannot be opened"):
        read_all(CorpusConfig(dataset=absent))


# ---------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5])
def test_about_the_share_that_was_asked_is_held_out(share: float):
    n = 20_000
    found = sum(hash_text(f"document {i}") < hash_limit(share) for i in range(n))
    assert abs(found - n * share) <= 4 * sqrt(n * share * (1 - share))


@FEW
@given(st.text(), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_larger_share_holds_what_a_smaller_one_does(document: str, one: float, other: float):
    (small, large), number = sorted([one, other]), hash_text(document)
    assert (number < hash_limit(small)) <= (number < hash_limit(large))
