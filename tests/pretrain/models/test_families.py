"""Each family computes what transformers' class of that name computes with the same weights."""

import os
from dataclasses import asdict, replace

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig, load_config
from data_pipeline.sampling.batches import Batch, BatchSource
from pretrain.config import Config, ModelConfig
from pretrain.families import FAMILIES, hf_config, read_hf_config
from pretrain.models.attention import attend_padded
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import objectives_of

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}


def config_of(architecture: str, **settings) -> ModelConfig:
    """A small model with the defaults of its family."""
    defaults = dict(FAMILIES[architecture].defaults)
    return ModelConfig(architecture=architecture, **defaults | SIZES | settings)


PAIR_LABEL = {
    "BertForPreTraining": "next_sentence_label",
    "AlbertForPreTraining": "sentence_order_label",
}
ALBERT = {"embedding_size": 8, "extra": {"classifier_dropout_prob": 0.0}}
CASES = {  # name -> (config, data.objective)
    "bert without pairs": (config_of("bert"), "none"),
    "roberta": (config_of("roberta"), "none"),
    "roberta with [PAD] at 9": (config_of("roberta", pad_token_id=9), "none"),
    "albert": (config_of("albert", **ALBERT), "sop"),
    "albert of two groups": (config_of("albert", **ALBERT, num_hidden_groups=2), "sop"),
    "albert without pairs": (config_of("albert", embedding_size=None), "none"),
}


@pytest.fixture(params=CASES)
def case(request) -> tuple[ModelConfig, str]:
    return CASES[request.param]


def build(config: ModelConfig, objective: str, vocab_size: int) -> PretrainingModel:
    """A model whose every parameter counts: biases and norms as random as the rest."""
    torch.manual_seed(0)
    model = PretrainingModel(config, vocab_size, objectives_of(objective))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def build_peer(model: PretrainingModel) -> nn.Module:
    """transformers' model with the same weights."""
    import transformers

    settings = hf_config(asdict(model.config), len(model.mlm.bias), model.hf_class)
    peer = getattr(transformers, model.hf_class)
    peer = peer(peer.config_class(**settings))
    peer.tie_weights()
    weights = model.config.family.to_hf(model.state_dict())
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert set(missing) <= set(peer._tied_weights_keys) and not unexpected
    return peer.train()


def batch_of(store, objective: str, pad: int = 0) -> Batch:
    """Eight sequences of the real store, of different lengths, without the id that means padding
    to the peer."""
    data = PairsConfig(max_seq_length=64, short_seq_prob=0.5, objective=objective)
    batch = BatchSource(store, data, seed=3).batch(0, 8)
    assert len(set(batch.cu_seqlens.diff().tolist())) > 2
    return replace(batch, input_ids=torch.where(batch.input_ids == pad, 7, batch.input_ids))


def mean_losses(model: PretrainingModel, batch: Batch) -> torch.Tensor:
    rows = model(batch)
    return (rows[:, 0] / rows[:, 2].clamp(min=1)).sum()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert found.shape == wanted.shape, name
    difference = (found - wanted).detach().abs().max().item()
    assert difference <= 1e-5, f"{name} differs by {difference}"


# ------------------------------------------------------------------- parity with transformers


def test_logits_losses_and_gradients_are_those_of_transformers(case, store, vocabulary) -> None:
    config, objective = case
    batch = batch_of(store, objective, config.pad_token_id)
    model = build(config, objective, len(vocabulary)).train()
    peer = build_peer(model)
    padded = batch.padded(config.pad_token_id)
    label = padded.pop("next_sentence_label")
    out = peer(**padded | ({} if objective == "none" else {PAIR_LABEL[model.hf_class]: label}))
    loss, scores, *others = out.values()
    rows = scores[batch.sequence_ids, batch.position_ids]
    found, wanted = model.logits(batch), (rows[batch.masked_positions], *others)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_close(a, b, f"logits of head {number}")
    assert_close(mean_losses(model, batch), loss, "loss")

    mean_losses(model, batch).backward()
    loss.backward()
    found = config.family.to_hf({name: p.grad for name, p in model.named_parameters()})
    wanted = {name: p.grad for name, p in peer.named_parameters()}
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert_close(found[name], wanted[name], f"gradient of {name}")
    still = [n for n, p in model.named_parameters() if p.grad.abs().max() == 0]
    assert not still, "these gradients say nothing"


