"""What is exported is the model, for every BERT class, in a folder that needs nothing beside it."""

import json
import math
import os
import re
import runpy
import shutil
import sys
from dataclasses import asdict, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT, check_hashes, contents, fork, train_here
from huggingface_hub import RepoUrl
from huggingface_hub.utils import filter_repo_objects
from omegaconf import OmegaConf
from other_tokenizers import train_byte_level
from safetensors.torch import load_file
from tokenizers import Tokenizer

import pretrain.export
from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError, run_command
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary
from data_pipeline.vocabulary.existing import write_whole
from pretrain.checkpoint import hash_file, load_model, save_checkpoint
from pretrain.config import Config, ModelConfig
from pretrain.export import export
from pretrain.export_folder import check_export_folder, read_marker
from pretrain.families import FAMILIES, LAYER_NAMES, Family, hf_config
from pretrain.model_card import model_card
from pretrain.models.bert import PretrainingModel, continue_positions, settle_embeddings
from pretrain.objectives import objectives_of
from pretrain.read_export import load_export
from pretrain.read_run import find_manifest, find_vocabulary, read_run_config

FILES = {
    "README.md",
    "config.json",
    "export.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
}
BERT = FAMILIES["bert"]
TINY = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
)
POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
NSP = {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}
MLM = {
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
}
NEW = {"classifier.weight", "classifier.bias"}
CLASSES = {  # class -> (keys that it starts anew, keys that it has no place for)
    "BertForPreTraining": (set(), set()),
    "BertModel": (set(), MLM | NSP),
    "BertForMaskedLM": (set(), NSP | POOLER),
    "BertForNextSentencePrediction": (set(), MLM),
    "BertForSequenceClassification": (NEW, MLM | NSP),
    "BertForTokenClassification": (NEW, MLM | NSP | POOLER),
    "BertForQuestionAnswering": (
        {"qa_outputs.weight", "qa_outputs.bias"},
        MLM | NSP | POOLER,
    ),
    "BertForMultipleChoice": (NEW, MLM | NSP),
}


