"""batch -> **model** -> loss: BERT with its two pretraining heads (Devlin et al. 2018), plain
torch.

Sequences lie end to end, so no linear layer computes on padding, and the MLM head sees masked
positions only. With the same weights it is transformers' `BertForPreTraining` (see `export.py` for
the names).

Shapes: B sequences, S tokens of the longest, T tokens in all, M masked positions, D hidden, H
heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.batches import Batch
from pretrain.config import ModelConfig

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        size = config.hidden_size
        self.word = nn.Embedding(vocab_size, size, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_position_embeddings, size)
        self.token_type = nn.Embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> Tensor:
        x = self.word(batch.input_ids) + self.token_type(batch.token_type_ids)
        return self.dropout(self.norm(x + self.position(batch.position_ids)))  # (T, D)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, padding: "Padding") -> Tensor:
        # three parameters, which Muon must see apart, in one product
        three = (self.query, self.key, self.value)
        weight, bias = torch.cat([m.weight for m in three]), torch.cat([m.bias for m in three])
        qkv = padding.pad(F.linear(x, weight, bias))  # (B, S, 3D)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D/H)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, padding.mask, dropout)
        return self.out(padding.unpad(x.transpose(1, 2).flatten(2)))  # (T, D)


class Padding:
    """The way from tokens laid end to end (T, ...) to rows (B, S, ...) and back, for attention
    alone."""

    def __init__(self, batch: Batch):
        self.shape = (len(batch.cu_seqlens) - 1, batch.max_length)
        self.places = batch.sequence_ids * batch.max_length + batch.position_ids  # (T,)
        lengths = batch.cu_seqlens.diff()
        columns = torch.arange(batch.max_length, device=lengths.device)
        self.mask = (columns < lengths[:, None])[:, None, None]  # (B, 1, 1, S): real keys

    def pad(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return rows.index_copy(0, self.places, x).view(*self.shape, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self.places)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        inner = config.intermediate_size or 4 * size
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(size, eps)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size)
        self.norm = nn.LayerNorm(size, eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, padding)))
        return self.norm(x + self.dropout(self.down(self.activation(self.up(x)))))  # (T, D)


class MaskedLMHead(nn.Module):
    """Scores of the vocabulary at the masked positions; the decoder is the word embeddings."""

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        return F.linear(self.norm(self.activation(self.dense(x))), word_embeddings, self.bias)


class BertForPreTraining(nn.Module):
    """BERT with both heads: `forward(batch)` -> (MLM logits (M, V), NSP logits (B, 2)).

    Of the NSP logits, 0 says that B follows A and 1 that it is random.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        size = config.hidden_size
        self.embeddings = Embeddings(config, vocab_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(size, size)
        self.mlm = MaskedLMHead(config, vocab_size)
        self.nsp = nn.Linear(size, 2)
        self.config = config
        self.apply(self.initialize)
        with torch.no_grad():
            self.embeddings.word.weight[config.pad_token_id].zero_()

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def encode(self, batch: Batch) -> Tensor:
        """The last hidden state of every token: (T, D)."""
        padding = Padding(batch)
        x = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, padding)
        return x

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.encode(batch)
        mlm_logits = self.mlm(x[batch.masked_positions], self.embeddings.word.weight)
        pooled = torch.tanh(self.pooler(x[batch.cu_seqlens[:-1]]))  # (B, D), of each [CLS]
        return mlm_logits, self.nsp(pooled)
