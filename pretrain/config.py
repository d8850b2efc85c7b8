"""The config of a run: the data's sections, and those of model, training, tracking and export."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from data_pipeline.config import DataConfig, PairsConfig, check, check_choice
from data_pipeline.errors import UserError
from data_pipeline.hashing import key

PHASE = 6  # of `hashing.key`; 0 to 5 are streams of a run without phases


@dataclass
class ModelConfig:
    """BertConfig's own names, meanings and defaults; the size of the vocabulary comes with the
    vocabulary."""

    hidden_size: int = 768
    """Width D of the encoder."""
    num_hidden_layers: int = 12
    """Layers of the encoder."""
    num_attention_heads: int = 12
    """Heads H of each layer."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; null: 4 x hidden_size."""
    hidden_act: str = "gelu"
    """Activation: gelu (erf), gelu_new (tanh), relu, silu."""
    hidden_dropout_prob: float = 0.1
    """Dropout of embeddings and of each sublayer's output, in training."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout of attention weights, in training."""
    max_position_embeddings: int = 512
    """Longest sequence that the model can ever take, tokens."""
    type_vocab_size: int = 2
    """Segment types."""
    initializer_range: float = 0.02
    """Standard deviation of the weights at the start."""
    layer_norm_eps: float = 1e-12
    """Added to the variance in layer normalisation."""
    pad_token_id: int = 0
    """Id of [PAD], 0 unless `vocab.path` has it elsewhere; its embedding starts at zero."""
    position_embedding_type: str = "absolute"
    """Learned embeddings of absolute positions, BERT's."""

    def validate(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            check(getattr(self, name) >= 1, f"model.{name} is below 1")
        check(
            self.hidden_size % self.num_attention_heads == 0,
            f"model.hidden_size {self.hidden_size} is not a multiple of "
            f"model.num_attention_heads {self.num_attention_heads}",
        )
        check_choice(
            "model.hidden_act",
            self.hidden_act,
            ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
        )
        check_choice("model.position_embedding_type", self.position_embedding_type, ("absolute",))
        check(
            self.type_vocab_size >= 2, "model.type_vocab_size is below 2, one for A and one for B"
        )
        check(self.pad_token_id >= 0, "model.pad_token_id is below 0")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            check(0 <= getattr(self, name) < 1, f"model.{name} is not in [0, 1)")


@dataclass
class PhaseConfig:
    """Some steps of a run; what is null is as `data` and `train` say."""

    steps: int = 0
    """Updates of the phase."""
    max_seq_length: int | None = None
    """As in `data`, and so the three below; the evaluation keeps to `data`, to be comparable."""
    masked_lm_prob: float | None = None
    """Share of the ordinary tokens that are predicted."""
    max_predictions_per_seq: int | None = None
    """Most tokens that are predicted in a sequence."""
    short_seq_prob: float | None = None
    """Share of the sequences that aim at a random shorter length."""
    global_batch_size: int | None = None
    """Sequences of an update, over all processes."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass of one process."""
    learning_rate: float | None = None
    """Starts a new schedule, warm-up included, that ends where the next one starts; null: the one
    that runs goes on."""
    warmup_steps: int | None = None
    """Updates of the warm-up of this phase's learning rate."""


@dataclass
class TrainConfig:
    max_steps: int = 1_000_000
    """Updates in all; the learning rate is 0 after the last."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """Phases one after the other, such as 128 tokens and then 512; their steps add up to
    max_steps."""
    global_batch_size: int = 256
    """Sequences of an update, over all processes."""
    micro_batch_size: int = 32
    """Sequences of one forward pass of one process; the rest is gradient accumulation."""
    optimizer: str = "adamw"
    """`adamw`; `muon` for the matrices of the encoder and AdamW for the rest; or `lamb`, for
    batches of many thousands, in which what does not decay is updated as by AdamW."""
    learning_rate: float = 1e-4
    """Highest learning rate, at the end of the warm-up."""
    warmup_steps: int = 10_000
    """Updates of linear warm-up."""
    schedule: str = "linear"
    """From the end of the warm-up to 0 at the end of the run: `linear`, `cosine`, `polynomial`, or
    `trapezoid`, which stays at the top until `decay_steps` before the end and then falls linearly.
    """
    decay_power: float = 0.5
    """Power p of `polynomial`: (share of the steps that is left) ** p."""
    decay_steps: int | None = None
    """Updates of the fall of `trapezoid`."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-6
    """Added to the root of the squared gradients."""
    max_grad_norm: float = 1.0
    """Norm that the gradient is clipped to; 0: no clipping."""
    gradient_checkpointing: bool = False
    """Keep only what goes into each layer for the backward pass and compute the rest again: the
    same numbers in less memory, a third more compute."""
    precision: str = "auto"
    """`fp32`, `bf16` (autocast), or `auto`: bf16 where the GPU or CPU multiplies it natively (on a
    CPU 1.6 to 1.8 x as fast), fp32 elsewhere."""
    compile: bool | None = None
    """Whether torch.compile fuses the layers; null: on a GPU. A CPU gains nothing that a
    measurement shows."""
    log_every: int = 10
    """Updates between lines of metrics.jsonl."""
    eval_every: int = 1000
    """Updates between evaluations on the held-out split; there is one at the end in any case."""
    eval_examples: int = 4000
    """Most held-out pairs that are evaluated, always the same ones with the same masks."""
    save_every: int = 1000
    """Updates between checkpoints; there is one at the end in any case."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    timeout_s: int = 600
    """Seconds after which a process that waits for another gives up."""

    def validate(self) -> None:
        check_choice("train.optimizer", self.optimizer, ("adamw", "muon", "lamb"))
        check_choice("train.precision", self.precision, ("auto", "fp32", "bf16"))
        counts = "max_steps global_batch_size micro_batch_size log_every eval_every eval_examples"
        for name in (counts + " save_every keep_checkpoints timeout_s").split():
            check(getattr(self, name) >= 1, f"train.{name} {getattr(self, name)} is below 1")
        check(0 < self.learning_rate < inf, "train.learning_rate is not a number above 0")
        check(
            0 <= self.warmup_steps < self.max_steps,
            f"train.warmup_steps {self.warmup_steps} is not below {self.max_steps}, the steps of "
            "the schedule (train.max_steps, or those of its phases)",
        )
        check_choice(
            "train.schedule", self.schedule, ("linear", "cosine", "polynomial", "trapezoid")
        )
        check(0 < self.decay_power < inf, "train.decay_power is not a number above 0")
        if self.schedule == "trapezoid":
            after = self.max_steps - self.warmup_steps
            check(
                1 <= (self.decay_steps or 0) <= after,
                f"train.decay_steps is {self.decay_steps}; train.schedule trapezoid wants 1 to "
                f"{after}, the steps after the warm-up",
            )
        else:
            check(
                self.decay_steps is None,
                f"train.decay_steps is given, and train.schedule {self.schedule} decays over all "
                "steps after the warm-up; drop it, or set train.schedule=trapezoid",
            )
        check(
            self.global_batch_size % self.micro_batch_size == 0,
            f"train.global_batch_size {self.global_batch_size} is not a multiple of "
            f"train.micro_batch_size {self.micro_batch_size}",
        )


@dataclass
class TrackingConfig:
    wandb: str | None = None
    """Project on wandb to report to; null: none. WANDB_MODE=offline keeps it on this machine."""


@dataclass
class ExportConfig:
    license: str | None = None
    """Licence of the exported model, by its hub identifier, for the model card; null: not
    stated."""


@dataclass
class Config(DataConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    """The encoder."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How it is trained."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Who is told about it."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """What the exported folder says of the model."""

    def validate(self) -> None:
        super().validate()
        self.model.validate()
        self.train.validate()
        self.validate_length(self.data)
        if self.train.phases:
            self.validate_phases()

    def validate_length(self, data: PairsConfig) -> None:
        check(
            data.max_seq_length <= self.model.max_position_embeddings,
            f"data.max_seq_length {data.max_seq_length} exceeds "
            f"model.max_position_embeddings {self.model.max_position_embeddings}",
        )

    def validate_phases(self) -> None:
        for i, phase in enumerate(self.train.phases):
            name = f"train.phases[{i}]"
            check(phase.steps >= 1, f"{name}.steps {phase.steps} is below 1")
            check(
                phase.warmup_steps is None or phase.learning_rate is not None,
                f"{name}.warmup_steps is given without a learning_rate, and only a new learning "
                "rate has a warm-up; give both or neither",
            )
        total = sum(phase.steps for phase in self.train.phases)
        check(
            total == self.train.max_steps,
            f"the steps of train.phases add up to {total}, and train.max_steps is "
            f"{self.train.max_steps}; set train.max_steps={total}, change the phases, or drop them "
            "with train.phases=[]",
        )
        for i, phase in enumerate(phases_of(self)):
            try:
                phase.data.validate()
                phase.train.validate()
                self.validate_length(phase.data)
            except UserError as error:
                raise UserError(f"train.phases[{i}]: {error}") from None


@dataclass
class Phase:
    """Some steps of a run and what holds in them, all told."""

    start: int
    """First step."""
    end: int
    """The step after the last."""
    schedule_start: int
    """Step at which the learning rate's schedule began."""
    seed: int
    """Seed of the phase's data."""
    data: PairsConfig
    """As the config's `data`, with what the phase gives."""
    train: TrainConfig
    """As the config's `train`, with what the phase gives; `max_steps` are those of the schedule."""


def phases_of(config: Config) -> list[Phase]:
    """The phases of a run, one after the other; a run without `train.phases` is one."""
    train = replace(config.train, phases=[])
    listed = config.train.phases or [PhaseConfig(steps=train.max_steps)]
    starts = list(accumulate((phase.steps for phase in listed), initial=0))
    phases = []
    for i, phase in enumerate(listed):
        given = {name: value for name, value in vars(phase).items() if value is not None}
        del given["steps"]
        data = {name: given.pop(name) for name in list(given) if hasattr(config.data, name)}
        if i == 0 or phase.learning_rate is not None:  # a schedule begins, and lasts to the next
            later = (k for k in range(i + 1, len(listed)) if listed[k].learning_rate is not None)
            schedule_start, end = starts[i], starts[next(later, len(listed))]
            schedule = replace(
                train,
                max_steps=end - schedule_start,
                learning_rate=given.get("learning_rate", train.learning_rate),
                warmup_steps=given.get("warmup_steps", train.warmup_steps),
            )
        phases.append(
            Phase(
                start=starts[i],
                end=starts[i + 1],
                schedule_start=schedule_start,
                seed=int(key(config.seed, i, PHASE)) if i else config.seed,
                data=replace(config.data, **data),
                train=replace(schedule, **given),
            )
        )
    return phases


def phase_at(phases: list[Phase], step: int) -> Phase:
    """The phase that a step lies in; the last one at the end of the run."""
    return next((phase for phase in phases if step < phase.end), phases[-1])
