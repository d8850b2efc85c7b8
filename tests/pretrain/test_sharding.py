"""FSDP2 is DDP with less memory: the same losses, checkpoints that do not tell, and clipping."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import NO_DROPOUT, ROOT, command, fork, metrics, newest, run, train_here

from data_pipeline.common.errors import UserError
from pretrain.sharding import asks_for_shards, clip_gradients

SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def assert_near(a: Path, b: Path) -> None:
    """Losses of a whole run within 1e-5, weights within 1e-4: sums in another order."""
    for one, two in zip(metrics(a), metrics(b), strict=True):
        assert one.keys() == two.keys()
        assert all(abs(one[name] - two[name]) < 1e-5 * max(1, abs(one[name])) for name in one)
    first, second = newest(a), newest(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def in_shards(prepared: Path, run_dir: Path, processes: int, *options: str) -> None:
    done = run(prepared, run_dir, *options, processes=processes, **SHARDS)
    assert done.returncode == 0, done.stderr


def half_of(run_dir: Path, copy: Path) -> Path:
    """A copy of a run of 12 steps that stopped after 6."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints/step-00000012")
    return copy


def test_a_run_in_shards_is_that_of_one_process_which_can_go_on_with_it(
    prepared: Path, tmp_path: Path
) -> None:
    options = ("train.micro_batch_size=4", "train.optimizer=lamb", "train.save_every=6")
    train_here(prepared, tmp_path / "one", *options)
    in_shards(prepared, tmp_path / "four", 4, *options)
    assert_near(tmp_path / "one", tmp_path / "four")
    assert (tmp_path / "four/export/model.safetensors").exists()
    train_here(prepared, half_of(tmp_path / "four", tmp_path / "then one"), *options)
    assert_near(tmp_path / "one", tmp_path / "then one")


COMPILED_RUN = """
import runpy
from pretrain.models.bert import PretrainingModel
PretrainingModel.compile_layers.__defaults__ = ("aot_eager",)
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("env", [SHARDS, {}], ids=["FSDP2", "DDP"])
def test_a_compiled_run_of_two_processes_is_the_plain_one(
    prepared: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """As on GPUs, where layers are compiled, and whatever the numbers of tokens."""
    options = ("train.micro_batch_size=4", "train.log_every=1", *NO_DROPOUT)
    assert run(prepared, tmp_path / "plain", *options, processes=2, **env).returncode == 0
    words = command(prepared, tmp_path / "compiled", *options, "train.compile=true")[2:]
    done = fork(*[["-c", COMPILED_RUN, *words]] * 2, **env)
    assert done.returncode == 0, done.stderr
    lines = [line for line in metrics(tmp_path / "compiled") if "train/mlm_loss" in line]
    for one, two in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "compiled"), strict=True):
        assert one.keys() == two.keys()
        assert all(one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-3) for name in one)
    text = (tmp_path / "compiled/metrics.jsonl").read_text().splitlines()
    graphs = [json.loads(line).get("perf/compiled_graphs") for line in text]
    graphs = [number for number in graphs if number is not None]
    assert len(graphs) == len(lines) == 12 and graphs[0] > 0
    assert graphs[-1] == graphs[6]  # the first evaluation, after step 6, has graphs of its own


def test_a_run_of_one_process_goes_on_in_shards(prepared: Path, tmp_path: Path) -> None:
    # eleven batches to evaluate, which two processes do not divide
    options = ("train.micro_batch_size=4", "train.save_every=6", "train.eval_examples=44")
    # whose second phase starts the positions that the first has not trained, after an evaluation
    options += ("train.eval_every=8",)
    options += ("train.phases=[{steps: 8}, {steps: 4, max_seq_length: 128, global_batch_size: 8}]",)
    train_here(prepared, tmp_path / "one", *options)
    in_shards(prepared, half_of(tmp_path / "one", tmp_path / "then two"), 2, *options)
    assert_near(tmp_path / "one", tmp_path / "then two")


COMPILED = """
import sys
import torch
from pretrain.config import ModelConfig
from pretrain.models import bert, layers
from pretrain.models.attention import attend_padded
from pretrain.models.bert import PretrainingModel
from data_pipeline.sampling.batches import Batch

