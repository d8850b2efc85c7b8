"""Define the config of a run: the sections of the data, model, train, tracking and export."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.streams import Stream, derive_stream
from data_pipeline.config import DataConfig, PairsConfig, check_choice, check_numbers, number
from pretrain.families import (
    FAMILIES,
    SHARED,
    Family,
    check_computable,
    read_hf_config,
    read_settings,
)


@dataclass
class ModelConfig:
    """The encoder, with BertConfig's names, meanings and defaults; the vocabulary sets its own
    size."""

    architecture: str = "bert"
    """Family: `bert`, `roberta`, `xlm-roberta`, `camembert`, `albert` or `electra`, rows of
    `pretrain/families.py`, which has their defaults."""
    hidden_size: int = number(768, "[1, 65536]")
    """Width D of the encoder."""
    num_hidden_layers: int = number(12, "[1, 1000]")
    """Layers of the encoder."""
    num_attention_heads: int = number(12, "[1, 65536]")
    """Heads H of each layer."""
    intermediate_size: int | None = number(None, "[1, 1e6]")
    """Width of the feed-forward layers; null: 4 x hidden_size."""
    hidden_act: str = "gelu"
    """Activation: gelu (erf), gelu_new or gelu_pytorch_tanh (tanh), relu, silu."""
    hidden_dropout_prob: float = number(0.1, "[0, 1)")
    """Dropout of embeddings and of each sublayer's output, in training."""
    attention_probs_dropout_prob: float = number(0.1, "[0, 1)")
    """Dropout of attention weights, in training."""
    max_position_embeddings: int = number(512, "[1, 1e6]")
    """Longest sequence that the model accepts, in tokens."""
    type_vocab_size: int = number(2, "[1, 1000]")
    """Segment types; 1 only with `data.objective: none`."""
    initializer_range: float = number(0.02, "(0, 10]")
    """Standard deviation of the weights at the start."""
    layer_norm_eps: float = number(1e-12, "(0, 1]")
    """Added to the variance in layer normalisation."""
    pad_token_id: int = number(0, "[0, 1e6)")
    """Id of [PAD]: 0, unless it differs in `vocab.path`; its embedding starts at zero."""
    position_embedding_type: str = "absolute"
    """Learned embeddings of absolute positions, BERT's."""
    embedding_size: int | None = number(None, "[1, 65536]")
    """Width E of the embeddings, in ALBERT and ELECTRA; null: hidden_size."""
    num_hidden_groups: int | None = number(None, "[1, 1000]")
    """Number of weight sets that the layers of ALBERT share; null: one for each layer."""
    generator_size: float = number(0.25, "(0, 1]")
    """Width of an ELECTRA's generator as a share of the model's: hidden size, heads,
    feed-forward."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries of `config.json`, which the export passes on."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def first_position(self) -> int:
        """Row of the position embeddings that the first token of a sequence has."""
        return self.family.first_position(self.pad_token_id)

    @property
    def embedding_width(self) -> int:
        """Width E of the embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def inner_width(self) -> int:
        """Width of the feed-forward layers."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def is_projected(self) -> bool:
        """Whether the embeddings are mapped to the hidden size."""
        return self.family.always_projects or self.embedding_width != self.hidden_size

    @property
    def generator(self) -> "ModelConfig":
        """The generator of an ELECTRA."""
        size = round(self.generator_size * self.hidden_size)
        share = size / self.hidden_size  # which a reader of the export knows
        return replace(
            self,
            embedding_size=self.embedding_width,
            hidden_size=size,
            num_attention_heads=max(round(share * self.num_attention_heads), 1),
            intermediate_size=round(share * self.inner_width),
        )

    def validate(self) -> None:
        check_choice("model.architecture", self.architecture, tuple(FAMILIES))
        check_numbers(self, "model")
        for name, same in SHARED.items():
            value, most = getattr(self, name), getattr(self, same)
            check(
                value in (None, most) or name in self.family.settings,
                f"model.{name} is {value}, but {self.family.title} has no such setting; remove "
                "it, or choose another model.architecture",
            )
        check(
            (self.num_hidden_groups or 1) <= self.num_hidden_layers,
            f"model.num_hidden_groups {self.num_hidden_groups} exceeds the "
            f"{self.num_hidden_layers} layers that share the groups; lower it",
        )
        check(
            self.hidden_size % self.num_attention_heads == 0,
            f"model.hidden_size {self.hidden_size} is not a multiple of "
            f"model.num_attention_heads {self.num_attention_heads}; change one of them",
        )
        check_choice(
            "model.hidden_act",
            self.hidden_act,
            ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
        )
        check_choice("model.position_embedding_type", self.position_embedding_type, ("absolute",))
        check(
            self.family.discriminator or self.generator_size == ModelConfig.generator_size,
            f"model.generator_size is {self.generator_size:g}, but {self.family.title} has no "
            "generator; remove it, or set model.architecture=electra",
        )
        check_computable(self.extra, "model.extra")
        if self.family.discriminator:
            size, heads = self.generator.hidden_size, self.generator.num_attention_heads
            check(
                size >= 1 and size % heads == 0,
                f"model.generator_size {self.generator_size:g} makes a generator of width {size} "
                f"with {heads} heads; choose another share of the model",
            )


@dataclass
class PhaseConfig:
    """Settings of consecutive steps of a run; null: inherited from `data` and `train`."""

    steps: float = number(0, "(0, 1e9]")
    """Steps of the phase; below 1: its share of `train.max_steps`."""
    max_seq_length: int | None = number(None, "[8, 1e6]")
    """As in `data`, like the four fields below. Evaluations use the length of `data`, so that they
    can be compared over the run, and in a phase of another length that length too. They use pairs,
    or single segments in a phase whose `single_segment_prob` is 1."""
    masked_lm_prob: float | None = number(None, "(0, 1)")
    """Probability that a token is predicted."""
    max_predictions_per_seq: int | None = number(None, "[1, 1e6]")
    """Largest number of predicted tokens per sequence."""
    single_segment_prob: float | None = number(None, "[0, 1]")
    """Share of sequences with one segment."""
    short_seq_prob: float | None = number(None, "[0, 1)")
    """Share of sequences that aim at a random shorter length."""
    global_batch_size: int | None = number(None, "[1, 1e7]")
    """Sequences of a step, over all processes."""
    micro_batch_size: int | None = number(None, "[1, 1e7]")
    """Most sequences in one pass of one process."""
    learning_rate: float | None = number(None, "(0, 10]")
    """Starts a new schedule, warm-up included, which ends where the next one starts; null: continue
    the current schedule."""
    warmup_steps: float | None = number(None, "[0, 1e9]")
    """Steps of warm-up in this phase's schedule; below 1: their share of its steps."""


