"""Fine-tuning learns what a word decides, judges it as others do, and says what is wrong where."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import finetune
import finetune_metrics as ours
import finetune_train
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from finetune_data import Example, list_unread, read_examples
from finetune_tasks import TASKS, Unit
from finetune_train import (
    Recipe,
    Run,
    Split,
    build_network,
    make_batch,
    shuffled_batches,
    sorted_batches,
)
from finetune_train import finetune as train
from finetune_words import fit_words, vectorize
from helpers import ROOT, write_tasks
from sklearn import metrics as peer
from sklearn.linear_model import LogisticRegression
from tokenizers.processors import RobertaProcessing
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file
from data_pipeline.config import VocabConfig
from data_pipeline.sampling.vocabulary import Vocabulary
from data_pipeline.vocabulary.training import write_tokenizer
from pretrain.config import ModelConfig
from pretrain.export import export
from pretrain.models.bert import PretrainingModel
from pretrain.read_export import check_ids

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QUICK = "--seeds 0 --learning-rates 3e-3 --epochs 10 --batch-size 16 --dropout 0 --precision fp32"
FILES = {  # task -> the files of its data set
    "classification": "reviews/{}.tsv",
    "multi_label": "topics/{}.jsonl",
    "regression": "similarity/{}.csv",
    "tagging": "ner/{}.conll",
    "qa": "qa/{}.json",
    "choice": "choice/{}.jsonl",
}

SQUAD = (  # of a passage and an answer
    '{"data": [{"paragraphs": [{"context": %s, "qas": [{"question": "x", "answers": [{"text": %s}]}'
    "]}]}]}"
)


def write_export(vocab_dir: Path, pieces: int, out: Path, scale: float = 1.0, **sizes) -> Path:
    """Export a model with random weights; `scale` makes its matrices larger."""
    torch.manual_seed(0)
    model = PretrainingModel(ModelConfig(**TINY | {"max_position_embeddings": 64} | sizes), pieces)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    origin = {"step": 8, "vocab_sha256": "ab", "data_sha256": "cd"}
    export(model.eval(), vocab_dir, out, "", origin)
    return out


@pytest.fixture(scope="module")
def exported(prepared: Path, vocabulary: Vocabulary, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finetune") / "export"
    return write_export(prepared / "data/vocab", len(vocabulary), out, scale=2)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A small data set for each task; not to be written to."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


def run(monkeypatch, model: Path, task: str, tasks: Path, out: Path, options: str = QUICK) -> dict:
    """Run the script here on the data set of a task; what it wrote."""
    files = [
        part for s in ("train", "dev", "test") for part in (f"--{s}", tasks / FILES[task].format(s))
    ]
    arguments = ["--model", model, "--task", task, *files, "--out", out, *options.split()]
    monkeypatch.setattr(sys, "argv", ["finetune", *map(str, arguments)])
    finetune.main()
    return json.loads((out / "results.json").read_text())


# --- what is learned ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "metric", "least"),
    [
        ("classification", "accuracy", 0.9),
        ("multi_label", "micro_f1", 0.75),
        ("regression", "pearson", 0.8),
        ("tagging", "f1", 0.9),
        ("qa", "exact_match", 0.9),
        ("choice", "accuracy", 0.8),
    ],
)
def test_each_task_learns_what_a_word_decides(
    task, metric, least, exported, tasks, tmp_path, monkeypatch
) -> None:
    found = run(monkeypatch, exported, task, tasks, tmp_path / "out")
    assert found["settings"]["metric"] == TASKS[task].metrics[0]
    assert found["systems"]["pretrained"]["test"][metric]["mean"] >= least


@pytest.mark.parametrize("task", FILES)
def test_a_frozen_model_is_probed_for_each_task(
    task, exported, tasks, tmp_path, monkeypatch
) -> None:
    options = "--freeze --precision fp32" + ("" if TASKS[task].per_token else " --pool mean")
    found = run(monkeypatch, exported, task, tasks, tmp_path / "out", options)["systems"]
    system = found["pretrained"]
    assert system["setting"] == "penalty" and len(system["runs"]) == len(finetune.PENALTIES)
    metric = TASKS[task].metrics[0]
    chance = {"choice": 0.34, "regression": 0.0, "tagging": 0.0, "qa": 0.2}.get(task, 0.5)
    assert system["test"][metric]["mean"] > chance + 0.15


@pytest.mark.parametrize("pool", ["pooler", "cls", "mean", "last4"])
def test_what_a_sentence_is_judged_by_is_what_its_name_says(
    pool, exported, tasks, tmp_path
) -> None:
    """Against the states of the encoder, one sentence at a time, without padding."""
    examples = read_examples(tasks / "pairs/dev.tsv", "classification", {})[:5]
    task, tokenizer = TASKS["classification"](examples), AutoTokenizer.from_pretrained(exported)
    units = task.encode(examples, tokenizer, 64)
    if pool == "last4":  # of five
        config = AutoConfig.from_pretrained(exported, num_hidden_layers=5)
        exported = shutil.copytree(exported, tmp_path / "five", ignore=lambda *_: ["export.json"])
        AutoModel.from_config(config).save_pretrained(exported)
    network = build_network(exported, False, task, pool, 0.0, 0).eval()
    encoder = AutoModel.from_pretrained(exported).eval()
    with torch.no_grad():
        found = network.states(make_batch(units, torch.device("cpu")))
        for row, example in zip(found, examples, strict=True):
            one = encoder(
                **tokenizer(*example.texts, return_tensors="pt"), output_hidden_states=True
            )
            wanted = {
                "pooler": one.pooler_output[0],
                "cls": one.last_hidden_state[0, 0],
                "mean": one.last_hidden_state[0].mean(0),
                "last4": torch.stack(one.hidden_states[2:]).mean(0)[0].mean(0),
            }[pool]
            torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)


def test_random_weights_and_a_bag_of_words_stand_beside_the_model(
    exported, tasks, tmp_path, monkeypatch, capsys
) -> None:
    begun = {}

    def note(model: Path, is_random: bool, *others):
        network = build_network(model, is_random, *others)
        begun[is_random] = network.encoder.embeddings.word_embeddings.weight.clone()
        return network

    monkeypatch.setattr(finetune, "build_network", note)
    found = run(
        monkeypatch,
        exported,
        "classification",
        tasks,
        tmp_path / "out",
        f"{QUICK} --also random bow",
    )["systems"]
    assert not torch.equal(begun[False], begun[True])
    options = f"{QUICK} --init random --baseline bow"
    others = run(monkeypatch, exported, "classification", tasks, tmp_path / "others", options)
    assert list(others["systems"])[:2] == ["random", "bow"]
    assert others["systems"]["random"]["dev"] == found["random"]["dev"]
    assert list(found)[:3] == ["pretrained", "random", "bow"] and list(found)[3].startswith(
        "always"
    )
    assert found["bow"]["test"]["accuracy"]["mean"] == 1.0  # one word decides
    table = capsys.readouterr().out.splitlines()
    for title in ("pretrained ", "random weights ", "bag of words ", "always "):
        assert [line for line in table if line.startswith(title) and "0." in line]
    start = table.index("bag of words: dev accuracy by C, a column per seed")
    assert "(epoch" in table[start - 1] and "(epoch" not in "".join(table[start : start + 5])


def test_a_bag_of_words_bears_a_draw_of_one_label() -> None:
    for task, labels in (
        ("classification", ["1"] * 3 + ["0"]),
        ("multi_label", [["1"]] * 3 + [["0"]]),
        ("multi_label", [["1"]] * 3 + [[]]),
    ):
        examples = [Example("", [f"film {label}"], label) for label in labels]
        seen = examples[:3]
        found = fit_words(TASKS[task](examples), seen, vectorize(seen, [seen]), 1.0, [seen])
        assert found.dev[0][TASKS[task].metrics[0]] == 1


def test_a_bag_of_words_knows_its_training_texts_only_and_heeds_its_strength() -> None:
    train = [Example("", ["a", text], label) for text, label in zip("bbbc", "xxxy", strict=True)]
    others = [[Example("", ["strange", "words"], "x")]]
    assert vectorize(train, others)[0].shape == vectorize(train, [])[0].shape
    task, matrices = TASKS["classification"](train), vectorize(train, [train])
    accuracies = [
        fit_words(task, train, matrices, strength, [train]).dev[0]["accuracy"]
        for strength in (1e-4, 100.0)
    ]
    assert accuracies == [0.75, 1.0]  # the second sentences tell the labels


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("multi_label", '{"text": "x", "labels": []}', "holds no label"),
        ("regression", '{"text": "x", "label": 2.5}', "holds one number only"),
        ("classification", '{"text": "x", "label": "a"}', "holds one label only"),
        ("tagging", '{"tokens": ["x", "y"], "tags": ["-", "-"]}', "holds one label only"),
    ],
)
def test_training_data_that_teach_nothing_are_refused(
    task, line, message, exported, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(FILES, task, "{}.jsonl")
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match=f"train.jsonl {message}"):
        run(monkeypatch, exported, task, tmp_path, tmp_path / "out", QUICK)


def test_a_rate_at_which_a_run_diverges_is_never_chosen(
    exported, tasks, tmp_path, monkeypatch, capsys
) -> None:
    options = QUICK.replace("3e-3", "1e30 1e-30").replace("--epochs 10", "--epochs 1")
    # the sound one is worse than the same answer for all, which the scores of the other come to
    monkeypatch.setattr(finetune.TASKS["classification"], "score", lambda _, examples, found: {
        "accuracy": float(len({*found}) == 1), "macro_f1": 0.0, "matthews": 0.0,
    })  # fmt: skip
    found = run(monkeypatch, exported, "classification", tasks, tmp_path, options)
    assert found["systems"]["pretrained"]["chosen"] == 1e-30
    assert [r["has_diverged"] for r in found["systems"]["pretrained"]["runs"]] == [True, False]
    assert "(epoch 1, diverged)" in capsys.readouterr().out


def test_random_weights_differ_by_seed_and_are_not_those_of_the_export(exported, tasks) -> None:
    task = TASKS["classification"](read_examples(tasks / "reviews/train.tsv", "classification", {}))
    networks = [
        build_network(exported, is_random, task, "cls", None, seed)
        for is_random, seed in ((False, 0), (False, 1), (True, 0), (True, 1))
    ]
    encoders = [n.encoder.encoder.layer[0].attention.self.query.weight for n in networks]
    heads = [n.head.weight for n in networks]
    assert torch.equal(encoders[0], encoders[1])
    assert not torch.equal(encoders[0], encoders[2]) and not torch.equal(encoders[2], encoders[3])
    assert torch.equal(heads[0], heads[2]) and not torch.equal(heads[0], heads[1])
    again = build_network(exported, True, task, "cls", None, 1)
    assert torch.equal(again.encoder.encoder.layer[0].attention.self.query.weight, encoders[3])


def test_dropout_of_the_config_can_be_replaced(exported, tasks) -> None:
    task = TASKS["tagging"](read_examples(tasks / "ner/dev.conll", "tagging", {}))
    network = build_network(exported, False, task, "cls", 0.25, 0)
    rates = {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.25}


def test_dropout_of_the_config_is_applied_before_the_head(exported, tasks, tmp_path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"classifier_dropout": 0.4}
    (folder / "config.json").write_text(json.dumps(config))
    examples = read_examples(tasks / "reviews/dev.tsv", "classification", {})
    task = TASKS["classification"](examples)
    rates = [build_network(folder, False, task, "cls", d, 0).dropout.p for d in (None, 0.2)]
    assert rates == [0.4, 0.2]
    network = build_network(folder, False, task, "cls", None, 0)
    units = task.encode(examples[:1], AutoTokenizer.from_pretrained(folder), 64)
    batch = make_batch(units, torch.device("cpu"))
    network.states = lambda batch: torch.ones(50, 32)  # without the dropout of the encoder
    assert network.train()(batch).std(0).min() > 0 == network.eval()(batch).std(0).max()


def test_the_head_of_an_albert_has_the_dropout_of_its_config(tasks, tmp_path) -> None:
    sizes = {"embedding_size": 8, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 9}
    model = AlbertModel(AlbertConfig(**sizes, intermediate_size=32, classifier_dropout_prob=0.3))
    model.save_pretrained(tmp_path)
    task = TASKS["classification"](read_examples(tasks / "reviews/dev.tsv", "classification", {}))
    assert build_network(tmp_path, False, task, "cls", None, 0).dropout.p == 0.3


def test_two_segments_are_one_where_the_model_has_one_type_of_token(tasks, tmp_path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    RobertaModel(RobertaConfig(**sizes, type_vocab_size=1)).save_pretrained(tmp_path)
    task = TASKS["classification"](read_examples(tasks / "reviews/dev.tsv", "classification", {}))
    network = build_network(tmp_path, False, task, "cls", 0.0, 0)
    found = []
    for types in ([0, 0, 0, 0], [0, 0, 1, 1]):
        unit = finetune.Unit(0, [([5, 6, 7, 8], types)], 0)
        found.append(network(finetune_train.make_batch([unit], torch.device("cpu"))))
    assert torch.equal(*found)


def test_batches_hold_every_unit_once_and_similar_lengths() -> None:
    rng = np.random.default_rng(0)
    texts = [Example("", ["a " * int(n)], "x") for n in rng.integers(1, 60, 500)]
    units = [finetune.Unit(i, [([5] * len(e.texts[0]), [])], 0) for i, e in enumerate(texts)]
    first, second = (shuffled_batches(units, 16, 0, epoch) for epoch in (0, 1))
    for batches in (first, second):
        assert sorted(unit.example for batch in batches for unit in batch) == list(range(500))
        padded = sum(len(b) * max(unit.length for unit in b) for b in batches)
        assert padded < 1.1 * sum(unit.length for unit in units)
    assert {u.example for u in first[0]} != {u.example for u in second[0]}


# --- the results ----------------------------------------------------------------------------------


def test_results_are_complete_and_the_same_for_the_same_seeds(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    options = "--seeds 0 1 --learning-rates 1e-4 1e-2 --epochs 2 --dropout 0.1 --max-train 64"
    found = [
        run(monkeypatch, exported, "classification", tasks, tmp_path / name, options)
        for name in ("a", "b")
    ]
    for results in found:
        assert results.pop("seconds") > 0
        results["settings"].pop("out")
        for one in results["systems"]["pretrained"]["runs"]:
            assert one.pop("seconds") > 0
    assert found[0] == found[1]
    results = found[0]
    assert {"settings", "model", "data", "systems", "versions", "machine"} == results.keys()
    files = ("model.safetensors", "tokenizer.json")
    hashes = {name: hash_file(exported / name) for name in files}
    assert results["model"]["step"] == 8 and results["model"]["sha256"] == hashes
    assert {"torch", "transformers", "python", "project"} <= results["versions"].keys()
    assert results["data"]["train"]["examples"] == 160
    runs = results["systems"]["pretrained"]["runs"]
    assert {(r["learning_rate"], r["seed"]) for r in runs} == {
        (rate, seed) for rate in (1e-4, 1e-2) for seed in (0, 1)
    }
    assert all(len(r["dev"]) == 2 and r["dev"][0].keys() == r["dev"][1].keys() for r in runs)


def test_the_rate_is_chosen_on_dev_and_the_epoch_is_the_best_one(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    options = "--seeds 0 1 --learning-rates 1e-6 1e-2 --epochs 4 --dropout 0 --precision fp32"
    system = run(monkeypatch, exported, "classification", tasks, tmp_path, options)["systems"][
        "pretrained"
    ]
    best = {}
    for one in system["runs"]:
        scores = [epoch["accuracy"] for epoch in one["dev"]]
        assert one["best_epoch"] == 1 + scores.index(max(scores))
        best.setdefault(one["learning_rate"], []).append(max(scores))
    assert system["chosen"] == max(best, key=lambda rate: sum(best[rate])) == 1e-2
    assert system["dev"]["accuracy"]["values"] == best[1e-2]
    mean = sum(best[1e-2]) / 2
    assert math.isclose(system["dev"]["accuracy"]["mean"], mean)
    assert math.isclose(system["dev"]["accuracy"]["std"], np.std(best[1e-2], ddof=1), abs_tol=1e-12)
    assert len(system["test"]["accuracy"]["values"]) == 2


class OneWeight(torch.nn.Module):
    """Scores every sequence with its only weight, and notes each time whether it is training."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, batch) -> torch.Tensor:
        self.seen.append((self.training, self.weight.item()))
        return self.weight.expand(len(batch.ids), 1)


