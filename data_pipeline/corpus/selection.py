"""Select what to train on: drop duplicates, hold documents out, apply source weights.

A group is what one task reads: a file chunk, or several small ones. A first pass writes the hashes
of each group's documents and long paragraphs (and the text too, where reading it again would be
slow). Merging the hashes then shows for each group which of its texts occur in an earlier group. So
a worker can scan any group alone, and the first copy of a text, in the order of groups, is kept.
Sources with a weight below 1 come last in that order: otherwise a source that uses a tenth of its
documents would also remove the unused ones from other sources. Documents are compared first. Of the
paragraphs, those of documents that such a source does not take are left out.

Held-out split: the documents whose hash is below a limit, whatever the order of the files. The
limit is `corpus.held_out_fraction` of all hashes. If that gives too few documents or too little
text for reliable losses, the limit rises until there is enough, but at most to a fifth of the
corpus. For example, 1 % of 486 long documents is about five; the limit rises until 50 documents are
held out. Of 30 documents at most six are held out.

Source weights: weight w takes w N of the N distinct training documents of a source, rounded half
up: floor(w) copies of each, and one more of those with the lowest hashes. Held-out documents are
never repeated; a weight below 1 takes the same fraction of them.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from data_pipeline.common.arrays import append_array, run_starts, save_array
from data_pipeline.common.folders import sealed_folder
from data_pipeline.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS, CorpusConfig, SourceConfig
from data_pipeline.corpus.readers import FileChunk, Rejects, is_costly, read_documents
from data_pipeline.corpus.sources import BLOCK_BYTES, count_bytes

MIN_DEDUP_CHARS = 100  # shorter paragraphs may recur by chance, and are kept
MERGED = 1 << 24  # hashes to compare at a time, in about 500 MB
KINDS = ("documents", "paragraphs")
ALL = 2**64  # greater than every hash
# Documents and characters to hold out at least, at 6 characters per token. With a vocabulary
# trained on their text, languages have fewer: English and German 4.8, Thai 4.6, Hindi 3.9,
# Japanese 1.9 (4.8 to 13 in bytes).
LEAST = np.array([HELD_OUT_DOCUMENTS, 6 * HELD_OUT_TOKENS])
# this many held-out bytes are enough documents even if they are books (1 MB each)
SURE_BYTES = HELD_OUT_DOCUMENTS << 20


def needs_selection(corpus: CorpusConfig, text_bytes: float) -> bool:
    """Tell whether all documents have to be hashed before the corpus can be scanned.

    text_bytes: of `count_bytes`.
    """
    return (
        corpus.deduplicate
        or any(source.weight % 1 for source in corpus.each_source())
        or 0 < corpus.held_out_fraction * text_bytes < SURE_BYTES
    )


def hash_group(group: list[FileChunk], out: Path, source: SourceConfig) -> None:
    """Write the hashes of a group's documents and long paragraphs to folder `out`.

    Files: `documents.npy` and `paragraphs.npy` (uint64, sorted hashes), `characters.npy` (int64,
    length of each document in the same order), `rejects.json`, `text`, the documents themselves, if
    its file `is_costly`, and `owners.npy` (uint64, hash of the document of each paragraph) if the
    weight is below 1. Memory: 8 bytes per hash or length.
    """
    hashes, characters, rejects = {kind: array("Q") for kind in KINDS}, array("q"), Rejects()
    owners = array("Q")
    with sealed_folder(out, shared=True) as folder:
        documents = chain.from_iterable(read_documents(c, source, rejects) for c in group)
        if is_costly(group[0].path, group[0].layout):
            documents = keep(documents, folder)
        for document in documents:
            hashes["documents"].append(hash_document(document))
            characters.append(len(document))
            if len(document) >= MIN_DEDUP_CHARS:
                for line in document.split("\n"):
                    if len(line) >= MIN_DEDUP_CHARS:
                        hashes["paragraphs"].append(hash_text(line))
                        if source.weight < 1:
                            owners.append(hashes["documents"][-1])
        order = np.argsort(hashes["documents"])
        save_array(folder / "characters.npy", np.array(characters)[order])
        if source.weight < 1:
            order = np.argsort(hashes["paragraphs"])
            save_array(folder / "owners.npy", np.array(owners)[order])
        for kind, numbers in hashes.items():
            save_array(folder / f"{kind}.npy", np.sort(numbers))
        (folder / "rejects.json").write_text(json.dumps(rejects))


def hash_text(text: str) -> int:
    """Hash the UTF-8 of a text to 64 bits of BLAKE2b."""
    data = text.encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def hash_document(document: str) -> int:
    """Hash a document without the white space around it, in which copies of two formats differ."""
    return hash_text(document.strip())


def keep(documents: Iterable[str], folder: Path) -> Iterator[str]:
    """Yield the documents unchanged, and write each to `folder/text`, followed by NUL."""
    with open(folder / "text", "wb") as file:
        for document in documents:
            file.write(document.encode("utf-8", "replace").replace(b"\0", b" ") + b"\0")
            yield document


def read_selected(
    chunk: FileChunk, source: SourceConfig, hashes: Path | None, rejects: Rejects
) -> Iterator[str]:
    """Yield the documents of a chunk, from the copy that `keep` wrote to folder `hashes` if any."""
    if not (hashes and (hashes / "text").exists()):
        yield from read_documents(chunk, source, rejects)
        return
    rejects.update(json.loads((hashes / "rejects.json").read_text()))
    document: list[bytes] = []
    with open(hashes / "text", "rb") as file:
        while block := file.read(BLOCK_BYTES):
            first, *others = block.split(b"\0")
            document.append(first)
            for other in others:
                yield b"".join(document).decode()
                document = [other]


# ---------------------------------------------------------------------------------- duplicates


def order_of_keeping(corpus: CorpusConfig, groups: list[list[FileChunk]]) -> list[int]:
    """Order the groups so that the first one with a text keeps it."""
    sources = corpus.each_source()
    return sorted(range(len(groups)), key=lambda i: -min(sources[groups[i][0].source].weight, 1))


def find_earlier(
    corpus: CorpusConfig, groups: list[list[FileChunk]], hashed: list[Path], out: Path
) -> None:
    """Find the hashes of each group that also occur in an earlier group, by `order_of_keeping`.

    hashed: the folders that `hash_group` wrote. Writes `00000i-documents.u8` and
    `00000i-paragraphs.u8` (uint64, sorted) to folder `out` for each group i that has any.
    Paragraphs count only in documents of which a copy is taken.
    """
    order = order_of_keeping(corpus, groups)
    with sealed_folder(out) as folder:
        if not corpus.deduplicate:
            return
        write_earlier(hashed, order, "documents", folder)
        is_sampled = any(source.weight < 1 for source in corpus.each_source())
        chosen = select(corpus, groups, hashed, folder) if is_sampled else ()
        write_earlier(hashed, order, "paragraphs", folder, chosen)


def write_earlier(
    hashed: list[Path],
    order: list[int],
    kind: str,
    folder: Path,
    chosen: Sequence["Selection"] = (),
) -> None:
    """Find the hashes of a kind that also occur in a group before, for each group of an order.

    chosen: what is taken of each group, if hashes of other documents do not count.
    """
    n = 1 + sum((path / f"{kind}.npy").stat().st_size for path in hashed) // (8 * MERGED)
    bounds = [i * ALL // n for i in range(n)] + [ALL]
    for low, high in pairwise(bounds):  # about `MERGED` hashes each
        parts = []
        for i in order:  # each is copied, so that one file is open at a time
            hashes = np.load(hashed[i] / f"{kind}.npy", mmap_mode="r")
            start, end = span(hashes, low, high)
            part = hashes[start:end]
            if chosen and (hashed[i] / "owners.npy").exists():
                owners = np.load(hashed[i] / "owners.npy", mmap_mode="r")[start:end]
                part = part[chosen[i].is_taken(owners)]
            parts.append(part[run_starts(part)])
        for i, earlier in zip(order, in_earlier(parts), strict=True):
            if len(earlier):
                append_array(folder / f"{i:06d}-{kind}.u8", earlier)


def span(hashes: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """Find the indices [start, end) of sorted `hashes` that lie in [low, high)."""
    start = np.searchsorted(hashes, np.uint64(low))
    end = len(hashes) if high == ALL else np.searchsorted(hashes, np.uint64(high))
    return int(start), int(end)


def between(hashes: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the slice of sorted `hashes` in [low, high)."""
    start, end = span(hashes, low, high)
    return hashes[start:end]


