"""Turn the text of a file chunk, or of a few small ones, into token ids on disk, in two passes.

`scan_group` reads the text once, and replaces each word by a number, in order of first appearance.
When the vocabulary has been trained on the word counts, `encode_scan` tokenizes each distinct word
and replaces its number by its token ids. So no text is read or normalised twice.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.common.arrays import append_array, pack_bits, save_array, write_array
from data_pipeline.common.folders import sealed_folder
from data_pipeline.config import CorpusConfig, VocabConfig
from data_pipeline.corpus.readers import FileChunk, Rejects
from data_pipeline.corpus.selection import Selection, hash_document, read_selected
from data_pipeline.sampling.manifest import SPLITS
from data_pipeline.sampling.vocabulary import BYTES_BEGIN, read_vocabulary
from data_pipeline.vocabulary.existing import is_whole, load_tokenizer, load_whole
from data_pipeline.vocabulary.id_words import (
    IdWords,
    find_units,
    keep_spaces,
    read_ids,
    write_ids,
)
from data_pipeline.vocabulary.training import WordCounts, build_normalizer
from data_pipeline.vocabulary.words import (
    END,
    Segmenter,
    UnitIndex,
    WordIndex,
    WordSplitter,
    load_segmenter,
    number_units,
    number_words,
)

BATCH_CHARACTERS = 1 << 17  # characters to number at once: they fit the processor's cache
BATCH_SENTENCES = 1 << 12  # sentences to encode at once, and at most to number at once
KNOWN = 1 << 16  # words whose ids are kept: some 10 MB
BATCH_WORDS = 1 << 20  # words to count or to pack the starts of at once
SCAN_FILES = ("words.u4", "sentences.i4", "documents.i4", "units.u1")  # suffixes are numpy types


# ---------------------------------------------------------------------------------- scan


def scan_group(
    group: list[FileChunk], out: Path, corpus: CorpusConfig, vocab: VocabConfig, selected: Selection
) -> None:
    """Read the selected documents of some file chunks, and write them as numbered words to `out`.

    group: neighbours of one source.

    Files: `words.txt` (word i on line i, or its ids), `stats.json`, and for each split

        words.u4        the number of each word
        sentences.i4    words in each sentence
        documents.i4    sentences in each document
        counts.npy      occurrences of each word number
        units.u1        whether a masking unit starts at each word; only with a word segmenter
    """
    source, rejects = corpus.each_source()[group[0].source], Rejects()
    split = sentence_splitter(source.language, source.sentence_splitter)
    whole, index = load_whole(vocab), WordIndex({END: 0})
    segment = load_segmenter(source.word_segmenter)
    if any(one.word_segmenter for one in corpus.each_source()):
        segment = segment or list  # each of BERT's words: all of a store has word starts, or none
    numbering = choose_numbering(whole, vocab, segment, index)
    selected.open()
    with sealed_folder(out, shared=True) as folder:
        writers = {name: WordWriter(folder / name, numbering) for name in SPLITS}
        size, read, hashes = 0, 0, []
        for chunk in group:
            chunk_hash = hashlib.sha256()
            for document in read_selected(chunk, source, selected.hashes, rejects):
                data = document.encode("utf-8", "replace")
                size, read = size + len(data), read + 1
                chunk_hash.update(data + b"\0")
                number = hash_document(document)
                held_out = number < selected.limit
                kept, copies = selected.take(document, number, held_out, rejects)
                if whole:
                    lines = kept.split("\n")
                    parts = (keep_spaces(line, split_sentences(line, split)) for line in lines)
                    sentences = list(chain.from_iterable(parts))
                else:
                    sentences = split_sentences(kept, split)
                if kept is not document:  # it has lost paragraphs
                    data = kept.encode("utf-8", "replace")
                for i in range(copies):
                    writers[SPLITS[held_out]].add(sentences, len(data), is_copy=i > 0)
            hashes.append(chunk_hash.hexdigest())
        stats = {name: writer.close() for name, writer in writers.items()}
        if wordless := sum(writer.wordless for writer in writers.values()):
            rejects["without words"] += wordless
        stats |= {"bytes": size, "read": read, "rejects": rejects, "sha256": "".join(hashes)}
        (folder / "words.txt").write_bytes(b"\n".join(map(write_ids, index) if whole else index))
        for name in SPLITS:
            counts = count_words(folder / name / "words.u4", len(index))
            save_array(folder / name / "counts.npy", counts)
        (folder / "stats.json").write_text(json.dumps(stats))


def choose_numbering(
    whole: Tokenizer | None, vocab: VocabConfig, segment: Segmenter | None, index: WordIndex
) -> Callable[[list[str]], tuple[np.ndarray, ...]]:
    """Choose the function that numbers the words of sentences.

    whole: a tokenizer of another kind than BERT's, whose words are used.
    """
    if whole:
        return IdWords(whole, index)
    splitter = WordSplitter(build_normalizer(vocab))
    if segment:
        return partial(number_units, units=UnitIndex(index, splitter), segment=segment)
    return partial(number_words, split=splitter, index=index)


class WordWriter:
    """Writes the sentences of documents as word numbers to disk, in batches, and counts them."""

    def __init__(self, folder: Path, number: Callable[[list[str]], tuple[np.ndarray, ...]]):
        folder.mkdir()
        self.folder, self.number = folder, number
        self.sentences: list[str] = []
        # per unwritten document: sentences, bytes, whether it is a further copy
        self.documents: list[tuple[int, int, bool]] = []
        self.wordless = 0  # documents without words, which are left out
        self.waiting = 0  # characters not yet written
        self.stats = {"bytes": 0, "documents": 0, "sentences": 0, "words": 0}

    def add(self, sentences: list[str], size: int, is_copy: bool = False) -> None:
        """Add a document of `size` bytes, and write out those that wait if they fill a batch."""
        self.sentences += sentences
        self.documents.append((len(sentences), size, is_copy))
        self.waiting += sum(map(len, sentences))
        if self.waiting > BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        firsts = range(0, len(self.sentences) or 1, BATCH_SENTENCES)  # one document can be huge
        parts = [self.number(self.sentences[i : i + BATCH_SENTENCES]) for i in firsts]
        numbers, words, *starts = map(np.concatenate, zip(*parts, strict=True))
        before, size, is_copy = np.array(self.documents, np.int64).reshape(-1, 3).T
        document = np.repeat(np.arange(len(before)), before)[words > 0]
        sizes = np.bincount(document, minlength=len(before))
        arrays = (numbers, words[words > 0], sizes[sizes > 0], *starts)
        for name, values in zip(SCAN_FILES, arrays, strict=False):  # units only with a segmenter
            append_array(self.folder / name, values.astype("<" + name[-2:], copy=False))
        self.wordless += int(np.sum((sizes == 0) & (is_copy == 0)))
        for name, number in (
            ("bytes", size[sizes > 0].sum()),
            ("documents", np.count_nonzero(sizes)),
            ("sentences", np.count_nonzero(words)),
            ("words", len(numbers)),
        ):
            self.stats[name] += int(number)
        self.sentences, self.documents, self.waiting = [], [], 0

    def close(self) -> dict[str, int]:
        self.flush()
        return self.stats


def count_words(path: Path, n: int) -> np.ndarray:
    """Count how often each number below `n` occurs in a file of uint32: int64 (n,)."""
    counts = np.zeros(n, np.int64)
    with open(path, "rb") as file:
        while len(words := np.fromfile(file, "<u4", BATCH_WORDS)):
            counts += np.bincount(words, minlength=n)
    return counts


def merge_counts(scans: list[Path], split: str, whole: bool = False) -> WordCounts:
    """Add up the word counts of one split over all scans, in their order.

    whole: whether words are those of `IdWords`, of which none is too long.
    """
    total = WordCounts(math.inf) if whole else WordCounts()
    for scan in scans:
        words = (scan / "words.txt").read_text(encoding="utf-8").split("\n")
        counts = np.load(scan / split / "counts.npy")
        found = np.flatnonzero(counts)
        total.add(zip((words[i] for i in found), counts[found].tolist(), strict=True))
    return total


# ---------------------------------------------------------------------------------- encode


class WordIds(dict):
    """Maps a word to the bytes of its token ids, as `dtype`.

    A process uses one for all its scans, so that most words are tokenized once. It keeps the first
    `KNOWN` words, since frequent words tend to come early.
    """

    def __init__(self, vocab_dir: Path):
        self.vocabulary, self.is_whole = read_vocabulary(vocab_dir), is_whole(vocab_dir)
        self.tokenize = None if self.is_whole else load_tokenizer(vocab_dir).model.tokenize
        self.dtype = np.dtype(dtype_of(len(self.vocabulary)))
        self.unknown = [self.vocabulary["[UNK]"]]

    def __missing__(self, word: str) -> bytes:
        if self.is_whole:
            ids = read_ids(word)
        else:
            ids = [token.id for token in self.tokenize(word)] or self.unknown
        found = array(self.dtype.char, ids).tobytes()
        if len(self) < KNOWN:
            self[word] = found
        return found

    def mark_units(self, table: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Mark the tokens at which a masking unit starts, bool, in words of another kind of
        tokenizer that lie end to end in a table of ids."""
        pieces = [self.vocabulary.pieces[i] for i in table]
        is_bytes = self.vocabulary.begin == BYTES_BEGIN
        found = (find_units(pieces[a:b], is_bytes) for a, b in pairwise(ends.tolist()))
        return np.array(list(chain.from_iterable(found)), bool)


