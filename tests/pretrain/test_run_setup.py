"""What stands before the first step: a model that fits the machine, and its first embeddings."""

import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import fork, newest, run, train_here

from data_pipeline.common.errors import UserError
from data_pipeline.config_file import load_config
from data_pipeline.sampling.token_store import TokenStore
from pretrain.config import Config, ModelConfig, TrainConfig, count_kept
from pretrain.models.build import check_memory, model_of
from pretrain.run_setup import build_model, check_resources, start_model
from pretrain.word_vectors import word_vectors


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what another C library does is its")
def test_memory_that_a_step_frees_is_kept_for_the_next_until_it_is_returned() -> None:
    script = """
import re, sys, torch
from pathlib import Path
from pretrain.models.cpu import keep_freed_memory, return_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

keep_freed_memory()
before = resident()
torch.ones(50 << 20)
print(resident() - before)
return_freed_memory()
print(resident() - before)
"""
    kept, left = map(int, fork(["-c", script]).stdout.split())
    assert 190 < kept < 250  # MB, of 200 that were freed
    assert left < 20


def test_a_new_run_starts_at_the_word_vectors_of_its_corpus(
    prepared: Path, store, tmp_path: Path
) -> None:
    still = ("train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=1e-12")
    for processes in (1, 2):
        done = run(prepared, tmp_path / str(processes), *still, processes=processes)
        assert done.returncode == 0, done.stderr
    found, of_two = (newest(tmp_path / name)["embeddings.word.weight"] for name in "12")
    assert torch.allclose(found, of_two, atol=1e-6)
    torch.manual_seed(1)
    wanted = word_vectors(store, found.shape[1], torch.device("cpu"))
    known = wanted.any(1)
    assert known.sum() > len(wanted) / 2
    alike = F.cosine_similarity(found @ found[known].T, wanted @ wanted[known].T)
    assert alike[known].median() > 0.8  # in whichever basis; of random vectors, about 0


