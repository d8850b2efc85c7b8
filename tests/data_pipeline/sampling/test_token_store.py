"""The store on disk: a few files whatever the corpus, stores of before, and whose folder it is."""

import errno
import hashlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from helpers import SCHEMA_1, contents, fork
from hypothesis import given
from hypothesis import strategies as st
from reference_pairs import make_store

from data_pipeline.build.assemble import unpack_bits
from data_pipeline.build.identity import TEXT_HASH, list_differences, settings_key, store_settings
from data_pipeline.build.prepare import prepare
from data_pipeline.common.arrays import pack_bits, write_array
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import MARKER
from data_pipeline.config import CorpusConfig, DataConfig, DatasetConfig, PairsConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling import token_store
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.manifest import read_manifest
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import (
    StoreView,
    TokenStore,
    count_parts,
    find_run_edges,
    load_array,
)
from data_pipeline.sampling.vocabulary import read_vocabulary

# few descriptors; a disk that is waited for 50,000 times would be all of the test's time
LIMITED = """
import os, resource, runpy, sys
descriptors, module, *sys.argv[1:] = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors),) * 2)
os.fsync = lambda file: None
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def digest(values: np.ndarray, dtype: str) -> str:
    return hashlib.sha256(values.astype(dtype).tobytes()).hexdigest()


def config_of(files: list[str], data_dir: Path, **corpus) -> DataConfig:
    corpus = CorpusConfig(files=files, **({"held_out_fraction": 0.1} | corpus))
    return DataConfig(data_dir=str(data_dir), corpus=corpus, vocab=VocabConfig(size=512))


# --- many pieces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "descriptors"), [(150, 48), pytest.param(3000, 128, marks=pytest.mark.slow)]
)
def test_a_corpus_of_many_chunks_is_prepared_and_opened_under_few_descriptors(
    prepared: Path, tmp_path: Path, chunks: int, descriptors: int
) -> None:
    """A chunk is 16 MB of a plain file, so 3,000 are as many as 48 GB of text have."""
    documents = (prepared / "topics.txt").read_text(encoding="utf-8").split("\n\n")
    lines = [line for document in documents for line in document.splitlines() if len(line) > 40]
    (tmp_path / "texts").mkdir()
    for i in range(chunks):
        text = f"Number {i}. {lines[i % len(lines)]}\n"
        (tmp_path / f"texts/{i:04d}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "data_dir: data\nrun_dir: run\ncorpus: {files: 'texts/*.txt', layout: file}\n"
        "vocab: {size: 512}\ndata: {max_seq_length: 32}\n"
        "model: {num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2}\n"
        "train: {max_steps: 2, global_batch_size: 8, micro_batch_size: 8, warmup_steps: 0}\n"
    )
    for command in ("data_pipeline c.yaml --workers 1", "pretrain c.yaml"):
        words = ["-c", LIMITED, str(descriptors), *command.split()]
        done = fork(words, folder=tmp_path, timeout=1200)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "data/store").rglob("*.npy"))) == 6
    manifest = json.loads((tmp_path / "data/store/manifest.json").read_text())
    assert manifest["train"]["documents"] + manifest["held_out"]["documents"] > 0.96 * chunks


def test_a_large_store_keeps_where_its_parts_are_cut(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """So that a training process reads no offsets but those of its part."""
    monkeypatch.setattr(token_store, "PART_TOKENS", 10_000)
    config = config_of([str(prepared / "topics.txt")], tmp_path)
    prepare(config, workers=1)
    vocabulary = read_vocabulary(tmp_path / "vocab")
    store = TokenStore.open(tmp_path / "store", "train", vocabulary)
    assert count_parts(len(store)) > 3
    searched = find_run_edges(
        store.sentence_offsets, store.document_offsets, count_parts(len(store))
    )
    assert store.run_edges.tolist() == searched.tolist()
    starts = store.sentence_offsets[store.document_offsets]
    assert (starts[searched[:, 0]] == searched[:, 1]).all() and searched[-1, 1] == len(store)
    without = replace(store, run_edges=None)
    data = PairsConfig(max_seq_length=32, objective="none")
    a, b = (BatchSource(s, data, 0).pairs(0) for s in (store, without))
    assert (a == b).all()
    check_data(tmp_path, again=True)
    one_part = config_of([str(prepared / "topics.txt")], tmp_path / "one")
    monkeypatch.undo()
    prepare(one_part, workers=1)
    manifests = [read_manifest(folder / "store") for folder in (tmp_path, tmp_path / "one")]
    assert not (tmp_path / "one/store/train/run_edges.npy").exists()
    assert manifests[0]["data_sha256"] == manifests[1]["data_sha256"]  # the same text to train on


def test_too_few_descriptors_are_no_reason_to_delete_a_store(prepared, monkeypatch) -> None:
    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np.lib.format, "open_memmap", fail)
    with pytest.raises(UserError, match=r"tokens\.npy cannot be opened \(Too many") as caught:
        load_array(prepared / "data/store/train/tokens.npy")
    assert "delete" not in str(caught.value) and "ulimit" in str(caught.value)


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(0, 1000))
def test_bits_of_shards_lie_end_to_end(sizes: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    flags = [draw.random(n) < 0.5 for n in sizes]
    parts = [(np.packbits(f, bitorder="little"), len(f)) for f in flags]
    joined = np.concatenate(list(pack_bits(unpack_bits(parts))))
    assert len(joined) == (sum(sizes) + 7) // 8
    found = np.unpackbits(joined, bitorder="little", count=sum(sizes)).astype(bool)
    assert found.tolist() == [bit for f in flags for bit in f.tolist()]


def test_an_array_in_blocks_is_the_array(tmp_path: Path) -> None:
    blocks = [np.arange(3), np.arange(0), np.arange(5)]
    write_array(tmp_path / "tokens.npy", np.dtype(np.uint16), 8, iter(blocks))
    assert np.load(tmp_path / "tokens.npy").tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert load_array(tmp_path / "tokens.npy").dtype == np.uint16


def test_a_view_offers_nothing_that_would_speak_of_the_whole_store() -> None:
    store = make_store([[[1] * 5, [1] * 4]] * 6)
    view = StoreView(store, np.array([[1, 3], [4, 5]]))
    assert len(view.document_offsets) == 4 and view.sentence_offsets[-1] == 27
    for name in ("token_counts", "dtype", "manifest", "tokens", "view"):
        assert not hasattr(view, name)


# --- schema 1 -------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path, monkeypatch) -> Path:
    """A copy of what the version before schema 2 left, as the current directory."""
    shutil.copytree(SCHEMA_1, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    monkeypatch.syspath_prepend(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("name", ["prepared", "prepared_words"])
def test_a_store_of_schema_1_is_read_as_it_was(old: Path, name: str) -> None:
    expected = json.loads((old / "expected.json").read_text())[name]
    vocabulary = read_vocabulary(old / name / "vocab")
    for split in ("train", "held_out"):
        store = TokenStore.open(old / name / "store", split, vocabulary)
        everywhere = np.arange(len(store))
        assert expected[split] == {
            "tokens": digest(store.take(everywhere), "<i8"),
            "starts": digest(store.starts_word(everywhere), "u1"),
            "sentences": int(store.sentence_offsets[-1]),
            "documents": store.n_documents,
            "sentence_offsets": digest(store.sentence_offsets, "<i8"),
            "document_offsets": digest(store.document_offsets, "<i8"),
        }
    store = TokenStore.open(old / name / "store", "train", vocabulary)
    batch = BatchSource(store, PairsConfig(max_seq_length=32, objective="none"), 3).batch(0, 64)
    ids, masked = batch.input_ids.numpy(), batch.masked_positions.numpy()
    ids[masked] = batch.masked_labels.numpy()  # what stands in their place is drawn otherwise now
    assert hashlib.sha256(ids.tobytes() + masked.tobytes()).hexdigest() == expected["batch"]
    check_data(old / name, again=True)


def test_a_store_of_schema_1_is_known_for_the_same(old: Path, capsys) -> None:
    before = contents(old / "prepared")
    words = ["corpus.word_segmenter=pair_words:split", "corpus.plug_ins=[pair_words]"]
    for overrides in ([], ["data_dir=prepared_words", *words]):
        prepare(load_config(DataConfig, "config.yaml", overrides), workers=1)
        assert "exists already" in capsys.readouterr().out
    assert {k: v for k, v in contents(old / "prepared").items() if k != MARKER} == before
    with pytest.raises(UserError, match="built from another corpus or with other settings"):
        prepare(load_config(DataConfig, "config.yaml", ["vocab.size=256"]))


def test_the_version_of_today_makes_the_same_arrays_as_schema_1(old: Path) -> None:
    config = load_config(DataConfig, "config.yaml", ["data_dir=new"])
    prepare(config, workers=1)
    for split in ("train", "held_out"):
        stores = [
            TokenStore.open(old / name / "store", split, read_vocabulary(old / name / "vocab"))
            for name in ("prepared", "new")
        ]
        for name in ("tokens", "sentence_offsets", "document_offsets"):
            a, b = (getattr(store, name) for store in stores)
            assert a.dtype == b.dtype and a.tolist() == b.tolist()


def test_a_store_of_a_later_schema_is_refused_without_advice_to_delete_it(
    prepared: Path, vocabulary, tmp_path: Path
) -> None:
    shutil.copytree(prepared / "data/store", tmp_path / "store")
    path = tmp_path / "store/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 3}))
    with pytest.raises(UserError, match="has schema 3, but this version reads 1 to 2") as caught:
        TokenStore.open(tmp_path / "store", "train", vocabulary)
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("name", ["sha256", "shards"])
def test_a_manifest_names_files_or_shards(prepared: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(prepared / "data/store", tmp_path / "store")
    path = tmp_path / "store/manifest.json"
    manifest = json.loads(path.read_text())
    files = {"shards": [manifest["train"] | {"name": "0"}], "sha256": manifest["train"]["sha256"]}
    del manifest["train"]["sha256"]
    manifest["train"][name] = files[name]
    path.write_text(json.dumps(manifest))
    assert read_manifest(tmp_path / "store")["train"] == manifest["train"]
    del manifest["train"][name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="train.sha256 is null or missing"):
        read_manifest(tmp_path / "store")


# --- identity -------------------------------------------------------------------------------------


def test_a_setting_that_a_store_does_not_know_counts_as_its_default(files, tmp_path: Path) -> None:
    config = config_of(files, tmp_path / "data")
    prepare(config, workers=1)
    path = tmp_path / "data/store/manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("vocab.min_frequency", "corpus.sources[0].errors", "corpus.deduplicate"):
        del manifest["settings"][name]
    path.write_text(json.dumps(manifest))
    prepare(config, workers=1)
    config.vocab.min_frequency = 3
    with pytest.raises(UserError, match="vocab.min_frequency was 2, is 3"):
        prepare(config, workers=1)


def test_a_new_setting_with_its_default_changes_no_key() -> None:
    settings = store_settings(CorpusConfig(files="a"), VocabConfig(size=64), [], [])
    fewer = {k: v for k, v in settings.items() if k != "vocab.lowercase"}
    assert settings_key(settings) == settings_key(fewer)
    assert settings_key(settings | {"vocab.lowercase": False}) != settings_key(settings)


def test_files_may_move_and_changed_text_is_named(files, tmp_path: Path, capsys) -> None:
    prepare(config_of(files, tmp_path / "data"), workers=1)
    moved = [str(shutil.copy(path, tmp_path / f"moved-{Path(path).name}")) for path in files]
    capsys.readouterr()
    prepare(config_of(moved, tmp_path / "data"), workers=1)
    assert "exists already" in capsys.readouterr().out
    Path(moved[0]).write_text("Another text.\n\nAnd one more.\n")
    with pytest.raises(UserError, match=r"\(the text has changed\)"):
        prepare(config_of(moved, tmp_path / "data"), workers=1)


def test_what_differs_is_named_by_source() -> None:
    one = store_settings(CorpusConfig(files="a", weight=2.0), VocabConfig(), [], [])
    manifest = {"settings": store_settings(CorpusConfig(files="a"), VocabConfig(size=9), [], [])}
    assert list_differences(manifest, one) == [
        "corpus.weight was 1.0, is 2.0",
        "vocab.size was 9, is None",
    ]


def test_a_source_that_is_gone_is_named_as_in_the_config() -> None:
    left = store_settings(CorpusConfig(files="a"), VocabConfig(), [], [])
    built = left | {f"corpus.sources[1].{TEXT_HASH}": "the hash of its text"}
    assert list_differences({"settings": built}, left) == ["corpus.sources[1] is gone"]


# --- whose folder it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["work", "vocab", "store", "report.html"])
def test_a_folder_of_the_users_is_refused_before_anything_is_written(
    files, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=f"holds {name}, which bert-pretrain did not write"):
        prepare(config_of(files, tmp_path), workers=1)
    assert contents(tmp_path) == {f"{name}/thesis.txt": b"years of work"}


def test_files_beside_ours_stay_where_they_are(files, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    prepare(config_of(files, tmp_path), workers=1, array_task=(0, 2))
    mine = {"notes.txt", "work/mine.txt", "vocab/mine.txt"}
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    prepare(config_of(files, tmp_path), workers=1)
    assert (tmp_path / "store/manifest.json").exists()
    assert mine <= contents(tmp_path).keys()
    assert not list((tmp_path / "work").glob("*-*"))


def test_what_a_user_put_into_the_store_stops_the_command(files, tmp_path: Path) -> None:
    prepare(config_of(files, tmp_path), workers=1, array_task=(0, 2))
    (tmp_path / "store").mkdir()
    (tmp_path / "store/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a token store but holds mine.txt"):
        prepare(config_of(files, tmp_path), workers=1)
    assert (tmp_path / "store/mine.txt").read_text() == "mine"


FREE = {  # change no token; of a file or dataset, the hash of its text counts (`pieces`)
    *("builtin", "files", "layout", "on_bad_row", "sources", "plug_ins"),
    "extend",  # in `vocab.size`
}


def test_every_setting_of_corpus_and_vocabulary_is_in_the_identity_of_a_store_or_free() -> None:
    found = store_settings(CorpusConfig(files="a"), VocabConfig(), [], [])
    compared = {name.rpartition(".")[2] for name in found}
    settings = {field.name for part in (CorpusConfig, VocabConfig) for field in fields(part)}
    assert settings - compared == FREE
    named = store_settings(CorpusConfig(dataset=DatasetConfig(path="x")), VocabConfig(), [], [])
    wanted = {field.name for field in fields(DatasetConfig)}
    assert named["corpus.sources[0].dataset"].keys() == wanted


def test_tokens_are_counted_block_after_block_or_every_nth_block() -> None:
    block = 1 << 20
    tokens = np.repeat(np.array([7, 8, 9], np.uint16), [block, block, 5])
    store = replace(make_store([[[1]]]), tokens=tokens)
    assert store.token_counts()[7:10].tolist() == [block, block, 5]
    assert store.token_counts(every=2)[7:10].tolist() == [block, 0, 5]


def test_the_folder_of_prepared_data_is_told_from_the_store_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token store at .*; make one: python -m data_pipeline"):
        read_manifest(tmp_path)
    (tmp_path / "store").mkdir()
    with pytest.raises(UserError, match=f"no token store at .*; there is one at {tmp_path}/store"):
        read_manifest(tmp_path)
