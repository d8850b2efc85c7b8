"""Files that others wrote, or that a disk has damaged, at every door where we read them: each ends
in work that goes on or in one line, never in a traceback.

`DOORS=5000 python -m pytest tests/test_doors.py -s` tries that many cases at each door, and tells
what they took.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zstandard
from helpers import ROOT, write_tasks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from other_tokenizers import KINDS
from safetensors.torch import load_file, save_file

from data_pipeline.build.probes import read_pairs, write_probes
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file, lock_folder
from data_pipeline.config import DataConfig, ProbesConfig, SourceConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus.readers import Rejects, read_documents
from data_pipeline.corpus.sources import list_source
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES, read_vocabulary
from data_pipeline.vocabulary.existing import load_tokenizer, load_whole, read_existing, write_whole
from data_pipeline.vocabulary.id_words import IdWords, find_units, read_ids, write_ids
from data_pipeline.vocabulary.words import END, WordIndex
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import Config
from pretrain.export import export_checkpoint
from pretrain.fingerprint import read_fingerprint
from pretrain.init_from import hash_weights, start_from
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import objectives_of
from pretrain.probes import build_probes
from pretrain.read_export import load_export
from pretrain.read_run import read_run_config, read_run_state
from pretrain.report import render_runs
from pretrain.run_record import RunRecord
from pretrain.train import train

CASES = int(os.environ.get("DOORS", 25))
DATA_SETS = {  # task -> its files, as `write_tasks` names them
    "classification": "reviews/{}.tsv",
    "multi_label": "topics/{}.jsonl",
    "regression": "similarity/{}.csv",
    "tagging": "ner/{}.conll",
    "qa": "qa/{}.json",
    "choice": "choice/{}.jsonl",
}
MOST_SECONDS, MOST_MEMORY = 60, 300 << 20  # of a case; above the memory before the first one
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
ODD = [  # values in the place of others
    *(None, True, -1, 0, 1, 3.5, 10**12, 10**30, "", "a", "../../etc", "\x00", "x" * 300, "\ud83d"),
    *([], [[]], {}, {"a": {}}, [None], float("nan"), float("inf")),
]
DEEP = b"[" * 100_000
WHOLES = [b"", b"\0" * 64, b"null", b"[]", b"{}", b"3", b'"\\ud83d"', DEEP, b"\xff\xfe\x00", b"\n"]


def damage(data: bytes, seed: int) -> bytes:
    """Damage the bytes of a file in one of many ways; structured ones for JSON and safetensors."""
    draw = random.Random(seed)
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(WHOLES)
    if kind < 4 and data[:1] in b"{[":
        try:
            return damage_json(data, draw)
        except ValueError:  # lines of JSON, of which one is replaced
            lines = data.split(b"\n")
            at = draw.randrange(len(lines))
            try:
                lines[at] = damage_json(lines[at], draw)
            except ValueError:
                lines[at] = json.dumps(draw.choice(ODD)).encode()
            return b"\n".join(lines)
    if kind < 4 and data[8:10] == b'{"':  # safetensors: a JSON text after its length
        end = 8 + int.from_bytes(data[:8], "little")
        header = damage_json(data[8:end], draw)
        return len(header).to_bytes(8, "little") + header + data[end:]
    at = draw.randrange(min(len(data), draw.choice([100, 1000, 10**9])) or 1)
    if kind == 4:
        return data[:at]
    if kind == 5:
        return data[:at] + draw.randbytes(draw.choice([1, 4, 100])) + data[at:]
    if kind == 6:
        return data[:at] + data[at + draw.choice([1, 4, 100]) :]
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 10])):
        if found:
            found[draw.randrange(len(found)) if draw.random() < 0.5 else at] ^= 1 << draw.randrange(
                8
            )
    return bytes(found)


def damage_json(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove or double a value somewhere in a JSON text."""
    value = json.loads(data)
    inner, places = [value] if isinstance(value, dict | list) else [], []
    while inner:
        one = inner.pop()
        keys = list(one) if isinstance(one, dict) else range(min(len(one), 50))
        places += [(one, key) for key in keys]
        inner += [one[key] for key in keys if isinstance(one[key], dict | list)]
    if not places:
        return json.dumps(draw.choice(ODD)).encode()
    one, key = draw.choice(places)
    if draw.random() < 0.25:
        del one[key]
    else:
        one[key] = draw.choice(ODD)
    return json.dumps(value).encode()


