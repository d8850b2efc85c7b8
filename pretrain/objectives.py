"""The pretraining objectives: which labels they predict, and their sums of losses and hits.

The loop knows nothing about an objective except its part of the loss of a step:
weight x (sum of losses) / (count in the whole step).

Each objective has a `name` (the prefix of its metrics), the `heads` of the model that it needs, a
`weight`, `count(batch)` (the number of its labels in a batch), `measure(model, states, batch)`,
which returns a row of three sums, and `baselines(store, known, pairs, epoch)`: the scores of
guesses without a model on held-out documents. Only `ReplacedTokens` is measured differently:
`Electra` gives it the logits of a batch whose masks its generator has filled. Rows of
micro-batches, processes and steps are added up; a metric is a quotient of such sums.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.sampling.baselines import (
    accuracy_by_lengths,
    accuracy_by_shared_words,
    unigram_loss,
)
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from pretrain.loss import linear_cross_entropy, next_sentence_loss, replaced_token_loss
from pretrain.sampled_softmax import Sample, sampled_cross_entropy

MOST_COMPARED = 200_000  # pairs whose words are compared
ROW = 3  # sum of losses in nats, number of correct predictions, number of labels


class States(NamedTuple):
    """The last hidden states that the heads read, and the sample of tokens to score."""

    masked: Tensor  # (M, D), of the masked positions
    first: Tensor  # (B, D), of [CLS]
    sample: Sample | None = None  # None: all of the vocabulary


class Objective:
    """What most objectives have in common: a label for each masked token, and no baselines."""

    def count(self, batch: Batch) -> int:
        return len(batch.masked_labels)

    def baselines(
        self, store: TokenStore, known: np.ndarray, pairs: np.ndarray, epoch: np.ndarray
    ) -> dict:
        return {}


@dataclass(frozen=True)
class MaskedLM(Objective):
    """Predict the masked tokens (Devlin et al. 2018, section 3.1, task 1)."""

    name: ClassVar[str] = "mlm"
    heads: ClassVar[tuple[str, ...]] = ("mlm",)
    weight: float = 1.0

    def measure(self, model: nn.Module, states: States, batch: Batch) -> Tensor:
        """Compute the row of a batch, float32 (ROW,), or estimate it where there is a sample."""
        if states.sample is None:
            return self.measure_and_draw(model, states.masked, batch, None)[0]
        rows = torch.arange(self.count(batch), device=states.masked.device)
        sums = sampled_cross_entropy(model.mlm(states.masked), rows, states.sample)
        return row(*sums, self.count(batch))

    def measure_and_draw(
        self, model: nn.Module, masked: Tensor, batch: Batch, chance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the row of a batch, and draw a token for each mask by its probability.

        masked: (M, D), last hidden states of the masked positions.
        chance: (M,), uniform in [0, 1); None: draw nothing.
        Returns float32 (ROW,) and int64 (M,).
        """
        x = model.mlm(masked)
        weight, bias = model.embeddings.word.weight, model.mlm.bias
        *sums, drawn = linear_cross_entropy(x, weight, bias, batch.masked_labels, chance)
        return row(*sums, self.count(batch)), drawn

    def baselines(
        self, store: TokenStore, known: np.ndarray, pairs: np.ndarray, epoch: np.ndarray
    ) -> dict:
        """Compute the loss (nats) and accuracy of a model that knows only the token frequencies of
        the training text, `known` (V,)."""
        counts = store.token_counts()
        accuracy = float(counts[known.argmax()] / counts.sum())
        return {"unigram_entropy": unigram_loss(counts, known), "unigram_accuracy": accuracy}


