"""corpus -> **selection** -> sentences: drop duplicates, hold documents out, apply source weights.

One cheap pass writes the hashes of each piece's documents and long paragraphs (and the text, where
it would have to be fetched, parsed or decompressed again); merging the hashes tells every piece
which of them an earlier piece has. So a piece can then be scanned alone, on any worker, and a text
stays where it comes first in the order of pieces.

The rule of the held-out split: the documents whose hash is below a limit, whatever the order of
files. The limit is that of the share `corpus.held_out_fraction`; where fewer documents or less
text than losses need to be trusted are below it, it rises until there are enough, but not above a
fifth of all. Of 486 long documents a share of 1 % takes about five: the limit rises until 50 are below it.
Of 30 it takes six at most.

The rule of weights: of a source's N distinct documents to train on, weight w takes w N in all,
rounded half up: each floor(w) times, and those with the lowest hashes once more. Held-out documents
are never repeated; below weight 1 the same share of them is taken.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from data_pipeline.common.folders import atomic_folder
from data_pipeline.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS, CorpusConfig, SourceConfig
from data_pipeline.corpus.readers import BLOCK_BYTES, FileChunk, Rejects, read_documents, text_hash

MIN_DEDUP_CHARS = 100  # characters of a paragraph whose repetition is no chance
MERGED = 1 << 24  # hashes that are compared at a time: about 500 MB
# layouts and files that take several times longer to read again than their text from the disk
COSTLY = ("dataset", "python-docs", "parquet", "arrow", "csv", "tsv")
SLOW = (".bz2", ".xz")
KINDS = ("documents", "paragraphs")
ALL = 2**64  # above every hash
# least documents and characters to hold out, at 6 characters a token: with vocabularies of their
# own English and German have 4.8, Thai 4.6, Hindi 3.9, Japanese 1.9 (in bytes they are 4.8 to 13)
LEAST = np.array([HELD_OUT_DOCUMENTS, 6 * HELD_OUT_TOKENS])
# where the share takes as many bytes, it takes enough documents even if they are books (1 MB each)
SURE_BYTES = HELD_OUT_DOCUMENTS << 20
PACKED, EXPANSION = (".gz", ".bz2", ".xz", ".zst", ".parquet"), 4  # bytes of text in one of these


def needs_selection(corpus: CorpusConfig, pieces: list[FileChunk]) -> bool:
    """Whether hashes must be known before the corpus is scanned."""
    return (
        corpus.deduplicate
        or any(source.weight % 1 for source in corpus.each_source())
        or 0 < corpus.held_out_fraction * count_bytes(pieces) < SURE_BYTES
    )


def count_bytes(pieces: list[FileChunk]) -> float:
    """About how many bytes of text there are; infinite with a dataset, whose size is not known."""
    if any(piece.layout == "dataset" for piece in pieces):
        return math.inf
    return sum(p.size * (EXPANSION if p.path.endswith(PACKED) else 1) for p in pieces)


def hash_chunk(piece: FileChunk, out: Path, source: SourceConfig) -> None:
    """Write `documents.npy` and `paragraphs.npy`, sorted uint64 hashes of a piece, and
    `characters.npy`, int64 length of each document, to folder `out`; 8 bytes each are all that is
    held in memory. The text as well, of what is `COSTLY` or `SLOW`."""
    hashes, characters, rejects = {kind: bytearray() for kind in KINDS}, array("q"), Rejects()
    with atomic_folder(out) as folder:
        documents = read_documents(piece, source, rejects)
        if piece.layout in COSTLY or piece.path.endswith(SLOW):
            documents = keep(documents, folder)
        for document in documents:
            add_hash(hashes["documents"], document)
            characters.append(len(document))
            if len(document) >= MIN_DEDUP_CHARS:
                for line in document.split("\n"):
                    if len(line) >= MIN_DEDUP_CHARS:
                        add_hash(hashes["paragraphs"], line)
        for kind, data in hashes.items():
            numbers = np.frombuffer(data, ">u8").astype("<u8")
            if kind == "documents":
                np.save(folder / "characters.npy", np.array(characters)[np.argsort(numbers)])
            np.save(folder / f"{kind}.npy", np.sort(numbers))
        (folder / "rejects.json").write_text(json.dumps(rejects.causes))


def add_hash(hashes: bytearray, text: str) -> None:
    hashes += hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()


def keep(documents: Iterable[str], folder: Path) -> Iterator[str]:
    """The same documents, written to `folder` as they pass; NUL ends each."""
    with open(folder / "text", "wb") as file:
        for document in documents:
            file.write(document.encode("utf-8", "replace").replace(b"\0", b" ") + b"\0")
            yield document


def read_selected(
    piece: FileChunk, source: SourceConfig, hashes: Path | None, rejects: Rejects
) -> Iterator[str]:
    """`read_documents`, from what `keep` wrote to folder `hashes` where it did."""
    if not (hashes and (hashes / "text").exists()):
        yield from read_documents(piece, source, rejects)
        return
    rejects.causes.update(json.loads((hashes / "rejects.json").read_text()))
    document: list[bytes] = []
    with open(hashes / "text", "rb") as file:
        while block := file.read(BLOCK_BYTES):
            first, *others = block.split(b"\0")
            document.append(first)
            for other in others:
                yield b"".join(document).decode()
                document = [other]


# ---------------------------------------------------------------------------------- duplicates


def find_earlier(hashed: list[Path], out: Path) -> None:
    """Write to folder `out`, for piece i, the hashes that an earlier piece has:
    `00000i-documents.u8` and `00000i-paragraphs.u8`, sorted uint64, where there are any."""
    with atomic_folder(out) as folder:
        for kind in KINDS:
            files = [path / f"{kind}.npy" for path in hashed]
            n = 1 + sum(path.stat().st_size for path in files) // (8 * MERGED)
            bounds = [i * ALL // n for i in range(n)] + [ALL]
            for low, high in pairwise(bounds):  # hashes being uniform, about `MERGED` in each
                parts = [distinct(between(np.load(f, mmap_mode="r"), low, high)) for f in files]
                for i, earlier in enumerate(in_earlier(parts)):
                    if len(earlier):
                        with open(folder / f"{i:06d}-{kind}.u8", "ab") as file:
                            earlier.tofile(file)


def between(hashes: np.ndarray, low: int, high: int) -> np.ndarray:
    """The part of sorted `hashes` in [low, high)."""
    start = np.searchsorted(hashes, np.uint64(low))
    end = len(hashes) if high == ALL else np.searchsorted(hashes, np.uint64(high))
    return hashes[start:end]


def distinct(hashes: np.ndarray) -> np.ndarray:
    return hashes[np.diff(hashes, prepend=hashes[:1] + np.uint64(1)) != 0]


def in_earlier(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Of each array of distinct hashes, those that an array before it has."""
    together = np.concatenate(parts)
    order = np.argsort(together, kind="stable")  # equal hashes stay in the order of arrays
    ordered = together[order]
    found = np.zeros(len(together), bool)
    found[order[1:][ordered[1:] == ordered[:-1]]] = True
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return [part[mask] for part, mask in zip(parts, np.split(found, ends), strict=True)]