def knock(open_door: Callable[[], object]) -> None:
    """Open a door; an error that the console would show in one line is right too."""
    try:
        with redirect_stdout(io.StringIO()):
            open_door()
    except UserError as error:
        str(error).encode()  # it can be printed
    except OSError as error:
        assert error.errno, error


def try_door(files: list[Path], open_door: Callable[[], object], mend: Callable = str) -> None:
    """Open a door with each of many damaged files in the place of the sound ones.

    mend: called with the damaged file before, to write hashes that fit it.
    Raises all kinds of failures together, each with a case of it.
    """
    sound = {path: path.read_bytes() for path in files}
    open_door()
    signal.signal(signal.SIGALRM, end_hang)
    failures, slowest, start = {}, 0.0, reset_peak()
    for seed in range(CASES):
        draw = random.Random(f"{seed} of a door")
        path, is_mended, began = draw.choice(files), draw.random() < 0.5, time.perf_counter()
        try:
            signal.alarm(MOST_SECONDS)
            path.write_bytes(damage(sound[path], seed))
            if is_mended:
                mend(path)
            knock(open_door)
            assert peak_memory() - start < MOST_MEMORY
        except (Exception, Hang) as error:
            error.add_note(f"{path.name}, seed {seed}, {'mended' if is_mended else 'as it is'}")
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failures.setdefault((type(error), frame.filename, frame.lineno), error)
        finally:
            signal.alarm(0)
            for one, data in sound.items():
                one.write_bytes(data)
        slowest = max(slowest, time.perf_counter() - began)
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2]
    memory = (peak_memory() - start) >> 20
    print(f"\n{name}: {CASES:,} cases, {len(failures)} kinds of failures,", end=" ")
    print(f"at most {slowest:.1f} s and {memory:,} MB above the start")
    if failures:
        raise BaseExceptionGroup("damage that is no line", list(failures.values()))


class Hang(BaseException):
    """A case that does not end; no `Exception`, so that nothing takes it for an error."""


def end_hang(*_) -> None:
    raise Hang


