"""**corpus** -> sentences: where the text comes from, and text made sound, once.

A corpus is listed as pieces (a byte range of a file, a whole compressed file, a share of a
dataset); reading a piece gives its documents, one `str` each. A piece is all that a worker needs to
know.
"""

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from typing import BinaryIO

from data_pipeline.config import CorpusConfig, to_list
from data_pipeline.errors import UserError

PIECE_BYTES = 16 << 20  # of a plain file: what one worker reads at a time
BLOCK_BYTES = 1 << 20
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Piece:
    """A part of the corpus that is read alone: bytes [start, end) of a file, or share `start` of
    `end`."""

    path: str
    layout: str  # blank_line, line, file, jsonl, dataset, python-docs
    start: int = 0
    end: int | None = None
    version: str = ""  # hash of the file's ends and size, so that a changed file is read again


@dataclass
class Rejects:
    """What was left out, by cause: number of documents."""

    causes: dict[str, int] = field(default_factory=dict)

    def add(self, cause: str) -> None:
        self.causes[cause] = self.causes.get(cause, 0) + 1


# ---------------------------------------------------------------------------------- what there is


def list_pieces(corpus: CorpusConfig) -> list[Piece]:
    """The pieces of a corpus in their order; raises `UserError` for files that are not there."""
    if corpus.source:
        return [Piece("python-docs", "python-docs")]
    if corpus.dataset:
        shares = getattr(open_dataset(corpus), "num_shards", 1)
        return [Piece(corpus.dataset.path, "dataset", i, shares) for i in range(shares)]
    paths = list_files(to_list(corpus.files))
    layout = detect_layout(paths, corpus) if corpus.layout == "auto" else corpus.layout
    pieces = []
    for path in paths:
        size, version = os.path.getsize(path), sample_hash(path)
        file_layout = "jsonl" if corpus.layout == "auto" and is_jsonl(path) else layout
        for start, end in byte_ranges(path, file_layout, size, corpus.encoding):
            pieces.append(Piece(path, file_layout, start, end, version))
    return pieces


def list_files(patterns: list[str]) -> list[str]:
    """The files behind paths and globs, in the order given, each once."""
    paths = []
    for pattern in patterns:
        found = sorted(p for p in glob(pattern, recursive=True) if os.path.isfile(p))
        if os.path.isfile(pattern):
            found = [pattern]
        elif os.path.isdir(pattern):
            raise UserError(f"corpus file {pattern} is a folder; name its files: '{pattern}/*.txt'")
        elif not found:
            what = "no file matches" if has_magic(pattern) else "no corpus file at"
            raise UserError(f"{what} {pattern} (in {os.getcwd()}); put corpus.files right")
        paths += found
    return list(dict.fromkeys(paths))


def sample_hash(path: str) -> str:
    """A hash of a file's size, start and end: enough to notice that it is another file."""
    with open_file(path) as file:
        digest = hashlib.blake2b(file.read(BLOCK_BYTES), digest_size=16)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - BLOCK_BYTES))
        digest.update(file.read() + str(size).encode())
    return digest.hexdigest()


def is_jsonl(path: str) -> bool:
    return re.search(r"\.(jsonl|ndjson|json)(\.\w+)?$", path) is not None


def detect_layout(paths: list[str], corpus: CorpusConfig) -> str:
    """`blank_line` if the first MB of any file has a blank line; else `file` for many, `line` for
    one."""
    for path in paths:
        with open_bytes(path) as file:
            head = read(file, BLOCK_BYTES, path).decode(corpus.encoding, "replace")
        head = head.replace("\r\n", "\n").replace("\r", "\n").strip()
        if not is_jsonl(path) and BLANK_LINE.search(head.encode("utf-8", "replace")):
            return "blank_line"
    return "file" if len(paths) > 1 else "line"


def byte_ranges(path: str, layout: str, size: int, encoding: str) -> list[tuple[int, int | None]]:
    """Ranges of about `PIECE_BYTES` that end between documents; one for a file that cannot be
    cut."""
    whole = os.path.splitext(path)[1] in (*OPENERS, ".zst") or layout == "file"
    if whole or size <= PIECE_BYTES or "\n".encode(encoding) != b"\n":  # UTF-16 has wide line ends
        return [(0, None)]
    boundary = BLANK_LINE if layout == "blank_line" else re.compile(rb"\n")
    cuts = [0]
    with open(path, "rb") as file:
        while (cut := next_match(file, cuts[-1] + PIECE_BYTES, boundary)) is not None:
            cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def next_match(file: BinaryIO, start: int, pattern: re.Pattern) -> int | None:
    """Where the first match at or after byte `start` ends; None if there is none before the end."""
    file.seek(start)
    seen = b""
    while block := file.read(BLOCK_BYTES):
        seen += block
        if match := pattern.search(seen):
            return start + match.end()
        rest = seen[len(seen.rstrip()) :]  # white space may be the start of a match
        start, seen = start + len(seen) - len(rest), rest
    return None


# ---------------------------------------------------------------------------------- reading


def read_documents(piece: Piece, corpus: CorpusConfig, rejects: Rejects) -> Iterator[str]:
    """The documents of a piece, one `str` each, never empty; paragraphs are its lines.

    Raises `UserError` that names file and byte offset for bytes that are not text.
    """
    if piece.layout == "python-docs":
        from data_pipeline.python_docs import read_python_docs

        documents = read_python_docs()
    elif piece.layout == "dataset":
        documents = read_dataset(piece, corpus)
    elif piece.layout == "jsonl":
        documents = read_jsonl(piece, corpus)
    elif piece.layout == "file":
        documents = ["".join(read_text(piece, corpus))]
    elif piece.layout == "line":
        documents = read_lines(piece, corpus)
    else:
        documents = read_blank_line_documents(piece, corpus)
    for document in documents:
        if document.strip():
            yield document
        elif piece.layout != "line":
            rejects.add("empty")


