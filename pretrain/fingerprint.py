"""Compare the settings of a run that must match on resume: those that change its data or its
mathematics.

Settings are listed by name, so that a new field of the config breaks no existing run; a checkpoint
that lacks a listed setting counts as having its default. Paths, intervals, the number of
checkpoints and processes, and the micro-batch size may change.
"""

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from pretrain.config import Config, ModelConfig, PhaseConfig, TrainConfig, phases_of
from pretrain.families import SETTINGS, SHARED
from pretrain.optim import learning_rate

SCHEMA = 5
"""Schema 1, of version 0.1.0, held every field of the config. Runs of all earlier ones drew their
data by other rules."""
OTHERS = {  # description of hashes that differ
    "data_sha256": "the data differ (data_sha256)",
    "vocab_sha256": "the vocabulary differs (vocab_sha256)",
    "init_from_sha256": "the weights of init_from differ (init_from_sha256)",
}
MODEL = ("architecture", *SETTINGS, *SHARED, "generator_size")
DATA = ("objective", "masking", "mask_replace_prob", "random_replace_prob")
TRAIN = (
    "optimizer",
    "schedule",
    "decay_power",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bag_of_words_weight",
    "sampled_softmax",
)
PHASE_DATA = (
    "max_seq_length",
    "masked_lm_prob",
    "max_predictions_per_seq",
    "single_segment_prob",
    "short_seq_prob",
)
PHASE_TRAIN = ("global_batch_size", "learning_rate")
LENGTHS = ("warmup_steps", "decay_steps", "max_steps")  # of a schedule
RATES_COMPARED = 10_000  # at most this many finished steps, evenly spaced


def build_fingerprint(
    config: Config,
    vocab_sha256: str,
    data_sha256: str,
    precision: str,
    init_from_sha256: str | None = None,
) -> dict:
    """Build the fingerprint of a run, with values that survive a round trip through JSON.

    precision: `fp32` or `bf16`, as resolved from `train.precision`.
    init_from_sha256: of the initial weights; None: random ones.
    """
    found = {"schema": SCHEMA, "seed": config.seed, "train.precision": precision}
    found |= {"vocab_sha256": vocab_sha256, "data_sha256": data_sha256}
    found["init_from_sha256"] = init_from_sha256
    found |= {f"model.{name}": getattr(config.model, name) for name in MODEL}
    found["model.intermediate_size"] = config.model.inner_width
    found |= {f"data.{name}": getattr(config.data, name) for name in DATA}
    found |= {f"train.{name}": getattr(config.train, name) for name in TRAIN}
    found["phases"] = [
        {"start": phase.start, "end": phase.end, "schedule_start": phase.schedule_start}
        | {name: getattr(phase.data, name) for name in PHASE_DATA}
        | {name: getattr(phase.train, name) for name in (*PHASE_TRAIN, *LENGTHS)}
        for phase in phases_of(config)
    ]
    return found


def read_fingerprint(state: dict) -> dict:
    """Read the fingerprint in a checkpoint's state, converted to the current schema.

    Raises `UserError` if a later version wrote it.
    """
    try:
        saved = state.get("fingerprint") or convert_schema_1(state["contract"])
        newest, _ = saved["schema"], saved["phases"][-1]
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"the fingerprint of the checkpoint is damaged: {error!r}") from None
    if newest > SCHEMA:
        raise UserError(
            f"the checkpoint has schema {saved['schema']}, but this version reads 1 to {SCHEMA}; "
            "use the version of bert-pretrain that wrote it, or a later one"
        )
    defaults = build_fingerprint(Config(), "", "", "fp32")
    phase = defaults["phases"][0]
    return defaults | saved | {"phases": [phase | other for other in saved["phases"]]}


def convert_schema_1(contract: dict) -> dict:
    """Convert a fingerprint of schema 1: all fields of three sections, flat."""

    def section(schema: type, name: str):
        known = {item.name for item in fields(schema)}
        values = (
            (key.removeprefix(f"{name}."), value)
            for key, value in contract.items()
            if key.startswith(f"{name}.")
        )
        return schema(**{key: value for key, value in values if key in known})

    train = section(TrainConfig, "train")
    train.phases = [PhaseConfig(**phase) for phase in contract.get("train.phases", [])]
    config = Config(
        seed=contract["seed"],
        data=section(PairsConfig, "data"),
        model=section(ModelConfig, "model"),
        train=train,
    )
    precision = {"no": "fp32"}.get(contract["train.precision"], contract["train.precision"])
    hashes = contract["vocab_sha256"], contract["data_sha256"]
    return build_fingerprint(config, *hashes, precision) | {"schema": 1}


