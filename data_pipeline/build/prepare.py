"""Prepare a corpus: vocabulary and token store from raw text, by the stages of
`data_pipeline.build.stages`, on this machine, a cluster or a job array.

A stopped command resumes where it was, and the result depends neither on the number of workers nor
on the machines that they run on.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from data_pipeline.build.assemble import warn_store
from data_pipeline.build.identity import key_of_schema_1, list_differences
from data_pipeline.build.sentences import sentence_splitter
from data_pipeline.build.stages import STAGES, Plan, Stage, Work, encode_probes, is_work
from data_pipeline.build.workers import run_tasks
from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import (
    check_space,
    claim_folder,
    is_intact,
    lock_folder,
    remove_entries,
    remove_entry,
    sealed_folder,
    size_of,
)
from data_pipeline.common.reading import read_json
from data_pipeline.common.system import count_cpus, progress_bar
from data_pipeline.config import PROBES_FILE, DataConfig
from data_pipeline.corpus.sources import count_bytes
from data_pipeline.sampling.manifest import SPLITS, read_manifest
from data_pipeline.sampling.soundness import CHECKED_FILE
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from data_pipeline.vocabulary.words import load_segmenter

DATA_FILES = ("work", "vocab", "store", "report.html", "report.json")  # in data_dir
DATA_FILES += (PROBES_FILE, CHECKED_FILE)
SETTINGS = "settings"  # ends the name of the folder that has those of unfinished work
MUCH_WORK = 1 << 30  # bytes of unfinished work that no other command may remove, or any of an array
DISK_SHARE = 1.5  # bytes of disk per byte of text, at least: English takes 2.1, Chinese 3.3


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
    Raises `UserError` if `data_dir` was built from another corpus or with other settings, or if a
    file of its store is missing or truncated.
    """
    work = Work(config)
    check(
        not (work.data_dir / "fingerprint.json").exists(),
        f"data_dir {work.data_dir} is a run folder; choose another data_dir",
    )
    claim_folder(work.data_dir, DATA_FILES, "data_dir", is_data)
    if is_prepared(work):
        return use_prepared(work)
    for source in config.corpus.each_source():  # fail early if a plug-in cannot be imported
        sentence_splitter(source.language, source.sentence_splitter)
        segment = load_segmenter(source.word_segmenter)
        check(
            not (segment and work.whole),
            f"corpus.word_segmenter works on BERT's words only, but {work.vocab.path} has other "
            "ones, or added tokens that divide them; remove it, or use a plain BERT vocabulary",
        )
    run = partial(run_tasks, workers=workers or count_cpus(), cluster=cluster)
    with lock_folder(work.data_dir, shared=array_task is not None):
        if is_prepared(work):  # since then, by a command that had the lock
            return use_prepared(work)
        check_disk(work)
        if finish or array_task or cluster or size_of(work.folder) > MUCH_WORK:
            refuse_other_work(work)
        if not array_task:
            remove_others(work)
            remove_damaged(work)
        keep_settings(work)
        stages = [stage for stage in STAGES if not stage.is_complete(work)]
        if array_task:
            run_array_task(stages[0], work, array_task, run)
        elif finish:
            finish_stage(stages[0], work)
        else:
            run_stages(stages, work, run)


# ---------------------------------------------------------------------------------- three ways


def run_stages(stages: list[Stage], work: Work, run: Callable[..., None]) -> None:
    """Do all remaining tasks, on this machine or a cluster, and join their results."""
    for stage in stages:
        do_missing(stage, stage.plan(work), run)
        stage.join(work)


def run_array_task(
    stage: Stage, work: Work, array_task: tuple[int, int], run: Callable[..., None]
) -> None:
    """Do the remaining tasks among i, i + n, ... of a stage; array_task: (i, n)."""
    index, number = array_task
    do_missing(stage, stage.plan(work)[index::number], run)
    print(f"{stage.done}; when all array tasks are done, run this command with --finish")


def finish_stage(stage: Stage, work: Work) -> None:
    """Join the results of a job array; raises `UserError` if any is missing."""
    plan = stage.plan(work)
    if missing := [task for out, task in plan if not out.exists()]:
        raise UserError(
            f"{len(missing)} of {len(plan)} file chunks are not done yet ({stage.verb}), the "
            f"first is {missing[0].name}; run the array again, or run this command without "
            "--finish"
        )
    stage.join(work)
    if stage is not STAGES[-1]:
        following = STAGES[STAGES.index(stage) + 1]
        print(f"next: run the array again to {following.purpose}, then this command with --finish")


def do_missing(stage: Stage, plan: Plan, run: Callable[..., None]) -> None:
    """Run the tasks of a plan whose result does not exist yet."""
    missing = [task for out, task in plan if not out.exists()]
    if missing:
        done = sum(task.size for _, task in plan) - sum(task.size for task in missing)
        run(stage.verb, missing, done=done)


