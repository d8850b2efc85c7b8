"""A step takes all that it needs to the card, and waits for nothing of it.

The meta device stands for a card: its tensors have no values. So it refuses, as a card does, a
tensor of the host among its own, and any read of a value, for which a card would make the host
wait.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from pretrain.config import ModelConfig, TrainConfig
from pretrain.models import attention
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import model_of
from pretrain.optim import build_optimizers, update, zero_gradients
from pretrain.sampled_softmax import sample_chances
from pretrain.sharding import clip_gradients


@pytest.fixture
def card(monkeypatch) -> torch.device:
    monkeypatch.setattr(attention, "gpu_generation", lambda: 9)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # only a card's driver can
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # unknown to it
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    return torch.device("meta")


def build(card: torch.device, architecture: str, objective: str) -> PretrainingModel:
    config = ModelConfig(architecture, hidden_size=64, num_hidden_layers=2, num_attention_heads=1)
    with card:
        return model_of(config, 500, objective, bag_of_words_weight=0.5 * (objective == "nsp"))


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # the kernel, and padded
@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
@pytest.mark.parametrize("architecture", ["albert", "bert", "electra", "roberta"])
def test_a_step_mixes_nothing_of_the_host_in_and_reads_nothing(
    architecture: str, objective: str, dtype: torch.dtype, is_sampled: bool, store, card
) -> None:
    model = build(card, architecture, objective).to(dtype).train()
    if is_sampled:
        model.sample_chances = sample_chances(torch.ones(500), 100)
    batch = BatchSource(store, PairsConfig(objective=objective), seed=0).batch(0, 8).to(card)
    assert {v.device for v in vars(batch).values() if isinstance(v, Tensor)} == {card}
    optimizers = build_optimizers(model, TrainConfig(optimizer="lamb"))
    rows = model(batch)
    (rows[:, 0] / torch.ones(len(rows), device=card)).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert clip_gradients(model.parameters(), 1.0).device == card
    update(optimizers, 1e-3)
    zero_gradients(optimizers)
    model.eval()
    model.logits(batch)
    if architecture != "electra":  # whose histogram of scores has no kernel there
        model.score(batch)


@pytest.mark.parametrize(
    "name",  # not those that only an embedding looks up, where the meta device does not check
    ["cu_seqlens", "masked_positions", "masked_labels", "next_sentence_label"],
)
def test_a_tensor_that_was_left_on_the_host_would_be_noticed(name: str, store, card) -> None:
    model = build(card, "bert", "nsp")
    batch = BatchSource(store, PairsConfig(), seed=0).batch(0, 8)
    mixed = replace(batch.to(card), **{name: getattr(batch, name)})
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        model(mixed)
