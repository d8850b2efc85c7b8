"""Batches -> a BERT or one of its relatives -> a Hugging Face checkpoint.

As a library (`Config` and `load_config` are imported when they are first used):

    from pathlib import Path
    from pretrain import Config, export, load_config, train

    config = load_config(Config, "configs/mini.yaml", ["train.max_steps=100"])
    train.train(config)
    checkpoint = Path("runs/mini/checkpoints/step-00000100")
    export.export_checkpoint(checkpoint, config, Path("exported"))
"""

import os
from importlib import import_module

# Read when torch is loaded: how often a waiting OpenMP thread spins before it sleeps. GNU's default
# of 300,000 makes two threads twenty times as slow as one when another process needs a core; 0
# halves the speed of a small model on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Compiled matrix products that oneDNN keeps; its default of 1,024 takes up to a gigabyte.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import_module("data_pipeline")  # ends a command in one line where the dependencies are missing

HOMES = {"Config": "pretrain.config", "load_config": "data_pipeline.config_file"}
__all__ = sorted(HOMES)


def __getattr__(name: str):
    """Import a public name when it is first asked for."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
