"""Write the model card of an export: the README.md that a model hub shows as its page."""

import math
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from data_pipeline.config import SourceConfig
from pretrain.config import Config, Phase, known_positions, longest_trained, phases_begun

PAIRS = {  # by objective: its tag on the hub, what the pair head predicts and its labels mean
    "nsp": {
        "tag": "next-sentence-prediction",
        "predicted": "whether the second segment of a pair follows the first",
        "label 0": "B follows A",
        "label 1": "B is a random segment",
        "metric": "Next-sentence accuracy",
    },
    "sop": {
        "tag": "sentence-order-prediction",
        "predicted": "whether the two segments of a pair are in order",
        "label 0": "A and B are in order",
        "label 1": "they are swapped",
        "metric": "Sentence-order accuracy",
    },
}
GUESSING = 0.03  # accuracy above the majority: the standard error with some hundred held-out pairs
MASKED_UNITS = {
    "whole_word": "whole words",
    "span": "spans of 1 to 10 words",
    "ngram": "spans of 1 to 3 words",
    "token": "tokens",
}
OPTIMIZERS = {
    "adamw": "AdamW",
    "muon": "Muon for the matrices of the encoder, AdamW for the rest",
    "lamb": "LAMB",
}
PRECISIONS = {
    "no": "float32",
    "fp32": "float32",
    "bf16": "bfloat16 autocast, float32 weights",
}


def project_version() -> str:
    """Return the name and version of this project, or that it is not installed."""
    try:
        return f"bert-pretrain {version('bert-pretrain')}"
    except PackageNotFoundError:
        return "bert-pretrain (not installed)"


def model_card(
    config: Config,
    state: dict,
    parameters: int,
    lowercase: bool,
    positions: int,
    manifest: dict | None = None,
    mask: str = "[MASK]",
) -> str:
    """Write the card of a model: what it is, how to load it, its data, training and evaluation.

    state: of the checkpoint: `step`, `evaluation` and the `fingerprint` of the run.
    positions: of the exported model.
    manifest: of the token store; None leaves the table of sources out.
    mask: what the vocabulary calls [MASK].
    """
    phases = phases_begun(config, state)
    sections = [
        front_matter(config, mask),
        introduction(config, parameters),
        usage(config, mask),
        "## Training data\n\n" + training_data(config, manifest),
        "## Training procedure\n\n" + training_procedure(config, state, phases, parameters),
        "## Evaluation\n\n" + evaluation(config, state["evaluation"], state.get("evaluated_step")),
        "## Limits\n\n" + limits(config, state, lowercase, positions),
        "## Provenance\n\n" + provenance(state["fingerprint"]),
    ]
    return "\n".join(sections)


def generator_card(config: Config, parameters: int) -> str:
    """Write the card of an ELECTRA's generator, which lies in the folder of its model."""
    return f"""# Generator of {Path(config.run_dir).resolve().name}

It filled the masks of the texts that the model in the folder above learned to judge, and shares \
its embeddings ({parameters:,} parameters). The card there says what both learned from. \
`ElectraForMaskedLM.from_pretrained(name, subfolder="generator")` loads it.
"""


def front_matter(config: Config, mask: str) -> str:
    """Write the metadata of a card, with keys that the hub knows."""
    languages = dict.fromkeys(source.language for source in config.corpus.each_source())
    metadata = {"language": list(languages)}
    if config.export.license:
        metadata["license"] = config.export.license
    metadata["library_name"] = "transformers"
    if not config.model.family.discriminator:
        metadata["pipeline_tag"] = "fill-mask"
    metadata["mask_token"] = mask
    learned = "replaced-token-detection" if config.model.family.discriminator else "masked-lm"
    metadata["tags"] = [config.model.architecture, learned]
    if task := PAIRS.get(config.data.objective):
        metadata["tags"].append(task["tag"])
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---"


def introduction(config: Config, parameters: int) -> str:
    model, title, licence = config.model, config.model.family.title, config.export.license
    learned = "predicts masked words"
    if model.family.discriminator:
        learned = "tells which words of a text a generator replaced"
    elif task := PAIRS.get(config.data.objective):
        learned += f" and {task['predicted']}"
    begun = "from scratch"
    if config.init_from:
        folder = Path(config.init_from)
        begun = f"on from `{folder.parent.name if folder.name == 'export' else folder.name}`"
    stated = f"Licence: {licence}." if licence else "No licence was stated for this model."
    return f"""# {Path(config.run_dir).resolve().name}

{"An" if title[0] in "AE" else "A"} {title} encoder of {model.num_hidden_layers} layers, width \
{model.hidden_size} and {model.num_attention_heads} attention heads ({parameters:,} parameters), \
pretrained {begun} with {project_version()}. It {learned}, and is meant to be fine-tuned for \
other tasks.

{stated}
"""