class Scripted(TASKS["choice"]):
    """Wants higher scores, by losses of any size, and says of each epoch what it is told to."""

    def __init__(self, scores: list[dict[str, float]]):
        self.sizes, self.scores = iter([1.0, 1e6, 3.0, 1e3] * 8), iter(scores)

    def loss(self, scores, units):
        return -next(self.sizes) * scores.mean()

    def predict(self, scores, units, examples):
        return [float(score) for score in scores]

    def score(self, examples, predictions):
        return next(self.scores)


def test_the_weights_of_the_best_epoch_predict_and_the_rate_rises_and_falls() -> None:
    """The steps of AdamW are as long as the rate if all gradients are, as they are when cut to
    one norm."""
    examples = [Example("", ["x"], 0)] * 10
    units = [finetune.Unit(i, [([5], [0])], 0) for i in range(10)]
    split = Split(examples, units, sorted_batches(units, 16, torch.device("cpu")))
    dev = [{"f1": f1, "accuracy": other} for f1, other in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.7))]
    network = OneWeight()
    recipe = Recipe(0.1, 4, 4, 2, 0.1, "accuracy", False)
    run = train(network, Scripted(dev), recipe, 0, units, split, split, lambda count: None)
    assert run.dev == dev and run.best == 1
    training, weights = zip(*network.seen, strict=True)
    assert training == (*([True] * 5 + [False]) * 4, False)  # five steps in each of four epochs
    assert run.test == [weights[11]] * 10 and weights[11] != weights[23]
    steps = np.diff([w for w, is_step in zip(weights, training, strict=True) if is_step])
    shares = [1 / 2, *(k / 19 for k in range(19, 1, -1))]  # a tenth of 20 steps rises
    np.testing.assert_allclose(steps, 0.1 * np.array(shares), rtol=1e-3)


