"""vocabulary + words -> **token store** -> pairs: the corpus as token ids on disk, memory-mapped.

A folder a split (`train`, `held_out`), in it a folder a shard with `tokens.npy` (uint16 or uint32),
`sentence_offsets.npy` (token where each sentence starts, and the end) and `document_offsets.npy`
(sentence where each document starts, and the end); where a segmenter said what words are,
`word_starts.npy` too, one bit a token. Sentences lie one after another, so any segment
of a document is a slice. No padding, no pairs, no masks: those are drawn afresh every epoch.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.errors import UserError

FORMAT = 1


@dataclass
class Vocabulary:
    """What pairs, masks and model need to know of a vocabulary; read without `tokenizers`."""

    pieces: list[str]
    sha256: str
    continues: np.ndarray  # bool (V,): the piece continues a word (##)
    ordinary: np.ndarray  # int64: ids that may replace a masked token: not special, not [unusedN]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, piece: str) -> int:
        """The id of a piece."""
        return self.ids[piece]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary in `folder/vocab.txt`; raises `UserError` if there is none."""
    path = folder / "vocab.txt"
    if not path.exists():
        raise UserError(f"no vocabulary at {path}; make one: python -m data_pipeline CONFIG")
    data = path.read_bytes()
    pieces = data.decode("utf-8").split("\n")[:-1]
    named = np.array([p.startswith("[") and p.endswith("]") and len(p) > 2 for p in pieces])
    return Vocabulary(
        pieces=pieces,
        sha256=hashlib.sha256(data).hexdigest(),
        continues=np.array([p.startswith("##") for p in pieces]),
        ordinary=np.flatnonzero(~named),
    )


