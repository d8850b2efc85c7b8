"""corpus -> vocabulary -> store, in parallel: **prepare** is the order of those steps.

Each step is a pure function piece -> folder, written beside and renamed, so a command that was
stopped goes on where it was and the result depends neither on the number of workers nor on where
they run. The text is read for the hashes that tell duplicates, and once more to number its words;
encoding looks those numbers up in the vocabulary that the counts of the words gave. Hashes chain
corpus -> vocabulary -> shard -> store: `verify` follows them.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from data_pipeline.config import CorpusConfig, DataConfig, VocabConfig
from data_pipeline.corpus import Piece, left_out, list_pieces, name_source
from data_pipeline.encode import SPLITS, encode_scan, hash_file, merge_counts, scan_piece
from data_pipeline.errors import UserError
from data_pipeline.existing_vocab import make_vocabulary, read_existing
from data_pipeline.processes import Task, locked, run_tasks, written_beside
from data_pipeline.selection import Selection, find_earlier, hash_piece, needs_selection, select
from data_pipeline.sentences import sentence_splitter
from data_pipeline.token_store import FORMAT, read_manifest, read_vocabulary
from data_pipeline.vocab import write_tokenizer
from data_pipeline.vocab_report import print_report, report_vocabulary
from data_pipeline.words import load_segmenter

SIZES = ("bytes", "documents", "sentences", "words", "tokens")  # of a source, for the manifest


def prepare(
    config: DataConfig,
    workers: int | None = None,
    *,
    cluster: str | None = None,
    share: tuple[int, int] | None = None,
    finish: bool = False,
) -> None:
    """Build `data_dir`: vocabulary and token store of the corpus; what is there already is kept.

    On `workers` processes (default: one a core), or on the dask cluster at address `cluster`, whose
    workers see the same files under the same names. `share` (i, n) does the tasks i, i + n, ... of
    the stage that can be done now, comparing, reading or encoding, and may run beside other shares;
    `finish` ends that stage: it merges what was compared, makes the vocabulary of what was read, or
    the store of what was encoded.
    Raises `UserError` if `data_dir` was built from another corpus or with other settings.
    """
    data_dir = Path(config.data_dir).absolute()
    work_dir = data_dir / "work"
    pieces, existing = list_pieces(config.corpus), read_existing(config.vocab)
    key = settings_key(config.corpus, config.vocab, pieces, existing)
    if is_prepared(data_dir, key):
        shutil.rmtree(work_dir, ignore_errors=True)  # a killed command may have left it
        print(f"store: {data_dir / 'store'} is there already")
        return
    run = partial(
        run_stage,
        workers=workers or len(os.sched_getaffinity(0)),
        cluster=cluster,
        share=share,
        finish=finish,
    )
    for source in config.corpus.each_source():  # not there: better said now
        sentence_splitter(source.language, source.sentences)
        load_segmenter(source.words)
    with locked(data_dir, shared=share is not None):
        if share is None:
            remove_others(work_dir, key)

        name = key[:16]
        scans = [work_dir / f"{name}-scan-{i:05d}" for i in range(len(pieces))]
        vocab_dir = work_dir / f"{name}-vocab"
        if not vocab_dir.exists():
            # selection: text -> hashes -> what of it is taken, and how often
            hashed = [work_dir / f"{name}-hashes-{i:05d}" for i in range(len(pieces))]
            earlier = work_dir / f"{name}-earlier"
            if needs_selection(config.corpus) and not earlier.exists():
                run("comparing", hash_piece, hash_tasks(pieces, hashed, config.corpus))
                if share:
                    print("compared; when the whole array has: the same command with --finish")
                    return
                find_earlier(hashed, earlier)
                if finish:
                    print("next: the array once more, which reads, then --finish")
                    return
            selected = select(config.corpus, pieces, hashed, earlier)

            # scan: text -> numbered words
            run("reading", scan_piece, scan_tasks(pieces, scans, config, selected))
            if share:
                print("read; when the whole array has: the same command with --finish instead")
                return
            check_corpus(read_stats(scans), config, pieces)
            write_vocabulary(scans, vocab_dir, config, existing)
            if finish:
                print("next: the array once more, which encodes, then --finish")
                return
        stats = read_stats(scans)

        # encode: numbered words -> token ids; other pieces of words would be other shards
        vocabulary = read_vocabulary(vocab_dir)
        if share is None:  # to be looked at while the rest goes on
            with written_beside(data_dir / "vocab") as folder:
                shutil.copytree(vocab_dir, folder, dirs_exist_ok=True)
        name += "-" + vocabulary.sha256[:16]
        shards = [work_dir / f"{name}-shard-{i:05d}" for i in range(len(scans))]
        run("encoding", encode_scan, encode_tasks(scans, shards, stats, vocab_dir, config.vocab))
        if share:
            print("encoded; when the whole array has: the same command with --finish instead")
            return

        sources = describe_sources(config.corpus, pieces, stats, shards)
        manifest = assemble_store(
            shards, data_dir / "store", stats, sources, key, vocabulary.sha256
        )
        shutil.rmtree(work_dir, ignore_errors=True)
    print_store(manifest)


def is_prepared(data_dir: Path, key: str) -> bool:
    """Whether vocabulary and store are there; raises `UserError` if they are others."""
    store_dir = data_dir / "store"
    if not (store_dir / "manifest.json").exists():
        return False
    if read_manifest(store_dir)["key"] != key:
        raise UserError(
            f"{data_dir} was built from another corpus or with other settings of corpus or "
            f"vocab; choose another data_dir, or delete {data_dir}"
        )
    return (data_dir / "vocab/vocab.txt").exists()


def run_stage(
    verb: str,
    function: Callable,
    tasks: list[tuple[Path, Task]],
    *,
    workers: int,
    cluster: str | None,
    share: tuple[int, int] | None,
    finish: bool,
) -> None:
    """Run the tasks of this share whose result, a folder, is not there yet.

    Raises `UserError` with `finish` if any is missing.
    """
    mine = tasks[share[0] :: share[1]] if share else tasks
    missing = [task for out, task in mine if not out.exists()]
    if finish and missing:
        raise UserError(
            f"{len(missing)} of {len(tasks)} pieces are still to be done ({verb}), the first "
            f"{missing[0].name}; run the array again, or this command without --finish"
        )
    done = sum(task.size for _, task in mine) - sum(task.size for task in missing)
    if missing:
        run_tasks(verb, function, missing, workers, cluster, done)


def piece_task(piece: Piece, out: Path, *arguments) -> tuple[Path, Task]:
    """The task of a function (piece, out, *arguments), with its size in bytes."""
    size, name = 1, piece.path
    if piece.version:  # it is of a file
        piece = replace(piece, path=os.path.abspath(piece.path))  # a cluster works elsewhere
        size = (piece.end or os.path.getsize(piece.path)) - piece.start
        name += f" from byte {piece.start:,}" if piece.start else ""
    return out, Task((piece, out, *arguments), f"{out.name[17:]} ({name})", size)


def hash_tasks(
    pieces: list[Piece], hashed: list[Path], corpus: CorpusConfig
) -> list[tuple[Path, Task]]:
    sources = corpus.each_source()
    return [piece_task(p, h, sources[p.source]) for p, h in zip(pieces, hashed, strict=True)]


def scan_tasks(
    pieces: list[Piece], scans: list[Path], config: DataConfig, selected: list[Selection]
) -> list[tuple[Path, Task]]:
    return [
        piece_task(piece, scan, config.corpus, config.vocab, chosen)
        for piece, scan, chosen in zip(pieces, scans, selected, strict=True)
    ]


def encode_tasks(
    scans: list[Path], shards: list[Path], stats: list[dict], vocab_dir: Path, vocab: VocabConfig
) -> list[tuple[Path, Task]]:
    return [
        (shard, Task((scan, shard, vocab_dir, vocab), f"shard-{i:05d}", s["bytes"]))
        for i, (scan, shard, s) in enumerate(zip(scans, shards, stats, strict=True))
    ]


def write_vocabulary(
    scans: list[Path], vocab_dir: Path, config: DataConfig, existing: list[str]
) -> None:
    """Counts of the training words -> the files of the vocabulary, measured on held-out words."""
    counts, unseen = merge_counts(scans, "train"), merge_counts(scans, "held_out")
    try:
        pieces = make_vocabulary(counts, config.vocab, existing)
    except UserError as error:
        names = ", ".join(map(name_source, config.corpus.each_source()[:3]))
        raise UserError(f"{names}: {error}") from None
    report = report_vocabulary(pieces, len(existing), counts, unseen, config.vocab)
    with written_beside(vocab_dir) as folder:
        write_tokenizer(folder, pieces, config.vocab)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def read_stats(scans: list[Path]) -> list[dict]:
    return [json.loads((scan / "stats.json").read_text()) for scan in scans]


def settings_key(
    corpus: CorpusConfig, vocab: VocabConfig, pieces: list[Piece], existing: list[str]
) -> str:
    """A hash of all that the store depends on."""
    settings = [FORMAT, asdict(corpus), asdict(vocab) | {"path": existing}]
    settings.append([asdict(piece) for piece in pieces])
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
            causes = sum((Counter(s["rejects"]) for s in own), Counter())
            raise UserError(
                f"{what} holds no text ({name_source(source)}; left out: {left_out(causes)}); put "
                "corpus right"
            )
    if config.data.objective == "nsp" and documents < 2:
        raise UserError(
            "next-sentence prediction needs two documents or more, since a random B comes from "
            f"another document; the corpus has {documents} to train on (layout "
            f"{pieces[0].layout}). Set corpus.layout if documents are divided otherwise, add "
            f"text, or set data.objective=sop or none"
        )


def describe_sources(
    corpus: CorpusConfig, pieces: list[Piece], stats: list[dict], shards: list[Path]
) -> list[dict]:
    """What the manifest says of each source: bytes read, what they became in both splits together,
    and what was left out, by cause."""
    described = []
    for number, source in enumerate(corpus.each_source()):
        sizes, rejects, layouts = Counter(dict.fromkeys(SIZES, 0)), Counter(), {}
        for piece, found, shard in zip(pieces, stats, shards, strict=True):
            if piece.source != number:
                continue
            layouts[piece.layout] = True
            rejects.update(found["rejects"])
            sizes["bytes"] += found["bytes"]
            for split in SPLITS:
                sizes.update(found[split])
            for entry in json.loads((shard / "entries.json").read_text()).values():
                sizes["tokens"] += entry["tokens"]
        about = {"name": name_source(source), "layout": ", ".join(layouts), "weight": source.weight}
        described.append({**about, **sizes, "rejects": dict(rejects)})
    return described


def assemble_store(
    shards: list[Path],
    store_dir: Path,
    stats: list[dict],
    sources: list[dict],
    key: str,
    vocab_sha256: str,
) -> dict:
    """Move finished shards into the store and write its manifest last; returns the manifest."""
    corpus = hashlib.sha256("".join(s["sha256"] for s in stats).encode()).hexdigest()
    manifest = {"format": FORMAT, "key": key, "corpus_sha256": corpus, "vocab_sha256": vocab_sha256}
    manifest["sources"] = sources
    shutil.rmtree(store_dir, ignore_errors=True)
    for split in SPLITS:
        (store_dir / split).mkdir(parents=True)
        entries = []
        for i, shard in enumerate(shards):
            entry = json.loads((shard / "entries.json").read_text()).get(split)
            if entry:
                folder = store_dir / split / f"shard-{i:05d}"
                shutil.copytree(shard / split, folder, copy_function=link_or_copy)
                entries.append({"name": folder.name} | entry)
        totals = {n: sum(e[n] for e in entries) for n in ("tokens", "sentences", "documents")}
        manifest[split] = totals | {"shards": entries}
    if any(store_dir.glob("*/*/word_starts.npy")):
        manifest["word_starts"] = True
    manifest["sha256"] = hash_manifest(manifest)  # names the data in a checkpoint
    temporary = store_dir / "manifest.json.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    temporary.replace(store_dir / "manifest.json")
    return manifest


def hash_manifest(manifest: dict) -> str:
    """The hash of all that a manifest says but this hash."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, indent=1).encode()).hexdigest()


