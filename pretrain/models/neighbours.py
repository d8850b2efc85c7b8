"""Initialize the attention of a new model to neighbouring tokens.

From random weights, a model has to learn which positions are close to each other before it can use
any context, and meanwhile the loss of a small model stays level. So positions start as sines, in
which a step along the text is a rotation (Vaswani et al. 2017, section 3.5), and the heads of the
first layers, at most two and half of them, start with rotations of a few steps:

    head        0    1    2    3    4 ...
    looks at   -1   +1   -2   +2   -1 ...        tokens from each token

Training can change all of this: these are ordinary weights.

Shapes: P positions, D hidden size, H heads, d = D / H.
"""

import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.models.layers import Attention

OFFSETS = (-1, 1, -2, 2)  # of the heads in turn
PEAK = 6.0  # mean score of the token at the offset; that of all others is 0
GOLDEN = (5**0.5 - 1) / 2


def frequencies(size: int) -> Tensor:
    """Choose a frequency for each two dimensions, in radians a token, float32 (size // 2,).

    There is one in each of as many equal parts of 0 to pi, so that their cosines sum to 0 except
    for equal positions: a head confuses a token neither with the one beside it nor with itself,
    whose word is the same. Their places within the parts are uneven, since evenly spaced ones would
    be periodic.
    """
    parts = torch.arange(size // 2)
    return torch.pi * (parts + parts * GOLDEN % 1) / len(parts)


def sines(count: int, size: int) -> Tensor:
    """Compute embeddings of positions with a root mean square of 1, float32 (count, size)."""
    angles = torch.arange(count)[:, None] * frequencies(size)
    both = torch.cat([angles.sin(), angles.cos()], 1) * 2**0.5
    return torch.nn.functional.pad(both, (0, size - both.shape[1]))


@torch.no_grad()
def look_at_neighbours(attention: Attention, config: ModelConfig) -> None:
    """Add to the queries and keys of each head the weights that find the token at its offset among
    `sines`.

    Each head has a share of the frequencies. Its keys are their sines unchanged; its queries are
    the same, rotated by the angle of its offset.
    """
    size, heads = config.hidden_size, config.num_attention_heads
    width, half = size // heads, size // 2
    # after the norm, the position contributes half of the variance of a dimension
    scale = (2 * PEAK / width**0.5) ** 0.5
    for head in range(heads):
        sine = torch.arange(half)[head::heads][: width // 2]
        cosine, rows = half + sine, head * width + torch.arange(len(sine))
        turn = OFFSETS[head % len(OFFSETS)] * frequencies(size)[sine]
        key, query = attention.key.weight, attention.query.weight
        key[rows, sine] += scale
        key[rows + len(sine), cosine] += scale
        query[rows, sine] += scale * turn.cos()  # sin(x + turn), of the angle x
        query[rows, cosine] += scale * turn.sin()
        query[rows + len(sine), sine] -= scale * turn.sin()  # cos(x + turn)
        query[rows + len(sine), cosine] += scale * turn.cos()
