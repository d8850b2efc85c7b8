"""A run takes the memory of its largest micro-batch at its start, which changes nothing else, and
says what to do where there is not enough."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_run, train_here

from data_pipeline.common.errors import UserError
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from pretrain import memory, train
from pretrain.config import Config, phases_of
from pretrain.memory import explain_out_of_memory, largest_batch, preallocate_memory
from pretrain.models.bert import PretrainingModel

PHASES = "train.phases=[{steps: 8, single_segment_prob: 1}, {steps: 4, max_seq_length: 80}]"


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    "given",
    [
        "data.masked_lm_prob=0.3",
        "data.max_predictions_per_seq=3",
        "data.objective=none",
        "data.short_seq_prob=0.5",
    ],
)
def test_no_micro_batch_is_larger_than_the_largest(
    prepared: Path, store: TokenStore, given: str, processes: int
) -> None:
    sizes = ("data.max_seq_length=32", "train.global_batch_size=64", "train.micro_batch_size=30")
    phase = phases_of(load_config(Config, str(prepared / "config.yaml"), [*sizes, given]))[0]
    largest = largest_batch(store, phase, processes)
    source = BatchSource(store, phase.data, phase.seed)
    for step in range(60):
        for rank in range(processes):
            for batch in source.step(step, 64, 30, rank, processes):
                assert len(batch.input_ids) <= len(largest.input_ids)
                assert len(batch.masked_labels) <= len(largest.masked_labels)
                assert len(batch.cu_seqlens) <= len(largest.cu_seqlens)
                assert batch.max_length <= largest.max_length
                assert largest.pairs == 0 or batch.pairs
    assert largest.input_ids.dtype == torch.int64
    assert largest.padded()["input_ids"].shape == (len(largest.cu_seqlens) - 1, 32)


def test_a_run_has_the_bits_that_it_would_have_without(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    train_here(prepared, tmp_path / "with", PHASES)
    monkeypatch.setattr(train, "preallocate_memory", lambda *_: None)
    train_here(prepared, tmp_path / "without", PHASES)
    assert_same_run(tmp_path / "with", tmp_path / "without")


def test_each_phase_that_goes_on_is_passed_once_in_each_start(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    seen: list[Batch] = []

    def note(*args) -> Batch:
        seen.append(largest_batch(*args))
        return seen[-1]

    monkeypatch.setattr(memory, "largest_batch", note)
    train_here(prepared, tmp_path, PHASES, "train.save_every=4")
    assert [batch.max_length for batch in seen] == [64, 80]
    assert [batch.pairs > 0 for batch in seen] == [False, True]
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    train_here(prepared, tmp_path, PHASES, "train.save_every=4")
    assert [batch.max_length for batch in seen] == [64, 80, 80]


@pytest.mark.parametrize("micro_batch_size, found", [(16, [False]), (8, [False, True])])
def test_a_step_of_several_passes_is_met_with_the_gradients_that_it_keeps(
    prepared: Path, store: TokenStore, micro_batch_size: int, found: list[bool]
) -> None:
    sizes = ("train.global_batch_size=16", f"train.micro_batch_size={micro_batch_size}")
    config = load_config(Config, str(prepared / "config.yaml"), sizes)
    bare, had_gradients = torch.nn.Linear(1, 1, bias=False), []

    def model(batch: Batch) -> torch.Tensor:
        had_gradients.append(bare.weight.grad is not None)
        assert len(batch.next_sentence_label) == micro_batch_size
        return bare(torch.ones(1, 1))

    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    names = {"store": store, "accelerator": accelerator, "config": config, "model": model}
    run = SimpleNamespace(phases=phases_of(config), bare=bare, **names)
    preallocate_memory(run, torch.ones(1), 0, SimpleNamespace(paused=nullcontext))
    assert had_gradients == found and bare.weight.grad is None


def test_too_little_memory_ends_in_a_line_that_says_what_to_do(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    monkeypatch.setattr(PretrainingModel, "forward", fail)
    with pytest.raises(UserError, match="out of memory at a tensor of 2.50 GiB; lower train.micro"):
        train_here(prepared, tmp_path)
    with pytest.raises(UserError, match="a tensor of 4611686018427387904 bytes"):
        with explain_out_of_memory():
            torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match="must match"):
        with explain_out_of_memory():
            torch.ones(2) + torch.ones(3)