def verify(data_dir: Path) -> None:
    """Follow the hashes from the manifest to every file; raises `UserError` at the first that is
    another."""
    store_dir = data_dir / "store"
    manifest = read_manifest(store_dir)
    wanted = {data_dir / "vocab/vocab.txt": manifest["vocab_sha256"]} | {
        store_dir / split / shard["name"] / name: sha256
        for split in SPLITS
        for shard in manifest[split]["shards"]
        for name, sha256 in shard.get("sha256", {"(no hashes)": ""}).items()
    }
    sound = manifest.get("sha256") == hash_manifest(manifest)
    bad = [] if sound else [store_dir / "manifest.json"]
    bad += [p for p, sha256 in wanted.items() if not p.exists() or hash_file(p) != sha256]
    if bad:
        raise UserError(
            f"{len(bad)} files are missing or not what was written, the first {bad[0]}; delete "
            f"{store_dir} and run python -m data_pipeline"
        )
    print(f"store: {len(wanted):,} files are what the manifest {manifest['sha256'][:12]} says")


def link_or_copy(source: str, target: str) -> None:
    """Both names for one file, where the file system can: a killed command finds all shards
    again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def print_store(manifest: dict) -> None:
    for source in manifest["sources"]:
        print(
            f"corpus: {source['name']} (layout {source['layout']}, weight {source['weight']:g}): "
            + ", ".join(f"{source[name]:,} {name}" for name in SIZES)
            + f", left out: {left_out(source['rejects'])}"
        )
    for split in SPLITS:
        part = manifest[split]
        print(
            f"{split.replace('_', ' ')}: {part['documents']:,} documents, "
            f"{part['sentences']:,} sentences, {part['tokens']:,} tokens"
        )
