"""Estimate the MLM loss of a training step from a part of the vocabulary.

A small model spends most of its time on the scores of rare tokens: with 30,522 tokens and 256
dimensions the MLM head takes a third of a step. The sum in the softmax is estimated instead, by
importance sampling (Bengio and Senécal 2003). Frequent tokens are always in the sample; of the
others, each stands for those that are not. Evaluation and export know nothing of it.

    token        the   of   cat  ...  yurt  zinc
    chance         1    1  0.71       0.10  0.12
    in sample    yes  yes   yes         no   yes
    counts for     1    1  1.41              8.3     zinc for itself and seven others

Shapes: M masked positions, D hidden size, V vocabulary, S sample.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.common.streams import Stream, derive_stream, random_u64
from data_pipeline.sampling.batches import send
from pretrain.loss import sum_type
from pretrain.models.cpu import fill_rows

ADDED = 0.1  # to each count, as a share of the mean one, so that no chance is tiny


def sample_chances(counts: Tensor, size: int) -> Tensor:
    """Compute with which chance each token is in a sample of `size`: the root of its frequency,
    times what makes the chances add up to `size`, at most 1.

    counts: (V,). size: 1 to V. Returns float64 (V,).
    """
    roots = (counts.double() + ADDED * counts.double().mean()).sqrt()
    # if the k largest are cut at 1, this factor makes the others add up to what is left for them
    ordered = roots.sort(descending=True).values
    factors = (size - torch.arange(len(roots))) / ordered.flip(0).cumsum(0).flip(0)
    k = (ordered * factors <= 1 + 1e-9).nonzero()[0]
    return (roots * factors[k]).clamp(max=1)


def sample_start(seed: int, step: int) -> float:
    """Draw the start of the sample of a step, uniform in [0, 1); all its passes share it, so that
    the gradient does not depend on how the step is divided."""
    draw = random_u64(derive_stream(seed, step, Stream.SAMPLE), np.zeros(1))[0]
    return int(draw >> np.uint64(11)) / (1 << 53)


def draw_sample(chances: Tensor, start: float) -> Tensor:
    """Draw the tokens of a sample, int64 (S,) in ascending order.

    Systematic sampling: the chances lie end to end on a line, and a token is drawn if a point of a
    grid of step 1 falls into its part. So S is the sum of the chances.

    start: of the grid, uniform in [0, 1).
    """
    edges = F.pad(chances.cumsum(0), (1, 0)) + start
    return edges.floor().diff().nonzero()[:, 0]


def sampled_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chances: Tensor, start: float
) -> tuple[Tensor, Tensor]:
    """Estimate what `loss.linear_cross_entropy` computes, from one sample for all rows.

    x: (M, D). weight: (V, D). bias: (V,). labels: int64 (M,).
    chances: float64 (V,), on the CPU, as `sample_chances` computes them.
    start: as in `draw_sample`.
    Returns two scalars: the loss in nats, and the number of labels that score at least as high as
    all of the sample.
    """
    count, x, labels = len(labels), fill_rows(x), fill_rows(labels)
    sample = draw_sample(chances, start)
    places = torch.full((len(chances),), -1)  # in the sample; -1: not in it
    places[sample] = torch.arange(len(sample))
    worth = -chances[sample].log().to(sum_type(x))
    sample, places, worth = (send(each, x.device) for each in (sample, places, worth))
    both = torch.cat([sample, labels])
    sizes = [len(sample), len(labels)]
    few, of_label = weight.index_select(0, both).split(sizes)
    few_biases, bias_of_label = bias.index_select(0, both).split(sizes)
    scores = F.linear(x, few, few_biases + worth).to(worth.dtype)  # (M, S)
    wanted = (x * of_label).sum(1, dtype=worth.dtype) + bias_of_label  # (M,)
    # a label that is in the sample must not count twice
    place = places[labels][:, None]
    column = place.clamp(min=0)
    once = scores.gather(1, column).masked_fill(place >= 0, -torch.inf)
    others = scores.scatter(1, column, once)
    right = (wanted >= (others.detach() - worth).amax(1))[:count].sum()
    return (torch.logaddexp(others.logsumexp(1), wanted) - wanted)[:count].sum(), right
