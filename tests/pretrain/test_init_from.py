"""A run starts from any Hugging Face folder of its family, and changes nothing that it takes."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from fill_mask import fill_mask
from helpers import assert_same_run, check_hashes, metrics, run, train_here
from other_tokenizers import KINDS
from safetensors.torch import load_file, save_file

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES, read_vocabulary
from data_pipeline.vocabulary.existing import read_existing
from pretrain.config import Config
from pretrain.export import export, export_checkpoint
from pretrain.init_from import find_sources, hash_weights, split_piece, start_from
from pretrain.models.bert import PretrainingModel, continue_positions
from pretrain.models.build import model_of
from pretrain.read_export import load_export
from pretrain.read_run import read_run_config

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
TWO_STEPS = ("train.max_steps=2", "train.warmup_steps=1", "train.save_every=1")


def save_peer(
    folder: Path, hf_class: str, vocab_dir: Path, shards: str = "1GB", **settings
) -> Path:
    """Save a random model of transformers with a vocabulary, every tensor drawn."""
    import transformers

    peer = getattr(transformers, hf_class)
    pieces = len(read_vocabulary(vocab_dir))
    torch.manual_seed(1)
    model = peer(peer.config_class(vocab_size=pieces, **SIZES | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    for name in TOKENIZER_FILES:
        shutil.copy(vocab_dir / name, folder / name)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def read_config(root: Path, folder: Path, *overrides: str) -> Config:
    return load_config(Config, str(root / "config.yaml"), [f"init_from={folder}", *overrides])


def start(config: Config, pieces: list[str] | None = None) -> tuple[PretrainingModel, str]:
    """A new model of the config that starts from its folder, and what is said about it."""
    folder = Path(config.init_from)
    pieces = pieces or read_vocabulary(folder).pieces
    torch.manual_seed(0)
    model = model_of(config.model, len(pieces), config.data.objective)
    return model, "\n".join(start_from(folder, model, pieces)[0])


@pytest.fixture(scope="module")
def vocab_dir(prepared: Path) -> Path:
    return prepared / "data/vocab"


@pytest.fixture(scope="module")
def folder(vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `BertForPreTraining` of transformers; not to be written to."""
    return save_peer(
        tmp_path_factory.mktemp("peer"), "BertForPreTraining", vocab_dir, directionality="bidi"
    )


# ---------------------------------------------------------------------------- in and out again

ALBERT = {"embedding_size": 8, "num_hidden_groups": 2, "num_hidden_layers": 3}
CLASSES = {  # transformers' class -> (data.objective, its own settings)
    "BertForPreTraining": ("nsp", {}),
    "BertForMaskedLM": ("none", {"type_vocab_size": 1}),
    "ElectraForPreTraining": ("none", {"embedding_size": 8}),
    "AlbertForPreTraining": ("sop", ALBERT),
    "AlbertForMaskedLM": ("none", ALBERT),
    **dict.fromkeys(
        ("RobertaForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"),
        ("none", {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 65}),
    ),
}


@pytest.mark.parametrize("hf_class", CLASSES)
@pytest.mark.parametrize("files", ["one file", "shards", "pickle"])
def test_what_is_taken_and_exported_has_the_same_bits(
    hf_class, files, prepared, vocab_dir, tmp_path
) -> None:
    objective, settings = CLASSES[hf_class]
    shards = "20KB" if files == "shards" else "1GB"
    save_peer(tmp_path / "in", hf_class, vocab_dir, shards, **settings)
    wanted = weights_of(tmp_path / "in")
    if files == "pickle":
        torch.save(wanted, tmp_path / "in/pytorch_model.bin")
        (tmp_path / "in/model.safetensors").unlink()
    layers = settings.get("num_hidden_layers", 2)
    here = (f"data.objective={objective}", f"model.num_hidden_layers={layers}")
    config = read_config(prepared, tmp_path / "in", *here)
    model, said = start(config)
    assert said.partition("\n")[0] == f"starts from {tmp_path / 'in'}"
    origin = {"step": 0, "vocab_sha256": "", "data_sha256": ""}
    export(model.parts()[""], vocab_dir, tmp_path / "out", "", origin)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (len(list((tmp_path / "in").glob("*.safetensors"))) > 3) == (files == "shards")