class Still(OneWeight):
    """Has weights beside it that no gradient moves."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(2, 2))
        self.vector = torch.nn.Parameter(torch.ones(2))

    def forward(self, batch) -> torch.Tensor:
        return super().forward(batch) + 0 * (self.matrix.sum() + self.vector.sum())


def test_matrices_decay_with_the_rate_and_vectors_do_not() -> None:
    units = [finetune.Unit(i, [([5], [0])], 0) for i in range(10)]
    split = Split([Example("", ["x"], 0)] * 10, units)
    network, task = Still(), Scripted([{"accuracy": 0.5}])
    recipe = Recipe(0.1, 1, 1, 2, 0.0, "accuracy", False)
    train(network, task, recipe, 0, units, split, None, lambda count: None)
    rates = [0.1 * share for share in (1, 4 / 5, 3 / 5, 2 / 5, 1 / 5)]
    wanted = torch.full((2, 2), math.prod(1 - 0.01 * rate for rate in rates))
    torch.testing.assert_close(network.matrix.detach(), wanted)
    assert torch.equal(network.vector.detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("patience", "epochs", "best"), [(1, 2, 0), (2, 5, 2), (3, 6, 2), (4, 6, 2)]
)
def test_training_ends_after_as_many_worse_epochs_as_patience_says(patience, epochs, best) -> None:
    examples = [Example("", ["x"], 0)] * 10
    units = [finetune.Unit(i, [([5], [0])], 0) for i in range(10)]
    split = Split(examples, units, sorted_batches(units, 16, torch.device("cpu")))
    dev = [{"accuracy": score} for score in (0.6, 0.5, 0.7, 0.7, 0.6, 0.5)]
    told = []
    recipe = Recipe(0.1, 6, patience, 2, 0.1, "accuracy", False)
    run = train(OneWeight(), Scripted(dev), recipe, 0, units, split, None, told.append)
    assert (len(run.dev), run.best) == (epochs, best)
    assert sum(told) == 6 * 10  # the progress bar is full


def test_the_metric_that_is_asked_for_chooses_the_setting_that_is_judged_on_test() -> None:
    examples = [Example("", ["x"], label) for label in "aabb"]
    task = TASKS["classification"](examples)
    splits = {name: Split(examples, []) for name in ("train", "dev", "test")}

    def judged(matthews: float, found: str) -> Run:
        epochs = [{"accuracy": 1 - matthews, "matthews": x} for x in (0, matthews)]
        return Run(epochs, 1, list(found))

    # of the first seed alone the other one is better
    runs = {(1e-3, 0): judged(0.1, "aaaa"), (1e-2, 0): judged(0.4, "bbbb")}
    runs |= {(1e-3, 1): judged(0.5, "aabb"), (1e-2, 1): judged(0.1, "bbbb")}
    for metric, chosen, values in (("matthews", 1e-3, [0.5, 1]), ("accuracy", 1e-2, [0.5, 0.5])):
        system = finetune.summarize("learning_rate", runs, metric, task, splits)
        assert system["chosen"] == chosen and system["test"]["accuracy"]["values"] == values


def test_every_seed_trains_network_and_bag_of_words_on_examples_of_its_own(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    seen, words = [], []

    def note(network, task, recipe, seed, units, dev, test, advance) -> Run:
        seen.append([unit.example for unit in units])
        return Run([dict.fromkeys(task.metrics, 1.0)], 0, task.labels[:1] * len(test.examples))

    def note_words(train, others) -> list:
        words.append([example.texts for example in train])
        return vectorize(train, others)

    monkeypatch.setattr(finetune, "finetune", note)
    monkeypatch.setattr(finetune, "vectorize", note_words)
    options = "--seeds 0 1 --learning-rates 1e-3 --max-train 8 --also bow"
    run(monkeypatch, exported, "classification", tasks, tmp_path, options)
    train = read_examples(tasks / "reviews/train.tsv", "classification", {})
    assert [len(set(chosen)) for chosen in seen] == [8, 8] and seen[0] != seen[1]
    assert words == [[train[i].texts for i in chosen] for chosen in seen]


def test_a_question_without_an_answer_in_its_passage_is_not_trained_on(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    shutil.copytree(tasks / "qa", tmp_path / "qa")
    path = tmp_path / "qa/train.json"
    found = json.loads(path.read_text())
    questions = found["data"][0]["paragraphs"]
    questions[0]["qas"][0]["answers"] = [{"text": "nowhere", "answer_start": 0}]
    path.write_text(json.dumps(found))
    seen = []

    def note(network, task, recipe, seed, units, dev, test, advance) -> Run:
        seen.extend(unit.example for unit in units)
        return Run([dict.fromkeys(task.metrics, 1.0)], 0, [""] * len(test.examples))

    monkeypatch.setattr(finetune, "finetune", note)
    run(monkeypatch, exported, "qa", tmp_path, tmp_path / "out")
    assert sorted(seen) == list(range(1, len(questions)))


def test_a_frozen_head_sees_standardized_states_and_shrinks_with_its_penalty(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    sizes, fit = [], finetune.fit_head

    def note(network, task, batches, *rest) -> Run:
        states = torch.cat([batch.states for batch in batches])
        states = (states - network.mean) / network.scale
        torch.testing.assert_close(states.mean(0), torch.zeros(32), atol=1e-3, rtol=0)
        torch.testing.assert_close(states.std(0, correction=0), torch.ones(32), atol=1e-3, rtol=0)
        found = fit(network, task, batches, *rest)
        sizes.append(network.head.weight.norm().item())
        return found

    monkeypatch.setattr(finetune, "fit_head", note)
    options = "--freeze --pool mean --precision fp32"
    run(monkeypatch, exported, "classification", tasks, tmp_path, options)
    assert len(sizes) == len(finetune.PENALTIES) and sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2


def kept(states: torch.Tensor, lengths: list[int]) -> finetune_train.Batch:
    """A batch of kept states of sequences with these lengths."""
    mask = torch.arange(states.shape[1]) < torch.tensor(lengths)[:, None]
    return finetune_train.Batch([], mask.long(), mask.long(), mask, states)


def test_each_word_counts_as_much_whatever_batch_it_is_in(exported, tasks) -> None:
    examples = read_examples(tasks / FILES["tagging"].format("dev"), "tagging", {})[:40]
    examples += [replace(e, texts=5 * e.texts, label=5 * e.label) for e in examples[:8]]
    task = TASKS["tagging"](examples)
    units = task.encode(examples, AutoTokenizer.from_pretrained(exported), 64)
    weights = []
    for size in (1, 64):
        network = build_network(exported, False, task, "cls", 0.0, 0)
        batches = sorted_batches(units, size, torch.device("cpu"))
        finetune_train.keep_states(network, batches, False, int)
        split = Split(examples, units, batches)
        finetune_train.fit_head(network, task, batches, split, None, 0.1)
        weights.append(network.head.weight.detach())
    torch.testing.assert_close(*weights, atol=1e-3, rtol=0)


def test_a_frozen_encoder_has_no_dropout_even_if_its_weights_are_random(exported, tasks) -> None:
    examples = read_examples(tasks / FILES["classification"].format("dev"), "classification", {})
    task = TASKS["classification"](examples)
    units = task.encode(examples, AutoTokenizer.from_pretrained(exported), 64)
    found = []
    for dropout in (0.0, 0.5):
        network = build_network(exported, True, task, "mean", dropout, 0)
        batches = sorted_batches(units, 64, torch.device("cpu"))
        finetune_train.keep_states(network, batches, False, int)
        found.append(batches[0].states)
    assert torch.equal(*found)


def test_padding_is_in_no_mean_of_frozen_states() -> None:
    torch.manual_seed(0)
    batches = [kept(torch.randn(2, n, 4) * 3 + 1, [n, n - 3]) for n in (8, 16)]
    found = [row[:n] for b in batches for row, n in zip(b.states, b.mask.sum(1), strict=True)]
    network = SimpleNamespace(mean=torch.zeros(4), scale=torch.ones(4))
    finetune_train.standardize(network, batches)
    torch.testing.assert_close(network.mean, torch.cat(found).mean(0))
    torch.testing.assert_close(network.scale, torch.cat(found).std(0, correction=0))


def test_a_frozen_head_is_the_logistic_regression_of_scikit_learn() -> None:
    torch.manual_seed(0)
    states, penalty = torch.randn(35, 4), 0.05
    labels = ((states[:, 0] + torch.randn(35)) > 0).long() + (states[:, 1] > 0.5).long()
    examples = [Example("", ["x"], str(label)) for label in labels.tolist()]
    task = TASKS["classification"](examples)
    units = [Unit(i, [([0], [0])], int(label)) for i, label in enumerate(labels.tolist())]
    encoder = torch.nn.Module()
    encoder.config = SimpleNamespace(hidden_size=4)
    network = finetune_train.Network(encoder, task, "cls", 0.0)
    batches = sorted_batches(units, 16, torch.device("cpu"))  # the last has three
    for i, batch in enumerate(batches):
        batch.states = states[16 * i : 16 * i + 16]
    finetune_train.fit_head(network, task, batches, Split(examples, units, batches), None, penalty)
    regression = LogisticRegression(C=1 / (35 * penalty), tol=1e-8, max_iter=1000)
    regression.fit(states.numpy(), labels.numpy())
    found = network.head.weight.detach().numpy()
    np.testing.assert_allclose(found, regression.coef_, atol=1e-3)


def test_the_table_shows_the_mean_over_the_seeds(capsys) -> None:
    scores = finetune.spread([{"f1": 0.25}, {"f1": 0.75}])
    system = {"setting": "learning_rate", "chosen": 1e-3, "dev": scores, "test": scores}
    finetune.print_table({"pretrained": system}, "f1", ["dev"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("0.001  0.500 +- 0.354")


# --- metrics --------------------------------------------------------------------------------------


def test_label_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    wanted, found = (list("abcd"[i] for i in rng.integers(0, high, 60)) for high in (4, 3))
    scores = ours.label_scores(wanted, found)
    assert math.isclose(scores["accuracy"], peer.accuracy_score(wanted, found))
    assert math.isclose(scores["macro_f1"], peer.f1_score(wanted, found, average="macro"))
    assert math.isclose(scores["matthews"], peer.matthews_corrcoef(wanted, found))
    assert ours.label_scores(["a", "b"], ["a", "a"])["matthews"] == 0.0


def test_label_set_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    wanted, found = rng.random((2, 50, 4)) < 0.4
    names = [[["abcd"[i] for i in np.flatnonzero(row)] for row in side] for side in (wanted, found)]
    scores = ours.label_set_scores(*names)
    assert math.isclose(scores["micro_f1"], peer.f1_score(wanted, found, average="micro"))
    assert math.isclose(scores["macro_f1"], peer.f1_score(wanted, found, average="macro"))
    assert math.isclose(scores["exact_match"], peer.accuracy_score(wanted, found))


def test_number_scores_are_those_of_scipy_and_scikit_learn() -> None:
    from scipy import stats

    rng = np.random.default_rng(2)
    wanted = rng.integers(0, 6, 40).astype(float)  # with ties
    found = wanted + rng.normal(size=40).round()
    scores = ours.number_scores(wanted, found)
    assert math.isclose(scores["pearson"], stats.pearsonr(wanted, found).statistic)
    assert math.isclose(scores["spearman"], stats.spearmanr(wanted, found).statistic)
    assert math.isclose(scores["r2"], peer.r2_score(wanted, found))
    assert ours.number_scores([1, 2], [3, 3])["pearson"] == 0.0
    # seven times 0.1 has a mean that is not 0.1, and seven times 0.7 one that is not 0.7
    assert set(ours.number_scores([0.1] * 7, [0.7] * 7).values()) == {0.0}


def test_a_model_that_has_diverged_scores_no_better_than_one_that_says_0() -> None:
    """A NaN would be chosen: nothing compares as more."""
    found = ours.number_scores([1, 2, 4], [math.nan, math.inf, -math.inf])
    assert found == ours.number_scores([1, 2, 4], [0, 0, 0])
    assert found["pearson"] == found["spearman"] == 0 > found["r2"]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-PER I-PER O B-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),  # IOB2
        ("B-PER B-PER I-PER", {(0, 1, "PER"), (1, 3, "PER")}),  # side by side
        ("B-ORG M-ORG E-ORG S-PER O", {(0, 3, "ORG"), (3, 4, "PER")}),  # BMES, BMEOS
        ("B-ORG I-ORG L-ORG U-PER", {(0, 3, "ORG"), (3, 4, "PER")}),  # BILOU
        ("O I-PER I-PER I-LOC", {(1, 3, "PER"), (3, 4, "LOC")}),  # I begins one where none is
        ("B-PER I-LOC", {(0, 1, "PER"), (1, 2, "LOC")}),
        ("B-A E-A E-A", {(0, 2, "A"), (2, 3, "A")}),
        ("B M E S", {(0, 3, ""), (3, 4, "")}),  # words of a segmentation
        ("DT NN", {(0, 1, "DT"), (1, 2, "NN")}),  # parts of speech
        ("B-x-y I-x-y O", {(0, 2, "x-y")}),
        ("B_PER I_PER O", {(0, 2, "PER")}),
        ("RD S E B", {(0, 1, "RD"), (1, 2, "S"), (2, 3, "E"), (3, 4, "B")}),  # parts of speech
        ("person person O art", {(0, 2, "person"), (3, 4, "art")}),  # IO
        ("O O", set()),
    ],
)
def test_entities_are_found_in_every_scheme(tags, spans) -> None:
    assert ours.find_spans(tags.split()) == spans


def test_entity_scores_are_worked_by_hand() -> None:
    wanted = ["B-PER I-PER O B-LOC".split(), "O B-ORG".split()]
    found = ["B-PER I-PER O B-ORG".split(), "O O".split()]
    scores = ours.span_scores(wanted, found)  # one right of three wanted and of two found
    assert scores == {"f1": 2 / 5, "precision": 1 / 2, "recall": 1 / 3, "accuracy": 4 / 6}
    assert ours.span_scores([["O"]], [["O"]])["f1"] == 0.0  # as conlleval has it


def test_answers_are_scored_by_the_rules_of_squad() -> None:
    wanted = [["the Eiffel Tower", "Eiffel tower, Paris"], ["42"], ["a red car"]]
    scores = ours.answer_scores(wanted, ["Eiffel Tower!", "43", "red  cars"], chinese=False)
    assert math.isclose(scores["exact_match"], 1 / 3)
    assert math.isclose(scores["f1"], (1 + 0 + 2 * 1 / (2 + 2)) / 3)


def test_chinese_answers_are_scored_by_the_rules_of_cmrc() -> None:
    wanted = [["光荣和ω-force"], ["北京大学"], ["《三国》"]]
    assert ours.is_chinese([a for answers in wanted for a in answers])
    scores = ours.answer_scores(wanted, ["光荣和ω-force。", "大学北京", "三国演义"], chinese=True)
    # 大学 and 北京 are both common, and the longest common run has two of four characters
    assert math.isclose(scores["f1"], (1 + 2 * 2 / 8 + 2 * 2 / 6) / 3)
    assert math.isclose(scores["exact_match"], 1 / 3)


def test_answers_are_scored_by_the_language_of_the_questions_that_are_judged() -> None:
    task = TASKS["qa"]([Example("", ["who?", "the Eiffel Tower"], [("Eiffel", 4)])])
    chinese = [Example("", ["谁？", "北京大学"], [("北京大学", 0)])]
    assert task.score(chinese, ["北京大"])["f1"] == 2 * 3 / 7
    assert task.score(task.training, ["the Eiffel!"])["f1"] == 1.0


def test_three_dots_in_one_are_no_mark_that_the_script_of_cmrc_leaves_out() -> None:
    scores = ours.answer_scores([["北京"]], ["北…京"], chinese=True)
    assert scores == {"f1": 2 / 5, "exact_match": 0.0}


def test_a_number_with_a_separator_is_one_piece_as_in_the_script_of_cmrc() -> None:
    """The figures are those of the published script with the tokenizer of nltk."""
    for wanted, found, f1 in [
        ("24,672人", "4,672人，其中白人", 0.25),
        (
            "RbCl为双原子分子，键长约2.7868 Å",
            "l为双原子分子，键长约2.7868 Å。呈立方晶系",
            0.7586206896551724,
        ),
        ("NaBO.10HO", "O.10HO，是非常重要的含", 0.0),
        ("20℃", "20", 0.0),
        ("20℃左右", "20左右", 2 / 3),
        ("50％", "50", 0.0),
        ("50%", "50", 2 / 3),
        ("£5", "5", 0.0),
        ("$5", "5", 2 / 3),
    ]:
        assert math.isclose(ours.cmrc_f1(wanted, found), f1)


# --- encoding -------------------------------------------------------------------------------------


def test_a_tag_belongs_to_the_first_piece_of_its_word(exported) -> None:
    words, tags = ["Python", "unbelievablenesses", "is"], ["B-X", "O", "I-Y"]
    task, tokenizer = (
        TASKS["tagging"]([Example("", words, tags)]),
        AutoTokenizer.from_pretrained(exported),
    )
    (unit,) = task.encode(task.training, tokenizer, 64)
    positions, which, labels = unit.target
    pieces = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    assert len(pieces[1]) > 1
    starts = [1, 1 + len(pieces[0]), 1 + len(pieces[0]) + len(pieces[1])]
    assert positions == starts and which == [0, 1, 2]
    assert [task.labels[i] for i in labels] == tags


def test_words_that_are_cut_or_have_no_piece_count_as_wrong(exported) -> None:
    words = ["is", "\u200d", *["of"] * 40]
    task = TASKS["tagging"]([Example("", words, ["B-X"] * len(words))])
    units = task.encode(task.training, AutoTokenizer.from_pretrained(exported), 16)
    found = task.predict([torch.ones(16, 1)], units, task.training)
    assert found[0][0] == "B-X" and found[0][1] == "O" and found[0][-1] == "O"
    assert len(found[0]) == len(words)


def test_a_window_has_two_types_and_the_first_answer_and_dev_does_not_say_how_long_one_is(
    exported,
) -> None:
    texts = ["what?", "Python is a list"]
    task = TASKS["qa"]([Example("", texts, [("list", 12), ("Python", 0)])])
    tokenizer = AutoTokenizer.from_pretrained(exported)
    (unit,) = task.encode(task.training, tokenizer, 64)
    ((ids, types),), (first, offsets) = unit.sequences, unit.window
    assert types == [0] * first + [1] * (len(ids) - first)
    assert offsets[unit.target[0] - first][0] == 12
    longest = task.longest
    task.encode([Example("", texts, [(texts[1], 0)])], tokenizer, 64)
    assert task.longest == longest


@pytest.mark.parametrize("has_two_separators", [False, True])
def test_a_short_passage_is_encoded_as_the_tokenizer_encodes_a_pair(
    has_two_separators: bool, exported
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    if has_two_separators:
        separator, start = (("[SEP]", tokenizer.sep_token_id), ("[CLS]", tokenizer.cls_token_id))
        inner = tokenizer.backend_tokenizer
        inner.post_processor = RobertaProcessing(separator, start)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    question, passage = "Where is it?", "It is in Python now."
    task = TASKS["qa"]([Example("", [question, passage], [("Python", 9)])])
    (unit,) = task.encode(task.training, tokenizer, 64)
    ((ids, _),) = unit.sequences
    assert ids == tokenizer(question, passage)["input_ids"]
    separators = ids.count(ids[-1])
    assert separators == 2 + has_two_separators
    first, last = unit.target
    assert tokenizer.decode(ids[first : last + 1]).replace(" ##", "") == "python"


def test_a_batch_without_any_piece_has_no_loss(exported) -> None:
    task = TASKS["tagging"]([Example("", ["\u200d"], ["O"]), Example("", [], [])])
    units = task.encode(task.training, AutoTokenizer.from_pretrained(exported), 16)
    scores = torch.zeros(2, 2, 1, requires_grad=True)
    loss = task.loss(scores, units)
    loss.backward()
    assert loss == 0 and not scores.grad.any()


def test_every_window_shows_part_of_the_passage_and_one_holds_the_answer(exported) -> None:
    passage = " ".join(["of"] * 70 + ["Python"] + ["is"] * 70)
    example = Example("", ["what is it?", passage], [("Python", 210)])
    task, tokenizer = TASKS["qa"]([example]), AutoTokenizer.from_pretrained(exported)
    units = task.encode([example], tokenizer, 64)
    assert len(units) > 3 and max(unit.length for unit in units) == 64
    seen = [offset for unit in units for offset in unit.window[1]]
    assert set(seen) == set(
        tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    )
    inside = [unit for unit in units if unit.target != (0, 0)]
    assert inside
    for unit in inside:
        start, end = unit.target
        first, offsets = unit.window
        assert passage[offsets[start - first][0] : offsets[end - first][1]] == "Python"
        scores = torch.zeros(unit.length, 2)
        scores[start, 0] = scores[end, 1] = 1.0
        task.longest = end - start + 1
        assert task.predict([scores], [unit], [example]) == ["Python"]


def test_an_answer_that_is_elsewhere_is_found_and_one_that_is_nowhere_is_scored(exported) -> None:
    passage = "Python is a list of Python"
    examples = [
        Example("", ["what?", passage], answers)
        for answers in ([("Python", 19)], [("Python", -1)], [("nothing", 3)], [("list", None)])
    ]
    task, tokenizer = TASKS["qa"](examples), AutoTokenizer.from_pretrained(exported)
    units = task.encode(examples, tokenizer, 64)
    spans = []
    for unit in units:
        first, offsets = unit.window
        found = unit.target and [offsets[unit.target[i] - first][i] for i in (0, 1)]
        spans.append(found and passage[slice(*found)] + str(found[0]))
    assert spans == ["Python20", "Python0", None, "list12"]
    assert task.score(examples, ["Python", "x", "nothing", "list"])["exact_match"] == 0.75


# --- formats and errors ---------------------------------------------------------------------------


def test_columns_are_found_by_name_or_named(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text('label\tsentence\n1\ta "quoted\u2028 text\n')
    (tmp_path / "b.csv").write_text('\ufeffstars,body\r\n2,"two\r\nlines, and ""quotes"""\r\n')
    (tmp_path / "d.csv").write_text("text,label\na\u2028b,3\n")
    (tmp_path / "e.csv").write_text('\ufefftext;label;n\r\n"a; b, c";4;1,5\r\n')
    (tmp_path / "c.jsonl").write_text('{"premise": "x", "hypothesis": "y", "label": 0}\n')
    columns = {"text": "body", "label": "stars"}
    found = [
        *read_examples(tmp_path / "a.tsv", "classification", {}),
        *read_examples(tmp_path / "b.csv", "classification", columns),
        *read_examples(tmp_path / "c.jsonl", "classification", {}),
        *read_examples(tmp_path / "d.csv", "classification", {}),
        *read_examples(tmp_path / "e.csv", "classification", {}),
    ]
    assert [e.label for e in found] == ["1", "2", "0", "3", "4"]
    texts = [['a "quoted\u2028 text'], ['two\nlines, and "quotes"'], ["x", "y"], ["a\u2028b"]]
    texts.append(["a; b, c"])
    assert [e.texts for e in found] == texts


