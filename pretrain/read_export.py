"""Read an exported folder, which somebody else may have changed."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.reading import check_regular, read_json
from data_pipeline.common.system import machine_memory
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.checkpoint import name_not_finite
from pretrain.config import ModelConfig
from pretrain.export_folder import FILES
from pretrain.families import hf_config, read_hf_config, read_settings
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import check_memory, model_of
from pretrain.models.electra import GENERATOR, Electra
from pretrain.objectives import MaskedLM, ReplacedTokens

# what transformers does not check
TOKENIZER_CONFIG = {"model_max_length?": (int, float, None), "model_input_names?": ([str], None)}


def load_export(folder: Path) -> PretrainingModel:
    """Load this project's model, in float32, from an exported folder.

    Raises `UserError` if there is no export, or if its files are damaged or do not fit together.
    """
    missing = [name for name in FILES[:-1] if not (folder / name).exists()]
    check(
        not missing,
        f"no exported model in {folder}, {' and '.join(missing[:2])} missing; python -m pretrain "
        f"makes one, and python -m pretrain.export exports any checkpoint{name_export(folder)}",
    )
    settings = read_settings(folder)
    model = ModelConfig(**read_hf_config(settings, folder / "config.json"))
    absent = [name for name in hf_config(asdict(model), 0, "") if name not in settings]
    check(
        not absent,
        f"{folder / 'config.json'} has no {' and no '.join(absent[:2])}, which every export of "
        "this project has; give a folder that python -m pretrain.export wrote",
    )
    for part in filter(Path.exists, (folder, folder / GENERATOR)):
        check_weights(part)
        check_settings(part)
    pieces = len(read_vocabulary(folder))
    check(
        pieces == settings["vocab_size"],
        f"{folder / 'vocab.txt'} has {pieces:,} pieces, but config.json says "
        f"{settings['vocab_size']:,}; export the model again",
    )
    try:
        return read_model(folder)
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder / 'model.safetensors'} does not fit the model in config.json: {reason}"
        ) from None


def check_model(folder: Path) -> None:
    """Raise `UserError` unless a folder holds a model of transformers."""
    check(
        (folder / "config.json").exists(),
        f"no exported model in {folder}; python -m pretrain.export makes one{name_export(folder)}",
    )


def name_export(folder: Path) -> str:
    """Say in a message where the export is, if the folder is not one itself, such as a run
    folder."""
    inner = folder / "export"
    if not folder.exists():
        return "; download a model from a hub into a folder first"
    return f"; {inner} is one" if (inner / "config.json").exists() else ""


def check_settings(folder: Path) -> None:
    """Raise `UserError` if the `config.json` of a folder is wrong, describes a larger model than
    its weights, or one that does not fit in this machine's memory."""
    settings, path = read_settings(folder), folder / "config.json"
    weights = folder / "model.safetensors"
    model = ModelConfig(**read_hf_config(settings, path))
    try:
        model.validate()
        pieces = settings.get("vocab_size") or 1
        number = check_memory(model, pieces, "none", 1, machine_memory())
        check(
            not weights.exists() or number <= weights.stat().st_size,
            f"it describes a model of {number:,} parameters, but {weights} has fewer bytes; "
            "export it again",
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load_pretrained(loader: type, folder: Path, **options) -> Any:
    """Load a tokenizer or a model from a folder by a class of transformers; runs no code of it.

    Raises `UserError` for whatever that class raises, since somebody else may have made the folder.
    """
    check_weights(folder)
    check_settings(folder)
    if (rules := folder / "tokenizer_config.json").exists():
        read_json(rules, TOKENIZER_CONFIG, "export or copy it again")
    try:
        return loader.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:
        raise unusable(folder, error) from None


def check_ids(tokenizer: Any, sequences: Iterable[list[int]], folder: Path) -> None:
    """Check that the model has an embedding for each id of its tokenizer, and the tokenizer a
    vocabulary and the special tokens of an encoder.

    Raises `UserError` that shows the token, which its files name beside those of the vocabulary.
    """
    check(  # transformers makes an empty one where a folder has none: all words are unknown to it
        len(tokenizer) > len(tokenizer.all_special_tokens),
        f"{folder} has no tokenizer; copy the tokenizer.json of the model into it",
    )
    for name in ("cls_token", "sep_token", "pad_token"):
        check(
            getattr(tokenizer, name) is not None,
            f"{folder}: its tokenizer has no {name}, which encoders need; name it in "
            "tokenizer_config.json",
        )
    highest = max(chain.from_iterable(sequences), default=0)
    rows = read_settings(folder).get("vocab_size")
    if rows is not None and highest >= rows:
        raise UserError(
            f"{folder}: its tokenizer gives {tokenizer.convert_ids_to_tokens(highest)!r} the id "
            f"{highest:,}, but the model has {rows:,} embeddings; export or copy it again"
        )


def load_encoder(loader: type, folder: Path, uses_pooler: bool, **options) -> Any:
    """Load an encoder with a class of transformers, which initializes missing weights at random.

    Raises `UserError` if the folder lacks weights that are used.
    """
    model, report = load_pretrained(loader, folder, output_loading_info=True, **options)
    missing = sorted(n for n in report["missing_keys"] if uses_pooler or "pooler" not in n)
    advice = "use --pool cls" if missing and "pooler" in missing[0] else "export the model again"
    check(not missing, f"{folder} has no weights for {', '.join(missing[:3])}; {advice}")
    check_finite(model.state_dict(), folder)
    return model


def unusable(folder: Path, error: Exception) -> UserError:
    """Build the error for a folder that transformers cannot use; it has no class for them."""
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{folder} cannot be used ({type(error).__name__}: {reason}); export or copy it again"
    )


def read_model(folder: Path) -> PretrainingModel:
    """Read the model of a sound export, in float32."""
    settings = read_settings(folder)
    config = ModelConfig(**read_hf_config(settings, folder / "config.json"))
    family, classes, pieces = config.family, settings["architectures"], settings["vocab_size"]
    if family.discriminator is None:
        model = model_of(config, pieces, "nsp" if family.pairs in classes else "none")
    elif (folder / GENERATOR / "config.json").exists():
        width = read_settings(folder / GENERATOR)["hidden_size"]
        model = Electra(replace(config, generator_size=width / config.hidden_size), pieces)
    else:
        head = ReplacedTokens() if family.discriminator in classes else MaskedLM()
        model = PretrainingModel(config, pieces, (head,))
    for name, part in model.parts().items():
        weights = load_file(folder / name / "model.safetensors")
        check_finite(weights, folder / name)
        part.load_state_dict(family.from_hf(weights, part.state_dict()))
    return model.eval()


def check_finite(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `UserError` if a weight is NaN or infinite: every figure would be silently wrong."""
    sick = name_not_finite(weights)
    check(not sick, f"{folder}: {sick} is not finite; export or copy it again")


def check_weights(folder: Path) -> None:
    """Raise `UserError` if the file of weights in an exported folder is cut short or damaged."""
    path = folder / "model.safetensors"
    if path.exists():
        check_regular(path)
        try:
            safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}; export or copy it again") from None
