"""List the file chunks of a corpus: its files, their layout, where they are cut, and which chunks a
task reads together.

A corpus has one or several sources, which are divided into file chunks: a byte range of a file, a
whole compressed file, or a shard of a dataset.
"""

import codecs
import hashlib
import math
import os
import re
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import MARKER
from data_pipeline.common.reading import read_json
from data_pipeline.config import CorpusConfig, SourceConfig, check_choice, to_list
from data_pipeline.corpus.files import compression, open_bytes, open_file, read
from data_pipeline.corpus.readers import (
    BLANK_LINES,
    READERS,
    FileChunk,
    clean_text,
    is_costly,
    open_dataset,
)

CHUNK_BYTES = 16 << 20  # size of a chunk of an uncompressed file
BLOCK_BYTES = 1 << 20
EXPANSION = 4  # assumed ratio of compression
LEAST_GROUPS = 64  # of the files of a small corpus, so that many workers can share it
# what preparation and training write in a folder that has their marker
is_our_name = re.compile(
    r"work|vocab|store|(report|probes|checked)\.\w+|lock|wandb(_id\.txt)?|config\.yaml|export|"
    r"fingerprint\.json|metrics\.jsonl.*|ranks|checkpoints|before-\d+|" + re.escape(MARKER)
).fullmatch
SEARCHED_BYTES = 64 << 20  # of all files together, searched for a blank line to detect the layout


def list_file_chunks(corpus: CorpusConfig) -> list[FileChunk]:
    """List the file chunks of a corpus in order; raises `UserError` if a file does not exist."""
    return [
        replace(chunk, source=i)
        for i, source in enumerate(corpus.each_source())
        for chunk in list_source(source)
    ]


def count_bytes(chunks: list[FileChunk]) -> float:
    """Estimate the bytes of text in the corpus; infinite with a dataset, whose size is unknown."""
    if any(chunk.layout == "dataset" for chunk in chunks):
        return math.inf
    return sum(map(text_bytes, chunks))


def text_bytes(chunk: FileChunk) -> int:
    """Estimate the bytes of text in a chunk."""
    packed = READERS[chunk.layout].is_compressed or compression(chunk.path)
    return chunk.size * (EXPANSION if packed else 1)


def group_chunks(chunks: list[FileChunk]) -> list[list[FileChunk]]:
    """Group small neighbouring chunks, because a task takes about 20 ms whatever its size.

    A group has one source and layout, and as much text as a large chunk at most. Chunks stay alone
    if they are not files, or if a copy of their text is kept, which does not record chunk
    boundaries.
    """
    sizes = [text_bytes(chunk) for chunk in chunks]
    most = min(CHUNK_BYTES, sum(sizes) // LEAST_GROUPS)
    groups, last, room = [], None, 0
    for chunk, size in zip(chunks, sizes, strict=True):
        alone = not chunk.version or is_costly(chunk.path, chunk.layout)
        kind = None if alone else (chunk.source, chunk.layout)
        if kind and kind == last and size <= room:
            groups[-1].append(chunk)
            room -= size
        else:
            groups.append([chunk])
            last, room = kind, most - size
    return groups


def list_source(source: SourceConfig) -> list[FileChunk]:
    if source.builtin:
        return [FileChunk("python-docs", "python-docs")]
    if source.dataset:
        shards = getattr(open_dataset(source.dataset), "num_shards", 1)
        return [FileChunk(source.dataset.path, "dataset", i, shards) for i in range(shards)]
    chunks = []
    for path, layout in find_layouts(list_files(to_list(source.files)), source).items():
        size, version = os.path.getsize(path), sample_hash(path)
        for start, end in cut_file(path, READERS[layout].boundary, size, source.encoding):
            chunks.append(FileChunk(path, layout, start, end, version))
    return chunks


def find_layouts(paths: list[str], source: SourceConfig) -> dict[str, str]:
    """Find the layout of each file: the configured one, that of its suffix, or the one detected.

    Raises `UserError` if the configured layout is not one of files.
    """
    layouts = [name for name, reader in READERS.items() if reader.is_file]
    check_choice("corpus.layout", source.layout, ("auto", *layouts))
    if source.layout != "auto":
        return dict.fromkeys(paths, source.layout)
    found = {path: layout_by_name(path) for path in paths}
    texts = [path for path, layout in found.items() if not layout]
    return found | dict.fromkeys(texts, detect_layout(texts, source.encoding))


def name_source(source: SourceConfig) -> str:
    """Name a source in messages: by its first file, its dataset or its built-in corpus."""
    first, *others = to_list(source.files) or [source.builtin or source.dataset.path]
    return f"{first} and {len(others)} more" if others else first


def list_files(patterns: list[str]) -> list[str]:
    """Expand paths and globs to files, in the order given and without repetition.

    Raises `UserError` if one matches no file, or a link to nothing.
    """
    paths = []
    for pattern in map(os.path.expanduser, patterns):
        found = sorted(glob(pattern, recursive=True))
        made = set(filter(is_made, set(map(os.path.dirname, found))))
        found = [path for path in found if not (os.path.dirname(path) in made or is_ours(path))]
        for path in found:
            if os.path.islink(path) and not os.path.exists(path):
                raise UserError(
                    f"corpus file {path} is a broken or circular link; repair or remove it"
                )
        found = list(filter(os.path.isfile, found))
        if os.path.isfile(pattern):
            found = [pattern]
        elif saved := list_saved(pattern):
            found = saved
        elif os.path.isdir(pattern):
            inside = f"{pattern.rstrip('/')}/*.txt"
            raise UserError(f"corpus file {pattern} is a folder; name its files: '{inside}'")
        elif os.path.exists(pattern):
            raise UserError(
                f"corpus file {pattern} is a pipe or a device; save its text in a file, which is "
                "read more than once"
            )
        elif not found:
            what = "no file matches" if has_magic(pattern) else "no corpus file at"
            advice = "correct corpus.files"
            if "[" in pattern:
                advice += ", or write [[] for a [ in a file name"
            raise UserError(f"{what} {pattern} (in {os.getcwd()}); {advice}")
        paths += found
    first: dict[str, str] = {}  # a link to a folder above gives a file forty names
    for path in paths:
        first.setdefault(os.path.realpath(path), path)
    return list(first.values())


def is_made(folder: str) -> bool:
    """Tell whether preparation or training made a folder: otherwise `**/*.txt` would include the
    vocabulary of an earlier run."""
    path = os.path.abspath(folder)
    return is_ours(path) or path != os.path.dirname(path) and is_made(os.path.dirname(path))


def is_ours(path: str) -> bool:
    """Tell whether a file or folder was made by preparation or training, in a folder that it
    marked."""
    folder, name = os.path.split(path)
    return bool(is_our_name(name)) and os.path.exists(os.path.join(folder, MARKER))


def sample_hash(path: str) -> str:
    """Hash a file's size, first and last megabyte: enough to notice that a file has changed."""
    with open_file(path) as file:
        digest = hashlib.blake2b(file.read(BLOCK_BYTES), digest_size=16)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - BLOCK_BYTES))
        digest.update(file.read() + str(size).encode())
    return digest.hexdigest()


