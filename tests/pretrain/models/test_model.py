"""The model is transformers' BertForPreTraining, weight for weight, and wastes nothing on
padding."""

import os
from dataclasses import asdict, replace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.families import hf_config
from pretrain.models.attention import attend_padded
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import model_of
from pretrain.models.cpu import ROW_MULTIPLE, TOKEN_MULTIPLE, attend_groups
from pretrain.objectives import objectives_of
from pretrain.sampled_softmax import sample_chances

TINY = ModelConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=64,
)
VARIANTS = {
    "defaults": TINY,
    "gelu_new": replace(TINY, hidden_act="gelu_new"),
    "gelu_pytorch_tanh": replace(TINY, hidden_act="gelu_pytorch_tanh"),
    "relu": replace(TINY, hidden_act="relu"),
    "silu": replace(TINY, hidden_act="silu"),
    "three types": replace(TINY, type_vocab_size=3),
    "layer_norm_eps": replace(TINY, layer_norm_eps=1e-5),
    "intermediate_size": replace(TINY, intermediate_size=48),
    "positions and heads": replace(TINY, max_position_embeddings=200, num_attention_heads=4),
}
TIED = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


@pytest.fixture(scope="module")
def batch(store) -> Batch:
    """Eight pairs of the real store, of different lengths."""
    batch = BatchSource(store, PairsConfig(max_seq_length=64, short_seq_prob=0.5), seed=3)
    batch = batch.batch(0, 8)
    assert len(set(batch.cu_seqlens.diff().tolist())) > 2
    assert set(batch.next_sentence_label.tolist()) == {0, 1}
    return batch


def build(config: ModelConfig, vocab_size: int) -> PretrainingModel:
    """A model whose every parameter counts: biases and norms as random as the rest."""
    torch.manual_seed(0)
    model = PretrainingModel(config, vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def build_peer(model: PretrainingModel, attention: str) -> nn.Module:
    """transformers' model with the same weights."""
    from transformers import BertConfig
    from transformers import BertForPreTraining as Peer

    settings = hf_config(asdict(model.config), len(model.mlm.bias), model.hf_class)
    peer = Peer(BertConfig(**settings, attn_implementation=attention))
    assert peer.config._attn_implementation == attention
    peer.tie_weights()
    missing, unexpected = peer.load_state_dict(
        model.config.family.to_hf(model.state_dict()), strict=False
    )
    assert set(missing) <= TIED and not unexpected
    return peer.train()


def mean_loss(model: PretrainingModel, batch: Batch) -> torch.Tensor:
    mlm, nsp = model(batch)[:, 0]
    return mlm / len(batch.masked_labels) + nsp / len(batch.next_sentence_label)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert found.shape == wanted.shape, name
    difference = (found - wanted).detach().abs().max().item()
    assert difference <= 1e-5, f"{name} differs by {difference}"


def one_sequence(batch: Batch, number: int) -> Batch:
    """Sequence `number` of a batch as a batch of its own."""
    start, end = batch.cu_seqlens[number : number + 2].tolist()
    here = (batch.masked_positions >= start) & (batch.masked_positions < end)
    return Batch(
        input_ids=batch.input_ids[start:end],
        token_type_ids=batch.token_type_ids[start:end],
        position_ids=batch.position_ids[start:end],
        sequence_ids=torch.zeros(end - start, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, end - start]),
        masked_positions=batch.masked_positions[here] - start,
        masked_labels=batch.masked_labels[here],
        next_sentence_label=batch.next_sentence_label[number : number + 1],
        max_length=end - start,
    )


def without_masks(batch: Batch) -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return replace(batch, masked_positions=none, masked_labels=none)


