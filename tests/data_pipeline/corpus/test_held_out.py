"""The held-out split is never silently too small: it has a least size whatever the share, as far as
a fifth of the corpus allows, and what is smaller still is said in red."""

import bz2
import gzip
import json
import lzma
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from helpers import contents
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.build.identity import settings_key, store_settings
from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import red
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus import selection
from data_pipeline.corpus.selection import (
    ALL,
    find_limit,
    hash_limit,
    hash_text,
    needs_selection,
    write_earlier,
)
from data_pipeline.corpus.sources import count_bytes, list_file_chunks
from data_pipeline.report import page as report
from data_pipeline.report.audit import decode
from data_pipeline.report.checks import check_held_out
from data_pipeline.sampling.manifest import held_out_shortfall, read_manifest
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.config import Config, phases_of
from pretrain.plan import plan
from pretrain.run_setup import open_token_store
from pretrain.train import train

WORDS = "the a river stone carries over under winter summer house tree walks sings long".split()
DIGITS = "0 1 2 3 4 5 6 7 8 9"


def write_documents(number: int, characters: int) -> list[str]:
    """Different documents of so many characters, about; the number of each is in its text, and all
    digits are, so that every vocabulary has them."""
    draw, documents = random.Random(0), []
    for i in range(number):
        words = draw.choices(WORDS, k=characters // 6)
        sentences = (" ".join(words[j : j + 12]) for j in range(0, len(words), 12))
        documents.append(f"Number {' '.join(f'{i:03d}')} of {DIGITS}.\n{'. '.join(sentences)}.")
    return documents


def config_of(files: str | list[str], data_dir: Path, **corpus) -> DataConfig:
    return DataConfig(
        data_dir=str(data_dir),
        corpus=CorpusConfig(files=files, **corpus),
        vocab=VocabConfig(size=56, min_frequency=1, character_coverage=1.0),
        data=PairsConfig(objective="none"),
    )


def prepared_of(documents: list[str], folder: Path, **corpus) -> tuple[dict, set[int]]:
    """The manifest of these documents as one text file, and the numbers of those held out."""
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    config = config_of(str(folder / "a.txt"), folder / "data", layout="blank_line", **corpus)
    prepare(config, workers=1)
    return read_manifest(folder / "data/store"), held_out_of(folder / "data")


def numbers_of(data_dir: Path, split: str) -> Counter[int]:
    """How often each document is in a split of a store."""
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore.open(data_dir / "store", split, vocabulary)
    starts = store.sentence_offsets[store.document_offsets[:-1]]
    texts = (decode(vocabulary, store.take(np.arange(start, start + 24))) for start in starts)
    found = (re.match(r"number (\d \d \d) of", text)[1] for text in texts)
    return Counter(int(digits.replace(" ", "")) for digits in found)


def held_out_of(data_dir: Path) -> set[int]:
    train, held_out = (set(numbers_of(data_dir, split)) for split in ("train", "held_out"))
    assert not train & held_out
    return held_out


def lowest_of(documents: list[str], number: int) -> set[int]:
    """The numbers of the documents with the lowest hashes."""
    hashes = [hash_text(document) for document in documents]
    return set(sorted(range(len(documents)), key=hashes.__getitem__)[:number])


# --- the least size -------------------------------------------------------------------------------


def test_486_documents_at_1_percent_hold_out_50_and_20000_tokens(tmp_path: Path, capsys) -> None:
    documents = write_documents(486, 3000)
    assert sum(hash_text(d) < hash_limit(0.01) for d in documents) < 10
    manifest, held_out = prepared_of(documents, tmp_path)
    assert held_out == lowest_of(documents, 50)
    assert manifest["held_out"]["documents"] == 50 and manifest["train"]["documents"] == 436
    assert manifest["held_out"]["tokens"] >= 20_000
    assert "warning" not in capsys.readouterr().out


def test_more_short_documents_are_held_out_until_their_text_is_enough(tmp_path: Path) -> None:
    documents = write_documents(1000, 1000)
    manifest, held_out = prepared_of(documents, tmp_path)
    assert held_out == lowest_of(documents, len(held_out)) and 100 < len(held_out) < 130
    characters = [len(documents[i]) for i in held_out]
    assert 120_000 <= sum(characters) < 120_000 + max(characters)
    assert manifest["held_out"]["tokens"] >= 20_000


def test_a_fifth_of_a_small_corpus_is_held_out_at_most_and_said_to_be_few(
    tmp_path: Path, capsys
) -> None:
    documents = write_documents(57, 500)
    _, held_out = prepared_of(documents, tmp_path)
    assert held_out == lowest_of(documents, len(held_out)) and 9 <= len(held_out) <= 11
    assert sum(len(documents[i]) for i in held_out) <= sum(map(len, documents)) / 5
    assert f"warning: only {len(held_out)} documents of " in capsys.readouterr().out


def test_of_three_huge_documents_none_is_held_out_and_that_is_said(tmp_path: Path, capsys) -> None:
    manifest, held_out = prepared_of(write_documents(3, 200_000), tmp_path)
    assert not held_out and manifest["train"]["documents"] == 3
    assert "warning: no document is held out, so there is no evaluation" in capsys.readouterr().out


@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_tiniest_corpora_keep_their_text_for_training(tmp_path: Path, number: int) -> None:
    documents = write_documents(number, 100)
    manifest, held_out = prepared_of(documents, tmp_path)
    assert manifest["train"]["documents"] == number - int(number == 9)
    assert held_out == lowest_of(documents, int(number == 9))


def test_a_share_of_0_holds_out_nothing(tmp_path: Path, capsys) -> None:
    manifest, held_out = prepared_of(write_documents(486, 100), tmp_path, held_out_fraction=0.0)
    assert not held_out and manifest["train"]["documents"] == 486
    assert "raise corpus.held_out_fraction, to 0.01 for example" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_a_share_above_the_least_size_is_what_it_was(
    tmp_path: Path, share: float, deduplicate: bool
) -> None:
    documents = write_documents(120, 300)
    _, held_out = prepared_of(documents, tmp_path, held_out_fraction=share, deduplicate=deduplicate)
    expected = {i for i in range(120) if hash_text(documents[i]) < share * 2**64}
    assert held_out == expected


def plain_limit(pieces: list[list[tuple[int, int]]], share: int, deduplicate: bool) -> int:
    """The rule said plainly, on all (hash, characters): tries every hash as the limit."""
    documents = [document for piece in pieces for document in piece]
    if deduplicate:
        documents = list(dict(documents).items())
    if not (documents and share):
        return share

    def below(limit: int) -> np.ndarray:
        sizes = [(1, characters) for number, characters in documents if number < limit]
        return np.sum([(0, 0), *sizes], axis=0)

    limits = sorted({number for number, _ in documents} | {max(documents)[0] + 1})
    fifth = [limit for limit in limits if (5 * below(limit) <= below(ALL)).all()]
    enough = [limit for limit in fifth if (below(limit) >= selection.LEAST).all()]
    return max(share, min(enough, default=fifth[-1]))


HASHES = st.integers(0, 60).map(lambda n: n << 50)


@settings(max_examples=300)
@given(
    st.lists(st.lists(HASHES, max_size=40), min_size=1, max_size=5),
    st.sampled_from([0, 1, 5, 10, 20, 60]).map(lambda n: n << 50),
    st.booleans(),
    st.randoms(),
)
def test_the_limit_is_that_of_the_plain_rule_whatever_the_pieces(
    tmp_path_factory, hashes, share: int, deduplicate: bool, draw
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    pieces = [[(n, 1 + (n >> 50) * 7 % 19) for n in sorted(piece)] for piece in hashes]
    corpus = CorpusConfig(deduplicate=deduplicate, held_out_fraction=share / ALL)
    limits = set()
    with patch.object(selection, "LEAST", np.array([3, 40])):
        for name in ("one", "other"):
            paths = [folder / f"{name}-{i}" for i in range(len(pieces))]
            for path, piece in zip(paths, pieces, strict=True):
                path.mkdir()
                documents = np.array(piece, np.uint64).reshape(-1, 2)
                np.save(path / "documents.npy", documents[:, 0])
                np.save(path / "characters.npy", documents[:, 1].astype(np.int64))
            earlier = folder / f"{name}-earlier"
            earlier.mkdir()
            write_earlier(paths, list(range(len(paths))), "documents", earlier)
            limits.add(find_limit(corpus, paths, earlier))
            expected = plain_limit(pieces, share, deduplicate)
            draw.shuffle(pieces)
        # the limits may differ where the documents below do not
        numbers = {number for piece in pieces for number, _ in piece}
        assert {sum(n < limit for n in numbers) for limit in limits} == {
            sum(n < expected for n in numbers)
        }


# --- one split, however it is made ----------------------------------------------------------------


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return write_documents(120, 1500)


@pytest.fixture(scope="module")
def texts(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three files of the documents."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"{i}.txt").write_text("\n\n".join(documents[i::3]), encoding="utf-8")
    return [str(folder / f"{i}.txt") for i in range(3)]


@pytest.mark.parametrize("deduplicate", [True, False])
def test_order_workers_and_job_arrays_hold_out_the_same_documents(
    documents, texts, tmp_path: Path, deduplicate: bool
) -> None:
    configs = [
        config_of(files, tmp_path / name, deduplicate=deduplicate)
        for name, files in (("one", texts), ("two", texts), ("array", texts), ("back", texts[::-1]))
    ]
    one, two, array, back = configs
    prepare(one, workers=1)
    prepare(two, workers=2)
    prepare(back, workers=1)
    for _ in range(3):
        for share in ((1, 2), (0, 2)):
            prepare(array, workers=1, array_task=share)
        prepare(array, workers=1, finish=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "array")
    held_out = held_out_of(tmp_path / "one")
    assert held_out == held_out_of(tmp_path / "back") == lowest_of(documents, len(held_out))
    assert 20 < len(held_out) <= 24


def write_json(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")


FILES = {
    "a.jsonl": write_json,
    **{
        f"a.txt{suffix}": lambda path, documents, pack=pack: path.write_bytes(
            pack("\n\n".join(documents).encode())
        )
        for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress))
    },
}


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_json_lines_and_compressed_files_hold_out_what_plain_text_does(
    documents, texts, tmp_path: Path, name: str, deduplicate: bool
) -> None:
    FILES[name](tmp_path / name, documents)
    prepare(config_of(str(tmp_path / name), tmp_path / "data", deduplicate=deduplicate), workers=1)
    prepare(config_of(texts, tmp_path / "plain", deduplicate=deduplicate), workers=1)
    assert held_out_of(tmp_path / "data") == held_out_of(tmp_path / "plain")


def test_documents_that_repeat_count_once_where_they_are_dropped(tmp_path: Path) -> None:
    documents = write_documents(30, 300)
    manifest, held_out = prepared_of(documents * 10, tmp_path)
    assert held_out == lowest_of(documents, len(held_out)) and 4 <= len(held_out) <= 6
    assert manifest["train"]["documents"] + len(held_out) == 30


def test_documents_that_repeat_and_are_kept_stay_below_a_fifth(tmp_path: Path) -> None:
    documents = write_documents(300, 3000)
    lowest = documents[next(iter(lowest_of(documents, 1)))]
    kept = dict(deduplicate=False, held_out_fraction=1e-9)
    manifest, held_out = prepared_of([*documents, *[lowest] * 29], tmp_path / "few", **kept)
    assert held_out == lowest_of(documents, 21) and manifest["held_out"]["documents"] == 50
    manifest, held_out = prepared_of([*documents, *[lowest] * 100], tmp_path / "many", **kept)
    assert not held_out and manifest["train"]["documents"] == 400


def test_weights_are_taken_of_what_the_least_size_leaves(tmp_path: Path) -> None:
    documents = write_documents(400, 3000)
    _, held_out = prepared_of(documents, tmp_path, weight=2.5)
    assert held_out == lowest_of(documents, 50)
    assert set(numbers_of(tmp_path / "data", "held_out").values()) == {1}
    train = numbers_of(tmp_path / "data", "train")
    assert Counter(train.values()) == {2: 175, 3: 175}


# --- which corpora are looked at before they are read ---------------------------------------------


def test_a_large_corpus_that_keeps_duplicates_is_read_once(texts, tmp_path: Path) -> None:
    config = config_of(texts, tmp_path, deduplicate=False)
    with (
        patch.object(selection, "SURE_BYTES", 1),
        patch("data_pipeline.build.stages.hash_group", side_effect=AssertionError),
    ):
        prepare(config, workers=1)
    documents = [d for file in texts for d in Path(file).read_text().split("\n\n")]
    share = [d for d in documents if hash_text(d) < hash_limit(0.01)]
    assert len(held_out_of(tmp_path)) == len(share)


def test_a_corpus_counts_as_large_by_its_share_and_its_bytes(texts, tmp_path: Path) -> None:
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(b"Text.\n" * 1000))
    size = sum(Path(file).stat().st_size for file in texts)
    assert count_bytes(list_file_chunks(CorpusConfig(files=texts))) == size
    assert (
        count_bytes(list_file_chunks(CorpusConfig(files=str(packed)))) == 4 * packed.stat().st_size
    )
    corpus = CorpusConfig(files=texts, deduplicate=False, held_out_fraction=0.1)
    pieces = list_file_chunks(corpus)
    for bound, expected in ((size // 10 + 1, True), (size // 10 - 1, False)):
        with patch.object(selection, "SURE_BYTES", bound):
            assert needs_selection(corpus, count_bytes(pieces)) == expected
    assert not needs_selection(CorpusConfig(deduplicate=False, held_out_fraction=0.0), size)
    embedded = CorpusConfig(builtin="python-docs", deduplicate=False)
    assert needs_selection(embedded, count_bytes(list_file_chunks(embedded)))


def test_a_large_corpus_is_judged_by_its_first_pieces(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        hashes = np.sort(draw.integers(0, 2**64, 10_000, np.uint64, endpoint=False))
        np.save(tmp_path / f"{i}/documents.npy", hashes)
        np.save(tmp_path / f"{i}/characters.npy", np.full(10_000, 2000))
    hashed = [tmp_path / "0", tmp_path / "1", tmp_path / "never read"]
    corpus = CorpusConfig(deduplicate=False, held_out_fraction=0.01)
    assert find_limit(corpus, hashed, tmp_path) == hash_limit(0.01)


def test_work_of_a_version_without_a_least_size_is_made_again(texts, tmp_path: Path) -> None:
    config = config_of(texts, tmp_path)
    given = store_settings(config.corpus, config.vocab, list_file_chunks(config.corpus), [])
    (tmp_path / f"work/{settings_key(given)[:16]}-hashes-00000").mkdir(parents=True)
    prepare(config, workers=1)
    assert held_out_of(tmp_path) and not (tmp_path / "work").exists()


# --- what is said ---------------------------------------------------------------------------------


def manifest_of(documents: int, tokens: int, **settings) -> dict:
    return {"held_out": {"documents": documents, "tokens": tokens}, "settings": settings}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (manifest_of(50, 20_000), None),
        (manifest_of(49, 20_000), "only 49 documents of 20,000 tokens are held out; losses on"),
        (manifest_of(5000, 19_999), "only 5,000 documents of 19,999 tokens are held out;"),
        (manifest_of(1, 7), "only 1 document of 7 tokens are held out; "),
        (manifest_of(0, 0), "no document is held out, so there is no evaluation; "),
        (manifest_of(1, 7), "; add text, or raise corpus.held_out_fraction above 0.2"),
        # where not even that has been held out, as of a dataset that nothing compares
        (manifest_of(25, 7) | {"train": {"documents": 400}}, "corpus.held_out_fraction above 0.01"),
        (
            manifest_of(1, 7, **{"corpus.held_out_fraction": 0.4}),
            "or raise corpus.held_out_fraction above 0.4",
        ),
        (
            manifest_of(0, 0, **{"corpus.held_out_fraction": 0}),
            "; raise corpus.held_out_fraction, to 0.01 for",
        ),
        (
            manifest_of(1, 7) | {"sources": [{"layout": "file"}]},
            "corpus.layout=line makes each line",
        ),
        ({"held_out": {"documents": 1, "tokens": 7}}, "need 50 documents and 20,000 tokens to be"),
    ],
)
def test_what_is_short_is_said_with_the_way_out(manifest: dict, message: str | None) -> None:
    found = held_out_shortfall(manifest)
    assert found is None if message is None else message in found


def test_a_line_is_red_on_a_terminal_only_and_where_colours_are_wanted(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert red("line") == "line"  # pytest keeps stdout in a file
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert red("line") == "\033[31mline\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert red("line") == "line"


WARNING = re.compile(
    r"warning: only \d+ documents? of [\d,]+ tokens are held out; .*; add text, or raise "
    r"corpus\.held_out_fraction above 0\.2"
)


def test_preparation_ends_with_the_warning_each_time(texts, tmp_path: Path, capsys) -> None:
    for _ in range(2):
        prepare(config_of(texts, tmp_path), workers=1)
        assert WARNING.fullmatch(capsys.readouterr().out.splitlines()[-1])


def test_pairs_of_documents_of_one_sentence_are_warned_of(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("".join(f"Line {i} says a word.\n" for i in range(300)))
    config = config_of(str(tmp_path / "a.txt"), tmp_path / "data", layout="line")
    config.data.objective = "nsp"
    prepare(config, workers=1)
    told = "documents have 1.0 sentences on average, so most pairs (data.objective nsp) consist of"
    assert f"warning: {told}" in capsys.readouterr().out
    config.data.objective = "none"
    prepare(config, workers=1)
    assert "sentences on average, so" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def small(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared corpus with a config of its own, in a folder that may be written to."""
    root = tmp_path_factory.mktemp("small")
    shutil.copytree(prepared / "data", root / "data")
    text = (prepared / "config.yaml").read_text()
    (root / "config.yaml").write_text(text.replace(f"{prepared}/data", f"{root}/data"))
    return root


def test_the_report_fails_a_check_and_says_what_to_do(small: Path, capsys) -> None:
    config = load_config(DataConfig, str(small / "config.yaml"), [f"run_dir={small}/run"])
    result = report.measure(config)
    checks = {check["name"]: check for check in result["checks"]}
    held_out = result["store"]["held_out"]
    assert checks["Held-out documents"] == {
        "name": "Held-out documents",
        "found": str(held_out["documents"]),
        "wanted": "≥ 50",
        "holds": False,
    }
    assert checks["Held-out tokens"]["wanted"] == "≥ 20,000"
    page = report.render_page(result)
    shortfall = held_out_shortfall(result["store"])
    assert "1 of " in page and shortfall[0].upper() + shortfall[1:] in page
    with patch("sys.argv", ["report", str(small / "config.yaml")]):
        report.main()
    out = capsys.readouterr().out
    assert f"FAILS  Held-out documents: {held_out['documents']} (wanted ≥ 50)" in out
    assert WARNING.search(out)
    enough = result | {"store": manifest_of(50, 20_000) | result["store"] | manifest_of(50, 20_000)}
    assert all(check["holds"] for check in check_held_out(enough["store"]))


def config_to_train(small: Path, run_dir: Path) -> Config:
    overrides = [f"run_dir={run_dir}", "train.max_steps=1", "train.warmup_steps=0"]
    return load_config(Config, str(small / "config.yaml"), overrides)


def test_training_starts_with_the_warning_and_goes_on(small: Path, tmp_path: Path, capsys) -> None:
    train(config_to_train(small, tmp_path))
    out = capsys.readouterr().out
    assert len(WARNING.findall(out)) == 1 and (tmp_path / "export").exists()


def test_the_plan_has_the_warning(small: Path, tmp_path: Path, capsys) -> None:
    with patch("pretrain.plan.SECONDS", 0):
        plan(config_to_train(small, tmp_path))
    assert len(WARNING.findall(capsys.readouterr().out)) == 1


def test_without_held_out_documents_training_says_so_once(
    small: Path, tmp_path: Path, capsys
) -> None:
    overrides = [f"data_dir={tmp_path}/data", "corpus.held_out_fraction=0"]
    prepare(load_config(DataConfig, str(small / "config.yaml"), overrides), workers=1)
    capsys.readouterr()
    config = config_to_train(small, tmp_path / "run")
    config.data_dir = str(tmp_path / "data")
    train(config)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning: no ")]
    assert line.startswith("warning: no document is held out, so there is no evaluation; ")


def test_a_split_that_is_large_enough_is_not_mentioned(small: Path, capsys) -> None:
    config = config_to_train(small, small / "run")
    with patch("data_pipeline.sampling.manifest.HELD_OUT_DOCUMENTS", 2):
        open_token_store(config, phases_of(config))
    assert "warning" not in capsys.readouterr().out
