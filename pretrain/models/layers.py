"""The parts that all families are made of: embeddings, attention, encoder layer and MLM head.

Sequences are packed end to end, so linear layers compute on no padding (except a little on a CPU,
see `TOKEN_MULTIPLE`). The last layer computes only on what the heads read, and the MLM head only on
the masked positions.

Shapes: T tokens in total, R of them wanted, M masked positions, D hidden size, E embedding size, H
heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.models.attention import attend
from pretrain.models.cpu import Dropout, fill_rows

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Embeddings(nn.Module):
    """Sum of word, token-type and position embeddings, normalised: a batch -> (T, E)."""

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        size, self.first = config.embedding_width, config.first_position
        self.word = nn.Embedding(vocab_size, size, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(self.first + config.max_position_embeddings, size)
        self.token_type = nn.Embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> Tensor:
        x = self.word(batch.input_ids) + self.token_type(batch.token_type_ids)
        return self.dropout(self.norm(x + self.position(batch.position_ids + self.first)))


class Attention(nn.Module):
    """Multi-head self-attention within each sequence: (T, D) -> (R, D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        # one product, but three parameters, since Muon orthogonalises each matrix
        three = (self.query, self.key, self.value)
        weight, bias = torch.cat([m.weight for m in three]), torch.cat([m.bias for m in three])
        qkv = F.linear(x, weight, bias).unflatten(-1, (3, self.heads, -1))  # (T, 3, H, D/H)
        x = attend(qkv, batch, self.dropout if self.training else 0.0).flatten(1)
        return self.out(pick(x, rows))  # (R, D)


class Layer(nn.Module):
    """One encoder layer, with LayerNorm after each residual: (T, D) -> (R, D).

    rows: int64 (R,), the tokens whose output is wanted; None: all of them, R = T.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(size, eps)
        self.up = nn.Linear(size, config.inner_width)
        self.down = nn.Linear(config.inner_width, size)
        self.norm = nn.LayerNorm(size, eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, batch: Batch, rows: Tensor | None = None) -> Tensor:
        attended = self.attention(x, batch, rows)
        x = self.attention_norm(pick(x, rows) + self.dropout(attended))
        return self.norm(x + self.dropout(self.down(self.activation(self.up(x)))))  # (R, D)


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows, or all of them without a copy."""
    return x if rows is None else x.index_select(0, rows)


class ReplacedTokenHead(nn.Module):
    """Score each token, above 0 if it looks replaced: (T, D) -> (T,)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, 1)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.dense(fill_rows(x))))[: len(x), 0]  # (T,)


class MaskedLMHead(nn.Module):
    """Transform the hidden states of masked positions for the decoder: (M, D) -> (M, E).

    The decoder is the word-embedding matrix, with `bias` added.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.activation = ACTIVATIONS[config.family.head_act or config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(fill_rows(x))))[: len(x)]  # (M, E)
