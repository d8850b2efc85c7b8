"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): a small generator fills the masks with sampled
tokens, and the discriminator, which is the model, predicts for every token whether it was replaced.

    text        the   cat   sat  on  the   mat
    masked      the  [MASK] sat  on  the  [MASK]
    generator   the   dog   sat  on  the   mat       drawn from its predictions
    wanted       0     1     0    0   0     0        a token that was drawn right counts as original

Both share the embeddings, and no gradient passes through the draw.

Shapes: T tokens in total, M masked positions, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.loss import count_scores, score_labels
from pretrain.models.bert import Encoder, PretrainingModel, count_products
from pretrain.models.layers import MaskedLMHead
from pretrain.objectives import MaskedLM, ReplacedTokens, find_replaced

GENERATOR = "generator"  # its folder in an export


class Electra(PretrainingModel):
    """A discriminator, with a generator that shares its embeddings.

    `mlm` is the generator's head, so code that predicts masked tokens uses the generator.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__(config, vocab_size, (ReplacedTokens(),))
        self.objectives = (MaskedLM(), ReplacedTokens())
        self.generator = Encoder(config.generator)
        self.mlm = MaskedLMHead(config.generator, vocab_size)
        self.generator.apply(self.initialize)
        self.mlm.apply(self.initialize)

    def all_layers(self) -> list[nn.Module]:
        return [*self.layers, *self.generator.layers]

    def parts(self) -> dict[str, PretrainingModel]:
        """Build the two models that transformers has for this one, sharing its modules."""
        with torch.device("meta"):
            one = PretrainingModel(self.config, self.vocab_size, (ReplacedTokens(),))
            other = PretrainingModel(self.config.generator, self.vocab_size, (MaskedLM(),))
        one.embeddings = other.embeddings = self.embeddings
        one.project, one.layers, one.rtd = self.project, self.layers, self.rtd
        other.project, other.layers = self.generator.project, self.generator.layers
        other.mlm = self.mlm
        return {"": one.train(self.training), GENERATOR: other.train(self.training)}

    def generate(self, batch: Batch) -> Tensor:
        """Compute the generator's last hidden states of the masked positions, (M, D)."""
        self.generator.gradient_checkpointing = self.gradient_checkpointing
        return self.generator.transform(self.embeddings(batch), batch, batch.masked_positions)

    def fill(self, masked: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Compute the generator's row from its hidden states (M, D), and the batch with its masks
        filled."""
        one = self.objectives[0]
        found, drawn = one.measure_and_draw(self, masked, batch, draw_chance(batch))
        ids = batch.input_ids.index_copy(0, batch.masked_positions, drawn)
        return found, replace(batch, input_ids=ids)

    def forward(self, batch: Batch) -> Tensor:
        found, filled = self.fill(self.generate(batch), batch)
        logits = self.rtd(self.encode(filled))
        return torch.stack([found, self.objectives[1].measure(logits, filled)])

    @torch.no_grad()
    def score(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        masked = self.generate(batch)
        x = self.mlm(masked)
        scores = score_labels(x, self.embeddings.word.weight, self.mlm.bias, batch.masked_labels)
        _, filled = self.fill(masked, batch)
        logits = self.rtd(self.encode(filled))
        row = self.objectives[1].measure(logits, filled)
        return *scores, row[None], count_scores(logits, find_replaced(filled))

    def logits(self, batch: Batch) -> tuple[Tensor, ...]:
        """Compute the generator's MLM logits (M, V), and how replaced each token looks (T,)."""
        return self.mlm_logits(self.generate(batch)), self.rtd(self.encode(batch))

    def count_flops(self, batch: Batch) -> int:
        parts = (
            (self.config.generator, {"mlm"}, len(batch.masked_labels)),
            (self.config, {"rtd"}, len(batch.input_ids)),
        )
        return 6 * sum(count_products(c, self.vocab_size, h, batch, n) for c, h, n in parts)


def draw_chance(batch: Batch) -> Tensor:
    """Draw a number in [0, 1) for each mask, float32 (M,), as a hash of its sequence and position.

    So the draws need no random generator and are the same however a step is divided; another epoch
    has other masks, and thus other draws.
    """
    at = batch.masked_positions
    tokens = scramble(batch.input_ids * 65_537 + batch.position_ids)
    sequences = torch.zeros_like(batch.next_sentence_label)
    sequences = sequences.index_add_(0, batch.sequence_ids, tokens)  # whole numbers: in any order
    found = scramble(sequences[batch.sequence_ids[at]] + batch.position_ids[at])
    return (found & 0xFFFFFF).float() / 0x1000000


def scramble(x: Tensor) -> Tensor:
    """Hash int64 numbers, as splitmix64 does (see `data_pipeline.common.streams`)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor  # without copies of the sign
    return x