# a folder of a vocabulary never changes: its name is a hash of the settings
load_word_ids = lru_cache(1)(WordIds)


def encode_scan(scan: Path, out: Path, vocab_dir: Path) -> None:
    """Encode a scanned file chunk: write its token arrays for both splits to folder `out`.

    Also writes `entries.json`, the sizes of each split that is not empty.
    """
    known = load_word_ids(vocab_dir)
    words = (scan / "words.txt").read_text(encoding="utf-8").split("\n")
    ids, ends = bytearray(), array("I", [0])  # word 0 marks the end of a sentence
    for word in words[1:]:
        ids += known[word]
        ends.append(len(ids))
    table = np.frombuffer(ids, known.dtype)
    ends = np.array(ends, np.int32) // table.itemsize
    units = known.mark_units(table, ends) if known.is_whole else None
    lengths = np.diff(ends, prepend=np.int32(0))
    starts = ends - lengths
    with sealed_folder(out, shared=True) as folder:
        entries = {
            split: encode_split(scan / split, folder / split, table, starts, lengths, units)
            for split in SPLITS
            if (scan / split / "documents.i4").stat().st_size
        }
        (folder / "entries.json").write_text(json.dumps(entries))


def encode_split(
    scan: Path,
    out: Path,
    table: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    units: np.ndarray | None,
) -> dict[str, int]:
    """Encode one split of a scan, and return its numbers of tokens, sentences and documents.

    table: token ids of all words, end to end. starts, lengths: of each word's ids in it.
    units: bool, whether a masking unit starts at each token of the table; None: the tokens or a
    word segmenter tell.
    """
    out.mkdir()
    sizes = np.fromfile(scan / "documents.i4", "<i4")
    words = np.memmap(scan / "words.u4", "<u4", "r")
    sentences = np.fromfile(scan / "sentences.i4", "<i4")
    edges = np.zeros(len(sentences) + 1, np.int64)  # sentence boundaries in words
    np.cumsum(sentences, out=edges[1:])
    bounds = [*range(0, len(sentences), BATCH_SENTENCES), len(sentences)]
    offsets = np.zeros(len(sentences) + 1, np.int64)  # sentence boundaries in tokens
    for a, b in pairwise(bounds):
        n = lengths[words[edges[a] : edges[b]]]
        offsets[a + 1 : b + 1] = np.add.reduceat(n, edges[a:b] - edges[a])
    np.cumsum(offsets, out=offsets)

    def take(values: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the value of each token, from those of the table."""
        for a, b in pairwise(bounds):
            part = words[edges[a] : edges[b]]
            n = lengths[part]
            source = np.repeat(starts[part] - (np.cumsum(n, dtype=np.int32) - n), n)
            source += np.arange(len(source), dtype=np.int32)
            yield values[source]

    n_tokens = int(offsets[-1])
    write_array(out / "tokens.npy", table.dtype, n_tokens, take(table))
    if units is not None:
        bits = pack_bits(take(units))
        write_array(out / "word_starts.npy", np.uint8, (n_tokens + 7) // 8, bits)
    elif (scan / "units.u1").exists():
        of_words = np.memmap(scan / "units.u1", "?", "r")
        write_word_starts(out / "word_starts.npy", n_tokens, words, of_words, lengths)
    save_array(out / "sentence_offsets.npy", offsets)
    save_array(out / "document_offsets.npy", np.append(0, np.cumsum(sizes, dtype=np.int64)))
    return {"tokens": n_tokens, "sentences": len(sentences), "documents": len(sizes)}


def write_word_starts(
    path: Path, n_tokens: int, words: np.ndarray, units: np.ndarray, lengths: np.ndarray
) -> None:
    """Write one bit per token, lowest bit first: whether a masking unit starts there.

    words: number of each word. units: bool, whether a masking unit starts at each word.
    lengths: tokens of each word number.
    """

    def mark_starts() -> Iterator[np.ndarray]:
        for i in range(0, len(words), BATCH_WORDS):
            n = lengths[words[i : i + BATCH_WORDS]]
            ends = np.cumsum(n)
            is_start = np.zeros(ends[-1], bool)
            is_start[(ends - n)[units[i : i + BATCH_WORDS]]] = True
            yield is_start

    write_array(path, np.uint8, (n_tokens + 7) // 8, pack_bits(mark_starts()))


def dtype_of(vocab_size: int) -> type:
    """Choose the type of token ids in a store: uint16 if they fit, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
