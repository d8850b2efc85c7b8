"""Write folders and files atomically, by one command at a time, without replacing a user's files.

A folder that the project writes in gets a marker file. A folder without the marker may hold
anything except the names that are about to be written, and only those names are ever replaced.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from uuid import uuid4
from zlib import crc32

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import COUNT, check_regular, read_json

READ = (".jsonl", ".tsv", ".safetensors", ".bin")  # endings of what commands read in a folder
MARKER = ".bert-pretrain"
SEAL = "crc32.json"  # of a folder of intermediate results; four times as fast as SHA-256
NOTE = "bert-pretrain writes in this folder and replaces what it has written here.\n"


def claim_folder(
    folder: Path, names: Iterable[str], key: str, is_ours: Callable[[Path], bool]
) -> None:
    """Create `folder` if needed, and mark it as one that the project writes `names` in.

    key: config key of the folder, for the message.
    is_ours: tells whether the project wrote a folder that has no marker.
    Raises `UserError` if a file of the user has one of the names.
    """
    marker = folder / MARKER
    if marker.exists():
        return
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"{key} {folder} is a link to {os.readlink(folder)}, which does not exist; make it, "
            f"remove the link, or choose another {key}"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{key} {folder} is a file; choose another {key}, or move the file away")
    found = [name for name in names if (folder / name).exists()]
    if found and not is_ours(folder):
        raise UserError(
            f"{folder} holds {found[0]}, which bert-pretrain did not write and would replace; "
            f"choose another {key}, or move {folder / found[0]} away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(NOTE)
    except OSError as error:
        raise UserError(f"{key} {folder} cannot be created: {error.strerror}") from None


def install_files(source: Path, target: Path, names: Iterable[str] | None = None) -> None:
    """Copy the files of folder `source`, or those in `names`, to folder `target`.

    Each copy is atomic. Other files in `target` are left alone.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if names is None or path.name in names:
            write_file(target / path.name, path.read_bytes())


def write_file(path: Path, data: bytes, lasting: bool = False, shared: bool = False) -> None:
    """Write a file atomically: readers find the old content or the new one.

    lasting: survives a power failure, for which the write waits for the disk. shared: several
    commands may write it at the same time, and the last to finish wins.
    A link is replaced, and so are a pipe and a device: see `check_writable`.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp" if shared else f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # such as a full disk, which needs the space
        with suppress(OSError):
            temporary.unlink()
        if error.filename2 or not error.filename:  # of the temporary file, or of none
            error.filename = str(path)
            del error.filename2
        raise


def find_target(path: Path) -> Path:
    """Follow the links of a path to write to; raises `UserError` if a folder, a pipe or a device is
    there, or if it is the output of this command, such as /dev/stdout."""
    target = Path(os.path.realpath(path))
    names = (f"{path.absolute()}", f"{target}")
    is_special = any(re.match("/(dev/(?!shm/)|proc/)", name) for name in names)
    if target.is_dir():
        raise UserError(f"{path} is a folder; name a file, or move it away")
    if is_special or (target.exists() and not target.is_file()):
        raise UserError(f"{path} is not a regular file but a pipe or a device; name a file")
    return target


def check_writable(path: Path, inputs: Iterable[Path] = ()) -> Path:
    """Make the folder of a file that long work will write, and check that it can be written there.

    inputs: files that the work reads, or folders with such files.
    Returns the path for `write_file`, which follows links. Raises `OSError`, or `UserError` if
    there is no file but something else, or one of the inputs.
    """
    target = find_target(path)
    for read in map(Path, map(os.path.realpath, inputs)):
        is_inside = read in target.parents and target.suffix in READ
        if target.exists() and (target == read or is_inside):
            raise UserError(f"{path} is read by this command, which would replace it; name another")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(probe := target.with_name(f"{target.name}.probe"), b"")
    probe.unlink()
    return target


def remove_entries(folder: Path, is_ours: Callable[[str], object]) -> None:
    """Remove the entries of `folder` whose name `is_ours`, and the folder itself if it is empty.

    Another command may remove them at the same time.
    """
    with suppress(FileNotFoundError):
        for path in folder.iterdir() if folder.is_dir() else ():
            if is_ours(path.name):
                remove_entry(path)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def remove_entry(path: Path) -> None:
    """Remove a file, a link or a folder; what is in it may vanish meanwhile."""
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Sum up the sizes of the files beneath a folder, which others may rename or remove."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


@contextmanager
def atomic_folder(out: Path, shared: bool = False) -> Iterator[Path]:
    """Open a temporary folder that is renamed to `out` on success, and removed on an error.

    shared: several workers may write the same result at the same time, as when a cluster gives up
    on a slow worker and restarts its task. Each then has its own temporary folder, and the first
    to finish wins.
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


@contextmanager
def sealed_folder(out: Path, shared: bool = False) -> Iterator[Path]:
    """Open an `atomic_folder` that gets the checksums of its files, which `is_intact` compares."""
    with atomic_folder(out, shared) as folder:
        yield folder
        (folder / SEAL).write_text(json.dumps(sum_files(folder)))


def is_intact(folder: Path, note: Callable[[int], object] = int) -> bool:
    """Tell whether the files of a sealed folder are those that were written, byte for byte; calls
    `note` with the size of each part read."""
    try:
        wanted = read_json(folder / SEAL, {str: COUNT}, "")
    except (UserError, FileNotFoundError):
        return False
    return wanted == sum_files(folder, note)


def check_space(folder: Path, wanted: float, what: str, key: str) -> None:
    """Raise `UserError` unless the disk of a folder, which may not exist yet, has `wanted` bytes.

    what: the work that wants them. key: config key of the folder.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < wanted:
        raise UserError(
            f"{what} needs at least {wanted / 1e6:,.0f} MB in {folder}, but the disk has "
            f"{free / 1e6:,.0f} MB free; free some space, or choose another {key}"
        )


def sync_files(folder: Path) -> None:
    """Flush the files of a folder to disk, so that a crash cannot leave a renamed folder empty."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file)


@contextmanager
def lock_folder(folder: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, exclusively or together with others that share it.

    Raises `UserError` if another command holds it. The lock is released when the process ends,
    even if it is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder) as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another command is using {folder}; wait for it or choose another data_dir"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"{folder} cannot be locked ({error.strerror}): do not run another command in it")
        yield


def open_lock(folder: Path) -> TextIO:
    """Open the lock file of a folder; raises `UserError` if it is a pipe or a device."""
    path = folder / "lock"
    if path.exists():
        check_regular(path)
    return open(path, "a+")  # NFS shares the lock of a file that is open for reading


def sum_files(folder: Path, note: Callable[[int], object] = int) -> dict[str, int]:
    """Sum up each file beneath `folder` but its seal: relative path -> CRC-32."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL):
        checksum = 0
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                checksum = crc32(block, checksum)
                note(len(block))
        found[str(path.relative_to(folder))] = checksum
    return found


def hash_file(path: Path, note: Callable[[int], object] = int) -> str:
    """Hash a regular file to the SHA-256 of its bytes; calls `note` with the size of each part."""
    check_regular(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            note(len(block))
    return digest.hexdigest()
