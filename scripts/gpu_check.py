"""Check a GPU machine in ten to fifteen minutes: is training right, does it resume, how fast is it?

    python scripts/gpu_check.py --data DIR [--only STAGE ...] [--out FILE] [--device cpu]

DIR is the `data_dir` of any config whose data are prepared; a store of some million tokens will do,
prepared elsewhere and copied. Training needs neither `sentencex` nor `datasets`, but omegaconf
(2.4 brings all that it needs but PyYAML). Prints a table,
writes it as JSON, and exits with code 1 if anything is wrong. Speed is measured against targets,
whose missing is no fault. On a CPU all stages run on tiny sizes and measure nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
# a GPU machine need not have the project installed
sys.path.insert(0, str(ROOT))
from needed import check_packages

check_packages("torch", "omegaconf", "accelerate", "safetensors", "tqdm", "jinja2")

import torch
from bench_model import (
    STEPS_OF_SAVE,
    Task,
    count_rows,
    make_task,
    measure_alone,
    ours,
    peer,
    train_steps,
)
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.common.errors import UserError, run_command
from data_pipeline.common.folders import check_writable, write_file
from data_pipeline.sampling.batches import Batch, fetch
from pretrain.checkpoint import list_checkpoints
from pretrain.config import ModelConfig, TrainConfig
from pretrain.metrics import compiled_graphs, peak_flops
from pretrain.models.attention import attend, attend_padded
from pretrain.models.bert import PretrainingModel
from pretrain.optim import build_optimizers, update, zero_gradients
from pretrain.processes import check_compiler
from pretrain.sharding import clip_gradients
from pretrain.tracking import read_metrics

VOCABULARY = 500
LENGTHS = (1, 7, 128, 129, 300, 512, 64, 33)  # below, at and above what the kernel works in
SHAPES = ((9, 128), (16, 100), (3, 17), (31, 64), (8, 127), (20, 128))  # sequences, longest
SHAPES += ((4, 512), (7, 300), (2, 511), (5, 200), (6, 400), (3, 129))
RATES = {"adamw": 1e-3, "lamb": 2e-2, "muon": 5e-3}  # learn a batch by heart in 150 steps
MFU = {("base", 128): 0.44, ("large", 512): 0.51}  # targets, of full sequences
RATIO = {("base", 128): (1.5, 1.5), ("large", 512): (1.5, 2.0)}  # full, and of a corpus
DRAWS = 50  # of dropout
SAVE_EVERY = 5000  # as in configs/bert_base.yaml
MOST_SECONDS = 300  # of such a run
STEPS = 12  # of the run that is stopped and resumed


@dataclass
class Check:
    """The device, the data, and what has been found."""

    device: torch.device
    data_dir: Path
    rows: list[dict] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_matter(self) -> bool:
        """Tell whether speed is judged: on a GPU whose peak is known."""
        return self.is_gpu and peak_flops(self.device) is not None

    def note(self, name: str, found: object) -> None:
        """Print and keep a fact."""
        self.keep(name, found, "", "")

    def must(self, name: str, found: float, most: float) -> None:
        """Print and keep a number that is wrong above `most`."""
        self.keep(name, f"{found:.3g}", f"<= {most:g}", "right" if found <= most else "WRONG")

    def should(self, name: str, found: float, least: float) -> None:
        """Print and keep a speed, with its target where speed is judged."""
        verdict = ("reached" if found >= least else "missed") if self.seconds_matter else ""
        self.keep(name, f"{found:.3g}", f">= {least:g}" if verdict else "", verdict)

    def keep(self, name: str, found: object, wanted: str, verdict: str) -> None:
        self.rows.append({"name": name, "found": found, "wanted": wanted, "verdict": verdict})
        print(f"{name:<66} {found!s:>24} {wanted:>9} {verdict}".rstrip(), flush=True)

    @property
    def is_wrong(self) -> bool:
        return any(row["verdict"] == "WRONG" for row in self.rows)


# ------------------------------------------------------------------------------- the stages


def check_attention(check: Check) -> None:
    """Compare every path of attention, and its gradient, with attention in float64."""
    batch = random_batch(LENGTHS, seed=0)
    exact = torch.randn(len(batch.input_ids), 3, 4, 64, dtype=torch.float64)
    what = torch.randn(len(batch.input_ids), 4, 64, dtype=torch.float64)
    wanted = with_gradient(attend_by_the_book, exact, what, batch)
    there = batch.to(check.device)
    for name, path in (("attend", attend), ("attend_padded", attend_padded)):
        for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)):
            if dtype == torch.float16 and not check.is_gpu:
                continue
            qkv, out = (x.to(check.device, dtype) for x in (exact, what))
            found = with_gradient(path, qkv, out, there)
            worst = largest(map(relative_error, found, wanted))
            kind = str(dtype).removeprefix("torch.")
            check.must(f"{name}, {kind}: error of output and gradient", worst, most)
    qkv, out = exact.to(check.device, torch.bfloat16), what.to(check.device, torch.bfloat16)
    draws = [with_gradient(attend, qkv, out, there, dropout=0.1) for _ in range(DRAWS)]
    parts = zip(*draws, strict=True)  # the outputs of all draws, then the gradients
    for name, found, target in zip(("output", "gradient"), parts, wanted, strict=True):
        share = relative_error(torch.stack(found).mean(0), target)
        share /= relative_error(found[0], target)
        # the error of a mean is that of one draw by the root of their number
        most = 1.5 / DRAWS**0.5
        check.must(f"dropout 0.1: error of the mean {name}, times that of one", share, most)


def check_learning(check: Check) -> None:
    """Learn one batch by heart with each optimizer."""
    batch = random_batch((60, 40, 128, 9), seed=0).to(check.device)
    for name, rate in RATES.items():
        model, optimizers = build(check, optimizer=name)
        losses = [
            make_step(model, optimizers, batch, rate * min(1, (i + 1) / 10)) for i in range(150)
        ]
        # LAMB scales the updates of a batch that it knows by heart up, so that its loss jumps again
        check.must(
            f"{name}: lowest MLM loss of a batch in 150 steps",
            float(torch.stack(losses).min()),
            1.0,
        )


def check_shapes(check: Check) -> None:
    """Train and evaluate on many shapes: nothing is compiled again, and the host never waits."""
    for dropout in (0.1, 0.0):
        torch._dynamo.reset()
        model, optimizers = build(check, dropout)
        before = compiled_graphs()
        batches = [
            random_batch([longest] * rows, rows).to(check.device) for rows, longest in SHAPES
        ]
        for i, batch in enumerate(batches):
            make_step(model, optimizers, batch, 1e-4)
            if i in (3, 9):
                with torch.autocast(check.device.type, torch.bfloat16):
                    model.eval().score(batch)
                model.train()
        graphs = compiled_graphs() - before
        if not check.is_gpu:
            continue  # the path of a CPU is not compiled
        check.must(
            f"graphs of {len(SHAPES)} shapes, to train and evaluate, dropout {dropout:g}", graphs, 4
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                make_step(model, optimizers, batch, 1e-4)
            waits = 0
        except RuntimeError as error:
            check.note("waits", str(error).splitlines()[0][:80])
            waits = 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check.must(f"a step that waits for the GPU, dropout {dropout:g}", waits, 0)


def check_resume(check: Check) -> None:
    """Compare an unbroken run of the trainer with one that stopped and went on."""
    for is_exact in (True, False) if check.is_gpu else (True,):  # a CPU is always exact
        with TemporaryDirectory() as folder:
            whole, half = Path(folder, "whole"), Path(folder, "half")
            train(check, whole, is_exact)
            shutil.copytree(whole, half)
            shutil.rmtree(list_checkpoints(half / "checkpoints")[-1])
            train(check, half, is_exact)
            ends = ((half, STEPS // 2), (whole, STEPS), (half, STEPS))
            before, a, b = (read_weights(*end) for end in ends)
        if is_exact:
            worst = largest((a[name] - b[name]).abs().max() for name in a)
            check.must("resumed run, deterministic: largest difference of a weight", worst, 0)
        else:  # 1 if it had trained nothing
            share = distance(a, b) / distance(a, before)
            check.must("resumed run: difference, times what 6 steps moved", share, 0.3)


def check_processes(check: Check) -> None:
    """Compare DDP and FSDP2, a process for each GPU, with one process, all with Muon."""
    count = torch.cuda.device_count() if check.is_gpu else 2
    if count < 2:
        return check.note("processes", "one GPU only")
    # dropout is drawn for each pass, of which each process has its own
    same = {"train.optimizer": "muon", "train.learning_rate": 1e-3}
    same |= {f"model.{kind}_dropout_prob": 0 for kind in ("hidden", "attention_probs")}
    with TemporaryDirectory() as folder:
        kinds = {"one": (1, False), "DDP": (count, False), "FSDP2": (count, True)}
        for kind, (processes, shards) in kinds.items():
            train(check, Path(folder, kind), False, processes, shards, same)
        before, whole = (read_weights(Path(folder, "one"), step) for step in (STEPS // 2, STEPS))
        for kind in ("DDP", "FSDP2"):
            weights = read_weights(Path(folder, kind), STEPS)
            share = distance(whole, weights) / distance(whole, before)
            name = f"{kind}, {count} processes beside one: difference"
            check.must(f"{name}, times what 6 steps moved", share, 0.3)
            # which neither Muon nor AdamW would tell, as they see no scale
            norms = zip(*(read_norms(Path(folder, one)) for one in ("one", kind)), strict=True)
            off = largest(abs(b / a - 1) for a, b in norms)
            check.must(f"{name} of the gradient norm", off, 0.05)


def check_trainer(check: Check) -> None:
    """Train base for 600 steps as users do, and see what it reports."""
    if not check.is_gpu:
        return  # `check_resume` has trained, and a CPU takes an hour for base
    lines = train_steps(check.data_dir, "base", 128, dropout=0.1)
    found = {name: median(line.get(name, 0.0) for line in lines) for name in lines[0]}
    check.note("trainer, base at 128: sequences/s", f"{found['perf/sequences_per_second']:,.0f}")
    check.should("trainer, base at 128: MFU", found.get("perf/mfu", 0.0), 0.4)
    check.note("trainer, base at 128: GB", f"{found['perf/memory_gb']:.1f}")
    check.should(
        "trainer, base at 128: share of the time not spent waiting for data",
        1 - found["perf/data_wait"],
        0.99,
    )
    away = found["perf/paused"] / (1 - found["perf/paused"])  # a checkpoint, to the steps between
    seconds = away * STEPS_OF_SAVE * count_rows("base", 128, "cuda")
    seconds /= found["perf/sequences_per_second"]
    check.note("trainer, base at 128: seconds that a checkpoint stops the steps", f"{seconds:.2f}")
    check.should(
        f"trainer, base at 128: share of the time not lost to checkpoints, one in {SAVE_EVERY:,}",
        1 / (1 + away * STEPS_OF_SAVE / SAVE_EVERY),
        0.99,
    )
    graphs = [line["perf/compiled_graphs"] for line in lines]
    check.must("trainer, base at 128: graphs after the first steps", graphs[-1] - graphs[0], 0)


def check_speed(check: Check, size: str, length: int) -> None:
    """Measure a bare step against transformers, compiled: full sequences, and those of a corpus."""
    kinds = ("sdpa", "flash_attention_2") if find_spec("flash_attn") else ("sdpa",)
    for is_full, mix, least in zip(
        (True, False), ("full", "of a corpus"), RATIO[size, length], strict=True
    ):
        task = task_of(check, size, length, is_full)
        for dropout in (0.1, 0.0):
            both = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            task = replace(task, model=replace(task.model, **both))
            rates, peak = measure_alone(ours, task, 3)
            batches = median(rates) / task.tokens  # per second
            rows = batches * len(task.batches[0].next_sentence_label)
            name = f"{size} at {length}, {mix}, dropout {dropout:g}"
            check.note(f"{name}: sequences/s, GB", f"{rows:,.0f}, {peak / 1e9:.1f}")
            if dropout and mix != "full":
                padded = length * len(task.batches[0].next_sentence_label)
                check.note(f"{name}: share of real tokens", f"{task.tokens / padded:.2f}")
            if dropout and mix == "full" and size == "base":
                muon = median(measure_alone(ours, task, 3, optimizer="muon")[0]) / task.tokens
                check.should(f"{name}: speed with Muon, times AdamW", muon / batches, 0.9)
            if check.seconds_matter and mix == "full":
                share = batches * task.flops / peak_flops(check.device)
                check.should(f"{name}: MFU", share, MFU[size, length])
            for kind in kinds if dropout else ():  # with its own dropout; it takes a minute
                others = median(measure_alone(peer, task, 3, attention=kind)[0]) / task.tokens
                check.should(f"{name}: times transformers, {kind}", batches / others, least)


# -------------------------------------------------------------------------------- their parts


def random_batch(lengths: tuple[int, ...] | list[int], seed: int) -> Batch:
    """Build sequences of these lengths with random tokens, one in seven masked."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths)
    ids = torch.randint(5, VOCABULARY, (sum(lengths),), generator=draw)
    masked = torch.arange(0, len(ids), 7)
    labels = torch.randint(5, VOCABULARY, masked.shape, generator=draw)
    pairs = torch.randint(0, 2, sizes.shape, generator=draw)
    batch = Batch.of(ids, sizes, masked, labels, next_sentence_label=pairs)
    batch.token_type_ids = (batch.position_ids > sizes[batch.sequence_ids] // 2).long()
    return batch


def attend_by_the_book(qkv: Tensor, batch: Batch, dropout: float) -> Tensor:
    """Compute attention one sequence after the other: (T, 3, H, d) -> (T, H, d)."""
    out = []
    for rows in qkv.split(batch.cu_seqlens.diff().tolist()):
        q, k, v = rows.permute(1, 2, 0, 3)
        out.append(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def with_gradient(
    path: Callable, qkv: Tensor, what: Tensor, batch: Batch, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the output of a path of attention, and its gradient, in float64 on the CPU."""
    qkv = qkv.detach().requires_grad_()
    out = path(qkv, batch, dropout)
    (gradient,) = torch.autograd.grad(out, qkv, what)
    return out.detach().double().cpu(), gradient.double().cpu()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def largest(numbers: Iterable[float | Tensor]) -> float:
    """Return the largest number, and NaN if there is one, which `max` passes over."""
    return float(torch.tensor([float(number) for number in numbers]).max())


def build(check: Check, dropout: float = 0.0, optimizer: str = "adamw") -> tuple:
    """Build a small model, compiled on a GPU, and its optimizers."""
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=256 if check.is_gpu else 64,
        num_hidden_layers=2,
        num_attention_heads=4 if check.is_gpu else 1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = PretrainingModel(config, VOCABULARY).to(check.device)
    if check.is_gpu:
        model.compile_layers()
    return model, build_optimizers(model, TrainConfig(optimizer=optimizer))


def make_step(model: PretrainingModel, optimizers: list, batch: Batch, rate: float) -> Tensor:
    """Make a training step as the loop does; returns the MLM loss, in nats a masked token."""
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16):
        rows = model(batch)
    losses = rows[:, 0] / rows[:, 2].detach()
    losses.sum().backward()
    norm = clip_gradients(model.parameters(), 1.0).view(1)
    fetched = fetch(norm)
    update(optimizers, rate, norm)
    fetched()
    zero_gradients(optimizers)
    return losses[0].detach()


def train(
    check: Check,
    run_dir: Path,
    is_exact: bool,
    processes: int = 1,
    shards: bool = False,
    more: dict | None = None,
) -> None:
    """Train in other processes, or go on; raises CalledProcessError if it fails, TimeoutExpired if
    it hangs.

    shards: FSDP2 in place of DDP.
    more: settings beside those of all runs.
    """
    code = "from pretrain.__main__ import run; run()"
    if is_exact:
        code = f"import torch; torch.use_deterministic_algorithms(True); {code}"
    size = {"num_hidden_layers": 2}
    if not check.is_gpu:
        size |= {"hidden_size": 64, "num_attention_heads": 1}
    train = {"phases": [], "max_steps": STEPS, "warmup_steps": 2, "save_every": STEPS // 2}
    train |= {"global_batch_size": 32, "micro_batch_size": 16, "log_every": 2}
    train |= {"eval_every": 100, "eval_examples": 16, "learning_rate": 1e-4}
    settings: dict = {"run_dir": run_dir, "data_dir": check.data_dir}
    settings |= {f"model.{name}": value for name, value in size.items()}
    settings |= {f"train.{name}": value for name, value in train.items()}
    options = [f"{name}={value}" for name, value in (settings | (more or {})).items()]
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic algorithms ask for it
    # a kernel is chosen by the first batch that it meets, so two runs share them
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(run_dir.parent / "kernels")}
    if not check.is_gpu:
        env |= {"CUDA_VISIBLE_DEVICES": ""}
    if shards:
        env |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    command = [sys.executable, "-c", code, str(ROOT / "configs/bert_base.yaml"), *options]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [sys.executable, *launcher, str(processes), "--no-python", *command]
    how = {"capture_output": True, "text": True, "timeout": MOST_SECONDS}
    done = subprocess.run(command, env=env, cwd=ROOT, **how)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()


def read_weights(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Read the weights of a checkpoint."""
    return load_file(run_dir / f"checkpoints/step-{step:08}/model.safetensors")


def read_norms(run_dir: Path) -> list[float]:
    """Read the gradient norms that a run has logged."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return how far the weights of one model are from those of another."""
    return float(sum((a[name] - b[name]).double().square().sum() for name in a) ** 0.5)


def task_of(check: Check, size: str, length: int, is_full: bool) -> Task:
    """Take four batches of a size and length; on a CPU a tiny model and few sequences."""
    if check.is_gpu:
        return make_task(check.data_dir, size, length, "cuda", is_full=is_full, count=4)
    task = make_task(check.data_dir, "tiny", length, "cpu", is_full=is_full, count=1)
    return replace(task, batches=[batch.slice(0, 2) for batch in task.batches])


STAGES: dict[str, Callable[[Check], None]] = {
    "attention": check_attention,
    "learning": check_learning,
    "shapes": check_shapes,
    "resume": check_resume,
    "processes": check_processes,
    "trainer": check_trainer,
    "base": lambda check: check_speed(check, "base", 128),
    "large": lambda check: check_speed(check, "large", 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", required=True, type=Path, help="a prepared data_dir")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no GPU here; --device cpu tries the stages on a CPU")
    if args.device == "cuda":
        check_compiler()
    args.out = check_writable(args.out)
    check = Check(torch.device(args.device), args.data.resolve())
    check.note("device", torch.cuda.get_device_name() if check.is_gpu else "cpu")
    check.note("torch", torch.__version__)
    for name in args.only:
        began = time.perf_counter()
        try:
            STAGES[name](check)
        except Exception as error:
            traceback.print_exc()
            check.keep(name, f"{type(error).__name__}", "an answer", "WRONG")
        check.note(f"{name}: seconds", f"{time.perf_counter() - began:.0f}")
        write_file(args.out, (json.dumps(check.rows, indent=1) + "\n").encode())
    sys.exit(check.is_wrong)


if __name__ == "__main__":
    run_command(main)
