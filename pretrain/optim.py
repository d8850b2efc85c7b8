"""loss -> **optimizer**: which parameters decay, and the learning rate as a function of the
step."""

from math import cos, pi

import torch
from torch import nn

from pretrain.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The learning rate of update `step` (0 is the first): linear warm-up, then the decay of
    `schedule` to 0 at `max_steps`, over the steps that the warm-up leaves, so that nothing jumps.

    A function of the step alone: a scheduler that Accelerate prepares steps once for every process.
    """
    top, warmup = train.learning_rate, train.warmup_steps
    if step < warmup:
        return top * (step + 1) / warmup
    left, decay = train.max_steps - step, train.max_steps - warmup
    if train.schedule == "cosine":
        return top * (1 - cos(pi * left / decay)) / 2
    if train.schedule == "polynomial":
        return top * (left / decay) ** train.decay_power
    if train.schedule == "trapezoid":
        decay = train.decay_steps
    return top * min(left, decay) / decay


def build_optimizers(model: nn.Module, train: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters that train: AdamW, with Muon before it if the encoder's
    matrices have it.

    Biases and norms do not decay (BERT's rule); they are the parameters of one dimension.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = []
    if train.optimizer == "muon":
        matrices = [p for p in model.layers.parameters() if p.dim() == 2]
        taken = set(map(id, matrices))
        parameters = [p for p in parameters if id(p) not in taken]
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
                adjust_lr_fn="match_rms_adamw",  # one learning rate for both optimizers
            )
        )
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers.append(
        torch.optim.AdamW(
            groups,
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            fused=True,
        )
    )
    return optimizers
