"""`benchmark.py data`, `loader`, `sentences`: measure preparation, batches, sentence splitting."""

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import bench_peers
import torch
from bench_figures import quiet, rates, show, watch
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from data_pipeline.build.prepare import prepare
from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import size_of
from data_pipeline.common.system import count_cpus
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.corpus.readers import Rejects, read_documents
from data_pipeline.corpus.sources import list_file_chunks
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary

SAMPLE_BYTES = 2_000_000  # of the corpus, for peers that are too slow for all of it
OURS_TOKENS, PEER_TOKENS = 2_000_000, 50_000  # tokens per run of the loader
LENGTHS, BATCH_SIZES = (128, 512), (32, 256)
LANGUAGES = {  # names of pySBD's rule files -> language
    "arabic": "ar", "armenian": "hy", "bulgarian": "bg", "chinese": "zh", "deutsch": "de",
    "dutch": "nl", "english": "en", "french": "fr", "greek": "el", "hindi": "hi",
    "italian": "it", "japanese": "ja", "persian": "fa", "polish": "pl", "russian": "ru",
    "spanish": "es",
}  # fmt: skip


def measure_data(config: DataConfig, runs: int) -> None:
    measure_preparation(config, runs)
    data_dir = Path(config.data_dir)
    vocabulary = read_vocabulary(data_dir / "vocab")
    corpus_bytes = os.path.getsize(config.corpus.files)
    documents = sample_documents(config)
    sentences = [sentence for document in documents for sentence in document]
    tokenizer = Tokenizer.from_file(str(data_dir / "vocab/tokenizer.json"))

    def build() -> int:
        """Run all of preparation except vocabulary training, on one core."""
        with TemporaryDirectory(dir=data_dir.parent) as folder:
            again = replace(config, data_dir=folder)
            trainer = "data_pipeline.build.stages.make_vocabulary"
            with quiet(), mock.patch(trainer, return_value=vocabulary.pieces):
                prepare(again, workers=1)
        return corpus_bytes

    def encode() -> int:
        for start in range(0, len(sentences), 1000):
            tokenizer.encode_batch(sentences[start : start + 1000], add_special_tokens=False)
        return sum(len(sentence.encode()) for sentence in sentences)

    ours, peer = rates(runs, build, encode)
    show(
        "text to token store, all included, against tokenizers' encode_batch on bare sentences",
        "MB/s of a core",
        "ratio >= 5",
        [rate / 1e6 for rate in ours],
        [rate / 1e6 for rate in peer],
    )

    source = BatchSource(TokenStore.open(data_dir / "store", "train", vocabulary), PairsConfig(), 0)

    def build_and_load() -> int:
        build()
        source.free_pairs()
        return sum(len(batch.input_ids) for batch in batches(source, 32))

    def original() -> int:
        ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
        examples = bench_peers.original_examples(documents, ids, 128, random.Random(0))
        return sum(sum(example["attention_mask"]) for example in examples)

    ours, peer = rates(runs, build_and_load, original)
    show(
        "text to finished masked pairs of an epoch, against google-research/bert's rules",
        "tokens/s of a core",
        "ratio >= 20",
        ours,
        peer,
    )


def measure_preparation(config: DataConfig, runs: int) -> None:
    """Measure time, memory and store size of `python -m data_pipeline`; keeps the data."""
    data_dir, file = Path(config.data_dir), config.corpus.files
    OmegaConf.save(OmegaConf.structured(config), data_dir.parent / "config.yaml")
    ours_command = [sys.executable, "-m", "data_pipeline", str(data_dir.parent / "config.yaml")]
    vocab = config.vocab
    settings = [str(vocab.size), str(vocab.min_frequency), str(int(vocab.lowercase)), file]
    peer_command = [sys.executable, bench_peers.__file__, *settings]
    ours, peer = [], []
    for run in range(runs):
        if run:
            shutil.rmtree(data_dir)
        ours.append(watch(ours_command, until=data_dir / "vocab/vocab.txt"))
        peer.append(watch(peer_command))
    threads = count_cpus()
    what = f"vocabulary of {vocab.size:,} from text, against WordPieceTrainer"
    for name, unit, column, scale in (("time", "s", 0, 1), ("peak memory", "GB", 1, 1e-9)):
        values = ([run[column] * scale for run in side] for side in (ours, peer))
        figure = f"{what}: {name}"
        show(figure, unit, "ratio >= 1", *values, smaller_is_better=True, threads=threads)
    memory = [run[3] / 1e9 for run in ours]
    show("peak memory of preparation, all processes", "GB", "ours <= 1", memory, threads=threads)
    manifest = json.loads((data_dir / "store/manifest.json").read_text())
    tokens = manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    size = size_of(data_dir / "store")
    show("store on disk, all files", "bytes/token", "ours <= 2.6", [size / tokens])