def read_earlier(folder: Path, i: int, kind: str) -> np.ndarray:
    path = folder / f"{i:06d}-{kind}.u8"
    return np.fromfile(path, "<u8") if path.exists() else np.zeros(0, "<u8")


# ---------------------------------------------------------------------------------- held out


def share_limit(share: float) -> int:
    """The hash below which are that share of all hashes."""
    return math.ceil(share * ALL)


def find_limit(corpus: CorpusConfig, hashed: list[Path], earlier: Path) -> int:
    """Find the hash below which documents are held out: that of the share, or a higher one that
    takes `LEAST`, but at most a fifth of the documents and of the characters.

    Duplicates count once where they are dropped. Less than `LEAST` may stay where a weight below 1
    samples the held-out documents, or repeated paragraphs are dropped from them.
    """
    share, total = share_limit(corpus.held_out_fraction), np.zeros(2, np.int64)
    hashes, sizes = np.zeros(0, np.uint64), np.zeros((0, 2), np.int64)
    for i, folder in enumerate(hashed if share else ()):
        new, characters = (np.load(folder / f"{name}.npy") for name in ("documents", "characters"))
        if corpus.deduplicate:
            new, first = np.unique(new, return_index=True)
            kept = np.isin(new, read_earlier(earlier, i, "documents"), invert=True)
            new, characters = new[kept], characters[first[kept]]
        new_sizes = np.stack([np.ones_like(characters), characters], 1)
        total += new_sizes.sum(0)
        hashes, sizes = np.append(hashes, new), np.append(sizes, new_sizes, 0)
        order = np.argsort(hashes)
        hashes, sizes = hashes[order], sizes[order]
        enough = (sizes.cumsum(0) >= LEAST).all(1)
        if enough.any():
            last = hashes[enough.argmax()]
            if last < share:
                return share  # the first pieces of a large corpus are enough to know
            # whatever the other pieces hold, the limit is not above `last`
            end = np.searchsorted(hashes, last, side="right")
            hashes, sizes = hashes[:end], sizes[:end]
    if not len(hashes):
        return share
    too_much = (5 * sizes.cumsum(0) > total).any(1)
    least = hashes[too_much.argmax()] if too_much.any() else int(hashes[-1]) + 1
    return max(share, int(least))


# ---------------------------------------------------------------------------------- weights


@dataclass
class HashQuota:
    """The documents with the lowest hashes: all below `limit`, and `ties` of those equal to it."""

    limit: int = 0
    ties: int = 0

    def takes(self, number: int) -> bool:
        if number == self.limit and self.ties:
            self.ties -= 1
            return True
        return number < self.limit