def test_a_second_text_is_not_left_out_unseen(tmp_path) -> None:
    """The names of the QNLI set in GLUE: both are those of a first text."""
    path = tmp_path / "a.tsv"
    path.write_text("question\tsentence\tlabel\nWho?\tBob did.\tentailment\n")
    with pytest.raises(UserError, match=r"a.tsv:2: sentence and question may each be .* for text"):
        read_examples(path, "classification", {})
    for columns in ({"text": "question", "second": "sentence"}, {"second": "sentence"}):
        found = read_examples(path, "classification", columns)
        assert [e.texts for e in found] == [["Who?", "Bob did."]]
    found = read_examples(path, "classification", {"text": "sentence"})
    assert [e.texts for e in found] == [["Bob did."]]


def test_columns_that_are_not_read_are_listed(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "x", "text_pair": "y", "label": 0, "id": 3}\n')
    assert list_unread(tmp_path / "a.jsonl", "classification", {}) == ["text_pair", "id"]
    columns = {"second": "text_pair"}
    assert list_unread(tmp_path / "a.jsonl", "classification", columns) == ["id"]
    (tmp_path / "a.csv").write_text("sent1,ending0,ending1,label\nx,y,z,1\n")
    assert list_unread(tmp_path / "a.csv", "choice", {"context": "sent1"}) == []
    assert list_unread(tmp_path / "a.csv", "tagging", {}) == []


