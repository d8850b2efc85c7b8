"""Fine-tune an encoder with a new head, or train the head alone on its frozen states."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finetune_data import Example
from finetune_tasks import Task, Unit
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from data_pipeline.common.errors import UserError
from pretrain.read_export import load_encoder, load_pretrained

POOLS = ("pooler", "cls", "mean", "last4")
POOL_OF_BATCHES = 50  # batches whose sequences are sorted by length together
LENGTH_MULTIPLE = 8  # few different shapes: oneDNN prepares its kernels for each
WEIGHT_DECAY, MAX_GRAD_NORM = 0.01, 1.0  # as in BERT
LBFGS_STEPS = 200  # more than a head takes to converge


@dataclass
class Batch:
    """Sequences of some units, padded to the longest."""

    units: list[Unit]
    ids: Tensor  # int64 (R, S)
    types: Tensor  # int64 (R, S)
    mask: Tensor  # bool (R, S)
    states: Tensor | None = None
    """What a frozen encoder makes of them, kept: (R, D) or, per token, (R, S, D)."""


def make_batch(units: list[Unit], device: torch.device) -> Batch:
    """Pad the sequences of some units."""
    rows = [row for unit in units for row in unit.sequences]
    longest = max(unit.length for unit in units)
    shape = len(rows), -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids, types, mask = np.zeros((3, *shape), np.int64)
    for i, (row_ids, row_types) in enumerate(rows):
        ids[i, : len(row_ids)], types[i, : len(row_ids)] = row_ids, row_types
        mask[i, : len(row_ids)] = 1
    return Batch(units, *(torch.from_numpy(x).to(device) for x in (ids, types, mask.astype(bool))))


def sorted_batches(units: list[Unit], batch_size: int, device: torch.device) -> list[Batch]:
    """Make batches of units of similar length, the longest first."""
    units = sorted(units, key=lambda unit: -unit.length)
    return [make_batch(units[i : i + batch_size], device) for i in range(0, len(units), batch_size)]


def shuffled_batches(units: list[Unit], batch_size: int, seed: int, epoch: int) -> list[list[Unit]]:
    """Shuffle the units of an epoch into batches of similar length.

    Sorts a pool of many batches by length, then shuffles the batches: little padding, and another
    order and other batches in every epoch.
    """
    rng = np.random.default_rng((seed, epoch))
    order, batches = rng.permutation(len(units)), []
    for start in range(0, len(order), POOL_OF_BATCHES * batch_size):
        pool = sorted(
            order[start : start + POOL_OF_BATCHES * batch_size], key=lambda i: units[i].length
        )
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [[units[i] for i in batches[k]] for k in rng.permutation(len(batches))]


class Network(nn.Module):
    """An encoder of transformers and a linear head on what is pooled of its states."""

    def __init__(self, encoder: nn.Module, task: Task, pool: str, dropout: float):
        super().__init__()
        width = encoder.config.hidden_size
        self.encoder, self.pool = encoder, None if task.per_token else pool
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, task.outputs)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("mean", torch.zeros(width))  # of kept states, over the training set
        self.register_buffer("scale", torch.ones(width))

    def states(self, batch: Batch) -> Tensor:
        """Run the encoder and pool: (R, D), or (R, S, D) where the task scores tokens."""
        types = batch.types.clamp(max=self.encoder.config.type_vocab_size - 1)
        found = self.encoder(
            input_ids=batch.ids,
            token_type_ids=types,
            attention_mask=batch.mask.long(),
            output_hidden_states=self.pool == "last4",
        )
        states = found.last_hidden_state
        if self.pool is None:
            return states
        if self.pool == "pooler":
            return found.pooler_output
        if self.pool == "cls":
            return states[:, 0]
        if self.pool == "last4":
            states = torch.stack(found.hidden_states[1:][-4:]).mean(0)
        mask = batch.mask[..., None]
        return (states * mask).sum(1) / mask.sum(1)

    def forward(self, batch: Batch) -> Tensor:
        """Score sequences or tokens: float32 (R, outputs) or (R, S, outputs)."""
        if batch.states is None:
            states = self.dropout(self.states(batch)).float()
            with torch.autocast(states.device.type, enabled=False):
                return self.head(states)
        return self.head((batch.states - self.mean) / self.scale)


def build_network(
    model_dir: Path, is_random: bool, task: Task, pool: str, dropout: float | None, seed: int
) -> Network:
    """Load the encoder of a model, or initialize it anew, and give it a new head.

    dropout: instead of the probabilities in the model's config.
    Raises `UserError` if the folder lacks weights that the task would use.
    """
    config = load_pretrained(AutoConfig, model_dir)
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    torch.manual_seed(seed)
    uses_pooler = pool == "pooler" and not task.per_token
    if is_random:
        encoder = AutoModel.from_config(config)
    else:
        options = {"config": config, "dtype": torch.float32}
        encoder = load_encoder(AutoModel, model_dir, uses_pooler, **options)
    if uses_pooler and not hasattr(encoder, "pooler"):
        raise UserError(f"{model_dir} has no pooler, as no {config.model_type} has; use --pool cls")
    torch.manual_seed(seed)  # the same head for every start
    if dropout is None:
        of_albert = getattr(config, "classifier_dropout_prob", None)
        dropout = getattr(config, "classifier_dropout", of_albert)
    return Network(encoder, task, pool, config.hidden_dropout_prob if dropout is None else dropout)


@dataclass
class Run:
    """What one setting and seed came to."""

    dev: list[dict[str, float]]
    """Scores after each epoch."""
    best: int
    """Index of the epoch whose weights are kept."""
    test: list[Any] | None = None
    """Predictions of these weights for the test set; scored only for the chosen setting."""
    seconds: float = 0.0
    has_diverged: bool = False
    """Whether the loss was not finite at the end of an epoch; predictions then mean nothing."""


@dataclass
class Split:
    """The examples of a file, encoded; in batches for evaluation."""

    examples: list[Example]
    units: list[Unit]
    batches: list[Batch] = field(default_factory=list)


@torch.no_grad()
def predict(network: Network, task: Task, split: Split, bf16: bool) -> list[Any]:
    """Predict the label of each example."""
    network.eval()
    scores, units = [], []
    for batch in split.batches:
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
            found = network(batch).float().cpu()
        units += batch.units
        if task.per_token:
            scores += [row[: unit.length] for row, unit in zip(found, batch.units, strict=True)]
        else:
            scores += found.split([len(unit.sequences) for unit in batch.units])
    order = sorted(range(len(units)), key=lambda i: units[i].example)  # stable: windows in order
    return task.predict([scores[i] for i in order], [units[i] for i in order], split.examples)


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune all weights."""

    learning_rate: float
    """Highest rate; it rises to it in the first steps, and then falls to 0."""
    epochs: int
    patience: int
    """Stop after so many epochs that are no better than the best one before them."""
    batch_size: int
    warmup: float
    """Share of the steps in which the rate rises."""
    metric: str
    """What the epochs are compared by on dev."""
    bf16: bool


