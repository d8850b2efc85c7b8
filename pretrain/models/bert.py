"""BERT with its two pretraining heads (Devlin et al. 2018): model, FLOPs, and the parameter names
and config of transformers' `BertForPreTraining`, which computes the same with the same weights.

Sequences are packed end to end, so linear layers compute on no padding (except a little on a CPU,
see `TOKEN_MULTIPLE`), and the MLM head sees the masked positions only.

Shapes: B sequences, T tokens in total, M masked positions, D hidden size, H heads, V vocabulary.
"""

from dataclasses import asdict, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.loss import score_labels
from pretrain.models.attention import attend
from pretrain.models.cpu import TOKEN_MULTIPLE, Dropout
from pretrain.objectives import ROW, SentencePairs, objectives_of

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
WITH_PAIRS, WITHOUT_PAIRS = "BertForPreTraining", "BertForMaskedLM"  # transformers' classes
NAMES = {  # our parameter or module -> transformers'; encoder layers are below
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.position.weight": "bert.embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.bias": "cls.predictions.bias",
    "nsp": "cls.seq_relationship",
}
LAYER_NAMES = {  # after "layers.N." and "bert.encoder.layer.N."
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


class Embeddings(nn.Module):
    """Sum of word, token-type and position embeddings, normalised: a batch -> (T, D)."""

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        size = config.hidden_size
        self.word = nn.Embedding(vocab_size, size, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_position_embeddings, size)
        self.token_type = nn.Embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> Tensor:
        x = self.word(batch.input_ids) + self.token_type(batch.token_type_ids)
        return self.dropout(self.norm(x + self.position(batch.position_ids)))  # (T, D)


class Attention(nn.Module):
    """Multi-head self-attention within each sequence: (T, D) -> (T, D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # one product, but three parameters, since Muon orthogonalises each matrix
        three = (self.query, self.key, self.value)
        weight, bias = torch.cat([m.weight for m in three]), torch.cat([m.bias for m in three])
        qkv = F.linear(x, weight, bias).unflatten(-1, (3, self.heads, -1))  # (T, 3, H, D/H)
        x = attend(qkv, batch, self.dropout if self.training else 0.0)
        return self.out(x.flatten(1))  # (T, D)


class Layer(nn.Module):
    """One encoder layer, with LayerNorm after each residual: (T, D) -> (T, D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        inner = config.intermediate_size or 4 * size
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(size, eps)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size)
        self.norm = nn.LayerNorm(size, eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, batch)))
        return self.norm(x + self.dropout(self.down(self.activation(self.up(x)))))  # (T, D)