@pytest.mark.parametrize("command", ["pretrain", "pretrain.plan"])
def test_a_model_that_no_machine_holds_is_refused_before_it_is_built(
    prepared: Path, tmp_path: Path, command: str
) -> None:
    sizes = ["model.num_hidden_layers=1000", "model.hidden_size=65536"]
    words = ["-m", command, str(prepared / "config.yaml"), f"run_dir={tmp_path / 'run'}", *sizes]
    done = fork(words, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: a model of 51,5" in done.stderr and "GB; reduce model.num_hidden" in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_memory_of_a_model_is_known_without_building_it() -> None:
    albert = {"architecture": "albert", "num_hidden_groups": 2}
    for sizes in ({"num_hidden_layers": 3}, albert, {"architecture": "electra"}):
        config = ModelConfig(**{"hidden_size": 64, "num_attention_heads": 4} | sizes)
        model = model_of(config, 500, "nsp")
        number = sum(p.numel() for p in model.parameters())
        assert check_memory(config, 500, "nsp", 4, 16 * number) == number
        with pytest.raises(UserError, match=f"a model of {number:,} parameters needs at least"):
            check_memory(config, 500, "nsp", 4, 16 * number - 1)


@pytest.mark.parametrize(
    ("saves", "keep", "keep_every", "wanted"),
    [(10, 3, None, 4), (10, 100, None, 11), (10, 3, 5000, 6)],
)
def test_no_more_checkpoints_are_reckoned_with_than_a_run_saves(
    saves: int, keep: int, keep_every: int | None, wanted: int
) -> None:
    train = TrainConfig(
        max_steps=1000 * saves, save_every=1000, keep_checkpoints=keep, keep_every=keep_every
    )
    assert count_kept(train) == wanted


@pytest.mark.parametrize(("optimizer", "of_one", "of_two"), [("adamw", 7, 11), ("muon", 5, 8)])
def test_memory_has_to_hold_the_copy_that_a_checkpoint_is_written_from(
    optimizer: str, of_one: int, of_two: int, prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    options = [f"run_dir={tmp_path}", f"train.optimizer={optimizer}"]
    config = load_config(Config, str(prepared / "config.yaml"), options)
    number = check_memory(config.model, 500, config.data.objective, 0, 0)
    # weights, gradients and two moments (of Muon one) in each process, and a copy of all of them
    # but the gradients in one
    for processes, copies in ((1, of_one), (2, of_two)):
        memory = 4 * copies * number
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr("pretrain.run_setup.machine_memory", lambda memory=memory: memory)
        check_resources(config, 500)
        monkeypatch.setattr("pretrain.run_setup.machine_memory", lambda memory=memory: memory - 9)
        with pytest.raises(UserError, match=f"a model of {number:,} parameters needs at least"):
            check_resources(config, 500)


def test_what_is_on_the_disk_of_earlier_checkpoints_is_not_needed_again(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={tmp_path}"])
    asked = []
    monkeypatch.setattr("pretrain.run_setup.check_space", lambda *given: asked.append(given[1]))
    check_resources(config, 500)
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000004/model.safetensors").write_bytes(bytes(1000))
    check_resources(config, 500)
    number = check_memory(config.model, 500, config.data.objective, 0, 0)
    wanted = 4 * 3 * number * count_kept(config.train)  # weights and two moments
    assert asked == [wanted, wanted - 1000]


@pytest.mark.parametrize(
    ("size", "wanted"), [(0, None), (1, 1), (600, 600), (1023, 1023), (1024, None), (5000, None)]
)
def test_a_sample_smaller_than_the_vocabulary_is_drawn_and_no_other(
    size: int, wanted: int | None, prepared: Path
) -> None:
    options = [f"train.sampled_softmax={size}"]
    config = load_config(Config, str(prepared / "config.yaml"), options)
    chances = build_model(config, torch.arange(1024)).sample_chances
    assert (chances is None) == (wanted is None)
    assert chances is None or chances.sum().item() == pytest.approx(wanted)


def test_a_store_of_other_settings_is_told(prepared: Path, tmp_path: Path, capsys) -> None:
    train_here(prepared, tmp_path, "vocab.size=2000", "train.max_steps=1", "train.warmup_steps=0")
    said = capsys.readouterr().out
    assert "built with other settings than the config's (vocab.size was 1024, is 2000)" in said
    short = ("train.max_steps=1", "train.warmup_steps=0")
    train_here(prepared, tmp_path / "other", *short, "corpus.language=de", "corpus.weight=2")
    said = capsys.readouterr().out
    assert "(corpus.language was 'en', is 'de'; corpus.weight was 1.0, is 2.0)" in said
    sources = "corpus={files: null, sources: [{files: a.txt}, {files: b.txt}]}"
    train_here(prepared, tmp_path / "two", *short, sources)
    assert "(corpus had 1 sources, has 2)" in capsys.readouterr().out
    train_here(
        prepared, tmp_path / "own", "vocab.size=null", "train.max_steps=1", "train.warmup_steps=0"
    )
    assert "other settings" not in capsys.readouterr().out
    train_here(prepared, tmp_path / "same", "train.max_steps=1", "train.warmup_steps=0")
    assert "other settings" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["store/manifest.json", "manifest.json", "export.json"])
def test_a_folder_of_another_kind_is_no_run_dir(prepared: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="holds (prepared data|a token store|an export); choose"):
        train_here(prepared, tmp_path)


def test_the_disk_that_counts_is_the_one_that_checkpoints_is_a_link_to(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    large, run_dir = tmp_path / "large", tmp_path / "run"
    large.mkdir()
    run_dir.mkdir()
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={run_dir}"])

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1 << 40 if path.resolve() == large else 0)

    monkeypatch.setattr("data_pipeline.common.folders.shutil.disk_usage", usage)
    with pytest.raises(UserError, match="the disk has 0 MB free"):
        check_resources(config, 500)
    (run_dir / "checkpoints").symlink_to(large)
    check_resources(config, 500)


def test_a_new_model_predicts_tokens_by_their_frequency(prepared: Path, store: TokenStore) -> None:
    model, *_ = start_model(load_config(Config, str(prepared / "config.yaml")), store)
    counts = store.token_counts() + 0.1
    wanted = torch.from_numpy(np.log(counts / counts.sum())).float()
    torch.testing.assert_close(model.mlm.bias.detach(), wanted)
