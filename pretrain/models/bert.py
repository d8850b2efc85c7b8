"""BERT and its relatives with their pretraining heads (Devlin et al. 2018): the model and its
operation count. A row of `pretrain.families` says how a family differs.

Shapes: B sequences, T tokens in total, M masked positions, D hidden size, E embedding size, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.sampling.batches import Batch
from pretrain.config import ModelConfig
from pretrain.loss import score_labels
from pretrain.models.cpu import TOKEN_MULTIPLE, fill_rows
from pretrain.models.layers import Embeddings, Layer, MaskedLMHead, ReplacedTokenHead
from pretrain.models.neighbours import look_at_neighbours, sines
from pretrain.objectives import ROW, States, objectives_of
from pretrain.sampled_softmax import take_sample

MOST_EPS = 1e-10  # a LayerNorm with at most this eps is insensitive to the size of the embeddings


class Encoder(nn.Module):
    """The layers of a model, and the projection of its embeddings to their width."""

    def __init__(self, config: ModelConfig, embeddings: Embeddings | None = None):
        super().__init__()
        size, groups = config.hidden_size, config.num_hidden_groups or config.num_hidden_layers
        self.config = config
        self.embeddings = embeddings  # None: those of another model
        self.project = nn.Linear(config.embedding_width, size) if config.is_projected else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(groups))
        self.gradient_checkpointing = False  # saves memory, costs compute

    def transform(self, x: Tensor, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Compute the last hidden states of tokens from their embeddings: (T, E) -> (R, D).

        rows: int64 (R,), the tokens that are wanted; None: all of them. The last layer, except its
        attention, computes only these: the heads read one token in three to six.
        """
        wanted, uses = len(x if rows is None else rows), self.config.num_hidden_layers
        x = fill_rows(x, TOKEN_MULTIPLE)
        rows = None if rows is None else fill_rows(rows, TOKEN_MULTIPLE)
        if self.project:  # to the dtype of all layers: another would need graphs of its own
            x = self.project(x).to(x.dtype)
        for i in range(uses):
            layer = self.layers[int(i / (uses / len(self.layers)))]  # rounded as in transformers
            inputs = (x, batch, rows if i == uses - 1 else None)
            if self.gradient_checkpointing:
                x = checkpoint(layer, *inputs, use_reentrant=False)  # with the same dropout
            else:
                x = layer(*inputs)
        return x[:wanted]


