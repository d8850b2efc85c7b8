"""A new model's first layers look at the tokens beside each token."""

import pytest
import torch
from helpers import train_here
from safetensors.torch import load_file

from pretrain.config import ModelConfig
from pretrain.models.bert import PretrainingModel
from pretrain.models.neighbours import OFFSETS, sines

TOKENS, LAYERS = 60, 2


def build_model(**changes) -> PretrainingModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4} | changes
    return PretrainingModel(ModelConfig(**sizes), 1000)


@torch.no_grad()
def attention_by_offset(model: PretrainingModel, layer: int) -> torch.Tensor:
    """Mean attention of each head to the tokens at -8 to 8 from a token, (H, 17)."""
    embeddings, attention = model.embeddings, model.layers[layer].attention
    x = embeddings.word(torch.randint(5, 1000, (TOKENS,))) + embeddings.token_type.weight[0]
    x = embeddings.norm(x + embeddings.position.weight[:TOKENS])
    q, k = (
        part(x).unflatten(1, (attention.heads, -1)).transpose(0, 1)
        for part in (attention.query, attention.key)
    )
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return torch.stack([weights.diagonal(i, 1, 2).mean(1) for i in range(-8, 9)], 1)


@pytest.mark.parametrize("size, heads", [(128, 2), (256, 4), (192, 1), (768, 12)])
def test_each_head_of_the_first_layers_starts_at_its_neighbour(size: int, heads: int) -> None:
    model = build_model(hidden_size=size, num_attention_heads=heads)
    model.start_at_positions()
    for layer in range(LAYERS):
        found = attention_by_offset(model, layer)
        wanted = [8 + OFFSETS[head % len(OFFSETS)] for head in range(heads)]
        assert found.argmax(1).tolist() == wanted
        at = found.gather(1, torch.tensor(wanted)[:, None])
        others = found.scatter(1, torch.tensor(wanted)[:, None], 0).amax(1, keepdim=True)
        assert (at > 5 * others).all()  # also of the token itself
    assert attention_by_offset(model, LAYERS).std() < 0.01  # later layers are random


@pytest.mark.parametrize("size, heads", [(64, 64), (3, 3), (1, 1), (6, 2)])
def test_heads_without_a_frequency_of_their_own_stay_random(size: int, heads: int) -> None:
    model = build_model(hidden_size=size, num_attention_heads=heads)
    before = model.layers[0].attention.query.weight.clone()
    model.start_at_positions()
    assert torch.equal(model.layers[0].attention.query.weight, before) == (heads == size)


def test_the_first_token_looks_at_all_of_its_sequence() -> None:
    model = build_model()
    model.start_at_positions()
    attention, embeddings = model.layers[0].attention, model.embeddings
    x = embeddings.norm(embeddings.word(torch.arange(TOKENS)) + embeddings.position.weight[:TOKENS])
    queries, keys = (
        part(x).unflatten(1, (attention.heads, -1)).transpose(0, 1)
        for part in (attention.query, attention.key)
    )
    weights = (queries @ keys.mT / 8).softmax(-1)
    # the logarithm of 60 is 4.1
    spread = -(weights * weights.log()).sum(-1)
    assert (spread[:, 0] > 3.5).all() and (spread[:, 10:50].mean(1) < 3.3).all()


@pytest.mark.parametrize("layers, first", [(1, 0), (2, 1), (3, 1), (12, 2)])
def test_at_most_the_first_half_of_the_layers_starts_so(layers: int, first: int) -> None:
    model = build_model(num_hidden_layers=layers)
    before = [layer.attention.query.weight.clone() for layer in model.layers]
    model.start_at_positions()
    after = [layer.attention.query.weight for layer in model.layers]
    assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)] == [
        i < first for i in range(layers)
    ]


def test_a_step_along_the_text_is_the_same_everywhere() -> None:
    products = sines(50, 64) @ sines(50, 64).T / 64
    assert products.diagonal().mean() == pytest.approx(1)
    for step in range(1, 20):
        of_step = products.diagonal(step)
        assert of_step.std() < 1e-5 and of_step.mean() < 0.5


def test_all_that_is_not_attention_or_positions_stays_random_and_of_its_size() -> None:
    model, other = build_model(), build_model()
    model.start_at_positions()
    changed = {
        name
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(one, two)
    }
    parts = [
        f"layers.{i}.attention.{part}.weight" for i in range(LAYERS) for part in ("query", "key")
    ]
    assert changed == {"embeddings.position.weight", *parts}
    size = model.embeddings.position.weight.detach()[1:].square().mean().sqrt()
    assert size == pytest.approx(model.config.initializer_range, rel=0.01)


def test_projected_embeddings_and_odd_widths_start_without() -> None:
    model, other = (build_model(architecture="albert", embedding_size=64) for _ in range(2))
    model.start_at_positions()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    build_model(hidden_size=63, num_attention_heads=3).start_at_positions()  # heads of 21


def test_a_new_run_starts_so_and_one_that_goes_on_from_a_model_does_not(prepared, tmp_path) -> None:
    options = ("train.max_steps=2", "train.warmup_steps=1", "train.learning_rate=1e-9")
    train_here(prepared, tmp_path / "new", *options)
    kept = load_file(tmp_path / "new/checkpoints/step-00000002/model.safetensors")
    table = kept["embeddings.position.weight"]
    products = table[1:] @ table[1:].T / table[1:].square().sum(1).mean()
    assert products.diagonal(3).std() < 1e-3
    init = f"init_from={tmp_path / 'new/export'}"
    train_here(prepared, tmp_path / "next", *options, init)
    again = load_file(tmp_path / "next/checkpoints/step-00000002/model.safetensors")
    name = "layers.0.attention.query.weight"
    torch.testing.assert_close(again[name], kept[name], rtol=0, atol=1e-6)