def reset_peak() -> int:
    """Make the memory of this process in use its peak; returns it in bytes."""
    if CLEAR.exists():
        CLEAR.write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the most memory that this process has had, in bytes; 0 but on Linux."""
    found = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) << 10 if found else 0


# ------------------------------------------------------------------------------------- the doors


def test_a_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes((ROOT / "configs/bert_base.yaml").read_bytes())
    try_door([path], lambda: load_config(Config, str(path)))


def test_a_vocabulary(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vocab"
    shutil.copytree(prepared / "data/vocab", folder)
    vocab = VocabConfig(path=str(folder))

    def read() -> None:
        read_existing(vocab)
        load_tokenizer(folder).encode("some text")
        read_vocabulary(folder)

    try_door([folder / name for name in TOKENIZER_FILES], read)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_another_kind(prepared: Path, tmp_path: Path, kind: str) -> None:
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    KINDS[kind](text[:20000]).save(str(tmp_path / "tokenizer.json"))
    vocab = VocabConfig(path=str(tmp_path))

    def read() -> None:
        pieces = read_existing(vocab)
        if whole := load_whole(vocab):
            index = WordIndex({END: 0})
            IdWords(whole, index)([f"{line}\n" for line in text[:500].split("\n")])
            ids = [read_ids(write_ids(word).decode()) for word in list(index)[1:]]
            assert [find_units([pieces[i] for i in some], is_bytes=True) for some in ids]
            write_whole(tmp_path / "out", whole)
            assert read_vocabulary(tmp_path / "out").pieces == pieces
            load_tokenizer(tmp_path / "out").encode("some text")

    try_door([tmp_path / "tokenizer.json"], read)


@pytest.mark.parametrize("name", ["txt", "jsonl", "csv", "tsv", "parquet", "arrow"])
@pytest.mark.parametrize("pack", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_a_corpus(prepared: Path, tmp_path: Path, name: str, pack: str) -> None:
    if name in ("parquet", "arrow") and pack:
        pytest.skip("these have a compression of their own")
    texts = (prepared / "topics.txt").read_text().split("\n\n")[:8]
    texts = [text[:500].replace("\t", " ").replace("\n", " ") for text in texts]
    path = tmp_path / f"a.{name}{pack}"
    if name in ("parquet", "arrow"):
        import datasets

        table = datasets.Dataset.from_dict({"text": texts})
        if name == "parquet":
            table.to_parquet(path)
        else:
            table.save_to_disk(tmp_path / "saved")
            next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        rows = {
            "txt": "\n\n".join(texts),
            "jsonl": "\n".join(json.dumps({"text": text, "n": 3}) for text in texts),
            "csv": "text,n\n" + "\n".join(f'"{text.replace(chr(34), "")}",3' for text in texts),
            "tsv": "text\tn\n" + "\n".join(f"{text}\t3" for text in texts),
        }
        packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        packers[".zst"] = zstandard.ZstdCompressor(write_checksum=True).compress
        path.write_bytes(packers.get(pack, bytes)(rows[name].encode()))
    source = SourceConfig(files=str(path))

    def read() -> None:
        for chunk in list_source(source):
            assert all(isinstance(text, str) for text in read_documents(chunk, source, Rejects()))

    try_door([path], read)


def test_a_store(prepared: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(prepared / "data", data_dir)
    manifest = data_dir / "store/manifest.json"

    def read() -> None:
        vocabulary = read_vocabulary(data_dir / "vocab")
        TokenStore.open(data_dir / "store", "train", vocabulary)
        check_data(data_dir)

    def mend(path: Path) -> None:
        found = json.loads(manifest.read_text())
        if path.suffix == ".npy":
            found[path.parent.name]["sha256"][path.name] = hash_file(path)
        elif path.parent.name == "vocab":
            found["vocab_files"][path.name] = hash_file(path)
        manifest.write_text(json.dumps(found, indent=1))

    files = [*(data_dir / "store").rglob("*.npy"), manifest, data_dir / "checked.json"]
    files += [data_dir / "vocab" / name for name in TOKENIZER_FILES]
    check_data(data_dir)
    try_door(files, read, lambda path: path == manifest or knock(lambda: mend(path)))


def test_a_run_folder(straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    checkpoint = newest_checkpoint(run_dir / "checkpoints")

    def read() -> None:
        config = read_run_config(run_dir)
        found = newest_checkpoint(run_dir / "checkpoints")
        if found:
            read_fingerprint(read_run_state(found))
            export_checkpoint(found, config, tmp_path / "out")

    def mend(path: Path) -> None:
        if path.parent == checkpoint and path.name != "manifest.json":
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            manifest[path.name] = hash_file(path)
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    files = [run_dir / "config.yaml", *(run_dir / "vocab").iterdir()]
    files += [path for path in checkpoint.iterdir() if path.name != "optimizer.safetensors"]
    try_door(files, read, mend)


def test_a_run_to_go_on_with(prepared: Path, straight: Path, tmp_path: Path) -> None:
    """What is damaged and has a hash that fits meets the trainer itself."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(straight, whole)
    shutil.rmtree(whole / "checkpoints/step-00000012")
    name = newest_checkpoint(whole / "checkpoints").name
    shutil.copytree(whole, run_dir)
    checkpoint = run_dir / "checkpoints" / name
    names = ("train.max_steps=9", "train.extend=true", "train.eval_examples=1")
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={run_dir}", *names])

    def go_on() -> None:
        try:
            train(config)
        finally:  # all but the damaged file is as it was
            for path in whole.rglob("*"):
                here = run_dir / path.relative_to(whole)
                if path.is_file() and here.parent != checkpoint and here.name != "metrics.jsonl":
                    here.write_bytes(path.read_bytes())
            for other in {*run_dir.glob("checkpoints/*")} - {checkpoint}:
                if not checkpoint.exists():  # it was set aside
                    other.rename(checkpoint)
                else:
                    shutil.rmtree(other)

    def mend(path: Path) -> None:
        if path.parent == checkpoint and path.name != "manifest.json":
            manifest = json.loads((whole / "checkpoints" / name / "manifest.json").read_text())
            manifest[path.name] = hash_file(path)
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    try_door([*checkpoint.iterdir(), run_dir / "metrics.jsonl"], go_on, mend)