def lowest(pieces: list[np.ndarray], n: int) -> list[HashQuota]:
    """The `n` lowest of all hashes, as a share for each piece; equal ones go in order of pieces."""
    hashes = np.sort(np.concatenate(pieces))
    if n == len(hashes):
        return [HashQuota(ALL) for _ in pieces]
    limit, shares = hashes[n], []
    rest = n - int(np.searchsorted(hashes, limit))
    for piece in pieces:
        ties = min(rest, int(np.count_nonzero(piece == limit)))
        shares.append(HashQuota(int(limit), ties))
        rest -= ties
    return shares


def share_pieces(documents: list[np.ndarray], weight: float, limit: int) -> list[list[HashQuota]]:
    """For each piece of a source the [training, held-out] documents that are taken once more than
    floor(weight), from the hashes of its documents, of which those below `limit` are held out."""
    parts = ([between(d, limit, ALL) for d in documents], [between(d, 0, limit) for d in documents])
    both = []
    for part in parts:
        n = sum(map(len, part))
        both.append(lowest(part, math.floor(weight * n + 0.5) - math.floor(weight) * n))
    return [list(pair) for pair in zip(*both, strict=True)]


# ---------------------------------------------------------------------------------- a piece


@dataclass
class Selection:
    """What is taken of a piece; made by `select`, to be sent to the worker that scans it."""

    weight: float = 1.0
    limit: int = 0  # a document whose hash is below it is held out
    shares: list[HashQuota] | None = None  # of training and held-out documents, for broken weights
    hashes: Path | None = None  # folder of the piece's hashes
    earlier: Path | None = None  # folder of those in earlier pieces, where duplicates go
    number: int = 0  # of the piece

    def open(self) -> None:
        """Read the hashes that occur before, and those that the piece repeats itself."""
        self.seen, self.repeated = {}, {}
        for kind in KINDS if self.earlier else ():
            own = np.load(self.hashes / f"{kind}.npy", mmap_mode="r")
            self.repeated[kind] = set(own[1:][own[1:] == own[:-1]].tolist())
            self.seen[kind] = set(read_earlier(self.earlier, self.number, kind).tolist())

    def is_duplicate(self, kind: str, number: int) -> bool:
        if number in self.seen[kind]:
            return True
        if number in self.repeated[kind]:
            self.seen[kind].add(number)
        return False

    def take(self, document: str, number: int, held_out: bool, rejects: Rejects) -> tuple[str, int]:
        """What is left of a document, whose `text_hash` is `number`, without duplicates, and how
        often to take it."""
        if self.earlier:
            if self.is_duplicate("documents", number):
                rejects.add("duplicate")
                return "", 0
            document = self.drop_paragraphs(document, rejects)
            if not document:
                return "", 0
        copies = math.floor(self.weight)
        if held_out:
            copies = min(1, copies)
        if self.shares and not (held_out and copies):
            copies += self.shares[held_out].takes(number)
        if not copies:
            rejects.add("not sampled")
        return document, copies

    def drop_paragraphs(self, document: str, rejects: Rejects) -> str:
        if not (self.seen["paragraphs"] or self.repeated["paragraphs"]):
            return document
        lines = document.split("\n")
        kept = [
            line
            for line in lines
            if not (len(line) >= MIN_DEDUP_CHARS and self.is_repeated_line(line))
        ]
        if len(kept) == len(lines):
            return document
        if not any(map(str.strip, kept)):
            rejects.add("duplicate")
            return ""
        rejects.add("duplicate paragraphs", len(lines) - len(kept))
        return "\n".join(kept)

    def is_repeated_line(self, line: str) -> bool:
        if len(line) < MIN_DEDUP_CHARS:
            return False
        return self.is_duplicate("paragraphs", text_hash(line.encode("utf-8", "replace")))


def select(
    corpus: CorpusConfig, pieces: list[FileChunk], hashed: list[Path], earlier: Path
) -> list[Selection]:
    """What to take of each piece, from the hashes in `hashed` and what `find_earlier` wrote."""
    sources, is_needed = corpus.each_source(), needs_selection(corpus, pieces)
    limit = (
        find_limit(corpus, hashed, earlier) if is_needed else share_limit(corpus.held_out_fraction)
    )
    chosen = [Selection(sources[piece.source].weight, limit) for piece in pieces]
    if not is_needed:
        return chosen
    for i, selection in enumerate(chosen):
        selection.hashes = hashed[i]
        if corpus.deduplicate:
            selection.earlier, selection.number = earlier, i
    for number, source in enumerate(sources):
        if source.weight % 1:
            own = [i for i, piece in enumerate(pieces) if piece.source == number]
            documents = []
            for i in own:
                hashes = np.load(hashed[i] / "documents.npy")
                if corpus.deduplicate:
                    hashes = np.setdiff1d(hashes, read_earlier(earlier, i, "documents"))
                documents.append(hashes)
            shares = share_pieces(documents, source.weight, limit)
            for i, share in zip(own, shares, strict=True):
                chosen[i].shares = share
    return chosen
