"""Dropout, in the model and in its attention: on a CPU in a quarter of the time of torch's, which
draws a float for every element, on one thread."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * dropout_noise(x, self.p) if x.device.type == "cpu" else F.dropout(x, self.p)


def dropout_noise(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies x by, of its shape and type: 0 with probability p, else what keeps
    the mean.

    Of 16 random bits for each element: p is rounded to 1 / 65,536 and the mean exact for that.
    """
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = bits.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = round(p * 65536)
    noise = torch.empty(x.shape, dtype=x.dtype)
    return torch.ge(bits, dropped - 32768, out=noise).mul_(65536 / max(65536 - dropped, 1))
