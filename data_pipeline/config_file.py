"""Read the YAML file of a config, with `key=value` overrides, and check it."""

import difflib
import os
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.reading import read_utf8
from data_pipeline.config import DataConfig, DatasetConfig

RENAMED = {  # key of 0.1.0 -> key of today
    "source": "builtin",
    "words": "word_segmenter",
    "sentences": "sentence_splitter",
    "held_out": "held_out_fraction",
}
MOST_ITEMS = 20_000  # of a YAML file: the parser of 40,000 lists in each other overflows its stack
OF_TRAINING = ("model", "train", "tracking", "export")  # sections that preparation does not read
WRONG_VALUE = (OmegaConfBaseException, TypeError)  # TypeError: a list for a mapping
T = TypeVar("T")


def load_config(schema: type[T], path: str, overrides: list[str] = ()) -> T:
    """Read the config at `path` with `key=value` overrides, as a validated instance of `schema`.

    Skips the training sections if `schema` has none.
    Raises `UserError` that names the file, the key and the nearest valid key.
    """
    layers = read_layers(path, overrides)
    merged = OmegaConf.structured(schema)
    skipped = set(OF_TRAINING).difference(merged)
    try:
        for layer, origin in layers:
            empty = find_empty(schema, layer) if origin == path else set()
            for section in skipped & set(layer) | empty:
                del layer[section]
            check_given(OmegaConf.to_container(layer), origin)
            check_keys(schema, layer, origin)
            merged = OmegaConf.merge(merged, layer)  # names the first layer with a wrong type
    except WRONG_VALUE as error:
        raise UserError(f"{origin}, {name_key(error)}") from None
    try:
        given = OmegaConf.merge(*(layer for layer, _ in layers))
        merged = OmegaConf.merge(OmegaConf.structured(schema), schema.defaults(given), given)
        config = OmegaConf.to_object(merged)
    except WRONG_VALUE as error:
        raise UserError(f"{name_origins(path, overrides, error)}, {name_key(error)}") from None
    check_texts(asdict(config), path)
    try:
        check_lists(config)
        config.validate()
    except UserError as error:
        raise UserError(f"{name_origins(path, overrides, error)}: {error}") from None
    config.corpus.place_plug_ins(os.path.dirname(path))
    place_folders(config, path)
    return config


def name_key(error: Exception) -> str:
    """Say in one line which value of a config is wrong, and why."""
    key, said = getattr(error, "full_key", None), str(error).splitlines()[0]
    return f"key {key}: {said}" if key else said


def name_origins(path: str, overrides: list[str], error: Exception) -> str:
    """Name the file of a config, and the overrides whose keys an error is about."""
    return " ".join([path, *(item for item in overrides if item.partition("=")[0] in str(error))])


def read_layers(path: str, overrides: list[str]) -> list[tuple[DictConfig, str]]:
    """Read a config file and its overrides, in the order to merge them; each with its origin."""
    try:
        given = read_yaml(Path(path))
    except FileNotFoundError:
        recipe = Path("configs", f"{Path(path).stem}.yaml")
        hint = (
            f"did you mean {recipe}?"
            if recipe.exists()
            else "python -m pretrain configs lists the recipes"
        )
        raise UserError(f"no config at {path} (in {Path.cwd()}); {hint}") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder; give a YAML file, such as the config.yaml of a run"
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable YAML file: {error}") from None
    layers = [(given, path)]
    for item in overrides:
        name, equals, _ = item.partition("=")
        if not equals or name.startswith("-"):
            raise UserError(f"{item!r} is not key=value, such as train.max_steps=1000")
        try:
            layers.append((OmegaConf.from_dotlist([item]), "command line"))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise UserError(f"{item!r} is not key=value: {error}") from None
    return layers


def find_empty(schema: type, given: DictConfig) -> set[str]:
    """Find the sections that are empty in a file, for example because all their lines are
    comments."""
    sections = {item.name for item in fields(schema) if names_in(item.type)}
    return {name for name in sections & set(given) if given[name] is None}


def names_in(kind: type) -> list[str]:
    """List the fields of a section; none of any other type."""
    return [item.name for item in fields(kind)] if is_dataclass(kind) else []