def keep(graph, inputs):
    graphs.append(graph)
    return graph

graphs, bert.TOKEN_MULTIPLE, layers.attend = [], 1, attend_padded  # as on a GPU
torch.distributed.init_process_group("gloo")
config = ModelConfig(num_hidden_layers=2, max_position_embeddings=8, hidden_dropout_prob=0.0)
model = PretrainingModel(config, 64)
model.compile_layers(backend=keep)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
for n in (5, 7):
    i = torch.arange(n)
    batch = Batch(i, 0 * i, i, 0 * i, torch.tensor([0, n]), i[:2], i[:2], i[:1], max_length=n)
    wrapped(batch)[:, 0].sum().backward()
print(f"{len(graphs)} graphs", file=sys.stderr)
"""


def test_ddp_does_not_cut_a_compiled_layer_of_base_size() -> None:
    """Its optimizer would, at every 25 MB of weights; the loss would be the same, the speed not."""
    done = fork(["-c", COMPILED], ["-c", COMPILED])
    assert done.returncode == 0, done.stderr
    # on each rank one of the first layer and one of the last
    assert done.stderr.count("2 graphs") == 2, done.stderr


COUNTED = """
import json
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from pretrain.config import ModelConfig, TrainConfig
from pretrain.models.bert import PretrainingModel
from pretrain.optim import build_optimizers
from pretrain.sharding import unshard

torch.distributed.init_process_group("gloo")
mesh, counts, size = init_device_mesh("cpu", (2,)), {}, {"hidden_size": 24}
config = ModelConfig(num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=8, **size)
for name in ("adamw", "lamb", "muon"):
    weights = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = PretrainingModel(config, 40)
        for part in [*model.layers, model] if is_sharded else ():
            fully_shard(part, mesh=mesh)
        optimizers = build_optimizers(model, TrainConfig(optimizer=name, learning_rate=1e-2))
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
            if is_sharded:
                p.grad = distribute_tensor(p.grad, mesh, p.placements, src_data_rank=None)
        with CommDebugMode() as mode:
            for optimizer in optimizers:
                optimizer.step()
        counts.setdefault(name, []).append(mode.get_total_counts())
        weights.append([unshard(p.detach()).clone() for p in model.parameters()])
    close = {"rtol": 1e-5, "atol": 1e-7} if name == "lamb" else {"rtol": 0, "atol": 0}
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, **close)
if torch.distributed.get_rank() == 0:
    print(json.dumps(counts))
"""


def test_optimizers_move_little_between_processes_and_shards_change_nothing() -> None:
    """Of three layers with 18 matrices of three shapes: under DDP nothing but one gather a shape of
    Muon's, in shards two; LAMB adds up the norms of both groups."""
    done = fork(["-c", COUNTED], ["-c", COUNTED])
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts == {"adamw": [0, 0], "lamb": [0, 4], "muon": [3, 6]}


def test_the_launch_file_asks_for_version_2(monkeypatch) -> None:
    settings = yaml.safe_load((ROOT / "configs/accelerate/fsdp_8.yaml").read_text())
    assert settings["distributed_type"] == "FSDP" and settings["fsdp_config"]["fsdp_version"] == 2
    assert not asks_for_shards()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="not for version 2"):
        asks_for_shards()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asks_for_shards()


@pytest.mark.parametrize("max_norm", [0.5, 1e3, float("inf")])
def test_clipping_is_torchs(max_norm: float) -> None:
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(5, n)) for n in (3, 1, 7)] for _ in "ab")
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    unused = torch.nn.Parameter(torch.zeros(2))
    norm = clip_gradients([*ours, unused], max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_test_sees_no_card_unless_only_those_that_need_one_run(pytestconfig) -> None:
    assert torch.cuda.device_count() == 0 or pytestconfig.option.markexpr == "gpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" or pytestconfig.option.markexpr == "gpu"
