"""Each family trains, resumes, is divided among processes and exported as BERT is; what reads an
export takes it."""

import json
import shutil
from pathlib import Path

import embed
import minimal_pairs
import numpy as np
import pytest
import torch
from fill_mask import fill_mask
from helpers import (
    NO_DROPOUT,
    TWO_STEPS,
    assert_same_run,
    check_hashes,
    metrics,
    newest,
    run,
    train_here,
)
from transformers import AutoConfig

from data_pipeline.build.probes import read_pairs
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.checkpoint import list_checkpoints
from pretrain.export import export_checkpoint
from pretrain.models.bert import PretrainingModel
from pretrain.read_export import load_export
from pretrain.read_run import read_run_config

FAMILIES = {
    "roberta": ("model.architecture=roberta", "data.objective=none"),
    "albert": (
        *("model.architecture=albert", "model.embedding_size=32", "model.hidden_size=64"),
        "data.objective=sop",
    ),
    "electra": (
        *("model.architecture=electra", "model.embedding_size=32", "model.hidden_size=64"),
        *("model.generator_size=0.5", "data.objective=none"),
        *("data.mask_replace_prob=0.85", "data.random_replace_prob=0"),
    ),
}
STEPS = {"roberta": 300, "albert": 300, "electra": 150}
MARGIN = 0.03  # of the area under RTD's curve above guessing, seven of its standard errors
LEARNS = (
    *("train.save_every=75", "train.eval_every=1000", "train.log_every=25"),
    *("train.optimizer=muon", "train.learning_rate=1e-2", *NO_DROPOUT),
    *("train.global_batch_size=32", "train.micro_batch_size=32"),
    *("data.max_seq_length=32", "data.masked_lm_prob=0.3"),
)
SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture(scope="module", params=FAMILIES)
def settings(request) -> tuple[str, ...]:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def learns(settings) -> tuple[str, ...]:
    """Settings of a run in which the family learns."""
    steps = STEPS[settings[0].partition("=")[2]]
    return (*settings, *LEARNS, f"train.max_steps={steps}")


@pytest.fixture(scope="module")
def trained(learns, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of some seconds; not to be written to."""
    run_dir = tmp_path_factory.mktemp("family")
    train_here(prepared, run_dir, *learns)
    return run_dir


def test_a_run_learns_more_than_frequencies(trained: Path) -> None:
    last = metrics(trained)[-1]
    assert last["eval/mlm_loss"] < last["eval/unigram_entropy"] - 0.1
    assert ("eval/rtd_auc" in last) == ((trained / "export/generator").exists())
    assert last.get("eval/rtd_auc", 1) > 0.5 + MARGIN


def test_a_run_goes_on_to_the_same_bits_even_with_gradient_checkpointing(
    learns, prepared: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(list_checkpoints(tmp_path / "checkpoints")[-1])
    train_here(prepared, tmp_path, *learns, "train.gradient_checkpointing=true")
    assert_same_run(tmp_path, trained)


def assert_near(a: Path, b: Path) -> None:
    """Losses of a whole run within 1e-5, weights within 1e-4: sums in another order."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one.keys() == two.keys()
        assert all(abs(one[name] - two[name]) < 1e-5 * max(1, abs(one[name])) for name in one)
    first, second = newest(a), newest(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_what_is_said_of_an_electra_tells_generator_and_model_apart(trained: Path) -> None:
    card, page = (trained / "export/README.md").read_text(), (trained / "report.html").read_text()
    is_electra = (trained / "export/generator").exists()
    assert ("| Generator's masked-LM loss |" in card) == is_electra
    assert ("| Masked-LM loss |" in card) == ("- masked-lm\n" in card) == (not is_electra)
    assert ("- There is no pooler: use `last_hidden_state`.\n" in card) == is_electra
    assert ("replaced tokens, area under the curve" in page) == is_electra


def test_an_export_of_another_family_leaves_no_generator_behind(
    trained: Path, prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "export", tmp_path / "out")
    generator = tmp_path / "out/generator"
    has_notes = generator.exists()
    if has_notes:
        (generator / "notes.txt").write_text("mine")
    train_here(prepared, tmp_path / "run", *TWO_STEPS)
    export_checkpoint(
        list_checkpoints(tmp_path / "run/checkpoints")[-1],
        read_run_config(tmp_path / "run"),
        tmp_path / "out",
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "bert"
    assert [path.name for path in generator.glob("*")] == ["notes.txt"] * has_notes


def test_two_processes_and_a_compiled_run_are_one_process(
    settings, prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """Two under DDP, which reduces the gradients of shared layers once, and two in shards."""
    train_here(prepared, tmp_path / "one", *settings, "train.micro_batch_size=4")
    for name, env in (("ddp", {}), ("shards", SHARDS)):
        options = (*settings, "train.micro_batch_size=4")
        done = run(prepared, tmp_path / name, *options, processes=2, **env)
        assert done.returncode == 0, done.stderr
        assert_near(tmp_path / "one", tmp_path / name)
    monkeypatch.setattr(PretrainingModel.compile_layers, "__defaults__", ("aot_eager",))
    torch._dynamo.reset()
    options = (*settings, "train.micro_batch_size=4", "train.compile=true")
    train_here(prepared, tmp_path / "compiled", *options)
    assert_near(tmp_path / "one", tmp_path / "compiled")


def test_the_export_serves_whatever_reads_one(trained: Path, tmp_path: Path) -> None:
    export = trained / "export"
    exports = [export, *export.glob("generator")]
    for folder in exports:
        assert "transformers loads every key" in (folder / "README.md").read_text()
        assert check_hashes(folder) == ["model.safetensors: OK"]
    config, vocabulary = AutoConfig.from_pretrained(export), read_vocabulary(export)
    if config.model_type != "electra":  # transformers would take those of a published vocabulary
        assert config.bos_token_id == vocabulary["[CLS]"]
        assert config.eos_token_id == vocabulary["[SEP]"]
    (found,) = fill_mask(load_export(export), export, "The name of the [MASK] is a string.")
    assert len(found) == 5 and 0 < sum(p for _, p in found) <= 1
    vectors = embed.embed(export, ["A class.", "the value of an attribute " * 40], "mean")
    assert (
        vectors.shape == (2, load_export(export).config.hidden_size) and np.isfinite(vectors).all()
    )
    (tmp_path / "pairs.tsv").write_text("The names are resolved.\tThe names is resolved.\n")
    pairs = read_pairs([str(tmp_path / "pairs.tsv")], None)
    assert minimal_pairs.measure(export, pairs, False, None)["accuracy"]["mean"] in (0, 1)
