"""`benchmark.py learn`: compare what the same model learns in the same CPU time on one core.

The peer is transformers' `BertForPreTraining` with AdamW under Accelerate, on static
pairs of ours that its whole-word collator masks anew each epoch: fused AdamW, linear warm-up and
decay, each batch cut to its longest sequence; both in bf16 where the machine has instructions for
it. Building its pairs and evaluating take no time from it. Both models are evaluated by our
evaluation on the held-out documents.

`python scripts/bench_learn.py {ours,peer} MINUTES CONFIG [key=value ...]` runs one side.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bench_peers
import torch
from accelerate import Accelerator
from bench_figures import ROOT, quiet, show

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary
from pretrain.config import Config
from pretrain.evaluate import HeldOut, evaluate
from pretrain.models.bert import PretrainingModel
from pretrain.processes import choose_precision
from pretrain.read_export import load_export
from pretrain.train import train

PEER_BATCH_SIZE, PEER_RATE = 32, 1e-3
PEER_SHARE = 0.15  # of tokens masked, by its collator and in the evaluation of both
PEER_EXAMPLES = 40_000  # more than it sees in 20 minutes
TRIAL_STEPS = 100  # of ours, to find how many steps fit into the time


def measure_learning(config: DataConfig, path: str, minutes: float) -> None:
    """Train both sides for the same CPU time and print their held-out metrics."""
    with quiet():
        prepare(config)
    sides = [learn(side, minutes, path) for side in ("ours", "peer")]
    found = []
    for side in sides:
        out, _ = side.communicate()
        if side.returncode:
            raise UserError("learning stopped; its errors are above")
        fields = (field.split("=") for field in out.splitlines()[-1].split())
        found.append({name: float(value) for name, value in fields})
    for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy"):
        show(
            f"held-out {name} after {minutes:g} minutes of a core, against transformers",
            "nats" if name == "mlm_loss" else "share",
            "ours <= peer - 0.5" if name == "mlm_loss" else "",
            *([side[f"eval/{name}"]] for side in found),
            smaller_is_better=name == "mlm_loss",
        )


def learn(side: str, minutes: float, config_path: str) -> subprocess.Popen:
    """Start one side in its own process; its last line of output holds the held-out metrics."""
    precision = f"train.precision={choose_precision('auto', on_gpu=False)}"
    command = [sys.executable, __file__, side, str(minutes), config_path, precision]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def ours(config: Config, vocabulary: Vocabulary, minutes: float) -> PretrainingModel:
    """Train with this project, without evaluation, for as many steps as fit."""

    def run(name: str, steps: int) -> float:
        settings = replace(
            config.train,
            max_steps=steps,
            warmup_steps=steps // 20,
            eval_every=10**9,
            eval_examples=1,
            save_every=10**9,
        )
        start = time.process_time()
        train(replace(config, run_dir=str(Path(folder) / name), train=settings))
        return time.process_time() - start

    with TemporaryDirectory() as folder:
        run("warm-up", 1)
        once, more = run("one", 1), run("some", TRIAL_STEPS)
        steps = max(int((60 * minutes - once) * (TRIAL_STEPS - 1) / (more - once)), 1)
        seconds = run("all", steps)
        print(f"ours: {steps} steps in {seconds / 60:.2f} minutes", file=sys.stderr)
        return load_export(Path(folder) / "all" / "export")


def peer(config: Config, vocabulary: Vocabulary, minutes: float) -> PretrainingModel:
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    model = PretrainingModel(config.model, len(vocabulary))
    other = bench_peers.peer_model(model, len(vocabulary))

    data_dir = Path(config.data_dir)
    store = TokenStore.open(data_dir / "store", "train", vocabulary)
    unmasked = replace(config.data, masked_lm_prob=1e-9)
    source = BatchSource(store, unmasked, config.seed)
    batch = source.batch(0, min(PEER_EXAMPLES, source.epoch_size(0)))
    length = config.data.max_seq_length
    examples = list(bench_peers.padded_examples(batch, vocabulary.continues, length))
    for example, label in zip(examples, batch.next_sentence_label.tolist(), strict=True):
        example["next_sentence_label"] = label
    loader = torch.utils.data.DataLoader(
        examples,
        PEER_BATCH_SIZE,
        shuffle=True,
        collate_fn=bench_peers.collator(data_dir / "vocab", "pt"),
    )
    optimizer = torch.optim.AdamW(other.parameters(), PEER_RATE, weight_decay=0.01, fused=True)
    precision = config.train.precision.replace("fp32", "no")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    other, optimizer, loader = accelerator.prepare(other, optimizer, loader)
    other.train()
    torch.set_float32_matmul_precision("medium")
    start, steps, done = time.process_time(), 0, 0.0
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    while done < 1:
        inputs = next(batches)
        longest = int(inputs["attention_mask"].sum(1).max())
        inputs = {n: v[:, :longest].contiguous() if v.dim() == 2 else v for n, v in inputs.items()}
        accelerator.backward(other(**inputs).loss)
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
        done = (time.process_time() - start) / (60 * minutes)
        for group in optimizer.param_groups:
            group["lr"] = PEER_RATE * max(min(done / 0.1, (1 - done) / 0.9), 0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print(f"peer: {steps} steps in {minutes:.2f} minutes", file=sys.stderr)
    weights = accelerator.unwrap_model(other).state_dict()
    model.load_state_dict(model.config.family.from_hf(weights, model.state_dict()))
    return model


def main() -> None:
    side, minutes, config_path, *overrides = sys.argv[1:]
    config = load_config(Config, config_path, overrides)
    vocabulary = read_vocabulary(Path(config.data_dir) / "vocab")
    model = (ours if side == "ours" else peer)(config, vocabulary, float(minutes))
    accelerator, store_dir = Accelerator(cpu=True), Path(config.data_dir) / "store"
    held_out = HeldOut(
        store_dir,
        TokenStore.open(store_dir, "train", vocabulary),
        replace(config.data, masked_lm_prob=PEER_SHARE),
        config.train.eval_examples,
        config.train.micro_batch_size,
        accelerator,
    )
    metrics = evaluate(model, held_out, accelerator)
    print(*(f"{name}={value}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