def in_earlier(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Select from each array of distinct hashes those that occur in an array before it."""
    ends = np.cumsum([len(part) for part in parts])
    together = np.concatenate(parts)
    order = np.argsort(together, kind="stable")  # equal hashes stay in the order of arrays
    found = np.zeros(len(together), bool)
    found[order] = ~run_starts(together[order])
    return [part[mask] for part, mask in zip(parts, np.split(found, ends[:-1]), strict=True)]


def read_earlier(folder: Path, i: int, kind: str) -> np.ndarray:
    path = folder / f"{i:06d}-{kind}.u8"
    return np.fromfile(path, "<u8") if path.exists() else np.zeros(0, "<u8")


# ---------------------------------------------------------------------------------- held out


def hash_limit(fraction: float) -> int:
    """Compute the limit below which a fraction of all possible hashes lies."""
    return math.ceil(fraction * ALL)


def find_limit(corpus: CorpusConfig, hashed: list[Path], earlier: Path) -> int:
    """Find the hash below which documents are held out.

    That is the limit of `corpus.held_out_fraction`, or a higher one that holds out `LEAST`, but at
    most a fifth of the documents and of the characters. Duplicates count once if they are dropped.
    Less than `LEAST` may remain if a weight below 1 samples the held-out documents, or if repeated
    paragraphs are dropped from them.
    """
    configured, total = hash_limit(corpus.held_out_fraction), np.zeros(2, np.int64)
    hashes, sizes = np.zeros(0, np.uint64), np.zeros((0, 2), np.int64)
    for i, folder in enumerate(hashed if configured else ()):
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
            if last < configured:
                return configured  # for a large corpus the first groups suffice to decide
            # whatever the other groups hold, the limit will not exceed `last`
            end = np.searchsorted(hashes, last, side="right")
            hashes, sizes = hashes[:end], sizes[:end]
    if not len(hashes):
        return configured
    too_much = (5 * sizes.cumsum(0) > total).any(1)
    least = hashes[too_much.argmax()] if too_much.any() else int(hashes[-1]) + 1
    return max(configured, int(least))


# ---------------------------------------------------------------------------------- weights


@dataclass
class HashQuota:
    """Has places for the lowest hashes: for all below `limit`, and for `ties` equal to it."""

    limit: int = 0
    ties: int = 0

    def claim_place(self, number: int) -> bool:
        """Take a place for a hash, if there is one; those of ties are used up."""
        if number == self.limit and self.ties:
            self.ties -= 1
            return True
        return number < self.limit


def lowest(groups: list[np.ndarray], n: int) -> list[HashQuota]:
    """Take the `n` lowest hashes of all groups, as one quota per group.

    Among equal hashes those of earlier groups are taken first.
    """
    hashes = np.sort(np.concatenate(groups))
    if n == len(hashes):
        return [HashQuota(ALL) for _ in groups]
    limit, quotas = hashes[n], []
    rest = n - int(np.searchsorted(hashes, limit))
    for group in groups:
        ties = min(rest, int(np.count_nonzero(group == limit)))
        quotas.append(HashQuota(int(limit), ties))
        rest -= ties
    return quotas


def choose_extra_copies(
    documents: list[np.ndarray], weight: float, limit: int
) -> list[list[HashQuota]]:
    """Choose the documents of a source that get one copy more than floor(weight).

    documents: hashes of the documents of each group. limit: those with a lower hash are held out.
    Returns the [training, held-out] quotas of each group.
    """
    parts = ([between(d, limit, ALL) for d in documents], [between(d, 0, limit) for d in documents])
    both = []
    for part in parts:
        n = sum(map(len, part))
        both.append(lowest(part, math.floor(weight * n + 0.5) - math.floor(weight) * n))
    return [list(pair) for pair in zip(*both, strict=True)]


# ---------------------------------------------------------------------------------- one group


@dataclass
class Selection:
    """The documents and copies to take from one group; `select` makes it for the worker."""

    weight: float = 1.0
    limit: int = 0  # documents with a lower hash are held out
    quotas: list[HashQuota] | None = None  # [training, held-out], for fractional weights
    hashes: Path | None = None  # folder that `hash_group` wrote for this group
    earlier: Path | None = None  # folder that `find_earlier` wrote, if duplicates are dropped
    number: int = 0  # index of the group

    def open(self) -> None:
        """Load the hashes that earlier groups have, and those that occur twice in this group."""
        self.seen, self.repeated = {}, {}
        for kind in KINDS if self.earlier else ():
            own = np.load(self.hashes / f"{kind}.npy", mmap_mode="r")
            self.repeated[kind] = set(own[1:][own[1:] == own[:-1]].tolist())
            self.seen[kind] = set(read_earlier(self.earlier, self.number, kind).tolist())

    def record(self, kind: str, number: int) -> bool:
        """Record the hash of a text; tells whether it was there before, which makes it a copy."""
        if number in self.seen[kind]:
            return True
        if number in self.repeated[kind]:
            self.seen[kind].add(number)
        return False

    def is_taken(self, numbers: np.ndarray) -> np.ndarray:
        """Tell of which documents of a source with a weight below 1 a copy is taken.

        numbers: their hashes (uint64), each of which occurs once among all that are not duplicates.
        """
        training, held_out = self.quotas
        has_place = np.where(
            numbers < self.limit, numbers < held_out.limit, numbers < training.limit
        )
        return has_place & np.isin(numbers, self.copies, invert=True)

    @cached_property
    def copies(self) -> np.ndarray:
        """Hashes of its documents that an earlier group has."""
        return read_earlier(self.earlier, self.number, "documents")

    def take(self, document: str, number: int, held_out: bool, rejects: Rejects) -> tuple[str, int]:
        """Drop the duplicate paragraphs of a document, and decide how many copies to take.

        number: `hash_document` of the document.
        Returns the remaining text and the number of copies; ("", 0) if there is none.
        """
        if self.earlier and self.record("documents", number):
            rejects["duplicate"] += 1
            return "", 0
        copies = math.floor(self.weight)
        if held_out:
            copies = min(1, copies)
        if self.quotas and not (held_out and copies):
            copies += self.quotas[held_out].claim_place(number)
        if not copies:  # it keeps no paragraph from those that are taken
            rejects["not sampled"] += 1
            return "", 0
        if self.earlier:
            document = self.drop_paragraphs(document, rejects)
        return document, copies if document else 0

    def drop_paragraphs(self, document: str, rejects: Rejects) -> str:
        if not (self.seen["paragraphs"] or self.repeated["paragraphs"]):
            return document
        lines = document.split("\n")
        kept = [line for line in lines if len(line) < MIN_DEDUP_CHARS or not self.record_line(line)]
        if len(kept) == len(lines):
            return document
        if not any(map(str.strip, kept)):
            rejects["duplicate"] += 1
            return ""
        rejects["duplicate paragraphs"] += len(lines) - len(kept)
        return "\n".join(kept)

    def record_line(self, line: str) -> bool:
        return self.record("paragraphs", hash_text(line))


def select(
    corpus: CorpusConfig, groups: list[list[FileChunk]], hashed: list[Path], earlier: Path
) -> list[Selection]:
    """Decide what to take from each group.

    hashed: folders that `hash_group` wrote. earlier: folder that `find_earlier` wrote. Neither is
    read unless `needs_selection`.
    """
    sources = corpus.each_source()
    weights = [sources[group[0].source].weight for group in groups]
    if not needs_selection(corpus, count_bytes([*chain(*groups)])):
        limit = hash_limit(corpus.held_out_fraction)
        return [Selection(weight, limit) for weight in weights]
    limit = find_limit(corpus, hashed, earlier)
    copies = earlier if corpus.deduplicate else None
    chosen = [
        Selection(weight, limit, hashes=hashed[i], earlier=copies, number=i)
        for i, weight in enumerate(weights)
    ]
    for number, source in enumerate(sources):
        if source.weight % 1:
            own = [i for i, group in enumerate(groups) if group[0].source == number]
            documents = []
            for i in own:
                hashes = np.load(hashed[i] / "documents.npy")
                if corpus.deduplicate:
                    hashes = np.setdiff1d(hashes, read_earlier(earlier, i, "documents"))
                documents.append(hashes)
            quotas = choose_extra_copies(documents, source.weight, limit)
            for i, quota in zip(own, quotas, strict=True):
                chosen[i].quotas = quota
    return chosen