def build(vocab_size: int, config: ModelConfig = TINY) -> PretrainingModel:
    """A model with no two parameters alike: at the start all norms are one, and may be swapped."""
    torch.manual_seed(0)
    model = PretrainingModel(config, vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write(model: PretrainingModel, root: Path, out: Path, card: str = "", **options) -> None:
    """Export with the vocabulary of a prepared folder."""
    origin = {"step": 8, "vocab_sha256": "ab", "data_sha256": "cd"}
    export(model, root / "data/vocab", out, card, origin, **options)


@pytest.fixture(scope="module")
def model(vocabulary: Vocabulary) -> PretrainingModel:
    return build(len(vocabulary))


@pytest.fixture(scope="module")
def exported(prepared: Path, model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported folder, moved away from where it was written."""
    root = tmp_path_factory.mktemp("export")
    write(model, prepared, root / "written", "# A card\n")
    return Path(shutil.move(root / "written", root / "elsewhere"))


@pytest.fixture(scope="module")
def run_dir(prepared: Path, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as train.py leaves it, with checkpoints of steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run_dir.mkdir()
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={run_dir}"])
    contract = {
        "vocab_sha256": store.vocabulary.sha256,
        "data_sha256": store.manifest["data_sha256"],
    }
    for step in (4, 8):
        state = {"step": step, "evaluation": {"eval/mlm_loss": 5.25}, "contract": contract}
        model = build(len(store.vocabulary), replace(config.model, initializer_range=step / 100))
        save_checkpoint(run_dir / "checkpoints", model, [], state, keep=2).result()
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
    return run_dir


@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_a_tokenizer_encloses_pairs_as_training_did(
    prepared: Path, tmp_path: Path, objective: str
) -> None:
    from transformers import AutoTokenizer

    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    tokenizer = train_byte_level(text)
    (tmp_path / "data/vocab").mkdir(parents=True)
    write_whole(tmp_path / "data/vocab", tokenizer)
    config = replace(TINY, pad_token_id=1)
    objectives = objectives_of(objective)
    model = PretrainingModel(config, tokenizer.get_vocab_size(), objectives)
    write(model, tmp_path, tmp_path / "out")
    a, b = (tokenizer.encode(t, add_special_tokens=False).ids for t in ("One, two.", "Three."))
    found = AutoTokenizer.from_pretrained(tmp_path / "out")("One, two.", "Three.")
    if objective == "none":  # as in RoBERTa, whose pairs no pretraining saw
        assert found["input_ids"] == [0, *a, 2, 2, *b, 2]
    else:
        assert found["input_ids"] == [0, *a, 2, *b, 2]
        assert found["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, "float32"), (1e5, "float16")])
def test_weights_that_are_not_finite_are_not_exported(
    prepared: Path, vocabulary: Vocabulary, tmp_path: Path, value: float, dtype: str
) -> None:
    model = build(len(vocabulary))
    with torch.no_grad():
        model.mlm.bias[3] = value
    with pytest.raises(UserError, match=f"bias is not finite in {dtype}, so nothing is exported"):
        write(model, prepared, tmp_path / "out", dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_weights_whose_logits_overflow_are_not_exported(
    prepared: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    model = build(len(vocabulary))
    with torch.no_grad():
        model.layers[0].up.weight.fill_(3e38)
    with pytest.raises(UserError, match="logits that are not finite, so nothing is exported"):
        write(model, prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def run_cli(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export", *map(str, args)])
    run_command(pretrain.export.main)


def settled_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of `run_dir`, with the embeddings as an export has them."""
    weights = load_file(checkpoint / "model.safetensors")
    config = read_run_config(checkpoint.parent.parent)
    model = PretrainingModel(config.model, len(weights["mlm.bias"]), objectives_of("nsp"))
    model.load_state_dict(weights)
    settle_embeddings(model)
    return model.state_dict()


def assert_same_weights(exported: dict, checkpoint: dict) -> None:
    """All tensors are equal, but positions are as many as the config's `max_seq_length`, 64."""
    assert exported.keys() == checkpoint.keys()
    for name, value in checkpoint.items():
        trained = value[:64] if name == "embeddings.position.weight" else value
        assert torch.equal(exported[name], trained), name


def assert_one_line_error(capsys: pytest.CaptureFixture, *words: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


# ---------------------------------------------------------------------------------- the folder


def test_the_folder_holds_the_weights_the_config_the_tokenizer_and_a_card(
    exported, model, prepared
) -> None:
    assert {path.name for path in exported.iterdir()} == FILES
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in exported.iterdir())
    for name in ("vocab.txt", "tokenizer.json"):
        assert (exported / name).read_bytes() == (prepared / "data/vocab" / name).read_bytes()
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"] and config["model_type"] == "bert"
    assert config["vocab_size"] == len(model.mlm.bias) and config["tie_word_embeddings"] is True
    assert config["intermediate_size"] == 128 and config["layer_norm_eps"] == 1e-12
    card = (exported / "README.md").read_text()
    assert card.startswith("# A card\n") and "Checked at export: transformers loads" in card


def test_a_download_is_checked_by_the_hashes_in_the_card(prepared, model, tmp_path: Path) -> None:
    write(model, prepared, tmp_path / "out", pytorch_bin=True)
    said = check_hashes(tmp_path / "out")
    assert said == ["model.safetensors: OK", "pytorch_model.bin: OK"]
    with open(tmp_path / "out/model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    assert check_hashes(tmp_path / "out")[0] == "model.safetensors: FAILED"


def test_the_weights_have_the_names_of_transformers_and_the_decoder_is_not_among_them(
    exported, model
) -> None:
    from transformers import BertConfig
    from transformers import BertForPreTraining as Peer

    settings = hf_config(asdict(model.config), len(model.mlm.bias), model.hf_class)
    peer = Peer(BertConfig(**settings))
    weights = load_file(exported / "model.safetensors")
    assert weights.keys() == {name for name, _ in peer.named_parameters()}
    for name, parameter in peer.named_parameters():
        assert weights[name].shape == parameter.shape and weights[name].dtype == torch.float32


def test_the_names_lead_there_and_back(model) -> None:
    state = model.state_dict()
    back = BERT.from_hf(BERT.to_hf(state), state)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_load_export_gives_the_model_back(exported, model) -> None:
    loaded = load_export(exported)
    assert loaded.config == replace(model.config, intermediate_size=128) and not loaded.training
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_small_intermediate_size_and_other_settings_survive_the_export(
    prepared, vocabulary, tmp_path
) -> None:
    config = replace(
        TINY, intermediate_size=48, hidden_act="gelu_new", layer_norm_eps=1e-5, type_vocab_size=3
    )
    write(build(len(vocabulary), config), prepared, tmp_path / "out")
    assert load_export(tmp_path / "out").config == config


# -------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", CLASSES)
def test_every_bert_class_loads_the_folder(name, exported) -> None:
    import transformers

    loaded, report = getattr(transformers, name).from_pretrained(exported, output_loading_info=True)
    missing, unexpected = CLASSES[name]
    assert set(report["missing_keys"]) == missing
    assert set(report["unexpected_keys"]) == unexpected
    assert not report["mismatched_keys"] and not report["error_msgs"]
    weights = load_file(exported / "model.safetensors")
    prefix = "" if hasattr(loaded, "bert") else "bert."
    for key, parameter in loaded.named_parameters():
        if key not in missing:
            assert torch.equal(parameter, weights[prefix + key]), key


def test_transformers_gives_the_same_logits_on_real_pairs(exported, model, store) -> None:
    from transformers import BertForPreTraining as Peer

    peer = Peer.from_pretrained(exported)
    assert peer.cls.predictions.decoder.weight is peer.bert.embeddings.word_embeddings.weight
    assert torch.equal(peer.cls.predictions.decoder.bias, model.mlm.bias)
    batch = BatchSource(store, PairsConfig(max_seq_length=64), seed=0).batch(0, 6)
    with torch.no_grad():
        mlm_logits, nsp_logits = model.logits(batch)
        out = peer(**batch.padded())
    rows = out.prediction_logits[batch.sequence_ids, batch.position_ids][batch.masked_positions]
    assert (rows - mlm_logits).abs().max() <= 1e-5
    assert (out.seq_relationship_logits - nsp_logits).abs().max() <= 1e-5


def test_the_auto_classes_and_the_pipeline_need_the_folder_alone(exported, prepared) -> None:
    from transformers import AutoModel, AutoTokenizer, BertModel, pipeline

    assert isinstance(AutoModel.from_pretrained(exported), BertModel)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    bare = Tokenizer.from_file(str(prepared / "data/vocab/tokenizer.json"))
    for pair in (("A Naïve string.", "Returns [MASK] — or not."), ("x" * 200, "中文")):
        ours, theirs = bare.encode(*pair), tokenizer(*pair)
        assert theirs["input_ids"] == ours.ids and theirs["token_type_ids"] == ours.type_ids
    best = pipeline("fill-mask", model=str(exported))("The name of the [MASK] is a string.")
    assert len(best) == 5 and all(0 < item["score"] <= 1 for item in best)


def test_the_tokenizer_cuts_texts_to_what_the_model_can_take(exported) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.model_max_length == TINY.max_position_embeddings
    long = tokenizer("a string " * 200, truncation=True, return_tensors="pt")
    out = AutoModel.from_pretrained(exported)(**long)
    assert out.last_hidden_state.shape[1] == TINY.max_position_embeddings


# ------------------------------------------------------------------------------------ the gate


def swap_weights(a: str, b: str):
    """`to_hf` with tensors exchanged, in every layer where the names hold N."""

    def exchange(weights):
        for n in range(TINY.num_hidden_layers):
            x, y = a.replace("N", str(n)), b.replace("N", str(n))
            weights[x], weights[y] = weights[y], weights[x]
        return weights

    return change_weights(exchange)


def change_weights(change, rename=Family.to_hf):
    return "pretrain.families.Family.to_hf", lambda *args: change(rename(*args))


def change_layer_names(**names):
    other = replace(BERT, layer_names=LAYER_NAMES | names)
    return "pretrain.config.FAMILIES", FAMILIES | {"bert": other}


def change_config(**changes):
    return "pretrain.export.hf_config", lambda *args: hf_config(*args) | changes


def swap_nsp_rows(weights):
    return weights | {name: weights[name].flip(0).contiguous() for name in NSP}


SELF = "bert.encoder.layer.N.attention.self."
FAULTS = {
    "query and key swapped": swap_weights(f"{SELF}query.weight", f"{SELF}key.weight"),
    "query and key swapped both ways": change_layer_names(
        **{"attention.query": "attention.self.key", "attention.key": "attention.self.query"}
    ),
    "norms swapped both ways": change_layer_names(
        attention_norm="output.LayerNorm", norm="attention.output.LayerNorm"
    ),
    "NSP rows swapped": change_weights(swap_nsp_rows),
    "half precision": change_weights(lambda w: {name: t.half() for name, t in w.items()}),
    "a key too many": change_weights(lambda w: w | {"bert.extra": torch.zeros(1)}),
    "other layer_norm_eps": change_config(layer_norm_eps=1e-2),
    "other activation": change_config(hidden_act="gelu_new"),
    "other number of heads": change_config(num_attention_heads=4),
    "decoder not tied": change_config(tie_word_embeddings=False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_stops_a_wrong_export_and_nothing_is_left(
    fault, model, prepared, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, UserError)):
        write(model, prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_gate_needs_no_transformers(model, prepared, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(*FAULTS["NSP rows swapped"])
    with pytest.raises(AssertionError, match="after reading back"):
        write(model, prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_key_that_is_not_written_stops_the_export(model, prepared, tmp_path, monkeypatch) -> None:
    name, tampered = change_weights(lambda w: {n: t for n, t in w.items() if n not in POOLER})
    monkeypatch.setattr(name, tampered)
    with pytest.raises((AssertionError, KeyError)):
        write(model, prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_leaves_the_one_before_it(
    model, prepared, tmp_path, monkeypatch
) -> None:
    write(model, prepared, tmp_path / "out", "# first\n")
    monkeypatch.setattr(*FAULTS["NSP rows swapped"])
    with pytest.raises(AssertionError):
        write(model, prepared, tmp_path / "out", "# second\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/README.md").read_text().startswith("# first\n")


@pytest.mark.parametrize("places", [(0, 1), (200, 201)], ids=["special", "ordinary"])
def test_the_gate_stops_a_vocabulary_in_another_order_than_the_tokenizers(
    places, model, prepared, tmp_path
) -> None:
    vocab_dir = tmp_path / "data/vocab"
    shutil.copytree(prepared / "data/vocab", vocab_dir)
    pieces = (vocab_dir / "vocab.txt").read_text(encoding="utf-8").splitlines()
    a, b = places
    pieces[a], pieces[b] = pieces[b], pieces[a]
    (vocab_dir / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        write(model, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_gate_stops_a_model_with_fewer_rows_than_the_tokenizer_has_ids(
    prepared, vocabulary, tmp_path
) -> None:
    with pytest.raises(AssertionError):
        write(build(len(vocabulary) - 64), prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_gate_stops_a_model_with_another_id_of_padding(prepared, vocabulary, tmp_path) -> None:
    other = build(len(vocabulary), replace(TINY, pad_token_id=vocabulary["[MASK]"]))
    with pytest.raises(AssertionError, match="has another id in config.json than in vocab.txt"):
        write(other, prepared, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_gate_stops_a_tokenizer_that_transformers_reads_otherwise(
    model, prepared, tmp_path
) -> None:
    vocab_dir = tmp_path / "data/vocab"
    shutil.copytree(prepared / "data/vocab", vocab_dir)
    settings = json.loads((vocab_dir / "tokenizer_config.json").read_text())
    settings["do_lower_case"] = not settings["do_lower_case"]
    (vocab_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(AssertionError, match="transformers' tokenizer gives other ids for 'The qu"):
        write(model, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------ by itself


def test_the_export_of_what_may_only_be_read_may_be_written(model, prepared, tmp_path) -> None:
    shutil.copytree(prepared / "data/vocab", tmp_path / "data/vocab")
    for path in (tmp_path / "data/vocab").iterdir():
        path.chmod(0o444)
    write(model, tmp_path, tmp_path / "out", "# A card\n")
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out").iterdir())


def test_a_run_folder_is_exported_from_its_newest_checkpoint(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    assert "step-00000008" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    checkpoint = settled_weights(run_dir / "checkpoints/step-00000008")
    state = load_export(tmp_path / "out").state_dict()
    assert_same_weights(state, checkpoint)
    assert "8 steps" in (tmp_path / "out/README.md").read_text()


def test_any_checkpoint_is_exported(run_dir, tmp_path, monkeypatch, capsys) -> None:
    run_cli(monkeypatch, run_dir / "checkpoints/step-00000004", tmp_path / "a/b/out")
    checkpoint = settled_weights(run_dir / "checkpoints/step-00000004")
    state = load_export(tmp_path / "a/b/out").state_dict()
    assert_same_weights(state, checkpoint)


def test_a_checkpoint_from_before_the_pairs_is_a_model_without_pair_heads(
    prepared, tmp_path, monkeypatch
) -> None:
    phases = "train.phases=[{steps: 8, single_segment_prob: 1}, {steps: 4}]"
    train_here(prepared, tmp_path / "run", phases, "train.keep_checkpoints=3")
    for step, has_pairs in ((8, False), (12, True)):
        out = tmp_path / f"out{step}"
        run_cli(monkeypatch, tmp_path / f"run/checkpoints/step-{step:08d}", out)
        card = (out / "README.md").read_text()
        assert ("next-sentence" in card) == ("sequences are a single segment" in card) == has_pairs
        found = json.loads((out / "config.json").read_text())["architectures"]
        assert found == ["BertForPreTraining" if has_pairs else "BertForMaskedLM"]


@pytest.mark.parametrize(
    "inside, source",
    [("", "."), ("", "checkpoints/step-00000004"), ("checkpoints", "step-00000004")],
)
def test_sources_may_be_named_from_inside_the_run(
    inside, source, run_dir, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(run_dir / inside)
    run_cli(monkeypatch, source, tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


def test_a_wrong_folder_is_an_error_of_one_line(tmp_path, monkeypatch, capsys) -> None:
    unsound, none = "neither a run folder nor an intact checkpoint", "there is no"
    for source, said in ((tmp_path, unsound), (tmp_path / "missing", none)):
        with pytest.raises(SystemExit, match="2"):
            run_cli(monkeypatch, source, tmp_path / "out")
        assert_one_line_error(capsys, str(source), said)
    assert not (tmp_path / "out").exists()


def test_a_run_without_checkpoints_is_an_error_of_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path, tmp_path / "out")
    assert_one_line_error(capsys, "no intact checkpoint")


def test_a_damaged_checkpoint_is_an_error_of_one_line(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, checkpoint, tmp_path / "out")
    assert_one_line_error(capsys, "model.safetensors is not what was written")


@pytest.mark.parametrize("change", [{"hidden_size": 32000}, {"num_hidden_layers": 900}, {}])
def test_a_damaged_config_of_a_large_model_is_refused_before_that_is_built(
    run_dir, tmp_path, monkeypatch, capsys, change
) -> None:
    """Without `hidden_size` it is 768, and one of 32,000 would have 100 GB."""
    shutil.copytree(run_dir, tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    config["model"] = config["model"] | change if change else {"num_hidden_layers": 2}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(pretrain.export, "model_of", lambda *_: pytest.fail("it was built"))
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")
    assert_one_line_error(capsys, "config.yaml describes a model of", "put an intact copy")


@pytest.mark.parametrize("writer", ["save_file", "torch.save"])
def test_a_disk_that_is_full_at_export_is_an_error_of_one_line(
    run_dir, tmp_path, monkeypatch, capsys, writer
) -> None:
    def fail(*_, **__) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5 vs 6")

    monkeypatch.setattr(f"pretrain.export.{writer}", fail)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path / "out", "--pytorch-bin")
    assert_one_line_error(capsys, "no export at", "free space")
    assert not list(tmp_path.iterdir())


def test_a_link_to_what_is_not_there_is_no_folder_to_export_to(tmp_path: Path) -> None:
    (tmp_path / "export").symlink_to(tmp_path / "scratch")
    with pytest.raises(UserError, match="is a broken link"):
        check_export_folder(tmp_path / "export")


def test_another_vocabulary_than_the_runs_is_an_error_of_one_line(
    run_dir, tmp_path, prepared, monkeypatch, capsys
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    shutil.copytree(prepared / "data/vocab", tmp_path / "data/vocab")
    with open(tmp_path / "data/vocab/vocab.txt", "a") as file:
        file.write("[unused999]\n")
    config = OmegaConf.load(tmp_path / "run/config.yaml")
    config.data_dir = str(tmp_path / "data")
    OmegaConf.save(config, tmp_path / "run/config.yaml")
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")
    assert_one_line_error(capsys, "a different vocabulary")


def test_a_folder_with_other_things_in_it_is_not_overwritten(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "precious.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path)
    assert_one_line_error(capsys, str(tmp_path))
    assert (tmp_path / "precious.txt").read_text() == "years of work"


def test_an_older_export_is_replaced(run_dir, tmp_path, monkeypatch) -> None:
    run_cli(monkeypatch, run_dir / "checkpoints/step-00000004", tmp_path / "out")
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    assert "8 steps" in (tmp_path / "out/README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_card_says_what_it_is_and_its_example_runs_in_the_folder(
    run_dir, tmp_path, monkeypatch, store, capsys
) -> None:
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "fill-mask"
    parameters = sum(p.numel() for p in load_export(tmp_path / "out").parameters())
    for fact in (
        f"{parameters:,} parameters",
        "8 steps of 16 sequences",
        "64 tokens",
        "15%",
        "| Masked-LM loss | 5.250 nats |",
        store.vocabulary.sha256,
        store.manifest["data_sha256"],
    ):
        assert fact in body, fact
    code = re.search(r"```python\n(.*?)```", body, re.S)[1]
    (tmp_path / "example.py").write_text(code.replace("REPOSITORY_OR_FOLDER", "."))
    monkeypatch.chdir(tmp_path / "out")
    names = runpy.run_path(str(tmp_path / "example.py"))
    assert type(names["model"]).__name__ == "BertModel" and len(names["tokenizer"]) == len(
        store.vocabulary
    )


FINGERPRINT = {"vocab_sha256": "ab12", "data_sha256": "cd34"}


def card_of(prepared: Path, *overrides: str, manifest=None, **state) -> tuple[dict, str]:
    """(front matter, body) of the card of a run with these settings."""
    config = load_config(Config, str(prepared / "config.yaml"), list(overrides))
    state = {"step": 1, "evaluation": {}, "fingerprint": FINGERPRINT} | state
    _, front, body = model_card(config, state, 1, True, 512, manifest).split("---\n", 2)
    return yaml.safe_load(front), body


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_the_card_tells_the_labels_of_the_objective_that_was_trained(objective, prepared) -> None:
    front, card = card_of(prepared, f"data.objective={objective}")
    assert ("BertForNextSentencePrediction" in card) == (objective != "none")
    assert ("random" in card) == (objective == "nsp")
    assert ("swapped" in card) == (objective == "sop")
    assert "not evaluated" in card
    tags = {"nsp": ["next-sentence-prediction"], "sop": ["sentence-order-prediction"], "none": []}
    assert front["tags"] == ["bert", "masked-lm", *tags[objective]]
    assert ("pooler" in card) == (objective == "none")


def test_the_front_matter_of_the_card_is_what_a_hub_reads(prepared) -> None:
    front, body = card_of(prepared, "export.license=apache-2.0", "run_dir=runs/my_run")
    assert front == {
        "language": ["en"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "mask_token": "[MASK]",
        "tags": ["bert", "masked-lm", "next-sentence-prediction"],
    }
    assert body.startswith("# my_run\n") and "Licence: apache-2.0." in body
    from huggingface_hub import ModelCardData

    assert ModelCardData(**front).to_dict() == front


def test_a_card_without_a_licence_says_so(prepared) -> None:
    front, body = card_of(prepared)
    assert "license" not in front and "No licence was stated" in body


def test_the_card_lists_each_source_by_name_and_language(prepared, store, tmp_path) -> None:
    sources = "[{files: /secret/a.txt}, {dataset: {path: org/wiki, name: x.no}, language: 'no'}]"
    overrides = [f"corpus={{sources: {sources}}}"]
    sizes = {"documents": 3, "sentences": 40, "tokens": 5000, "bytes": 1, "words": 1}
    manifest = store.manifest | {
        "sources": [{"name": "/secret/a.txt"} | sizes, {"name": "org/wiki"} | sizes]
    }
    text = (prepared / "config.yaml").read_text().replace("corpus:", "removed:")
    path = tmp_path / "sources.yaml"
    path.write_text("\n".join(line for line in text.splitlines() if "removed:" not in line))
    config = load_config(Config, str(path), overrides)
    state = {"step": 1, "evaluation": {}, "fingerprint": FINGERPRINT}
    card = model_card(config, state, 1, True, 512, manifest)
    assert yaml.safe_load(card.split("---\n")[1])["language"] == ["en", "no"]
    assert "| `a.txt` | en | 3 | 40 | 5,000 |" in card
    assert "| `org/wiki, x.no` | no | 3 | 40 | 5,000 |" in card
    assert "secret" not in card


def test_the_card_says_nothing_of_metrics_that_are_missing_or_no_numbers(prepared) -> None:
    metrics = {
        "eval/mlm_loss": 2.0,
        "eval/unigram_entropy": 3.0,
        "eval/mlm_accuracy": float("nan"),
        "eval/mlm_perplexity": None,
        "eval/nsp_accuracy": 0.75,
        "eval/nsp_majority": 0.5,
    }
    _, card = card_of(prepared, evaluation=metrics)
    table = card.split("## Evaluation")[1].split("##")[0]
    assert "| Masked-LM loss | 2.000 nats | 3.000 nats (unigram entropy) |" in table
    assert "| Next-sentence accuracy | 75.0% | 50.0% (majority label) |" in table
    assert "nan" not in table and "None" not in table and table.count("\n| ") == 4


def test_the_card_tells_that_the_pair_head_guesses(prepared) -> None:
    for accuracy, guesses in ((0.497, True), (0.52, True), (0.75, False), (None, False)):
        metrics = {"eval/nsp_accuracy": accuracy, "eval/nsp_majority": 0.503}
        _, card = card_of(prepared, evaluation=metrics)
        assert ("hardly does better than a guess" in card.split("## Limits")[1]) == guesses


def test_the_card_tells_which_positions_were_never_trained(prepared) -> None:
    phases = "train.phases=[{steps: 8}, {steps: 4, max_seq_length: 512}]"
    assert "Positions 65 to 512 continue" in card_of(prepared, phases, step=8)[1]
    assert "continue the trained" not in card_of(prepared, phases, step=9)[1]
    phase = "train.phases=[{steps: 12, max_seq_length: 1024}]"
    more = (phase, "model.max_position_embeddings=1024")
    assert "Only the first 512 positions were exported" in card_of(prepared, *more, step=9)[1]
    assert "Only the first" not in card_of(prepared, phases, step=9)[1]
    assert "longer than 512 tokens" in card_of(prepared, phases, step=9)[1]


def test_only_trained_positions_are_exported_unless_more_are_asked_for(
    run_dir, tmp_path, monkeypatch
) -> None:
    from transformers import AutoTokenizer, BertModel

    trained = settled_weights(run_dir / "checkpoints/step-00000008")
    trained = trained["embeddings.position.weight"][:64]
    assert trained.std() > 0
    for wanted, options in ((64, []), (150, ["--positions", 150]), (40, ["--positions", 40])):
        run_cli(monkeypatch, run_dir, tmp_path / "out", *options)
        found = BertModel.from_pretrained(tmp_path / "out").embeddings.position_embeddings.weight
        assert torch.equal(found, continue_positions(trained, wanted))
        assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == wanted
        card = (tmp_path / "out/README.md").read_text()
        assert ("Positions 65 to 150 continue" in card) == (wanted == 150)


def test_no_more_positions_are_exported_than_the_longest_document_has(
    prepared, tmp_path, capsys
) -> None:
    lines = (prepared / "topics.txt").read_text().split(". ")
    short = [line for line in lines if len(line.split()) < 12][:600]
    (tmp_path / "short.txt").write_text("\n".join(short))
    options = [f"data_dir={tmp_path}/data", f"corpus.files={tmp_path}/short.txt"]
    options += ["corpus.layout=line", "vocab.size=400"]
    options += ["data.objective=none", "data.max_seq_length=128"]
    prepare(load_config(DataConfig, str(prepared / "config.yaml"), options), workers=1)
    train_here(prepared, tmp_path / "run", *options, "train.max_steps=2", "train.warmup_steps=1")
    store = TokenStore.open(
        tmp_path / "data/store", "train", read_vocabulary(tmp_path / "data/vocab")
    )
    longest = int(np.diff(store.sentence_offsets[store.document_offsets]).max()) + 2
    wanted = -(-longest // 8) * 8
    assert 8 < wanted < 100
    assert (
        f"no sequence of the first epoch has more than {longest} of 128 tokens"
        in capsys.readouterr().out
    )
    config = json.loads((tmp_path / "run/export/config.json").read_text())
    assert config["max_position_embeddings"] == wanted
    card = (tmp_path / "run/export/README.md").read_text()
    assert f"No sequence in training was longer than {wanted} tokens" in card


def test_fine_tuning_has_dropout_unless_the_config_says_otherwise(prepared, tmp_path) -> None:
    from transformers import AutoConfig

    for value, override in ((0.1, []), (0.0, ["export.dropout=0"])):
        settings = ["model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"]
        settings += ["train.max_steps=1", "train.warmup_steps=0", *override]
        train_here(prepared, tmp_path / str(value), *settings)
        config = AutoConfig.from_pretrained(tmp_path / str(value) / "export")
        assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == value
        card = (tmp_path / str(value) / "export/README.md").read_text()
        assert f"a dropout of {value:g}; pretraining had 0 and 0" in card


def test_a_run_without_pairs_exports_no_untrained_head(prepared, tmp_path, vocabulary) -> None:
    from transformers import AutoModelForMaskedLM, BertForMaskedLM

    train_here(
        prepared, tmp_path, "data.objective=none", "train.max_steps=2", "train.warmup_steps=1"
    )
    names = load_file(tmp_path / "export/model.safetensors").keys()
    assert not [name for name in names if "pooler" in name or "seq_relationship" in name]
    peer, report = BertForMaskedLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "export")) is BertForMaskedLM
    assert load_export(tmp_path / "export").nsp is None


def test_a_checkpoint_with_untrained_heads_goes_on_without_them(tmp_path, vocabulary) -> None:
    whole = build(len(vocabulary))
    folder = save_checkpoint(tmp_path, whole, [], {"step": 1}, keep=1).result()
    bare = PretrainingModel(TINY, len(vocabulary), objectives_of("none"))
    load_model(folder, bare)
    kept = whole.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in bare.state_dict().items())


def test_no_path_of_the_machine_is_in_the_export(run_dir, tmp_path, monkeypatch, prepared) -> None:
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "| `topics.txt` | en |" in card
    for name in ("README.md", "export.json", "config.json", "tokenizer_config.json"):
        text = (tmp_path / "out" / name).read_text()
        for place in (prepared, run_dir.parent, tmp_path, Path.home()):
            assert str(place) not in text, name


def test_without_transformers_the_export_works_and_the_card_says_so(run_dir, tmp_path) -> None:
    without = "import sys; sys.modules['transformers'] = None; import pretrain.export as module; "
    done = fork(["-c", without + "module.run()", str(run_dir), str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert "exported" in done.stdout
    assert "(transformers was not installed)" in (tmp_path / "out/README.md").read_text()
    from transformers import BertForPreTraining as Peer

    _, report = Peer.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


# ------------------------------------------------------------------- the folder of the user


def refuse(monkeypatch, capsys, *args: object, words: tuple = ()) -> None:
    """Run a command that must end in one line and leave OUT_DIR as it was."""
    before = contents(Path(args[1]))
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, *args)
    assert_one_line_error(capsys, "--overwrite", "OUT_DIR", *words)
    assert contents(Path(args[1])) == before


def test_the_marker_lists_what_the_export_wrote(run_dir, tmp_path, monkeypatch, store) -> None:
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    marker = json.loads((tmp_path / "out/export.json").read_text())
    assert marker["schema"] == 1 and marker["made_by"].startswith("bert-pretrain ")
    assert marker["step"] == 8 and marker["vocab_sha256"] == store.vocabulary.sha256
    assert marker["data_sha256"] == store.manifest["data_sha256"]
    assert marker["files"].keys() == FILES - {"export.json"}
    for name, sha256 in marker["files"].items():
        assert hash_file(tmp_path / "out" / name) == sha256


@pytest.mark.parametrize("marked", [False, True])
def test_a_clone_of_a_repository_keeps_git_and_other_weights(
    marked, run_dir, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "clone"
    if marked:
        run_cli(monkeypatch, run_dir, out)
    kept = {".git/HEAD": b"ref", "tf_model.h5": b"weights", "pytorch_model.bin": b"others"}
    for name, data in kept.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    if marked:
        run_cli(monkeypatch, run_dir / "checkpoints/step-00000004", out)
        assert json.loads((out / "export.json").read_text())["step"] == 4
    else:
        (out / "config.json").write_text("{}")
        refuse(monkeypatch, capsys, run_dir, out, words=(".git",))
        run_cli(monkeypatch, run_dir, out, "--overwrite")
    note = capsys.readouterr().out
    assert "pytorch_model.bin, tf_model.h5" in note and note.count("note: ") == 1
    after = contents(out)
    assert {name: after[name] for name in kept} == kept
    assert after.keys() == kept.keys() | FILES
    load_export(out)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "spiece.model"])
def test_tokenizer_files_that_the_export_did_not_write_are_named(
    name: str, run_dir, tmp_path, monkeypatch, capsys
) -> None:
    """transformers reads the tokens that such files name, which the weights may lack."""
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    assert "note: " not in capsys.readouterr().out
    (tmp_path / "out" / name).write_text("{}")
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    assert f"also holds {name}, which this export did not write" in capsys.readouterr().out


@pytest.mark.parametrize("positions", [7, 1_000_001, 10**20])
def test_a_number_of_positions_that_no_model_has_is_refused(
    positions: int, run_dir, tmp_path, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path / "out", "--positions", str(positions))
    assert "--positions must be at least 8, and at most 1,000,000" in capsys.readouterr().err


def test_a_changed_card_is_refused_and_replaced_only_when_asked(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    run_cli(monkeypatch, run_dir, out)
    (out / "README.md").write_text("# My own words\n")
    (out / "notes.txt").write_text("mine")
    refuse(monkeypatch, capsys, run_dir, out, words=(f"{out}/README.md was changed",))
    run_cli(monkeypatch, run_dir, out, "--overwrite")
    assert "8 steps" in (out / "README.md").read_text()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_file_that_no_export_wrote_is_refused_where_it_would_be_replaced(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    run_cli(monkeypatch, run_dir, out)
    (out / "pytorch_model.bin").write_bytes(b"of the user")
    found = f"{out}/pytorch_model.bin is not part of the export"
    refuse(monkeypatch, capsys, run_dir, out, "--pytorch-bin", words=(found,))
    run_cli(monkeypatch, run_dir, out)
    assert (out / "pytorch_model.bin").read_bytes() == b"of the user"
    run_cli(monkeypatch, run_dir, out, "--pytorch-bin", "--overwrite")
    assert torch.load(out / "pytorch_model.bin", weights_only=True)


def test_an_export_of_an_earlier_version_is_replaced(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    run_cli(monkeypatch, run_dir / "checkpoints/step-00000004", out)
    (out / "export.json").unlink()
    refuse(monkeypatch, capsys, run_dir, out)  # without its marker, one of this version is not ours
    title = "---\n---\n# BERT, pretrained from scratch with bert-pretrain\n"
    (out / "README.md").write_text(title)
    run_cli(monkeypatch, run_dir, out)
    assert json.loads((out / "export.json").read_text())["step"] == 8
    (out / "export.json").unlink()
    (out / "README.md").write_text(title)
    (out / "mine.txt").write_text("")
    refuse(monkeypatch, capsys, run_dir, out)


@pytest.mark.parametrize("marker", ["", "{}", '{"schema": 2}', '["a"]', '{"files": 1}'])
def test_a_marker_that_is_not_ours_protects_nothing_less(marker, tmp_path) -> None:
    (tmp_path / "export.json").write_text(marker)
    with pytest.raises(UserError, match="no export.json says"):
        check_export_folder(tmp_path)
    check_export_folder(tmp_path, overwrite=True)


def test_the_folder_is_checked_without_a_model(tmp_path) -> None:
    check_export_folder(tmp_path / "absent")
    check_export_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="is a f"):
            check_export_folder(path, overwrite=True)


def test_a_checkpoint_is_never_overwritten(run_dir, monkeypatch, capsys) -> None:
    checkpoint = run_dir / "checkpoints/step-00000008"
    before = contents(checkpoint)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, checkpoint, "--overwrite")
    assert_one_line_error(capsys, f"{checkpoint} is a checkpoint")
    assert contents(checkpoint) == before


def test_folders_beside_the_export_stay_whatever_their_name(run_dir, tmp_path, monkeypatch) -> None:
    for name in ("out.tmp", "out.export", "out/.export"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine.txt").write_text("years of work")
    before = contents(tmp_path)
    run_cli(monkeypatch, run_dir, tmp_path / "out", "--overwrite")
    run_cli(monkeypatch, run_dir, tmp_path / "out")
    assert before.items() <= contents(tmp_path).items()


def test_training_refuses_a_folder_of_the_user_before_its_first_step(prepared, tmp_path) -> None:
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/export/thesis.txt").write_text("years of work")
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={tmp_path}/run"])
    from pretrain.train import train

    with pytest.raises(UserError, match="thesis.txt"):
        train(config)
    assert contents(tmp_path) == {"run/export/thesis.txt": b"years of work"}


def test_an_empty_folder_is_written_to_where_it_stands(run_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = os.stat(".").st_ino
    run_cli(monkeypatch, run_dir, ".")
    assert set(os.listdir(".")) == FILES and os.stat(tmp_path).st_ino == place


@pytest.mark.parametrize("moved", range(7))
def test_an_interrupted_replacement_loses_nothing_and_goes_on(
    moved, run_dir, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    run_cli(monkeypatch, run_dir / "checkpoints/step-00000004", out)
    (out / "notes.txt").write_text("mine")
    replace_file, calls = os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) > moved:
            raise OSError(28, "No space left on device")
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(SystemExit, match="2"):
            run_cli(patch, run_dir, out)
    assert_one_line_error(capsys, "could not be replaced", "run the same command again")
    assert set(os.listdir(out)) == FILES | {"notes.txt", pretrain.export.STAGE}
    load_export(out)
    run_cli(monkeypatch, run_dir, out)
    assert set(os.listdir(out)) == FILES | {"notes.txt"}
    assert read_marker(out) == {n: hash_file(out / n) for n in FILES - {"export.json"}}
    assert json.loads((out / "export.json").read_text())["step"] == 8


def test_a_file_that_the_user_changes_during_the_export_stays(
    model, prepared, tmp_path, monkeypatch
) -> None:
    write(model, prepared, tmp_path / "out")
    check_gate = pretrain.export.check_export

    def meddle(*args):
        (tmp_path / "out/README.md").write_text("# My own words\n")
        return check_gate(*args)

    monkeypatch.setattr(pretrain.export, "check_export", meddle)
    with pytest.raises(UserError, match="README.md was changed"):
        write(model, prepared, tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text() == "# My own words\n"
    assert set(os.listdir(tmp_path / "out")) == FILES


# ------------------------------------------------------------------------------ the run folder


def test_a_moved_run_is_exported_from_elsewhere_without_its_data(
    run_dir, prepared, tmp_path, monkeypatch
) -> None:
    shutil.copytree(run_dir, tmp_path / "moved")
    shutil.copytree(prepared / "data/vocab", tmp_path / "moved/vocab")
    config = OmegaConf.load(tmp_path / "moved/config.yaml")
    config.data_dir = "data/gone"
    OmegaConf.save(config, tmp_path / "moved/config.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_cli(monkeypatch, tmp_path / "moved", "out")
    card = Path("out/README.md").read_text()
    assert "The record of the sources was not at hand" in card and "topics.txt" not in card


def test_a_run_without_its_vocabulary_says_where_to_put_it(
    run_dir, tmp_path, monkeypatch, capsys, store
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    config = OmegaConf.load(tmp_path / "run/config.yaml")
    config.data_dir = str(tmp_path / "gone")
    OmegaConf.save(config, tmp_path / "run/config.yaml")
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "data_pipeline" not in error
    for word in (f"{tmp_path}/run/vocab has no", f"{tmp_path}/gone/vocab has no"):
        assert word in error
    assert store.vocabulary.sha256[:12] in error and f"to {tmp_path}/run/vocab" in error


def test_the_manifest_of_another_store_is_not_this_runs(prepared, store) -> None:
    config = load_config(Config, str(prepared / "config.yaml"))
    assert find_manifest(config, store.manifest["data_sha256"]) == store.manifest
    assert find_manifest(config, "another") is None


def test_the_config_of_another_version_is_read(run_dir, tmp_path, monkeypatch) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    config = OmegaConf.to_container(OmegaConf.load(tmp_path / "run/config.yaml"))
    config["corpus"]["sources"] = [{"files": "a.txt", "unknown": 1}]
    config["corpus"]["files"] = None
    config["train"]["phases"] = [{"steps": 12, "unknown": 1}]
    config["model"]["unknown"] = config["unknown"] = {"a": 1}
    del config["export"], config["model"]["layer_norm_eps"]
    OmegaConf.save(OmegaConf.create(config), tmp_path / "run/config.yaml")
    found = read_run_config(tmp_path / "run")
    assert found.train.phases[0].steps == 12 and found.corpus.sources[0].files == "a.txt"
    assert found.model.layer_norm_eps == 1e-12 and found.export.license is None
    run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("text", ["- a list", "model: {hidden_size: wide}", "a: ]", "model: 3"])
def test_a_config_that_cannot_be_read_is_an_error_of_one_line(
    text, run_dir, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")
    assert_one_line_error(capsys, f"{tmp_path}/run/config.yaml")


def test_a_run_without_a_config_says_what_is_missing(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(run_dir / "checkpoints", tmp_path / "run/checkpoints")
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, tmp_path / "run", tmp_path / "out")
    assert_one_line_error(capsys, f"no {tmp_path}/run/config.yaml")


def test_a_state_with_a_fingerprint_is_exported_as_one_with_a_contract(
    run_dir, tmp_path, monkeypatch
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000008"
    state = json.loads((checkpoint / "state.json").read_text())
    state["fingerprint"] = state.pop("contract")
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = hash_file(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    run_cli(monkeypatch, run_dir, tmp_path / "a")
    run_cli(monkeypatch, tmp_path / "run", tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


# ------------------------------------------------------------------------------ other formats


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_weights_of_each_dtype_are_the_models_rounded(
    dtype, run_dir, tmp_path, monkeypatch
) -> None:
    from transformers import AutoConfig
    from transformers import BertForPreTraining as Peer

    run_cli(monkeypatch, run_dir, tmp_path / "out", "--dtype", dtype)
    wanted = settled_weights(run_dir / "checkpoints/step-00000008")
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in wanted.items()}
    weights = load_file(tmp_path / "out/model.safetensors")
    assert_same_weights(BERT.from_hf(weights, wanted), wanted)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)
    peer = Peer.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in peer.parameters()} == {getattr(torch, dtype)}
    assert {p.dtype for p in load_export(tmp_path / "out").parameters()} == {torch.float32}


def test_the_gate_stops_weights_of_another_dtype_than_the_config_says(
    model, prepared, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(*change_config(torch_dtype="float16"))
    with pytest.raises(AssertionError, match="dtype"):
        write(model, prepared, tmp_path / "out", dtype="bfloat16")
    assert not list(tmp_path.iterdir())


def test_pytorch_model_bin_loads_in_transformers(run_dir, tmp_path, monkeypatch) -> None:
    from transformers import BertForPreTraining as Peer

    run_cli(monkeypatch, run_dir, tmp_path / "out", "--pytorch-bin", "--dtype", "bfloat16")
    assert set(os.listdir(tmp_path / "out")) == FILES | {"pytorch_model.bin"}
    assert "pytorch_model.bin" in read_marker(tmp_path / "out")
    (tmp_path / "out/model.safetensors").rename(tmp_path / "weights")
    peer, report = Peer.from_pretrained(
        tmp_path / "out", use_safetensors=False, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    weights = load_file(tmp_path / "weights")
    assert all(torch.equal(p, weights[name]) for name, p in peer.named_parameters())


def test_the_gate_stops_a_pytorch_model_bin_that_is_not_the_model(
    model, prepared, tmp_path, monkeypatch
) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda weights, path: save(swap_nsp_rows(weights), path))
    with pytest.raises(AssertionError, match="pytorch_model.bin"):
        write(model, prepared, tmp_path / "out", pytorch_bin=True)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------ the hub


class Hub:
    """Stands in for `huggingface_hub.HfApi`: keeps what it is asked for."""

    def __init__(self, is_private: bool = True, error: Exception | None = None):
        self.is_private, self.error, self.calls = is_private, error, []

    def create_repo(self, repo_id: str, **options):
        if self.error:
            raise self.error
        self.calls.append((repo_id, options))
        return RepoUrl(f"https://huggingface.co/me/{repo_id.split('/')[-1]}")

    def model_info(self, repo_id: str):
        return SimpleNamespace(private=self.is_private)

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str]):
        names = contents(folder_path)
        self.calls.append((repo_id, set(filter_repo_objects(names, allow_patterns=allow_patterns))))


def test_push_uploads_the_files_of_the_export_and_no_others(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    for name in (".git/HEAD", "notes.txt", "old/config.json", "tf_model.h5"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("")
    run_cli(monkeypatch, run_dir, tmp_path / "out", "--overwrite", "--push", "bert", "--private")
    assert hub.calls == [("bert", {"private": True, "exist_ok": True}), ("me/bert", FILES)]
    assert "pushed to https://huggingface.co/me/bert" in capsys.readouterr().out
    run_cli(monkeypatch, run_dir, tmp_path / "out", "--push", "me/bert")
    assert hub.calls[2:] == [("me/bert", {"private": None, "exist_ok": True}), ("me/bert", FILES)]


def test_a_public_repository_is_not_pushed_to_as_private(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    hub = Hub(is_private=False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path / "out", "--push", "me/bert", "--private")
    assert_one_line_error(capsys, "me/bert exists and is public")
    assert len(hub.calls) == 1


def test_an_error_of_the_hub_is_one_line_and_the_export_is_there(
    run_dir, tmp_path, monkeypatch, capsys
) -> None:
    hub = Hub(error=OSError("401 Client Error\n\nInvalid username or password."))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path / "out", "--push", "me/bert")
    assert_one_line_error(capsys, "401 Client Error", "hf auth login", str(tmp_path / "out"))
    load_export(tmp_path / "out")


def test_private_without_push_is_refused(run_dir, tmp_path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli(monkeypatch, run_dir, tmp_path / "out", "--private")
    assert "--private needs --push" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------- fill_mask


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("fill_mask_script", ROOT / "scripts/fill_mask.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(script, monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["fill_mask.py", *map(str, args)])
    run_command(script.main)


def test_fill_mask_gives_k_pieces_a_mask_likeliest_first(script, exported) -> None:
    model = load_export(exported)
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    for k in (1, 3, 7):
        found = script.fill_mask(model, exported, "A [MASK] of the [MASK].", k)
        assert [len(candidates) for candidates in found] == [k, k]
        for candidates in found:
            values = [p for _, p in candidates]
            assert values == sorted(values, reverse=True) and len(set(candidates)) == k
    (everything,) = script.fill_mask(model, exported, "[MASK]", tokenizer.get_vocab_size())
    assert math.isclose(sum(p for _, p in everything), 1, rel_tol=1e-5)


def test_fill_mask_agrees_with_the_pipeline_of_transformers(script, exported) -> None:
    from transformers import pipeline

    sentence = "This method returns a new [MASK]."
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    (found,) = script.fill_mask(load_export(exported), exported, sentence)
    wanted = pipeline("fill-mask", model=str(exported))(sentence)
    ids = [tokenizer.token_to_id(piece) for piece, _ in found]
    assert ids == [item["token"] for item in wanted]
    assert [p for _, p in found] == pytest.approx([item["score"] for item in wanted], rel=1e-4)


def test_fill_mask_refuses_bytes_that_are_no_text(script, exported, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_script(script, monkeypatch, exported, "a\udcff [MASK]")
    said = "error: 'a\\udcff [MASK]' has an unpaired surrogate, as of a byte that is not UTF-8; "
    assert capsys.readouterr().err == said + "remove it\n"


def test_fill_mask_prints_a_line_a_mask(script, exported, monkeypatch, capsys) -> None:
    run_script(script, monkeypatch, exported, "The [MASK] is.", "A [MASK] and [MASK].")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("    ")] == [
        "The [MASK] is.",
        "A [MASK] and [MASK].",
    ]
    fillings = [line for line in lines if line.startswith("    ")]
    assert [len(re.findall(r"\S+ \d+%", line)) for line in fillings] == [5, 5, 5]


@pytest.mark.parametrize(
    "sentence, words", [("No mask here.", "no [MASK]"), ("a [MASK] " * 40, "64")]
)
def test_fill_mask_explains_a_sentence_it_cannot_fill_in_one_line(
    sentence, words, script, exported, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_script(script, monkeypatch, exported, sentence)
    assert_one_line_error(capsys, words)


@pytest.mark.parametrize(
    "name, size, words",
    [
        ("model.safetensors", 1000, "model.safetensors is damaged"),
        ("config.json", 1, "config.json is damaged"),
        ("vocab.txt", 60, "pieces, but config.json says"),
    ],
)
def test_a_damaged_export_is_explained_in_one_line(
    name, size, words, script, exported, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(exported, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / name, size)
    with pytest.raises(SystemExit, match="2"):
        run_script(script, monkeypatch, tmp_path / "cut", "A [MASK].")
    assert_one_line_error(capsys, words)


def test_fill_mask_explains_a_folder_without_a_model_in_one_line(
    script, tmp_path, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_script(script, monkeypatch, tmp_path, "A [MASK].")
    assert_one_line_error(capsys, str(tmp_path))


def test_a_damaged_tokenizer_of_a_run_is_not_exported(prepared, tmp_path) -> None:
    train_here(prepared, tmp_path / "run", "train.max_steps=1", "train.warmup_steps=0")
    path = tmp_path / "run/vocab/tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"lowercase":', '"lowercasE":'))
    config = replace(read_run_config(tmp_path / "run"), data_dir=str(tmp_path / "gone"))
    fingerprint = json.loads((tmp_path / "run/fingerprint.json").read_text())
    with pytest.raises(UserError, match="run/vocab/tokenizer.json is damaged"):
        find_vocabulary(tmp_path / "run", config, fingerprint["vocab_sha256"])


def test_the_generator_of_an_electra_is_pushed_with_it(tmp_path, monkeypatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    marker = {"schema": 1, "made_by": "bert-pretrain 1", "files": {"config.json": "0" * 64}}
    for folder in (tmp_path, tmp_path / "generator"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "export.json").write_text(json.dumps(marker))
    pretrain.export.push(tmp_path, "me/electra", False)
    names = {"config.json", "export.json"}
    assert hub.calls[-1] == ("me/electra", names | {f"generator/{name}" for name in names})


@pytest.mark.parametrize("positions", ["7", "0", "-1"])
def test_fewer_positions_than_a_sequence_needs_are_refused(positions, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["export", "run", "out", "--positions", positions])
    with pytest.raises(SystemExit):
        pretrain.export.main()
    assert "--positions must be at least 8" in capsys.readouterr().err


def test_a_model_without_types_of_tokens_has_a_tokenizer_that_gives_none(
    prepared, vocabulary, tmp_path
) -> None:
    from transformers import AutoTokenizer

    for sizes, has_types in ((1, False), (2, True)):
        out = tmp_path / str(sizes)
        model = PretrainingModel(
            replace(TINY, type_vocab_size=sizes), len(vocabulary), objectives_of("none")
        )
        write(model.eval(), prepared, out)
        found = AutoTokenizer.from_pretrained(out)("A string.", "A class.")
        assert ("token_type_ids" in found) == has_types
