"""Read a corpus as token ids from disk, memory-mapped: the token store.

A folder per split (`train`, `held_out`) holds one file per array, whatever the size of the corpus:

    tokens.npy             uint16 or uint32; the token ids
    sentence_offsets.npy   int64; token at which each sentence starts, and the end
    document_offsets.npy   int64; sentence at which each document starts, and the end
    word_starts.npy        one bit per token; only with `corpus.word_segmenter`, or a tokenizer of
                           another kind than BERT's
    run_edges.npy          int64; only in a large store (see `find_run_edges`)

Sentences lie one after another, so that any segment of a document is a slice of `tokens`. Pairs and
masks are not stored, because they are drawn anew in every epoch.
"""

import errno
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import check_regular
from data_pipeline.sampling.manifest import SIZES, read_manifest
from data_pipeline.sampling.vocabulary import Vocabulary

ARRAYS = ("tokens", "sentence_offsets", "document_offsets")
DTYPES = {"tokens": ("<u2", "<u4"), "word_starts": ("|u1",)}  # of the others: int64
PART_TOKENS = 1 << 28  # tokens per epoch part: drawing its pairs takes about 1 GB of memory
RUNS = 256  # runs of documents per epoch part, enough to make each part a sample of the whole
# errors that come from the machine, not from the files
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO)


@dataclass
class TokenStore:
    """One split of a corpus: the tokens of all documents, with sentence and document boundaries.

    `open` memory-maps the arrays, so that a store of any size takes at most five file descriptors
    and only the memory of the pages in use.
    """

    vocabulary: Vocabulary
    tokens: np.ndarray  # uint16 or uint32 (tokens,)
    sentence_offsets: np.ndarray  # int64 (sentences + 1,), in tokens
    document_offsets: np.ndarray  # int64 (documents + 1,), in sentences
    word_starts: np.ndarray | None = None  # uint8 (tokens / 8,), low bit first; None: use ##
    run_edges: np.ndarray | None = None  # from `find_run_edges`; only a large store has it
    manifest: dict = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, split: str, vocabulary: Vocabulary) -> "TokenStore":
        """Open a split of the store at `folder`.

        Raises `UserError` if there is no store, if it was built with another vocabulary, or if its
        files do not match its manifest.
        """
        manifest = read_manifest(folder)
        if manifest["vocab_sha256"] != vocabulary.sha256:
            raise UserError(
                f"{folder} was built with a different vocabulary (sha256 "
                f"{manifest['vocab_sha256'][:12]}, not {vocabulary.sha256[:12]}); restore the "
                "vocabulary that it was built with, or prepare the corpus in another data_dir"
            )
        if manifest["schema"] == 1:
            arrays = load_shards(folder / split, manifest[split]["shards"])
        else:
            arrays = [load_array(folder / split / f"{name}.npy") for name in ARRAYS]
            if manifest.get("word_starts"):
                arrays.append(load_array(folder / split / "word_starts.npy"))
        found = (len(arrays[0]), len(arrays[1]) - 1, len(arrays[2]) - 1)
        wanted = tuple(manifest[split][name] for name in SIZES)
        ends = arrays[1][0], arrays[2][0], arrays[1][-1], arrays[2][-1]
        fits = found == wanted and ends == (0, 0, *found[:2])
        if not fits or len(arrays) > 3 and len(arrays[3]) != (found[0] + 7) // 8:
            raise UserError(
                f"{folder / split} is damaged: it has {found} tokens, sentences and documents, "
                f"but its manifest says {wanted}; delete {folder} and run python -m data_pipeline"
            )
        edges = folder / split / "run_edges.npy"
        runs = load_array(edges, dimensions=2) if edges.exists() else None
        return cls(vocabulary, *arrays, run_edges=runs, manifest=manifest)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.document_offsets) - 1

    @property
    def document_starts(self) -> np.ndarray:
        """First token of each document, and the end of the last one: int64 (documents + 1,)."""
        return self.sentence_offsets[self.document_offsets]

    @property
    def dtype(self) -> np.dtype:
        return self.tokens.dtype

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at `positions` int64 (n,), in any order: int64 (n,)."""
        return self.tokens[positions].astype(np.int64)

    def starts_word(self, positions: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        """Tell whether a word starts at each of `positions` int64 (n,): bool (n,).

        tokens: the tokens at `positions`, if the caller has them; saves reading them again.
        """
        if self.word_starts is not None:
            return (self.word_starts[positions >> 3] >> (positions & 7)) & 1 != 0
        return ~self.vocabulary.continues[self.take(positions) if tokens is None else tokens]

    def spans(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """Return the tokens of each [start, end) as a view of the store's memory."""
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        return [self.view[start:end] for start, end in pairs]

    @cached_property
    def view(self) -> memoryview:
        return memoryview(self.tokens)  # slicing it is five times as fast as slicing an array

    def token_counts(self, every: int = 1) -> np.ndarray:
        """Count how often each piece occurs: int64 (V,).

        every: 1 counts all tokens, n only every n-th block of 2^20 tokens.
        """
        counts = np.zeros(len(self.vocabulary), np.int64)
        for start in range(0, len(self), every << 20):
            block = self.tokens[start : start + (1 << 20)]
            counts += np.bincount(block, minlength=len(counts))
        return counts


