"""The folder of a run: who owns it, who is using it, and where the run resumes."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import (
    claim_folder,
    hash_file,
    install_files,
    open_lock,
    write_file,
)
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES
from pretrain.checkpoint import (
    find_sound,
    list_checkpoints,
    list_others,
    read_state,
    resume_checkpoint,
)
from pretrain.config import TrainConfig
from pretrain.fingerprint import check_fingerprint, read_fingerprint
from pretrain.processes import call_on_all, share_from_main
from pretrain.read_run import read_run_config
from pretrain.tracking import read_metrics

# the checkpoints last: a restart that is killed while it moves them aside begins again
RUN_FILES = ("config.yaml", "fingerprint.json", "metrics.jsonl", "report.html", "export", "vocab")
RUN_FILES += ("metrics.jsonl.damaged", "ranks", "checkpoints")
held: list[TextIO] = []  # the lock of the run that this process trains
HOLDER = b"process "  # what the lock begins with
POLL = 0.5  # seconds between two checks of a run that is stopping


def is_run(run_dir: Path) -> bool:
    """Recognize the folder of a run that lacks the marker file, as earlier versions wrote it."""
    record = (run_dir / "metrics.jsonl").exists()
    known = (run_dir / "lock").exists() or (run_dir / "fingerprint.json").exists()
    return record and known or any(run_dir.glob("checkpoints/step-*/manifest.json"))


def lock_run(run_dir: Path, accelerator: Accelerator) -> TextIO:
    """Create and lock the run folder, so that two jobs cannot overwrite each other's files (a
    collective call).

    Waits for a job that a signal is stopping. Returns the open lock file. Raises `UserError` if the
    folder is in use, or holds the user's own files under names that a run writes.
    """
    taken = []
    share_from_main(lambda: taken.append(take_lock(run_dir)), accelerator)
    return taken[0] if taken else open(os.devnull, "w")


def take_lock(run_dir: Path) -> TextIO:
    """Create and lock the run folder on the main process, as `lock_run` says."""
    others = {"store/manifest.json": "prepared data", "manifest.json": "a token store"}
    for name, what in (others | {"export.json": "an export"}).items():
        check(
            not (run_dir / name).exists(),
            f"run_dir {run_dir} holds {what}; choose another run_dir",
        )
    path = run_dir / "lock"
    first = path.read_bytes()[: len(HOLDER)] if path.is_file() else b""
    check(
        first in (b"", HOLDER),
        f"{run_dir} holds lock, which bert-pretrain did not write and would replace; "
        f"choose another run_dir, or move {path} away",
    )
    claim_folder(run_dir, RUN_FILES, "run_dir", is_run)
    lock, waits = open_lock(run_dir), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another start that waited may hold it next
            lock.seek(0)
            holder, *stopping = lock.read().splitlines() or ["another process"]
            check(stopping, f"{run_dir} is in use by {holder}; stop it or choose another run_dir")
            if not waits:
                print(f"waiting for {holder}, which a signal is stopping", flush=True)
            waits = True
            time.sleep(POLL)
        except OSError as error:  # some network file systems have no locks
            print(f"{run_dir} cannot be locked ({error.strerror}): do not start another run in it")
            break
    held[:] = [lock]
    lock.truncate(0)
    print(f"{HOLDER.decode()}{os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    for path in run_dir.glob("ranks/rank-?????"):  # of a start that was killed
        path.unlink(missing_ok=True)
    return lock


@contextmanager
def release_lock() -> Iterator[None]:
    """Release the lock of the run after an error, whose traceback would hold it for as long as a
    notebook keeps that."""
    try:
        yield
    except BaseException:
        for lock in held:
            lock.close()
        raise


def load_resume_state(
    run_dir: Path, fingerprint: dict, settings: TrainConfig, accelerator: Accelerator
) -> tuple[Path | None, dict]:
    """Find the checkpoint to resume from and read its state (a collective call).

    Returns (checkpoint or None, state), the same on all ranks. Raises `UserError` if the run has a
    different fingerprint, or checkpoints that are all damaged.
    """
    checkpoint = share_from_main(
        lambda: find_start(run_dir, fingerprint, settings.restart), accelerator
    )
    state = {"step": 0, "running_sums": [], "evaluation": {}, "part_sizes": []}
    if checkpoint is not None:
        state |= call_on_all(lambda: read_state(checkpoint))
        said = call_on_all(
            lambda: check_fingerprint(
                read_fingerprint(state), fingerprint, state["step"], run_dir, settings.extend
            )
        )
        for line in said:
            accelerator.print(line)
        was, now = state.get("micro_batch_size"), settings.micro_batch_size
        if was not in (None, now):
            accelerator.print(
                f"train.micro_batch_size was {was}, is {now}: the gradients stay the same, except "
                "for dropout, which is drawn per pass"
            )
    state.pop("contract", None)
    state |= {"fingerprint": fingerprint, "micro_batch_size": settings.micro_batch_size}
    return checkpoint, state | {"restarted": settings.restart}


def find_start(run_dir: Path, fingerprint: dict, restart: bool) -> Path | None:
    """Find the checkpoint to resume from; None starts the run at step 0.

    restart: move the run to `before-N` in its folder, unless a restart with this fingerprint began
    it, so that the same command resumes the new run.
    Raises `UserError` if there are checkpoints and all of them are damaged, or if they are gone.
    """
    folder = run_dir / "checkpoints"
    listed = list_checkpoints(folder) + list_others(folder)
    lost = "" if listed else find_lost(run_dir)
    if lost and not restart:
        raise UserError(
            f"{run_dir} holds {lost}, but no checkpoint: put its folder checkpoints back, or set "
            "train.restart=true to start at step 0, which moves that run to another folder"
        )
    if restart and (lost or listed):
        checkpoint, _ = find_sound(folder)
        state = read_state(checkpoint) if checkpoint else {}
        # it may be from an earlier version and another kind of machine
        free = {name: fingerprint[name] for name in ("schema", "train.precision")}
        began = state.get("restarted") and read_fingerprint(state) | free == fingerprint
        if not began:
            before = next(path for i in count(1) if not (path := run_dir / f"before-{i}").exists())
            before.mkdir()
            for name in ("wandb_id.txt", *RUN_FILES):
                if (run_dir / name).exists():
                    (run_dir / name).rename(before / name)
            print(
                f"train.restart: the earlier run is now in {before}, and a new one starts at step 0"
            )
    return resume_checkpoint(folder)


def find_lost(run_dir: Path) -> str:
    """Name the traces of a run with checkpoints in a folder without any, or return "".

    A run has written its first checkpoint before it continues from the step at which the second is
    due.
    Raises `UserError` if the folder has lost its config too.
    """
    if (run_dir / "export").exists():
        return "the export of a run"
    done = max((line["step"] for line in read_metrics(run_dir / "metrics.jsonl")), default=0)
    every = read_run_config(run_dir).train.save_every if done else 0
    return f"the record of {done:,} steps" if done > 2 * every else ""


def keep_in_run(run_dir: Path, vocab_dir: Path, fingerprint: dict) -> None:
    """Copy the vocabulary and the fingerprint into the run folder.

    The folder can then be moved and exported without its `data_dir`.
    """
    install_files(vocab_dir, run_dir / "vocab", TOKENIZER_FILES)
    hashes = {name: hash_file(run_dir / "vocab" / name) for name in TOKENIZER_FILES}
    fingerprint = fingerprint | {"vocab_files": hashes}
    write_file(run_dir / "fingerprint.json", json.dumps(fingerprint, indent=1).encode() + b"\n")