# ------------------------------------------------------------------- parity with transformers


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_transformers(
    variant, attention, batch, vocabulary
) -> None:
    model = build(VARIANTS[variant], len(vocabulary)).train()
    peer = build_peer(model, attention)
    if VARIANTS[variant].type_vocab_size == 3:  # so that the third type takes part
        types = batch.token_type_ids + (batch.position_ids > 20).long()
        batch = replace(batch, token_type_ids=types)
        assert types.max() == 2

    out = peer(**batch.padded())
    rows = out.prediction_logits[batch.sequence_ids, batch.position_ids]
    mlm_logits, nsp_logits = model.logits(batch)
    assert_close(mlm_logits, rows[batch.masked_positions], "MLM logits")
    assert_close(nsp_logits, out.seq_relationship_logits, "NSP logits")
    loss = mean_loss(model, batch)
    assert_close(loss, out.loss, "loss")

    loss.backward()
    out.loss.backward()
    found = model.config.family.to_hf({name: p.grad for name, p in model.named_parameters()})
    wanted = {name: p.grad for name, p in peer.named_parameters()}
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert_close(found[name], wanted[name], f"gradient of {name}")
    still = [n for n, p in model.named_parameters() if p.grad.abs().max() == 0]
    assert not still, "these gradients say nothing"


def test_one_step_of_the_loss_the_loop_uses_is_the_sum_over_tokens(batch, vocabulary) -> None:
    """Sums of two halves are the sum of the whole: no mean hides in the loss."""
    model = build(TINY, len(vocabulary)).eval()
    rows = model(batch)
    parts = sum(model(one_sequence(batch, i)) for i in range(8))
    torch.testing.assert_close(parts[:, 0], rows[:, 0], rtol=1e-5, atol=1e-4)
    assert torch.equal(parts[:, 1:], rows[:, 1:])
    assert rows[:, 2].tolist() == [len(batch.masked_labels), 8]


def test_the_padded_batch_holds_every_token_and_no_other(batch) -> None:
    padded = batch.padded()
    real = padded["attention_mask"].bool()
    assert real.sum(1).tolist() == batch.cu_seqlens.diff().tolist()
    assert torch.equal(padded["input_ids"][real], batch.input_ids)
    assert torch.equal(padded["token_type_ids"][real], batch.token_type_ids)
    assert (padded["input_ids"][~real] == 0).all() and (padded["labels"][~real] == -100).all()
    assert torch.equal(padded["labels"][padded["labels"] != -100], batch.masked_labels)


# ---------------------------------------------------------------------------- size and start


def test_bert_base_has_as_many_parameters_as_the_published_one() -> None:
    with torch.device("meta"):
        model = PretrainingModel(ModelConfig(), 30522)

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    parts = [count(part) for part in (model.embeddings, model.layers, model.pooler)]
    assert sum(parts) == 109_482_240
    assert [round(100 * part / sum(parts), 4) for part in parts] == [21.7726, 77.6879, 0.5394]
    assert count(model) == 110_106_428


def test_weights_start_normal_biases_at_zero_and_norms_at_one() -> None:
    torch.manual_seed(1)
    config = replace(TINY, hidden_size=128, initializer_range=0.02)
    model = PretrainingModel(config, 2048)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            error = 6 / p.numel() ** 0.5  # standard errors
            assert abs(p.mean()) < 0.02 * error, name
            assert abs(p.std() / 0.02 - 1) < error, name
    word = model.embeddings.word.weight
    assert (word[0] == 0).all() and (word[1:].abs().sum(1) > 0).all()
    tail = (word[1:].abs() > 0.04).double().mean()  # plain normal, as transformers, not truncated
    assert abs(tail - 0.0455) < 0.004


def test_initializer_range_is_the_standard_deviation() -> None:
    torch.manual_seed(1)
    model = PretrainingModel(replace(TINY, initializer_range=0.1), 2048)
    assert abs(model.embeddings.word.weight[1:].std() - 0.1) < 0.002
    assert abs(model.layers[0].up.weight.std() - 0.1) < 0.005


# ---------------------------------------------------------------------------- sequences apart


def test_a_sequence_alone_gives_what_it_gives_in_a_batch(batch, vocabulary) -> None:
    model = build(TINY, len(vocabulary)).eval()
    mlm_logits, nsp_logits = model.logits(batch)
    sequence = batch.sequence_ids[batch.masked_positions]
    for number in range(8):
        mlm, nsp = model.logits(one_sequence(batch, number))
        assert_close(mlm, mlm_logits[sequence == number], f"MLM logits of sequence {number}")
        assert_close(nsp[0], nsp_logits[number], f"NSP logits of sequence {number}")