def list_saved(folder: str) -> list[str]:
    """List the Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote.

    Returns none for other folders; raises `UserError` for a folder with several splits.
    """
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = sorted(name for name in os.listdir(folder) if "." not in name)
        raise UserError(
            f"corpus folder {folder} holds several splits ({', '.join(splits)}); name one: "
            f"{os.path.join(folder, splits[0] if splits else 'train')}"
        )
    try:
        shape = {"_data_files": [{"filename": str}]}
        state = read_json(Path(folder, "state.json"), shape, "")
    except (OSError, UserError):
        return []
    return [os.path.join(folder, entry["filename"]) for entry in state["_data_files"]]


def layout_by_name(path: str) -> str | None:
    """Tell a file's layout (`jsonl`, `csv`, ...) from its suffix; None for text."""
    path = path.lower()
    suffix = os.path.splitext(path.removesuffix(compression(path)))[1]
    return next((name for name, reader in READERS.items() if suffix in reader.suffixes), None)


def detect_layout(paths: list[str], encoding: str) -> str:
    """Detect how text files are divided into documents, from the first 64 MB of all of them, and at
    least the first MB of each.

    Returns `blank_line` if any of them has a blank line, else `file` for several files and `line`
    for a single one.
    """
    left = SEARCHED_BYTES
    for path in paths:
        read_bytes, found = find_blank_line(path, encoding, max(left, BLOCK_BYTES))
        if found:
            return "blank_line"
        left -= read_bytes
    return "file" if len(paths) > 1 else "line"


def find_blank_line(path: str, encoding: str, most: int) -> tuple[int, bool]:
    """Look for a blank line between others in the first bytes of a file, `most` of them.

    Returns the number of bytes that were read, and whether there is one.
    """
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    size, rest = 0, ""
    with open_bytes(path) as file:
        while size < most and (block := read(file, min(BLOCK_BYTES, most - size), path)):
            size += len(block)
            try:
                decoded = decoder.decode(block)
            except UnicodeError:  # such as UTF-16 without its mark: `read_text` says so
                return size, False
            text = (rest + clean_text(decoded)).removeprefix("\ufeff").lstrip()
            lines = text.rstrip()
            if BLANK_LINES.search(lines):
                return size, True
            rest = lines[-1:] + text[len(lines) :]  # white space may go on
    return size, False


def cut_file(
    path: str, boundary: re.Pattern | None, size: int, encoding: str
) -> list[tuple[int, int | None]]:
    """Cut a file into byte ranges of about `CHUNK_BYTES` that end between documents.

    boundary: matches the bytes between two documents; None if the file cannot be cut.
    Returns the single range (0, None) for a small file and for one that cannot be cut.
    """
    is_wide = "\n".encode(encoding) != b"\n"  # UTF-16 and the like: other line ends
    is_wide |= codecs.lookup(encoding).name == "iso2022_kr"  # told by the first bytes of a file
    if boundary is None or compression(path) or is_wide or size <= CHUNK_BYTES:
        return [(0, None)]
    cuts = [0]
    with open(path, "rb") as file:
        while (cut := next_match(file, cuts[-1] + CHUNK_BYTES, boundary)) is not None:
            cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def next_match(file: BinaryIO, start: int, pattern: re.Pattern) -> int | None:
    """Find the first match at or after byte `start`; the byte where it ends, or None."""
    file.seek(start)
    seen = b""
    while block := file.read(BLOCK_BYTES):
        seen += block
        if match := pattern.search(seen):
            return start + match.end()
        rest = seen[len(seen.rstrip()) :]  # white space may be the start of a match
        start, seen = start + len(seen) - len(rest), rest
    return None
