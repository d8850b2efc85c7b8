"""Folders that the project writes in: whole or not at all, by one command at a time, and marked as
its own, so that nothing of a user's is replaced.

A folder without the marker may hold anything but the names that are about to be written; from then
on it carries the marker, and only those names are ever replaced in it.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from data_pipeline.common.errors import UserError

MARKER = ".bert-pretrain"
NOTE = "bert-pretrain writes in this folder and replaces what it has written here.\n"


def claim_folder(
    folder: Path, names: Iterable[str], key: str, is_ours: Callable[[Path], bool]
) -> None:
    """Mark `folder` as one that the project writes `names` in, and make it if it is not there.

    key: the config's name for the folder, for the message.
    is_ours: whether a folder without the marker was written by the project all the same.
    Raises `UserError` if one of the names is there and is the user's.
    """
    marker = folder / MARKER
    if marker.exists():
        return
    found = [name for name in names if (folder / name).exists()]
    if found and not is_ours(folder):
        raise UserError(
            f"{folder} holds {found[0]}, which bert-pretrain did not write and would replace; "
            f"choose another {key}, or move {folder / found[0]} away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(NOTE)


def install_files(source: Path, target: Path, names: Iterable[str] | None = None) -> None:
    """Copy the files of folder `source`, or those of the names that are there, to folder `target`,
    each whole or not at all; what else `target` holds stays."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if names is None or path.name in names:
            write_file(target / path.name, path.read_bytes())


def write_file(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def remove_entries(folder: Path, is_ours: Callable[[str], object]) -> None:
    """Remove the entries of `folder` whose name `is_ours`, and the folder if none is left."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_ours(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def atomic_folder(out: Path, shared: bool = False) -> Iterator[Path]:
    """A folder to write in that becomes `out` when all went well, and else is removed.

    With `shared`, others may write the same result at the same moment (a cluster gives a task away
    when it takes a slow worker for dead): each has a folder of its own and the first one stays.
    """
    temporary = out.with_name(f"{out.name}.{uuid4().hex}.tmp" if shared else f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_files(temporary)
        if not shared:
            shutil.rmtree(out, ignore_errors=True)
        try:
            temporary.rename(out)
        except OSError:
            if not (shared and out.exists()):
                raise
            shutil.rmtree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_files(folder: Path) -> None:
    """Have the files of a folder on the disk before its new name is: a machine may stop as well."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file)


@contextmanager
def lock_folder(folder: Path, shared: bool = False) -> Iterator[None]:
    """Hold `folder/lock` as the only command, or as one of those that share it.

    The lock ends with the process, however that ends. Raises `UserError` if another holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another command is at work in {folder}; wait for it or choose another data_dir"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"{folder} cannot be locked ({error.strerror}): start nothing else in it")
        yield


def hash_file(path: Path) -> str:
    """SHA-256 of the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