# ---------------------------------------------------------------------------------- checks


def is_data(data_dir: Path) -> bool:
    """Tell whether a folder without the marker file is a `data_dir` nevertheless.

    It may be a copy without the marker, or the work of an earlier version, finished or not.
    """
    entries = [path.name for path in (data_dir / "work").glob("*")]
    if not all(map(is_work, entries)):
        return False
    return bool(entries) or (data_dir / "store/manifest.json").exists()


def is_prepared(work: Work) -> bool:
    """Tell whether `data_dir` has a vocabulary and a store.

    Raises `UserError` if they were built with other settings, and names the differences.
    """
    store_dir = work.data_dir / "store"
    if not (store_dir / "manifest.json").exists():
        return False
    manifest = read_manifest(store_dir)
    if manifest["schema"] == 1:
        key = key_of_schema_1(work.corpus, work.config.vocab, work.chunks, work.existing)
        different = []
        if manifest["key"] != key:
            different.append("an earlier version wrote it and did not record which")
    else:
        different = list_differences(manifest, work.settings)
    if different:
        added = ", vocab.extend included" * bool(work.config.vocab.extend)  # in vocab.size
        raise UserError(
            f"{work.data_dir} was built from another corpus or with other settings in corpus or "
            f"vocab ({'; '.join(different)}{added}); restore them, or choose another data_dir"
        )
    return (work.data_dir / "vocab/vocab.txt").exists()


def use_prepared(work: Work) -> None:
    """Check the files of a store that exists already, and encode the probes.

    Raises `UserError` if one is missing or truncated; `--verify` reads all of them.
    """
    store_dir, vocabulary = work.data_dir / "store", read_vocabulary(work.data_dir / "vocab")
    for split in SPLITS:
        TokenStore.open(store_dir, split, vocabulary)
    remove_entries(work.folder, is_work)  # a killed command may have left some
    print(f"store: {store_dir} exists already")
    warn_store(read_manifest(store_dir), work.config.data.objective)
    encode_probes(work)


def check_disk(work: Work) -> None:
    """Raise `UserError` if the disk of `data_dir` lacks the minimum space for preparation.

    Existing work counts; the size of a dataset is unknown.
    """
    weight = min(1.0, min(source.weight for source in work.corpus.each_source()))
    wanted = DISK_SHARE * weight * count_bytes([c for c in work.chunks if c.version])
    check_space(work.data_dir, wanted - size_of(work.folder), "preparation", "data_dir")


def refuse_other_work(work: Work) -> None:
    """Raise `UserError` if there is unfinished work with other settings, which may be that of days,
    and name the differences."""
    for path in sorted(work.folder.glob(f"*-{SETTINGS}")):
        name = path.name.removesuffix(SETTINGS)
        if name.startswith(work.name) or not any(work.folder.glob(f"{name}*-*[0-9]")):
            continue  # no task of it is done
        advice = f"remove {work.folder} to start over"
        check((path / "settings.json").exists(), f"{path} has lost its file; {advice}")
        kept = read_json(path / "settings.json", {"settings": {str: object}}, advice)
        if different := list_differences(kept, work.settings):
            raise UserError(
                f"{work.folder} has unfinished work of another corpus or with other settings "
                f"({'; '.join(different)}); restore them, choose another data_dir, or {advice}"
            )


def keep_settings(work: Work) -> None:
    """Write the settings of the work beside its results, once."""
    path = work.folder / f"{work.name}-{SETTINGS}"
    if not path.exists():
        with sealed_folder(path, shared=True) as folder:
            (folder / "settings.json").write_text(json.dumps({"settings": work.settings}))


def remove_others(work: Work) -> None:
    """Remove unfinished work with other settings and of killed workers."""

    def is_other(name: str) -> bool:
        return bool(is_work(name)) and (name.endswith(".tmp") or not name.startswith(work.name))

    remove_entries(work.folder, is_other)


def remove_damaged(work: Work) -> None:
    """Remove damaged results of earlier commands, so that they are made again, and with them what
    was made from all results together."""
    found = sorted(path for path in work.folder.glob(f"{work.name}-*") if path.is_dir())
    size = sum(map(size_of, found))
    with progress_bar("checking", size, "B", delay=5) as bar:
        damaged = [path for path in found if not is_intact(path, bar.update)]
    if damaged:
        print(
            f"damaged results, to be made again: {len(damaged)} of {len(found)}, the first is "
            f"{damaged[0]}"
        )
        # first what shows that a stage is complete: a kill leaves nothing that needs what is gone
        for path in (work.vocab_dir, work.earlier, *damaged):
            remove_entry(path)
