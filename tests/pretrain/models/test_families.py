"""Each family computes what transformers' class of that name computes with the same weights."""

import os
from dataclasses import asdict, replace
from itertools import pairwise

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from pretrain import loss, probes
from pretrain.config import Config, ModelConfig
from pretrain.families import FAMILIES, hf_config, read_hf_config
from pretrain.loss import linear_cross_entropy
from pretrain.metrics import area_under_curve
from pretrain.models.attention import attend_padded
from pretrain.models.bert import PretrainingModel, settle_embeddings
from pretrain.models.build import model_of
from pretrain.models.electra import Electra, draw_chance
from pretrain.objectives import objectives_of

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}


CHINESE = 21_128
BASE, LARGE = {}, {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
SMALL_ELECTRA = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4}


def count(*modules: nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module for p in module.parameters())


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
    "roberta with relu": (config_of("roberta", hidden_act="relu"), "none"),  # but its head has gelu
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

    settings = hf_config(asdict(model.config), model.vocab_size, model.hf_class)
    peer = getattr(transformers, model.hf_class)
    peer = peer(peer.config_class(**settings))
    peer.tie_weights()
    weights = model.config.family.to_hf(model.state_dict())
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert set(missing) <= set(peer._tied_weights_keys or ()) and not unexpected
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


# ------------------------------------------------------------------------------------- ELECTRA

ELECTRA = config_of("electra", embedding_size=24, generator_size=0.5)


@pytest.fixture(params=["gelu", "relu"])
def electra(request, vocabulary) -> Electra:
    """A model whose every parameter counts."""
    torch.manual_seed(0)
    model = Electra(replace(ELECTRA, hidden_act=request.param), len(vocabulary))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture
def filled(electra, store) -> tuple[Batch, Batch, torch.Tensor]:
    """A batch, the same with its masks filled as the model will fill them, and what was replaced
    in each of its tokens."""
    batch = batch_of(store, "none")
    chance = draw_chance(batch)
    p = electra.logits(batch)[0].softmax(-1).double()
    drawn = (p.cumsum(-1) > chance[:, None]).int().argmax(-1)
    labels = batch.masked_labels.clone()
    labels[::3] = drawn[::3]  # draws that are right
    batch = replace(batch, masked_labels=labels)
    ids = batch.input_ids.clone()
    ids[batch.masked_positions] = drawn
    original = batch.input_ids.clone()
    original[batch.masked_positions] = batch.masked_labels
    assert (drawn == labels).sum() < len(drawn) / 2
    return batch, replace(batch, input_ids=ids), ids != original


def test_both_models_of_an_electra_are_those_of_transformers(electra, filled) -> None:
    """Logits, losses and gradients, which the shared embeddings get from both."""
    batch, corrupted, is_replaced = filled
    parts = electra.parts()
    one, other = build_peer(parts[""]), build_peer(parts["generator"])
    assert type(one).__name__ == "ElectraForPreTraining"
    assert type(other).__name__ == "ElectraForMaskedLM"
    masked, whole = batch.padded(), corrupted.padded()
    for padded in (masked, whole):
        padded.pop("next_sentence_label")
    labels = torch.zeros_like(whole.pop("labels"))
    labels[batch.sequence_ids, batch.position_ids] = is_replaced.long()
    found, wanted = one(**whole, labels=labels), other(**masked)
    generated, detected = electra.logits(batch)[0], electra.replaced_logits(corrupted)
    at = (batch.sequence_ids, batch.position_ids)
    assert_close(generated, wanted.logits[at][batch.masked_positions], "generator")
    assert_close(detected, found.logits[at], "discriminator")

    rows = electra(batch)
    assert_close(rows[0, 0] / rows[0, 2], wanted.loss, "loss of the generator")
    assert_close(rows[1, 0] / rows[1, 2], found.loss, "loss of the discriminator")
    assert rows[:, 2].tolist() == [len(batch.masked_labels), len(batch.input_ids)]
    assert rows[1, 1] == ((detected > 0) == is_replaced).sum()
    (rows[0, 0] / rows[0, 2] + 50 * rows[1, 0] / rows[1, 2]).backward()
    (wanted.loss + 50 * found.loss).backward()
    shared = {}
    for part, peer in zip(parts.values(), (one, other), strict=True):
        theirs = {name: p.grad for name, p in peer.named_parameters()}
        for name, parameter in part.named_parameters():
            gradient = theirs[ELECTRA.family.hf_name(name)]
            if name.startswith("embeddings."):
                shared.setdefault(name, []).append((parameter.grad, gradient))
            else:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    for name, ((gradient, a), (_, b)) in shared.items():
        torch.testing.assert_close(gradient, a + b, rtol=1e-4, atol=1e-5, msg=name)
    assert all(p.grad.abs().max() > 0 for p in electra.parameters())


