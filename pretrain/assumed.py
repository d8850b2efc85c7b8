"""Estimate for `pretrain.plan` what is unknown before the data are prepared: the size of the
corpus, and the time and disk space of preparing it.

A synthetic store in memory stands in for the real one. The real code draws its pairs and masks and
trains on them; only the number of epochs is scaled to the size of the corpus. The constants were
measured on 95 MB of English (books, encyclopaedia, news, technical prose) and checked on 36 MB of
Chinese.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.build.encode import dtype_of
from data_pipeline.common.errors import UserError
from data_pipeline.common.system import count_cpus
from data_pipeline.config import CorpusConfig, DataConfig, SourceConfig, VocabConfig, to_list
from data_pipeline.corpus.readers import FileChunk, Rejects, is_costly, read_documents
from data_pipeline.corpus.selection import needs_selection
from data_pipeline.corpus.sources import (
    CHUNK_BYTES,
    find_layouts,
    layout_by_name,
    list_files,
    name_source,
)
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import SPECIAL_TOKENS, Vocabulary
from data_pipeline.vocabulary.existing import final_size, read_existing
from data_pipeline.vocabulary.training import DEFAULT_SIZE, SIZE_MULTIPLE, build_normalizer
from data_pipeline.vocabulary.words import WordSplitter

# the synthetic store
STORE_TOKENS = 1 << 20
SENTENCE_TOKENS, DOCUMENT_SENTENCES = (23, 0.65), (20, 1.47)  # log-normal: median, deviation of log
CONTINUES = 16  # one in so many pieces starts with ##: 6 % of its tokens; measured 5 %

# the size of the corpus
SAMPLE_FILES, SAMPLE_CHARACTERS = 8, 1 << 20  # per source, to count words in
UNPACKED = {".gz": 2.8, ".bz2": 3.7, ".xz": 3.8, ".zst": 2.8}  # bytes of text per byte of file
UNPACKED |= {".parquet": 1.7}  # with snappy; 2.4 with zstd
CHINESE_WORD = re.compile("[　-〿一-鿿＀-￯]")  # characters and marks, of a piece each
BYTES_PER_TOKEN = 4.6  # if there is no text to measure; Chinese 3.1

# preparation
TOKENS_PER_SECOND = 3.1e6  # per core; 14.5 MB of English
SEGMENTED_PER_SECOND = 1.2e6  # with a word segmenter
START_SECONDS = 2  # of the processes
VOCABULARY_SECONDS = 5  # of 30,522 pieces from 20 M tokens
MOST_VOCABULARY_SECONDS = 120  # at most 4 M distinct words are kept


@dataclass
class CorpusSize:
    """Estimated size of a corpus."""

    tokens: float
    """Tokens read, each source once."""
    stored_tokens: float
    """Tokens in the store, each source times its weight."""
    copied_bytes: float
    """Bytes of text that preparation copies because reading it twice would be slow."""
    file_chunks: float
    """Number of file chunks, each read by one process."""
    found: str
    """How the size was estimated, for the table."""


@dataclass
class Preparation:
    """Estimated time and disk space of `python -m data_pipeline`."""

    seconds: float
    cores: int
    store_bytes: float
    most_bytes: float
    """Peak size of `data_dir`: work folder and store."""


@dataclass
class Assumed:
    """Stand-in for the prepared data; `lines` state every assumption."""

    store: TokenStore
    train_tokens: float | None
    """Tokens per epoch; None if unknown."""
    preparation: Preparation | None
    lines: list[str]


def has_store(config: DataConfig) -> bool:
    """Tell whether the data of a config is prepared."""
    return (Path(config.data_dir) / "store/manifest.json").exists()


def assume_data(config: DataConfig, tokens: float | None = None) -> Assumed:
    """Build a stand-in for data that are not prepared: a synthetic store and size estimates.

    tokens: size of the corpus, if the user knows it; None: estimate it from the files.
    Raises `UserError` if the vocabulary at `vocab.path` cannot be used.
    """
    rules = config.text_rules()
    vocabulary, origin = make_up_vocabulary(rules)
    try:
        size, missing = measure_files(config.corpus, rules, len(vocabulary)), ""
    except UserError as error:
        size, missing = None, str(error)
    if tokens:
        size = take_tokens(tokens, config.corpus, size)
    assumed = [f"no store at {config.data_dir} yet", f"{len(vocabulary):,} pieces ({origin})"]
    if size:
        assumed.append(f"{round_off(size.tokens)} tokens ({size.found})")
    assumed.append("sentence and document lengths of English")
    if size and config.corpus.deduplicate:
        assumed.append("no duplicates")
    lines = [f"assumed: {'; '.join(assumed)}"]
    if not size:
        lines.append(
            f"epochs unknown: {missing}. To plan them, give the number of tokens in the corpus "
            "(--tokens 3.3e9), or prepare it: python -m data_pipeline CONFIG"
        )
    return Assumed(
        store=make_up_store(vocabulary),
        train_tokens=size and size.stored_tokens * (1 - config.corpus.held_out_fraction),
        preparation=size and estimate_preparation(size, config, len(vocabulary)),
        lines=lines,
    )


def round_off(number: float) -> str:
    """Format an estimate with three significant digits."""
    return f"{float(f'{number:.3g}'):,.0f}"


# ---------------------------------------------------------------------------------- the store


def make_up_vocabulary(vocab: VocabConfig) -> tuple[Vocabulary, str]:
    """Make up a vocabulary of the size that preparation will give it.

    Keeps the pieces at `vocab.path`, so that their ids are real. Returns (vocabulary, origin of its
    size).
    """
    pieces = read_existing(vocab)
    origin = "vocab.path" if pieces else "vocab.size" if vocab.size else "vocab.size by default"
    if vocab.extend or not pieces:
        first, size = pieces or SPECIAL_TOKENS, final_size(vocab, pieces) or DEFAULT_SIZE
        size += -size % SIZE_MULTIPLE
        origin = "vocab.path and vocab.extend" if pieces else origin
        pieces = first + [f"{'##' * (i % CONTINUES == 0)}piece{i}" for i in range(len(first), size)]
    return Vocabulary.of(pieces), origin


def make_up_store(vocabulary: Vocabulary) -> TokenStore:
    """Draw a store in memory: typical sentence and document lengths, tokens by Zipf's law."""
    random = np.random.default_rng(0)

    def draw_lengths(total: float, median: float, deviation: float) -> np.ndarray:
        mean = median * np.exp(deviation**2 / 2)
        return random.lognormal(np.log(median), deviation, int(total / mean)).astype(int) + 1

    sentences = draw_lengths(STORE_TOKENS, *SENTENCE_TOKENS)
    documents = draw_lengths(len(sentences), *DOCUMENT_SENTENCES)
    starts = np.append(0, np.cumsum(documents))
    starts = np.append(starts[starts < len(sentences)], len(sentences))
    ordinary = random.permutation(vocabulary.ordinary)
    zipf = np.cumsum(1 / np.arange(2, len(ordinary) + 2))
    drawn = np.searchsorted(zipf, random.random(sentences.sum()) * zipf[-1])
    return TokenStore(
        vocabulary,
        tokens=ordinary[drawn].astype(dtype_of(len(vocabulary))),
        sentence_offsets=np.append(0, np.cumsum(sentences)),
        document_offsets=starts,
        manifest={"data_sha256": ""},
    )


