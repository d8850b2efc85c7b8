"""What a run says: labels by objective, named losses, the time that is left, what lies where."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import train_here

from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain import describe
from pretrain.config import Config, PhaseConfig, TrainConfig, phases_of
from pretrain.describe import (
    TimeLeft,
    describe_end,
    say_duration,
    say_evaluation,
    say_progress,
    say_quality,
    show_sequence,
)
from pretrain.model_card import say_split, training_procedure
from pretrain.tracking import to_json


@pytest.mark.parametrize(
    ("objective", "labels"),
    [("nsp", {"IsNext:", "random:"}), ("sop", {"in", "swapped:"}), ("none", {"[CLS]"})],
)
def test_a_sequence_is_labelled_by_its_objective(
    store: TokenStore, objective: str, labels: set[str]
) -> None:
    source = BatchSource(store, PairsConfig(max_seq_length=64, objective=objective), 0)
    shown = [show_sequence(source.batch(i, 1), store.vocabulary, objective) for i in range(40)]
    assert {text.split()[0] for text in shown} == labels
    for i, text in enumerate(shown):
        batch = source.batch(i, 1)
        assert len(re.findall(r"\S\(\S+\)", text)) == len(batch.masked_labels)
        assert text.endswith("[SEP]")


def test_a_run_says_what_it_does_and_where_everything_is(
    prepared: Path, tmp_path: Path, capsys
) -> None:
    run_dir = tmp_path / "run"
    train_here(prepared, run_dir, "train.micro_batch_size=6", "train.log_every=4")
    said, bar = capsys.readouterr()
    assert "16 sequences of at most 64 tokens per step = 1 x 3 passes of at most 6;" in said
    assert "with the tokens to predict in parentheses:\n    " in said
    assert max(map(len, said.splitlines())) < 1200  # a sequence is the longest line
    assert re.search(r"loss: MLM \d\.\d+, NSP \d\.\d+; [\d,]+ tokens/s; \d+ s left", bar)
    end = said[said.index("done: 12 steps") :]
    assert re.search(r"predicts masked tokens \d\.\d\d nats (better|worse) than token freq", end)
    for name in ("export", "metrics.jsonl", "report.html", "checkpoints"):
        assert f"{run_dir / name} " in end
    assert "2 to resume from, the newest step-00000012" in end


def test_a_single_step_is_counted_as_one(tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    describe_end(tmp_path, 1, 2.0, {}, "")
    assert capsys.readouterr().out.startswith("done: 1 step; this command")
    train = {"max_steps": 10, "warmup_steps": 1, "phases": [PhaseConfig(steps=10)]}
    config = Config(train=TrainConfig(**train))
    text = training_procedure(config, {"step": 1, "fingerprint": {}}, phases_of(config), 9)
    assert "| 1 step of 256 " in text and "after 1 step of warm-up" in text
    config.train.extend = True
    extended = training_procedure(config, {"step": 1, "fingerprint": {}}, phases_of(config), 9)
    assert "shorter schedule" in extended and "shorter schedule" not in text
    assert say_split({"documents": 1, "tokens": 1234}) == "1 document (1,234 tokens)"
    assert say_split({"documents": 0, "tokens": 0}) == "0 documents (0 tokens)"


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_the_accuracy_on_pairs_is_called_by_their_objective(objective: str) -> None:
    found = {"eval/nsp_accuracy": 0.75, "eval/nsp_majority": 0.5}
    assert (
        say_evaluation(found, objective) == f"{objective.upper()} accuracy 0.750 (majority 0.500)"
    )
    speed = {"train/mlm_loss": 5.0, "train/nsp_loss": 0.5, "perf/tokens_per_second": 1e4}
    assert say_progress(speed, objective, 30).startswith(
        f"loss: MLM 5.000, {objective.upper()} 0.500; 10,000 tokens/s"
    )


def test_quality_is_told_against_what_needs_no_model() -> None:
    metrics = {"eval/mlm_loss": 4.759, "eval/unigram_entropy": 6.234, "eval/mlm_accuracy": 0.279}
    assert say_quality(metrics) == (
        "on held-out text it predicts masked tokens 1.47 nats better than token frequencies alone "
        "do (4.759, 6.234), and 27.9% of them correctly"
    )
    metrics |= {"eval/mlm_loss": 6.5, "eval/nsp_accuracy": 0.519, "eval/nsp_majority": 0.5}
    assert "0.27 nats worse than" in say_quality(metrics)
    electra = say_quality(metrics | {"eval/rtd_auc": 0.577})
    assert electra.startswith("on held-out text its generator predicts masked tokens")
    assert "an area under the curve of 0.577 (guessing: 0.5)" in electra
    assert "it classifies 51.9% of the pairs correctly (always the same answer: 50.0%)" in (
        say_quality(metrics)
    )


def test_the_end_of_a_run_passes_over_what_was_not_finite(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(describe, "list_checkpoints", lambda folder: [folder / "step-00000008"])
    found = {"eval/mlm_bits_per_byte": 1.5, "eval/minimal_pairs": None}
    describe_end(tmp_path, 8, 1.0, found, "")
    assert "1.500 bits per byte of text\n" in capsys.readouterr().out


def test_the_end_of_a_run_in_trouble_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(describe, "list_checkpoints", lambda folder: [folder / "step-00000008"])
    describe_end(tmp_path, 8, 1.0, {}, "gets worse: the held-out loss is 6.3")
    assert "gets worse: the held-out loss is 6.3" in capsys.readouterr().out


def test_the_time_left_foresees_longer_sequences(monkeypatch) -> None:
    config = Config()
    config.train.max_steps = 100
    config.train.phases = [PhaseConfig(steps=0.9), PhaseConfig(steps=0.1, max_seq_length=512)]
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(describe.time, "perf_counter", lambda: now.value)
    left = TimeLeft(phases_of(config), start=40, began=0.0)
    now.value = 10.0  # for 10 steps of 128
    assert left.seconds(50) == pytest.approx(40 + 4 * 10)
    now.value = 10 + 40 + 20  # in the middle of the second phase
    assert left.seconds(95) == pytest.approx(70 * 20 / 70)
    assert left.seconds(100) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0, "0 s"), (0.26, "0.3 s"), (119, "119 s"), (120, "2 min"), (600, "10 min")),
        *((9000, "2.5 h"), (4e5, "4.6 days"), (1e8, "1,157 days")),
    ],
)
def test_a_duration_is_told_in_the_largest_unit_of_which_it_is_two(seconds, said) -> None:
    assert say_duration(seconds) == said


def test_what_is_written_is_json_even_where_a_number_is_not_finite() -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf")], "c": ({"d": -float("inf")},), "e": "NaN"}

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(to_json(value), parse_constant=refuse)
    assert found == {"a": None, "b": [1.5, None], "c": [{"d": None}], "e": "NaN"}