def read_text(piece: Piece, corpus: CorpusConfig) -> Iterator[str]:
    """The text of a piece in blocks: decoded, no BOM, line ends alike, control characters to
    spaces."""
    decoder = codecs.getincrementaldecoder(corpus.encoding)(corpus.errors)
    position, pending = piece.start, ""
    with open_bytes(piece.path) as file:
        if piece.start:
            file.seek(piece.start)
        while True:
            wanted = BLOCK_BYTES if piece.end is None else min(BLOCK_BYTES, piece.end - position)
            block = read(file, wanted, piece.path)
            try:
                text = pending + decoder.decode(block, final=not block)
            except UnicodeError as error:
                offset, reason = position, str(error)  # UTF-16 without its mark
                if isinstance(error, UnicodeDecodeError):
                    offset += len(block) - len(error.object) + error.start
                    reason = error.reason
                raise UserError(
                    f"{piece.path}: byte {offset} is not {corpus.encoding} ({reason}); "
                    "convert the file, set corpus.encoding, or set corpus.errors=replace"
                ) from None
            if position == 0:
                text = text.removeprefix("\ufeff")
            pending = (
                "\r" if text.endswith("\r") and block else ""
            )  # the \n may be in the next block
            yield sound(text.removesuffix("\r") if pending else text)
            position += len(block)
            if not block:
                return


def sound(text: str) -> str:
    """`text` with line ends alike and control characters as spaces; nothing else is touched."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return CONTROL.sub(" ", text) if CONTROL.search(text) else text


def read_lines(piece: Piece, corpus: CorpusConfig) -> Iterator[str]:
    rest = ""
    for text in read_text(piece, corpus):
        *lines, rest = (rest + text).split("\n") if "\n" in text else [rest + text]
        yield from lines
    yield rest


def read_blank_line_documents(piece: Piece, corpus: CorpusConfig) -> Iterator[str]:
    lines: list[str] = []
    for line in read_lines(piece, corpus):
        if line and not line.isspace():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def read_jsonl(piece: Piece, corpus: CorpusConfig) -> Iterator[str]:
    for number, line in enumerate(read_lines(piece, corpus), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[corpus.text_field]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            where = f"{piece.path}: JSON line {number}" + (
                f" after byte {piece.start}" if piece.start else ""
            )
            raise UserError(
                f"{where} is not an object with a text field {corpus.text_field!r}: {line[:80]!r}; "
                "set corpus.text_field, or corpus.layout if these are not JSON lines"
            ) from None
        text = SURROGATE.sub("\ufffd", text)  # half a character, as \\ud83d in JSON
        yield re.sub(r"\n\s*\n", "\n", sound(text))


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file; raises `EOFError` if it was cut off, which
    zstandard's own reader takes for the end."""

    def __init__(self, file: BinaryIO):
        import zstandard

        self.file, self.new_frame = file, zstandard.ZstdDecompressor().decompressobj
        self.frame, self.packed, self.ready = self.new_frame(), b"", memoryview(b"")
        self.inside = False  # a frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.ready:
            self.packed = self.packed or self.file.read(1 << 17)
            if not self.packed:
                if self.inside:
                    raise EOFError("it ends before its last frame does")
                return 0
            self.ready, self.inside = memoryview(self.frame.decompress(self.packed)), True
            self.packed = b""
            if self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, self.new_frame()
                self.inside = False
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n

    def close(self) -> None:
        self.file.close()
        super().close()


def open_file(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except PermissionError:
        raise UserError(f"corpus file {path} may not be read; check its permissions") from None


def open_bytes(path: str) -> BinaryIO:
    """The (decompressed) bytes of a file; a plain file can seek."""
    suffix, file = os.path.splitext(path)[1], open_file(path)
    if suffix == ".zst":
        return io.BufferedReader(ZstdFile(file), BLOCK_BYTES)
    return OPENERS[suffix](file) if suffix in OPENERS else file


def read(file: BinaryIO, size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except (EOFError, OSError, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{path} is damaged or not what its name says: {error}") from None
    except Exception as error:  # zstandard's own error class, without importing it here
        if type(error).__module__.startswith("zstandard") or "Zstd" in type(error).__name__:
            raise UserError(f"{path} is damaged or not what its name says: {error}") from None
        raise


def open_dataset(corpus: CorpusConfig):
    """The configured dataset, streamed; raises `UserError` with the reason if it cannot be had."""
    import datasets

    wanted = corpus.dataset
    files = to_list(wanted.data_files) or None
    try:
        return datasets.load_dataset(
            wanted.path, wanted.name, split=wanted.split, data_files=files, streaming=True
        )
    except Exception as error:  # datasets raises many kinds; all of them are about what was asked
        raise UserError(f"dataset {wanted.path} cannot be opened: {error}") from None


def read_dataset(piece: Piece, corpus: CorpusConfig) -> Iterator[str]:
    stream = open_dataset(corpus)
    if piece.end and piece.end > 1:
        stream = stream.shard(piece.end, piece.start)
    column = corpus.dataset.text_column
    for row in stream:
        if column not in row:
            raise UserError(
                f"dataset {piece.path} has no column {column!r}, but {', '.join(row)}; "
                "set corpus.dataset.text_column"
            )
        yield re.sub(r"\n\s*\n", "\n", sound(row[column] or ""))


def is_held_out(document: bytes, share: float) -> bool:
    """Whether a document is kept for evaluation: by a hash of its text, whatever the order of
    files."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