def test_the_path_of_a_gpu_and_gradient_checkpointing_change_nothing(
    case, store, vocabulary, monkeypatch
) -> None:
    config, objective = case
    batch = batch_of(store, objective)
    model = build(config, objective, len(vocabulary))
    mean_losses(model, batch).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr("pretrain.models.layers.attend", attend_padded)
    monkeypatch.setattr("pretrain.models.bert.TOKEN_MULTIPLE", 1)
    model.gradient_checkpointing = True
    mean_losses(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name], name)


# -------------------------------------------------------------------------------------- sizes

CHINESE = 21_128
BASE, LARGE = {}, {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
PUBLISHED = [  # family, sizes, vocabulary, parameters of the encoder with its pooler
    ("bert", BASE, CHINESE, 102_267_648),  # bert-base-chinese, hfl/chinese-roberta-wwm-ext
    ("bert", {"num_hidden_layers": 3}, CHINESE, 38_476_800),  # hfl/rbt3
    ("bert", LARGE, 30_522, 335_141_888),  # bert-large-uncased
    ("roberta", {"pad_token_id": 1}, 50_265, 124_645_632),  # roberta-base
    ("albert", BASE, 30_000, 11_683_584),  # albert-base-v2
    ("albert", LARGE, 30_000, 17_683_968),  # albert-large-v2
    ("albert", BASE, CHINESE, 10_547_968),
]


def count(*modules: nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module for p in module.parameters())


@pytest.mark.parametrize(("architecture", "sizes", "pieces", "wanted"), PUBLISHED)
def test_a_family_has_as_many_parameters_as_its_published_models(
    architecture, sizes, pieces, wanted
) -> None:
    settings = dict(FAMILIES[architecture].defaults) | sizes
    with torch.device("meta"):
        model = PretrainingModel(ModelConfig(architecture=architecture, **settings), pieces)
    assert count(model.embeddings, model.project, model.layers, model.pooler) == wanted


def test_roberta_with_its_mlm_head_has_as_many_as_the_published_one() -> None:
    config = ModelConfig("roberta", pad_token_id=1, **FAMILIES["roberta"].defaults)
    with torch.device("meta"):
        model = PretrainingModel(config, 50_265, objectives_of("none"))
    assert count(model) == 124_697_433
    assert len(model.embeddings.position.weight) == 514


# --------------------------------------------------------------------------------- the config


def test_the_config_of_transformers_leads_there_and_back(case) -> None:
    config, _ = case
    config = replace(config, intermediate_size=48, extra={"classifier_dropout": 0.2})
    settings = hf_config(asdict(config), 100, config.family.masked_lm)
    found = ModelConfig(**read_hf_config(settings, "config.json"))
    config = replace(config, embedding_size=found.embedding_size)  # null: the hidden size
    assert found == config and found.embedding_width == config.embedding_width


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.architecture=xlnet",), "architecture is 'xlnet'; it can be bert, roberta"),
        (("model.embedding_size=64",), "embedding_size is 64, and BERT has no such setting"),
        (("model.num_hidden_groups=1",), "num_hidden_groups is 1, and BERT has no such"),
        (("model.architecture=albert", "model.num_hidden_groups=13"), "13 is more than the 12"),
        (("model.architecture=roberta",), "objective is nsp, and RoBERTa has no pair head"),
    ],
)
def test_a_setting_that_a_family_lacks_is_refused(overrides, named, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("corpus: {builtin: python-docs}\n")
    with pytest.raises(UserError, match=named):
        load_config(Config, str(tmp_path / "config.yaml"), list(overrides))


def test_a_family_has_its_own_defaults_beneath_what_a_config_gives(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(
        "corpus: {builtin: python-docs}\nmodel: {architecture: albert, hidden_act: relu}\n"
    )
    model = load_config(Config, str(tmp_path / "config.yaml")).model
    assert (model.embedding_size, model.num_hidden_groups, model.hidden_act) == (128, 1, "relu")
    assert model.hidden_dropout_prob == 0 and model.hidden_size == 768