def place_folders(config: DataConfig, path: str) -> None:
    """Expand `~` in the folders of a config; raises `UserError` unless it names two."""
    for name in ("data_dir", "run_dir"):
        folder = os.path.expanduser(getattr(config, name))
        check(folder.strip() != "", f"{path}: {name} is empty; name a folder")
        setattr(config, name, folder)
    check(
        os.path.realpath(config.data_dir) != os.path.realpath(config.run_dir),
        f"{path}: data_dir and run_dir are the same folder, {config.data_dir}; give each its own",
    )


def read_yaml(path: Path) -> DictConfig:
    """Read a YAML file; raises `UserError`, OSError, or one of the errors of YAML and OmegaConf."""
    text = read_utf8(path, "give a YAML file")
    items = sum(text.count(mark) for mark in ("[", "{", "- ", "? "))
    check(
        items <= MOST_ITEMS,
        f"{path} has {items:,} items, but may have at most {MOST_ITEMS:,}; list many files with a "
        "glob, such as corpus.files='texts/*.txt'",
    )
    given = None
    with suppress(AssertionError):  # of a number, for example
        given = OmegaConf.create(text)
    if not isinstance(given, DictConfig):
        raise UserError(f"{path} is not a mapping of sections; see configs/quickstart.yaml")
    return given


def check_given(value: Any, name: str) -> None:
    """Raise `UserError` for the mark of OmegaConf for a value to come, which it would ignore."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_given(item, f"{name}, {key}")
    check(value != "???", f"{name}: ??? is no value; give one, or leave the key out")


def check_texts(value: Any, name: str) -> None:
    """Raise `UserError` for a text with a character that no path and no file can have."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in inner:
            check_texts(item, f"{name}, {key}")
    elif isinstance(value, str):
        wrong = "\0" in value or any("\ud800" <= c <= "\udfff" for c in value)
        check(not wrong, f"{name}: {value[:60]!r} has a NUL or an unpaired surrogate; remove it")


def check_lists(section: Any, prefix: str = "") -> None:
    """Raise `UserError` if a list of texts in a config holds something else."""
    for item in fields(section):
        value, name = getattr(section, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            check_lists(value, f"{name}.")
        elif item.type == list[str]:
            wrong = [one for one in value if not isinstance(one, str)]
            check(not wrong, f"{name}: {wrong[:1]} is not a text; give a list of texts")


def check_keys(schema: type, given: DictConfig, origin: str, prefix: str = "") -> None:
    """Raise `UserError` at the first key of `given` that `schema` lacks, with the nearest it
    has."""
    known = {item.name: item.type for item in fields(schema)}
    for name in given:
        if name not in known:
            hint = suggest_key(str(name), known, prefix)
            raise UserError(f"{origin}: unknown key {prefix}{str(name):.60}; {hint}")
        section = DatasetConfig if name == "dataset" else known[name]
        is_list = get_origin(section) is list
        if not (is_list or is_dataclass(section)) or (value := given[name]) is None:
            continue
        if is_list:
            (item,) = get_args(section)
            message = f"{origin}: {prefix}{name} is not a list of {name}; write it as [A, B]"
            if isinstance(value, DictConfig) and all(str(key).isdigit() for key in value):
                message += ", the whole list: single items cannot be overridden"
            check(isinstance(value, ListConfig), message)
            for i, one in enumerate(value):
                if isinstance(one, DictConfig):
                    check(is_dataclass(item), message)
                    check_keys(item, one, origin, f"{prefix}{name}[{i}].")
        else:
            if not isinstance(value, DictConfig):
                raise UserError(f"{origin}: {prefix}{name} is not a section of key: value lines")
            check_keys(section, value, origin, f"{prefix}{name}.")


def suggest_key(name: str, known: dict[str, type], prefix: str) -> str:
    """Suggest the key that an unknown one was meant for, or list all.

    known: the fields of the section, with their types. prefix: its name; "" at the top.
    """
    names = dict.fromkeys([*known, *(() if prefix else OF_TRAINING)])
    inner = {} if prefix else known
    near = [f"{key}.{name}" for key, kind in inner.items() if name in names_in(kind)]
    near += [RENAMED[name]] if RENAMED.get(name) in known else []
    near += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"keys: {', '.join(names)}"
