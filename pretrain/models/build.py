"""Build the model of any family, or count its parameters without building it."""

from dataclasses import replace

import torch

from data_pipeline.common.errors import check
from pretrain.config import ModelConfig
from pretrain.models.bert import PretrainingModel
from pretrain.models.electra import Electra
from pretrain.objectives import objectives_of


def model_of(
    config: ModelConfig, vocab_size: int, objective: str, bag_of_words_weight: float = 0.0
) -> PretrainingModel:
    """Build the model of a family with random weights.

    objective, bag_of_words_weight: as in the sections `data` and `train`; an ELECTRA has its own
    objectives.
    """
    if config.family.discriminator:
        return Electra(config, vocab_size)
    return PretrainingModel(config, vocab_size, objectives_of(objective, bag_of_words_weight))


def count_weights(module: torch.nn.Module) -> int:
    """Count the parameters of a module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_parameters(config: ModelConfig, vocab_size: int, objective: str) -> int:
    """Count the parameters of a model without building it, from those of one and of two layers."""
    counts = []
    for layers in (1, 2):
        small = replace(config, num_hidden_layers=layers, num_hidden_groups=layers)
        with torch.device("meta"):
            model = model_of(small, vocab_size, objective)
        counts.append(count_weights(model))
    groups = config.num_hidden_groups or config.num_hidden_layers
    return counts[0] + (groups - 1) * (counts[1] - counts[0])


def check_memory(
    config: ModelConfig, vocab_size: int, objective: str, copies: float, memory: int
) -> int:
    """Count the parameters of a model as `count_parameters` does.

    copies: number of float32 copies of the parameters that have to fit in `memory` bytes at once.
    Raises `UserError` if they do not.
    """
    number = count_parameters(config, vocab_size, objective)
    check(
        4 * copies * number <= memory,
        f"a model of {number:,} parameters needs at least {4 * copies * number / 1e9:,.1f} GB of "
        f"memory, but there are {memory / 1e9:,.1f} GB; reduce model.num_hidden_layers, "
        "model.hidden_size or the vocabulary, or use a larger machine",
    )
    return number
