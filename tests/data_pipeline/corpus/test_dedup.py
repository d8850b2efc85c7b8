"""selection: equal documents and equal long paragraphs stay where they come first, whatever the
pieces, the workers and the interruptions.

The reference is the rule said plainly: one walk through all documents with a set of what was seen.
"""

import bz2
import json
import os
import re
import signal
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from helpers import contents
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.build.prepare import prepare
from data_pipeline.config import (
    CorpusConfig,
    DataConfig,
    DatasetConfig,
    PairsConfig,
    SourceConfig,
    VocabConfig,
)
from data_pipeline.corpus import readers, selection
from data_pipeline.corpus.readers import Rejects
from data_pipeline.corpus.selection import (
    MIN_DEDUP_CHARS,
    Selection,
    find_earlier,
    find_limit,
    hash_document,
    hash_group,
    read_earlier,
    read_selected,
    select,
    write_earlier,
)
from data_pipeline.corpus.sources import list_file_chunks

FEW = settings(max_examples=40)


def plainly(documents: list[str]) -> tuple[list[str], dict[str, int]]:
    """What is left of the documents in order, and what was left out by cause."""
    seen: dict[str, set[str]] = {"documents": set(), "lines": set()}
    kept, causes = [], {"duplicate": 0, "duplicate paragraphs": 0}
    for document in documents:
        if document.strip() in seen["documents"]:
            causes["duplicate"] += 1
            continue
        seen["documents"].add(document.strip())
        lines = []
        for line in document.split("\n"):
            if len(line) < MIN_DEDUP_CHARS or line not in seen["lines"]:
                lines.append(line)
            if len(line) >= MIN_DEDUP_CHARS:
                seen["lines"].add(line)
        if not lines:
            causes["duplicate"] += 1
            continue
        causes["duplicate paragraphs"] += document.count("\n") + 1 - len(lines)
        kept.append("\n".join(lines))
    return kept, {cause: n for cause, n in causes.items() if n}


def plainly_sampled(sources: list[tuple[float, list[str]]], limit: int) -> list[str]:
    """The long lines that are left of sources with weights up to 1, in the order of keeping."""
    sources = sorted(sources, key=lambda source: -source[0])
    documents, lines = set(), []
    for weight, texts in sources:
        own = [text for text in dict.fromkeys(texts) if text not in documents]
        documents |= set(own)
        taken = set()
        for held_out in (False, True):
            some = [text for text in own if (hash_document(text) < limit) == held_out]
            some.sort(key=hash_document)
            taken |= set(some[: int(weight * len(some) + 0.5)])
        for text in own:
            lines += text.split("\n") if text in taken else []
    return list(dict.fromkeys(line for line in lines if len(line) >= MIN_DEDUP_CHARS))


def by_pieces(config: CorpusConfig, folder: Path, order=list) -> tuple[list[str], dict[str, int]]:
    """The same by the project's way, the pieces being hashed and read in any `order`."""
    pieces = list_file_chunks(config)
    hashed = [folder / f"hashes-{i}" for i in range(len(pieces))]
    sources = config.each_source()
    for i in order(range(len(pieces))):
        hash_group([pieces[i]], hashed[i], sources[pieces[i].source])
    groups = [[piece] for piece in pieces]
    find_earlier(config, groups, hashed, folder / "earlier")
    chosen = select(config, groups, hashed, folder / "earlier")
    kept: dict[int, list[str]] = {i: [] for i in range(len(pieces))}
    rejects = Rejects()
    for i in order(range(len(pieces))):
        chosen[i].open()
        source = sources[pieces[i].source]
        for document in read_selected(pieces[i], source, chosen[i].hashes, rejects):
            number = hash_document(document)
            held_out = number < chosen[i].limit
            text, copies = chosen[i].take(document, number, held_out, rejects)
            kept[i] += [text] * copies
    return [document for i in kept for document in kept[i]], rejects


LINES = ["short", "another", *(f"{word} " * 30 for word in ("long", "length", "largeé", "中文"))]
DOCUMENTS = st.lists(
    st.lists(st.sampled_from(LINES), min_size=1, max_size=3).map("\n".join), max_size=8
)