class PretrainingModel(Encoder):
    """An encoder with its embeddings and the heads that its objectives need: MLM, pooler and pair
    head, replaced tokens.

    Label 0 of a pair means that B follows A, 1 that it does not.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, objectives: tuple = objectives_of("nsp")
    ):
        super().__init__(config, Embeddings(config, vocab_size))
        size, heads = config.hidden_size, {head for one in objectives for head in one.heads}
        self.objectives = objectives
        self.sample_chances: Tensor | None = None  # (V,), to estimate losses in training
        self.sample_start = 0.0  # of the step, which draws the sample
        self.pooler = nn.Linear(size, size) if "nsp" in heads else None
        self.mlm = MaskedLMHead(config, vocab_size) if "mlm" in heads else None
        self.nsp = nn.Linear(size, 2) if "nsp" in heads else None
        self.rtd = ReplacedTokenHead(config) if "rtd" in heads else None
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

        The loss then starts at the unigram entropy. From a bias of 0 the model first learns the
        frequencies by pushing the embeddings of all rare tokens in one direction, where they stay:
        it held three quarters of the embeddings' energy.

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

    @torch.no_grad()
    def start_at_positions(self) -> None:
        """Start the positions as sines, and the attention of the first layers at the tokens beside
        each (see `neighbours`); not where embeddings are projected, as in ALBERT.

        The later layers stay random, and [CLS] has no position, so that it attends to all tokens:
        the pair label depends on tokens far apart.
        """
        if self.project:
            return
        table = self.embeddings.position.weight
        waves = sines(*table.shape).to(table.device)
        table.copy_(self.config.initializer_range * waves)
        table[self.config.first_position] = 0
        for layer in self.layers[: min(len(self.layers) // 2, 2)]:
            look_at_neighbours(layer.attention, self.config)

    @property
    def hf_class(self) -> str:
        """The class of transformers with the same heads."""
        family = self.config.family
        if self.rtd:
            return family.discriminator
        return family.pairs if self.nsp else family.masked_lm

    @property
    def vocab_size(self) -> int:
        return self.embeddings.word.num_embeddings

    def all_layers(self) -> list[nn.Module]:
        """List the layers, each of which is compiled, sharded and optimized as a unit."""
        return list(self.layers)

    def parts(self) -> dict[str, "PretrainingModel"]:
        """Map the folder of each transformers model in the export to its part; "" is the export
        itself."""
        return {"": self}

    def compile_layers(self, backend: str | Callable = "inductor") -> None:
        """Compile the layers: one dynamic graph for all but the last, any number of tokens."""
        # DDP would cut each layer in two at its buckets of 25 MB, to reduce gradients a little
        # earlier: the layers are small enough to be reduced one by one
        torch._dynamo.config.optimize_ddp = False
        # an ELECTRA has a set for each of its two widths, to train and to evaluate; torch gives up
        # on a function after eight, without a word where warnings are off
        torch._dynamo.config.recompile_limit = 32
        for layer in self.all_layers():
            layer.compile(dynamic=True, backend=backend)

    def encode(self, batch: Batch) -> Tensor:
        """Compute the last hidden state of each token, (T, D)."""
        return self.transform(self.embeddings(batch), batch)

    def read_states(self, batch: Batch) -> States:
        """Compute the last hidden states that the heads read."""
        rows = torch.cat([batch.masked_positions, batch.cu_seqlens[:-1].long()])
        states = self.transform(self.embeddings(batch), batch, rows)
        return States(*states.tensor_split([len(batch.masked_positions)]))

    def pair_logits(self, first: Tensor) -> Tensor:
        """Compute the NSP logits, (B, 2), from the hidden states of [CLS], (B, D)."""
        return self.nsp(torch.tanh(self.pooler(first)))

    def forward(self, batch: Batch) -> Tensor:
        """Compute the row of sums of each objective (see `objectives`), (objectives, ROW)."""
        states = self.read_states(batch)
        if self.sample_chances is not None and self.training:
            decoder = self.embeddings.word.weight, self.mlm.bias
            draw = self.sample_chances, self.sample_start
            states = states._replace(sample=take_sample(*decoder, batch.masked_labels, *draw))
        return torch.stack([one.measure(self, states, batch) for one in self.objectives])

    @torch.no_grad()
    def score(
        self, batch: Batch, mlm_only: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute what the evaluation needs from a batch.

        mlm_only: skip the other objectives; the bag of words alone would double the work.
        Returns MLM losses in nats, float32 (M,); ranks of the labels (the number of tokens that
        score higher), int64 (M,); the rows of all objectives but MLM; and the `count_scores` of
        replaced tokens, where the model has them.
        """
        states = self.read_states(batch)
        x = self.mlm(states.masked)  # (M, D)
        scores = score_labels(x, self.embeddings.word.weight, self.mlm.bias, batch.masked_labels)
        others = () if mlm_only else self.objectives[1:]
        rows = [one.measure(self, states, batch) for one in others]
        return *scores, torch.stack(rows) if rows else x.new_zeros(0, ROW), None

    def logits(self, batch: Batch) -> tuple[Tensor, ...]:
        """Compute the logits of each head: MLM (M, V), pairs (B, 2), replaced tokens (T,)."""
        if self.rtd:
            return (self.rtd(self.encode(batch)),)
        states = self.read_states(batch)
        pairs = (self.pair_logits(states.first),) if self.nsp else ()
        return self.mlm_logits(states.masked), *pairs

    def replaced_logits(self, batch: Batch) -> Tensor:
        """Compute how replaced each token looks, (T,); above 0: more likely than not."""
        return self.rtd(self.encode(batch))

    def mlm_logits(self, masked: Tensor) -> Tensor:
        """Compute the MLM logits, (M, V), from the hidden states of as many tokens, (M, D)."""
        return F.linear(self.mlm(masked), self.embeddings.word.weight, self.mlm.bias)

    def count_flops(self, batch: Batch) -> int:
        """Count the floating-point operations of a forward and backward pass on a batch.

        A multiplication and its addition count as two, and the backward pass as twice the forward
        pass. Counts the matrix products on real tokens, masked positions and pairs; neither padding
        nor dropout, norms, activations and the bag of words.
        """
        heads = {head for one in self.objectives for head in one.heads}
        seen = len(batch.masked_labels) + len(batch.next_sentence_label)
        chances = self.sample_chances
        scored = self.vocab_size if chances is None else round(chances.sum().item()) + 1
        return 3 * 2 * count_products(self.config, scored, heads, batch, seen)