# ---------------------------------------------------------------------------------- the corpus


def measure_files(corpus: CorpusConfig, vocab: VocabConfig, vocab_size: int) -> CorpusSize:
    """Estimate the size of a corpus from its file sizes and the words of a sample.

    Raises `UserError` if files are missing or empty, or a source does not consist of files.
    """
    size, file_bytes, text_bytes, copied_bytes = CorpusSize(0, 0, 0, 0, ""), 0, 0.0, 0.0
    for source in corpus.each_source():
        if not source.files:
            raise UserError(f"the size of {name_source(source)} is known only once it is read")
        paths = list_files(to_list(source.files))
        density = measure_density(sample_text(paths, source), source, vocab, vocab_size)
        for path in paths:
            suffix, on_disk = os.path.splitext(path)[1].lower(), os.path.getsize(path)
            text = on_disk * UNPACKED.get(suffix, 1)
            size.tokens += text * density
            size.stored_tokens += text * density * source.weight
            size.file_chunks += 1 if suffix in UNPACKED else -(-on_disk // CHUNK_BYTES)
            copied_bytes += text * is_costly(path, layout_by_name(path))
            file_bytes, text_bytes = file_bytes + on_disk, text_bytes + text
    if needs_selection(corpus, text_bytes):
        size.copied_bytes = copied_bytes
    unpacked = f", about {text_bytes / 1e6:,.1f} MB unpacked" if text_bytes > file_bytes else ""
    size.found = f"corpus files: {file_bytes / 1e6:,.1f} MB{unpacked}, "
    size.found += f"{text_bytes / size.tokens:.2g} bytes per token in a sample"
    return size


def take_tokens(tokens: float, corpus: CorpusConfig, files: CorpusSize | None) -> CorpusSize:
    """Build the size of a corpus from a number of tokens, which includes source weights.

    files: the estimate from its files, if there is one.
    """
    copied = files.copied_bytes if files else 0.0
    unread = any(not source.files for source in corpus.each_source())
    if unread and needs_selection(corpus, np.inf):
        copied = tokens * BYTES_PER_TOKEN
    return CorpusSize(tokens, tokens, copied, files.file_chunks if files else np.inf, "--tokens")


def sample_text(paths: list[str], source: SourceConfig) -> str:
    """Read the start of some files of a source, with the readers of preparation."""
    taken = []
    chosen = paths[:: -(-len(paths) // SAMPLE_FILES)]
    for path, layout in find_layouts(chosen, source).items():
        layout = "line" if layout in ("blank_line", "file") else layout
        left = SAMPLE_CHARACTERS // len(chosen)
        for document in read_documents(FileChunk(path, layout), source, Rejects()):
            taken.append(document[:left])
            left -= len(document)
            if left <= 0:
                break
    return " ".join(taken)


def measure_density(text: str, source: SourceConfig, vocab: VocabConfig, vocab_size: int) -> float:
    """Estimate the tokens per byte of text: words by BERT's pre-tokeniser, times pieces per word.

    Pieces per word follow from the vocabulary size, for English within 2 % (1.48 with 2,100 pieces,
    1.07 with 30,522). A Chinese character is a word and a piece.
    """
    words = WordSplitter(build_normalizer(vocab))(text.replace("\n", " "))
    if not len(words.starts):
        raise UserError(f"{name_source(source)} holds no text")
    whole = CHINESE_WORD.findall(words.data.decode(errors="replace"))
    pieces_per_word = 1 + 2000 / (vocab_size + 2000)
    pieces = len(whole) + (len(words.starts) - len(whole)) * pieces_per_word
    return pieces / len(text.encode(source.encoding, "replace"))


# ---------------------------------------------------------------------------------- preparation


def estimate_preparation(size: CorpusSize, config: DataConfig, vocab_size: int) -> Preparation:
    """Estimate the time and disk space of preparation on this machine.

    Until the store is finished, the work folder holds word ids (`scan_group`: 4.7 bytes per token
    with the word lists, 1 more with a segmenter), the token ids of each file chunk (as large as the
    store) and copies of text (`hash_group`).
    """
    segmented = any(source.word_segmenter for source in config.corpus.each_source())
    cores = int(max(1, min(count_cpus(), size.file_chunks)))
    speed = cores * (SEGMENTED_PER_SECOND if segmented else TOKENS_PER_SECOND)
    seconds = START_SECONDS + size.tokens / speed
    if config.text_rules().path is None:  # distinct words grow with the square root of the text
        learning = VOCABULARY_SECONDS * (size.tokens / 20e6) ** 0.5
        seconds += min(learning, MOST_VOCABULARY_SECONDS)
    stored = size.stored_tokens * (np.dtype(dtype_of(vocab_size)).itemsize + 0.3)  # and offsets
    work = size.stored_tokens * (4.7 + segmented) + stored + size.copied_bytes
    return Preparation(seconds, cores, stored, stored + work)
