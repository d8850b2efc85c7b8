"""Read the documents of a file chunk as clean text, one `str` each.

A worker needs only the chunk and its source for that. Everything about a format is in its row of
`READERS`, at the end.
"""

import codecs
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import find_delimiter
from data_pipeline.config import DatasetConfig, SourceConfig, to_list
from data_pipeline.corpus.encodings import Utf8Watch, check_start, decoding_error
from data_pipeline.corpus.files import SLOW, compression, open_bytes, read

MOST_CHARACTERS = 1 << 24  # of a line or a document, which is held as a whole
MOST_RATIO, SURE_BYTES = 200, 1 << 26  # unpacked / packed bytes, beyond the first 64 MB
ROWS = 16  # of a Parquet file to unpack at once, in which a text may recur
READ_BYTES = 1 << 17  # bytes to decode at once: they fit the processor's cache
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
BAD_ROWS = "bad rows"  # a cause of `Rejects`
LINE_END = re.compile(rb"\n")
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class FileChunk:
    """A part of the corpus that one worker reads: bytes [start, end) of a file, or shard `start` of
    the `end` shards of a dataset."""

    path: str
    layout: str  # a key of `READERS`
    start: int = 0
    end: int | None = None
    version: str = ""  # `sample_hash` of the file, so that a changed file is read again
    source: int = 0  # index of its source in the corpus

    @property
    def size(self) -> int:
        """Bytes of the file in this chunk; 1 if it is not a part of a file."""
        return (self.end or os.path.getsize(self.path)) - self.start if self.version else 1


class Rejects(Counter[str]):
    """Counts the documents that were left out, by cause."""


def left_out(rejects: dict[str, int]) -> str:
    """Format the counts of `Rejects`; they are documents unless a cause says paragraphs."""
    return ", ".join(f"{n:,} {cause}" for cause, n in rejects.items()) or "none"


# ---------------------------------------------------------------------------------- text files