def test_a_pair_whose_label_is_a_dash_has_none(tmp_path, capsys) -> None:
    """As in SNLI and OCNLI, where annotators did not agree; a sentiment may be - or +."""
    (tmp_path / "a.tsv").write_text("premise\thypothesis\tlabel\nx\ty\t-\nx\tz\tneutral\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\t-\ny\t+\n")
    found = read_examples(tmp_path / "a.tsv", "classification", {})
    assert [e.label for e in found] == ["neutral"]
    assert "a.tsv: 1 pairs are left out, whose label is '-'" in capsys.readouterr().out
    found = read_examples(tmp_path / "b.tsv", "classification", {})
    assert [e.label for e in found] == ["-", "+"]


def test_a_label_that_may_be_none_is_told(tmp_path, capsys) -> None:
    """-1, which `datasets` has for the pairs of SNLI without a label."""
    rows = [{"premise": "a", "hypothesis": "b", "label": label} for label in (-1, 0, 1)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert len(read_examples(tmp_path / "a.json", "classification", {})) == 3
    assert "a.json: 1 examples have the label -1, which counts" in capsys.readouterr().out


def test_one_number_for_all_of_a_file_is_refused(exported, tmp_path, monkeypatch) -> None:
    """-1, which the test set of STS-B has: no prediction correlates with it."""
    for part in ("train", "dev", "test"):
        labels = ("-1", "-1") if part == "test" else ("1", "2")
        rows = [f'{{"text": "x", "label": {label}}}\n' for label in labels]
        (tmp_path / f"{part}.jsonl").write_text("".join(rows))
    monkeypatch.setitem(FILES, "regression", "{}.jsonl")
    with pytest.raises(UserError, match="test.jsonl holds one number only; wanted two or more"):
        run(monkeypatch, exported, "regression", tmp_path, tmp_path / "out", QUICK)


def test_a_header_above_numbered_columns_is_no_example(tmp_path) -> None:
    rows, columns = ["1,x", "2,y", "1,z", "2,x"], {"text": "2", "label": "1"}
    (tmp_path / "a.csv").write_text("\n".join(["Class Index,Body", *rows]))
    with pytest.raises(UserError, match=r"a.csv:1: no other line has the label 'Class Index'"):
        read_examples(tmp_path / "a.csv", "classification", columns)
    (tmp_path / "a.csv").write_text("\n".join(["3,u", "4,v", *rows]))  # rare labels, both of them
    assert len(read_examples(tmp_path / "a.csv", "classification", columns)) == 6


def test_several_labels_are_a_list_in_a_cell_or_a_column_each(tmp_path) -> None:
    lists = """text,label\nu,"['cs.LG', 'stat.ML']"\nv,[]\nw,"x, y"\n"""
    (tmp_path / "a.csv").write_text(lists)
    found = read_examples(tmp_path / "a.csv", "multi_label", {})
    assert [e.label for e in found] == [["cs.LG", "stat.ML"], [], ["x", "y"]]
    (tmp_path / "b.csv").write_text("text,toxic,threat\nu,1,0\nv,0,0\nw,1,1.0\n")
    columns = {"label": "toxic,threat"}
    found = read_examples(tmp_path / "b.csv", "multi_label", columns)
    assert [e.label for e in found] == [["toxic"], [], ["toxic", "threat"]]
    (tmp_path / "b.csv").write_text("text,toxic,threat\nu,1,often\n")
    with pytest.raises(UserError, match=r"b.csv:2: threat is 'often'; wanted 0 or 1"):
        read_examples(tmp_path / "b.csv", "multi_label", columns)
    with pytest.raises(UserError, match=r"b.csv:2: no column rude, for label"):
        read_examples(tmp_path / "b.csv", "multi_label", {"label": "toxic,rude"})
    (tmp_path / "a.csv").write_text("text,label\nu,[2 14]\n")  # of numpy
    with pytest.raises(UserError, match=r"a.csv:2: label is '\[2 14\]'; wanted the names"):
        read_examples(tmp_path / "a.csv", "multi_label", {})


def test_choices_are_a_list_or_a_column_each_and_their_label_may_be_a_letter(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("context,ending0,ending1,ending2,label\nx,a,b,c,2\n")
    (tmp_path / "d.tsv").write_text("x\ta\tb\t0\n")
    (tmp_path / "b.jsonl").write_text(
        '{"premise": "x", "choice1": "a", "choice2": "b", "question": "cause", "label": 0}\n'
    )
    (tmp_path / "c.json").write_text(
        '[{"context": "x",\n "options": ["a", "b", "c"], "answer": "B"}]'
    )
    for name, columns, texts, label in [
        ("a.csv", {}, ["x", "a", "b", "c"], 2),
        ("d.tsv", {"context": "1", "choices": "3,2", "label": "4"}, ["x", "b", "a"], 0),
        ("b.jsonl", {"context": "premise"}, ["x", "a", "b"], 0),
        ("c.json", {"label": "answer"}, ["x", "a", "b", "c"], 1),
    ]:
        (found,) = read_examples(tmp_path / name, "choice", columns)
        assert (found.texts, found.label) == (texts, label)
    with pytest.raises(UserError, match=r"label is '2'; wanted 0 to 1, or A to B"):
        read_examples(tmp_path / "a.csv", "choice", {"choices": "ending2,ending0"})


def test_a_question_and_its_passage_are_one_context(tmp_path) -> None:
    """As in RACE, COPA and Cosmos QA; the passage is last, since a long text is cut at its end."""
    row = {"context": "It rained.", "question": "Why?", "answer0": "a", "answer1": "b", "label": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"as in --columns context=question,context for both"):
        read_examples(tmp_path / "a.jsonl", "choice", {})
    columns = {"context": "question,context"}
    (found,) = read_examples(tmp_path / "a.jsonl", "choice", columns)
    assert (found.texts, found.label) == (["Why? It rained.", "a", "b"], 1)
    assert not list_unread(tmp_path / "a.jsonl", "choice", columns)
    with pytest.raises(UserError, match=r"no column passage, for context"):
        read_examples(tmp_path / "a.jsonl", "choice", {"context": "question,passage"})
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"question": None}))
    with pytest.raises(UserError, match=r"wanted a text under each of question, context"):
        read_examples(tmp_path / "a.jsonl", "choice", columns)