@dataclass(frozen=True)
class SentencePairs(Objective):
    """Predict the label of each pair from its [CLS].

    The label says whether B follows A (`nsp`, Devlin et al. 2018, task 2) or whether A and B are in
    order (`sop`, Lan et al. 2019), depending on how `data.objective` draws the pairs.
    """

    name: ClassVar[str] = "nsp"
    heads: ClassVar[tuple[str, ...]] = ("pooler", "nsp")
    weight: float = 1.0

    def count(self, batch: Batch) -> int:
        return batch.pairs

    def measure(self, model: nn.Module, states: States, batch: Batch) -> Tensor:
        """Compute the row of a batch, as `MaskedLM.measure` does."""
        loss, right = next_sentence_loss(model.pair_logits(states.first), batch.next_sentence_label)
        return row(loss, right, self.count(batch))

    def baselines(
        self, store: TokenStore, known: np.ndarray, pairs: np.ndarray, epoch: np.ndarray
    ) -> dict:
        """Compute the accuracies of one answer for all `pairs`, and of guesses by lengths and by
        shared words, which are fitted and tested on the pairs of an `epoch`."""
        is_one = float(pairs["label"].mean())
        return {
            "nsp_majority": max(is_one, 1 - is_one),
            "nsp_by_lengths": accuracy_by_lengths(store, epoch),
            "nsp_by_shared_words": accuracy_by_shared_words(store, epoch[:MOST_COMPARED]),
        }


@dataclass(frozen=True)
class BagOfWords(Objective):
    """Predict from [CLS] which tokens of the sequence are masked, in no order, by the MLM head.

    Teaches [CLS] what a sequence is about, without extra parameters (Ma et al. 2024,
    arXiv:2401.11248, who predict all tokens of the sequence).
    """

    name: ClassVar[str] = "bag"
    heads: ClassVar[tuple[str, ...]] = ("mlm",)
    weight: float

    def measure(self, model: nn.Module, states: States, batch: Batch) -> Tensor:
        """Compute the row of a batch, as `MaskedLM.measure` does."""
        sequence = batch.sequence_ids[batch.masked_positions]
        if states.sample is not None:
            sums = sampled_cross_entropy(model.mlm(states.first), sequence, states.sample)
            return row(*sums, self.count(batch))
        logits = model.mlm_logits(states.first).float()  # (B, V)
        loss = -logits.log_softmax(1)[sequence, batch.masked_labels].sum()
        right = (logits.argmax(1)[sequence] == batch.masked_labels).sum()
        return row(loss, right, self.count(batch))


@dataclass(frozen=True)
class ReplacedTokens(Objective):
    """Predict for each token whether a generator replaced it (Clark et al. 2020, section 2).

    The loss over all tokens is small compared with that of masked tokens, hence the paper's weight.
    """

    name: ClassVar[str] = "rtd"
    heads: ClassVar[tuple[str, ...]] = ("rtd",)
    weight: float = 50.0

    def count(self, batch: Batch) -> int:
        return len(batch.input_ids)

    def measure(self, logits: Tensor, batch: Batch) -> Tensor:
        """Compute the row of a batch whose masks are filled from the scores of its tokens, (T,)."""
        return row(*replaced_token_loss(logits, find_replaced(batch)), self.count(batch))


def find_replaced(batch: Batch) -> Tensor:
    """Mark the tokens of a batch with filled masks that differ from the original, bool (T,)."""
    original = batch.input_ids.index_copy(0, batch.masked_positions, batch.masked_labels)
    return batch.input_ids != original


def row(loss: Tensor, right: Tensor, count: int) -> Tensor:
    """Stack the three sums of an objective; only the loss has a gradient."""
    return torch.stack([loss, right.to(loss.dtype), torch.full_like(loss, count).detach()])


def objectives_of(name: str, bag_of_words_weight: float = 0.0) -> tuple[Objective, ...]:
    """Build the objectives of a run, MLM first, from `data.objective` (`none` trains no pairs) and
    `train.bag_of_words_weight` (0 trains no bag of words)."""
    pairs = () if name == "none" else (SentencePairs(),)
    bag = (BagOfWords(bag_of_words_weight),) if bag_of_words_weight else ()
    return (MaskedLM(), *pairs, *bag)