class MaskedLMHead(nn.Module):
    """Transform the hidden states of masked positions for the decoder: (M, D) -> (M, D).

    The decoder is the word-embedding matrix, with `bias` added.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))  # (M, D)


class BertForPreTraining(nn.Module):
    """BERT with the MLM head and, if an objective asks for them, the pooler and the NSP head.

    NSP label 0 means that B follows A, 1 that B is random.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, objectives: tuple = objectives_of("nsp")
    ):
        super().__init__()
        size = config.hidden_size
        self.objectives = objectives
        has_pairs = any(isinstance(one, SentencePairs) for one in objectives)
        self.embeddings = Embeddings(config, vocab_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(size, size) if has_pairs else None
        self.mlm = MaskedLMHead(config, vocab_size)
        self.nsp = nn.Linear(size, 2) if has_pairs else None
        self.config = config
        self.gradient_checkpointing = False  # saves memory, costs compute
        self.apply(self.initialize)
        with torch.no_grad():
            self.embeddings.word.weight[config.pad_token_id].zero_()

    def initialize(self, module: nn.Module) -> None:
        """Draw a module's weights from a normal distribution and set its biases to 0."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    @torch.no_grad()
    def start_at_frequencies(self, counts: Tensor) -> None:
        """Set the MLM bias to the log frequencies of the tokens in the corpus.

        The model then starts at the unigram entropy. From a bias of 0 it learns the frequencies
        first, by pushing the embeddings of all rare tokens in one direction, which they never
        leave: three quarters of the energy of the embeddings were in it.

        counts: float (V,); 0.1 is added, so that unseen tokens have a finite bias.
        """
        self.mlm.bias.copy_(((counts + 0.1) / (counts + 0.1).sum()).log())

    @torch.no_grad()
    def start_at_vectors(self, vectors: Tensor) -> None:
        """Set the word embeddings to `vectors` (V, D), scaled to the length of the random ones.

        Those of tokens whose vector is 0 stay random.
        """
        length = self.config.initializer_range * vectors.shape[1] ** 0.5
        known = vectors.any(1)
        self.embeddings.word.weight[known] = length * F.normalize(vectors[known])

    @property
    def architecture(self) -> str:
        """The class of transformers with the same heads."""
        return WITH_PAIRS if self.nsp else WITHOUT_PAIRS

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers; one dynamic graph serves all of them and any number of tokens."""
        for layer in self.layers:
            layer.compile(dynamic=True, backend=backend)

    def encode(self, batch: Batch) -> Tensor:
        """Compute the last hidden state of each token, (T, D)."""
        x = self.embeddings(batch)
        tokens = len(x)
        if x.device.type == "cpu":
            x = F.pad(x, (0, 0, 0, -tokens % TOKEN_MULTIPLE))
        for layer in self.layers:
            if self.gradient_checkpointing:
                x = checkpoint(layer, x, batch, use_reentrant=False)  # with the same dropout
            else:
                x = layer(x, batch)
        return x[:tokens]

    def pair_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute the NSP logits from the hidden states (T, D) of [CLS] tokens, (B, 2)."""
        pooled = self.pooler(hidden.index_select(0, batch.cu_seqlens[:-1]))  # (B, D)
        return self.nsp(torch.tanh(pooled))

    def forward(self, batch: Batch) -> Tensor:
        """Compute the row of sums of each objective (see `objectives`), (objectives, ROW)."""
        hidden = self.encode(batch)
        return torch.stack([one.measure(self, hidden, batch) for one in self.objectives])

    @torch.no_grad()
    def score(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what the evaluation needs of a batch.

        Returns MLM losses in nats, float32 (M,); ranks of the labels (the number of tokens that
        score higher), int64 (M,); and the rows of all objectives but MLM.
        """
        hidden = self.encode(batch)
        x = self.mlm(hidden.index_select(0, batch.masked_positions))  # (M, D)
        scores = score_labels(x, self.embeddings.word.weight, self.mlm.bias, batch.masked_labels)
        rows = [one.measure(self, hidden, batch) for one in self.objectives[1:]]
        return *scores, torch.stack(rows) if rows else hidden.new_zeros(0, ROW)

    def logits(self, batch: Batch) -> tuple[Tensor, ...]:
        """Compute the MLM logits (M, V) and, with that head, the NSP logits (B, 2)."""
        hidden = self.encode(batch)
        x = self.mlm(hidden.index_select(0, batch.masked_positions))
        mlm = F.linear(x, self.embeddings.word.weight, self.mlm.bias)
        return (mlm, self.pair_logits(hidden, batch)) if self.nsp else (mlm,)


def resize_positions(model: BertForPreTraining, trained: int, size: int) -> None:
    """Give a model `size` positions: the first `trained` ones, repeated if there are fewer."""
    table = model.embeddings.position.weight.detach()
    rows = table[torch.arange(size) % min(trained, len(table))]
    model.embeddings.position = nn.Embedding.from_pretrained(rows, freeze=False)
    model.config = replace(model.config, max_position_embeddings=size)


def count_flops(batch: Batch, model: ModelConfig, vocab_size: int) -> int:
    """Count the floating-point operations of a forward and backward pass on a batch.

    A multiplication and its addition count as two, and the backward pass as twice the forward pass.
    Counts the matrix products on real tokens, masked positions and pairs; neither padding nor
    dropout, norms, activations and the bag of words.
    """
    size, inner = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
    lengths = batch.cu_seqlens.diff()
    attention = 2 * size * int((lengths * lengths).sum())  # of all pairs of tokens in a sequence
    layer = len(batch.input_ids) * (4 * size * size + 2 * size * inner) + attention
    heads = len(batch.masked_labels) * size * (size + vocab_size) + len(lengths) * size * (size + 2)
    return 3 * 2 * (model.num_hidden_layers * layer + heads)


# --------------------------------------------------------------------------- for transformers


def hf_name(name: str) -> str:
    """Translate the name of a parameter of `BertForPreTraining` into transformers'."""
    if name in NAMES:
        return NAMES[name]
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, number, stem = stem.split(".", 2)
    return f"bert.encoder.layer.{number}.{LAYER_NAMES[stem]}.{kind}"


def to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to transformers' names, without the decoder, which is tied on loading."""
    return {hf_name(name): tensor for name, tensor in state.items()}


def from_hf(weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Select the parameters `names` of this model from weights under transformers' names."""
    return {name: weights[hf_name(name)] for name in names}


def hf_config(
    config: ModelConfig,
    vocab_size: int,
    dtype: str = "float32",
    architecture: str = WITH_PAIRS,
) -> dict:
    """Build the `config.json` of a model, with BertConfig's keys.

    Writes the dtype as `torch_dtype`, the older name, which all versions of transformers read.
    """
    settings = asdict(config)
    settings["intermediate_size"] = config.intermediate_size or 4 * config.hidden_size
    return settings | {
        "architectures": [architecture],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
