"""Damage in the files of a store: none goes unseen, and none ends in a traceback."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import TWO_STEPS, contents, fork

from data_pipeline.common.arrays import write_array
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file
from data_pipeline.sampling import soundness
from data_pipeline.sampling.soundness import (
    CHECKED_FILE,
    check_data,
    hash_manifest,
    is_within_bounds,
)
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES, read_vocabulary

FLIPS = int(os.environ.get("DAMAGED_STORES", 72))


@pytest.fixture
def data_dir(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared / "data", tmp_path / "data")
    return tmp_path / "data"


def open_all(data_dir: Path) -> None:
    """Open what training opens, in its order."""
    vocabulary = read_vocabulary(data_dir / "vocab")
    TokenStore.open(data_dir / "store", "train", vocabulary)
    check_data(data_dir)
    TokenStore.open(data_dir / "store", "held_out", vocabulary)


def flip_bits(data_dir: Path, number: int) -> Iterator[tuple[Path, int]]:
    """Yield (file, bit) with that bit flipped and all others as they were: of random files of a
    store and its tokenizer, and in half of them in the first 200 bytes, where headers are."""
    draw = random.Random(20261122)
    files = [p for p in (data_dir / "store").rglob("*.*") if p.is_file()]
    files = sorted([*files, *(data_dir / "vocab" / name for name in TOKENIZER_FILES)])
    for i in range(number):
        path = files[i % len(files)]
        data = path.read_bytes()
        bit = draw.randrange(8 * (len(data) if draw.random() < 0.5 else min(200, len(data))))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield path, bit
        path.write_bytes(data)


def test_no_flipped_bit_of_a_store_is_unseen_or_a_traceback(data_dir: Path) -> None:
    open_all(data_dir)  # so that sizes and times of sound files are known
    unseen = []
    for path, bit in flip_bits(data_dir, FLIPS):
        try:
            open_all(data_dir)
        except UserError as error:
            assert str(path.parent) in str(error) or path.parent.name == "vocab"
        else:
            unseen.append((path, bit))
    assert not unseen
    open_all(data_dir)


def test_a_flipped_token_stops_a_run_in_one_line_before_anything_is_written(
    prepared: Path, data_dir: Path, tmp_path: Path
) -> None:
    path = data_dir / "store/train/tokens.npy"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    words = ["-m", "pretrain", str(prepared / "config.yaml"), f"data_dir={data_dir}"]
    done = fork([*words, f"run_dir={tmp_path / 'run'}", *TWO_STEPS])
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path} is damaged") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    done = fork(["-m", "data_pipeline.report", *words[2:]])
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_sound_files_are_read_once_and_one_that_changed_again(data_dir: Path, monkeypatch) -> None:
    read = []
    monkeypatch.setattr(soundness, "hash_file", lambda p, note: read.append(p) or hash_file(p))
    check_data(data_dir)
    assert len(read) == 9  # three arrays of two splits, three files of the tokenizer
    check_data(data_dir)
    assert len(read) == 9
    os.utime(data_dir / "store/train/tokens.npy")
    check_data(data_dir)
    assert [path.name for path in read[9:]] == ["tokens.npy"]
    (data_dir / CHECKED_FILE).write_text("{")
    check_data(data_dir)
    assert len(read) == 19
    shutil.copytree(data_dir, data_dir.parent / "copy")  # with the times of the files
    check_data(data_dir.parent / "copy")
    assert len(read) == 28


def test_a_file_that_passed_is_read_again_if_the_manifest_wants_another(data_dir: Path) -> None:
    check_data(data_dir)
    path = data_dir / "store/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["train"]["sha256"]["tokens.npy"] = "0" * 64
    manifest["sha256"] = soundness.hash_manifest(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="train/tokens.npy is damaged or missing"):
        check_data(data_dir)


def test_a_check_that_is_interrupted_goes_on_after_the_files_that_it_has_read(
    data_dir: Path, monkeypatch
) -> None:
    read, within = [], []

    def read_four(path: Path, note) -> str:
        read.append(path)
        if len(read) == 5:
            raise KeyboardInterrupt
        return hash_file(path)

    def interrupt(*_) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(soundness, "hash_file", read_four)
    with pytest.raises(KeyboardInterrupt):
        check_data(data_dir)
    monkeypatch.setattr(soundness, "is_within_bounds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_data(data_dir)
    assert len(read) == 10 and len(set(read)) == 9
    # bounds were not compared to the end, so they are now, whatever was read before
    monkeypatch.setattr(soundness, "is_within_bounds", lambda store: within.append(store) or True)
    check_data(data_dir)
    check_data(data_dir)
    assert len(read) == 11 and len(within) == 2


@pytest.mark.parametrize(
    "name, change",
    [
        ("tokens", lambda a, pieces: np.where(np.arange(len(a)) == 99, pieces, a)),
        ("sentence_offsets", lambda a, pieces: np.concatenate([a[:1], a[2:0:-1], a[3:]])),
        ("document_offsets", lambda a, pieces: np.concatenate([a[:2], a[1:2], a[3:]])),
        ("sentence_offsets", lambda a, pieces: np.maximum(a, 1)),  # a token before the first
        ("document_offsets", lambda a, pieces: np.maximum(a, 1)),
    ],
)
def test_numbers_out_of_bounds_are_found_although_all_hashes_fit(
    data_dir: Path, name: str, change
) -> None:
    """A store that was made so, by a bug or by somebody."""
    path = data_dir / f"store/train/{name}.npy"
    array = np.load(path)
    changed = change(array, len(read_vocabulary(data_dir / "vocab")))
    write_array(path, array.dtype, len(array), iter([changed]))
    manifest = json.loads((data_dir / "store/manifest.json").read_text())
    manifest["train"]["sha256"][path.name] = hash_file(path)
    manifest["sha256"] = hash_manifest(manifest)
    (data_dir / "store/manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(UserError, match="store/train is damaged"):
        check_data(data_dir)


@pytest.mark.parametrize("name", ["sentence_offsets", "document_offsets"])
def test_an_empty_sentence_or_document_is_found_wherever_a_block_ends(
    store: TokenStore, name: str, monkeypatch
) -> None:
    monkeypatch.setattr(soundness, "BLOCK", 8)
    assert is_within_bounds(store)
    for i in range(1, 20):
        offsets = getattr(store, name).copy()
        offsets[i] = offsets[i - 1]
        assert not is_within_bounds(replace(store, **{name: offsets}))


def test_a_store_in_a_folder_that_cannot_be_written_is_checked_all_the_same(
    data_dir: Path, monkeypatch
) -> None:
    def refuse(*_, shared: bool) -> None:
        raise PermissionError(13, "Permission denied", "checked.json.tmp")

    monkeypatch.setattr(soundness, "write_file", refuse)
    before = contents(data_dir)
    check_data(data_dir)
    assert contents(data_dir) == before


def test_a_pipe_in_the_place_of_an_array_is_refused(data_dir: Path) -> None:
    path = data_dir / "store/train/tokens.npy"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="tokens.npy is damaged or missing"):
        check_data(data_dir)
    with pytest.raises(UserError, match="tokens.npy is a pipe or a device"):
        TokenStore.open(data_dir / "store", "train", read_vocabulary(data_dir / "vocab"))