def test_the_record_of_a_run(straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    files = [run_dir / "metrics.jsonl", run_dir / "config.yaml", run_dir / "vocab/vocab.txt"]
    files.append(newest_checkpoint(run_dir / "checkpoints") / "model.safetensors")
    try_door(files, lambda: render_runs([RunRecord(run_dir)]))


def test_an_export(straight: Path, tmp_path: Path) -> None:
    from fill_mask import fill_mask

    folder = tmp_path / "export"
    shutil.copytree(straight / "export", folder)

    def read() -> None:
        fill_mask(load_export(folder), folder, "the [MASK] was")

    files = [path for path in folder.iterdir() if path.suffix != ".md"]
    try_door(files, read)


def test_an_export_for_transformers(straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from embed import embed

    folder = tmp_path / "export"
    shutil.copytree(straight / "export", folder)
    names = ("model.safetensors", "tokenizer.json", "vocab.txt", "config.json")
    files = [folder / name for name in (*names, "tokenizer_config.json")]
    try_door(files, lambda: embed(folder, ["one", "two words"], "mean"))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "shards"])
def test_a_folder_to_start_from(straight: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(straight / "export", folder)
    model = load_export(folder)
    weights = folder / "model.safetensors"
    if name == "pytorch_model.bin":
        torch.save(model.config.family.to_hf(model.state_dict()), folder / name)
        weights.unlink()
    elif name == "shards":
        tensors = list(load_file(weights).items())
        index = {"metadata": {}, "weight_map": {}}
        for i in range(2):
            save_file(dict(tensors[i::2]), folder / f"{i}.safetensors")
            index["weight_map"] |= dict.fromkeys(dict(tensors[i::2]), f"{i}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    config = tmp_path / "c.yaml"
    config.write_text(f"init_from: {folder}\ncorpus: {{builtin: python-docs}}\n")
    with open(config, "a") as file:
        file.write("data: {max_seq_length: 64}\n")
    pieces = read_vocabulary(folder).pieces

    def read() -> None:
        found = load_config(Config, str(config))
        hash_weights(folder)
        fresh = PretrainingModel(replace(model.config), len(pieces), objectives_of("nsp"))
        with torch.no_grad():
            start_from(folder, fresh, pieces)
        read_existing(found.text_rules())

    files = [p for p in folder.iterdir() if p.suffix != ".md" and p.name != "export.json"]
    try_door(files, read)


def test_probes(prepared: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(prepared / "data", data_dir)
    pairs, table = write_pairs(tmp_path)
    names = [str(pairs), str(table)]
    probes = ProbesConfig(minimal_pairs=names, sentences=["the [MASK] was"])
    with redirect_stdout(io.StringIO()):
        write_probes(data_dir, probes, read_pairs(names))
    config = Config(data_dir=str(data_dir))
    config.eval.probes = probes
    store = TokenStore.open(data_dir / "store", "train", read_vocabulary(data_dir / "vocab"))

    def read() -> None:
        read_pairs(names)
        build_probes(config, store, 64, world_size=1)

    try_door([pairs, table, data_dir / "probes.json"], read)


@pytest.mark.parametrize("task", DATA_SETS)
def test_data_to_fine_tune_on(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    finetune = pytest.importorskip("finetune")
    write_tasks(tmp_path, train=8, dev=4)
    files = {split: tmp_path / DATA_SETS[task].format(split) for split in ("train", "dev", "test")}
    words = judge_words(straight / "export", task, files, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", words)

    def judge() -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        finetune.main()

    try_door([files["train"], files["dev"]], judge)


def test_a_model_to_fine_tune(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune = pytest.importorskip("finetune")
    write_tasks(tmp_path, train=8, dev=4)
    files = {split: tmp_path / f"reviews/{split}.tsv" for split in ("train", "dev", "test")}
    folder = tmp_path / "export"
    shutil.copytree(straight / "export", folder)
    words = judge_words(folder, "classification", files, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", words)

    def judge() -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        finetune.main()

    try_door([path for path in folder.iterdir() if path.suffix != ".md"], judge)


def judge_words(model: Path, task: str, files: dict[str, Path], out: Path) -> list[str]:
    """The words of a command that fine-tunes a model for a few steps."""
    words = ["finetune", "--model", model, "--task", task, "--out", out, "--epochs", 1]
    words += ["--seeds", 0, "--learning-rates", 1e-3, "--max-length", 32, "--precision", "fp32"]
    words += [word for split, path in files.items() for word in (f"--{split}", path)]
    return list(map(str, words))


def test_minimal_pairs(prepared: Path, straight: Path, tmp_path: Path) -> None:
    from minimal_pairs import measure, print_table

    pairs, table = write_pairs(tmp_path)

    def read() -> None:
        found = read_pairs([str(pairs), str(table)])
        print_table(measure(straight / "export", found, False, prepared / "data/store"))

    try_door([pairs, table], read)


def write_pairs(folder: Path) -> tuple[Path, Path]:
    """Write minimal pairs in both formats."""
    row = {"sentence_good": "a cat sits", "sentence_bad": "a cat sit", "UID": "x", "field": "y"}
    pairs, table = folder / "a.jsonl", folder / "b.tsv"
    pairs.write_text("\n".join([json.dumps(row)] * 3))
    table.write_text("good\tbad\na cat sits\ta cat sit\n")
    return pairs, table


@settings(max_examples=CASES)
@given(
    st.binary(max_size=200), st.sampled_from(["txt", "jsonl", "csv", "tsv", "txt.gz", "txt.zst"])
)
@example(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 8, "txt.gz")
def test_any_bytes_as_a_corpus(tmp_path_factory, data: bytes, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{name}"
    path.write_bytes(data)
    source = SourceConfig(files=str(path))
    knock(lambda: [*read_documents(list_source(source)[0], source, Rejects())])


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_ends_in_a_line(
    prepared: Path, straight: Path, tmp_path: Path, what: str
) -> None:
    """A pipe waits for ever, and /dev/zero has no end."""
    shutil.copytree(straight, tmp_path / "run")
    shutil.copytree(prepared / "data", tmp_path / "data")
    shutil.copytree(straight / "export", tmp_path / "model")
    pairs, table = write_pairs(tmp_path)
    run_dir, data_dir, folder = tmp_path / "run", tmp_path / "data", tmp_path / "model"
    shutil.rmtree(run_dir / "checkpoints/step-00000012")  # so that there is something to train
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    (tmp_path / "c.txt").write_text("Some text. And more of it.")
    (tmp_path / "c.yaml").write_bytes((prepared / "config.yaml").read_bytes())
    run_config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={run_dir}"])

    def go_on() -> None:
        train(run_config)

    def lock_data() -> None:
        with lock_folder(data_dir):
            pass

    doors = {
        run_dir / "config.yaml": lambda: read_run_config(run_dir),
        run_dir / "metrics.jsonl": lambda: RunRecord(run_dir),
        run_dir / "lock": go_on,
        **{path: go_on for path in sorted(checkpoint.iterdir())},
        data_dir / "lock": lock_data,
        data_dir / "vocab/vocab.txt": lambda: read_vocabulary(data_dir / "vocab"),
        data_dir / "vocab/tokenizer.json": lambda: load_tokenizer(data_dir / "vocab"),
        data_dir / "store/manifest.json": lambda: check_data(data_dir),
        data_dir / "store/train/tokens.npy": lambda: check_data(data_dir),
        folder / "config.json": lambda: load_export(folder),
        folder / "model.safetensors": lambda: load_export(folder),
        folder / "vocab.txt": lambda: read_vocabulary(folder),
        pairs: lambda: read_pairs([str(pairs)]),
        table: lambda: read_pairs([str(table)]),
        tmp_path / "c.yaml": lambda: load_config(DataConfig, str(tmp_path / "c.yaml")),
        tmp_path / "c.txt": lambda: list_source(SourceConfig(files=str(tmp_path / "c.txt"))),
    }
    assert len(doors) == 19
    kept = tmp_path / "kept"
    for path, open_door in doors.items():
        path.touch()
        path.rename(kept)
        if what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        with pytest.raises((UserError, IsADirectoryError)) as caught:
            open_door()
        assert path.name in str(caught.value), caught.value
        path.rmdir() if what == "folder" else path.unlink()
        kept.rename(path)
    assert newest_checkpoint(run_dir / "checkpoints") == checkpoint  # nothing was set aside
