"""model -> **loss** -> optimizer: sums, never means, so that any way of dividing a step gives the
same gradient."""

import torch.nn.functional as F
from torch import Tensor

from data_pipeline.batches import Batch


def pretraining_loss(mlm_logits: Tensor, nsp_logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(MLM, NSP) cross-entropies of a micro-batch, summed, in nats and float32.

    The caller divides them by the masked tokens and the pairs of the whole step. Without masked
    tokens: 0.
    """
    return (
        F.cross_entropy(mlm_logits.float(), batch.masked_labels, reduction="sum"),
        F.cross_entropy(nsp_logits.float(), batch.next_sentence_label, reduction="sum"),
    )
