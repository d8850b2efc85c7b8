"""The folder of an export: which of its files an export wrote and may replace.

The file `export.json` lists these files with their hashes, so that all else is the user's.
"""

import os
from pathlib import Path

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import hash_file
from data_pipeline.common.reading import SHA256, read_json
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES
from pretrain.checkpoint import FILES as CHECKPOINT_FILES
from pretrain.models.electra import GENERATOR

FILES = ("config.json", "model.safetensors", *TOKENIZER_FILES, "README.md")  # of every export
PYTORCH_BIN = "pytorch_model.bin"
MARKER = "export.json"
SCHEMA = 1  # of the marker
# title of the model card in exports by versions that wrote no marker
TITLE_BEFORE = "# BERT, pretrained from scratch with bert-pretrain\n"
STAGE = ".bert-pretrain-export"  # staging folder for an existing OUT_DIR


def check_export_folder(out_dir: Path, overwrite: bool = False, pytorch_bin: bool = False) -> None:
    """Check that an export to `out_dir` would replace only files that an export wrote.

    Needs no model, so a run can check before its first step. With `overwrite`, any file with the
    name of an exported one may be replaced. Raises `UserError`.
    """
    lost = out_dir.is_symlink() and not out_dir.exists()
    check(not lost, f"{out_dir} is a broken link; restore its target, or remove the link")
    if not out_dir.exists():
        return
    if (out_dir / GENERATOR).exists():
        check_export_folder(out_dir / GENERATOR, overwrite, pytorch_bin)
    check(out_dir.is_dir(), f"{out_dir} is a file; choose another OUT_DIR")
    is_checkpoint = all((out_dir / name).exists() for name in CHECKPOINT_FILES)
    check(not is_checkpoint, f"{out_dir} is a checkpoint; choose another OUT_DIR")
    found = sorted(path.name for path in out_dir.iterdir() if not path.name.startswith(STAGE))
    names = [*FILES, MARKER, *([PYTORCH_BIN] if pytorch_bin else [])]
    for name in names:
        check(not (out_dir / name).is_dir(), f"{out_dir / name} is a folder; move it away")
    if overwrite or not found or is_earlier_export(out_dir, found):
        return
    # an interrupted replacement has left the marker of the newer files in the stage
    markers = [read_marker(folder) for folder in (out_dir, out_dir / STAGE)]
    check(
        any(markers),
        f"{out_dir} holds {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}, but no "
        f"{MARKER} says that an export wrote it; choose another OUT_DIR, or let python -m "
        f"pretrain.export --overwrite replace {', '.join(names)} there and keep everything else",
    )
    for name in sorted({*names} & {*found} - {MARKER}):
        written = [marker[name] for marker in markers if name in marker]
        check(
            hash_file(out_dir / name) in written,
            f"{out_dir / name} {'was changed since' if written else 'is not part of'} the export "
            f"that {MARKER} lists; move it away, choose another OUT_DIR, or let python -m "
            "pretrain.export --overwrite replace it",
        )


def is_earlier_export(folder: Path, found: list[str]) -> bool:
    """Recognize an export without a marker, by an early version: only its files, and its title."""
    if not {"README.md"} <= set(found) <= set(FILES):
        return False
    return TITLE_BEFORE in (folder / "README.md").read_text(encoding="utf-8", errors="replace")


def read_marker(folder: Path) -> dict[str, str]:
    """Read the sha256 of each file that an export wrote; empty without a valid marker."""
    try:
        shape = {"schema": int, "made_by": str, "files": {str: SHA256}}
        marker = read_json(folder / MARKER, shape, "")
        is_ours = marker["schema"] == SCHEMA and marker["made_by"].startswith("bert-pretrain ")
        return marker["files"] if is_ours else {}
    except (OSError, UserError):
        return {}


def remove_export(folder: Path) -> None:
    """Remove the files of an export as it wrote them, and the folder if nothing else is in it."""
    written = read_marker(folder)
    if not written:
        return
    for name in written.keys() & {*FILES, PYTORCH_BIN}:
        if (folder / name).is_file() and hash_file(folder / name) == written[name]:
            (folder / name).unlink()
    (folder / MARKER).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def move_files(stage: Path, out_dir: Path) -> None:
    """Move the files of a finished export to `out_dir`, one at a time, the marker last.

    If interrupted, every file is complete and none is lost, and the marker left in the stage lets
    the same command finish.
    """
    if not out_dir.exists():
        stage.rename(out_dir)
        return
    for path in sorted(stage.iterdir(), key=lambda path: path.name == MARKER):
        try:
            os.replace(path, out_dir / path.name)
        except OSError as error:
            raise UserError(
                f"{out_dir / path.name} could not be replaced ({error.strerror}); {out_dir} now "
                "holds files of two exports, each of them complete: run the same command again"
            ) from None
    stage.rmdir()
