"""corpus -> vocabulary -> store, in parallel: **prepare** is the order of those steps.

Each step is a pure function piece -> folder, written beside and renamed, so a command that was
stopped goes on where it was and the result depends neither on the number of workers nor on where
they run. The text is read for the hashes that tell duplicates, and once more to number its words;
encoding looks those numbers up in the vocabulary that the counts of the words gave.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from data_pipeline.build.assemble import (
    assemble_store,
    describe_sources,
    print_store,
    warn_held_out,
)
from data_pipeline.build.encode import encode_scan, merge_counts, scan_chunk
from data_pipeline.build.identity import (
    key_of_schema_1,
    list_differences,
    settings_key,
    store_settings,
)
from data_pipeline.build.sentences import sentence_splitter
from data_pipeline.build.workers import Task, run_tasks
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import (
    atomic_folder,
    claim_folder,
    install_files,
    lock_folder,
    remove_entries,
)
from data_pipeline.common.system import count_cpus
from data_pipeline.config import CorpusConfig, DataConfig, VocabConfig
from data_pipeline.corpus.readers import FileChunk, left_out, list_file_chunks, name_source
from data_pipeline.corpus.selection import (
    Selection,
    find_earlier,
    hash_chunk,
    needs_selection,
    select,
)
from data_pipeline.sampling.token_store import read_manifest, read_vocabulary
from data_pipeline.vocabulary.coverage import print_report, report_vocabulary
from data_pipeline.vocabulary.existing import make_vocabulary, read_existing
from data_pipeline.vocabulary.training import write_tokenizer
from data_pipeline.vocabulary.words import load_segmenter

DATA_FILES = ("work", "vocab", "store", "report.html", "report.json")  # in data_dir
is_work = re.compile(r"[0-9a-f]{16}-").match  # a name in `work`: it begins with the settings' hash


def prepare(
    config: DataConfig,
    workers: int | None = None,
    *,
    cluster: str | None = None,
    array_task: tuple[int, int] | None = None,
    finish: bool = False,
) -> None:
    """Build `data_dir`: vocabulary and token store of the corpus; what is there already is kept.

    On `workers` processes (default: one a core), or on the dask cluster at address `cluster`, whose
    workers see the same files under the same names. `array_task` (i, n) does tasks i, i + n, ... of
    the stage that can be done now, comparing, reading or encoding, beside others; `finish` ends
    that stage: it merges what was compared, makes the vocabulary of what was read, or the store of
    what was encoded.
    Raises `UserError` if `data_dir` was built from another corpus or with other settings.
    """
    data_dir = Path(config.data_dir).absolute()
    work_dir = data_dir / "work"
    pieces, existing = list_file_chunks(config.corpus), read_existing(config.vocab)
    settings = store_settings(config.corpus, config.vocab, pieces, existing)
    key = settings_key(settings | {"work": 2})  # 1, of an older version, split the text otherwise
    claim_folder(data_dir, DATA_FILES, "data_dir", is_data)
    older_key = key_of_schema_1(config.corpus, config.vocab, pieces, existing)
    if is_prepared(data_dir, settings, older_key):
        remove_entries(work_dir, is_work)  # a killed command may have left it
        print(f"store: {data_dir / 'store'} is there already")
        warn_held_out(read_manifest(data_dir / "store"))
        return
    run = partial(
        run_stage,
        workers=workers or count_cpus(),
        cluster=cluster,
        array_task=array_task,
        finish=finish,
    )
    for source in config.corpus.each_source():  # not there: better said now
        sentence_splitter(source.language, source.sentence_splitter)
        load_segmenter(source.word_segmenter)
    with lock_folder(data_dir, shared=array_task is not None):
        if array_task is None:
            remove_others(work_dir, key)

        name = key[:16]
        scans = [work_dir / f"{name}-scan-{i:05d}" for i in range(len(pieces))]
        vocab_dir = work_dir / f"{name}-vocab"
        if not vocab_dir.exists():
            # selection: text -> hashes -> what of it is taken, and how often
            hashed = [work_dir / f"{name}-hashes-{i:05d}" for i in range(len(pieces))]
            earlier = work_dir / f"{name}-earlier"
            if needs_selection(config.corpus, pieces) and not earlier.exists():
                run("comparing", hash_chunk, hash_tasks(pieces, hashed, config.corpus))
                if array_task:
                    print("compared; when the whole array has: the same command with --finish")
                    return
                find_earlier(hashed, earlier)
                if finish:
                    print("next: the array once more, which reads, then --finish")
                    return
            selected = select(config.corpus, pieces, hashed, earlier)

            # scan: text -> numbered words
            run("reading", scan_chunk, scan_tasks(pieces, scans, config, selected))
            if array_task:
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
        if array_task is None:  # to be looked at while the rest goes on
            install_files(vocab_dir, data_dir / "vocab")
        name += "-" + vocabulary.sha256[:16]
        shards = [work_dir / f"{name}-shard-{i:05d}" for i in range(len(scans))]
        run("encoding", encode_scan, encode_tasks(scans, shards, stats, vocab_dir, config.vocab))
        if array_task:
            print("encoded; when the whole array has: the same command with --finish instead")
            return

        sources = describe_sources(config.corpus, pieces, stats, shards)
        manifest = assemble_store(
            shards, data_dir / "store", stats, sources, settings, vocabulary.sha256
        )
        remove_entries(work_dir, is_work)
    print_store(manifest)
    warn_held_out(manifest)


def is_data(data_dir: Path) -> bool:
    """Whether a folder without the marker was prepared, or was about to be: a copy without it, or
    an earlier version's."""
    entries = [path.name for path in (data_dir / "work").glob("*")]
    if not all(map(is_work, entries)):
        return False
    return bool(entries) or (data_dir / "store/manifest.json").exists()