@FEW
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.integers(100, 900), st.integers(4, 99))
def test_a_text_stays_where_it_comes_first(tmp_path_factory, files, piece_bytes, merged):
    folder = tmp_path_factory.mktemp("pieces")
    for i, documents in enumerate(files):
        (folder / f"{i}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    config = CorpusConfig(files=str(folder / "*.txt"), layout="blank_line")
    expected = plainly([document for documents in files for document in documents])
    with (
        patch("data_pipeline.corpus.sources.CHUNK_BYTES", piece_bytes),
        patch.object(selection, "MERGED", merged),
    ):
        (folder / "forth").mkdir()
        assert by_pieces(config, folder / "forth") == expected
        (folder / "back").mkdir()
        assert by_pieces(config, folder / "back", reversed) == expected


@FEW
@given(st.lists(st.lists(st.integers(0, 9) | st.integers(0, 2**64 - 1)), min_size=1, max_size=5))
def test_a_piece_learns_which_of_its_hashes_an_earlier_one_has(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("hashes")
    hashed = [folder / str(i) for i in range(len(pieces))]
    for path, hashes in zip(hashed, pieces, strict=True):
        path.mkdir()
        for kind in selection.KINDS:
            np.save(path / f"{kind}.npy", np.sort(np.array(hashes, np.uint64)))
    for kind in selection.KINDS:
        with patch.object(selection, "MERGED", 3):
            write_earlier(hashed, list(range(len(pieces))), kind, folder)
        for i, hashes in enumerate(pieces):
            expected = sorted(set(hashes) & {n for piece in pieces[:i] for n in piece})
            assert read_earlier(folder, i, kind).tolist() == expected


def test_no_paragraph_goes_to_a_document_that_is_not_sampled(tmp_path: Path) -> None:
    """Each paragraph is in two files, in documents that a weight of 0.5 takes or does not."""
    quoted = [f"paragraph {i} " * 20 for i in range(40)]
    for name in ("a", "b"):
        documents = [f"document {i} of {name}\n{text}" for i, text in enumerate(quoted)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents))
    files = str(tmp_path / "*.txt")
    whole, _ = by_pieces(CorpusConfig(files=files, deduplicate=False, weight=0.5), tmp_path / "all")
    kept, _ = by_pieces(CorpusConfig(files=files, weight=0.5), tmp_path / "each")

    def found(documents: list[str]) -> set[str]:
        return {line for text in documents for line in text.split("\n") if line in quoted}

    assert found(kept) == found(whole) and 20 < len(found(whole)) < 40


@pytest.mark.parametrize("weight", [0.5, 0.1])
def test_a_paragraph_of_a_sampled_source_is_kept_once_and_so_not_in_both_splits(
    tmp_path: Path, weight: float
):
    """Eight files of one line a document that all files share, and of one of their own."""
    shared, own = "a licence " * 20, "text of a file "
    for i in range(8):
        documents = [f"document {i}, {n}\n{shared}\n{own * 20}{i}" for n in range(50)]
        (tmp_path / f"{i}.txt").write_text("\n\n".join(documents))
    kept, causes = by_pieces(CorpusConfig(files=str(tmp_path / "*.txt"), weight=weight), tmp_path)
    lines = [line for document in kept for line in document.split("\n")]
    taken = {line.split(",")[0][-1] for line in lines if line.startswith("document")}
    assert len(kept) == 400 * weight
    assert lines.count(shared) == 1
    assert sorted(line for line in lines if line.startswith(own)) == [
        f"{own * 20}{i}" for i in sorted(taken)
    ]


QUOTED = [f"quoted text {i} " * 8 for i in range(20)]
FIRST, OTHERS = ([f"{name} {i}\n{QUOTED[i]}" for i in range(20)] for name in ("first", "other"))


@FEW
@example([(0.5, FIRST), (0.5, [*FIRST, "one"]), (0.5, OTHERS)], 900)  # copies of what is not taken
@given(
    st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.8, 1.0]), DOCUMENTS), min_size=1, max_size=4),
    st.integers(100, 900),
)
def test_a_long_line_stays_where_it_comes_first_among_the_documents_that_are_taken(
    tmp_path_factory, sources, piece_bytes
):
    folder, configs = tmp_path_factory.mktemp("sources"), []
    for i, (weight, documents) in enumerate(sources):
        (folder / f"{i}.txt").write_text("\n\n".join(documents), encoding="utf-8")
        files = str(folder / f"{i}.txt")
        configs.append(SourceConfig(files=files, layout="blank_line", weight=weight))
    with patch("data_pipeline.corpus.sources.CHUNK_BYTES", piece_bytes):
        config = CorpusConfig(sources=configs)
        kept, _ = by_pieces(config, folder)
        n_pieces = len(list_file_chunks(config))
    hashed = [folder / f"hashes-{i}" for i in range(n_pieces)]
    limit = find_limit(config, hashed, folder / "earlier")
    lines = [line for text in kept for line in text.split("\n") if len(line) >= MIN_DEDUP_CHARS]
    assert sorted(lines) == sorted(plainly_sampled(sources, limit))


