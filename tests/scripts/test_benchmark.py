"""The benchmark prints well-formed figures, and its slow rendering of google-research/bert keeps
that program's rules. Nothing here asserts a time."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import bench_figures
import bench_peers
import benchmark
import pytest
from helpers import ROOT, fork

from data_pipeline.config import CorpusConfig, DataConfig, SourceConfig

KEYS = ["figure", "unit", "ours", "peer", "ratio", "target", "runs", "spread", "threads"]


def run(what: str, *arguments: object) -> subprocess.CompletedProcess:
    options = [what, "--runs", "1", "--sizes", "tiny", *map(str, arguments)]
    return fork([str(ROOT / "scripts/benchmark.py"), *options])


@pytest.mark.parametrize(
    ("what", "with_peer", "alone"),
    [("data", 4, 2), ("loader", 8, 2), pytest.param("model", 5, 3, marks=pytest.mark.slow)],
)
def test_each_figure_is_a_line_of_json(prepared, what, with_peer, alone) -> None:
    done = run(what, "--config", prepared / "config.yaml")
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(figure) for figure in figures] == [KEYS] * (with_peer + alone)
    assert len({figure["figure"] for figure in figures}) == len(figures)
    for figure in figures:
        assert figure["ours"] >= 0 and figure["runs"] >= 1 and figure["threads"] >= 1
        assert (figure["peer"] is None) == (figure["ratio"] is None)
        if figure["peer"] is not None:
            more = {figure["ours"] / figure["peer"], figure["peer"] / figure["ours"]}
            assert any(figure["ratio"] == pytest.approx(times, rel=0.02) for times in more)
    assert sum(figure["peer"] is not None for figure in figures) == with_peer


def test_the_files_given_take_the_place_of_all_sources(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"body": "of a source"}\n')
    (tmp_path / "given.txt").write_text("given\n")
    sources = [SourceConfig(files=str(tmp_path / "own.jsonl"), text_field="body")]
    config = DataConfig(corpus=CorpusConfig(sources=sources), data_dir=str(tmp_path / "data"))
    for one, wanted in (
        (config, "of a source"),
        (benchmark.with_files(config, ["given.txt"]), "given"),
    ):
        with contextlib.chdir(tmp_path):
            found = benchmark.as_one_file(one, tmp_path)
        assert Path(found.corpus.files).read_text() == f"{wanted}\n\n"
        assert [source.files for source in found.corpus.each_source()] == [found.corpus.files]


def test_a_ratio_says_how_many_times_better_ours_is(capsys) -> None:
    for smaller_is_better, ratio in ((False, 0.5), (True, 2.0)):
        bench_figures.show("f", "s", "", [1, 2, 9], [4], smaller_is_better=smaller_is_better)
        found = json.loads(capsys.readouterr().out)
        assert (found["ours"], found["peer"], found["ratio"]) == (2, 4, ratio)


def test_the_first_run_is_a_warm_up() -> None:
    times, units = iter(range(0, 100, 2)), iter([1000, 4, 6])
    assert bench_figures.rates(2, lambda: next(units), clock=lambda: next(times)) == [[2, 3]]


@pytest.mark.slow
def test_both_sides_learn_for_as_long(prepared) -> None:
    done = run("learn", "--minutes", "0.04", "--config", prepared / "config.yaml")
    assert done.returncode == 0, done.stderr
    loss, accuracy, pairs = (json.loads(line) for line in done.stdout.splitlines())
    assert list(loss) == KEYS and loss["unit"] == "nats"
    assert 2 < loss["ours"] < 8 and 2 < loss["peer"] < 8  # log(1,024) is 6.9
    assert all(0 <= figure[side] <= 1 for figure in (accuracy, pairs) for side in ("ours", "peer"))


def test_golden_rules_of_sentences_are_counted_by_language(tmp_path) -> None:
    text = "Ask Dr. Lee. He knows."
    rules = [
        {"text": text, "sentences": [text[:12], text[13:]]},
        {"text": text, "sentences": [text]},
    ]
    (tmp_path / "english_own.json").write_text(json.dumps(rules))
    (tmp_path / "deutsch.json").write_text(json.dumps(rules[1:]))
    done = run("sentences", "--rules", tmp_path)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(figure) for figure in figures] == [KEYS] * 2
    assert [(figure["ours"], figure["unit"]) for figure in figures] == [(0, "of 1"), (1, "of 2")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["benchmark.py", "loader", "--runs", "0"], "--runs 0: wanted 1 or more"),
        (["benchmark.py", "model", "--threads", "0"], "--threads 0: wanted 1 or more"),
        (
            ["chaos.py", "configs/mini.yaml", "--out", "nowhere/a", "--each", "0"],
            "--each 0: wanted",
        ),
        (["chaos.py", "nowhere.yaml", "--out", "nowhere/a"], "no config at nowhere.yaml"),
        (["soak.py", "configs/mini.yaml", "--minutes", "-1"], "--minutes -1: wanted 0.1 or more"),
        (["soak.py", "configs/mini.yaml", "--page", "/dev/null"], "/dev/null is not a regular"),
    ],
)
def test_a_check_of_nothing_is_refused_in_a_line(words: list[str], said: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, f"scripts/{words[0]}", *words[1:]]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"error: {said}")
    assert not (ROOT / "nowhere").exists()


def test_a_config_that_is_not_there_is_one_line(tmp_path) -> None:
    done = run("data", "--config", tmp_path / "config.yaml")
    assert done.returncode == 2 and done.stderr.startswith("error: no config at")


def test_the_slow_rendering_makes_examples_of_the_published_rules() -> None:
    words = "the cat sat on a mat , and looked at un ##believ ##able things .".split()
    vocabulary = {
        p: i for i, p in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    }
    sentences = ["The cat sat on a mat,", "and looked at UNBELIEVABLE things.", "Ünbelievable cat!"]
    documents = [sentences * 8 for _ in range(20)]
    examples = list(bench_peers.original_examples(documents, vocabulary, 64, random.Random(0)))
    for example in examples:
        n, ids = sum(example["attention_mask"]), example["input_ids"]
        before = list(ids)
        for place, label in zip(example["masked_positions"], example["masked_labels"], strict=True):
            before[place] = label
        assert len(ids) == len(example["token_type_ids"]) == 64
        assert before[0] == 2 and before[n - 1] == 3 and before[:n].count(3) == 2
        assert not any(ids[n:]) and 4 not in before
        assert 0 < len(example["masked_labels"]) <= max(1, round(0.15 * n))
    random_share = sum(e["next_sentence_label"][0] for e in examples) / len(examples)
    assert 0.4 < random_share < 0.8  # more than half: what is ours to do better
    assert {i for e in examples for i in e["masked_labels"]} <= set(vocabulary.values())


def test_the_slow_rendering_takes_words_apart_as_bert_does() -> None:
    assert bench_peers.basic_words("Ab\u00e9l's\u200b x-ray\u3000\u4e2d\u6587!") == [
        *("abel", "'", "s", "x", "-", "ray", "\u4e2d", "\u6587", "!")
    ]
    vocabulary = {"un": 0, "##believ": 1, "##able": 2, "u": 3}
    assert bench_peers.greedy_pieces("unbelievable", vocabulary) == ["un", "##believ", "##able"]
    assert bench_peers.greedy_pieces("unbelievably", vocabulary) == ["[UNK]"]
    assert bench_peers.greedy_pieces("u" * 201, vocabulary) == ["[UNK]"]