def test_other_tokens_beside_a_sequence_change_nothing_in_it(batch, vocabulary) -> None:
    model = build(TINY, len(vocabulary)).eval()
    mine = batch.sequence_ids == 2
    other_ids = torch.where(mine, batch.input_ids, 5 + (batch.input_ids + 11) % 1000)
    other = replace(batch, input_ids=other_ids)
    assert torch.equal(model.encode(batch)[mine], model.encode(other)[mine])
    assert not torch.equal(model.encode(batch)[~mine], model.encode(other)[~mine])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("layers", [1, 2])
def test_what_the_heads_look_at_is_as_if_the_last_layer_computed_on_all_tokens(
    batch, vocabulary, layers, checkpointing
) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build(replace(TINY, num_hidden_layers=layers, **no_dropout), len(vocabulary)).double()
    model.gradient_checkpointing = checkpointing
    lengths = []
    model.layers[-1].up.register_forward_hook(lambda *hook: lengths.append(len(hook[-1])))
    seen = model.read_states(batch)[:2]
    hidden = model.encode(batch)
    wanted = hidden[batch.masked_positions], hidden[batch.cu_seqlens[:-1]]
    assert lengths[0] < len(batch.masked_positions) + 8 + TOKEN_MULTIPLE < lengths[-1]
    weights = model.state_dict(keep_vars=True)
    some = [p for name, p in weights.items() if "layers" in name]
    found = [torch.autograd.grad(sum(x.pow(2).sum() for x in xs), some) for xs in (seen, wanted)]
    for one, other in zip((*seen, *found[0]), (*wanted, *found[1]), strict=True):
        torch.testing.assert_close(one, other)


def test_every_token_of_a_sequence_sees_every_other(batch, vocabulary) -> None:
    model = build(replace(TINY, num_hidden_layers=1), len(vocabulary)).eval()
    alone = one_sequence(batch, 0)
    length = len(alone.input_ids)
    before = model.encode(alone)
    for place in (0, length // 2, length - 1):
        ids = alone.input_ids.clone()
        ids[place] = 5 + (ids[place] + 1) % 1000
        change = (model.encode(replace(alone, input_ids=ids)) - before).abs().amax(1)
        assert (change > 0).all()


# ------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_dropout_acts_in_train_mode_only(name, batch, vocabulary) -> None:
    model = build(replace(TINY, **{name: 0.3}), len(vocabulary))
    plain = build(TINY, len(vocabulary)).eval().encode(batch)
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert torch.equal(model.eval().encode(batch), plain)
    torch.manual_seed(0)
    first = model.train().encode(batch)
    second = model.encode(batch)
    torch.manual_seed(0)
    assert torch.equal(first, model.encode(batch))  # the seed is all there is to it
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, plain)


def test_dropout_of_embeddings_keeps_the_mean(batch, vocabulary) -> None:
    embeddings = build(replace(TINY, hidden_dropout_prob=0.25), len(vocabulary)).embeddings
    plain = embeddings.eval()(batch)
    dropped = embeddings.train()(batch)
    kept = dropped != 0
    assert abs(1 - kept.double().mean() - 0.25) < 0.03
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)


# ---------------------------------------------------------------------- nothing to predict


def test_without_masked_positions_the_mlm_loss_is_zero_and_gradients_are_finite(
    batch, vocabulary
) -> None:
    model = build(TINY, len(vocabulary)).train()
    batch = without_masks(batch)
    assert model.logits(batch)[0].shape == (0, len(vocabulary))
    mlm, nsp = model(batch)[:, 0]
    assert mlm.item() == 0 and nsp.item() > 0
    (mlm + nsp).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient; DDP would wait for it"
        assert torch.isfinite(p.grad).all(), name
    assert (model.mlm.dense.weight.grad == 0).all()
    assert (model.layers[0].up.weight.grad != 0).any()


# --------------------------------------------------------------------------- nothing on padding