@dataclass
class TrainConfig:
    max_steps: int = number(1_000_000, "[1, 1e9]")
    """Steps in total; the learning rate reaches 0 after the last."""
    extend: bool = False
    """Resume with a different `max_steps` even if its schedule would have given the finished steps
    other learning rates; training continues on the new schedule."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """Consecutive phases, such as 128 tokens and then 512. Their `steps` are shares that add up to
    1, or numbers that add up to max_steps."""
    global_batch_size: int = number(256, "[1, 1e7]")
    """Sequences of a step, over all processes."""
    micro_batch_size: int = number(32, "[1, 1e7]")
    """Largest number of sequences in one forward pass of one process (one more where a process
    would else have an empty pass); choose it by memory. The global batch is divided evenly among
    processes, and each part among as few passes as possible. The gradient does not depend on the
    division, except for dropout, which is drawn per pass."""
    optimizer: str = "adamw"
    """`adamw`; `muon` (Muon for the matrices of the encoder, AdamW for the rest); or `lamb`, for
    batches of many thousand sequences."""
    learning_rate: float = number(1e-4, "(0, 10]")
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: float = number(0.01, "[0, 1e9]")
    """Steps of linear warm-up; below 1: their share of the schedule's steps."""
    schedule: str = "linear"
    """Decay from the end of the warm-up to 0 at the end of the schedule: `linear`, `cosine`,
    `polynomial`, or `trapezoid` (constant until `decay_steps` before the end, then linear)."""
    decay_power: float = number(0.5, "(0, 100]")
    """Exponent p of `polynomial`: (remaining share of the decay) ** p."""
    decay_steps: float | None = number(None, "[0, 1e9]")
    """Steps of the decay of `trapezoid`; below 1: their share of the schedule's steps."""
    weight_decay: float = number(0.01, "[0, 10]")
    """Decoupled weight decay of matrices; biases and norms have none."""
    adam_beta1: float = number(0.9, "[0, 1)")
    """Decay of the mean of gradients."""
    adam_beta2: float = number(0.999, "[0, 1)")
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = number(1e-6, "(0, 1]")
    """Added to the root of the squared gradients."""
    max_grad_norm: float = number(1.0, "[0, 1e9]")
    """Largest gradient norm, to which gradients are clipped; 0: no clipping."""
    bag_of_words_weight: float = number(0.0, "[0, 1000]")
    """Weight of a loss that predicts from [CLS] which tokens of a sequence are masked; 0: off. With
    it, a model of width 256 learns words and pairs faster, one of width 128 learns words slower."""
    sampled_softmax: int = number(0, "[0, 1e7]")
    """Number of tokens that a training step scores per masked position, and for the bag of words,
    to estimate the losses: frequent tokens always, others by chance; 0: all. A small model on a CPU
    learns more in the same time, because the scores are most of its work. Evaluation scores all
    tokens."""
    gradient_checkpointing: bool = False
    """Store only the input of each layer and recompute the rest in the backward pass: the same
    results in less memory, with a third more compute."""
    precision: str = "auto"
    """`fp32`, `bf16` (autocast), or `auto`: bf16 on a GPU with bf16 instructions and a CPU with
    AVX512-BF16 (there 1.6 to 1.8 times as fast), fp32 elsewhere."""
    compile: bool | None = None
    """Compile the layers with torch.compile; null: on a GPU only, since a CPU gains nothing
    measurable."""
    log_every: int = number(10, "[1, 1e9]")
    """Steps between lines of metrics.jsonl."""
    eval_every: int = number(1000, "[1, 1e9]")
    """Steps between evaluations on the held-out split; the last step always evaluates."""
    eval_examples: int = number(4000, "[1, 1e9]")
    """Largest number of held-out sequences to evaluate, always the same with the same masks."""
    save_every: int = number(1000, "[1, 1e9]")
    """Steps between checkpoints; the last step always saves."""
    keep_checkpoints: int = number(2, "[1, 1e6]")
    """Number of newest checkpoints to keep."""
    keep_every: int | None = number(None, "[1, 1e9]")
    """Steps between checkpoints that are kept for good, a multiple of save_every; null: none."""
    on_spike: str = "rollback"
    """What to do when the MLM loss of 10 steps in a row is 1 nat above the median of the 100 before
    them: `rollback` (load the weights of an earlier checkpoint and continue with the next step, so
    that the data between are skipped), `stop`, or `warn`."""
    restart: bool = False
    """Start at step 0 although the run has checkpoints, intact or not; they move to `before-1` in
    run_dir, with the record. The same command, given again, resumes the new run."""
    timeout_s: int = number(600, "[1, 1e6]")
    """Seconds that a process waits for the others before it fails."""

    def validate(self) -> None:
        check_choice("train.optimizer", self.optimizer, ("adamw", "muon", "lamb"))
        check_choice("train.on_spike", self.on_spike, ("rollback", "stop", "warn"))
        check_choice("train.precision", self.precision, ("auto", "fp32", "bf16"))
        check_numbers(self, "train")
        kept = self.keep_every
        check(
            kept is None or kept % self.save_every == 0,
            f"train.keep_every {kept} is not a multiple of train.save_every {self.save_every}, at "
            "which checkpoints are written; set it to a multiple, or to null",
        )
        for name in ("warmup_steps", "decay_steps"):
            check_steps(f"train.{name}", getattr(self, name) or 0)
        warmup = count_steps(self.warmup_steps, self.max_steps)
        check(
            warmup < self.max_steps,
            f"train.warmup_steps {warmup:,} is not below the {self.max_steps:,} steps of the "
            "schedule; give a share of them, such as train.warmup_steps=0.05",
        )
        check_choice(
            "train.schedule", self.schedule, ("linear", "cosine", "polynomial", "trapezoid")
        )
        check(
            self.schedule == "polynomial" or self.decay_power == TrainConfig.decay_power,
            f"train.decay_power is {self.decay_power:g}, but train.schedule {self.schedule} has "
            "no power; remove it, or set train.schedule=polynomial",
        )
        if self.schedule == "trapezoid":
            after = self.max_steps - warmup
            check(
                1 <= count_steps(self.decay_steps or 0, self.max_steps) <= after,
                f"train.decay_steps is {self.decay_steps}; train.schedule trapezoid needs 1 to "
                f"{after:,}, the steps after the warm-up, or a share of all steps, such as 0.2",
            )
        else:
            check(
                self.decay_steps is None,
                f"train.decay_steps is set, but train.schedule {self.schedule} decays over all "
                "steps after the warm-up; remove it, or set train.schedule=trapezoid",
            )


