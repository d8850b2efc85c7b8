"""`benchmark.py model`: compare a training step with transformers' `BertForPreTraining`.

Both have the same weights, examples and dropout. The peer runs under Accelerate. On a CPU it is
first as commonly set up (AdamW, padding to the full length), then tuned: bf16, batches of similar
length, fused AdamW, faster matrix products. On a GPU it is compiled too, for the one shape that all
batches are padded to. The trainer's own speed stands beside that of its bare step.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
from bench_figures import ROOT, quiet, rates, show
from bench_peers import peer_model
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary
from pretrain.config import ModelConfig, TrainConfig
from pretrain.metrics import peak_flops
from pretrain.models.bert import PretrainingModel
from pretrain.optim import build_optimizers, update, zero_gradients
from pretrain.tracking import read_metrics

SIZES = {  # fields of the section `model`
    name: {"num_hidden_layers": n, "hidden_size": d, "num_attention_heads": d // 64}
    for name, n, d in (
        ("tiny", 2, 128),
        ("mini", 4, 256),
        ("small", 4, 512),
        ("base", 12, 768),
        ("large", 24, 1024),
    )
}
BATCH_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 15}  # of full sequences; half as many of "large"
TARGETS = {  # size -> (against the common setup, against the tuned one)
    "tiny": ("ratio >= 12", "ratio >= 7"),
    "mini": ("ratio >= 6.5", "ratio >= 4"),
    "small": ("ratio >= 4.5", "ratio >= 3"),
}
STEPS_OF_SAVE = 100  # between two checkpoints of `train_steps`: each is on disk before the next
POOL = 16  # batches built beforehand; the tuned peer sorts their sequences by length
Step = Callable[[], int]  # does a training step, returns its real tokens


def measure_model(
    config: DataConfig, sizes: tuple[str, ...], device: str, threads: int, runs: int
) -> None:
    """Measure training steps of both sides at each size and length."""
    from data_pipeline.build.prepare import prepare  # what a GPU machine need not have

    with quiet():
        prepare(config)
    data_dir = Path(config.data_dir)
    torch.set_num_threads(threads)
    for size in sizes:
        if device == "cpu":
            compare_steps(data_dir, size, 128, threads, runs)
        else:
            for length in (128, 512):
                compare_on_gpu(data_dir, size, length, runs)
    if device == "cpu":
        compare_processes(config, sizes[0], runs)


def compare_on_gpu(data_dir: Path, size: str, length: int, runs: int) -> None:
    for dropout in (0.1, 0.0):
        task = make_task(data_dir, size, length, "cuda", dropout)
        found, memory = {}, {}
        for side, build in (("ours", ours), ("peer", peer)):
            found[side], peak = measure_alone(build, task, runs)
            memory[side] = [peak / 1e9]
        what = f"{size}, length {length}, dropout {dropout:g}"
        names = f"training step of {what}, against transformers compiled", "tokens/s on cuda"
        show(*names, "ratio >= 1.5", *found.values())
        show_speed(what, task, found["ours"])
        show(f"memory of a step of {what}", "GB", "", *memory.values(), smaller_is_better=True)
    trained = train_steps(data_dir, size, length)
    speed = [line["perf/tokens_per_second"] for line in trained]
    show(
        f"trainer of {what}, against its bare step",
        "tokens/s",
        "ratio >= 0.95",
        speed,
        found["ours"],
    )
    waits = [line["perf/data_wait"] for line in trained]
    show("data wait of that trainer", "share", "ours < 0.01", waits)


def compare_steps(data_dir: Path, size: str, length: int, threads: int, runs: int) -> None:
    task = make_task(data_dir, size, length, "cpu")
    steps = {
        "ours bf16": ours(task, bf16=True),
        "ours fp32": ours(task, bf16=False),
        "peer bf16": peer(task, bf16=True, tuned=False),
        "peer bf16, tuned": peer(task, bf16=True),
        "peer fp32": peer(task, bf16=False, tuned=False),
        "peer fp32, tuned": peer(task, bf16=False),
    }
    clock = time.process_time if threads == 1 else time.perf_counter
    found = dict(zip(steps, rates(runs, *steps.values(), clock=clock), strict=True))

    def best(*names: str) -> list[float]:
        return max((found[name] for name in names), key=median)

    what = f"training step of {size}, length {length}, against transformers "
    simple, tuned = TARGETS.get(size, ("ratio >= 1.5", ""))
    unit = "tokens/s on cpu"
    show(what + "fp32", unit, simple, found["ours fp32"], found["peer fp32"], threads=threads)
    show(what + "bf16", unit, "ratio > 1", found["ours bf16"], found["peer bf16"], threads=threads)
    show(
        what + "at its best, ours at its best",
        unit,
        tuned,
        best("ours bf16", "ours fp32"),
        best(*(name for name in found if name.startswith("peer"))),
        threads=threads,
    )
    show_speed(f"{size}, length {length}", task, best("ours bf16", "ours fp32"), threads)
    share = padding_share(task)
    show(f"padding in the arithmetic of {size}, length {length}", "share", "ours < 0.03", [share])
    memory = ([memory_of(side, data_dir, size, length) / 1e9] for side in ("ours", "peer"))
    show(
        f"memory of a step of {size}, length {length}",
        "GB",
        "ratio >= 2",
        *memory,
        smaller_is_better=True,
    )


def show_speed(what: str, task: "Task", speed: list[float], threads: int = 1) -> None:
    """Print the FLOP/s of a step from its tokens/s, and on a GPU their share of the peak."""
    each = task.flops / task.tokens
    tflops = [rate * each / 1e12 for rate in speed]
    show(f"speed of {what}", "TFLOP/s", "", tflops, threads=threads)
    peak = peak_flops(task.device)
    if peak:
        mfu = [value * 1e12 / peak for value in tflops]
        show(f"MFU of {what}", "share of the peak", "ours >= 0.5", mfu)


def compare_processes(config: DataConfig, size: str, runs: int) -> None:
    """Compare two processes of one thread with one process of two threads, in bf16."""
    path = Path(config.data_dir).parent / "config.yaml"
    OmegaConf.save(OmegaConf.structured(config), path)
    train = {"max_steps": 12, "warmup_steps": 1, "log_every": 3, "save_every": 100}
    train |= {"global_batch_size": 64, "micro_batch_size": 32, "precision": "bf16"}
    train |= {"eval_every": 100, "eval_examples": 1}
    found: dict[int, list[dict]] = {1: [], 2: []}
    for _ in range(runs):
        for processes, kept in found.items():
            kept += speeds(path, SIZES[size], train, {"data.max_seq_length": 128}, processes)
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
    length: int  # tokens of a padded sequence

    @property
    def tokens(self) -> float:
        """Mean number of tokens in a batch."""
        return mean(len(batch.input_ids) for batch in self.batches)

    @property
    def flops(self) -> float:
        """Mean number of floating-point operations of a step on a batch."""
        with torch.device("meta"):
            model = PretrainingModel(self.model, len(self.vocabulary))
        return mean(map(model.count_flops, self.batches))


def count_rows(size: str, length: int, device: str) -> int:
    """Count the sequences of a batch on a device."""
    return BATCH_TOKENS[device] // length // (2 if size == "large" else 1)


def make_task(
    data_dir: Path,
    size: str,
    length: int,
    device: str,
    dropout: float = 0.1,
    is_full: bool = False,
    count: int = POOL,
) -> Task:
    """Build `count` batches of a corpus, or of full sequences, and say which model they are for."""
    model = ModelConfig(
        **SIZES[size], hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    vocabulary = read_vocabulary(data_dir / "vocab")
    store = TokenStore.open(data_dir / "store", "train", vocabulary)
    source = BatchSource(store, PairsConfig(max_seq_length=length), 0)
    rows = count_rows(size, length, device)
    batches = [source.batch(i * rows, rows) for i in range(count)]
    if is_full:
        batches = [fill_up(batch, length) for batch in batches]
    return Task(model, vocabulary, batches, torch.device(device), length)


def fill_up(batch: Batch, length: int) -> Batch:
    """Repeat the tokens and masks of a batch until as many sequences all have `length` tokens."""
    rows, tokens = len(batch.next_sentence_label), len(batch.input_ids)
    place = torch.arange(rows * length)
    is_masked = torch.zeros(tokens, dtype=torch.bool)
    is_masked[batch.masked_positions] = True
    labels = torch.zeros(tokens, dtype=torch.int64)
    labels[batch.masked_positions] = batch.masked_labels
    masked = is_masked[place % tokens].nonzero()[:, 0]
    return Batch.of(
        batch.input_ids[place % tokens],
        torch.full((rows,), length),
        masked,
        labels[masked % tokens],
        batch.token_type_ids[place % tokens],
        batch.next_sentence_label,
    )


def ours(task: Task, bf16: bool, optimizer: str = "adamw") -> Step:
    torch.manual_seed(0)
    model = PretrainingModel(task.model, len(task.vocabulary)).to(task.device)
    optimizers = build_optimizers(
        model, TrainConfig(optimizer=optimizer), torch.bfloat16 if bf16 else torch.float32
    )
    batches = [batch.to(task.device) for batch in task.batches]
    if task.device.type == "cuda":
        model.compile_layers()
    turns = cycle(batches)

    def step() -> int:
        # as in training: on a CPU by `configure_cpu`, on a GPU without TF32
        torch.set_float32_matmul_precision("medium" if task.device.type == "cpu" else "highest")
        batch = next(turns)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=bf16):
            rows = model(batch)
        (rows[:, 0] / rows[:, 2]).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizers, 1e-4, norm.view(1))
        zero_gradients(optimizers)
        return len(batch.input_ids)

    return step


def peer(task: Task, bf16: bool, tuned: bool = True, attention: str = "sdpa") -> Step:
    """Build the peer's step; on a GPU it is compiled, and compiles in its first call."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    started = PretrainingModel(task.model, len(task.vocabulary))
    model = peer_model(started, len(task.vocabulary), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tuned or None)
    accelerator = Accelerator(cpu=task.device.type == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    run, batches = model, [batch.padded(length=task.length) for batch in task.batches]
    if task.device.type == "cuda":
        # of one shape: eager after eight others; but flash_attn cuts its batches itself, with a
        # graph for each layer
        torch._dynamo.config.recompile_limit = 64
        run = torch.compile(model, dynamic=None if attention == "flash_attention_2" else False)
    elif tuned:
        batches = of_similar_length(batches)
    batches = [{n: v.to(task.device) for n, v in batch.items()} for batch in batches]
    counted = [(batch, int(batch["attention_mask"].sum())) for batch in batches]
    for batch in batches:
        if batch["attention_mask"].all():  # compiled, it does not look, and takes a slower kernel
            del batch["attention_mask"]
    turns = cycle(counted)

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


def measure_alone(
    build: Callable[..., Step], task: Task, runs: int, **options: object
) -> tuple[list[float], int]:
    """Build a bf16 step, measure it on its own, and free it.

    Returns the tokens/s of each run of four steps, of 20 on a GPU, and there the peak memory in
    bytes.
    """
    cuda = task.device.type == "cuda"
    torch._dynamo.reset()  # the graphs of the side before count towards the same limits
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step, found = build(task, bf16=True, **options), []
    for run in range(runs + 1):
        start, tokens = time.perf_counter(), 0
        for _ in range(20 if cuda else 4):
            tokens += step()
        if cuda:
            torch.cuda.synchronize()
        if run:  # the first is the warm-up
            found.append(tokens / (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    del step
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found, peak


def padding_share(task: Task) -> float:
    """Compute the share of a forward pass's FLOPs that are spent on padding."""
    model = PretrainingModel(task.model, len(task.vocabulary)).to(task.device).eval()
    batch = task.batches[0].to(task.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    needed = model.count_flops(task.batches[0]) / 3
    return 1 - needed / counter.get_total_flops()


def memory(name: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])


def memory_of(side: str, data_dir: Path, size: str, length: int) -> int:
    """Measure the peak memory of one side's steps in its own process, in bytes, less what it had
    before the model (Linux)."""
    command = [sys.executable, __file__, side, str(data_dir), size, str(length)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return int(out.stdout.split()[-1])


def speeds(
    config: Path, model: dict, train: dict, others: dict, processes: int, most_s: int | None = None
) -> list[dict]:
    """Train on two threads in total; returns the logged metrics without the warm-up line.

    Raises TimeoutExpired after `most_s` seconds.
    model, train: fields of these sections. others: other fields, by their full names.
    """
    settings = {f"model.{name}": value for name, value in model.items()}
    settings |= {f"train.{name}": value for name, value in train.items()} | others
    launch = ["-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "configs/accelerate/cpu_2.yaml")]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "pretrain", str(config)]
    command += [f"{name}={value}" for name, value in settings.items()]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(2 // processes)}
    with TemporaryDirectory() as run_dir:
        command += [f"run_dir={run_dir}"]
        how = {"check": True, "stdout": subprocess.DEVNULL, "timeout": most_s}
        subprocess.run(command, env=env, **how)
        lines = read_metrics(Path(run_dir, "metrics.jsonl"))
        return [line for line in lines if "perf/tokens_per_second" in line][1:]


def train_steps(data_dir: Path, size: str, length: int, dropout: float = 0.0) -> list[dict]:
    """Train on a GPU for 600 steps, with a checkpoint every `STEPS_OF_SAVE` of them; returns the
    logged metrics without the warm-up line."""
    rows = count_rows(size, length, "cuda")
    model = SIZES[size] | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    train = {"global_batch_size": rows, "micro_batch_size": rows, "max_steps": 600}
    train |= {"phases": [], "warmup_steps": 10, "eval_examples": 64}
    train |= {"eval_every": 6000, "log_every": STEPS_OF_SAVE, "save_every": STEPS_OF_SAVE}
    others = {"data_dir": data_dir, "data.max_seq_length": length}
    others |= {"data.max_predictions_per_seq": "null"}  # as many as a bare step has
    return speeds(ROOT / "configs/bert_base.yaml", model, train, others, 1, most_s=600)


def main() -> None:
    side, data_dir, size, length = sys.argv[1:]
    import transformers  # noqa: F401  for both sides, so that both start from the same memory

    torch.set_num_threads(1)
    task = make_task(Path(data_dir), size, int(length), "cpu")
    before = memory("VmRSS")
    step = ours(task, bf16=False) if side == "ours" else peer(task, bf16=False, tuned=False)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(4):
        step()
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
