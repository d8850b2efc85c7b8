"""batch -> model -> **objectives** -> loss: what a model is asked in pretraining.

The loop knows of them only that the loss of a step is the sum, over objectives, of
weight x (sum of losses) / (count of the whole step). Each measures a batch as a row of three sums,
so that sums over micro-batches, processes and steps are additions, and their means the metrics.

An objective has a `name` for its metrics, what it `needs` of pairs (the value of `data.objective`
that plans them), a `weight`, and `measure(model, hidden, batch)`, its row.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from data_pipeline.sampling.batches import Batch
from pretrain.loss import linear_cross_entropy, next_sentence_loss

ROW = 3  # sum of losses in nats, right answers, how many were asked


@dataclass(frozen=True)
class MaskedLM:
    """Tell the masked tokens (Devlin et al. 2018, 3.1, task 1)."""

    name: ClassVar[str] = "mlm"
    weight: float = 1.0

    def count(self, batch: Batch) -> int:
        return len(batch.masked_labels)

    def measure(self, model: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """The row of a batch: float32 (ROW,). hidden: (T, D), the last states of its tokens."""
        x = model.mlm(hidden.index_select(0, batch.masked_positions))  # (M, D)
        weight, bias = model.embeddings.word.weight, model.mlm.bias
        loss, right = linear_cross_entropy(x, weight, bias, batch.masked_labels)
        return row(loss, right, self.count(batch))


@dataclass(frozen=True)
class SentencePairs:
    """Tell a pair's label: whether B follows A (`nsp`, task 2), or whether A and B are in order
    (`sop`, Lan et al. 2019). Which, is a matter of how pairs are planned."""

    name: ClassVar[str] = "nsp"
    weight: float = 1.0

    def count(self, batch: Batch) -> int:
        return len(batch.next_sentence_label)

    def measure(self, model: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        loss, right = next_sentence_loss(
            model.pair_logits(hidden, batch), batch.next_sentence_label
        )
        return row(loss, right, self.count(batch))


def row(loss: Tensor, right: Tensor, count: int) -> Tensor:
    """A row of sums; only the loss has a gradient."""
    return torch.stack([loss, right.to(loss.dtype), torch.full_like(loss, count).detach()])


def objectives_of(name: str) -> tuple[MaskedLM | SentencePairs, ...]:
    """The objectives of a run by `data.objective`; without pairs to judge, MLM alone."""
    return (MaskedLM(),) if name == "none" else (MaskedLM(), SentencePairs())
