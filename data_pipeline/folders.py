"""Folders that the project writes in: marked as its own, so that nothing of a user's is replaced.

A folder without the marker may hold anything but the names that are about to be written; from then
on it carries the marker, and only those names are ever replaced in it.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from data_pipeline.errors import UserError

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
