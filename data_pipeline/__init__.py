"""Raw text -> vocabulary -> token store -> sentence pairs -> masks -> batches.

As a library, with the names below imported when they are first used:

    from pathlib import Path
    from data_pipeline import BatchSource, DataConfig, TokenStore
    from data_pipeline import load_config, prepare, read_vocabulary

    config = load_config(DataConfig, "configs/mini.yaml")
    prepare(config)
    folder = Path(config.data_dir)
    store = TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    batch = BatchSource(store, config.data, config.seed).batch(0, 32)
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PROGRAM = Path("".join(sys.argv[:1]))  # of a command: a module of this project, or -m before that
IS_COMMAND = PROGRAM.name == "-m" or Path(__file__).parents[1] in PROGRAM.absolute().parents
if IS_COMMAND and not find_spec("omegaconf"):
    print(
        f"error: {sys.executable} does not have omegaconf; run source .venv/bin/activate in the "
        "project's folder, or install the dependencies: pip install -e .",
        file=sys.stderr,
    )
    sys.exit(2)

HOMES = {
    "BatchSource": "data_pipeline.sampling.batch_source",
    "DataConfig": "data_pipeline.config",
    "TokenStore": "data_pipeline.sampling.token_store",
    "load_config": "data_pipeline.config_file",
    "prepare": "data_pipeline.build.prepare",
    "read_vocabulary": "data_pipeline.sampling.vocabulary",
}
__all__ = sorted(HOMES)


def __getattr__(name: str):
    """Import a public name on first use, because training must not load the preparation modules."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
