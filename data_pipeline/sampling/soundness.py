"""Find damage in what training reads: the files of a store and of its vocabulary.

Hashes reveal changes since the store was built, and bounds reveal errors from building it.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file, write_file
from data_pipeline.common.reading import read_json
from data_pipeline.common.system import progress_bar
from data_pipeline.sampling.manifest import SPLITS, read_manifest
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary

CHECKED_FILE = "checked.json"  # in data_dir: files that passed the check, by path
BLOCK = 1 << 22  # numbers to compare with their bounds at once


def check_data(data_dir: Path, again: bool = False) -> int:
    """Compare the files of a store and of its vocabulary with their hashes, and ids and offsets
    with their bounds.

    Files that passed are not read again while their path, size and modification time stay the same,
    unless `again`.
    Returns the number of files. Raises `UserError` that names the first damaged one.
    """
    store_dir = data_dir / "store"
    manifest = read_manifest(store_dir)
    wanted = list_hashes(data_dir.absolute(), manifest)
    bad = [store_dir / "manifest.json"] * (manifest["sha256"] != hash_manifest(manifest))
    bad += [path for path in wanted if not os.path.isfile(path)]
    stamps = {} if bad else {path: describe(path, sha256) for path, sha256 in wanted.items()}
    known = {} if again else read_checked(data_dir)
    sound = {path: stamp for path, stamp in stamps.items() if known.get(path) == stamp}
    todo = [path for path in stamps if path not in sound]
    with progress_bar("checking", sum(map(os.path.getsize, todo)), "B", delay=2) as bar:
        for path in todo:
            keep_checked(data_dir, sound)  # all but the last one: bounds have yet to be compared
            if hash_file(Path(path), bar.update) == wanted[path]:
                sound[path] = stamps[path]
            else:
                bad.append(path)
    if todo and not bad:
        vocabulary = read_vocabulary(data_dir / "vocab")
        bad = [
            store_dir / split
            for split in SPLITS
            if not is_within_bounds(TokenStore.open(store_dir, split, vocabulary))
        ]
    if bad:
        raise UserError(
            f"{bad[0]} is damaged or missing{f', and {len(bad) - 1} more' * (len(bad) > 1)}: it "
            f"does not match {store_dir / 'manifest.json'}; put an intact copy back, or delete "
            f"{store_dir} and run python -m data_pipeline"
        )
    if todo:
        keep_checked(data_dir, stamps)
    return len(wanted) + 1


def list_hashes(data_dir: Path, manifest: dict) -> dict[str, str]:
    """List the files that a manifest names, with their hashes; older ones name vocab.txt only."""
    tokenizer = {"vocab.txt": manifest["vocab_sha256"]} | manifest.get("vocab_files", {})
    wanted = {str(data_dir / "vocab" / name): sha256 for name, sha256 in tokenizer.items()}
    for split in SPLITS:
        for part in manifest[split].get("shards", [manifest[split] | {"name": ""}]):
            for name, sha256 in part["sha256"].items():
                wanted[str(data_dir / "store" / split / part["name"] / name)] = sha256
    return wanted


def hash_manifest(manifest: dict) -> str:
    """Hash all fields of a manifest except the hash itself, and those not in the file."""
    excluded = {"sha256"} | ({"schema", "data_sha256"} if "format" in manifest else set())
    hashed = {name: value for name, value in manifest.items() if name not in excluded}
    return hashlib.sha256(json.dumps(hashed, indent=1).encode()).hexdigest()


def describe(path: str, sha256: str) -> list:
    """Describe a file so that a change shows: its size, its time of change, and its hash."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, sha256]


def read_checked(data_dir: Path) -> dict[str, list]:
    """Read which files passed the check; nothing if that record is damaged too."""
    try:
        return read_json(data_dir / CHECKED_FILE, {str: list}, "")
    except (UserError, OSError):
        return {}


def keep_checked(data_dir: Path, sound: dict[str, list]) -> None:
    """Write which files passed the check; if the folder cannot be written, every start reads all
    files."""
    with suppress(OSError):
        text = json.dumps(sound, indent=1) + "\n"
        write_file(data_dir / CHECKED_FILE, text.encode(), shared=True)


def is_within_bounds(store: TokenStore) -> bool:
    """Tell whether all ids are in the vocabulary, and no sentence or document is empty."""
    for array in (store.sentence_offsets, store.document_offsets):
        for start in range(0, len(array), BLOCK):
            if (np.diff(array[start : start + BLOCK + 1]) < 1).any():
                return False
    blocks = (store.tokens[i : i + BLOCK] for i in range(0, len(store), BLOCK))
    return all(int(block.max()) < len(store.vocabulary) for block in blocks)