class TokenStore:
    """One split of a store: a sequence of tokens, cut in sentences, cut in documents.

    `sentence_offsets` int64 (sentences + 1,) in tokens, `document_offsets` int64 (documents + 1,)
    in sentences, both over all shards together; `vocabulary` gives the words, or the bits of
    `word_starts` do.
    """

    word_starts: list[np.ndarray] | None = None  # of each shard: uint8 (tokens / 8,), low bit first

    def __init__(self, folder: Path, split: str, vocabulary: Vocabulary):
        self.manifest = read_manifest(folder)
        if self.manifest["vocab_sha256"] != vocabulary.sha256:
            raise UserError(
                f"{folder} was built with another vocabulary (sha256 "
                f"{self.manifest['vocab_sha256'][:12]}, not {vocabulary.sha256[:12]}); build it "
                f"again: delete {folder} and run python -m data_pipeline"
            )
        self.vocabulary = vocabulary
        self.tokens: list[np.ndarray] = []
        if self.manifest.get("word_starts"):
            self.word_starts = []
        sentences, documents = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        starts = [0]
        for shard in self.manifest[split]["shards"]:
            tokens, sentence, document = (
                load_array(folder / split / shard["name"] / f"{name}.npy")
                for name in ("tokens", "sentence_offsets", "document_offsets")
            )
            found = (len(tokens), len(sentence) - 1, len(document) - 1)
            wanted = (shard["tokens"], shard["sentences"], shard["documents"])
            if found != wanted:
                raise UserError(
                    f"{folder / split / shard['name']} has {found} tokens, sentences and "
                    f"documents, its manifest says {wanted}; delete {folder} and run python -m "
                    f"data_pipeline"
                )
            self.tokens.append(tokens)
            if self.word_starts is not None:
                self.word_starts.append(load_bits(folder / split / shard["name"], len(tokens)))
            sentences.append(sentence[1:] + sentences[-1][-1])
            documents.append(document[1:] + documents[-1][-1])
            starts.append(starts[-1] + len(tokens))
        self.shard_starts = np.array(starts)
        self.sentence_offsets = np.concatenate(sentences)
        self.document_offsets = np.concatenate(documents)

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    @property
    def n_documents(self) -> int:
        return len(self.document_offsets) - 1

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The tokens at `positions` int64 (n,), any order, over all shards: int64 (n,)."""
        return self.read(self.tokens, positions, lambda tokens, places: tokens[places])

    def starts_word(self, positions: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        """Whether a word starts at each of `positions` int64 (n,): bool (n,).

        `tokens` are those at `positions`, where they are at hand already.
        """
        if self.word_starts is not None:
            return self.read(self.word_starts, positions, read_bits) != 0
        return ~self.vocabulary.continues[self.take(positions) if tokens is None else tokens]

    def read(
        self, arrays: list[np.ndarray], positions: np.ndarray, at: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """What `at(array, places in the shard)` gives for `positions`, of an array a shard: int64
        (n,)."""
        if len(arrays) == 1:
            return at(arrays[0], positions).astype(np.int64)
        out = np.empty(len(positions), np.int64)
        shards = np.searchsorted(self.shard_starts, positions, side="right") - 1
        for shard in np.unique(shards):
            here = shards == shard
            out[here] = at(arrays[shard], positions[here] - self.shard_starts[shard])
        return out

    def spans(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """The tokens of each [start, end), none of which spans two documents: memory of `dtype`."""
        shards = np.searchsorted(self.shard_starts[1:-1], starts, side="right")
        shift = self.shard_starts[shards]
        triples = zip(
            shards.tolist(), (starts - shift).tolist(), (ends - shift).tolist(), strict=True
        )
        return [self.views[shard][start:end] for shard, start, end in triples]

    @cached_property
    def views(self) -> list[memoryview]:
        return [memoryview(tokens) for tokens in self.tokens]  # sliced five times as fast

    @property
    def dtype(self) -> np.dtype:
        return self.tokens[0].dtype

    def token_counts(self, every: int = 1) -> np.ndarray:
        """How often each piece occurs, in every `every`-th million of tokens: int64 (V,)."""
        counts = np.zeros(len(self.vocabulary), np.int64)
        for shard in self.tokens:
            for start in range(0, len(shard), every << 20):
                counts += np.bincount(shard[start : start + (1 << 20)], minlength=len(counts))
        return counts


class Part(TokenStore):
    """Some runs of documents of a store, end to end, as a store with places of its own.

    `documents` int64 (runs, 2): the first of each run and the one after its last, ascending.
    """

    def __init__(self, store: TokenStore, documents: np.ndarray):
        sentences = store.document_offsets[documents]
        tokens = store.sentence_offsets[sentences]
        self.store, self.vocabulary = store, store.vocabulary
        self.tokens, self.word_starts = store.tokens, store.word_starts
        self.document_offsets = join_runs(store.document_offsets, documents)
        self.sentence_offsets = join_runs(store.sentence_offsets, sentences)
        ends = np.cumsum(tokens[:, 1] - tokens[:, 0])
        self.run_starts = np.append(0, ends[:-1])
        self.later = tokens[:, 0] - self.run_starts  # how much later each run starts in the store

    def __len__(self) -> int:
        return int(self.sentence_offsets[-1])

    def in_store(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where spans [start, end), none across two runs, are in the store."""
        later = self.later[np.searchsorted(self.run_starts, starts, side="right") - 1]
        return starts + later, ends + later

    def read(
        self, arrays: list[np.ndarray], positions: np.ndarray, at: Callable[..., np.ndarray]
    ) -> np.ndarray:
        return self.store.read(arrays, self.in_store(positions, positions)[0], at)

    def spans(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        return self.store.spans(*self.in_store(starts, ends))


def join_runs(offsets: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """`offsets` of the items in [first, last) of each of `runs`, as if these lay end to end."""
    sizes = [np.diff(offsets[first : last + 1]) for first, last in runs]
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes))])


def read_bits(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    return (bits[places >> 3] >> (places & 7)) & 1


def load_bits(shard: Path, tokens: int) -> np.ndarray:
    bits = load_array(shard / "word_starts.npy")
    if bits.dtype != np.uint8 or len(bits) != (tokens + 7) // 8:
        raise UserError(
            f"{shard / 'word_starts.npy'} has {len(bits)} bytes ({bits.dtype}), not a bit for each "
            f"of {tokens} tokens; delete {shard.parents[1]} and run python -m data_pipeline"
        )
    return bits


def load_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); delete the store and run python -m data_pipeline"
        ) from None


def read_manifest(folder: Path) -> dict:
    """The manifest of a finished store; raises `UserError` if there is none or it is another
    format."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no token store at {folder}; make one: python -m data_pipeline CONFIG"
        ) from None
    except ValueError:
        raise UserError(
            f"{path} is damaged; delete {folder} and run python -m data_pipeline"
        ) from None
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}; delete "
            f"{folder} and run python -m data_pipeline"
        )
    return manifest