def count_products(
    config: ModelConfig, scored: int, heads: set[str], batch: Batch, seen: int
) -> int:
    """Count the multiplications of the matrix products of a forward pass, with their additions.

    scored: tokens of the vocabulary that are scored for a masked position.
    seen: tokens whose last hidden state is wanted.
    """
    size, inner, width = config.hidden_size, config.inner_width, config.embedding_width
    tokens, lengths = len(batch.input_ids), batch.cu_seqlens.diff()
    attention = 2 * size * int((lengths * lengths).sum())  # of all pairs of tokens in a sequence
    before, after = 3 * size * size, size * size + 2 * size * inner  # of a token's attention
    found = config.num_hidden_layers * (tokens * (before + after) + attention)
    found -= (tokens - seen) * after
    found += config.is_projected * tokens * width * size
    if "mlm" in heads:
        found += len(batch.masked_labels) * width * (size + scored)
    if "nsp" in heads:
        found += len(lengths) * size * (size + 2)
    if "rtd" in heads:
        found += tokens * size * (size + 1)
    return found


def resize_positions(model: PretrainingModel, trained: int, size: int) -> None:
    """Give a model `size` positions: the first `trained` ones, continued if `size` is larger."""
    table, first = model.embeddings.position.weight.detach(), model.config.first_position
    rows = torch.cat([table[:first], continue_positions(table[first : first + trained], size)])
    model.embeddings.position = nn.Embedding.from_pretrained(rows, freeze=False)
    model.config = replace(model.config, max_position_embeddings=size)


def continue_positions(table: Tensor, size: int) -> Tensor:
    """Continue the embeddings of trained positions, (L, E), to `size` positions, (size, E).

    The residual from the best straight-line fit is repeated every L positions, so that neighbours
    relate to each other as in the trained range. The line continues too, over all new positions
    together as far as over the trained ones, which distinguishes later positions from those that
    they repeat.
    """
    trained = len(table)
    if size <= trained:
        return table[:size]
    places = torch.arange(trained, device=table.device) - (trained - 1) / 2
    slope = places @ table / places.square().sum().clamp(min=1)
    later = torch.arange(trained, size, device=table.device)
    laps = later // trained
    return torch.cat([table, table[later % trained] + trained / laps[-1] * laps[:, None] * slope])


@torch.no_grad()
def settle_embeddings(model: PretrainingModel) -> None:
    """Centre the embeddings and give them the size of random ones, with the same predictions.

    Adam moves the embeddings of all rare tokens in one direction, which makes up most of their
    length after a long run. It has no effect: a softmax ignores what all its scores share, and what
    all input tokens share can move to the token types. Their scale has no effect either: the norms
    after the input and before the output undo it. But both matter in fine-tuning, where the
    learning rate sets the size of the updates: embeddings eight times as large hardly move.
    """
    embeddings, config = model.embeddings, model.config
    words = embeddings.word.weight
    mean = words.mean(0)
    words -= mean
    embeddings.token_type.weight += mean
    if config.layer_norm_eps > MOST_EPS:  # eps would weigh more beside smaller embeddings
        return
    scale = config.initializer_range / words.square().mean().sqrt()
    for table in (embeddings.word, embeddings.position, embeddings.token_type):
        table.weight *= scale
    model.mlm.norm.weight /= scale
    model.mlm.norm.bias /= scale
