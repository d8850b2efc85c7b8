"""Estimate the vocabulary losses of a training step from a sample of the vocabulary.

A small model spends most of its time on the scores of rare tokens: with 30,522 tokens and 256
dimensions the MLM head takes a third of a step. The sum in the softmax is estimated instead, by
importance sampling (Bengio and Senécal 2003). Frequent tokens are always in the sample; of the
others, each stands for those that are not. Evaluation and export do not use the sample.

    token        the   of   cat  ...  yurt  zinc
    chance         1    1  0.71       0.10  0.12
    in sample    yes  yes   yes         no   yes
    counts for     1    1  1.41              8.3     zinc for itself and seven others

Shapes: M masked positions, whose tokens are the labels, D hidden size, V vocabulary, S sample.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.common.streams import Stream, derive_stream, random_unit
from data_pipeline.sampling.batches import send
from pretrain.loss import sum_type
from pretrain.models.cpu import fill_rows

ADDED = 0.1  # to each count, as a share of the mean one, so that no chance is tiny


def sample_chances(counts: Tensor, size: int) -> Tensor:
    """Compute the chance of each token to be in a sample of `size`: the square root of its
    frequency, scaled so that the chances sum to `size`, at most 1.

    counts: (V,). size: 1 to V. Returns float64 (V,).
    """
    roots = (counts.double() + ADDED * counts.double().mean()).sqrt()
    # if the k largest are cut at 1, this factor makes the others sum to the rest
    ordered = roots.sort(descending=True).values
    factors = (size - torch.arange(len(roots))) / ordered.flip(0).cumsum(0).flip(0)
    k = (ordered * factors <= 1 + 1e-9).nonzero()[0]
    return (roots * factors[k]).clamp(max=1)


def sample_start(seed: int, step: int) -> float:
    """Draw the start of the sample of a step, uniform in [0, 1); all its passes share it, so that
    the gradient does not depend on how the step is divided."""
    return float(random_unit(derive_stream(seed, step, Stream.SAMPLE), np.zeros(1))[0])


def draw_sample(chances: Tensor, start: float) -> Tensor:
    """Draw the tokens of a sample, int64 (S,) in ascending order.

    Systematic sampling: the chances lie end to end on a line, and a token is drawn if a point of a
    grid of step 1 falls into its part. So S is the sum of the chances.

    start: of the grid, uniform in [0, 1).
    """
    edges = F.pad(chances.cumsum(0), (1, 0)) + start
    return edges.floor().diff().nonzero()[:, 0]


class Sample(NamedTuple):
    """A sample of the vocabulary and the labels of a batch, with their decoder rows and biases."""

    few: Tensor  # (S, D), rows of the decoder
    few_biases: Tensor  # (S,)
    worth: Tensor  # (S,), log of the number of tokens that each stands for
    of_label: Tensor  # (M, D), rows of the decoder
    bias_of_label: Tensor  # (M,)
    place: Tensor  # int64 (M,), of each label in the sample; -1: not in it


def take_sample(
    weight: Tensor, bias: Tensor, labels: Tensor, chances: Tensor, start: float
) -> Sample:
    """Draw a sample and look up what the losses of a batch need, once for all of them.

    weight: (V, D). bias: (V,). labels: int64 (M,).
    chances: float64 (V,), on the CPU, as `sample_chances` computes them.
    start: as in `draw_sample`.
    """
    sample = draw_sample(chances, start)
    places = torch.full((len(chances),), -1)  # in the sample; -1: not in it
    places[sample] = torch.arange(len(sample))
    worth = -chances[sample].log().to(sum_type(weight))
    sample, places, worth = (send(each, weight.device) for each in (sample, places, worth))
    both, sizes = torch.cat([sample, labels]), [len(sample), len(labels)]
    few, of_label = weight.index_select(0, both).split(sizes)
    few_biases, bias_of_label = bias.index_select(0, both).split(sizes)
    return Sample(few, few_biases, worth, of_label, bias_of_label, places[labels])


def sampled_cross_entropy(x: Tensor, rows: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Estimate what `loss.linear_cross_entropy` computes, from one sample for all labels.

    x: (N, D). rows: int64 (M,), the row of x that predicts each label.
    Returns two scalars: the sum of the M losses in nats, and the number of labels that score at
    least as high as all of the sample.
    """
    few, few_biases, worth, of_label, bias_of_label, place = sample
    scores = F.linear(fill_rows(x), few, few_biases)  # (N, S)
    total = (scores + worth).logsumexp(1)[rows]  # (M,), of the sample
    is_in, place = place >= 0, place.clamp(min=0)
    inside = scores[rows, place].to(total.dtype)
    outside = (x.index_select(0, rows) * of_label).sum(1, dtype=total.dtype) + bias_of_label
    wanted = torch.where(is_in, inside, outside)
    # a label counts only for itself, not for the tokens that it represents in the sample
    added = (wanted - total).exp() * (1 - is_in * worth[place].exp())
    right = (wanted >= scores.detach().amax(1)[rows]).sum()
    return (total + added.log1p() - wanted).sum(), right