def usage(config: Config, mask: str) -> str:
    """Show how to load the model, with its pair head if that was trained."""
    names, pairs, labels = ["AutoModel", "AutoTokenizer"], "", ""
    if task := PAIRS.get(config.data.objective):
        hf_class, scores = config.model.family.pair_scores
        names.append(hf_class)
        pairs = f"""
pair = tokenizer("A first sentence.", "A second sentence.", return_tensors="pt")
{hf_class}.from_pretrained(name)(**pair).{scores}  # of labels 0 and 1
"""
        labels = f"\nOf a sentence pair A, B, label 0 means that {task['label 0']}, "
        labels += f"label 1 that {task['label 1']}.\n"
    example = f'pipeline("fill-mask", model=name)("A sentence with a {mask}.")\n'
    names.append("pipeline")
    if config.model.family.discriminator:
        names[2:] = ["ElectraForMaskedLM", "ElectraForPreTraining"]
        example = """text = tokenizer("A sentence with a word.", return_tensors="pt")
ElectraForPreTraining.from_pretrained(name)(**text).logits  # above 0: the token looks replaced
ElectraForMaskedLM.from_pretrained(name, subfolder="generator")  # fills in a [MASK]
"""
    return f"""## How to load it

`REPOSITORY_OR_FOLDER` is the name of this repository on the hub, or the path of a folder with \
these files.

```python
from transformers import {", ".join(names)}

name = "REPOSITORY_OR_FOLDER"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name)
{example}{pairs}```
{labels}"""


def training_data(config: Config, manifest: dict | None) -> str:
    found = (manifest or {}).get("sources")
    if not found:
        return "The record of the sources was not at hand; the hash below names the token store.\n"
    settings = config.corpus.each_source()
    if len(settings) != len(found):  # the corpus was prepared with another config
        settings = [SourceConfig(language="")] * len(found)
    rows = [
        (f"`{source_name(given, source['name'])}`", given.language)
        + tuple(f"{source[size]:,}" for size in ("documents", "sentences", "tokens"))
        for given, source in zip(settings, found, strict=True)
    ]
    train, held_out = manifest["train"], manifest["held_out"]
    return (
        table(("Source", "Language", "Documents", "Sentences", "Tokens"), rows)
        + f"\nTraining split: {say_split(train)}. Held out for the evaluation: "
        f"{say_split(held_out)}.\n"
    )


def say_split(split: dict) -> str:
    plural = "s" * (split["documents"] != 1)
    return f"{split['documents']:,} document{plural} ({split['tokens']:,} tokens)"


def source_name(source: SourceConfig, name: str) -> str:
    """Name a source without its place on the machine that prepared it.

    name: as in the manifest, the first file or the dataset.
    """
    if source.dataset and not Path(name).is_absolute():
        return ", ".join(filter(None, (name, source.dataset.name)))
    return Path(name).name


def training_procedure(config: Config, state: dict, phases: list[Phase], parameters: int) -> str:
    data, train = config.data, config.train
    sizes = by_phase(
        phases,
        lambda phase: (
            f"{phase.train.global_batch_size} sequences of at most {phase.data.max_seq_length} "
            "tokens"
        ),
    )
    rates = by_phase(
        [phase for phase in phases if phase.start == phase.schedule_start],
        lambda phase: (
            f"{phase.train.learning_rate:g}, {phase.train.schedule} schedule after "
            f"{phase.train.warmup_steps:,} step{'s' * (phase.train.warmup_steps != 1)} of warm-up"
        ),
    )
    if train.extend:
        rates += "; with `train.extend`, so earlier steps may have had those of a shorter schedule"
    predicted = by_phase(phases, lambda phase: f"{phase.data.masked_lm_prob:.0%}")
    kept = 1 - data.mask_replace_prob - data.random_replace_prob
    precision = state["fingerprint"].get("train.precision", train.precision)
    rows = [
        ("Parameters", f"{parameters:,}"),
        ("Length of training", f"{state['step']:,} step{'s' * (state['step'] != 1)} of {sizes}"),
        ("Optimizer", f"{OPTIMIZERS[train.optimizer]}; weight decay {train.weight_decay:g}"),
        ("Peak learning rate", rates),
        ("Precision", PRECISIONS.get(precision, precision)),
        (
            "Masking",
            f"{MASKED_UNITS[data.masking]}; {predicted} of the tokens are predicted, of which "
            f"{data.mask_replace_prob:.0%} become [MASK], {data.random_replace_prob:.0%} another "
            f"token and {max(kept, 0):.0%} stay",
        ),
    ]
    if task := PAIRS.get(data.objective):
        single = by_phase(phases, lambda phase: f"{phase.data.single_segment_prob:.0%}")
        less = "" if single == "0%" else f"; {single} of the sequences are a single segment"
        rows.append(("Sentence pairs", f"predict {task['predicted']}{less}"))
    return table(("Setting", "Value"), rows)