def test_the_generator_of_an_electra_is_in_a_folder_of_its_own(
    prepared, vocab_dir, tmp_path
) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 64}
    save_peer(tmp_path / "in", "ElectraForPreTraining", vocab_dir, embedding_size=8)
    generator = tmp_path / "in/generator"
    save_peer(generator, "ElectraForMaskedLM", vocab_dir, embedding_size=8, **sizes)
    config = read_config(prepared, tmp_path / "in", "data.objective=none")
    assert config.model.generator_size == 0.5
    settings = json.loads((generator / "config.json").read_text())
    unsaid = {name: value for name, value in settings.items() if name != "hidden_size"}
    (generator / "config.json").write_text(json.dumps(unsaid))
    with pytest.raises(UserError, match="generator_size 8.0 is not in"):  # 256 of 32
        read_config(prepared, tmp_path / "in", "data.objective=none")
    (generator / "config.json").write_text(json.dumps(settings))
    model, said = start(config)
    note = "its embeddings are not used, since those of the model differ"
    assert said == f"starts from {tmp_path / 'in'}\nstarts from {generator}; {note}"
    found, wanted = model.parts()["generator"], weights_of(generator)
    wanted |= {n: t for n, t in weights_of(tmp_path / "in").items() if ".embeddings." in n}
    for name, tensor in config.model.family.to_hf(found.state_dict()).items():
        assert torch.equal(tensor, wanted[name]), name  # shared embeddings are the discriminator's
    for name in TOKENIZER_FILES:  # save_pretrained of the model alone writes none
        (generator / name).unlink()
    model, said = start(config, [*read_vocabulary(vocab_dir).pieces, "newpiece"])
    assert said.count("1,024 pieces of its vocabulary, and 1 new ones as means") == 2
    both = {n: t for n, t in weights_of(tmp_path / "in").items() if ".embeddings." in n}
    weights = weights_of(generator) | both
    save_file(weights, generator / "model.safetensors", {"format": "pt"})
    assert start(config)[1] == f"starts from {tmp_path / 'in'}\nstarts from {generator}"
    train_here(prepared, tmp_path / "run", f"init_from={tmp_path / 'in'}", "data.objective=none")
    assert load_export(tmp_path / "run/export").config.generator_size == 0.5


def test_further_entries_of_the_config_pass_to_the_export(
    folder, prepared, vocab_dir, tmp_path
) -> None:
    shutil.copytree(folder, tmp_path / "in")
    path = tmp_path / "in/config.json"
    settings = json.loads(path.read_text())
    settings |= {"classifier_dropout": 0.2, "use_cache": False, "id2label": {"0": "no", "1": "yes"}}
    settings |= {"pooler_fc_size": 768, "pooler_type": "first_token_transform"}  # as in hfl/rbt3
    settings |= {"output_hidden_states": True, "output_attentions": True}
    path.write_text(json.dumps(settings))
    train_here(prepared, tmp_path / "run", f"init_from={tmp_path / 'in'}", *TWO_STEPS)
    found = json.loads((tmp_path / "run/export/config.json").read_text())
    ours = {"torch_dtype", "position_embedding_type"}
    assert found.keys() - ours == settings.keys() - {"dtype", "transformers_version"}
    passed = ("classifier_dropout", "use_cache", "id2label", "pooler_type", "directionality")
    for name in (*passed, "output_hidden_states", "output_attentions"):
        assert found[name] == settings[name], name
    assert load_export(tmp_path / "run/export").config.extra["pooler_fc_size"] == 768
    with pytest.raises(UserError, match="transformers cannot load .* wrong in model.extra, {'num_"):
        train_here(prepared, tmp_path / "other", "model.extra={num_labels: two}", *TWO_STEPS)