@pytest.mark.parametrize("columns", [1, 8])
def test_draws_have_the_probabilities_of_the_generator(columns, monkeypatch) -> None:
    monkeypatch.setitem(loss.COLUMN_MULTIPLE, "cpu", columns)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 4), torch.randn(50, 4), torch.randn(50)
    rows = x.repeat_interleave(20_000, 0)
    labels = torch.zeros(len(rows), dtype=torch.int64)
    *sums, drawn = linear_cross_entropy(rows, weight, bias, labels, torch.rand(len(rows)))
    *plain, _ = linear_cross_entropy(rows, weight, bias, labels)
    assert all(torch.equal(a, b) for a, b in zip(sums, plain, strict=True))
    p = F.linear(x, weight, bias).softmax(-1)
    found = torch.stack([d.bincount(minlength=50) / 20_000 for d in drawn.split(20_000)])
    assert ((found - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt() + 1e-9).all()


def test_the_draws_of_a_step_are_the_same_however_it_is_divided(store) -> None:
    """And another epoch of the same sequences, which has other masks, has others."""
    source = BatchSource(store, PairsConfig(max_seq_length=64, objective="none"), seed=3)
    whole = source.batch(0, 256)
    chance = draw_chance(whole)
    parts = [draw_chance(whole.slice(i, i + 64)) for i in range(0, 256, 64)]
    assert torch.equal(torch.cat(parts), chance)
    assert ((0 <= chance) & (chance < 1)).all()
    shares = chance.histc(10, 0, 1) / len(chance)
    assert len(chance) > 1500 and ((shares - 0.1).abs() < 0.03).all()
    assert len(chance.unique()) > 0.999 * len(chance)
    later = draw_chance(source.batch(source.part_size(0), 256))
    assert len(torch.cat([chance, later]).unique()) > 0.999 * (len(chance) + len(later))


def test_a_divided_step_has_the_sums_of_the_whole(electra, store) -> None:
    batch = batch_of(store, "none")
    parts = electra(batch.slice(0, 3)) + electra(batch.slice(3, 8))
    torch.testing.assert_close(parts, electra(batch), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", ["electra", "albert"])
def test_a_projection_gives_the_first_layer_the_dtype_of_the_others(
    family, store, vocabulary
) -> None:
    """A compiled layer has graphs of its own for each dtype, and torch makes so many only."""
    model, dtypes = model_of(config_of(family, embedding_size=24), len(vocabulary), "none"), []
    for layer in model.all_layers():
        layer.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(batch_of(store, "none"))
    assert len(dtypes) > 2 and {*dtypes} == {torch.float32}


def test_gradient_checkpointing_holds_for_the_generator_too(electra, store) -> None:
    """Its layers are computed again for the backward pass."""
    calls = []
    electra.generator.layers[0].up.register_forward_hook(lambda *_: calls.append(None))
    for is_asked, wanted in ((False, 1), (True, 2)):
        electra.gradient_checkpointing = is_asked
        calls.clear()
        mean_losses(electra, batch_of(store, "none")).backward()
        assert len(calls) == wanted


def test_the_curve_of_an_evaluation_is_that_of_all_pairs_of_tokens(electra, filled) -> None:
    """How often a replaced token scores above an original one, by comparing each with each."""
    batch, corrupted, is_replaced = filled
    logits = electra.eval().replaced_logits(corrupted).detach()
    high, low = logits[is_replaced][:, None], logits[~is_replaced]
    wanted = ((high > low).double() + 0.5 * (high == low)).mean().item()
    *_, (row,), counts = electra.score(batch)
    assert counts.sum(1).tolist() == [(~is_replaced).sum(), is_replaced.sum()]
    assert area_under_curve(counts) == pytest.approx(wanted, abs=2e-3)
    assert abs(wanted - 0.5) > 0.01 and row[2] == len(logits)


def test_an_electra_that_has_diverged_is_scored(electra, filled) -> None:
    batch, _, _ = filled
    for p in electra.eval().layers.parameters():
        p.data *= 1e30
    assert electra.replaced_logits(batch).isnan().all()
    *_, counts = electra.score(batch)
    assert counts.sum() == len(batch.input_ids)


def test_an_electra_with_settled_embeddings_says_the_same(electra, store) -> None:
    batch = batch_of(store, "none")
    with torch.no_grad():
        electra.embeddings.word.weight.add_(2 * torch.randn(24))
    before = electra.eval().logits(batch)
    settle_embeddings(electra)
    after = electra.logits(batch)
    assert_close(after[0].log_softmax(-1), before[0].log_softmax(-1), "generator")
    assert_close(after[1], before[1], "discriminator")


def test_an_electra_scores_a_sentence_by_how_original_its_tokens_are(
    electra, store, vocabulary, monkeypatch
) -> None:
    """Against transformers, which reads one sentence at a time."""
    monkeypatch.setitem(probes.PASS_TOKENS, "cpu", 40)  # several passes
    batch, ends = batch_of(store, "none"), batch_of(store, "none").cu_seqlens.tolist()
    texts = [batch.input_ids[a:b].tolist() for a, b in pairwise(ends)]
    texts += texts[:1]
    done = []
    found = probes.score_sentences(
        electra, texts, vocabulary, Accelerator(cpu=True), advance=done.append
    )
    peer = build_peer(electra.parts()[""]).eval()
    with torch.no_grad():
        logits = [peer(input_ids=torch.tensor([text])).logits[0, 1:-1] for text in texts]
    wanted = [F.logsigmoid(-one).sum().item() for one in logits]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4) and found[0] == found[-1]
    assert (
        sum(done) == probes.count_read_tokens(texts, electra) == len(batch.input_ids)
        and len(done) > 2
    )


@pytest.mark.parametrize(
    ("sizes", "share", "wanted"),
    [
        (SMALL_ELECTRA, 0.25, (13_549_057, 4_620_026)),  # small
        (BASE, 0.3333, (109_483_009, 33_740_602)),  # base
    ],
)
def test_electra_has_as_many_parameters_as_the_published_ones(sizes, share, wanted) -> None:
    with torch.device("meta"):
        model = Electra(ModelConfig("electra", generator_size=share, **sizes), 30_522)
    assert tuple(map(count, model.parts().values())) == wanted
    shared = count(model.embeddings)
    assert count(model) == sum(wanted) - shared


@pytest.mark.parametrize("share", [0.25, 0.3, 0.33, 0.333, 0.7])
@pytest.mark.parametrize("width", [256, 768])
def test_the_sizes_of_a_generator_follow_from_its_width(width: int, share: float) -> None:
    """So that a reader of the export, who sees the widths only, finds them."""
    config = config_of("electra", hidden_size=width, num_attention_heads=4, generator_size=share)
    generator = config.generator
    assert generator.hidden_size == round(share * width)
    again = replace(config, generator_size=generator.hidden_size / width).generator
    assert replace(again, generator_size=share) == generator


# -------------------------------------------------------------------------------------- sizes

PUBLISHED = [  # family, sizes, vocabulary, parameters of the encoder with its pooler
    ("bert", BASE, CHINESE, 102_267_648),  # bert-base-chinese, hfl/chinese-roberta-wwm-ext
    ("bert", {"num_hidden_layers": 3}, CHINESE, 38_476_800),  # hfl/rbt3
    ("bert", LARGE, 30_522, 335_141_888),  # bert-large-uncased
    ("roberta", {"pad_token_id": 1}, 50_265, 124_645_632),  # roberta-base
    ("albert", BASE, 30_000, 11_683_584),  # albert-base-v2
    ("albert", LARGE, 30_000, 17_683_968),  # albert-large-v2
    ("albert", BASE, CHINESE, 10_547_968),
]


def test_settled_embeddings_are_those_of_a_fresh_model_and_say_the_same(
    case, store, vocabulary
) -> None:
    config, objective = case
    batch = batch_of(store, objective, config.pad_token_id)
    model = build(config, objective, len(vocabulary)).eval()
    words = model.embeddings.word.weight
    with torch.no_grad():
        words += 2 * torch.randn(words.shape[1])  # a direction that they share
    before = model.logits(batch)
    settle_embeddings(model)
    after = model.logits(batch)
    assert_close(after[0].log_softmax(-1), before[0].log_softmax(-1), "MLM")
    for a, b in zip(after[1:], before[1:], strict=True):
        assert_close(a, b, "pairs")
    assert words.mean(0).abs().max() < 1e-6
    if config.layer_norm_eps < 1e-10:  # RoBERTa's would count for more beside smaller embeddings
        torch.testing.assert_close(words.std(), torch.tensor(config.initializer_range))


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


def test_layers_share_groups_as_transformers_rounds_them(store, vocabulary) -> None:
    config = config_of("albert", **ALBERT | {"num_hidden_layers": 18}, num_hidden_groups=14)
    model = build(config, "none", len(vocabulary)).eval()
    peer, batch = build_peer(model).eval(), batch_of(store, "none")
    ours, theirs = [], []
    groups = (model.layers, ours), (peer.albert.encoder.albert_layer_groups, theirs)
    for modules, used in groups:
        for i, module in enumerate(modules):
            module.register_forward_hook(lambda *_, i=i, used=used: used.append(i))
    model.encode(batch), peer(input_ids=batch.input_ids[None, :8])
    assert ours == theirs and len(ours) == 18


# --------------------------------------------------------------------------------- the config


def test_the_config_of_transformers_leads_there_and_back(case) -> None:
    config, _ = case
    config = replace(config, intermediate_size=48, extra={"classifier_dropout": 0.2})
    settings = hf_config(asdict(config), 100, config.family.masked_lm)
    found = ModelConfig(**read_hf_config(settings, "config.json"))
    config = replace(config, embedding_size=found.embedding_size)  # null: the hidden size
    assert found == config and found.embedding_width == config.embedding_width


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_lacks_is_what_transformers_takes(family: str) -> None:
    import transformers

    peer = getattr(transformers, f"{FAMILIES[family].prefix}Config")().to_dict()
    found = {**FAMILIES[family].defaults, **read_hf_config({"model_type": family}, "config.json")}
    settings = hf_config(asdict(ModelConfig(**found)), 100, FAMILIES[family].masked_lm)
    for name in {*FAMILIES[family].settings} - {"position_embedding_type"}:
        assert settings[name] == peer[name], name


def test_null_in_the_config_of_transformers_counts_as_missing() -> None:
    settings = hf_config(asdict(config_of("roberta")), 100, "RobertaForMaskedLM")
    for name in ("pad_token_id", "hidden_dropout_prob", "layer_norm_eps", "type_vocab_size"):
        nulls = settings | {name: None, "tie_word_embeddings": None, "inner_group_num": None}
        settings.pop(name)
        found = read_hf_config(nulls, "config.json")
        assert found | {"extra": {}} == read_hf_config(settings, "config.json") | {"extra": {}}


ALONE = ("model.architecture=electra", "data.objective=none")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.architecture=xlnet",), "architecture is 'xlnet'; it can be bert, roberta"),
        (("model.embedding_size=64",), "embedding_size is 64, but BERT has no such setting"),
        (("model.num_hidden_groups=1",), "num_hidden_groups is 1, but BERT has no such"),
        (("model.architecture=albert", "model.num_hidden_groups=13"), "13 exceeds the 12"),
        (("model.architecture=roberta",), "objective is nsp, but RoBERTa has no pair head"),
        (("model.architecture=electra",), "objective is nsp, but ELECTRA has no pair head"),
        ((*ALONE, "model.generator_size=0.3"), "a generator of width 230 with 4 heads"),
        ((*ALONE, "train.bag_of_words_weight=1"), "bag_of_words_weight is 1, but ELECTRA has no"),
        ((*ALONE, "train.sampled_softmax=9"), "sampled_softmax is 9, but ELECTRA draws from the"),
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


def test_replaced_tokens_count_fifty_times_as_much_as_masked_ones(electra) -> None:
    assert [(one.name, one.weight) for one in electra.objectives] == [("mlm", 1), ("rtd", 50)]