def by_phase(phases: list[Phase], describe: Callable[[Phase], str]) -> str:
    """Describe a setting of each phase, once for phases that share it, with the step it starts."""
    found = []
    for phase in phases:
        text = describe(phase)
        if not found or found[-1][0] != text:
            found.append((text, f" (from step {phase.start:,})" if phase.start else ""))
    return " and ".join(text + start for text, start in found)


def evaluation(config: Config, metrics: dict, step: int | None) -> str:
    """Write the table of held-out metrics and baselines, without those that are missing.

    step: that of the metrics; None: unknown, as in checkpoints of 0.2.0.
    """
    pairs = PAIRS.get(config.data.objective, {}).get("metric")
    filled = "Generator's masked-LM" if config.model.family.discriminator else "Masked-LM"
    known = {name: v for name, v in metrics.items() if v is not None and math.isfinite(v)}
    lines = (  # metric, name, form of the value, metric of the baseline, what that is
        ("mlm_loss", f"{filled} loss", "{:.3f} nats", "unigram_entropy", "unigram entropy"),
        ("mlm_perplexity", f"{filled} perplexity", "{:,.1f}", "", ""),
        ("mlm_bits_per_byte", f"{filled} bits per byte of text", "{:.3f}", "", ""),
        (
            "mlm_accuracy",
            f"{filled} accuracy",
            "{:.1%}",
            "unigram_accuracy",
            "most frequent token",
        ),
        ("mlm_top5", f"{filled} accuracy, best of five", "{:.1%}", "", ""),
        ("nsp_accuracy", pairs, "{:.1%}", "nsp_majority", "majority label"),
        ("rtd_auc", "Replaced tokens: area under the curve (guessing: 0.5)", "{:.3f}", "", ""),
        ("minimal_pairs", "Minimal pairs", "{:.1%}", "minimal_pairs_unigram", "token frequencies"),
    )
    rows = []
    for metric, name, form, baseline, meaning in lines:
        value, floor = known.get(f"eval/{metric}"), known.get(f"eval/{baseline}")
        if name and value is not None:
            beside = f"{form.format(floor)} ({meaning})" if floor is not None else ""
            rows.append((name, form.format(value), beside))
    if not rows:
        return "The model was not evaluated on held-out documents.\n"
    at = "" if step is None else f" (step {step:,})"
    return (
        f"On held-out documents, at the last evaluation up to this checkpoint{at}. The baseline is "
        "what a guess without a model reaches.\n\n" + table(("Metric", "Model", "Baseline"), rows)
    )


def limits(config: Config, state: dict, lowercase: bool, positions: int) -> str:
    longest, metrics = longest_trained(config, state), state["evaluation"]
    dropout, model = config.export.dropout, config.model
    known = known_positions(config, state)
    further = ""
    if longest < min(known, positions):
        further = f" Positions {longest + 1:,} to {min(known, positions):,} are as the model that "
        further += "training began from has them."
    if known < positions:
        further += f" Positions {known + 1:,} to {positions:,} continue the trained ones, "
        further += "untrained."
    if positions < known:
        further += f" Only the first {positions:,} positions were exported."
    trained = f"{model.hidden_dropout_prob:g} and {model.attention_probs_dropout_prob:g}"
    lines = [
        f"No sequence in training was longer than {longest:,} tokens.{further}",
        f"For fine-tuning, `config.json` sets a dropout of {dropout:g}; pretraining had {trained} "
        "(hidden states and attention).",
        "The tokenizer lower-cases text." if lowercase else "The tokenizer keeps upper case.",
        "The model knows the language, the topics and the biases of the text above, no others.",
        f"It is not fine-tuned: a class for another task (`{model.family.prefix}"
        "ForSequenceClassification`, ...) starts with a new head and says so.",
    ]
    accuracy, majority = (metrics.get(f"eval/nsp_{name}") for name in ("accuracy", "majority"))
    if config.data.objective in PAIRS and accuracy and majority and accuracy < majority + GUESSING:
        lines.append("Its pair head hardly does better than a guess: see the evaluation.")
    if model.family.discriminator:
        lines.append("There is no pooler: use `last_hidden_state`.")
    elif config.data.objective not in PAIRS:
        lines.append(
            "No sentence pairs were trained, so there is no pooler: use `last_hidden_state`, or "
            "expect the classes that need a pooler to start with a new one."
        )
    return "".join(f"- {line}\n" for line in lines)


def provenance(fingerprint: dict) -> str:
    begun = fingerprint.get("init_from_sha256")
    return f"""- made by {project_version()}
- vocabulary sha256 {fingerprint["vocab_sha256"]}
- token store sha256 {fingerprint["data_sha256"]}
""" + (f"- started from weights with sha256 {begun}\n" if begun else "")


def format_hashes(hashes: dict[str, str]) -> str:
    """Write the SHA-256 of each file of weights as `sha256sum` does, so that it finds them."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in hashes.items())
    return f"`sha256sum -c README.md` checks the weights:\n\n```text\n{lines}```\n"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Write a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in cells)