def test_a_run_starts_there_resumes_and_says_so(
    folder, prepared, vocab_dir, tmp_path, capsys
) -> None:
    here = (f"init_from={folder}", *TWO_STEPS)
    train_here(prepared, tmp_path / "a", *here, "train.learning_rate=1e-30")
    assert f"starts from {folder}\n" in capsys.readouterr().out
    found, wanted = load_file(tmp_path / "a/export/model.safetensors"), weights_of(folder)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    before, after = (row["eval/mlm_loss"] for row in metrics(tmp_path / "a") if "eval/loss" in row)
    assert metrics(tmp_path / "a")[0]["step"] == 0 and abs(before - after) < 1e-5
    fingerprint = json.loads((tmp_path / "a/fingerprint.json").read_text())
    assert fingerprint["init_from_sha256"] == hash_weights(folder)
    card = (tmp_path / "a/export/README.md").read_text()
    assert f"pretrained on from `{folder.name}`" in card and hash_weights(folder) in card

    shutil.copytree(folder, tmp_path / "moved")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000002")
    here = (f"init_from={tmp_path / 'moved'}", *TWO_STEPS, "train.learning_rate=1e-30")
    train_here(prepared, tmp_path / "b", *here)
    assert "starts from" not in capsys.readouterr().out
    assert_same_run(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "c", ignore=shutil.ignore_patterns("step-*", "exp*"))
    train_here(prepared, tmp_path / "c", *here)  # as if killed before its first checkpoint
    assert_same_run(tmp_path / "a", tmp_path / "c")
    save_peer(tmp_path / "moved", "BertForPreTraining", vocab_dir, initializer_range=0.5)
    weights = load_file(tmp_path / "moved/model.safetensors")
    weights["bert.embeddings.LayerNorm.bias"] += 1
    save_file(weights, tmp_path / "moved/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the weights of init_from differ"):
        train_here(prepared, tmp_path / "b", *here, "train.max_steps=4", "train.extend=true")


@pytest.mark.parametrize("has_pairs", [True, False])
def test_a_pair_head_is_exported_where_the_folder_had_one_or_pairs_have_trained_it(
    has_pairs, folder, prepared, vocab_dir, tmp_path
) -> None:
    names = {False: "BertForMaskedLM", True: "BertForPreTraining"}
    source = folder if has_pairs else save_peer(tmp_path / "in", names[False], vocab_dir)
    phases = "train.phases=[{steps: 1, single_segment_prob: 1}, {steps: 1}]"
    train_here(prepared, tmp_path / "run", f"init_from={source}", *TWO_STEPS, phases)
    for step in (1, 2):
        checkpoint, out = tmp_path / f"run/checkpoints/step-0000000{step}", tmp_path / f"out{step}"
        export_checkpoint(checkpoint, read_run_config(tmp_path / "run"), out)
        found = json.loads((out / "config.json").read_text())["architectures"]
        assert found == [names[has_pairs or step == 2]]


def test_positions_beyond_the_sequences_of_a_run_stay_those_of_the_folder(
    folder, prepared, tmp_path
) -> None:
    name = "bert.embeddings.position_embeddings.weight"
    wanted = weights_of(folder)[name]
    here = (f"init_from={folder}", "data.max_seq_length=32", "train.learning_rate=1e-30")
    train_here(prepared, tmp_path / "run", *here, *TWO_STEPS)
    said = {64: "33 to 64 are as the model that", 48: "33 to 48 are as", 70: "65 to 70 continue"}
    config = read_config(prepared, folder, f"run_dir={tmp_path / 'run'}", *here, *TWO_STEPS)
    for positions, line in said.items():
        out = tmp_path / str(positions)
        checkpoint = tmp_path / "run/checkpoints/step-00000002"
        export_checkpoint(checkpoint, config, out, None if positions == 64 else positions)
        found = load_file(out / "model.safetensors")[name]
        further = continue_positions(wanted, positions)
        torch.testing.assert_close(found, further, rtol=0, atol=1e-6)
        assert line in (out / "README.md").read_text()


# ------------------------------------------------------------------------- what it lacks or has


