"""Print the project's speed and size side by side with its peers':

python scripts/benchmark.py {data,loader,model} [--config CONFIG] [--files FILE ...] [--runs N]
                            [--device cpu|cuda] [--sizes tiny ...] [--threads N]
python scripts/benchmark.py sentences --rules FOLDER

One JSON line a figure: `ratio` says how many times better ours is than the peer, `runs` how often
each was measured, by turns and after a warm-up, `ours` and `peer` are medians, and `spread` is
(largest - smallest) / median of both. What runs on one thread is measured in CPU time, the rest
(`threads` above 1) by the clock. Tokens are real ones: padding never counts.
"""

import argparse
import json
import os
import subprocess
import sys
import time

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # before their imports

import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

import bench_model
import bench_peers
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from data_pipeline.batches import BatchSource
from data_pipeline.config import DataConfig, PairsConfig, load_config
from data_pipeline.corpus import Rejects, list_pieces, read_documents
from data_pipeline.errors import UserError, run_command
from data_pipeline.prepare import prepare
from data_pipeline.sentences import sentence_splitter, split_sentences
from data_pipeline.token_store import TokenStore, read_vocabulary
from pretrain.metrics import count_flops, peak_flops

ROOT = Path(__file__).parent.parent
SAMPLE_BYTES = 2_000_000  # of the corpus, for peers that would take minutes for all of it
OURS_TOKENS, PEER_TOKENS = 2_000_000, 50_000  # of a run of the loader
LENGTHS, BATCH_SIZES = (128, 512), (32, 256)
LANGUAGES = {  # files of rules, named as pySBD's tests are
    **{"arabic": "ar", "armenian": "hy", "bulgarian": "bg", "chinese": "zh", "deutsch": "de"},
    **{"dutch": "nl", "english": "en", "french": "fr", "greek": "el", "hindi": "hi"},
    **{"italian": "it", "japanese": "ja", "persian": "fa", "polish": "pl", "russian": "ru"},
    **{"spanish": "es"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("data", "loader", "model", "all", "sentences"))
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.yaml"))
    parser.add_argument("--files", nargs="+", help="the corpus, instead of the config's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of model")
    parser.add_argument("--sizes", nargs="+", choices=bench_model.SIZES, help="of model")
    parser.add_argument("--threads", type=int, default=1, help="of model on a CPU")
    parser.add_argument("--rules", help="golden rules: LANGUAGE.json, of {text, sentences} each")
    args = parser.parse_args()
    if args.what == "sentences":
        return measure_sentences(Path(args.rules or "."))
    config = load_config(DataConfig, args.config, others=("model", "train", "tracking"))
    if args.files:
        config.corpus = replace(config.corpus, source=None, dataset=None, files=args.files)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = as_one_file(config, Path(folder))
        if args.what in ("data", "all"):
            measure_data(config, args.runs)
        if args.what in ("loader", "all"):
            measure_loader(config, args.runs)
        if args.what in ("model", "all"):
            usual = {"cpu": ("tiny", "mini", "small"), "cuda": ("base", "large")}[args.device]
            measure_model(config, args.sizes or usual, args.device, args.threads, args.runs)


def as_one_file(config: DataConfig, folder: Path) -> DataConfig:
    """The same with the corpus written out as one plain file and the data beside it: what is
    measured is no decompression, and the peers can read it."""
    rejects, path = Rejects(), folder / "corpus.txt"
    with open(path, "w", encoding="utf-8") as file:
        for piece in list_pieces(config.corpus):
            for document in read_documents(piece, config.corpus, rejects):
                file.write(document + "\n\n")
    corpus = replace(
        config.corpus,
        source=None,
        dataset=None,
        files=str(path),
        layout="blank_line",
        encoding="utf-8",
    )
    return replace(config, corpus=corpus, data_dir=str(folder / "data"))


# --- measuring ------------------------------------------------------------------------------------


def rates(
    ours: Callable[[], int], peer: Callable[[], int] | None, runs: int
) -> tuple[list[float], list[float]]:
    """Units of work a second of CPU time of both, by turns; each call returns its units of work."""
    found: tuple[list[float], list[float]] = ([], [])
    for run in range(runs + 1):
        for work, kept in zip((ours, peer), found, strict=True):
            if work is not None:
                start = time.process_time()
                units = work()
                if run > 0:  # the first is the warm-up
                    kept.append(units / (time.process_time() - start))
    return found


def show(
    figure: str,
    unit: str,
    target: str,
    ours: list[float],
    peer: list[float] = (),
    *,
    smaller_is_better: bool = False,
    threads: int = 1,
) -> None:
    """Print a figure from the values of each run."""
    medians = [median(values) if values else None for values in (ours, peer)]
    ratio = None
    if peer:
        ratio = medians[1] / medians[0] if smaller_is_better else medians[0] / medians[1]
    spread = [(max(v) - min(v)) / (median(v) or 1) if v else None for v in (ours, peer)]
    line = {"figure": figure, "unit": unit, "ours": medians[0], "peer": medians[1], "ratio": ratio}
    line |= {"target": target, "runs": len(ours), "spread": spread, "threads": threads}
    print(json.dumps(rounded(line)), flush=True)


def rounded(value):
    """Numbers to three digits, at any depth: more would claim too much."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def watch(command: list[str], until: Path | None = None) -> tuple[float, float, float, float]:
    """Run a command to its end: (seconds, peak bytes) when file `until` came to be, and in all.

    The peak is of all its processes together, by their proportional share of memory (Linux),
    looked at every 50 ms.
    """
    start, peak, early = time.perf_counter(), 0, None
    env = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, start_new_session=True
    )
    while process.poll() is None:
        peak = max(peak, session_memory(process.pid))
        if early is None and until is not None and until.exists():
            early = time.perf_counter() - start, peak
        time.sleep(0.05)
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {process.stderr.read().decode()}")
    whole = time.perf_counter() - start, peak
    return (*(early or whole), *whole)


def session_memory(session: int) -> int:
    """Bytes of memory that the processes of a session use together."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session:
                rollup = (entry / "smaps_rollup").read_text()
                total += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return total


# --- data: text -> vocabulary, store, masked pairs -----------------------------------------------


def measure_data(config: DataConfig, runs: int) -> None:
    measure_preparation(config, runs)
    data_dir = Path(config.data_dir)
    vocabulary = read_vocabulary(data_dir / "vocab")
    corpus_bytes = os.path.getsize(config.corpus.files)
    documents = sample_documents(config)
    sentences = [sentence for document in documents for sentence in document]
    tokenizer = Tokenizer.from_file(str(data_dir / "vocab/tokenizer.json"))

    def build() -> int:
        """The whole of preparation but the training of the vocabulary, on one core."""
        with TemporaryDirectory(dir=data_dir.parent) as folder:
            again = replace(config, data_dir=folder)
            with (
                quiet(),
                mock.patch("data_pipeline.prepare.make_vocabulary", return_value=vocabulary.pieces),
            ):
                prepare(again, workers=1)
        return corpus_bytes

    def encode() -> int:
        for start in range(0, len(sentences), 1000):
            tokenizer.encode_batch(sentences[start : start + 1000], add_special_tokens=False)
        return sum(len(sentence.encode()) for sentence in sentences)

    ours, peer = rates(build, encode, runs)
    show(
        "text to token store, all included, against tokenizers' encode_batch on bare sentences",
        "MB/s of a core",
        "ratio >= 5",
        [rate / 1e6 for rate in ours],
        [rate / 1e6 for rate in peer],
    )

    source = BatchSource(TokenStore(data_dir / "store", "train", vocabulary), PairsConfig(), 0)

    def build_and_load() -> int:
        build()
        source.parts.clear()
        return sum(len(batch.input_ids) for batch in batches(source, 32, None))

    def original() -> int:
        ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
        examples = bench_peers.original_examples(documents, ids, 128, random.Random(0))
        return sum(sum(example["attention_mask"]) for example in examples)

    ours, peer = rates(build_and_load, original, runs)
    show(
        "text to finished masked pairs of an epoch, against google-research/bert's rules",
        "tokens/s of a core",
        "ratio >= 20",
        ours,
        peer,
    )


def measure_preparation(config: DataConfig, runs: int) -> None:
    """Time, memory and size of `python -m data_pipeline`, as anyone runs it; leaves the data."""
    data_dir, file = Path(config.data_dir), config.corpus.files
    OmegaConf.save(OmegaConf.structured(config), data_dir.parent / "config.yaml")
    ours_command = [sys.executable, "-m", "data_pipeline", str(data_dir.parent / "config.yaml")]
    vocab = config.vocab
    settings = [str(vocab.size), str(vocab.min_frequency), str(int(vocab.lowercase)), file]
    peer_command = [sys.executable, bench_peers.__file__, *settings]
    ours, peer = [], []
    for run in range(runs):
        if run:
            subprocess.run(["rm", "-r", str(data_dir)], check=True)
        ours.append(watch(ours_command, until=data_dir / "vocab/vocab.txt"))
        peer.append(watch(peer_command))
    threads = len(os.sched_getaffinity(0))
    what = f"vocabulary of {vocab.size:,} from text, against WordPieceTrainer"
    for name, unit, column, scale in (("time", "s", 0, 1), ("peak memory", "GB", 1, 1e-9)):
        values = ([run[column] * scale for run in runs_] for runs_ in (ours, peer))
        show(
            f"{what}: {name}", unit, "ratio >= 1", *values, smaller_is_better=True, threads=threads
        )
    memory = [run[3] / 1e9 for run in ours]
    show("peak memory of preparation, all processes", "GB", "ours <= 1", memory, threads=threads)
    manifest = json.loads((data_dir / "store/manifest.json").read_text())
    tokens = manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    size = sum(path.stat().st_size for path in (data_dir / "store").rglob("*") if path.is_file())
    show("store on disk, all files", "bytes/token", "ours <= 2.6", [size / tokens])


def sample_documents(config: DataConfig) -> list[list[str]]:
    """Sentences of documents from all over the corpus, `SAMPLE_BYTES` in all."""
    split, rejects = sentence_splitter(config.corpus.language), Rejects()
    pieces = list_pieces(config.corpus)
    every = max(1, os.path.getsize(config.corpus.files) // SAMPLE_BYTES)
    texts = (text for piece in pieces for text in read_documents(piece, config.corpus, rejects))
    chosen = (text for number, text in enumerate(texts) if number % every == 0)
    return [list(split_sentences(text, split)) for text in chosen]


def measure_sentences(folder: Path) -> None:
    """How many texts are split as golden rules say, which are one reasonable reading each."""
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


def quiet():
    """stdout is for figures."""
    return redirect_stdout(sys.stderr)


# --- loader: store -> tensors ---------------------------------------------------------------------


def measure_loader(config: DataConfig, runs: int) -> None:
    with quiet():
        prepare(config)
    data_dir = Path(config.data_dir)
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore(data_dir / "store", "train", vocabulary)
    for length in LENGTHS:
        source = BatchSource(store, PairsConfig(max_seq_length=length), 0)

        def plan(source: BatchSource = source) -> int:
            source.parts.clear()
            source.pairs(0)
            return len(store)

        ours, _ = rates(plan, None, runs)
        show(f"planning an epoch of pairs, length {length}", "tokens/s", "ours >= 200e6", ours)
    for length in LENGTHS:
        for batch_size in BATCH_SIZES:
            measure_batches(store, data_dir / "vocab", length, batch_size, runs)


def measure_batches(
    store: TokenStore, vocab_dir: Path, length: int, batch_size: int, runs: int
) -> None:
    """Finished batches against transformers' collator, as its users set it up and at its best."""
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
        found = rates(ours, load(dataset, bench_peers.collator(vocab_dir, tensors)), runs)
        show(
            f"batches of {batch_size}, length {length}, against transformers' whole-word collator "
            + how,
            "tokens/s of a core",
            f"ours >= {15 if length == 128 else 20}e6" + target,
            *found,
        )


def batches(source: BatchSource, batch_size: int, tokens: int | None) -> Iterator:
    """Batches of an epoch from its start, one a step, until they hold `tokens`."""
    for step in range(source.epoch_size(0) // batch_size or 1):
        (batch,) = source.step(step, batch_size, batch_size, rank=0, world_size=1)
        yield batch
        if tokens is not None:
            tokens -= len(batch.input_ids)
            if tokens <= 0:
                return


# --- model: batches -> update ---------------------------------------------------------------------

TARGETS = {  # (against the peer as its users run it, at its best) by size
    "tiny": ("ratio >= 12", "ratio >= 7"),
    "mini": ("ratio >= 6.5", "ratio >= 4"),
    "small": ("ratio >= 4.5", "ratio >= 3"),
}


def measure_model(
    config: DataConfig, sizes: tuple[str, ...], device: str, threads: int, runs: int
) -> None:
    """A training step against transformers' model, the best of ours against the best of theirs."""
    with quiet():
        prepare(config)
    data_dir = Path(config.data_dir)
    torch.set_num_threads(threads)
    for size in sizes:
        for length in (128, 512) if device == "cuda" else (128,):
            compare_steps(data_dir, size, length, device, threads, runs)


def compare_steps(
    data_dir: Path, size: str, length: int, device: str, threads: int, runs: int
) -> None:
    cuda = device == "cuda"
    task = bench_model.make_task(data_dir, size, length, bench_model.BATCH_SIZE[device], device)
    steps = {
        "ours bf16": bench_model.ours(task, bf16=True),
        "peer bf16": bench_model.peer(task, bf16=True, tuned=False, compiled=cuda),
        "peer bf16, tuned": bench_model.peer(task, bf16=True, tuned=True, compiled=cuda),
    }
    if not cuda:
        steps["ours fp32"] = bench_model.ours(task, bf16=False)
        steps["peer fp32"] = bench_model.peer(task, bf16=False, tuned=False)
        steps["peer fp32, tuned"] = bench_model.peer(task, bf16=False, tuned=True)
    found = bench_model.tokens_per_second(steps, runs, threads)

    def best(*names: str) -> list[float]:
        return max((found[name] for name in names if name in found), key=median)

    what = f"training step of {size}, length {length}, against transformers "
    simple, tuned = TARGETS.get(size, ("ratio >= 1.5", ""))
    unit = f"tokens/s on {device}"
    if not cuda:
        show(what + "fp32", unit, simple, found["ours fp32"], found["peer fp32"], threads=threads)
    show(what + "bf16", unit, "ratio > 1", found["ours bf16"], found["peer bf16"], threads=threads)
    tuned_ones = [name for name in found if name.startswith("peer")]
    show(
        what + "at its best, ours at its best",
        unit,
        tuned,
        best("ours bf16", "ours fp32"),
        best(*tuned_ones),
        threads=threads,
    )
    flops = sum(count_flops(b, task.model, len(task.vocabulary)) for b in task.batches)
    each = flops / sum(len(batch.input_ids) for batch in task.batches)
    tflops = [rate * each / 1e12 for rate in best("ours bf16", "ours fp32")]
    show(f"speed of {size}, length {length}", "TFLOP/s", "", tflops, threads=threads)
    peak = peak_flops(task.device)
    if peak:
        mfu = [value * 1e12 / peak for value in tflops]
        show(f"MFU of {size}, length {length}", "share of the peak", "ours >= 0.5", mfu)
    share = bench_model.padding_share(task)
    show(f"padding in the arithmetic of {size}, length {length}", "share", "ours < 0.03", [share])
    memory = (
        [bench_model.memory_of(side, data_dir, size, length, device) / 1e9]
        for side in ("ours", "peer")
    )
    show(
        f"memory of a step of {size}, length {length}",
        "GB",
        "ratio >= 2",
        *memory,
        smaller_is_better=True,
    )


if __name__ == "__main__":
    run_command(main)