def test_conll_has_blank_lines_between_sentences(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("\n常\tB-NAME\n建\tI-NAME\n\n\nEU B-ORG\n \nof\tO\n\t\n")
    found = read_examples(tmp_path / "a.conll", "tagging", {})
    assert [(e.texts, e.label) for e in found] == [
        (["常", "建"], ["B-NAME", "I-NAME"]),
        (["EU"], ["B-ORG"]),
        (["of"], ["O"]),
    ]
    assert [e.place for e in found] == [f"{tmp_path / 'a.conll'}:{line}" for line in (2, 6, 8)]


def test_notes_and_beginnings_of_documents_are_no_words(tmp_path) -> None:
    text = (
        "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\n\n# id 5 domain=en\n# text = It is .\n# NN O O\n"
    )
    (tmp_path / "eng.train").write_text(text)
    found = read_examples(tmp_path / "eng.train", "tagging", {})
    assert [(e.texts, e.label) for e in found] == [(["EU"], ["B-ORG"]), (["#"], ["O"])]
    assert [e.place.rpartition(":")[2] for e in found] == ["3", "7"]


def test_notes_of_other_widths_are_no_words(tmp_path) -> None:
    """As in GermEval, KLUE and CoNLL-2012; `#` is a word of its own, too."""
    text = "#\thttp://x.org [2009]\n1\t#\tO\tO\n2\tAal\tB-X\tO\n3\tist\tO\tO\n\n#\tu\n1\tv\tO\tO\n"
    (tmp_path / "a.tsv").write_text(text)
    found = read_examples(tmp_path / "a.tsv", "tagging", {"tokens": "2", "tags": "3"})
    assert [e.texts for e in found] == [["#", "Aal", "ist"], ["v"]]
    head = "## tokens, labels : \\t\n## columns : CHAR\tNE_TAG\n## train_00\tx y\n"
    (tmp_path / "b.tsv").write_text(f"{head}x\tO\ny\tB-Z\n\n#\tO\nx\tO\n")
    found = read_examples(tmp_path / "b.tsv", "tagging", {})
    assert [e.texts for e in found] == [["x", "y"], ["#", "x"]]
    (tmp_path / "c.conll").write_text("#begin document (x); part 000\nx - O\n\n#end document\n")
    assert [e.texts for e in read_examples(tmp_path / "c.conll", "tagging", {})] == [["x"]]


def test_conll_u_has_ranges_and_empty_nodes_which_are_no_words(tmp_path) -> None:
    rows = [(1, "de", "ADP"), (2, "le", "DET"), ("3.1", "gone", "VERB"), (3, "x", "NOUN")]
    lines = [f"{number}\t{word}\t_\t{tag}\t_" for number, word, tag in [("1-2", "du", "_"), *rows]]
    text = "# newdoc\n# newpar\n# text = du x\n" + "\n".join(lines) + "\n\n"
    (tmp_path / "a.conllu").write_text(text)
    found = read_examples(tmp_path / "a.conllu", "tagging", {})
    assert [(e.texts, e.label) for e in found] == [(["de", "le", "x"], ["ADP", "DET", "NOUN"])]


def test_a_word_may_hold_or_be_another_space_than_a_blank(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("10\u00a0000  B-X\n\u3000 O\n", encoding="utf-8")
    (found,) = read_examples(tmp_path / "a.conll", "tagging", {})
    assert (found.texts, found.label) == (["10\u00a0000", "\u3000"], ["B-X", "O"])


def test_no_label_of_several_is_none_of_them(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "label": null}\n{"text": "b", "label": ["x"]}\n'
    )
    found = read_examples(tmp_path / "a.jsonl", "multi_label", {})
    assert [example.label for example in found] == [[], ["x"]]


def test_an_answer_without_text_is_none(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text(SQUAD % ('"a b"', '"b"'))
    (found,) = read_examples(path, "qa", {})
    assert found.label == [("b", None)]
    path.write_text(SQUAD % ('"a b"', '" "'))
    with pytest.raises(UserError, match="holds no examples"):
        read_examples(path, "qa", {})


ROW = '{"id": "7", "question": "x", "context": "a b", "answers": {"text": %s, "answer_start": %s}}'


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json"])
def test_questions_may_be_rows_as_datasets_writes_them(name, tmp_path, capsys) -> None:
    rows = [ROW % ('["b", "a"]', "[2, 0]"), ROW % ("[]", "[]"), ROW % ('["b"]', "null")]
    text = f"[{', '.join(rows)}]" if name == "array.json" else "\n".join(rows) + "\n"
    (tmp_path / name).write_text(text)
    found = read_examples(tmp_path / name, "qa", {})
    assert [one.texts for one in found] == [["x", "a b"]] * 2
    assert [one.label for one in found] == [[("b", 2), ("a", 0)], [("b", None)]]
    assert "1 questions without an answer are left out" in capsys.readouterr().out


def write_table(path: Path, features: Features, rows: list[dict]) -> Path:
    """Write rows as `datasets` does, with the names of classes beside their numbers."""
    dataset = Dataset.from_list(rows, features=features)
    if path.suffix == ".parquet":
        dataset.to_parquet(path)
        return path
    dataset.save_to_disk(path.parent / "saved")
    return (path.parent / "saved/data-00000-of-00001.arrow").rename(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_of_datasets_is_read_with_the_names_of_its_tags(name, tmp_path, capsys) -> None:
    text = Value("string")
    tags = List(ClassLabel(names=["O", "B-PER"]))
    features = Features(tokens=List(text), ner_tags=tags, sentence=text, id=Value("int32"))
    features["label"] = ClassLabel(names=["bad", "good"])
    row = {"tokens": ["x", "Ann"], "ner_tags": [0, 1], "sentence": "x Ann", "id": 7, "label": 1}
    path = write_table(tmp_path / name, features, [row, row])
    found = read_examples(path, "tagging", {})
    assert [(one.texts, one.label) for one in found] == [(["x", "Ann"], ["O", "B-PER"])] * 2
    assert [one.place for one in found] == [f"{path}: row 1", f"{path}: row 2"]
    found = read_examples(path, "classification", {})
    assert [(one.texts, one.label) for one in found] == [(["x Ann"], "1")] * 2
    assert list_unread(path, "classification", {}) == ["tokens", "ner_tags", "id"]

    answers = {"text": List(text), "answer_start": List(Value("int32"))}
    features = Features(question=text, context=text, answers=answers)
    row = {"question": "x", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}
    (tmp_path / "qa").mkdir()
    none = row | {"answers": {"text": [], "answer_start": []}}
    (found,) = read_examples(write_table(tmp_path / "qa" / name, features, [row, none]), "qa", {})
    assert (found.texts, found.label) == (["x", "a b"], [("b", 2)])
    assert "1 questions without an answer are left out" in capsys.readouterr().out


def test_a_tag_without_a_name_in_a_table_is_named(tmp_path) -> None:
    features = Features(tokens=List(Value("string")), ner_tags=List(ClassLabel(names=["O"])))
    rows = [{"tokens": ["x", "y"], "ner_tags": tags} for tags in ([0, 0], [0, -1])]
    path = write_table(tmp_path / "a.parquet", features, rows)
    with pytest.raises(
        UserError, match=r"a.parquet: row 2: tags is \['O', -1\], not a list of tex"
    ):
        read_examples(path, "tagging", {})


@pytest.mark.parametrize(
    ("task", "name", "text", "columns", "wanted"),
    [
        ("classification", "a.tsv", "gj04\t0\t*\tX y.\ngj04\t1\t\tZ.\n",
         {"text": "4", "label": "2"}, [(["X y."], "0"), (["Z."], "1")]),
        ("classification", "a.csv", '"3","a ""b""","c"\n"4","d","e\nf"\n',
         {"text": "2", "second": "3", "label": "1"},
         [(['a "b"', "c"], "3"), (["d", "e\nf"], "4")]),
        ("classification", "a.json", '{"sentence": "x", "label": "1 "}\n', {}, [(["x"], "1")]),
        ("classification", "a.JSONL",
         '{"text": "x", "label": 1}\n{"text": "y", "label": 1.0}\n{"text": "z", "label": 0.5}\n',
         {}, [(["x"], "1"), (["y"], "1"), (["z"], "0.5")]),
        ("tagging", "a.conllu",
         "# sent_id = 3\n# a free comment\n1\tDogs\tdog\tNOUN\t_\n2\tbark\tbark\tVERB\t_\n",
         {"tokens": "2", "tags": "4"}, [(["Dogs", "bark"], ["NOUN", "VERB"])]),
    ],
)  # fmt: skip
def test_columns_without_names_are_counted(task, name, text, columns, wanted, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    found = read_examples(tmp_path / name, task, columns)
    assert [(e.texts, e.label) for e in found] == wanted


@pytest.mark.parametrize(
    ("task", "name", "text", "columns", "said"),
    [
        ("tagging", "a.conll", "x O\n", {"tags": "ner"}, "tags=ner: .* give a number, from 1"),
        ("tagging", "a.conll", "x O\n", {"tags": "3"}, "a.conll:1: wanted"),
        (
            "tagging",
            "a.conll",
            "x O\n",
            {"text": "1"},
            "text=1: words and their tags",
        ),
        ("qa", "a.json", SQUAD % ('"x"', '"x"'), {"text": "q"}, "which has no columns"),
        ("classification", "a.tsv", "x\t1\n", {"text": "3", "label": "2"}, r"a.tsv:1: no column"),
        (
            "classification",
            "a.csv",
            "Text,Label\nx,1\n",
            {"text": "1", "label": "2"},
            r"a.csv:1 names columns \(label, text\), and --columns gives their numbers",
        ),
        (
            "classification",
            "a.csv",
            "review,sentiment\nx,1\n",
            {"text": "1", "label": "2"},
            r"a.csv:1 names columns \(review, sentiment\)",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused(task, name, text, columns, said, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_examples(tmp_path / name, task, columns)


@pytest.mark.parametrize(
    ("task", "name", "text", "said"),
    [
        ("classification", "a.tsv", "sentence\tlabel\nx\t1\ny\n", r"a.tsv:3 has 1 columns, .* 2"),
        ("classification", "a.tsv", "body\tlabel\nx\t1\n", r"a.tsv:2: no column for text.*--col"),
        ("classification", "a.tsv", "sentence\tlabel\nx\t\n", r"a.tsv:2 has no label"),
        ("classification", "a.tsv", "sentence\tlabel\nx\t \n", r"a.tsv:2 has no label"),
        ("classification", "a.tsv", "x\t1\n", r"holds no examples"),
        ("classification", "a.tsv", "x\t1\ny\t0\n", r"a.tsv:2: no column for text.*, as in text=1"),
        ("choice", "a.csv", "context,ending0,ending1\n", r"holds no examples"),
        ("choice", "a.csv", "context,options,label\nx,y,0\n", r"a.csv:2: choices is 'y', not a l"),
        ("choice", "a.tsv", "context\tlabel\nx\t0\n", r"a.tsv:2: no column for choices"),
        ("classification", "a.json", '[{"text": "x"}]', r"a.json: item 1: no col.*ns label=NAME$"),
        ("classification", "a.json", '[["x"]]', r"a.json: item 1 is not a JSON object"),
        ("classification", "a.csv", "u\tv\nx\t1\n", r"a.csv:1 has tabs.* to .tsv"),
        ("classification", "a.tsv", "sentence\tlabel\n", r"holds no examples"),
        ("classification", "a.txt", "x", r"unknown format '.txt'; rename it to one of .tsv"),
        ("classification", "a.xlsx", "x", r"unknown format '.xlsx'; convert it to one of .tsv"),
        ("classification", "a.parquet", "x", r"a.parquet cannot be read as .parquet: .*; downl"),
        ("tagging", "a.arrow", "x", r"a.arrow cannot be read as .arrow: .*; download it again"),
        ("qa", "a.parquet", "x", r"a.parquet cannot be read as .parquet: .*; download it again"),
        ("classification", "a.csv", 'sentence,label\nx,1\n"y,1\n', r"a.csv:\d+ is not CSV"),
        ("classification", "a.jsonl", '{"text": "x"}\n', r"a.jsonl:1: no column for label"),
        ("classification", "a.jsonl", '{"text": 3, "label": 1}\n', r"a.jsonl:1: text is 3, not a"),
        ("classification", "a.jsonl", "1\n", r"a.jsonl:1 is not a JSON object"),
        ("classification", "a.jsonl", "\n{\n", r"a.jsonl:2 is not JSON.*; wanted an object on eac"),
        ("classification", "a.csv", '"sentence,label\nx,1\n', r"a.csv:\d+ is not CSV"),
        ("classification", "a.jsonl", "[" * 100_000, r"a.jsonl is not JSON: .* too deep"),
        ("classification", "a.jsonl", '{"text": "\\ud83d"}', r"1 is not JSON: .* an unpaired"),
        ("classification", "a.tsv", "text\tlabel\ttext\na\t1\tb\n", r"names 'text' twice; rename"),
        ("classification", "a.csv", "text,label,text\na,1,b\n", r"first line names 'text' twice"),
        ("classification", "a.jsonl", '{"text": "x", "label": NaN}', r"label is nan, not a name"),
        ("classification", "a.jsonl", '{"text": "x", "label": ["y"]}', r"label is \['y'\], not"),
        ("multi_label", "a.jsonl", '{"text": "x", "label": [1, 0, 0]}', r"\[1, 0, 0\]; .*once"),
        ("multi_label", "a.jsonl", '{"text": "x", "label": ["y", null]}', r"; wanted the names"),
        ("regression", "a.jsonl", f'{{"text": "x", "label": {"9" * 400}}}', r":1: label is 9999"),
        ("regression", "a.tsv", "sentence\tlabel\nx\tnan\n", r"a.tsv:2: label is 'nan', not"),
        ("multi_label", "a.jsonl", '{"text": "x", "label": {"y": 1}}', r"; wanted the names"),
        ("multi_label", "a.jsonl", '{"text": "x", "label": true}', r"label is True; wanted the n"),
        ("tagging", "a.tsv", "word\ttag\nx\tO\n", r"a.tsv:1 names columns; wanted a word and"),
        ("tagging", "a.tsv", "Token\tNER\nx\tO\n", r"a.tsv:1 names columns; wanted a word and"),
        ("tagging", "a.tsv", "sentence\tlabel\nx\t1\n", r"a.tsv:1 names columns; wanted a word"),
        ("tagging", "a.conll", "x\tO\ny\n", r"a.conll:2: wanted a word, a tab and a tag"),
        ("tagging", "a.conll", "x\tO\ny\t\n", r"a.conll:2: wanted a word, a tab and a tag"),
        ("tagging", "a.jsonl", '{"tokens": ["x"], "tags": [3]}', r"1: tags are numbers; wanted"),
        ("tagging", "a.jsonl", '{"tokens": ["x"], "tags": []}', r"a.jsonl:1: 1 words and 0 tags"),
        ("tagging", "a.jsonl", '{"tokens": [], "tags": []}', r"a.jsonl holds no examples"),
        ("tagging", "a.tsv", "1\tx\n2\ty\n3\tz\n", r"a.tsv:1: the words are num.* 1 to 3"),
        ("tagging", "a.txt", "We/p go/v\n\nI/p see/v x/n\n\nA/p b/v\n", r"a.txt:3 has 3 columns"),
        ("tagging", "a.bio", "O\tby\nB-X\tfar\n", r"a.bio: the words are tags, such as 'B-X'; na"),
        ("choice", "a.jsonl", '{"context": "x", "choices": ["y", "z"], "label": 2}', r"label is 2"),
        ("qa", "a.json", '{"data": [{"paragraphs": [{"qas": [{"question": 1}]}]}]}', r"SQuAD's"),
        ("choice", "a.jsonl", f'{{"context": "x", "choices": ["y", "z"], "label": "{"1" * 5000}"}}',
         r"a.jsonl:1: label is '1"),
        ("qa", "a.json", SQUAD % ('"x"', "3"), r"SQuAD.*answers\[0\].text is 3"),
        ("qa", "a.json", SQUAD % ("{}", '"y"'), r"SQuAD.*context is {}"),
        ("qa", "a.json", "[" * 100_000, r"a.json is not JSON: .* too deep"),
        ("qa", "a.json", '{"data":\n', r"a.json is not JSON.*line 2"),
        ("qa", "a.json", ROW % ("[]", "[]") + "\n{\n", r"a.json:2 is not JSON"),
        ("qa", "a.jsonl", ROW % ('["b"]', "[2, 0]"), r"a.jsonl:1: answers holds 1 text and 2 answ"),
        ("qa", "a.jsonl", ROW % ('"b"', "[2]"), r"a.jsonl:1 is not.*form: answers.text is 'b'; w"),
        ("qa", "a.jsonl", '{"text": "x"}', r"a.jsonl:1 is not in SQuAD's form: question is null"),
    ],
)  # fmt: skip
def test_an_error_names_file_and_line(task, name, text, said, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_examples(tmp_path / name, task, {})


@pytest.mark.parametrize("task", ["classification", "tagging", "qa"])
def test_a_folder_of_examples_is_no_file_of_them(task, tmp_path) -> None:
    """Such as the two of IMDb's reviews."""
    (tmp_path / "pos").mkdir()
    with pytest.raises(UserError, match="is a folder; give a file"):
        read_examples(tmp_path, task, {})


def test_bytes_that_are_not_utf8_are_found(tmp_path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"sentence\tlabel\nx\t1\n\xff\t1\n")
    with pytest.raises(UserError, match=r"a.tsv:3 is not UTF-8"):
        read_examples(tmp_path / "a.tsv", "classification", {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--max-length 65", "wanted 16 to 64"),
        ("--metric bleu", "accuracy, macro_f1, matthews"),
        ("--columns text", "wanted WHAT=NAME"),
        ("--columns text=a text=b", "--columns names one thing twice"),
        ("--seeds 1 1", "--seeds holds a number twice"),
        ("--learning-rates 1e-3 0.001", "--learning-rates holds a number twice"),
        ("--seeds -1", "--seeds -1: wanted 0 or more"),
        (f"--seeds 0 {1 << 64}", f"--seeds {1 << 64}: wanted .* less than"),
        ("--learning-rates 1e-3 nan", "--learning-rates nan: wanted finite numbers above 0"),
        ("--learning-rates inf", "--learning-rates inf: wanted finite numbers above 0"),
        ("--epochs 0", "wanted 1 or more"),
        ("--patience 0", "wanted 1 or more"),
        ("--pool last4", "has 2 layers; use --pool mean"),
        ("--model nowhere", "no exported model in nowhere; .*; download a model from a hub into"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    options, said, exported, tasks, tmp_path, monkeypatch
) -> None:
    with pytest.raises(UserError, match=said):
        run(monkeypatch, exported, "classification", tasks, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_model_without_its_tokenizer_is_told_which_file_is_missing(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    ignored = shutil.ignore_patterns("tokenizer*")
    folder = shutil.copytree(exported, tmp_path / "bare", ignore=ignored)
    with pytest.raises(UserError, match="bare has no tokenizer.json; .* such as vocab.txt"):
        run(monkeypatch, folder, "classification", tasks, tmp_path / "out")


def test_a_pool_is_refused_where_tokens_are_judged(exported, tasks, tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="--pool cls: tagging judges each token by its own state"):
        run(monkeypatch, exported, "tagging", tasks, tmp_path / "out", "--pool cls")


def test_a_second_sentence_in_some_examples_only_is_named_by_line(
    exported, tmp_path, monkeypatch
) -> None:
    (tmp_path / "topics").mkdir()
    rows = ['{"text": "x", "label": "a"}', '{"text": "y", "text2": "z", "label": "a"}']
    for part, order in (("train", rows), ("dev", rows[:1]), ("test", rows[:1])):
        (tmp_path / f"topics/{part}.jsonl").write_text("\n".join(order) + "\n")
    said = "train.jsonl:1 has no second sentence, and .*train.jsonl:2 has one; name its column"
    with pytest.raises(UserError, match=said):
        run(monkeypatch, exported, "multi_label", tmp_path, tmp_path / "out")
    (tmp_path / "topics/train.jsonl").write_text(rows[1])
    with pytest.raises(UserError, match=r"dev.jsonl:1 has no .*train.jsonl:1 has one"):
        run(monkeypatch, exported, "multi_label", tmp_path, tmp_path / "out")


def test_what_would_fail_after_the_training_fails_before(
    exported, tasks, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(finetune, "judge_network", None)  # which nothing reaches
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="--out .*file is a file; name a folder"):
        run(monkeypatch, exported, "classification", tasks, tmp_path / "file")
    monkeypatch.setattr(finetune, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--also bow needs scikit-learn"):
        run(monkeypatch, exported, "classification", tasks, tmp_path / "out", "--also bow")


def test_a_model_of_any_number_of_positions_is_judged(
    prepared, vocabulary, tasks, tmp_path, monkeypatch
) -> None:
    sizes = {"max_position_embeddings": 30}
    model = write_export(prepared / "data/vocab", len(vocabulary), tmp_path / "model", **sizes)
    texts = [f"sentence\tlabel\n{'the ' * 40}\t{label}\n" for label in (0, 1)]
    shutil.copytree(tasks, tmp_path / "tasks")
    (tmp_path / "tasks/reviews/dev.tsv").write_text(texts[0] + texts[1].partition("\n")[2])
    options = "--seeds 0 --learning-rates 1e-3 --epochs 1 --max-train 10_000"
    found = run(monkeypatch, model, "classification", tmp_path / "tasks", tmp_path / "o", options)
    assert found["settings"]["max_length"] == 24 and found["settings"]["max_train"] is None


def test_a_token_without_an_embedding_is_named(exported, tasks, tmp_path, monkeypatch) -> None:
    shutil.copytree(exported, tmp_path / "model")
    path = tmp_path / "model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sep_token": "<new>"}))
    with pytest.raises(UserError, match=r"gives '<new>' the id [\d,]+, but the model has .* embed"):
        run(monkeypatch, tmp_path / "model", "classification", tasks, tmp_path / "out")


def test_a_model_that_does_not_say_how_many_embeddings_it_has_is_believed(
    exported, tmp_path
) -> None:
    settings = json.loads((exported / "config.json").read_text())
    del settings["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check_ids(AutoTokenizer.from_pretrained(exported), [[5, 10**6]], tmp_path)


def test_an_unknown_label_is_one_line(exported, tasks, tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nx\t7\n")
    command = [sys.executable, ROOT / "scripts/finetune.py", "--model", exported, "--task"]
    command += ["classification", "--train", tasks / "reviews/train.tsv", "--out", tmp_path]
    done = subprocess.run(
        [*command, "--dev", tmp_path / "dev.tsv"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: \S+/dev.tsv:2: label '7' is not .*: 0, 1\n", done.stderr)


def test_earlier_results_are_not_replaced(exported, tasks, tmp_path, monkeypatch) -> None:
    (tmp_path / "results.json").write_text("mine")
    with pytest.raises(UserError, match="results.json is there already"):
        run(monkeypatch, exported, "classification", tasks, tmp_path)
    assert (tmp_path / "results.json").read_text() == "mine"


# --- the plain way --------------------------------------------------------------------------------


def test_the_plain_transformers_code_of_the_page_learns_from_chinese_reviews(tmp_path) -> None:
    """Reviews of a few characters, of which one decides."""
    others = "房间服务早餐酒店前台床电视很都也了的是在"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*others, "好", "差"})]
    pieces += [f"[unused{i}]" for i in range(64 - len(pieces))]
    write_tokenizer(tmp_path / "vocab", pieces, VocabConfig())
    write_export(tmp_path / "vocab", 64, tmp_path / "exported", scale=5, hidden_size=128)
    rng = np.random.default_rng(0)
    rows = ["sentence\tlabel"]
    for i in range(2400):
        text = "".join(rng.permutation([*rng.choice([*others], 4), "差好"[i % 2]]))
        rows.append(f"{text}\t{i % 2}")
    (tmp_path / "reviews.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    page = (ROOT / "docs/finetuning.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(x) for x in re.findall(r"accuracy (\d\.\d+)", done.stdout)]
    print(accuracies)
    assert len(accuracies) == 3 and accuracies[-1] > 0.9


def test_an_answer_is_the_best_span_of_all_windows_forwards_and_as_long_as_in_training() -> None:
    passage, offsets = "one two three", [(0, 3), (4, 7), (8, 13)]
    example = Example("", ["?", passage], [("two", 4)])
    task = TASKS["qa"]([example])
    task.longest = 2
    windows = [(1, offsets[:2]), (1, offsets[1:])]
    units = [finetune.Unit(0, [([5] * 4, [0] * 4)], (0, 0), window) for window in windows]
    low, high = torch.zeros(2, 4, 2)
    high[1, 0] = high[2, 1] = 3.0  # both of its tokens
    assert task.predict([high, low], units, [example]) == ["one two"]
    assert task.predict([low, high], units, [example]) == ["two three"]
    low[2, 0] = low[1, 1] = 9.0  # backwards
    low[1, 0] = 2.0
    assert task.predict([low], units[:1], [example]) == ["one"]
    whole = finetune.Unit(0, [([5] * 5, [0] * 5)], (0, 0), (1, offsets))
    scores = torch.zeros(5, 2)
    scores[1, 0] = scores[3, 1] = 5.0  # three tokens
    scores[2, 1] = 1.0
    assert task.predict([scores], [whole], [example]) == ["one two"]


def test_a_window_with_a_part_of_the_answer_is_trained_to_have_none(exported) -> None:
    passage = " ".join(["of"] * 300)
    example = Example("", ["what?", passage], [(passage[:240], 0)])
    task, tokenizer = TASKS["qa"]([example]), AutoTokenizer.from_pretrained(exported)
    units = task.encode([example], tokenizer, 64)
    found = [unit.target for unit in units]
    assert found == [(0, 0)] * len(units) and len(units) > 4  # 80 tokens do not fit a window


def test_padding_of_a_batch_is_in_no_loss() -> None:
    """That of sequences in QA, and of choices where their numbers differ."""
    torch.manual_seed(0)
    example = Example("", ["?", "a b"], [("a", 0)])
    units = [finetune.Unit(0, [([5] * n, [0] * n)], (1, 2)) for n in (9, 4)]
    scores, task = torch.randn(2, 9, 2), TASKS["qa"]([example])
    alone = [task.loss(scores[i : i + 1, :n], units[i : i + 1]) for i, n in enumerate((9, 4))]
    torch.testing.assert_close(task.loss(scores, units), sum(alone) / 2)

    units = [finetune.Unit(0, [([5], [0])] * n, 1) for n in (2, 5)]
    scores, task = torch.randn(7, 1), TASKS["choice"]([Example("", ["x", "y", "z"], 1)])
    alone = [task.loss(scores[:2], units[:1]), task.loss(scores[2:], units[1:])]
    torch.testing.assert_close(task.loss(scores, units), sum(alone) / 2)


def test_predictions_are_in_the_unit_of_the_labels_and_the_baseline_is_the_majority() -> None:
    examples = [Example("", ["x"], number) for number in (100.0, 104.0, 120.0)]
    task = TASKS["regression"](examples)
    scores = [torch.tensor([[task.target(example)]]) for example in examples]
    assert task.predict(scores, [], examples) == pytest.approx([100, 104, 120])
    assert task.score(examples, task.predict(scores, [], examples))["r2"] == pytest.approx(1)
    labels = [Example("", ["x"], label) for label in "abbbc"]
    assert TASKS["classification"](labels).baseline() == ("always 'b'", "b")
    choices = [Example("", ["x", "y", "z"], label) for label in (0, 1, 1)]
    assert TASKS["choice"](choices).baseline() == ("always choice 1", 1)


def test_words_that_come_twice_articles_and_case_count_as_in_the_published_scripts() -> None:
    assert math.isclose(ours.squad_f1("to be or not to be", "to be to"), 2 * 3 / (6 + 3))
    found = ours.answer_scores([["an apple"], ["The end"]], ["apple", "END"], chinese=False)
    assert found == {"f1": 1.0, "exact_match": 1.0}
    assert ours.answer_scores([["NBA球队"]], ["nba球队"], chinese=True)["exact_match"] == 1
    # a common run has no gap: 北京 or 大学, and not the four that both have in this order
    assert math.isclose(ours.cmrc_f1("北京的大学", "北京和大学"), 2 * 2 / 10)


def test_tags_that_training_lacks_are_told(exported, tasks, tmp_path, monkeypatch, capsys) -> None:
    other = shutil.copytree(tasks, tmp_path / "tasks")
    path = other / "ner/dev.conll"
    path.write_text(re.sub(r"\t(B|I)-\S+", "\tB-NEW", path.read_text()))
    found = run(monkeypatch, exported, "tagging", other, tmp_path / "out", QUICK)
    assert found["systems"]["pretrained"]["dev"]["f1"]["mean"] == 0
    said = capsys.readouterr().out
    assert re.search(r"note: \d+ words have tags that \S+train.conll lacks \(B-NEW\): all", said)
    assert said.count("note: ") == 1


def test_what_counts_as_an_entity_is_told(exported, tmp_path, monkeypatch, capsys) -> None:
    """Tags such as PER-B are in no scheme: each is a type of its own, which F1 would not show."""
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.conll").write_text("A\tB-PER\nB\tI-PER\nran\tO\n")
    (tmp_path / "dev.conll").write_text("A\tPER-B\nB\tPER-I\nran\tO\n")
    monkeypatch.setitem(FILES, "tagging", "{}.conll")
    run(monkeypatch, exported, "tagging", tmp_path, tmp_path / "out", QUICK)
    said = capsys.readouterr().out
    assert "train: 1 entities of 1 types (PER)" in said
    assert "dev: 2 entities of 2 types (PER-B, PER-I)" in said


def test_a_file_without_ends_of_sentences_is_no_conll(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("A good film .\t1\n" * 10_001)
    with pytest.raises(UserError, match="a.conll:1: a sentence of more than 10,000 words"):
        read_examples(tmp_path / "a.conll", "tagging", {})


def test_a_list_that_numpy_wrote_into_a_cell_is_refused(tmp_path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("""text,labels\na,"['x' 'y']"\n""")
    with pytest.raises(UserError, match="wanted the names of the labels"):
        read_examples(path, "multi_label", {})


def test_choices_in_twelve_columns_are_read_in_the_order_of_their_numbers(tmp_path) -> None:
    path = tmp_path / "x.csv"
    names = ",".join(f"option{i}" for i in range(12))
    path.write_text(f"question,{names},label\nq,{','.join('abcdefghijkl')},11\n")
    (example,) = read_examples(path, "choice", {})
    assert example.texts == ["q", *"abcdefghijkl"] and example.label == 11


def test_one_group_of_columns_holds_the_choices(tmp_path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("question,answer1,option1,option2,label\nq,z,a,b,1\n")
    (example,) = read_examples(path, "choice", {})
    assert example.texts == ["q", "a", "b"] and example.label == 1
    path.write_text("question,answer1,answer2,option1,option2,label\nq,y,z,a,b,1\n")
    with pytest.raises(UserError, match="answer1 and option1 may each begin the columns"):
        read_examples(path, "choice", {})


def test_a_whole_number_is_one_label_with_and_without_its_point(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "labels": 1}\n{"text": "b", "labels": [1.0]}\n')
    assert [e.label for e in read_examples(path, "multi_label", {})] == [["1"], ["1"]]
    path.write_text('{"context": "a", "choices": ["b", "c"], "label": 1.0}\n')
    assert [e.label for e in read_examples(path, "choice", {})] == [1]


def test_the_beginning_of_a_document_ends_a_sentence(tmp_path) -> None:
    path = tmp_path / "x.conll"
    path.write_text("x O\n-DOCSTART- O\ny B-PER\n")
    assert [example.texts for example in read_examples(path, "tagging", {})] == [["x"], ["y"]]