def test_heads_that_are_missing_start_anew_and_are_named(prepared, vocab_dir, tmp_path) -> None:
    save_peer(tmp_path, "BertModel", vocab_dir)
    model, said = start(read_config(prepared, tmp_path))
    assert said == f"starts from {tmp_path}; not in it and started at random: mlm, nsp"
    wanted = weights_of(tmp_path)
    assert torch.equal(model.pooler.weight, wanted["pooler.dense.weight"])
    assert torch.equal(
        model.layers[1].up.weight, wanted["encoder.layer.1.intermediate.dense.weight"]
    )


def test_what_is_not_taken_is_named_and_fewer_layers_are_the_first_ones(
    prepared, vocab_dir, tmp_path
) -> None:
    """As hfl/rbt3 began, with the first three of twelve layers."""
    save_peer(tmp_path, "BertForSequenceClassification", vocab_dir, num_hidden_layers=3)
    model, said = start(read_config(prepared, tmp_path, "model.num_hidden_layers=2"))
    assert "started at random: mlm, nsp; not used: bert.encoder.layer.2." in said
    assert said.endswith(" ...") and len(model.layers) == 2


def test_a_folder_from_tensorflow_has_older_names_and_a_decoder(
    folder, prepared, vocab_dir, tmp_path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    wanted, _ = start(read_config(prepared, tmp_path))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in weights.items()
    }
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    words = old["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.weight"] = words.clone()
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    found, said = start(read_config(prepared, tmp_path))
    assert said == f"starts from {tmp_path}"
    state = found.state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.state_dict().items())

    old["cls.predictions.decoder.weight"] = words + 1
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="decoder.weight is not the matrix of word embeddings"):
        start(read_config(prepared, tmp_path))


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "overrides", "named"),
    [
        ({"is_decoder": True}, (), "is_decoder is true, as in a decoder; models here read both"),
        ({"add_cross_attention": True}, (), "add_cross_attention is true, as in a decoder"),
        (
            {"position_embedding_type": "relative_key_query"},
            (),
            "position_embedding_type is relative_key_query, but only absolute .* transformers 5",
        ),
        ({"tie_word_embeddings": False}, (), "tie_word_embeddings is false"),
        (
            {"quantization_config": {"bits": 4}},
            (),
            "says that the model is quantized; give one that",
        ),
        ({"auto_map": {"AutoModel": "x.Y"}}, (), "says that the model is computed by its own code"),
        ({"model_type": "gpt2"}, (), "model_type is 'gpt2'; it can be bert"),
        ({}, ("model.architecture=roberta",), "architecture is roberta, but init_from .* bert"),
        ({"type_vocab_size": 1}, (), "type_vocab_size is 1, but data.objective nsp needs one for"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(
    settings, overrides, named, folder, prepared, tmp_path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    found = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | settings))
    with pytest.raises(UserError, match=named) as error:
        read_config(prepared, tmp_path, *overrides)
    assert "\n" not in str(error.value)


def test_sizes_that_differ_are_refused_by_name(folder, prepared, tmp_path) -> None:
    pieces = read_vocabulary(folder).pieces
    sizes = {"hidden_size": (32, 64), "intermediate_size": (128, 96)}
    sizes |= {"max_position_embeddings": (64, 80), "type_vocab_size": (2, 3)}
    for name, (theirs, ours) in sizes.items():
        config = read_config(prepared, folder, f"model.{name}={ours}")
        wanted = f"{name} is {theirs}, but {ours} in this run; remove model.{name}"
        with pytest.raises(UserError, match=wanted):
            start(config)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    for name, number, message in (
        (
            "hidden_size",
            64,
            r"of 1024 x 32, but its config.json makes it \d* x 64; put the files of",
        ),
        (
            "num_hidden_layers",
            3,
            r"lacks bert.encoder.layer.2.* which a model of the config has; lower",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | {name: number}))
        for own in (None, [*pieces, "new"]):  # whose rows are carried one by one
            with pytest.raises(UserError, match=message):
                start(read_config(prepared, tmp_path, f"model.{name}={number}"), own)


def test_settings_that_no_shape_tells_are_refused(folder, prepared, vocab_dir, tmp_path) -> None:
    with pytest.raises(UserError, match="num_attention_heads is 2, but 4 in this run; remove"):
        start(read_config(prepared, folder, "model.num_attention_heads=4"))
    with pytest.raises(UserError, match="hidden_act is gelu, but relu in this run"):
        start(read_config(prepared, folder, "model.hidden_act=relu"))
    sizes = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}
    save_peer(tmp_path / "ro", "RobertaForMaskedLM", vocab_dir, **sizes)
    other = ("data.objective=none", "model.pad_token_id=0", "model.max_position_embeddings=65")
    with pytest.raises(UserError, match="pad_token_id is 1, but 0 in this run; remove"):
        start(read_config(prepared, tmp_path / "ro", *other))  # positions count from it
    save_peer(tmp_path / "in", "ElectraForPreTraining", vocab_dir, embedding_size=8)
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 64}
    for settings in (
        {"num_attention_heads": 2},
        {"num_attention_heads": 1, "hidden_act": "relu"},
        {"num_attention_heads": 1, "layer_norm_eps": 0.1},
    ):
        save_peer(tmp_path / "in/generator", "ElectraForMaskedLM", vocab_dir, **sizes | settings)
        name, value = list(settings.items())[-1]
        with pytest.raises(UserError, match=f"{name} is {value}, but .* starts at random"):
            start(read_config(prepared, tmp_path / "in", "data.objective=none"))


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_that_runs_a_command_runs_nothing(folder, prepared, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "in", ignore=lambda *_: ["model.safetensors"])
    evil = {"bert.pooler.dense.bias": Command(f"touch {tmp_path / 'ran'}")}
    torch.save(evil, tmp_path / "in/pytorch_model.bin")
    with pytest.raises(
        UserError, match="pytorch_model.bin is damaged.*: a pickle that holds more than te"
    ):
        start(read_config(prepared, tmp_path / "in"))
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_a_clone_left_without_its_files_is_told(folder, prepared, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "in")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "in/model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model.safetensors is damaged.*: a pointer of Git LFS;"):
        start(read_config(prepared, tmp_path / "in"))
    (tmp_path / "in/config.json").unlink()
    with pytest.raises(UserError, match=r"in has no config.json; put the one of its weights there"):
        read_config(prepared, tmp_path / "in")


