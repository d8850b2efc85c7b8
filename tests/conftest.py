"""A small corpus, prepared once: prose that is the same on every machine."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import train_here
from hypothesis import settings
from prose import write_prose

from data_pipeline.build.prepare import prepare
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)  # no test asserts a time
settings.load_profile("any machine")
# a shell ignores it in the background, and every command that a test starts would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

CONFIG = """
run_dir: {root}/run
data_dir: {root}/data
corpus: {{files: "{root}/topics.txt", held_out_fraction: 0.2, deduplicate: false}}
vocab: {{size: 1024}}
data: {{max_seq_length: 64}}
model: {{num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2,
        hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}}
train: {{max_steps: 12, global_batch_size: 16, micro_batch_size: 16, learning_rate: 1.0e-3,
        warmup_steps: 2, log_every: 2, eval_every: 6, save_every: 4, eval_examples: 64,
        precision: fp32}}
"""


def pytest_configure(config: pytest.Config) -> None:
    """Hide all cards but from `-m gpu`: the tests start several ranks, and compare with a CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Hide from the garbage collector what imports have made.

    A run of 12 steps collects twice, and 400,000 objects took it a third of its time.
    """
    gc.freeze()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `topics.txt`, `config.yaml` and the prepared `data/`; not to be written to."""
    root = tmp_path_factory.mktemp("prepared")
    (root / "topics.txt").write_text("\n\n".join(write_prose()) + "\n", encoding="utf-8")
    (root / "config.yaml").write_text(CONFIG.format(root=root))
    prepare(load_config(DataConfig, str(root / "config.yaml")), workers=1)
    return root


@pytest.fixture(scope="session")
def files(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four files with some documents of the topics each; not to be written to."""
    folder = tmp_path_factory.mktemp("files")
    documents = (prepared / "topics.txt").read_text(encoding="utf-8").split("\n\n")[:60]
    for i in range(4):
        (folder / f"{i}.txt").write_text("\n\n".join(documents[i::4]), encoding="utf-8")
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="session")
def vocabulary(prepared: Path) -> Vocabulary:
    return read_vocabulary(prepared / "data/vocab")


@pytest.fixture(scope="session")
def store(prepared: Path, vocabulary: Vocabulary) -> TokenStore:
    """The training split of the prepared corpus."""
    return TokenStore.open(prepared / "data/store", "train", vocabulary)


@pytest.fixture(scope="session")
def straight(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted run of 12 steps; not to be written to."""
    run_dir = tmp_path_factory.mktemp("straight")
    train_here(prepared, run_dir)
    return run_dir
