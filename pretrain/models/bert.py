"""BERT and its relatives with their pretraining heads (Devlin et al. 2018): the model, and how many
operations it takes. A row of `pretrain.families` tells what is special about a family.

Shapes: B sequences, T tokens in total, M masked positions, D hidden size, E embedding size, V
vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.loss import score_labels
from pretrain.models.cpu import TOKEN_MULTIPLE
from pretrain.models.layers import Embeddings, Layer, MaskedLMHead
from pretrain.objectives import ROW, objectives_of


class PretrainingModel(nn.Module):
    """An encoder with the heads that its objectives ask for: MLM, and pooler and pair head.

    Label 0 of a pair means that B follows A, 1 that it does not.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, objectives: tuple = objectives_of("nsp")
    ):
        super().__init__()
        size, heads = config.hidden_size, {head for one in objectives for head in one.heads}
        self.objectives = objectives
        self.embeddings = Embeddings(config, vocab_size)
        self.project = nn.Linear(config.embedding_width, size) if config.is_projected else None
        groups = config.num_hidden_groups or config.num_hidden_layers
        self.layers = nn.ModuleList(Layer(config) for _ in range(groups))
        self.pooler = nn.Linear(size, size) if "nsp" in heads else None
        self.mlm = MaskedLMHead(config, vocab_size)
        self.nsp = nn.Linear(size, 2) if "nsp" in heads else None
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
    def hf_class(self) -> str:
        """The class of transformers with the same heads."""
        return self.config.family.pairs if self.nsp else self.config.family.masked_lm

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers; one dynamic graph serves all of them and any number of tokens."""
        for layer in self.layers:
            layer.compile(dynamic=True, backend=backend)

    def encode(self, batch: Batch) -> Tensor:
        """Compute the last hidden state of each token, (T, D)."""
        x = self.embeddings(batch)
        x = self.project(x) if self.project else x
        tokens, uses = len(x), self.config.num_hidden_layers
        if x.device.type == "cpu":
            x = F.pad(x, (0, 0, 0, -tokens % TOKEN_MULTIPLE))
        for layer in (self.layers[i * len(self.layers) // uses] for i in range(uses)):
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

    def count_flops(self, batch: Batch) -> int:
        """Count the floating-point operations of a forward and backward pass on a batch.

        A multiplication and its addition count as two, and the backward pass as twice the forward
        pass. Counts the matrix products on real tokens, masked positions and pairs; neither padding
        nor dropout, norms, activations and the bag of words.
        """
        model = self.config
        size, inner = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
        lengths = batch.cu_seqlens.diff()
        attention = 2 * size * int((lengths * lengths).sum())  # of all pairs of tokens
        layer = len(batch.input_ids) * (4 * size * size + 2 * size * inner) + attention
        decoder = model.embedding_width * (size + len(self.mlm.bias))
        others = len(batch.masked_labels) * decoder
        if self.project:
            others += len(batch.input_ids) * model.embedding_width * size
        if self.nsp:
            others += len(lengths) * size * (size + 2)
        return 3 * 2 * (model.num_hidden_layers * layer + others)


def resize_positions(model: PretrainingModel, trained: int, size: int) -> None:
    """Give a model `size` positions: the first `trained` ones, repeated if there are fewer."""
    table, first = model.embeddings.position.weight.detach(), model.config.first_position
    rows = first + torch.arange(size) % min(trained, len(table) - first)
    rows = table[torch.cat([torch.arange(first), rows])]
    model.embeddings.position = nn.Embedding.from_pretrained(rows, freeze=False)
    model.config = replace(model.config, max_position_embeddings=size)
