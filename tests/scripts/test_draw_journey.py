"""The picture of a run shows what is in its corpus, its store and its export."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import draw_journey
import pytest
from helpers import ROOT
from tokenizers import Tokenizer

from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain.config import Config


@pytest.fixture(scope="module")
def config(prepared: Path) -> Config:
    return load_config(Config, str(prepared / "config.yaml"))


@pytest.fixture(scope="module")
def documents(config: Config) -> list[list[str]]:
    return list(draw_journey.read_sentences(config))


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Tokenizer:
    return Tokenizer.from_file(str(prepared / "data/vocab/tokenizer.json"))


def draw(prepared: Path, run_dir: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/draw_journey.py", prepared / "config.yaml", out]
    return subprocess.run(
        [*map(str, command), f"run_dir={run_dir}", *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_a_finished_run_is_drawn_as_a_small_picture_of_outlines(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new/journey.svg"
    done = draw(prepared, straight, out)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size < 150_000
    picture = ElementTree.parse(out).getroot()
    assert picture.get("width") == "622.5pt"  # 830 pixels
    name = "{http://www.w3.org/2000/svg}"
    glyphs = {path.get("id") for path in picture.iter(f"{name}path")} - {None}
    used = [use.get("{http://www.w3.org/1999/xlink}href")[1:] for use in picture.iter(f"{name}use")]
    assert len(used) > 300 and set(used) <= glyphs | {u for u in used if u.startswith("m")}
    assert not list(picture.iter(f"{name}text"))


def test_the_pair_is_an_example_of_the_run_and_its_text_is_in_the_corpus(
    prepared: Path, config: Config, documents, tokenizer: Tokenizer, store: TokenStore
) -> None:
    source = BatchSource(store, config.data, config.seed)
    number, passage = draw_journey.choose_pair(store, source, documents, tokenizer)
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    assert passage.a.split(". ")[0] in text and passage.b.split(". ")[0] in text
    batch = source.batch(number, 1)
    ids = batch.input_ids.clone()
    ids[batch.masked_positions] = batch.masked_labels
    assert ids.tolist() == tokenizer.encode(passage.a, passage.b).ids
    assert batch.next_sentence_label.tolist() == [0]


def test_a_run_of_single_segments_is_drawn_without_a_b(
    prepared: Path, config: Config, documents, tokenizer: Tokenizer, store: TokenStore
) -> None:
    source = BatchSource(store, replace(config.data, objective="none"), config.seed)
    number, passage = draw_journey.choose_pair(store, source, documents, tokenizer)
    batch = source.batch(number, 1)
    ids = batch.input_ids.clone()
    ids[batch.masked_positions] = batch.masked_labels
    assert ids.tolist() == tokenizer.encode(passage.a).ids
    assert passage.b == ""


def test_the_pair_of_a_run_with_single_segments_first_is_of_its_last_phase(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    phases = "train.phases=[{steps: 0.5, single_segment_prob: 1}, {steps: 0.5}]"
    done = draw(prepared, straight, tmp_path / "journey.svg", phases)
    assert done.returncode == 0, done.stderr


def test_filled_masks_are_of_held_out_sentences_with_their_true_words(
    prepared: Path, straight: Path, documents, tokenizer: Tokenizer, vocabulary
) -> None:
    held_out = TokenStore.open(prepared / "data/store", "held_out", vocabulary)
    tokens = " ".join(map(str, held_out.tokens.tolist()))
    filled = draw_journey.fill_sentences(straight / "export", tokenizer, held_out, documents)
    assert filled
    assert len({one.outcome for one in filled}) == len(filled)
    for one in filled:
        sentence = one.sentence.replace("[MASK]", one.truth)
        ids = tokenizer.encode(sentence, add_special_tokens=False).ids
        assert f" {' '.join(map(str, ids))} " in f" {tokens} "
        assert one.outcome == "missed" or one.truth in [word for word, _ in one.best]


def test_a_run_that_is_not_finished_is_one_line_of_error(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    done = draw(prepared, tmp_path, tmp_path / "journey.svg")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: no finished run in {tmp_path}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "journey.svg").exists()