def check_steps(name: str, value: float) -> None:
    """Check that a value is a whole number of steps or a share below 1; raises `UserError`."""
    check(
        0 <= value < 1 or value >= 1 and value == int(value),
        f"{name} {value:g} is neither steps nor a share; give a whole number of steps, or a share "
        "from 0 to below 1",
    )


def count_steps(value: float, total: int) -> int:
    """Convert a number of steps, or a share of `total` below 1, to steps: 0.06 of 1,000 is 60."""
    return round(value * total) if value < 1 else int(value)


def count_kept(train: TrainConfig) -> int:
    """Count the checkpoints on disk at the end of a run, including one being written."""
    kept = train.max_steps // train.keep_every if train.keep_every else 0
    saved = -(-train.max_steps // train.save_every)  # in all
    return min(train.keep_checkpoints + kept, saved) + 1


@dataclass
class TrackingConfig:
    wandb: str | None = None
    """wandb project to report to; null: none. WANDB_MODE=offline keeps the data local."""
    entity: str | None = None
    """User or team of the project; null: wandb's default."""
    name: str | None = None
    """Name of the run in wandb; null: that of its folder."""
    group: str | None = None
    """wandb group of the run."""
    tags: list[str] = field(default_factory=list)
    """wandb tags of the run."""


@dataclass
class ExportConfig:
    license: str | None = None
    """Licence in the model card, by its identifier on the hub; null: not stated."""
    dropout: float = number(0.1, "[0, 1)")
    """Dropout in `config.json`, for fine-tuning, whatever pretraining used: a small model is often
    pretrained without dropout, but fine-tunes worse without (0.727 instead of 0.761 on 300
    reviews).
    """

    def validate(self) -> None:
        check_numbers(self, "export")


@dataclass
class Config(DataConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    """The encoder."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimizer, schedule, batch size and intervals."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Experiment tracking."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Licence and dropout of the export."""

    @classmethod
    def defaults(cls, given: DictConfig) -> dict:
        """Return the defaults of the family, where they differ from BERT's, and the sizes of the
        model to start from.

        A folder that is missing is reported where its vocabulary or its weights are read.
        """
        asked, start = (given.get("model") or {}).get("architecture"), given.get("init_from")
        found = {}
        if start and (folder := Path(str(start)).expanduser()).is_dir():
            there = (folder / "config.json").exists()
            advice, export = "put the one of its weights there", folder / "export"
            if (export / "config.json").exists():
                advice = f"its export is {export}"
            check(there, f"init_from {folder} has no config.json; {advice}")
            found = read_hf_config(read_settings(folder), folder / "config.json")
            check(
                asked in (None, found["architecture"]),
                f"model.architecture is {asked}, but init_from {folder} is of the family "
                f"{found['architecture']}; remove model.architecture",
            )
            path = folder / "generator/config.json"
            if path.exists():
                width = read_hf_config(read_settings(path.parent), path)["hidden_size"]
                found["generator_size"] = width / found["hidden_size"]
        family = FAMILIES.get(found.get("architecture", asked))
        return {"model": dict(family.defaults) | found} if family else {}

    def validate(self) -> None:
        super().validate()
        self.model.validate()
        self.train.validate()
        self.export.validate()
        self.validate_length(self.data)
        self.validate_start()
        self.validate_objectives()
        if self.train.phases:
            self.validate_phases()
        has_pairs = any(phase.data.single_segment_prob < 1 for phase in phases_of(self))
        check(
            self.data.objective == "none" or has_pairs,
            f"single_segment_prob is 1 throughout, but data.objective {self.data.objective} needs "
            "pairs; set data.objective=none",
        )

    def validate_length(self, data: PairsConfig) -> None:
        advice = "; lower it, or raise model.max_position_embeddings"
        if self.init_from:
            advice = f", the positions of {self.init_from}; lower it, or give a model with more, "
            advice += "such as an export with --positions"
        check(
            data.max_seq_length <= self.model.max_position_embeddings,
            f"data.max_seq_length {data.max_seq_length} exceeds model.max_position_embeddings "
            f"{self.model.max_position_embeddings}{advice}",
        )

    def validate_start(self) -> None:
        if not self.init_from:
            return
        start, own = Path(self.init_from), Path(self.run_dir, "export")
        check(
            not start.expanduser().resolve().is_relative_to(own.expanduser().resolve()),
            f"init_from {self.init_from} is the export of run_dir itself, which this run would "
            "replace; choose another run_dir, or copy the export elsewhere and start from that",
        )

    def validate_objectives(self) -> None:
        family, weight = self.model.family, self.train.bag_of_words_weight
        check(
            not (family.discriminator and weight),
            f"train.bag_of_words_weight is {weight:g}, but {family.title} has no head with which "
            "[CLS] could predict words; set train.bag_of_words_weight=0",
        )
        check(
            not (family.discriminator and self.train.sampled_softmax),
            f"train.sampled_softmax is {self.train.sampled_softmax}, but {family.title} draws "
            "from the scores of all tokens; set train.sampled_softmax=0",
        )
        if self.data.objective == "none":
            return
        check(
            family.pairs is not None,
            f"data.objective is {self.data.objective}, but {family.title} has no pair head; set "
            "data.objective=none",
        )
        check(
            self.model.type_vocab_size >= 2,
            f"model.type_vocab_size is {self.model.type_vocab_size}, but data.objective "
            f"{self.data.objective} needs one for A and one for B; set data.objective=none",
        )

    def validate_phases(self) -> None:
        listed, total = self.train.phases, self.train.max_steps
        for i, phase in enumerate(listed):
            name = f"train.phases[{i}]"
            check_numbers(phase, name)
            check_steps(f"{name}.steps", phase.steps)
            check_steps(f"{name}.warmup_steps", phase.warmup_steps or 0)
            check(
                phase.warmup_steps is None or phase.learning_rate is not None,
                f"{name}.warmup_steps is set without a learning_rate, but only a new learning "
                "rate has a warm-up; set both or neither",
            )
        summed, shares = sum(phase.steps for phase in listed), [p.steps < 1 for p in listed]
        check(
            all(shares) or not any(shares),
            "train.phases mixes steps and shares of train.max_steps; give one or the other",
        )
        check(
            abs(summed - (1 if all(shares) else total)) < 1e-6,
            f"the steps of train.phases add up to {summed:g}, but train.max_steps is {total}; "
            "give shares that add up to 1, such as [{steps: 0.9}, {steps: 0.1}], or drop the "
            "phases with train.phases=[]",
        )
        check(
            total >= len(listed),
            f"train.max_steps {total} is less than one step per phase; raise it, or set "
            "train.phases=[]",
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
    """The fully resolved settings of one phase of a run."""

    start: int
    """First step."""
    end: int
    """The step after the last."""
    schedule_start: int
    """Step at which the learning rate's schedule began."""
    seed: int
    """Seed of the phase's data."""
    data: PairsConfig
    """`data` of the config, with the overrides of the phase."""
    train: TrainConfig
    """`train` of the config, with the overrides of the phase; `max_steps`, `warmup_steps` and
    `decay_steps` describe its schedule, in steps."""


def trained_positions(length: int, longest: int) -> int:
    """Count the positions that a phase trains: those of its longest sequence, rounded up to a
    multiple of 8; `length` is its setting."""
    return min(length, -(-longest // 8) * 8)


def phases_begun(config: Config, state: dict) -> list[Phase]:
    """List the phases that the steps up to a checkpoint belong to, from its `state`."""
    return [phase for phase in phases_of(config) if phase.start < max(state["step"], 1)]


def longest_trained(config: Config, state: dict) -> int:
    """Count the positions that the steps up to a checkpoint have trained, from its `state`."""
    lengths = [phase.data.max_seq_length for phase in phases_begun(config, state)]
    known = state.get("longest", lengths)  # an earlier version did not keep it
    return max(map(trained_positions, lengths, known))


def known_positions(config: Config, state: dict) -> int:
    """Count the trained positions of a checkpoint; with `init_from` all, since that model had
    them."""
    if config.init_from:
        return config.model.max_position_embeddings
    return longest_trained(config, state)


def phases_of(config: Config) -> list[Phase]:
    """Resolve the phases of a run, in order; a run without `train.phases` has one."""
    train = replace(config.train, phases=[])
    listed = config.train.phases or [PhaseConfig(steps=train.max_steps)]
    edges = phase_edges([phase.steps for phase in listed], train.max_steps)
    phases = []
    for i, phase in enumerate(listed):
        given = {name: value for name, value in vars(phase).items() if value is not None}
        del given["steps"]
        data = {name: given.pop(name) for name in list(given) if hasattr(config.data, name)}
        if i == 0 or phase.learning_rate is not None:  # starts a schedule, up to the next
            later = (k for k in range(i + 1, len(listed)) if listed[k].learning_rate is not None)
            schedule_start, steps = edges[i], edges[next(later, len(listed))] - edges[i]
            schedule = replace(
                train,
                max_steps=steps,
                learning_rate=given.get("learning_rate", train.learning_rate),
                warmup_steps=count_steps(given.get("warmup_steps", train.warmup_steps), steps),
                decay_steps=train.decay_steps and count_steps(train.decay_steps, steps),
            )
        given.pop("warmup_steps", None)
        phases.append(
            Phase(
                start=edges[i],
                end=edges[i + 1],
                schedule_start=schedule_start,
                seed=int(derive_stream(config.seed, i, Stream.PHASES)) if i else config.seed,
                data=replace(config.data, **data),
                train=replace(schedule, **given),
            )
        )
    return phases


def phase_edges(steps: list[float], max_steps: int) -> list[int]:
    """Compute the first step of each phase, and the end; each phase gets at least one step.

    Shares such as three of 0.3333333 do not add up to 1: the last phase ends with the run.
    """
    sizes = [value * max_steps if value < 1 else value for value in steps]
    edges = [*(round(edge) for edge in accumulate(sizes[:-1], initial=0)), max_steps]
    for i in range(1, len(steps)):
        edges[i] = max(edges[i - 1] + 1, min(edges[i], max_steps - (len(steps) - i)))
    return edges


def phase_at(phases: list[Phase], step: int) -> Phase:
    """Find the phase of a step; at the end of the run, the last."""
    return next((phase for phase in phases if step < phase.end), phases[-1])