def read_text(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    """Yield the text of a file chunk in blocks, decoded and cleaned (see `clean_text`)."""
    decoder = codecs.getincrementaldecoder(source.encoding)(source.errors)
    position, pending, watch = chunk.start, "", Utf8Watch(chunk.path, source)
    with open_bytes(chunk.path) as file:
        if chunk.start:
            file.seek(chunk.start)
        while True:
            check_unpacked(chunk.path, position)
            wanted = READ_BYTES if chunk.end is None else min(READ_BYTES, chunk.end - position)
            block = read(file, wanted, chunk.path)
            if position == 0:
                check_start(chunk.path, source, block)
            watch.look(block, position)
            try:
                text = pending + decoder.decode(block, final=not block)
            except UnicodeError as error:
                raise decoding_error(chunk.path, source, error, block, position) from None
            if position == 0:
                text = text.removeprefix("\ufeff")
            pending = ""
            if block and text.endswith("\r"):  # its \n may be in the next block
                text, pending = text[:-1], "\r"
            yield clean_text(text)
            position += len(block)
            if not block:
                return


def check_unpacked(path: str, size: int) -> None:
    """Raise `UserError` if a file unpacks to more bytes than text would."""
    if size > MOST_RATIO * os.path.getsize(path) + SURE_BYTES:
        raise UserError(
            f"{path} unpacks to more than {MOST_RATIO} times its size, unlike any text; remove it "
            "from corpus.files, or unpack it if it is intact"
        )


def clean_text(text: str) -> str:
    """Replace all line ends by `\\n` and control characters by spaces, and change nothing else."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return CONTROL.sub(" ", text) if has_controls(text) else text


def has_controls(text: str) -> bool:
    """Tell whether `CONTROL` would match, in a third of the time."""
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    low, middle = code < 32, code - np.uint32(127) < 33  # unsigned: wraps below 127
    return bool(middle.any() or (low & (code != 9) & (code != 10)).any())


def read_whole_lines(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    """Yield the text of a file chunk in blocks of whole lines, each ending with a line end.

    Adds a line end to the last line.
    """
    rest: list[str] = []
    waiting = 0  # characters of a line that has not ended
    for text in read_text(chunk, source):
        end = text.rfind("\n") + 1
        if end:
            yield "".join([*rest, text[:end]])
            rest, waiting = [], 0
        rest.append(text[end:])
        waiting += len(text) - end
        if waiting > MOST_CHARACTERS:
            raise too_long(chunk, "a line")
    yield "".join([*rest, "\n"])


def read_lines(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    for lines in read_whole_lines(chunk, source):
        yield from lines[:-1].split("\n")


def read_line_documents(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    return filter(str.strip, read_lines(chunk, source))


def read_whole_file(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    parts, size = [], 0
    for text in read_text(chunk, source):
        parts.append(text)
        size += len(text)
        if size > MOST_CHARACTERS:
            raise too_long(chunk, "a document")
    yield one_document("".join(parts))  # equal to its copy in a table


def too_long(chunk: FileChunk, what: str) -> UserError:
    """Build the error for a line or a document that would take much memory."""
    return UserError(
        f"{chunk.path} has {what} of more than {MOST_CHARACTERS:,} characters; split it with line "
        "ends, or set corpus.layout if its documents are separated in another way"
    )


def split_at_blank_lines(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    document: list[str] = []
    for lines in read_whole_lines(chunk, source):
        if sum(map(len, document)) > MOST_CHARACTERS:
            raise too_long(chunk, "a document")
        first, *others = BLANK_LINES.split("\n" + lines)  # a match starts with a line end
        document.append(first[1:])
        for other in others:
            yield "".join(document).removesuffix("\n")
            document = [other]
    yield "".join(document).removesuffix("\n")


def read_blank_line_documents(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    return filter(str.strip, split_at_blank_lines(chunk, source))


def read_jsonl(chunk: FileChunk, source: SourceConfig) -> Iterator[str | None]:
    for number, line in enumerate(read_lines(chunk, source), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[source.text_field]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            if source.on_bad_row == "skip":
                yield None
                continue
            if number == 1 and not chunk.start and re.match(r"\s*\[\s*(\{|$)", line):
                raise UserError(
                    f"{chunk.path} is a JSON array; write its items as lines, for example with jq "
                    f"-c '.[]' {chunk.path} > texts.jsonl"
                ) from None
            after = f" after byte {chunk.start}" if chunk.start else ""
            raise UserError(
                f"{chunk.path}: JSON line {number}{after} "
                f"{describe_row(line, source.text_field)}; set corpus.text_field, or "
                "corpus.layout if these are not JSON lines; corpus.on_bad_row=skip skips a few "
                "such rows"
            ) from None
        text = SURROGATE.sub("\ufffd", text)  # JSON can encode half a character, as \\ud83d
        yield one_document(text)


def describe_row(line: str, text_field: str) -> str:
    """Describe a line of JSON that has no text in its field."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return f"is not an object with a text field {text_field!r}: {line[:80]!r}"
    if text_field in row:
        return f"has {json.dumps(row[text_field])[:60]} in {text_field!r}, which is not text"
    inner = text_field.partition(".")[0] in row or any(isinstance(x, dict) for x in row.values())
    nested = " (nested fields are not read)" * inner
    return f"has no field {text_field!r} among {', '.join(row)[:200]}{nested}"


def read_table(chunk: FileChunk, source: SourceConfig, **dialect) -> Iterator[str | None]:
    """Yield the `text_field` column of a table, whose first row is the header.

    dialect: what differs from CSV (RFC 4180), as arguments of `csv.reader`.
    Raises `UserError` for a malformed row or a missing column.
    """
    csv.field_size_limit(MOST_CHARACTERS)
    waiting = lines = 0  # characters and lines of a row: quotes may hold line ends

    def read_whole_rows() -> Iterator[str]:
        nonlocal waiting, lines
        for line in read_lines(chunk, source):
            waiting, lines = waiting + len(line) + 1, lines + (line != "")
            if waiting > MOST_CHARACTERS:
                raise too_long(chunk, "a row")
            yield f"{line}\n"

    lines_read = read_whole_rows()
    first = next(lines_read, "")
    dialect.setdefault("delimiter", find_delimiter(first, {source.text_field}))
    rows = csv.reader(chain([first], lines_read), strict=True, **dialect)
    try:
        header = next(rows, [])
        if len(header) == 1 and source.text_field not in header:
            header = header[0].split(";")  # for the message
        check_column(source.text_field, header, chunk, "corpus.text_field")
        column = header.index(source.text_field)
        while True:
            waiting = lines = 0
            try:
                row = next(rows, None)
                if row and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, but the header has {len(header)}")
            except csv.Error:
                if source.on_bad_row != "skip":
                    raise
                yield from [None] * lines  # a stray quote takes in the rows after it
                continue
            if row is None:
                return
            if row:  # no blank line
                yield one_document(row[column])
    except csv.Error as error:
        raise UserError(
            f"{chunk.path}: line {rows.line_num} is not {chunk.layout} ({error}); correct it, or "
            f"set corpus.layout{'=csv if fields are quoted' * (chunk.layout == 'tsv')}"
        ) from None


def one_document(text: str) -> str:
    """Clean the text of one document, and drop blank lines, which would divide it elsewhere."""
    return BLANK_LINES.sub("\n", clean_text(text))


# ---------------------------------------------------------------------------------- columns


def open_dataset(wanted: DatasetConfig):
    """Open the configured dataset for streaming; raises `UserError` with the reason on failure."""
    import datasets

    files = to_list(wanted.data_files) or None
    try:
        return datasets.load_dataset(
            wanted.path, wanted.name, split=wanted.split, data_files=files, streaming=True
        )
    except Exception as error:  # of many types, all about what the user asked for
        raise UserError(
            f"dataset {wanted.path} cannot be opened: {error}; correct corpus.dataset, or save it "
            "to files and name them in corpus.files"
        ) from None


def read_shard(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    """Yield the text column of one shard of a dataset."""
    column, key = source.dataset.text_column, "corpus.dataset.text_column"
    stream = open_dataset(source.dataset)
    if chunk.end and chunk.end > 1:
        stream = stream.shard(chunk.end, chunk.start)

    def cells() -> Iterator[object]:
        for row in stream:
            check_column(column, row, chunk, key)
            yield row[column]

    return read_cells(cells(), chunk, column, key)


def read_parquet(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    """Yield the `text_field` column of a Parquet file, of which a few rows are unpacked at once."""
    from pyarrow.parquet import ParquetFile

    def cells() -> Iterator[object]:
        column = source.text_field
        with ParquetFile(chunk.path) as file:
            check_column(column, file.schema_arrow.names, chunk, "corpus.text_field")
            # of whole row groups: a damaged column's description would abort the process
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            check_unpacked(chunk.path, sum(group.total_byte_size for group in groups))
            for batch in file.iter_batches(ROWS, columns=[column]):
                yield from batch.column(0).to_pylist()

    return read_cells(cells(), chunk, source.text_field, "corpus.text_field")


def read_arrow(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    """Yield the `text_field` column of an Arrow file, which `datasets` writes as a stream."""
    import pyarrow

    def cells() -> Iterator[object]:
        column, unpacked = source.text_field, 0
        with pyarrow.memory_map(chunk.path) as file:
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = reader = pyarrow.ipc.open_stream(file)
            check_column(column, reader.schema.names, chunk, "corpus.text_field")
            for batch in batches:
                unpacked += batch.nbytes
                check_unpacked(chunk.path, unpacked)
                batch.validate(full=True)
                yield from (value.as_py() for value in batch.column(column))

    return read_cells(cells(), chunk, source.text_field, "corpus.text_field")


def check_column(column: str, columns: Collection[str], chunk: FileChunk, key: str) -> None:
    """Raise `UserError` if a column is missing, or if two have its name.

    key: the config key that names the column, for messages.
    """
    if column not in columns:
        names = ", ".join(dict.fromkeys(columns))[:200] or "none, the first line is empty"
        raise UserError(f"{chunk.path} has no column {column!r} (columns: {names}); set {key}")
    if list(columns).count(column) > 1:
        raise UserError(
            f"{chunk.path} has two columns named {column!r}; rename the one that does not hold "
            "the text"
        )


def read_cells(cells: Iterator[object], chunk: FileChunk, column: str, key: str) -> Iterator[str]:
    """Yield the cells of a column as documents; raises `UserError` if one is not text or too long.

    key: the config key that names the column, for messages.
    """
    unpacked = 0
    try:
        for cell in cells:
            text = "" if cell is None else cell
            if not isinstance(text, str):
                raise UserError(
                    f"{chunk.path}: column {column!r} is not text: {str(text)[:80]!r}; set {key}"
                )
            if len(text) > MOST_CHARACTERS:
                raise too_long(chunk, "a document")
            if chunk.version:
                unpacked += len(text)
                check_unpacked(chunk.path, unpacked)
            yield one_document(text)
    except UserError:
        raise
    except Exception as error:  # of many types: a damaged file, a lost connection
        raise UserError(f"{chunk.path} cannot be read: {type(error).__name__}: {error}") from None


def read_builtin(chunk: FileChunk, source: SourceConfig) -> Iterator[str]:
    from data_pipeline.corpus.python_docs import read_python_docs

    return read_python_docs()


# ---------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Reader:
    """The properties of a layout: a row of `READERS`."""

    read: Callable[[FileChunk, SourceConfig], Iterator[str | None]]  # yields one str a document
    suffixes: tuple[str, ...] = ()  # names of its files end so, before that of a compression
    boundary: re.Pattern | None = None  # bytes to cut a large file after; None: it is read whole
    is_costly: bool = False  # reading again takes several times as long as reading a copy
    is_compressed: bool = False  # its files hold compressed text
    is_file: bool = True  # whether `corpus.layout` can name it


READERS = {
    "blank_line": Reader(read_blank_line_documents, boundary=BLANK_LINE),
    "line": Reader(read_line_documents, boundary=LINE_END),
    "file": Reader(read_whole_file),
    "jsonl": Reader(read_jsonl, (".jsonl", ".ndjson", ".json"), boundary=LINE_END),
    "csv": Reader(read_table, (".csv",), is_costly=True),
    "tsv": Reader(  # IANA: no quotes
        partial(read_table, delimiter="\t", quoting=csv.QUOTE_NONE), (".tsv",), is_costly=True
    ),
    "parquet": Reader(read_parquet, (".parquet",), is_costly=True, is_compressed=True),
    "arrow": Reader(read_arrow, (".arrow",), is_costly=True),
    "dataset": Reader(read_shard, is_costly=True, is_file=False),
    "python-docs": Reader(read_builtin, is_costly=True, is_file=False),
}


def is_costly(path: str, layout: str | None) -> bool:
    """Tell whether a copy of its text is much faster to read than a file of a layout itself.

    layout: None for text.
    """
    return compression(path) in SLOW or layout is not None and READERS[layout].is_costly


def read_documents(chunk: FileChunk, source: SourceConfig, rejects: Rejects) -> Iterator[str]:
    """Yield the documents of a file chunk, one non-empty `str` each, with a paragraph per line.

    A reader yields None for a bad row that `corpus.on_bad_row` skips.

    Raises `UserError` with file and byte offset for bytes that are not text.
    """
    for document in READERS[chunk.layout].read(chunk, source):
        if document is None:
            rejects[BAD_ROWS] += 1
        elif document.strip():
            yield document
        else:
            rejects["empty"] += 1
