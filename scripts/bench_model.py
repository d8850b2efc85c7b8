"""`benchmark.py model`: compare a training step with transformers' `BertForPreTraining`.

Both have the same weights, examples and dropout. The peer runs under Accelerate, first as commonly
set up (AdamW, padding to the full length), then tuned: bf16, batches of similar length, fused
AdamW, faster matrix products.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from bench_figures import ROOT, quiet, show
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.build.prepare import prepare
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.sampling.batches import Batch, BatchSource
from data_pipeline.sampling.token_store import TokenStore, Vocabulary, read_vocabulary
from pretrain.config import ModelConfig, TrainConfig
from pretrain.families import hf_config
from pretrain.metrics import peak_flops
from pretrain.models.bert import PretrainingModel
from pretrain.optim import build_optimizers

SIZES = {  # layers, hidden size
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
BATCH_SIZE = {"cpu": 32, "cuda": 256}
TARGETS = {  # size -> (against the common setup, against the tuned one)
    "tiny": ("ratio >= 12", "ratio >= 7"),
    "mini": ("ratio >= 6.5", "ratio >= 4"),
    "small": ("ratio >= 4.5", "ratio >= 3"),
}
POOL = 16  # batches built beforehand; the tuned peer sorts their sequences by length
Step = Callable[[], int]  # does a training step, returns its real tokens


def measure_model(
    config: DataConfig, sizes: tuple[str, ...], device: str, threads: int, runs: int
) -> None:
    """Measure training steps of both sides at each size and length."""
    with quiet():
        prepare(config)
    data_dir = Path(config.data_dir)
    torch.set_num_threads(threads)
    for size in sizes:
        for length in (128, 512) if device == "cuda" else (128,):
            compare_steps(data_dir, size, length, device, threads, runs)
    if device == "cpu":
        compare_processes(config, sizes[0], runs)


def compare_steps(
    data_dir: Path, size: str, length: int, device: str, threads: int, runs: int
) -> None:
    cuda = device == "cuda"
    task = make_task(data_dir, size, length, BATCH_SIZE[device], device)
    steps = {
        "ours bf16": ours(task, bf16=True),
        "peer bf16": peer(task, bf16=True, tuned=False, compiled=cuda),
        "peer bf16, tuned": peer(task, bf16=True, tuned=True, compiled=cuda),
    }
    if not cuda:
        steps["ours fp32"] = ours(task, bf16=False)
        steps["peer fp32"] = peer(task, bf16=False, tuned=False)
        steps["peer fp32, tuned"] = peer(task, bf16=False, tuned=True)
    found = tokens_per_second(steps, runs, threads)

    def best(*names: str) -> list[float]:
        return max((found[name] for name in names if name in found), key=median)

    what = f"training step of {size}, length {length}, against transformers "
    simple, tuned = TARGETS.get(size, ("ratio >= 1.5", ""))
    unit = f"tokens/s on {device}"
    if not cuda:
        show(what + "fp32", unit, simple, found["ours fp32"], found["peer fp32"], threads=threads)
    show(what + "bf16", unit, "ratio > 1", found["ours bf16"], found["peer bf16"], threads=threads)
    tuned_ones = [name for name in found if name.startswith("peer")]
    show(
        what + "at its best, ours at its best",
        unit,
        tuned,
        best("ours bf16", "ours fp32"),
        best(*tuned_ones),
        threads=threads,
    )
    with torch.device("meta"):
        model = PretrainingModel(task.model, len(task.vocabulary))
    flops = sum(map(model.count_flops, task.batches))
    each = flops / sum(len(batch.input_ids) for batch in task.batches)
    tflops = [rate * each / 1e12 for rate in best("ours bf16", "ours fp32")]
    show(f"speed of {size}, length {length}", "TFLOP/s", "", tflops, threads=threads)
    peak = peak_flops(task.device)
    if peak:
        mfu = [value * 1e12 / peak for value in tflops]
        show(f"MFU of {size}, length {length}", "share of the peak", "ours >= 0.5", mfu)
    share = padding_share(task)
    show(f"padding in the arithmetic of {size}, length {length}", "share", "ours < 0.03", [share])
    memory = ([memory_of(side, data_dir, size, length, device) / 1e9] for side in ("ours", "peer"))
    show(
        f"memory of a step of {size}, length {length}",
        "GB",
        "ratio >= 2",
        *memory,
        smaller_is_better=True,
    )


def compare_processes(config: DataConfig, size: str, runs: int) -> None:
    """Compare two processes of one thread with one process of two threads, in bf16."""
    layers, hidden = SIZES[size]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
    }
    path = Path(config.data_dir).parent / "config.yaml"
    OmegaConf.save(OmegaConf.structured(config), path)
    steps = {
        "max_steps": 12,
        "warmup_steps": 1,
        "log_every": 3,
        "save_every": 100,
        "eval_every": 100,
    }
    batch = {"global_batch_size": 64, "micro_batch_size": 32, "precision": "bf16"}
    settings: dict = {f"model.{name}": value for name, value in sizes.items()}
    settings |= {f"train.{name}": value for name, value in (steps | batch).items()}
    settings |= {"data.max_seq_length": 128, "train.eval_examples": 1}
    found: dict[int, list[dict]] = {1: [], 2: []}
    for _ in range(runs):
        for processes, kept in found.items():
            with TemporaryDirectory() as run_dir:
                overrides = [f"{n}={v}" for n, v in (settings | {"run_dir": run_dir}).items()]
                kept += speeds(str(path), overrides, processes)
    one, two = ([line["perf/tokens_per_second"] for line in found[n]] for n in (1, 2))
    what = f"trainer of {size}, two processes against one of two threads"
    show(what, "tokens/s", "ratio >= 0.9", two, one, threads=2)
    waits = [line["perf/data_wait"] for line in found[2]]
    show("data wait of that trainer", "share", "ours < 0.01", waits, threads=2)


@dataclass
class Task:
    """The model and the batches that both sides train on."""

    model: ModelConfig
    vocabulary: Vocabulary
    batches: list[Batch]
    device: torch.device


def make_task(data_dir: Path, size: str, length: int, batch_size: int, device: str) -> Task:
    layers, hidden = SIZES[size]
    model = ModelConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64
    )
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore.open(data_dir / "store", "train", vocabulary)
    source = BatchSource(store, PairsConfig(max_seq_length=length), 0)
    batches = [source.batch(i * batch_size, batch_size) for i in range(POOL)]
    return Task(model, vocabulary, batches, torch.device(device))


def ours(task: Task, bf16: bool) -> Step:
    torch.manual_seed(0)
    model = PretrainingModel(task.model, len(task.vocabulary)).to(task.device)
    optimizers = build_optimizers(model, TrainConfig())
    batches = [batch.to(task.device) for batch in task.batches]
    if task.device.type == "cuda":
        model.compile_layers()
    turns = cycle(batches)

    def step() -> int:
        torch.set_float32_matmul_precision("medium" if task.device.type == "cpu" else "high")
        batch = next(turns)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=bf16):
            rows = model(batch)
        (rows[:, 0] / rows[:, 2]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return len(batch.input_ids)

    return step


def peer(task: Task, bf16: bool, tuned: bool, compiled: bool = False) -> Step:
    from accelerate import Accelerator
    from transformers import BertConfig
    from transformers import BertForPreTraining as Peer

    torch.manual_seed(0)
    started = PretrainingModel(task.model, len(task.vocabulary))
    weights = task.model.family.to_hf(started.state_dict())
    settings = hf_config(asdict(task.model), len(task.vocabulary), started.hf_class)
    model = Peer(BertConfig(**settings, attn_implementation="sdpa"))
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tuned or None)
    accelerator = Accelerator(cpu=task.device.type == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    run = torch.compile(model, dynamic=False) if compiled else model
    batches = [padded(batch) for batch in task.batches]
    if tuned:
        batches = of_similar_length(batches)
    batches = [{n: v.to(task.device) for n, v in batch.items()} for batch in batches]
    turns = cycle([(batch, int(batch["attention_mask"].sum())) for batch in batches])

    def step() -> int:
        faster = "medium" if task.device.type == "cpu" else "high"
        torch.set_float32_matmul_precision(faster if tuned else "highest")
        batch, tokens = next(turns)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=bf16):
            loss = run(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return tokens

    return step


def padded(batch: Batch) -> dict[str, torch.Tensor]:
    """Pad a batch to the full length, as the peer's data usually are."""
    length = -(-batch.max_length // 128) * 128
    rows = batch.padded()
    fillers = {"labels": -100}
    return {
        name: torch.nn.functional.pad(v, (0, length - v.shape[1]), value=fillers.get(name, 0))
        if v.dim() == 2
        else v
        for name, v in rows.items()
    }


def of_similar_length(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Regroup sequences by length, cut batches to their longest, and shuffle the batches."""
    size = len(batches[0]["input_ids"])
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    lengths = whole["attention_mask"].sum(1)
    out = []
    for rows in lengths.argsort(stable=True).split(size):
        longest = int(lengths[rows].max())
        out.append({n: v[rows, :longest] if v.dim() == 2 else v[rows] for n, v in whole.items()})
    mixed = torch.randperm(len(out), generator=torch.Generator().manual_seed(0))
    return [out[i] for i in mixed]


def tokens_per_second(steps: dict[str, Step], runs: int, threads: int) -> dict[str, list[float]]:
    """Measure each step in turns: CPU time on one thread, wall time on more or on a GPU."""
    cuda = torch.cuda.is_available()
    clock = time.process_time if threads == 1 and not cuda else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(runs + 1):
        for name, step in steps.items():
            if cuda:
                torch.cuda.synchronize()
            start, tokens = clock(), 0
            for _ in range(4 if cuda else 1):
                tokens += step()
            if cuda:
                torch.cuda.synchronize()
            if run:  # the first is the warm-up
                found[name].append(tokens / (clock() - start))
    return found


def padding_share(task: Task) -> float:
    """Compute the share of a forward pass's FLOPs that are spent on padding."""
    model = PretrainingModel(task.model, len(task.vocabulary)).to(task.device).eval()
    batch = task.batches[0].to(task.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    needed = model.count_flops(task.batches[0]) / 3
    return 1 - needed / counter.get_total_flops()


def peak_memory(step: Step, device: torch.device, count: int = 4) -> int:
    """Measure the peak memory of a few steps, in bytes (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(count):
        step()
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else memory("VmHWM")


def memory(name: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])


def memory_of(side: str, data_dir: Path, size: str, length: int, device: str) -> int:
    """Measure `peak_memory` of one side in its own process, less the memory before the model."""
    command = [sys.executable, __file__, side, str(data_dir), size, str(length), device]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return int(out.stdout.split()[-1])


def speeds(config_path: str, overrides: list[str], processes: int) -> list[dict]:
    """Train on two threads in total; returns the logged metrics without the warm-up line."""
    launch = ["-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "configs/accelerate/cpu_2.yaml")]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "pretrain", config_path]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(2 // processes)}
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, env=env)
    run_dir = next(value for name, value in (o.split("=") for o in overrides) if name == "run_dir")
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "perf/tokens_per_second" in line][1:]


def main() -> None:
    side, data_dir, size, length, device = sys.argv[1:]
    import transformers  # noqa: F401  for both sides, so that both start from the same memory

    torch.set_num_threads(1)
    cuda = device == "cuda"
    task = make_task(Path(data_dir), size, int(length), BATCH_SIZE[device], device)
    before = 0 if cuda else memory("VmRSS")
    step = ours(task, bf16=cuda) if side == "ours" else peer(task, bf16=cuda, tuned=False)
    print(peak_memory(step, task.device) - before)


if __name__ == "__main__":
    main()