def test_no_linear_layer_computes_on_padding_but_to_the_next_multiple(
    batch, vocabulary, monkeypatch
) -> None:
    model = build(TINY, len(vocabulary)).eval()
    linear, rows = nn.functional.linear, []

    def counted(x, *others):
        rows.append(x.numel() // x.shape[-1])
        return linear(x, *others)

    monkeypatch.setattr(nn.functional, "linear", counted)
    mlm_logits, _ = model.logits(batch)
    tokens, sequences = len(batch.input_ids), len(batch.next_sentence_label)
    masked = len(batch.masked_labels)
    assert tokens < sequences * batch.max_length and masked < tokens
    # query, key and value in one product, out, up and down; both products of both heads
    filled, seen = (-(-n // TOKEN_MULTIPLE) * TOKEN_MULTIPLE for n in (tokens, masked + sequences))
    wanted = [filled] * 4 * (TINY.num_hidden_layers - 1) + [filled] + [seen] * 3
    wanted += [-(-masked // ROW_MULTIPLE) * ROW_MULTIPLE, masked] + [sequences] * 2
    assert sorted(rows) == sorted(wanted)
    assert mlm_logits.shape == (masked, len(vocabulary))


@pytest.mark.parametrize("name", ["all scores", "sampled", "electra"])
def test_the_products_of_a_step_have_few_sizes_however_many_tokens_and_masks_it_has(
    store, vocabulary, name
) -> None:
    """Else a kernel for each stays in memory, and makes holes in it."""
    family = "electra" if name == "electra" else "bert"
    model = model_of(replace(TINY, architecture=family, generator_size=0.5), len(vocabulary), "nsp")
    if name == "sampled":
        model.sample_chances = sample_chances(torch.ones(len(vocabulary)), 96)
    fixed = {n for weight in model.parameters() for n in weight.shape} | {96}
    fixed |= {3 * TINY.hidden_size, 3 * TINY.hidden_size // 2}  # of query, key and value
    sizes, counts = set(), set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._schema.name in ("aten::mm", "aten::addmm"):
                sizes.update(n for x in args if torch.is_tensor(x) for n in x.shape)
            return function(*args, **(kwargs or {}))

    source = BatchSource(store, PairsConfig(max_seq_length=64, short_seq_prob=0.5), seed=3)
    for i in range(10):
        batch = source.batch(8 * i, 8)
        counts |= {len(batch.input_ids), len(batch.masked_labels)}
        with Sizes():
            model(batch)[:, 0].sum().backward()
    assert len(counts) > 15
    assert not {n for n in sizes - fixed - {8} if n % ROW_MULTIPLE}  # 8: sequences
    assert len(sizes - fixed) >= 3


# ---------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_in_groups_is_attention_in_padded_rows(dropout, batch) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(len(batch.input_ids), 3, 2, 16, requires_grad=True)
    found = [attend(qkv, batch, dropout) for attend in (attend_groups, attend_padded)]
    if dropout == 0:
        assert_close(found[0], found[1], "attention")
        grads = [torch.autograd.grad(out.square().sum(), qkv)[0] for out in found]
        assert_close(grads[0], grads[1], "gradient")
    else:  # other draws, the same mean
        for attend in (attend_groups, attend_padded):
            mean = torch.stack([attend(qkv, batch, dropout) for _ in range(400)]).mean(0)
            error = mean - attend(qkv, batch, 0.0)
            assert error.abs().mean() < 0.05 and error.mean().abs() < 2e-3
            assert not torch.equal(attend(qkv, batch, dropout), attend(qkv, batch, dropout))


# -------------------------------------------------------------------------------- compilation


def test_two_compiled_graphs_serve_all_layers_and_any_number_of_tokens(
    store, vocabulary, monkeypatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr("pretrain.models.layers.attend", attend_padded)  # as on a GPU
    monkeypatch.setattr("pretrain.models.bert.TOKEN_MULTIPLE", 1)
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (build(replace(TINY, num_hidden_layers=3), len(vocabulary)) for _ in "ab")
    compiled.compile_layers(backend="aot_eager")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    source = BatchSource(store, PairsConfig(max_seq_length=64, short_seq_prob=0.5), seed=3)
    for size in (8, 5, 11, 3):
        batch = source.batch(0, size)
        found, wanted = compiled(batch)[:, 0], plain(batch)[:, 0]
        torch.testing.assert_close(found, wanted)
        for model, losses in ((compiled, found), (plain, wanted)):
            model.zero_grad()
            losses.sum().backward()
        for (name, a), b in zip(compiled.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)
    # the last layer, which computes on fewer tokens, has a graph of its own
    assert counters["stats"]["unique_graphs"] == 2


def test_a_model_starts_at_the_frequencies_of_its_tokens(batch, vocabulary) -> None:
    counts = np.random.default_rng(0).integers(0, 1000, len(vocabulary))
    model = PretrainingModel(replace(TINY, initializer_range=0.02), len(vocabulary))
    model.start_at_frequencies(torch.from_numpy(counts))
    p = (counts + 0.1) / (counts + 0.1).sum()
    assert np.allclose(model.mlm.bias.detach().softmax(0), p, rtol=1e-4)
    loss = -np.log(p[batch.masked_labels]).mean()  # by the frequencies alone
    found = model.eval().score(batch)[0].mean().item()
    assert abs(found - loss) < 0.05  # random weights add little


def test_a_model_starts_at_word_vectors_of_the_length_of_random_ones(vocabulary) -> None:
    config = replace(TINY, initializer_range=0.02)
    model = PretrainingModel(config, len(vocabulary))
    random = model.embeddings.word.weight.detach().clone()
    vectors = torch.randn(len(vocabulary), config.hidden_size)
    vectors[5] = 0  # nothing is known of it
    model.start_at_vectors(vectors)
    found = model.embeddings.word.weight.detach()
    assert torch.equal(found[5], random[5]) and model.embeddings.word.weight.requires_grad
    others = torch.arange(len(vocabulary)) != 5
    assert torch.allclose(F.cosine_similarity(found, vectors)[others], torch.ones(()))
    length = 0.02 * config.hidden_size**0.5
    assert torch.allclose(found[others].norm(dim=1), torch.tensor(length))


@pytest.mark.parametrize("pairs", ["nsp", "none"])
def test_the_bag_of_words_is_what_cls_says_of_each_masked_token(store, vocabulary, pairs) -> None:
    model = PretrainingModel(TINY, len(vocabulary), objectives_of(pairs, 0.5)).eval()
    assert (model.pooler is None) == (pairs == "none")  # it brings no head
    bag = model.objectives[-1]
    assert (bag.name, bag.weight) == ("bag", 0.5)
    batch = BatchSource(store, PairsConfig(max_seq_length=48, objective=pairs), seed=5).batch(0, 6)
    loss, right, count = model(batch)[-1].tolist()
    hidden, wanted, hits = model.encode(batch), 0.0, 0
    for position, label in zip(batch.masked_positions, batch.masked_labels, strict=True):
        start = max(s for s in batch.cu_seqlens.tolist() if s <= position)  # of its sequence
        x = model.mlm(hidden[start : start + 1])[0]
        logits = (model.embeddings.word.weight @ x + model.mlm.bias).double()
        wanted -= logits.log_softmax(0)[label].item()
        hits += int(logits.argmax() == label)
    assert count == len(batch.masked_labels)
    assert loss == pytest.approx(wanted, rel=1e-4) and right == hits


def test_a_bag_of_words_is_asked_of_the_sequence_that_a_mask_is_in(store, vocabulary) -> None:
    config = replace(TINY, initializer_range=0.5)
    model = PretrainingModel(config, len(vocabulary), objectives_of("none", 0.5)).eval()
    data = PairsConfig(max_seq_length=48, objective="none")
    batch = BatchSource(store, data, seed=5).batch(0, 4)
    alone = [model(batch.slice(i, i + 1))[-1] for i in range(4)]
    torch.testing.assert_close(model(batch)[-1], sum(alone), rtol=1e-4, atol=1e-4)
    assert len({round(row[0].item() / row[2].item(), 1) for row in alone}) > 1