def sample_documents(config: DataConfig) -> list[list[str]]:
    """Sample about `SAMPLE_BYTES` of documents across the corpus, split into sentences."""
    split, rejects = sentence_splitter(config.corpus.language), Rejects()
    chunks = list_file_chunks(config.corpus)
    every = max(1, os.path.getsize(config.corpus.files) // SAMPLE_BYTES)
    texts = (text for chunk in chunks for text in read_documents(chunk, config.corpus, rejects))
    chosen = (text for number, text in enumerate(texts) if number % every == 0)
    return [split_sentences(text, split) for text in chosen]


def measure_sentences(folder: Path) -> None:
    """Count the texts that are split as pySBD's golden rules expect."""
    paths = [p for p in sorted(folder.glob("*.json")) if p.stem.split("_")[0] in LANGUAGES]
    if not paths:
        raise UserError(f"no golden rules at {folder}/LANGUAGE.json; name their folder by --rules")
    for path in paths:
        split = sentence_splitter(LANGUAGES[path.stem.split("_")[0]])
        cases = json.loads(path.read_text(encoding="utf-8"))
        right = sum(
            [sentence.strip() for sentence in split_sentences(case["text"], split)]
            == [sentence.strip() for sentence in case["sentences"]]
            for case in cases
        )
        show(f"sentences as golden rules say, {path.stem}", f"of {len(cases)}", "none", [right])


def measure_loader(config: DataConfig, runs: int) -> None:
    with quiet():
        prepare(config)
    data_dir = Path(config.data_dir)
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore.open(data_dir / "store", "train", vocabulary)
    for length in LENGTHS:
        source = BatchSource(store, PairsConfig(max_seq_length=length), 0)

        def plan(source: BatchSource = source) -> int:
            source.free_pairs()
            source.pairs(0)
            return len(store)

        (ours,) = rates(runs, plan)
        show(f"planning an epoch of pairs, length {length}", "tokens/s", "ours >= 200e6", ours)
    for length in LENGTHS:
        for batch_size in BATCH_SIZES:
            measure_batches(store, data_dir / "vocab", length, batch_size, runs)


def measure_batches(
    store: TokenStore, vocab_dir: Path, length: int, batch_size: int, runs: int
) -> None:
    """Compare batches with transformers' collator, as commonly set up and at its best."""
    try:
        import datasets
        from transformers.utils import logging
    except ImportError:
        raise UserError("the peer needs transformers: pip install -e '.[hf]'") from None
    logging.set_verbosity_error()
    source = BatchSource(store, PairsConfig(max_seq_length=length), 0)
    plain = BatchSource(store, PairsConfig(max_seq_length=length, masked_lm_prob=1e-9), 0)
    count = batch_size * max(1, PEER_TOKENS // (batch_size * length))
    examples = list(
        bench_peers.padded_examples(plain.batch(0, count), store.vocabulary.continues, length)
    )

    def ours() -> int:
        return sum(len(batch.input_ids) for batch in batches(source, batch_size, OURS_TOKENS))

    def load(dataset, collate) -> Callable[[], int]:
        loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, collate_fn=collate)
        return lambda: sum(int(batch["attention_mask"].sum()) for batch in loader)

    for how, dataset, tensors, target in (
        ("in a DataLoader", datasets.Dataset.from_list(examples), "pt", ", ratio >= 40"),
        ("at its best: lists in memory, numpy arrays", examples, "np", ""),
    ):
        found = rates(runs, ours, load(dataset, bench_peers.collator(vocab_dir, tensors)))
        show(
            f"batches of {batch_size}, length {length}, against transformers' whole-word collator "
            + how,
            "tokens/s of a core",
            f"ours >= {15 if length == 128 else 20}e6" + target,
            *found,
        )


def batches(source: BatchSource, batch_size: int, tokens: float = math.inf) -> Iterator:
    """Yield the first batches of an epoch until they hold `tokens`."""
    for step in range(source.epoch_size(0) // batch_size or 1):
        (batch,) = source.step(step, batch_size, batch_size, rank=0, world_size=1)
        yield batch
        tokens -= len(batch.input_ids)
        if tokens <= 0:
            return