def check_fingerprint(
    saved: dict, wanted: dict, step: int, run_dir: object, extend: bool = False
) -> list[str]:
    """Check that a run can resume at `step` with the wanted settings.

    The number of steps may change if the finished steps keep their learning rates, or with
    `extend`. Returns lines to print. Raises `UserError`, with each old and new value, if the
    settings differ.
    """
    changed = list_changes(saved, wanted, step)
    advice = "Choose another run_dir, or restore these values to resume"
    if changed:
        advice += advise_on_phases(saved["phases"], wanted["phases"], extend)
    moved = not changed and not same_rates(saved, wanted, step)
    if moved and not extend:
        changed += list_lengths(saved["phases"], wanted["phases"])
        advice += (
            ", or set train.extend=true to continue with the learning rate of the new schedule"
        )
    if changed:
        raise UserError(
            f"{run_dir} holds a run with a different config: {'; '.join(changed)}. {advice}"
        )
    lines, before, after = [], saved["phases"][-1]["end"], wanted["phases"][-1]["end"]
    if moved or before != after:
        was, now = rate_at(saved, step), rate_at(wanted, step)
        lines.append(
            f"from step {step:,} to {after:,} instead of {before:,}: the learning rate continues "
            f"at {now:.3g} instead of {was:.3g}"
        )
    if saved["schema"] < SCHEMA and step:
        lines.append(
            f"an earlier version started this run: from step {step:,} on, its pairs, masks, "
            "dropout and the data of phases after the first follow the rules of this version"
        )
    return lines


def list_changes(saved: dict, wanted: dict, step: int) -> list[str]:
    """Describe what keeps a run from resuming at `step`, apart from another learning rate."""
    changed = [
        OTHERS.get(name, f"{name} was {saved.get(name)!r}, is {value!r}")
        for name, value in wanted.items()
        if name not in ("schema", "phases") and saved.get(name) != value
    ]
    changed += list_begun(saved["phases"], wanted["phases"], step)
    end = wanted["phases"][-1]["end"]
    if end < step:
        changed.append(f"the run has done {step:,} steps, but train.max_steps is {end:,}")
    return changed


def advise_on_phases(saved: list[dict], wanted: list[dict], extend: bool) -> str:
    """Advise on steps that keep phases in place; "" where these are not what has moved."""
    before, after = saved[-1]["end"], wanted[-1]["end"]
    starts, others = ([phase["start"] for phase in phases] for phases in (saved, wanted))
    if len(starts) != len(others) or starts == others or starts[-1] >= after:
        return ""
    sizes = " and ".join(f"{b - a:,}" for a, b in pairwise([*starts, after]))  # shares move
    how = ", with train.extend=true" if before != after and not extend else ""
    return (
        ", or give the steps of train.phases as numbers that keep the phases in place, such as "
        f"{sizes}{how}"
    )


def list_begun(saved: list[dict], wanted: list[dict], step: int) -> Iterator[str]:
    """Describe how the phases that began before `step` differ, apart from schedule lengths."""
    begun = sum(phase["start"] < max(step, 1) for phase in saved)
    for i, phase in enumerate(saved[:begun]):
        name = f"phase {i}: " if len(saved) > 1 else ""
        if i >= len(wanted):
            yield f"{name}it was removed"
            continue
        sections = {key: f"data.{key}" for key in PHASE_DATA}
        sections |= {key: f"train.{key}" for key in PHASE_TRAIN}
        for key in ("start", "schedule_start", *sections):
            if phase[key] != wanted[i][key]:
                yield f"{name}{sections.get(key, key)} was {phase[key]!r}, is {wanted[i][key]!r}"
    for i, phase in enumerate(wanted[begun:], begun):
        if phase["start"] < step:
            yield (
                f"phase {i}: it is new, but would have begun at step {phase['start']:,} of the "
                f"{step:,} that are done"
            )


def list_lengths(saved: list[dict], wanted: list[dict]) -> list[str]:
    """Describe how the lengths of schedules and phases differ."""
    before, after = saved[-1]["end"], wanted[-1]["end"]
    if before != after:  # the others may be shares of `max_steps`
        return [f"train.max_steps was {before:,}, is {after:,}"]
    differences = [
        f"{f'phase {i}: ' if len(saved) > 1 else ''}train.{name} was {old[name]}, is {new[name]}"
        for i, (old, new) in enumerate(zip(saved, wanted, strict=False))
        for name in LENGTHS
        if old[name] != new[name]
    ]
    return differences or ["the steps of its phases were different"]


def rate_at(fingerprint: dict, step: int) -> float:
    """Compute the learning rate of a step from a fingerprint; 0 after the last phase."""
    phases = fingerprint["phases"]
    if step >= phases[-1]["end"]:
        return 0.0
    phase = next(phase for phase in phases if step < phase["end"])
    schedule, power = fingerprint["train.schedule"], fingerprint["train.decay_power"]
    train = SimpleNamespace(**phase, schedule=schedule, decay_power=power)
    return learning_rate(step - phase["schedule_start"], train)


def same_rates(saved: dict, wanted: dict, step: int) -> bool:
    """Tell whether both fingerprints give the steps before `step` the same learning rates."""
    steps = np.unique(np.linspace(0, step - 1, min(step, RATES_COMPARED)).astype(int)).tolist()
    rates = [[rate_at(f, s) for s in steps] for f in (saved, wanted)]
    return np.allclose(*rates, rtol=1e-9, atol=0)
