"""prepare: the store holds `tokenizers`' ids of every sentence, whatever stopped it and however
many workers there were; a user's mistake ends in one line."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from helpers import ROOT, contents
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_pipeline.build import prepare as prepare_module
from data_pipeline.build import stages
from data_pipeline.build.encode import scan_group
from data_pipeline.build.prepare import prepare
from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.build.workers import Task, run_tasks
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import atomic_folder, lock_folder
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus import sources
from data_pipeline.corpus.sources import list_file_chunks
from data_pipeline.sampling.manifest import read_manifest
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary

SPLITS = ("train", "held_out")


@pytest.fixture(scope="module")
def uninterrupted(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run on one worker, not interrupted, makes of `files`."""
    data_dir = tmp_path_factory.mktemp("uninterrupted") / "data"
    prepare(config_of(files, data_dir), workers=1)
    return contents(data_dir)


def config_of(files: list[str], data_dir: Path, **changes) -> DataConfig:
    return DataConfig(
        data_dir=str(data_dir),
        corpus=CorpusConfig(files=files, held_out_fraction=0.1),
        vocab=VocabConfig(**{"size": 512} | changes),
    )


def documents_of(data_dir: Path, split: str) -> list[list[list[int]]]:
    """The ids of each sentence of each document."""
    store = TokenStore.open(data_dir / "store", split, read_vocabulary(data_dir / "vocab"))
    tokens = store.take(np.arange(len(store)))
    starts, documents = store.sentence_offsets, store.document_offsets
    sentences = [tokens[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    return [sentences[a:b] for a, b in zip(documents, documents[1:], strict=False)]


# ---------------------------------------------------------------------------------- what is stored


def text_tokenizer(vocab_txt: Path) -> Tokenizer:
    """BERT's tokenizer as `tokenizers` has it, without special tokens: their names are text."""
    tokenizer = Tokenizer(models.WordPiece.from_file(str(vocab_txt), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def held_out(document: str, share: float) -> bool:
    number = hashlib.blake2b(document.encode(), digest_size=8).hexdigest()
    return int(number, 16) / 2**64 < share


def test_the_store_holds_the_ids_of_every_sentence_in_order(prepared: Path):
    tokenizer = text_tokenizer(prepared / "data/vocab/vocab.txt")
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    expected: dict[bool, list] = {False: [], True: []}
    for document in (part.strip("\n") for part in text.split("\n\n")):
        lines = [line for line in document.split("\n") if line.strip()]
        sentences = split_sentences(document, sentence_splitter("en"))
        ids = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]
        expected[held_out("\n".join(lines), 0.2)].append([i for i in ids if i])
    assert documents_of(prepared / "data", "train") == expected[False]
    assert documents_of(prepared / "data", "held_out") == expected[True]
    assert min(map(len, expected.values())) > 3


def test_names_of_special_tokens_in_a_corpus_stay_text(tmp_path: Path):
    text = "A [MASK] is no mask, and [SEP] or [CLS] or [PAD] end nothing. One [UNK] is known."
    (tmp_path / "a.txt").write_text("\n\n".join([text] * 20))
    config = DataConfig(
        data_dir=str(tmp_path / "data"),
        corpus=CorpusConfig(files=str(tmp_path / "a.txt"), held_out_fraction=0, deduplicate=False),
        vocab=VocabConfig(size=64, lowercase=False, character_coverage=1.0),
    )
    prepare(config, workers=1)
    documents = documents_of(tmp_path / "data", "train")
    pieces = read_vocabulary(tmp_path / "data/vocab").pieces
    assert len(documents) == 20
    for document in documents:
        flat = [token for sentence in document for token in sentence]
        assert min(flat) > 4
        spelled = "".join(pieces[token].removeprefix("##") for token in flat)
        assert spelled == text.replace(" ", "")


def test_the_manifest_counts_what_the_arrays_hold(prepared: Path, vocabulary: Vocabulary):
    for split in SPLITS:
        store = TokenStore.open(prepared / "data/store", split, vocabulary)
        found = {
            "tokens": len(store),
            "sentences": len(store.sentence_offsets) - 1,
            "documents": store.n_documents,
        }
        assert found.items() <= store.manifest[split].items()
        assert store.sentence_offsets[-1] == len(store)
        assert (np.diff(store.sentence_offsets) > 0).all()  # no empty sentence
        assert (np.diff(store.document_offsets) > 0).all()  # no empty document
        assert store.dtype == np.dtype("uint16")
    vocab = (prepared / "data/vocab/vocab.txt").read_bytes()
    assert store.manifest["vocab_sha256"] == hashlib.sha256(vocab).hexdigest()


def test_the_manifest_counts_the_bytes_and_words_of_a_split(prepared: Path, tmp_path: Path):
    """As the text has them, without the blank lines between documents."""
    documents = (prepared / "topics.txt").read_text(encoding="utf-8").strip().split("\n\n")
    manifest = read_manifest(prepared / "data/store")
    for name, count in (
        ("bytes", sum(len(document.encode()) for document in documents)),
        ("words", manifest["sources"][0]["words"]),
    ):
        assert sum(manifest[split][name] for split in SPLITS) == count
        share = manifest["held_out"][name] / count
        assert share == pytest.approx(manifest["held_out"]["documents"] / len(documents), rel=0.5)
    text = ["Ein Satz über Käse. " * 3, "漢字 and more.", "...", "\u2026", "漢字 and more."]
    (tmp_path / "a.txt").write_text("\n\n".join(text), encoding="utf-8")
    config = config_of([str(tmp_path / "a.txt")], tmp_path / "data", size=32)
    config.corpus.held_out_fraction, config.corpus.weight = 0.0, 2.0
    prepare(config, workers=1)
    taken = sum(len(part.encode()) for part in text[:4])  # the last is a duplicate
    assert read_manifest(tmp_path / "data/store")["train"]["bytes"] == 2 * taken


def test_the_bytes_of_a_paragraph_that_is_dropped_do_not_count(tmp_path: Path):
    text = "A paragraph that is in both documents. " * 4
    (tmp_path / "a.txt").write_text(f"{text}\nThe first one.\n\n{text}\nThe second one.")
    config = config_of([str(tmp_path / "a.txt")], tmp_path / "data", size=32)
    config.corpus.held_out_fraction = 0.0
    prepare(config, workers=1)
    wanted = len(f"{text}\nThe first one.") + len("The second one.")
    assert read_manifest(tmp_path / "data/store")["train"]["bytes"] == wanted


def test_place_locale_clock_and_hash_seed_change_no_byte(
    files: list[str], uninterrupted, tmp_path: Path
):
    folder = tmp_path / "ö x"
    folder.mkdir()
    env = {"LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "data_pipeline", str(write_config(folder, files))]
    done = subprocess.run([*command, "data_dir=data"], env=os.environ | env, cwd=folder)
    assert done.returncode == 0 and contents(folder / "data") == uninterrupted


def test_the_order_of_files_changes_the_order_of_documents_only(files, tmp_path):
    for name, order in (("data", files[::-1]), ("same", files)):
        config = config_of(order, tmp_path / name)
        config.corpus.deduplicate = False  # which of two equal paragraphs is kept is order
        prepare(config, workers=1)
    reverse, forward = (tmp_path / name / "vocab/vocab.txt" for name in ("data", "same"))
    assert reverse.read_bytes() == forward.read_bytes()
    for split in SPLITS:
        reverse, forward = (documents_of(tmp_path / d, split) for d in ("data", "same"))
        assert reverse != forward
        assert sorted(reverse) == sorted(forward)


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_batches_leave_no_trace(files, tmp_path: Path, monkeypatch, uninterrupted, batch: int):
    monkeypatch.setattr("data_pipeline.build.encode.BATCH_SENTENCES", batch)
    monkeypatch.setattr("data_pipeline.build.encode.BATCH_WORDS", batch)
    monkeypatch.setattr("data_pipeline.build.encode.BATCH_CHARACTERS", 100 * batch)
    monkeypatch.setattr("data_pipeline.build.encode.KNOWN", 10 * (batch - 1))
    prepare(config_of(files, tmp_path / "data"), workers=1)
    assert contents(tmp_path / "data") == uninterrupted


# ---------------------------------------------------------------------------------- again


def test_two_workers_write_the_bytes_of_one(files, uninterrupted, tmp_path: Path):
    prepare(config_of(files, tmp_path / "data"), workers=2)
    assert contents(tmp_path / "data") == uninterrupted


KILLED = """
import os, signal, sys
from data_pipeline.build import assemble
from data_pipeline.build import encode
from data_pipeline.build import stages
from data_pipeline.__main__ import main

name, calls, sys.argv[1:] = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
module = next(m for m in (encode, assemble, stages) if hasattr(m, name))
real = getattr(module, name)

def killed(*args, **kwargs):
    global calls
    calls -= 1
    if calls < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

setattr(module, name, killed)
main()
"""


def be_killed(files: list[str], folder: Path, where: str, calls: int) -> None:
    """Prepare `files` to `folder/data` in a process that is killed at a call of a function."""
    write_config(folder, files)
    command = [sys.executable, "-c", KILLED, where, str(calls), str(folder / "c.yaml")]
    killed = subprocess.run([*command, "--workers", "1"], capture_output=True, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize(
    "where, calls",
    [("read_selected", 2), ("write_tokenizer", 0), ("encode_split", 5), ("write_array", 3)],
)
def test_a_killed_command_goes_on_to_the_same_bytes(
    files: list[str], uninterrupted: dict[str, bytes], tmp_path: Path, where: str, calls: int
):
    be_killed(files, tmp_path, where, calls)
    assert not (tmp_path / "data/store/manifest.json").exists()
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "data/work").glob("*-scan-*[0-9]/*")}
    assert done

    reread = []
    import data_pipeline.build.stages as module

    with pytest.MonkeyPatch.context() as patch:
        real = module.scan_group
        patch.setattr(module, "scan_group", lambda *task: (reread.append(task), real(*task)))
        prepare(config_of(files, tmp_path / "data"), workers=1)
    assert len(reread) == (2 if where == "read_selected" else 0)  # what was complete is kept
    assert contents(tmp_path / "data") == uninterrupted


@pytest.mark.parametrize("where, calls", [("write_tokenizer", 0), ("write_array", 5)])
def test_damaged_results_of_a_killed_command_are_made_again(
    files: list[str], uninterrupted: dict[str, bytes], tmp_path: Path, capsys, where, calls
):
    be_killed(files, tmp_path, where, calls)
    draw = Random(where)
    work = tmp_path / "data/work"
    left = [str(p.relative_to(work)) for p in sorted(work.rglob("*")) if p.is_file()]
    kinds = {re.sub(r"-\d{5}", "", name[17:]): name for name in left if ".tmp" not in name}
    assert len(kinds) > 10
    for number, name in enumerate(kinds.values()):
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        path = tmp_path / "copy/work" / name
        data = bytearray(path.read_bytes())
        if number % 4 == 0 or not data:
            path.unlink()
        elif number % 4 == 1:
            path.write_bytes(data[: draw.randrange(len(data))])
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        prepare(config_of(files, tmp_path / "copy"), workers=1)
        assert contents(tmp_path / "copy") == uninterrupted
        assert "damaged results, to be made again: 1 of" in capsys.readouterr().out, name
        shutil.rmtree(tmp_path / "copy")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_an_error():
    with pytest.raises(UserError, match="a worker was killed while reading"):
        run_tasks("reading", [Task(kill_self, (), name) for name in "ab"], workers=2)


def test_a_folder_is_there_when_all_of_it_is(tmp_path: Path):
    with pytest.raises(KeyError), atomic_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "whole").write_text("whole")
        assert not (tmp_path / "out").exists()
    assert contents(tmp_path) == {"out/whole": b"whole"}


def test_a_second_run_keeps_everything(files: list[str], tmp_path: Path):
    prepare(config_of(files, tmp_path), workers=1)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    prepare(config_of(files, tmp_path), workers=1)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_command_that_waited_for_the_lock_finds_the_store_of_the_other(
    files: list[str], tmp_path: Path, monkeypatch, capsys
):
    before = {}

    @contextmanager
    def lock_after_the_other(*arguments, **options):
        monkeypatch.undo()
        prepare(config_of(files, tmp_path), workers=1)
        before.update({p: p.stat().st_ino for p in (tmp_path / "store").rglob("*")})
        with lock_folder(*arguments, **options):
            yield

    monkeypatch.setattr(prepare_module, "lock_folder", lock_after_the_other)
    prepare(config_of(files, tmp_path), workers=1)
    assert {p: p.stat().st_ino for p in (tmp_path / "store").rglob("*")} == before
    assert "exists already" in capsys.readouterr().out


def test_a_store_that_has_lost_a_file_or_its_end_is_not_there_already(files, tmp_path, capsys):
    prepare(config_of(files, tmp_path), workers=1)
    path = tmp_path / "store/train/sentence_offsets.npy"
    whole = path.read_bytes()
    for left in (whole[:-100], None):
        path.unlink()
        if left:
            path.write_bytes(left)
        capsys.readouterr()
        with pytest.raises(UserError, match="(cannot be read|damaged).* run python -m data_pipel"):
            prepare(config_of(files, tmp_path), workers=1)
        assert "already" not in capsys.readouterr().out
    path.write_bytes(whole)
    prepare(config_of(files, tmp_path), workers=1)
    assert "exists already" in capsys.readouterr().out


def test_a_vocabulary_that_was_deleted_comes_back(files, uninterrupted, tmp_path: Path):
    # `no vocabulary at ...; make one: python -m data_pipeline` must not be a dead end
    prepare(config_of(files, tmp_path), workers=1)
    for path in (tmp_path / "vocab").iterdir():
        path.unlink()
    prepare(config_of(files, tmp_path), workers=1)
    assert contents(tmp_path) == uninterrupted


def test_unfinished_work_of_other_settings_stops_the_command_and_stays(
    files: list[str], uninterrupted: dict[str, bytes], tmp_path: Path, monkeypatch
):
    be_killed(files, tmp_path, "write_tokenizer", 0)
    before = contents(tmp_path / "data")
    many = {"finish": True}, {"array_task": (0, 2)}, {"cluster": "nowhere:1"}, {}
    for options in many:
        if not options:  # of one machine, where little work is begun anew
            monkeypatch.setattr(prepare_module, "MUCH_WORK", 1000)
        for config, message in (
            (config_of(files, tmp_path / "data", size=600), r"\(vocab.size was 512, is 600\)"),
            (config_of(files[:3], tmp_path / "data"), r"\(the text has changed\)"),
        ):
            with pytest.raises(UserError, match=f"{message}; restore them, .* or remove .*/work"):
                prepare(config, workers=1, **options)
    assert contents(tmp_path / "data") == before
    prepare(config_of(files, tmp_path / "data"), workers=1)
    assert contents(tmp_path / "data") == uninterrupted


def test_a_little_work_is_begun_anew_with_the_settings_that_an_error_asks_for(
    files: list[str], uninterrupted: dict[str, bytes], tmp_path: Path
):
    with pytest.raises(UserError, match="set vocab.size=.* or less"):
        prepare(config_of(files, tmp_path, size=100_000), workers=1)
    assert list((tmp_path / "work").glob("*-scan-*"))
    prepare(config_of(files, tmp_path), workers=1)
    assert contents(tmp_path) == uninterrupted


@pytest.mark.parametrize("where, calls", [("write_tokenizer", 0), ("write_array", 5)])
def test_a_kill_while_damaged_results_are_removed_is_survived(
    files: list[str], uninterrupted: dict[str, bytes], tmp_path: Path, monkeypatch, where, calls
):
    be_killed(files, tmp_path, where, calls)
    kinds = {"hashes": "rejects.json", "scan": "stats.json"}
    for kind in kinds:
        for removed in (1, 2, 3):
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
            (path,) = (tmp_path / "copy/work").glob(f"*-{kind}-00002/{kinds[kind]}")
            path.write_bytes(path.read_bytes() + b" ")
            real, left = prepare_module.remove_entry, [None] * removed

            def stop(path: Path, real=real, left=left) -> None:
                if not left:
                    raise KeyboardInterrupt
                left.pop()
                real(path)

            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(prepare_module, "remove_entry", stop)
                prepare(config_of(files, tmp_path / "copy"), workers=1)
            prepare(config_of(files, tmp_path / "copy"), workers=1)
            assert contents(tmp_path / "copy") == uninterrupted
            shutil.rmtree(tmp_path / "copy")


def test_other_settings_are_refused(files: list[str], tmp_path: Path):
    prepare(config_of(files, tmp_path / "data"), workers=1)
    before = contents(tmp_path / "data")
    for config in (
        config_of(files, tmp_path / "data", size=600),
        config_of(files, tmp_path / "data", lowercase=False),
        config_of(files[:3], tmp_path / "data"),
    ):
        with pytest.raises(UserError, match="built from another corpus or with other settings"):
            prepare(config, workers=1)
    pairs = config_of(files, tmp_path / "data")  # drawn afresh every epoch: nothing to rebuild
    pairs.data = PairsConfig(max_seq_length=256, objective="sop", masked_lm_prob=0.2)
    prepare(pairs, workers=1)
    assert contents(tmp_path / "data") == before


def test_a_changed_file_is_noticed(files: list[str], tmp_path: Path):
    changed = tmp_path / "changed.txt"
    changed.write_bytes(Path(files[0]).read_bytes())
    prepare(config_of([*files[1:], str(changed)], tmp_path / "data"), workers=1)
    changed.write_bytes(Path(files[0]).read_bytes().replace(b"e", b"a", 1))
    with pytest.raises(UserError, match="built from another corpus"):
        prepare(config_of([*files[1:], str(changed)], tmp_path / "data"), workers=1)


def test_a_file_that_changes_while_it_is_read_ends_preparation(
    files: list[str], tmp_path: Path, monkeypatch
):
    changed = tmp_path / "changed.txt"
    changed.write_bytes(Path(files[0]).read_bytes())
    config = config_of([*files[1:], str(changed)], tmp_path / "data")

    def scan_and_change(*arguments):
        scan_group(*arguments)
        changed.write_bytes(changed.read_bytes() + b"More came.\n")

    monkeypatch.setattr(stages, "scan_group", scan_and_change)
    with pytest.raises(UserError, match=r"changed\.txt changed while the corpus was read"):
        prepare(config, workers=1)
    monkeypatch.setattr(stages, "scan_group", lambda *given: (changed.unlink(), scan_group(*given)))
    with pytest.raises(UserError, match=r"changed\.txt is gone; put it back"):
        prepare(config_of([str(changed)], tmp_path / "data"), workers=1)
    monkeypatch.undo()
    changed.write_bytes(Path(files[0]).read_bytes())
    prepare(config, workers=1)
    assert (tmp_path / "data/store/manifest.json").exists()


# ---------------------------------------------------------------------------------- mistakes


def write_config(folder: Path, files: list[str] | str, more: str = "") -> Path:
    path = folder / "c.yaml"
    path.write_text(
        f"data_dir: {folder}/data\ncorpus: {{files: {files}, held_out_fraction: 0.1}}\n"
        f"vocab: {{size: 512}}\n{more}"
    )
    return path


def run_cli(*args: str | Path) -> tuple[int, list[str]]:
    """(exit code, lines on stderr without progress bars)."""
    command = [sys.executable, "-m", "data_pipeline", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    lines = [line.strip() for line in re.split(r"[\r\n]", result.stderr)]
    return result.returncode, [x for x in lines if x and not re.search(r"\[.*B/s", x)]


def assert_one_line(folder: Path, args: list[str], message: str) -> None:
    code, lines = run_cli(folder / "c.yaml", *args)
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert re.search(message, lines[0]), lines
    data_dir = folder / "data"
    assert not list(folder.rglob("*.tmp"))
    assert not (data_dir / "store").exists() and not (data_dir / "vocab").exists()


@pytest.mark.parametrize(
    "text, args, message",
    [
        ("", [], r"the corpus holds no text .*a\.txt"),
        ("\n \n\t\n", [], "the corpus holds no text"),
        ("\u200b\n\n\u200b\u200d\n", [], "the corpus holds no text"),
        (b"One.\n\nTwo \xff.\n", [], r"a\.txt: byte 10 is not utf-8"),
        ("One.\n", [], "next-sentence prediction needs at least two documents.* has [01] "),
        ("One two.\n\nThree four.\n" * 9, [], r"yields at most \d+ pieces"),
        ("One two six.\n\nThree four.\n" * 9, ["vocab.size=16"], "vocab.size 16 is too small"),
        ("a\n", ["corpus.files=absent.txt"], "no corpus file at absent.txt"),
        ("a\n", ["corpus.dataset.path=json"], "corpus needs exactly one of"),
        ("a\n", ["vocab.sise=3"], "unknown key vocab.sise; did you mean vocab.size"),
        ("a\n", ["trian.max_steps=3"], "unknown key trian; did you mean train?"),
        ("a\n", ["qqqq=3"], "keys: run_dir, data_dir, init_from, seed, corpus, .*export"),
        ("a\n", ["vocab.size=big"], r"key vocab\.size"),
        ("a\n", ["vocab"], "'vocab' is not key=value"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(tmp_path: Path, text, args, message):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.txt").write_bytes(data)
    write_config(tmp_path, str(tmp_path / "a.txt"))
    assert_one_line(tmp_path, ["corpus.held_out_fraction=0", *args], message)


@pytest.mark.parametrize(
    "config, message",
    [
        ("corpus: {files: a.txt}\nvocab: {sise: 3}", "vocab.sise; did you mean vocab.size"),
        ("corpus: {files: a.txt}\nvocab: {size: big}", r"c\.yaml, key vocab\.size"),
        ("seed: 1\nseed: 2", "c.yaml is not a readable YAML file.*seed"),
        ("- a", "c.yaml is not a mapping"),
        (None, "no config at .*c.yaml"),
    ],
)
def test_a_bad_config_ends_in_one_line_and_code_2(tmp_path: Path, config: str, message: str):
    if config is not None:
        (tmp_path / "c.yaml").write_text(config)
    assert_one_line(tmp_path, [], message)


def test_overrides_may_follow_an_option(files: list[str], tmp_path: Path):
    path = write_config(tmp_path, files)
    assert run_cli(path, "--workers", "1", "vocab.size=448") == (0, [])
    assert len(read_vocabulary(tmp_path / "data/vocab")) == 448


def test_an_error_in_a_worker_ends_in_one_line(files: list[str], tmp_path: Path):
    (tmp_path / "bad.txt").write_bytes(b"Fine.\n\nBad \xe4.\n")
    write_config(tmp_path, [*files, str(tmp_path / "bad.txt")])
    assert_one_line(tmp_path, ["--workers", "2"], r"bad\.txt: byte 11 is not utf-8")


def test_a_half_of_an_emoji_in_json_is_no_crash(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d of it, and more words"}\n' * 20)
    write_config(tmp_path, str(tmp_path / "a.jsonl"))
    settings = ("vocab.size=32", "corpus.held_out_fraction=0", "corpus.deduplicate=false")
    code, lines = run_cli(tmp_path / "c.yaml", *settings)
    assert (code, lines) == (0, [])


def test_a_data_dir_that_cannot_be_written_ends_in_one_line(files: list[str], tmp_path: Path):
    write_config(tmp_path, files)
    (tmp_path / "data").write_text("a file")
    code, lines = run_cli(tmp_path / "c.yaml", "--workers", "1")
    assert code == 2 and len(lines) == 1, lines
    assert re.match(f"error: .*{re.escape(str(tmp_path / 'data'))}", lines[0])


@pytest.mark.parametrize("deduplicate", [True, False])
def test_small_files_read_in_groups_give_the_same_bytes(tmp_path: Path, monkeypatch, deduplicate):
    words = ["apple", "river", "stone", "cloud", "night", "green", "seven", "house"]
    for i in range(120):  # every third text was there before
        k = i - 60 * (i % 3 == 0 and i >= 60)
        lines = [" ".join(words[(k * j + j) % 8 :]) + f" {k}." for j in range(1, 9)]
        (tmp_path / f"{i:03}.{'jsonl' if i % 20 == 7 else 'txt'}").write_text(
            json.dumps({"text": "\n".join(lines)}) if i % 20 == 7 else "\n".join(lines)
        )
    config = DataConfig(
        corpus=CorpusConfig(files=str(tmp_path / "*"), weight=1.5, deduplicate=deduplicate),
        vocab=VocabConfig(size=64),
    )
    tasks, stores = [], []
    for least_groups in (120, 10, 1):
        monkeypatch.setattr(sources, "LEAST_GROUPS", least_groups)
        config.data_dir = str(tmp_path / f"data-{least_groups}")
        tasks.append(len(sources.group_chunks(list_file_chunks(config.corpus))))
        prepare(config, workers=1)
        stores.append(contents(Path(config.data_dir)))
    assert tasks[0] > 100 and 13 <= tasks[1] <= 30 and tasks[2] == 13
    assert stores[0] == stores[1] == stores[2]


def test_ids_beyond_65535_are_stored_as_they_are(tmp_path: Path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
    pieces += [f"[unused{i}]" for i in range((1 << 16) - len(pieces))] + ["one", "two"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "a.txt").write_text("One two.\n\nTwo one two.\n")
    config = config_of([str(tmp_path / "a.txt")], tmp_path / "data", size=None)
    config.vocab.path, config.corpus.held_out_fraction = str(tmp_path / "vocab.txt"), 0.0
    prepare(config, workers=1)
    one, two = 1 << 16, (1 << 16) + 1
    assert documents_of(tmp_path / "data", "train") == [[[one, two, 5]], [[two, one, two, 5]]]


def test_the_folder_of_a_run_is_no_data_dir(prepared: Path, straight: Path) -> None:
    before = contents(straight)
    overrides = [f"data_dir={straight}", "vocab.size=600"]
    with pytest.raises(UserError, match="is a run folder; choose another data_dir"):
        prepare(load_config(DataConfig, str(prepared / "config.yaml"), overrides), workers=1)
    assert contents(straight) == before