def is_prepared(data_dir: Path, settings: dict, older_key: str) -> bool:
    """Whether vocabulary and store are there; raises `UserError` that names what differs if they
    were built with other settings.

    older_key: what a manifest of schema 1 has in place of settings.
    """
    store_dir = data_dir / "store"
    if not (store_dir / "manifest.json").exists():
        return False
    manifest = read_manifest(store_dir)
    if manifest["schema"] == 1:
        different = [] if manifest["key"] == older_key else ["its version did not keep which"]
    else:
        different = list_differences(manifest, settings)
    if different:
        raise UserError(
            f"{data_dir} was built from another corpus or with other settings of corpus or vocab "
            f"({'; '.join(different)}); put them back, or choose another data_dir"
        )
    return (data_dir / "vocab/vocab.txt").exists()


def run_stage(
    verb: str,
    function: Callable,
    tasks: list[tuple[Path, Task]],
    *,
    workers: int,
    cluster: str | None,
    array_task: tuple[int, int] | None,
    finish: bool,
) -> None:
    """Run the tasks of this array task whose result, a folder, is not there yet.

    Raises `UserError` with `finish` if any is missing.
    """
    mine = tasks[array_task[0] :: array_task[1]] if array_task else tasks
    missing = [task for out, task in mine if not out.exists()]
    if finish and missing:
        raise UserError(
            f"{len(missing)} of {len(tasks)} pieces are still to be done ({verb}), the first "
            f"{missing[0].name}; run the array again, or this command without --finish"
        )
    done = sum(task.size for _, task in mine) - sum(task.size for task in missing)
    if missing:
        run_tasks(verb, function, missing, workers, cluster, done)


def chunk_task(piece: FileChunk, out: Path, *arguments) -> tuple[Path, Task]:
    """The task of a function (piece, out, *arguments), with its size in bytes."""
    size, name = piece.size, piece.path
    if piece.version:  # it is of a file
        piece = replace(piece, path=os.path.abspath(piece.path))  # a cluster works elsewhere
        name += f" from byte {piece.start:,}" if piece.start else ""
    return out, Task((piece, out, *arguments), f"{out.name[17:]} ({name})", size)


def hash_tasks(
    pieces: list[FileChunk], hashed: list[Path], corpus: CorpusConfig
) -> list[tuple[Path, Task]]:
    sources = corpus.each_source()
    return [chunk_task(p, h, sources[p.source]) for p, h in zip(pieces, hashed, strict=True)]


def scan_tasks(
    pieces: list[FileChunk], scans: list[Path], config: DataConfig, selected: list[Selection]
) -> list[tuple[Path, Task]]:
    return [
        chunk_task(piece, scan, config.corpus, config.vocab, chosen)
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
    with atomic_folder(vocab_dir) as folder:
        write_tokenizer(folder, pieces, config.vocab)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def read_stats(scans: list[Path]) -> list[dict]:
    return [json.loads((scan / "stats.json").read_text()) for scan in scans]


def remove_others(work_dir: Path, key: str) -> None:
    """Remove what a command with other settings, or a killed worker, left unfinished."""
    if work_dir.is_dir():
        remove_entries(
            work_dir,
            lambda name: is_work(name) and (name.endswith(".tmp") or not name.startswith(key[:16])),
        )


def check_corpus(stats: list[dict], config: DataConfig, pieces: list[FileChunk]) -> None:
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