def test_a_run_folder_to_start_from_is_told_where_its_export_is(folder, prepared, tmp_path) -> None:
    export = shutil.copytree(folder, tmp_path / "in/export")
    with pytest.raises(UserError, match=rf"in has no config.json; its export is {export}"):
        read_config(prepared, tmp_path / "in")
    (export / "tokenizer.json").touch()
    with pytest.raises(UserError, match=rf"in, to which .* is a run folder; .* is {export}"):
        read_existing(VocabConfig(path=str(tmp_path / "in")))


def test_weights_that_unpack_to_more_than_their_file_are_refused_before_it(
    folder, prepared, tmp_path
) -> None:
    """64 MB in a file of 64 kB, and 2^40 numbers of which one is stored."""
    shutil.copytree(folder, tmp_path / "in", ignore=lambda *_: ["model.safetensors"])
    path, config = tmp_path / "in/pytorch_model.bin", read_config(prepared, tmp_path / "in")
    torch.save({"bert.pooler.dense.bias": torch.zeros(1 << 24)}, tmp_path / "plain")
    with ZipFile(tmp_path / "plain") as plain, ZipFile(path, "w", ZIP_DEFLATED) as packed:
        for item in plain.infolist():
            packed.writestr(item.filename, plain.read(item))
    assert path.stat().st_size < 1 << 17 and "bias" in str(torch.load(path, weights_only=True))
    with pytest.raises(UserError, match="pytorch_model.bin is damaged.*: it is compressed"):
        start(config)
    torch.save({"bert.pooler.dense.bias": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(UserError, match="bert.pooler.dense.bias is not a tensor of finite numbers"):
        start(config)


def test_a_folder_without_sound_weights_is_refused(folder, prepared, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    done = run(prepared, tmp_path / "run", f"init_from={tmp_path}", processes=2)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode == 2 and "model.safetensors is damaged" in line, done.stderr
    assert not (tmp_path / "run").exists()
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="pytorch_model.bin is damaged"):
        start(read_config(prepared, tmp_path))
    torch.save({0: torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="0 is not a tensor of finite numbers"):
        start(read_config(prepared, tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="holds neither model.safetensors nor pytorch_model.bin"):
        train_here(prepared, tmp_path / "run", f"init_from={tmp_path}")
    assert not (tmp_path / "run").exists()
    nowhere = f"init_from={tmp_path / 'nowhere'}"
    with pytest.raises(UserError, match="no .*nowhere, to which vocab.path or init_from is set"):
        prepare_here(prepared, tmp_path, nowhere)
    with pytest.raises(UserError, match="nowhere is not a folder; download a model from a hub"):
        train_here(prepared, tmp_path / "run", nowhere)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_weights_are_refused(dtype: str, folder, prepared, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights, name = load_file(folder / "model.safetensors"), "bert.pooler.dense.weight"
    weights[name] = weights[name].to(getattr(torch, dtype))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{name} in {dtype}; give weights that are not quantized"):
        start(read_config(prepared, tmp_path))


# ------------------------------------------------------------------------------ vocabularies


def prepare_here(root: Path, data_dir: Path, *overrides: str) -> None:
    given = [f"data_dir={data_dir}", *overrides]
    prepare(load_config(DataConfig, str(root / "config.yaml"), given), workers=1)


def test_an_extended_vocabulary_gets_the_means_of_what_it_was_split_into(
    folder, prepared, tmp_path, capsys
) -> None:
    here = (f"init_from={folder}", "vocab.size=null", "vocab.extend=76")
    prepare_here(prepared, tmp_path / "data", *here)
    old, new = read_vocabulary(folder), read_vocabulary(tmp_path / "data/vocab")
    assert new.pieces[:1024] == old.pieces and len(new) == 1152  # a multiple of 64
    capsys.readouterr()
    here += (f"data_dir={tmp_path / 'data'}", *TWO_STEPS, "train.learning_rate=1e-30")
    train_here(prepared, tmp_path / "run", *here)
    assert "1,024 pieces of its vocabulary, and 76 new ones as means" in capsys.readouterr().out
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted, found = weights_of(folder), load_file(tmp_path / "run/export/model.safetensors")
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        torch.testing.assert_close(found[name][:1024], wanted[name], rtol=0, atol=1e-6)
        for i, piece in enumerate(new.pieces[1024:1100], 1024):
            if piece.startswith("##"):
                continue
            ids = tokenizer.encode(piece, add_special_tokens=False).ids
            mean = wanted[name][ids].mean(0)
            torch.testing.assert_close(found[name][i], mean, rtol=0, atol=1e-6, msg=piece)


def test_pieces_are_split_as_wordpiece_splits_words() -> None:
    ids = {piece: i for i, piece in enumerate(["un", "##able", "##a", "##b", "a", "able", "[PAD]"])}
    assert split_piece("unable", ids) == [0, 1]
    assert split_piece("##ab", ids) == [2, 3]
    assert split_piece("ableb", ids) == [5, 3]
    assert split_piece("unclear", ids) == split_piece("[PAD]", ids) == split_piece("##", ids) == []
    assert split_piece("unaa", {"Ġun": 0, "un": 1, "a": 2}, "") == [1, 2, 2]


def test_special_tokens_take_the_rows_of_their_twins_and_other_kinds_of_pieces_means() -> None:
    old = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġthe", "Ġun", "able", "a"]
    new = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Ġunable", "Ġthe", "<new>"]
    assert find_sources(old, new, Path(), 9) == [[1], [3], [0], [2], [4], [6, 7], [5], []]


def test_padded_rows_at_the_end_of_the_embeddings_are_left_out(folder, prepared, tmp_path) -> None:
    from transformers import BertForPreTraining

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    peer = BertForPreTraining.from_pretrained(tmp_path)
    peer.resize_token_embeddings(1088)  # a multiple of 64
    peer.save_pretrained(tmp_path)
    config = read_config(prepared, tmp_path)
    model, line = start(config)
    wanted = weights_of(folder)
    for name, tensor in config.model.family.to_hf(model.state_dict()).items():
        assert torch.equal(tensor, wanted[name]), name
    (tmp_path / "added_tokens.json").write_text("{}")  # whose rows these might be
    with pytest.raises(UserError, match="1,088 word embeddings, but its vocabulary has 1,024"):
        start(config)


def test_another_order_of_pieces_takes_each_row_along(folder, prepared) -> None:
    pieces = read_vocabulary(folder).pieces
    model, said = start(read_config(prepared, folder), [*pieces[:5], *reversed(pieces[5:])])
    words = weights_of(folder)["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(model.embeddings.word.weight[5:], words[5:].flip(0))
    assert "1,024 pieces of its vocabulary, and 0 new ones" in said


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_layout_of_bert_base_chinese_is_taken_as_it_is(
    prepared, vocab_dir, tmp_path, end: str
) -> None:
    """[PAD] at 0, [unused1] to [unused99], then [UNK], [CLS], [SEP] and [MASK] at 100 to 103; a
    `vocab.txt` without a last end of line, and lower case set nowhere."""
    unused = [f"[unused{i}]" for i in range(1, 100)]
    ordinary = read_vocabulary(vocab_dir).pieces[5:]
    pieces = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ordinary]
    other = tmp_path / "vocab"
    other.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(vocab_dir / name, other)
    (other / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    folder = save_peer(tmp_path / "in", "BertForMaskedLM", other)
    (folder / "tokenizer.json").unlink(), (folder / "tokenizer_config.json").unlink()
    (folder / "vocab.txt").write_bytes(end.join(pieces).encode())
    here = (f"init_from={folder}", "vocab.size=null", "data.objective=none")
    prepare_here(prepared, tmp_path / "data", *here)
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    assert vocabulary.pieces == pieces
    store = TokenStore.open(tmp_path / "data/store", "train", vocabulary)
    here += (f"data_dir={tmp_path / 'data'}",)
    config = read_config(prepared, folder, *here[1:])
    batch = BatchSource(store, config.data, 0).batch(0, 16)
    assert (batch.input_ids[batch.cu_seqlens[:-1]] == 101).all()
    assert (batch.input_ids[batch.cu_seqlens[1:] - 1] == 102).all()
    hidden = batch.input_ids[batch.masked_positions]
    assert (hidden == 103).float().mean() > 0.6 and not (hidden < 103).any()
    train_here(prepared, tmp_path / "run", *here, *TWO_STEPS)
    assert asdict(load_export(tmp_path / "run/export").config)["pad_token_id"] == 0
    tokenizer = json.loads((tmp_path / "run/export/tokenizer.json").read_text(encoding="utf-8"))
    assert {t["content"]: t["id"] for t in tokenizer["added_tokens"]}["[MASK]"] == 103


# ---------------------------------------------------------------------- tokenizers of other kinds


@pytest.mark.parametrize(
    "hf_class, kind, settings",
    [
        ("RobertaForMaskedLM", "byte-level BPE", {"type_vocab_size": 1, "pad_token_id": 1}),
        ("AlbertForPreTraining", "unigram", ALBERT),
    ],
)
def test_a_model_brings_its_tokenizer_of_another_kind(
    hf_class, kind, settings, prepared, tmp_path, capsys
) -> None:
    """From a folder with weights, `config.json` and `tokenizer.json` to an export that does the
    same."""
    import transformers

    folder = tmp_path / "in"
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    tokenizer = KINDS[kind](text)
    torch.manual_seed(1)
    peer = getattr(transformers, hf_class)
    sizes = SIZES | {"max_position_embeddings": 66, "vocab_size": tokenizer.get_vocab_size()}
    model = peer(peer.config_class(**sizes | settings)).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    here = (f"init_from={folder}", "vocab.size=null", "data.objective=none")
    sentences = "eval.probes.sentences=[The name of the [MASK] is a string.]"
    here += (sentences.replace("[The", "['The").replace("string.]", "string.']"),)
    prepare_here(prepared, tmp_path / "data", *here)
    here += (f"data_dir={tmp_path / 'data'}", *TWO_STEPS, "train.learning_rate=1e-30")
    train_here(prepared, tmp_path / "run", *here)
    said = capsys.readouterr().out
    assert f"starts from {folder}" in said and "of its vocabulary" not in said
    out = tmp_path / "run/export"
    assert "transformers loads every key" in (out / "README.md").read_text()
    assert check_hashes(out) == ["model.safetensors: OK"]

    kept = transformers.AutoTokenizer.from_pretrained(out)
    assert len(kept) == tokenizer.get_vocab_size()
    sentence = f"The value of the {kept.mask_token} is a string."
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"A sentence with a {kept.mask_token}." in card
    assert f"mask_token: '{kept.mask_token}'" in card or f"mask_token: {kept.mask_token}" in card
    inner = kept(sentence, add_special_tokens=False)["input_ids"]
    assert inner == tokenizer.encode(sentence, add_special_tokens=False).ids
    masked_lm = getattr(transformers, hf_class.replace("PreTraining", "MaskedLM"))
    pipe = transformers.pipeline(
        "fill-mask", model=masked_lm.from_pretrained(out), tokenizer=kept, device="cpu"
    )
    (found,) = fill_mask(load_export(out), out, sentence.replace(kept.mask_token, "[MASK]"))
    for (shown, p), wanted in zip(found, pipe(sentence), strict=True):
        assert shown == kept.decode([wanted["token"]]).strip() or shown == "▁"
        assert p == pytest.approx(wanted["score"], rel=1e-4)
    again = read_config(prepared, out, "vocab.size=null", "data.objective=none")
    model, line = start(again)
    assert "of its vocabulary" not in line  # an export of ours is a way in too


def test_weights_that_are_not_finite_and_shards_that_are_missing_are_refused(
    folder, prepared, vocab_dir, tmp_path
) -> None:
    shutil.copytree(folder, tmp_path / "nan")
    weights, name = load_file(folder / "model.safetensors"), "bert.pooler.dense.weight"
    weights[name][0, 0] = torch.nan
    save_file(weights, tmp_path / "nan/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is not a tensor of finite numbers"):
        start(read_config(prepared, tmp_path / "nan"))
    save_peer(tmp_path / "in", "BertForPreTraining", vocab_dir, shards="20KB")
    sorted((tmp_path / "in").glob("*.safetensors"))[1].unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-\d+.safetensors, which its index"):
        hash_weights(tmp_path / "in")


@pytest.mark.parametrize("rows", [100 + 128, 100 + 7, 99])
def test_embeddings_that_do_not_belong_to_a_vocabulary_are_refused(rows: int) -> None:
    pieces = [f"piece{i}" for i in range(100)]
    with pytest.raises(UserError, match=f"has {rows} word embeddings, but its vocabulary has 100"):
        find_sources(pieces, pieces, Path(), rows)
    assert find_sources(pieces, pieces, Path(), 104) == [[i] for i in range(100)]


def test_another_generator_is_another_start(vocab_dir, tmp_path) -> None:
    save_peer(tmp_path, "ElectraForPreTraining", vocab_dir, embedding_size=8)
    generator = save_peer(tmp_path / "generator", "ElectraForMaskedLM", vocab_dir, embedding_size=8)
    before = hash_weights(tmp_path)
    weights = load_file(generator / "model.safetensors")
    weights["generator_predictions.LayerNorm.bias"] += 1
    save_file(weights, generator / "model.safetensors", {"format": "pt"})
    assert hash_weights(tmp_path) != before
