"""The model families: one row each for how they differ, and for transformers' names of their
classes, tensors and settings.

A family computes what transformers' classes of that `model_type` compute with the same weights.
This module does not import torch, so that a config is read fast.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.common.errors import check
from data_pipeline.common.reading import read_json
from data_pipeline.config import check_choice

Tensors = TypeVar("Tensors")
LAYER_NAMES = {  # after "layers.N." and the name of layer N
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
EMBEDDINGS = {  # after the name of the encoder
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
}
SETTINGS = (  # fields of the section `model` that every config.json has under the same name
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "position_embedding_type",
)
SHARED = {"embedding_size": "hidden_size", "num_hidden_groups": "num_hidden_layers"}
"""Fields that default to another field if null, as they have to be in a family without them."""
SIZE, NUMBER, NAME = range(1, 1 << 31), (float, None), (str, None)
CONFIG = {  # shape of a config.json of any family
    **dict.fromkeys(("hidden_size?", "intermediate_size?", "type_vocab_size?"), (SIZE, None)),
    **dict.fromkeys(("embedding_size?", "num_hidden_groups?", "inner_group_num?"), (SIZE, None)),
    **dict.fromkeys(("num_hidden_layers?", "num_attention_heads?"), SIZE),
    **dict.fromkeys(("model_type?", "hidden_act?", "position_embedding_type?"), NAME),
    **dict.fromkeys(("initializer_range?", "layer_norm_eps?"), NUMBER),
    **dict.fromkeys(("hidden_dropout_prob?", "attention_probs_dropout_prob?"), NUMBER),
    **dict.fromkeys(("is_decoder?", "add_cross_attention?", "tie_word_embeddings?"), (bool, None)),
    "max_position_embeddings?": SIZE,
    "pad_token_id?": (range(1 << 31), None),
    "vocab_size?": SIZE,
    "architectures?": ([str], None),
}
WRITTEN = (  # what else an export writes into config.json, or a newer transformers into its own
    *("architectures", "model_type", "vocab_size", "tie_word_embeddings", "torch_dtype", "dtype"),
    *("transformers_version", "_name_or_path"),
)


@dataclass(frozen=True)
class Family:
    """A row of `FAMILIES`.

    The name of a tensor is looked up whole, then without its last part, as in `mlm.dense.weight`.
    """

    title: str
    prefix: str
    """How the names of transformers' classes begin."""
    encoder: str
    """How transformers' names of the encoder's tensors begin."""
    masked_lm: str
    """transformers' class with the MLM head alone."""
    names: Mapping[str, str]
    """Our parameter or module -> transformers', without the encoder's embeddings and layers."""
    pairs: str | None = None
    """transformers' class with the pair head too; None: the family has no pair head."""
    discriminator: str | None = None
    """transformers' class with the head for replaced tokens; None: the family has none."""
    pair_scores: tuple[str, str] = ("", "")
    """A class of transformers with the pair head, and the name of that head's scores there."""
    layer: str = "encoder.layer.{}"
    """transformers' name of layer N, after that of the encoder."""
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    settings: tuple[str, ...] = SETTINGS
    """Fields of the section `model` that its config.json has."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the section `model` whose default is another than BERT's."""
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    """transformers' default for a field that a config.json lacks, where it differs from BERT's."""
    head_act: str | None = None
    """Activation of the MLM head, whatever `hidden_act` is; null: `hidden_act`."""
    always_projects: bool = False
    """Whether embeddings are projected to the hidden size even if they already have it."""
    counts_from_pad: bool = False
    """Whether the first position is pad_token_id + 1, and not 0."""
    tells_ends: bool = False
    """Whether its config.json has the ids of [CLS] and [SEP], as bos_token_id and eos_token_id."""

    def first_position(self, pad_token_id: int) -> int:
        """Row of the position embeddings that the first token of a sequence has."""
        return pad_token_id + 1 if self.counts_from_pad else 0

    def hf_name(self, name: str) -> str:
        """Translate the name of a parameter into transformers'."""
        for ours, theirs in ((EMBEDDINGS, self.encoder), (self.names, "")):
            if name in ours:
                return theirs + ours[name]
            stem, _, kind = name.rpartition(".")
            if stem in ours:
                return f"{theirs}{ours[stem]}.{kind}"
        _, number, stem = stem.split(".", 2)
        return f"{self.encoder}{self.layer.format(number)}.{self.layer_names[stem]}.{kind}"

    def to_hf(self, state: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Rename weights to transformers' names, without the decoder, which is tied on loading."""
        return {self.hf_name(name): tensor for name, tensor in state.items()}

    def from_hf(self, weights: Mapping[str, Tensors], names: Iterable[str]) -> dict[str, Tensors]:
        """Select the parameters `names` of our model from weights under transformers' names."""
        return {name: weights[self.hf_name(name)] for name in names}


FAMILIES = {  # by transformers' `model_type`, which is `model.architecture` too
    "bert": Family(
        title="BERT",
        prefix="Bert",
        encoder="bert.",
        masked_lm="BertForMaskedLM",
        pairs="BertForPreTraining",
        pair_scores=("BertForNextSentencePrediction", "logits"),
        names={
            "pooler": "bert.pooler.dense",
            "mlm.dense": "cls.predictions.transform.dense",
            "mlm.norm": "cls.predictions.transform.LayerNorm",
            "mlm.bias": "cls.predictions.bias",
            "nsp": "cls.seq_relationship",
        },
    ),
    "roberta": Family(  # Liu et al. 2019, arXiv:1907.11692
        title="RoBERTa",
        prefix="Roberta",
        encoder="roberta.",
        masked_lm="RobertaForMaskedLM",
        names={
            "mlm.dense": "lm_head.dense",
            "mlm.norm": "lm_head.layer_norm",
            "mlm.bias": "lm_head.bias",
        },
        defaults={"type_vocab_size": 1, "layer_norm_eps": 1e-5},  # of roberta-base
        unsaid={
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 1,
            "max_position_embeddings": 512,
        },
        counts_from_pad=True,
        tells_ends=True,
        head_act="gelu",
    ),
    "albert": Family(  # Lan et al. 2019, arXiv:1909.11942
        title="ALBERT",
        prefix="Albert",
        encoder="albert.",
        masked_lm="AlbertForMaskedLM",
        pairs="AlbertForPreTraining",
        pair_scores=("AlbertForPreTraining", "sop_logits"),
        names={
            "project": "albert.encoder.embedding_hidden_mapping_in",
            "pooler": "albert.pooler",
            "mlm.dense": "predictions.dense",
            "mlm.norm": "predictions.LayerNorm",
            "mlm.bias": "predictions.bias",
            "nsp": "sop_classifier.classifier",
        },
        layer="encoder.albert_layer_groups.{}.albert_layers.0",
        layer_names={
            "attention.query": "attention.query",
            "attention.key": "attention.key",
            "attention.value": "attention.value",
            "attention.out": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "up": "ffn",
            "down": "ffn_output",
            "norm": "full_layer_layer_norm",
        },
        settings=(*SETTINGS, "embedding_size", "num_hidden_groups"),
        defaults={  # of albert-base-v2
            "embedding_size": 128,
            "num_hidden_groups": 1,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        unsaid={  # of albert-xxlarge, without dropout
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "embedding_size": 128,
            "num_hidden_groups": 1,
        },
        always_projects=True,
        tells_ends=True,
    ),
    "electra": Family(  # Clark et al. 2020, arXiv:2003.10555
        title="ELECTRA",
        prefix="Electra",
        encoder="electra.",
        masked_lm="ElectraForMaskedLM",
        discriminator="ElectraForPreTraining",
        names={
            "project": "electra.embeddings_project",
            "mlm.dense": "generator_predictions.dense",
            "mlm.norm": "generator_predictions.LayerNorm",
            "mlm.bias": "generator_lm_head.bias",
            "rtd.dense": "discriminator_predictions.dense",
            "rtd.out": "discriminator_predictions.dense_prediction",
        },
        settings=(*SETTINGS, "embedding_size"),
        unsaid={  # of electra-small
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
            "embedding_size": 128,
        },
        head_act="gelu",
    ),
}

for kind, title, prefix in (  # RoBERTa's computation, with tokenizers and text of their own
    ("xlm-roberta", "XLM-RoBERTa", "XLMRoberta"),  # Conneau et al. 2019, arXiv:1911.02116
    ("camembert", "CamemBERT", "Camembert"),  # Martin et al. 2019, arXiv:1911.03894
):
    names = {"title": title, "prefix": prefix, "masked_lm": f"{prefix}ForMaskedLM"}
    FAMILIES[kind] = replace(FAMILIES["roberta"], **names)


def hf_config(
    model: Mapping[str, Any], vocab_size: int, hf_class: str, dtype: str = "float32"
) -> dict:
    """Build the `config.json` of a model, with the names of transformers' config.

    model: the section `model` of a config, as a dict. hf_class: transformers' class.
    Writes the dtype as `torch_dtype`, the older name, which all versions of transformers read.
    """
    family = FAMILIES[model["architecture"]]
    found = dict(model["extra"]) | {name: model[name] for name in family.settings}
    found["max_position_embeddings"] += family.first_position(model["pad_token_id"])
    for name, same in SHARED.items():
        if name in found:
            found[name] = found[name] or model[same]
    return found | {
        "intermediate_size": model["intermediate_size"] or 4 * model["hidden_size"],
        "architectures": [hf_class],
        "model_type": model["architecture"],
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a Hugging Face folder; raises `UserError` if it is damaged."""
    return read_json(folder / "config.json", CONFIG, "export or copy it again")


def longest_sequence(settings: Mapping[str, Any]) -> int:
    """Read from a `config.json` how many tokens the model takes; BERT's 512 if it does not say."""
    family = FAMILIES.get(settings.get("model_type"), FAMILIES["bert"])
    pad = settings.get("pad_token_id")
    first = family.first_position(family.unsaid.get("pad_token_id", 0) if pad is None else pad)
    return settings.get("max_position_embeddings", 512) - first


def read_hf_config(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Translate a `config.json` into fields of the section `model`; the mirror of `hf_config`.

    Entries outside the family's fields become `extra`. A field of the family that is null counts as
    missing, and gets transformers' default.
    path: of the file, for errors. Raises `UserError` for settings that no family here supports.
    """
    kind = settings.get("model_type", "bert")
    check_choice(f"{path}: model_type", kind, tuple(FAMILIES))
    family = FAMILIES[kind]
    given = {name: value for name, value in settings.items() if value is not None}
    check_computable(given, path)
    given = dict(family.unsaid) | given
    found = {name: given[name] for name in family.settings if name in given}
    extra = settings.keys() - {*family.settings, *WRITTEN}
    found |= {"architecture": kind, "extra": {name: settings[name] for name in sorted(extra)}}
    if "max_position_embeddings" in found:
        found["max_position_embeddings"] -= family.first_position(found.get("pad_token_id", 0))
    return found


def check_computable(settings: Mapping[str, Any], path: Path | str) -> None:
    """Raise `UserError` if settings of a config.json ask for something that no family here
    supports.

    path: where they stand, for errors.
    """
    for name in ("is_decoder", "add_cross_attention"):
        check(
            not settings.get(name),
            f"{path}: {name} is true, as in a decoder; models here read both sides of one text, so "
            "give a model without it",
        )
    check(
        settings.get("inner_group_num") in (None, 1),
        f"{path}: inner_group_num is {settings.get('inner_group_num')}, but a group has one layer "
        "here; give a model with 1, as all published ones have",
    )
    positions = settings.get("position_embedding_type")
    check(
        positions in (None, "absolute"),
        f"{path}: position_embedding_type is {positions}, but only absolute is supported here; "
        "transformers 5 dropped the others, and silently loads such a folder without its distance "
        "embeddings",
    )
    check(
        settings.get("tie_word_embeddings") is not False,
        f"{path}: tie_word_embeddings is false, but the decoder is the matrix of word embeddings "
        "here; give a model whose decoder is tied",
    )
    for name, what in (
        ("quantization_config", "quantized"),
        ("auto_map", "computed by its own code"),
    ):
        given = settings.get(name) is not None
        check(not given, f"{path}: {name} says that the model is {what}; give one that is not")