def finetune(
    network: Network,
    task: Task,
    recipe: Recipe,
    seed: int,
    units: list[Unit],
    dev: Split,
    test: Split | None,
    advance: Callable[[int], object],
) -> Run:
    """Train all weights with AdamW, and keep those of the epoch that is best on dev.

    advance: is told the number of units of each step.
    """
    start, device = time.perf_counter(), next(network.parameters()).device
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)
    steps = recipe.epochs * -(-len(units) // recipe.batch_size)
    risen = max(round(recipe.warmup * steps), 1)
    torch.manual_seed(seed)
    run, best_weights, step = Run([], 0), {}, 0
    for epoch in range(recipe.epochs):
        network.train()
        for chosen in shuffled_batches(units, recipe.batch_size, seed, epoch):
            step += 1
            share = min(step / risen, (steps - step + 1) / (steps - risen + 1))
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * share
            batch = make_batch(chosen, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
                scores = network(batch)
            loss = task.loss(scores.float(), chosen)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            advance(len(chosen))
        run.has_diverged |= not loss.isfinite().item()
        run.dev.append(task.score(dev.examples, predict(network, task, dev, recipe.bf16)))
        if epoch == 0 or run.dev[epoch][recipe.metric] > run.dev[run.best][recipe.metric]:
            run.best = epoch
            best_weights = {n: t.detach().clone() for n, t in network.state_dict().items()}
        elif epoch - run.best == recipe.patience:
            advance((recipe.epochs - 1 - epoch) * len(units))
            break
    if test:
        network.load_state_dict(best_weights)
        run.test = predict(network, task, test, recipe.bf16)
    run.seconds = time.perf_counter() - start
    return run


@torch.no_grad()
def keep_states(
    network: Network, batches: Sequence[Batch], bf16: bool, advance: Callable[[int], object]
) -> None:
    """Run the encoder, frozen, once over each batch, and keep its states there."""
    network.eval()
    for batch in batches:
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
            batch.states = network.states(batch).float()
        advance(len(batch.units))


@torch.no_grad()
def standardize(network: Network, batches: Sequence[Batch]) -> None:
    """Set mean and scale of the kept states, so that one penalty suits every model."""
    total, squares, count = 0.0, 0.0, 0
    for batch in batches:
        states = batch.states[batch.mask] if batch.states.dim() == 3 else batch.states
        states = states.double()
        total, squares = total + states.sum(0), squares + (states**2).sum(0)
        count += len(states)
    network.mean.copy_(total / count)
    variance = squares / count - (total / count) ** 2
    network.scale.copy_(variance.clamp(min=1e-12).sqrt())


def fit_head(
    network: Network,
    task: Task,
    batches: Sequence[Batch],
    dev: Split,
    test: Split | None,
    penalty: float,
) -> Run:
    """Train the head on kept states with L-BFGS, from zero.

    penalty: weight of half the squared norm of the head's matrix beside the mean loss.
    """
    start = time.perf_counter()
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    network.eval()
    weights = list(network.head.parameters())
    optimizer = torch.optim.LBFGS(
        weights, max_iter=LBFGS_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )
    count = sum(task.count(batch.units) for batch in batches)

    def closure() -> float:
        optimizer.zero_grad()
        total = penalty / 2 * network.head.weight.square().sum()
        total.backward()
        for batch in batches:
            loss = task.loss(network(batch), batch.units) * task.count(batch.units) / count
            loss.backward()
            total = total + loss.detach()
        return total

    optimizer.step(closure)
    run = Run([task.score(dev.examples, predict(network, task, dev, False))], 0)
    run.test = predict(network, task, test, False) if test else None
    run.seconds = time.perf_counter() - start
    return run