def test_the_first_source_that_holds_a_text_keeps_it(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("two\nthree\n")
    names = ("b.txt", "a.txt")
    sources = [SourceConfig(files=str(tmp_path / n), layout="line", weight=2.0) for n in names]
    kept, causes = by_pieces(CorpusConfig(sources=sources), tmp_path)
    assert kept == ["two", "two", "three", "three", "one", "one"]
    assert causes == {"duplicate": 1}


@pytest.mark.parametrize("weight", [1.0, 2.0, 0.75])
def test_a_source_of_which_less_is_taken_keeps_no_text_from_another(tmp_path: Path, weight: float):
    lines = [f"text {i}" for i in range(400)]
    (tmp_path / "a.txt").write_text("\n".join(lines[:300]))
    (tmp_path / "b.txt").write_text("\n".join(lines))
    sources = [
        SourceConfig(files=str(tmp_path / name), layout="line", weight=share)
        for name, share in (("a.txt", 0.5), ("b.txt", weight))
    ]
    kept, causes = by_pieces(CorpusConfig(sources=sources, held_out_fraction=0.0), tmp_path)
    assert len(kept) == 400 * weight and causes["duplicate"] == 300
    assert len(set(kept)) == 400 * min(weight, 1)


def test_a_weight_is_a_share_of_what_no_earlier_file_has(tmp_path: Path):
    lines = [f"text {i}" for i in range(400)]
    (tmp_path / "a.txt").write_text("\n".join(lines[:300]))
    (tmp_path / "b.txt").write_text("\n".join(lines))
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    source = SourceConfig(files=files, layout="line", weight=0.5)
    kept, causes = by_pieces(CorpusConfig(sources=[source], held_out_fraction=0.0), tmp_path)
    assert len(kept) == len(set(kept)) == causes["not sampled"] == 200


def test_a_document_that_is_not_taken_keeps_no_line_from_one_that_is(tmp_path: Path):
    lines = [f"{i} " * MIN_DEDUP_CHARS for i in range(100)]
    texts = [f"{i}{name}\n{line}" for i, line in enumerate(lines) for name in "ab"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    source = {"files": str(tmp_path / "a.txt"), "weight": 0.5, "held_out_fraction": 0.0}
    kept, causes = by_pieces(CorpusConfig(**source), tmp_path)
    shared = [document.split("\n")[1] for document in kept if "\n" in document]
    wanted = {lines[int(document.split("\n")[0][:-1])] for document in kept}
    assert len(kept) == causes["not sampled"] == 100
    assert sorted(shared) == sorted(wanted)
    assert len(shared) + causes["duplicate paragraphs"] == 100


def test_copies_of_a_file_and_of_a_row_are_copies_whatever_blank_lines_they_have(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\n \n  two\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one\n\n  two"}))
    sources = [
        SourceConfig(files=str(tmp_path / "a.txt"), layout="file"),
        SourceConfig(files=str(tmp_path / "b.jsonl")),
    ]
    kept, causes = by_pieces(CorpusConfig(sources=sources), tmp_path)
    assert [document.strip() for document in kept] == ["one\n  two"]
    assert causes == {"duplicate": 1}


def test_copies_in_files_with_and_without_a_last_line_end_are_copies(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.txt").write_text("a text\n")
    kept, causes = by_pieces(CorpusConfig(files=str(tmp_path / "*.txt"), layout="file"), tmp_path)
    assert [document.strip() for document in kept] == ["a text"] and causes == {"duplicate": 1}


def test_a_line_below_the_length_stays_however_often(tmp_path: Path):
    short, long = "x" * (MIN_DEDUP_CHARS - 1), "y" * MIN_DEDUP_CHARS
    documents = [f"{i}\n{short}\n{long}" for i in range(3)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    kept, causes = by_pieces(CorpusConfig(files=str(tmp_path / "a.txt")), tmp_path)
    assert kept == [f"0\n{short}\n{long}", f"1\n{short}", f"2\n{short}"]
    assert causes == {"duplicate paragraphs": 2}


def test_a_dataset_is_read_once(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\ntwo é\none\n", encoding="utf-8")
    config = CorpusConfig(dataset=DatasetConfig("text", data_files=str(tmp_path / "a.txt")))
    pieces, real, calls = list_file_chunks(config), readers.read_cells, []
    with patch.object(readers, "read_cells", lambda *args: (calls.append(args), real(*args))[1]):
        kept, causes = by_pieces(config, tmp_path)
    assert (kept, causes) == (["one", "two é"], {"empty": 1, "duplicate": 1})
    assert len(calls) == len(pieces) == 1


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_a_file_slow_to_decompress_is_read_once(tmp_path: Path, block: int):
    text = "one\nline\n\ntwo é\n\none\nline\n\nthree"
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(text.encode()))
    config = CorpusConfig(files=str(tmp_path / "a.txt.bz2"))
    real, calls = readers.read_text, []
    with (
        patch.object(readers, "read_text", lambda *args: (calls.append(args), real(*args))[1]),
        patch.object(selection, "BLOCK_BYTES", block),
    ):
        kept, causes = by_pieces(config, tmp_path)
    assert (kept, causes) == (["one\nline", "two é", "three"], {"duplicate": 1})
    assert len(calls) == 1


# ---------------------------------------------------------------------------------- the command


def config_of(folder: Path, data_dir: Path, **settings) -> DataConfig:
    return DataConfig(
        data_dir=str(data_dir),
        corpus=CorpusConfig(files=str(folder / "*.txt"), held_out_fraction=0.3, **settings),
        vocab=VocabConfig(size=60, min_frequency=1),
        data=PairsConfig(objective="none"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files that share half of their documents, and paragraphs."""
    folder = tmp_path_factory.mktemp("files")
    for i in range(4):
        documents = [f"Document {n}, of some words.\n{LINES[2 + n % 4]}" for n in range(i, i + 8)]
        (folder / f"{i}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return folder


def test_workers_and_interruptions_change_nothing(folder: Path, tmp_path: Path, capsys):
    settings = {"weight": 1.5}
    prepare(config_of(folder, tmp_path / "one", **settings), workers=1)
    assert re.search(r"left out: \d+ duplicate paragraphs, 21 duplicate", capsys.readouterr().out)
    prepare(config_of(folder, tmp_path / "two", **settings), workers=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    for name, calls in (("hash_text", 20), ("in_earlier", 1), ("lowest", 0)):
        data_dir = tmp_path / name
        child = os.fork()
        if not child:  # is killed as it makes a call
            real, left = getattr(selection, name), iter([None] * calls)

            def killed(*args, real=real, left=left):
                for _ in left:
                    return real(*args)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(selection, name, killed)
            prepare(config_of(folder, data_dir, **settings), workers=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        prepare(config_of(folder, data_dir, **settings), workers=1)
        assert contents(data_dir) == contents(tmp_path / "one")


def test_nothing_is_compared_when_nobody_asks(folder: Path, tmp_path: Path, capsys):
    with (
        patch("data_pipeline.build.stages.hash_group", side_effect=AssertionError),
        patch.object(selection, "SURE_BYTES", 1),  # as if the corpus were large
    ):
        prepare(config_of(folder, tmp_path, deduplicate=False, weight=2.0), workers=1)
    assert "left out: none" in capsys.readouterr().out


def test_a_selection_of_nothing_special_takes_every_document_once():
    chosen, rejects = Selection(), Rejects()
    chosen.open()
    for _ in range(2):
        for held_out in (False, True):
            assert chosen.take("text", 0, held_out, rejects) == ("text", 1)
    assert rejects == {}


def test_a_document_of_which_blank_lines_alone_remain_is_a_duplicate():
    chosen, rejects, line = Selection(), Rejects(), "a" * MIN_DEDUP_CHARS
    chosen.seen = {"paragraphs": {selection.hash_text(line)}}
    chosen.repeated = {"paragraphs": set()}
    assert chosen.drop_paragraphs(f"{line}\n \t", rejects) == ""
    assert rejects == {"duplicate": 1}
