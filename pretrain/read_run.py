"""Read what a run of any version left in its folder: config, state, vocabulary, store."""

from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import hash_file
from data_pipeline.common.reading import SHA256, read_json
from data_pipeline.config_file import read_yaml
from data_pipeline.sampling.manifest import read_manifest
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES
from pretrain.checkpoint import read_state
from pretrain.config import Config


def read_run_config(run_dir: Path) -> Config:
    """Read the config of a run of any version.

    Ignores unknown keys and uses defaults for missing ones. Raises `UserError` if there is none.
    """
    path = run_dir / "config.yaml"
    check(
        path.exists(),
        f"there is no {path}; export a checkpoint from its run folder, which holds that file",
    )
    try:
        given = OmegaConf.to_container(read_yaml(path))
        check(given, f"{path} is empty")
        merged = OmegaConf.merge(OmegaConf.structured(Config), keep_known(given, Config))
        config = OmegaConf.to_object(merged)
        for section in (config.model, config.data, config.train, config.export):
            section.validate()
        if config.train.phases:
            config.validate_phases()
        return config
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is not the config of a run: {reason}") from None


def keep_known(given, schema: type):
    """Drop the keys of `given` that `schema` lacks, in its sections and lists of sections too."""
    if isinstance(given, list):
        return [keep_known(item, schema) for item in given]
    if not isinstance(given, dict):
        return given
    kept = {}
    for name, hint in get_type_hints(schema).items():
        if name in given:
            section = next(filter(is_dataclass, (hint, *get_args(hint))), None)
            kept[name] = keep_known(given[name], section) if section else given[name]
    return kept


def read_run_state(checkpoint: Path) -> dict:
    """Read the state of a checkpoint; schema 1 stored its fingerprint under `contract`."""
    state = read_state(checkpoint)
    return {"fingerprint": state.get("contract")} | state


def find_vocabulary(run_dir: Path, config: Config, sha256: str) -> Path:
    """Find the vocabulary of a run, in its folder or in data_dir; raises `UserError` if missing."""
    known, faults = read_vocab_hashes(run_dir), []
    for folder in (run_dir / "vocab", Path(config.data_dir) / "vocab"):
        missing = [name for name in TOKENIZER_FILES if not (folder / name).exists()]
        if missing:
            faults.append(f"{folder} has no {', '.join(missing)}")
        elif (found := hash_file(folder / "vocab.txt")) != sha256:
            faults.append(f"{folder} holds a different vocabulary, {found[:12]}")
        elif damaged := [name for name in known if hash_file(folder / name) != known[name]]:
            faults.append(f"{folder / damaged[0]} is damaged")
        else:
            return folder
    raise UserError(
        f"the vocabulary of the run, sha256 {sha256[:12]}, is missing: {'; '.join(faults)}. Copy "
        f"the folder vocab of the run's data_dir to {run_dir / 'vocab'}"
    )


def read_vocab_hashes(run_dir: Path) -> dict[str, str]:
    """Read the hashes of the files in a run's `vocab`; none of a run of an earlier version."""
    try:
        shape = {"vocab_files?": {str: SHA256}}
        return read_json(run_dir / "fingerprint.json", shape, "").get("vocab_files", {})
    except (OSError, UserError):
        return {}


def find_manifest(config: Config, sha256: str) -> dict | None:
    """Read the manifest of a run's token store; None if it was moved or rebuilt."""
    try:
        manifest = read_manifest(Path(config.data_dir) / "store")
    except (UserError, OSError):
        return None
    return manifest if manifest["data_sha256"] == sha256 else None
