"""corpus -> vocabulary -> store, in parallel: **prepare** is the order of those steps.

Each step is a function piece -> folder, written beside and renamed, so a command that was stopped
goes on where it was and the result does not depend on the number of workers. The text is read for
the hashes that tell duplicates, and once more to number its words; encoding looks those numbers up
in the vocabulary that the counts of the words gave.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data_pipeline.config import CorpusConfig, DataConfig, VocabConfig
from data_pipeline.corpus import (
    Piece,
    Rejects,
    is_held_out,
    list_pieces,
    name_source,
)
from data_pipeline.errors import UserError
from data_pipeline.processes import run_tasks, written_beside
from data_pipeline.selection import Selection, hash_piece, needs_selection, read_selected, select
from data_pipeline.sentences import sentence_splitter, split_sentences
from data_pipeline.token_store import FORMAT, read_manifest, read_vocabulary
from data_pipeline.vocab import build_normalizer, build_tokenizer, train_wordpiece, write_tokenizer
from data_pipeline.words import END, WordIndex, WordSplitter, number_words

SPLITS = ("train", "held_out")
BATCH_CHARACTERS = 1 << 20  # of sentences that are numbered together
BATCH_SENTENCES = 1 << 16  # that are encoded together


def prepare(config: DataConfig, workers: int | None = None) -> None:
    """Build `data_dir`: vocabulary and token store of the corpus; what is there already is kept.

    Raises `UserError` if `data_dir` was built from another corpus or with other settings.
    """
    workers = workers or len(os.sched_getaffinity(0))
    data_dir = Path(config.data_dir)
    vocab_dir, store_dir, work_dir = data_dir / "vocab", data_dir / "store", data_dir / "work"
    pieces = list_pieces(config.corpus)
    key = settings_key(config.corpus, config.vocab, pieces)
    if (store_dir / "manifest.json").exists():
        if read_manifest(store_dir)["key"] != key:
            raise UserError(
                f"{data_dir} was built from another corpus or with other settings of corpus or "
                f"vocab; choose another data_dir, or delete {data_dir}"
            )
        if (vocab_dir / "vocab.txt").exists():
            print(f"store: {store_dir} is there already")
            return

    # selection: text -> hashes -> what of it is taken, and how often
    remove_others(work_dir, key)
    sources = config.corpus.each_source()
    for source in sources:
        sentence_splitter(source.language, source.sentences)  # not there: better said now
    selected = [Selection(sources[piece.source].weight) for piece in pieces]
    if needs_selection(config.corpus):
        hashed = [work_dir / f"{key[:16]}-hashes-{i:05d}" for i in range(len(pieces))]
        todo = [
            (p, h, sources[p.source]) for p, h in zip(pieces, hashed, strict=True) if not h.exists()
        ]
        run_tasks("comparing", hash_piece, todo, workers)
        selected = select(config.corpus, pieces, hashed, work_dir / f"{key[:16]}-earlier")

    # scan: text -> numbered words
    scans = [work_dir / f"{key[:16]}-scan-{i:05d}" for i in range(len(pieces))]
    todo = [
        (p, s, config.corpus, config.vocab, chosen)
        for p, s, chosen in zip(pieces, scans, selected, strict=True)
        if not s.exists()
    ]
    run_tasks("reading", scan_piece, todo, workers)
    stats = [json.loads((scan / "stats.json").read_text()) for scan in scans]
    check_corpus(stats, config, pieces)

    # vocabulary: counts of the training words -> pieces
    counts = merge_counts(scans)
    try:
        pieces_of_words = train_wordpiece(counts, config.vocab)
    except UserError as error:
        raise UserError(f"{', '.join(map(name_source, sources[:3]))}: {error}") from None
    with written_beside(vocab_dir) as folder:
        write_tokenizer(folder, pieces_of_words, config.vocab)
    vocabulary = read_vocabulary(vocab_dir)
    print(f"vocabulary: {len(vocabulary):,} pieces from {len(counts):,} distinct words")

    # encode: numbered words -> token ids
    shards = [work_dir / f"{key[:16]}-shard-{i:05d}" for i in range(len(scans))]
    todo = [
        (a, b, vocabulary.pieces, config.vocab)
        for a, b in zip(scans, shards, strict=True)
        if not b.exists()
    ]
    run_tasks("encoding", encode_scan, todo, workers)
    manifest = assemble_store(shards, store_dir, stats, key, vocabulary.sha256)
    shutil.rmtree(work_dir)
    print_store(manifest, stats, pieces, config.corpus)


def settings_key(corpus: CorpusConfig, vocab: VocabConfig, pieces: list[Piece]) -> str:
    """A hash of all that the store depends on."""
    settings = [FORMAT, asdict(corpus), asdict(vocab), [asdict(piece) for piece in pieces]]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def remove_others(work_dir: Path, key: str) -> None:
    """Remove what a command with other settings, or a killed worker, left unfinished."""
    for path in work_dir.glob("*"):
        if not path.name.startswith(key[:16]) or path.name.endswith(".tmp"):
            shutil.rmtree(path)


def check_corpus(stats: list[dict], config: DataConfig, pieces: list[Piece]) -> None:
    documents = sum(s["train"]["documents"] for s in stats)
    for i, source in enumerate(config.corpus.each_source()):
        own = [s for s, piece in zip(stats, pieces, strict=True) if piece.source == i]
        if sum(s["train"]["words"] + s["held_out"]["words"] for s in own) == 0:
            what = f"corpus.sources[{i}]" if config.corpus.sources else "the corpus"
            raise UserError(
                f"{what} holds no text ({name_source(source)}; left out: {left_out(own)}); put "
                "corpus right"
            )
    if config.data.objective == "nsp" and documents < 2:
        raise UserError(
            "next-sentence prediction needs two documents or more, since a random B comes from "
            f"another document; the corpus has {documents} to train on (layout "
            f"{pieces[0].layout}). Set corpus.layout if documents are divided otherwise, add "
            f"text, or set data.objective=sop or none"
        )


# ---------------------------------------------------------------------------------- scan


def scan_piece(
    piece: Piece, out: Path, corpus: CorpusConfig, vocab: VocabConfig, selected: Selection
) -> None:
    """Write the words of what is selected of a piece, numbered as they appear, to folder `out`.

    `words.txt` (word i on line i), `counts.npy` (of training), `stats.json`, and for each split
    `words.u4`, `sentences.i4` (words in each) and `documents.i4` (sentences in each).
    """
    source, rejects, text_hash = corpus.each_source()[piece.source], Rejects(), hashlib.sha256()
    split = sentence_splitter(source.language, source.sentences)
    selected.open()
    splitter, index = WordSplitter(build_normalizer(vocab)), WordIndex({END: 0})
    with written_beside(out) as folder:
        writers = {name: WordWriter(folder / name, splitter, index) for name in SPLITS}
        size = 0
        for document in read_selected(piece, source, selected.hashes, rejects):
            data = document.encode("utf-8", "replace")
            size += len(data)
            text_hash.update(data + b"\0")
            held_out = is_held_out(data, corpus.held_out)
            document, copies = selected.take(document, data, held_out, rejects)
            sentences = list(split_sentences(document, split))
            for _ in range(copies):
                writers[SPLITS[held_out]].add(sentences)
            if copies and not sentences:
                rejects.add("without words")
        stats = {name: writer.close() for name, writer in writers.items()}
        stats |= {"bytes": size, "rejects": rejects.causes, "sha256": text_hash.hexdigest()}
        (folder / "words.txt").write_bytes(b"\n".join(index))
        counts = writers["train"].counts
        np.save(folder / "counts.npy", np.pad(counts, (0, len(index) - len(counts))))
        (folder / "stats.json").write_text(json.dumps(stats))


class WordWriter:
    """Sentences of documents -> word numbers on disk, a batch at a time; knows what it has
    written."""

    def __init__(self, folder: Path, splitter: WordSplitter, index: WordIndex):
        folder.mkdir()
        self.splitter, self.index = splitter, index
        self.files = [
            open(folder / name, "wb") for name in ("words.u4", "sentences.i4", "documents.i4")
        ]
        self.sentences: list[str] = []
        self.sizes: list[int] = []  # sentences of each waiting document
        self.waiting = 0  # characters
        self.counts = np.zeros(0, np.int64)
        self.stats = {"documents": 0, "sentences": 0, "words": 0}

    def add(self, sentences: list[str]) -> bool:
        """Take a document; False if it has no sentence."""
        self.sentences += sentences
        self.sizes.append(len(sentences))
        self.waiting += sum(map(len, sentences))
        if self.waiting > BATCH_CHARACTERS:
            self.flush()
        return bool(sentences)

    def flush(self) -> None:
        numbers, words = number_words(self.sentences, self.splitter, self.index)
        document = np.repeat(np.arange(len(self.sizes)), self.sizes)[words > 0]
        sizes = np.bincount(document, minlength=len(self.sizes))
        for file, array in zip(
            self.files, (numbers, words[words > 0], sizes[sizes > 0]), strict=True
        ):
            array.astype("<u4").tofile(file)
        counts = np.bincount(numbers, minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        for name, number in (
            ("documents", np.count_nonzero(sizes)),
            ("sentences", np.count_nonzero(words)),
            ("words", len(numbers)),
        ):
            self.stats[name] += int(number)
        self.sentences, self.sizes, self.waiting = [], [], 0

    def close(self) -> dict[str, int]:
        self.flush()
        for file in self.files:
            file.close()
        return self.stats


def merge_counts(scans: list[Path]) -> Counter[str]:
    """How often each word occurs in the training text of all pieces."""
    total: Counter[str] = Counter()
    for scan in scans:
        words = (scan / "words.txt").read_text(encoding="utf-8").split("\n")
        counts = np.load(scan / "counts.npy")
        for i in np.flatnonzero(counts):
            total[words[i]] += int(counts[i])
    return total


# ---------------------------------------------------------------------------------- encode


def encode_scan(scan: Path, out: Path, pieces: list[str], vocab: VocabConfig) -> None:
    """Write the token arrays of a scanned piece, for both splits, to folder `out`."""
    tokenizer = build_tokenizer(pieces, vocab)
    words = (scan / "words.txt").read_text(encoding="utf-8").split("\n")
    ids = [[], *(tokenize_word(tokenizer.model, word) for word in words[1:])]
    lengths = np.array([len(word) for word in ids])
    table = np.fromiter((i for word in ids for i in word), dtype_of(len(pieces)), lengths.sum())
    starts = np.cumsum(lengths) - lengths
    with written_beside(out) as folder:
        for split in SPLITS:
            encode_split(scan / split, folder / split, table, starts, lengths)


def tokenize_word(model, word: str) -> list[int]:
    return [token.id for token in model.tokenize(word)]


def encode_split(scan: Path, out: Path, table, starts: np.ndarray, lengths: np.ndarray) -> None:
    sizes = np.fromfile(scan / "documents.i4", "<i4")
    if not len(sizes):
        return
    out.mkdir()
    words = np.memmap(scan / "words.u4", "<u4", "r")
    sentences = np.fromfile(scan / "sentences.i4", "<i4")
    ends = np.cumsum(sentences, dtype=np.int64)
    per_sentence = np.empty(len(sentences), np.int64)
    batches = [slice(i, i + BATCH_SENTENCES) for i in range(0, len(sentences), BATCH_SENTENCES)]
    for batch in batches:
        n = lengths[words[ends[batch][0] - sentences[batch][0] : ends[batch][-1]]]
        per_sentence[batch] = np.add.reduceat(
            n, ends[batch] - sentences[batch] - (ends[batch][0] - sentences[batch][0])
        )
    offsets = np.concatenate([[0], np.cumsum(per_sentence)])
    tokens = np.lib.format.open_memmap(out / "tokens.npy", "w+", table.dtype, (int(offsets[-1]),))
    for batch in batches:
        part = words[ends[batch][0] - sentences[batch][0] : ends[batch][-1]]
        n = lengths[part]
        source = np.repeat(starts[part] - (np.cumsum(n) - n), n)
        source += np.arange(len(source))
        first = offsets[batch.start]
        tokens[first : first + len(source)] = table[source]
    tokens.flush()
    np.save(out / "sentence_offsets.npy", offsets)
    np.save(out / "document_offsets.npy", np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def dtype_of(vocab_size: int) -> type:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def assemble_store(
    shards: list[Path], store_dir: Path, stats: list[dict], key: str, vocab_sha256: str
) -> dict:
    """Move finished shards into the store and write its manifest last; returns the manifest."""
    corpus = hashlib.sha256("".join(s["sha256"] for s in stats).encode()).hexdigest()
    manifest = {"format": FORMAT, "key": key, "corpus_sha256": corpus, "vocab_sha256": vocab_sha256}
    shutil.rmtree(store_dir, ignore_errors=True)
    for split in SPLITS:
        (store_dir / split).mkdir(parents=True)
        entries = []
        for i, shard in enumerate(shards):
            if (shard / split).exists():
                folder = store_dir / split / f"shard-{i:05d}"
                shutil.copytree(shard / split, folder, copy_function=link_or_copy)
                tokens, sentences, documents = (
                    len(np.load(folder / f"{name}.npy", mmap_mode="r"))
                    for name in ("tokens", "sentence_offsets", "document_offsets")
                )
                entries.append(
                    {
                        "name": folder.name,
                        "tokens": tokens,
                        "sentences": sentences - 1,
                        "documents": documents - 1,
                    }
                )
        totals = {n: sum(e[n] for e in entries) for n in ("tokens", "sentences", "documents")}
        manifest[split] = totals | {"shards": entries}
    text = json.dumps(manifest, indent=1)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()  # names the data in a checkpoint
    temporary = store_dir / "manifest.json.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    temporary.replace(store_dir / "manifest.json")
    return manifest


def link_or_copy(source: str, target: str) -> None:
    """Both names for one file, where the file system can: a killed command finds all shards
    again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def print_store(
    manifest: dict, stats: list[dict], pieces: list[Piece], corpus: CorpusConfig
) -> None:
    train, held_out = manifest["train"], manifest["held_out"]
    tokens: Counter[str] = Counter()
    for part in (train, held_out):
        tokens.update({shard["name"]: shard["tokens"] for shard in part["shards"]})
    for number, source in enumerate(corpus.each_source()):
        own = [i for i, piece in enumerate(pieces) if piece.source == number]
        sizes = Counter(tokens=sum(tokens[f"shard-{i:05d}"] for i in own))
        for i in own:
            sizes.update(stats[i]["train"])
            sizes.update(stats[i]["held_out"])
        layouts = ", ".join(dict.fromkeys(pieces[i].layout for i in own))
        print(
            f"corpus: {name_source(source)} (layout {layouts}, weight {source.weight:g}): "
            f"{sum(stats[i]['bytes'] for i in own):,} bytes, "
            + ", ".join(f"{sizes[n]:,} {n}" for n in ("documents", "sentences", "words", "tokens"))
            + f", left out: {left_out([stats[i] for i in own])}"
        )
    for name, part in (("train", train), ("held out", held_out)):
        print(
            f"{name}: {part['documents']:,} documents, {part['sentences']:,} sentences, "
            f"{part['tokens']:,} tokens"
        )


def left_out(stats: list[dict]) -> str:
    """What was not taken, by cause: documents, but for the paragraphs that are named so."""
    rejects: Counter[str] = Counter()
    for s in stats:
        rejects.update(s["rejects"])
    return ", ".join(f"{n:,} {cause}" for cause, n in rejects.items()) or "none"
