"""Prepare a corpus: vocabulary and token store from raw text, in parallel stages.

    comparing   hash the documents of each file chunk, to find duplicates (only where needed)
    reading     select documents, split them into sentences, and number their words
                -> train the vocabulary on the word counts
    encoding    replace word numbers by token ids
                -> assemble the token store

A task of a stage is a pure function from a file chunk to an atomic folder in `data_dir/work`. So a
command that was stopped continues where it was, and the result depends neither on the number of
workers nor on the machine that they run on.
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
from data_pipeline.build.probes import read_pairs, write_probes
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
from data_pipeline.config import PROBES_FILE, CorpusConfig, DataConfig, VocabConfig, to_list
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
DATA_FILES += (PROBES_FILE,)
is_work = re.compile(r"[0-9a-f]{16}-").match  # names in `work` begin with a hash of the settings


def prepare(
    config: DataConfig,
    workers: int | None = None,
    *,
    cluster: str | None = None,
    array_task: tuple[int, int] | None = None,
    finish: bool = False,
) -> None:
    """Build the vocabulary and token store of a corpus in `data_dir`, unless they exist already.

    Encodes the probes of `eval.probes` in any case.

    workers: number of processes (default: one per core).
    cluster: address of a dask scheduler to use instead, whose workers see the same file paths.
    array_task: (i, n) does only the tasks i, i + n, ... of the next unfinished stage; for job
    arrays, in which n such commands run side by side.
    finish: completes the stage of a job array: merges the hashes, trains the vocabulary or
    assembles the store.
    Raises `UserError` if `data_dir` was built from another corpus or with other settings.
    """
    data_dir = Path(config.data_dir).absolute()
    work_dir = data_dir / "work"
    chunks, existing = list_file_chunks(config.corpus), read_existing(config.vocab)
    settings = store_settings(config.corpus, config.vocab, chunks, existing)
    key = settings_key(settings | {"work": 3})  # version 2 did not count the bytes of a split
    probes, named = config.eval.probes, to_list(config.eval.probes.minimal_pairs)
    pairs = read_pairs(named, probes.pairs_per_paradigm) if named else []
    claim_folder(data_dir, DATA_FILES, "data_dir", is_data)
    older_key = key_of_schema_1(config.corpus, config.vocab, chunks, existing)
    if is_prepared(data_dir, settings, older_key):
        remove_entries(work_dir, is_work)  # a killed command may have left some
        print(f"store: {data_dir / 'store'} is there already")
        warn_held_out(read_manifest(data_dir / "store"))
        if pairs or probes.sentences:
            write_probes(data_dir, probes, pairs)
        return
    run = partial(
        run_stage,
        workers=workers or count_cpus(),
        cluster=cluster,
        array_task=array_task,
        finish=finish,
    )
    for source in config.corpus.each_source():  # fail early if a plug-in cannot be imported
        sentence_splitter(source.language, source.sentence_splitter)
        load_segmenter(source.word_segmenter)
    with lock_folder(data_dir, shared=array_task is not None):
        if array_task is None:
            remove_others(work_dir, key)

        name = key[:16]
        scans = [work_dir / f"{name}-scan-{i:05d}" for i in range(len(chunks))]
        vocab_dir = work_dir / f"{name}-vocab"
        if not vocab_dir.exists():
            # comparing: deduplicate, hold out and apply source weights
            hashed = [work_dir / f"{name}-hashes-{i:05d}" for i in range(len(chunks))]
            earlier = work_dir / f"{name}-earlier"
            if needs_selection(config.corpus, chunks) and not earlier.exists():
                run("comparing", hash_chunk, hash_tasks(chunks, hashed, config.corpus))
                if array_task:
                    print("compared; when all array tasks have, run this command with --finish")
                    return
                find_earlier(hashed, earlier)
                if finish:
                    print("next: run the array again to read the text, then --finish")
                    return
            selected = select(config.corpus, chunks, hashed, earlier)

            # reading: text -> numbered words
            run("reading", scan_chunk, scan_tasks(chunks, scans, config, selected))
            if array_task:
                print("read; when all array tasks have, run this command with --finish")
                return
            check_corpus(read_stats(scans), config, chunks)
            write_vocabulary(scans, vocab_dir, config, existing)
            if finish:
                print("next: run the array again to encode the words, then --finish")
                return
        stats = read_stats(scans)

        # encoding: numbered words -> token ids; shards of another vocabulary have other names
        vocabulary = read_vocabulary(vocab_dir)
        if array_task is None:  # already, so that it can be inspected during encoding
            install_files(vocab_dir, data_dir / "vocab")
        name += "-" + vocabulary.sha256[:16]
        shards = [work_dir / f"{name}-shard-{i:05d}" for i in range(len(scans))]
        run("encoding", encode_scan, encode_tasks(scans, shards, stats, vocab_dir, config.vocab))
        if array_task:
            print("encoded; when all array tasks have, run this command with --finish")
            return

        sources = describe_sources(config.corpus, chunks, stats, shards)
        manifest = assemble_store(
            shards, data_dir / "store", stats, sources, settings, vocabulary.sha256
        )
        remove_entries(work_dir, is_work)
    print_store(manifest)
    warn_held_out(manifest)
    if pairs or probes.sentences:
        write_probes(data_dir, probes, pairs)


def is_data(data_dir: Path) -> bool:
    """Tell whether a folder without the marker file is a `data_dir` all the same.

    It may be a copy without the marker, or the work of an earlier version, finished or not.
    """
    entries = [path.name for path in (data_dir / "work").glob("*")]
    if not all(map(is_work, entries)):
        return False
    return bool(entries) or (data_dir / "store/manifest.json").exists()


def is_prepared(data_dir: Path, settings: dict, older_key: str) -> bool:
    """Tell whether `data_dir` has a vocabulary and a store.

    older_key: what a manifest of schema 1 has in place of settings.
    Raises `UserError` if they were built with other settings, and names the differences.
    """
    store_dir = data_dir / "store"
    if not (store_dir / "manifest.json").exists():
        return False
    manifest = read_manifest(store_dir)
    if manifest["schema"] == 1:
        different = [] if manifest["key"] == older_key else ["its version did not record which"]
    else:
        different = list_differences(manifest, settings)
    if different:
        raise UserError(
            f"{data_dir} was built from another corpus or with other settings of corpus or vocab "
            f"({'; '.join(different)}); restore them, or choose another data_dir"
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
    """Run the tasks of a stage whose result, a folder, does not exist yet.

    Only the tasks of `array_task` if it is given. Raises `UserError` with `finish` if any result is
    missing.
    """
    mine = tasks[array_task[0] :: array_task[1]] if array_task else tasks
    missing = [task for out, task in mine if not out.exists()]
    if finish and missing:
        raise UserError(
            f"{len(missing)} of {len(tasks)} pieces are still to be done ({verb}), the first is "
            f"{missing[0].name}; run the array again, or run this command without --finish"
        )
    done = sum(task.size for _, task in mine) - sum(task.size for task in missing)
    if missing:
        run_tasks(verb, function, missing, workers, cluster, done)


def chunk_task(chunk: FileChunk, out: Path, *arguments) -> tuple[Path, Task]:
    """Make the task of a function (chunk, out, *arguments); its size is in bytes."""
    size, name = chunk.size, chunk.path
    if chunk.version:  # a file, and not a dataset
        chunk = replace(chunk, path=os.path.abspath(chunk.path))  # for workers in other folders
        name += f" from byte {chunk.start:,}" if chunk.start else ""
    return out, Task((chunk, out, *arguments), f"{out.name[17:]} ({name})", size)


def hash_tasks(
    chunks: list[FileChunk], hashed: list[Path], corpus: CorpusConfig
) -> list[tuple[Path, Task]]:
    sources = corpus.each_source()
    return [chunk_task(p, h, sources[p.source]) for p, h in zip(chunks, hashed, strict=True)]


def scan_tasks(
    chunks: list[FileChunk], scans: list[Path], config: DataConfig, selected: list[Selection]
) -> list[tuple[Path, Task]]:
    return [
        chunk_task(chunk, scan, config.corpus, config.vocab, chosen)
        for chunk, scan, chosen in zip(chunks, scans, selected, strict=True)
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
    """Train the vocabulary on the training words, and write and print how it fits held-out ones."""
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
    """Remove unfinished work of commands with other settings and of killed workers."""
    if work_dir.is_dir():
        remove_entries(
            work_dir,
            lambda name: is_work(name) and (name.endswith(".tmp") or not name.startswith(key[:16])),
        )


def check_corpus(stats: list[dict], config: DataConfig, chunks: list[FileChunk]) -> None:
    documents = sum(s["train"]["documents"] for s in stats)
    for i, source in enumerate(config.corpus.each_source()):
        own = [s for s, chunk in zip(stats, chunks, strict=True) if chunk.source == i]
        if sum(s["train"]["words"] + s["held_out"]["words"] for s in own) == 0:
            what = f"corpus.sources[{i}]" if config.corpus.sources else "the corpus"
            causes = sum((Counter(s["rejects"]) for s in own), Counter())
            raise UserError(
                f"{what} holds no text ({name_source(source)}; left out: {left_out(causes)}); "
                "correct corpus"
            )
    if config.data.objective == "nsp" and documents < 2:
        raise UserError(
            "next-sentence prediction needs two documents or more, since a random B comes from "
            f"another document; the corpus has {documents} to train on (layout "
            f"{chunks[0].layout}). Set corpus.layout if documents are divided in another way, add "
            f"text, or set data.objective=sop or none"
        )