def count_parts(tokens: int) -> int:
    """Count the epoch parts in which the pairs of so many tokens are drawn."""
    return max(1, -(-tokens // PART_TOKENS))


def find_run_edges(
    sentence_offsets: np.ndarray, document_offsets: np.ndarray, n_parts: int
) -> np.ndarray:
    """Divide a store into runs of documents of about equal length, `RUNS` per epoch part.

    Returns int64 (runs + 1, 2): first document and first token of each run, and the ends. A large
    store keeps the result in a file, because computing it reads pages all over the offsets.
    """
    run_tokens = int(sentence_offsets[-1]) / (RUNS * n_parts)
    targets = np.ceil(np.arange(RUNS * n_parts) * run_tokens).astype(np.int64)
    # the first document that starts at or after each multiple of `run_tokens`
    edges = np.searchsorted(document_offsets, np.searchsorted(sentence_offsets, targets))
    edges = np.unique(np.append(edges, len(document_offsets) - 1))
    return np.stack([edges, sentence_offsets[document_offsets[edges]]], axis=1)


class StoreView:
    """Some documents of a store, presented as a store of their own, with positions from 0.

    Has what drawing pairs needs: the offsets, `starts_word` and `spans`.
    documents: int64 (runs, 2), ascending; first document of each run, and the one after its last.
    """

    def __init__(self, store: TokenStore, documents: np.ndarray):
        sentences = store.document_offsets[documents]
        tokens = store.sentence_offsets[sentences]
        self.store = store
        self.document_offsets = join_runs(store.document_offsets, documents)
        self.sentence_offsets = join_runs(store.sentence_offsets, sentences)
        ends = np.cumsum(tokens[:, 1] - tokens[:, 0])
        self.run_starts = np.append(0, ends[:-1])
        self.shift = tokens[:, 0] - self.run_starts  # from view to store

    @property
    def document_starts(self) -> np.ndarray:
        return self.sentence_offsets[self.document_offsets]

    def in_store(self, positions: np.ndarray) -> np.ndarray:
        """Convert positions in the view to positions in the store: int64 (n,)."""
        run = np.searchsorted(self.run_starts, positions, side="right") - 1
        return positions + self.shift[run]

    def starts_word(self, positions: np.ndarray) -> np.ndarray:
        return self.store.starts_word(self.in_store(positions))

    def spans(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """Return the tokens of each [start, end), which must not cross from one run to the next."""
        first = self.in_store(starts)
        return self.store.spans(first, first + (ends - starts))


def join_runs(offsets: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Compute the offsets of the items in `runs`, each [first, last), laid end to end."""
    return join_offsets([offsets[first : last + 1] for first, last in runs])


# ---------------------------------------------------------------------------------- files


def load_array(path: Path, dimensions: int = 1) -> np.ndarray:
    """Memory-map the array in a `.npy` file of a store; raises `UserError` if it cannot be read, or
    is of another type."""
    try:
        check_regular(path)
        array = np.lib.format.open_memmap(path, "r").view(np.ndarray)
    except (OSError, ValueError, TypeError, SyntaxError, OverflowError, tokenize.TokenError) as e:
        if getattr(e, "errno", None) in RESOURCE_ERRORS:
            raise UserError(
                f"{path} cannot be opened ({e.strerror}); the file may well be intact: check "
                "the limits of this machine (ulimit -a, permissions), then run the same command"
            ) from None
        raise UserError(
            f"{path} cannot be read ({e}); delete the store and run python -m data_pipeline"
        ) from None
    kind = array.dtype.str
    fits = kind in DTYPES.get(path.stem, ("<i8",)) and array.ndim == dimensions
    if not fits or not array.size and kind == "<i8":
        raise UserError(
            f"{path} is damaged: it holds {array.shape} numbers of type {kind}; delete the store "
            "and run python -m data_pipeline"
        )
    return array


def load_shards(folder: Path, shards: list[dict]) -> list[np.ndarray]:
    """Load a split of a store of schema 1, which has a folder per shard, and join its arrays."""
    if not shards:
        return [np.zeros(0, np.uint16), np.zeros(1, np.int64), np.zeros(1, np.int64)]
    folders = [folder / shard["name"] for shard in shards]
    tokens, sentences, documents = (
        [load_array(path / f"{name}.npy") for path in folders] for name in ARRAYS
    )
    arrays = [np.concatenate(tokens), join_offsets(sentences), join_offsets(documents)]
    if (folders[0] / "word_starts.npy").exists():
        bits = [load_array(path / "word_starts.npy") for path in folders]
        both = zip(bits, tokens, strict=True)
        flags = [np.unpackbits(b, count=len(t), bitorder="little") for b, t in both]
        arrays.append(np.packbits(np.concatenate(flags), bitorder="little"))
    return arrays


def join_offsets(parts: list[np.ndarray]) -> np.ndarray:
    """Join the offsets of several parts into the offsets of the parts laid end to end."""
    return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part) for part in parts]))])
