"""Trying an export on held-out text: what is chosen, hidden and shuffled, and what is printed."""

import re
import sys

import numpy as np
import pytest
import torch
import try_held_out
from helpers import train_here

from data_pipeline.common.errors import run_command
from data_pipeline.sampling.token_store import TokenStore
from pretrain.config import ModelConfig
from pretrain.models.bert import PretrainingModel


@pytest.fixture(scope="module")
def held_out(prepared, vocabulary) -> TokenStore:
    return TokenStore.open(prepared / "data/store", "held_out", vocabulary)


@pytest.fixture(scope="module")
def sentences(held_out) -> list[np.ndarray]:
    return try_held_out.choose_sentences(held_out, 50, 20)


def test_sentences_are_of_the_split_and_of_the_wanted_length(held_out, sentences) -> None:
    offsets = held_out.sentence_offsets
    everywhere = {tuple(held_out.tokens[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)}
    assert 20 < len(sentences) <= 50
    assert all(tuple(tokens) in everywhere and 6 <= len(tokens) <= 20 for tokens in sentences)
    assert len(set(map(tuple, sentences))) > 20


def test_one_word_of_one_piece_is_hidden(vocabulary, sentences) -> None:
    rng = np.random.default_rng(0)
    for tokens in sentences:
        masked, truth = try_held_out.hide_word(tokens, vocabulary, rng)
        (place,) = np.flatnonzero(masked != tokens)
        assert masked[place] == vocabulary["[MASK]"] and tokens[place] == truth
        assert vocabulary.pieces[truth].isalpha()
        assert not vocabulary.continues[np.append(tokens, 0)[place + 1]]


def test_shuffled_words_stay_whole(vocabulary, sentences) -> None:
    rng = np.random.default_rng(0)
    moved = 0
    for tokens in sentences:
        shuffled = try_held_out.shuffle_words(tokens, vocabulary, rng)
        before, after = (
            try_held_out.decode(vocabulary, each).split(" ") for each in (tokens, shuffled)
        )
        assert sorted(before) == sorted(after)
        moved += before != after
    assert moved > 0.9 * len(sentences)


def test_a_model_without_positions_cannot_tell_the_order(vocabulary, sentences) -> None:
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = PretrainingModel(config, len(vocabulary))
    model.embeddings.position.weight.data.zero_()
    found = try_held_out.tell_order(model, sentences, vocabulary)
    assert abs(found - 0.5) < 5 * 0.5 / np.sqrt(len(sentences))


def test_the_command_shows_fillings_with_the_truth_and_random_weights_beside(
    prepared, tmp_path, monkeypatch, capsys
) -> None:
    train_here(prepared, tmp_path, "train.max_steps=2", "train.warmup_steps=1")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["try", str(tmp_path / "export"), str(prepared / "data")])
    run_command(try_held_out.main)
    lines = capsys.readouterr().out.splitlines()
    assert sum("[MASK]" in line for line in lines) == 5
    assert sum("; the truth: " in line for line in lines) == 5
    found = re.fullmatch(
        r"it prefers (\d+)% of (\d+) held-out .* weights prefers (\d+)%", lines[-1]
    )
    assert 100 < int(found[2]) <= 200


def test_a_model_of_few_positions_is_shown_sentences_that_fit(
    prepared, tmp_path, monkeypatch, capsys
) -> None:
    short = ("train.max_steps=2", "train.warmup_steps=1", "data.max_seq_length=16")
    train_here(prepared, tmp_path, *short)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["try", str(tmp_path / "export"), str(prepared / "data")])
    run_command(try_held_out.main)
    assert "held-out sentences to the same words" in capsys.readouterr().out


def test_each_sentence_has_its_own_fillings_and_the_model_is_named_before_random_weights(
    prepared, straight, monkeypatch, capsys
) -> None:
    loaded = []
    load = try_held_out.load_export
    monkeypatch.setattr(try_held_out, "load_export", lambda f: loaded.append(load(f)) or loaded[0])
    monkeypatch.setattr(try_held_out, "tell_order", lambda model, *rest: model is loaded[0])
    monkeypatch.setattr(
        try_held_out,
        "fill_masks",
        lambda model, sentences, *rest: [[[(f"word{i}", 1.0)]] for i in range(len(sentences))],
    )
    arguments = ["try", str(straight / "export"), str(prepared / "data")]
    monkeypatch.setattr(sys, "argv", arguments)
    try_held_out.main()
    said = capsys.readouterr().out
    assert re.findall(r"word\d 100%", said) == [f"word{i} 100%" for i in range(5)]
    assert "it prefers 100% of " in said
    assert "another order; the same network with random weights prefers 0%" in said


def test_another_vocabulary_is_one_line(prepared, tmp_path, monkeypatch, capsys) -> None:
    train_here(prepared, tmp_path, "train.max_steps=2", "train.warmup_steps=1")
    pieces = (tmp_path / "export/vocab.txt").read_text().splitlines()
    pieces[-1] = "other"
    (tmp_path / "export/vocab.txt").write_text("\n".join(pieces) + "\n")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["try", str(tmp_path / "export"), str(prepared / "data")])
    with pytest.raises(SystemExit, match="2"):
        run_command(try_held_out.main)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a different vocabulary" in error
