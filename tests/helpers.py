"""What tests of several rooms share: where things are, a run as a process or here, what it left."""

import gc
import json
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from data_pipeline.config_file import load_config
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import Config
from pretrain.train import train

ROOT = Path(__file__).parents[1]
SCHEMA_1 = ROOT / "tests/fixtures/schema_1"  # written by the last version before schema 2
CPU_2 = ROOT / "configs/accelerate/cpu_2.yaml"
TWO_STEPS = ("train.max_steps=2", "train.warmup_steps=1", "train.micro_batch_size=8")
NO_DROPOUT = ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0")


def command(root: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The words of `python -m pretrain`, after `python`."""
    return ["-m", "pretrain", str(root / "config.yaml"), f"run_dir={run_dir}", *overrides]


def run(root: Path, run_dir: Path, *overrides: str, processes: int = 1, rank_1=(), **env: str):
    """Train in forks to the end; the completed process.

    rank_1: overrides that only the second rank is given.
    """
    words = command(root, run_dir, *overrides)
    ranks = [[*words, *(rank_1 if rank == 1 else ())] for rank in range(processes)]
    return fork(*ranks, **env)


# An import of the loop takes three seconds of a core, so one process does it and forks for each
# command. What a new interpreter, a launcher or a shell adds, `tests/test_commands.py` runs.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pretrain.plan", "torch.distributed.fsdp", "matplotlib.pyplot"]
    + ["transformers.models.bert.modeling_bert", "transformers.models.auto.tokenization_auto"]
)


def fork(
    *commands: list[str], folder: Path = ROOT, timeout: float = 600, **env: str
) -> subprocess.CompletedProcess:
    """Run `python` with the words of each command, as the ranks of one job if there are several.

    The exit code of the job is that of the first to fail; the others have 30 seconds to end too.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
    if len(commands) > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        env |= {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(len(commands))}
    with TemporaryDirectory() as out:
        ranks = []
        for rank, words in enumerate(commands):
            if len(commands) > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            one = FORKS.Process(target=become_python, args=(words, folder, dict(env), out))
            ranks.append(one)
            one.start()
        code, running, end = 0, ranks, time.monotonic() + timeout
        while running and time.monotonic() < end:
            wait([rank.sentinel for rank in running], end - time.monotonic())
            failed = next((rank.exitcode for rank in running if rank.exitcode), 0)
            if failed and not code:
                code, end = failed, time.monotonic() + 30
            running = [rank for rank in running if rank.exitcode is None]
        for rank in running:
            rank.kill()
        stdout, stderr = (Path(out, name).read_text("utf-8") for name in ("stdout", "stderr"))
    assert code or not running, f"not over after {timeout} s: {commands[0]}\n{stderr}"
    return subprocess.CompletedProcess(commands[0], code, stdout, stderr)


def become_python(words: list[str], folder: Path, env: dict[str, str], out: str) -> None:
    """Be the process of `python` with these words."""
    gc.freeze()  # a run collects garbage twice, and need not look through what it shares
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(out, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    option, *sys.argv[1:] = words
    if option == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    elif option == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(option).parent))
        runpy.run_path(option, run_name="__main__")


def train_here(root: Path, run_dir: Path, *overrides: str) -> None:
    train(load_config(Config, str(root / "config.yaml"), [f"run_dir={run_dir}", *overrides]))


def metrics(run_dir: Path) -> list[dict]:
    """What was recorded, without speeds, which no two runs share."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines
    ]


def newest(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = newest_checkpoint(run_dir / "checkpoints")
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    first, second = newest(a), newest(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of all files in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_hashes(export: Path) -> list[str]:
    """What `sha256sum` says of each file whose hash stands in the card of an export."""
    words, env = ["sha256sum", "-c", "README.md"], os.environ | {"LC_ALL": "C"}
    done = subprocess.run(words, cwd=export, env=env, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def write_tasks(folder: Path, train: int = 160, dev: int = 40) -> None:
    """Write a small data set for each task of fine-tuning: a word decides what is wanted."""
    rng = random.Random(0)

    def sentence(*words: str) -> list[str]:
        """Some words in random order among others."""
        others = rng.sample("the of a to and in is it that with for on as are by this".split(), 4)
        return rng.sample([*others, *words], len(others) + len(words))

    for split, count in (("train", train), ("dev", dev), ("test", dev)):
        columns = {name: [] for name in ("reviews", "pairs", "topics", "similarity", "ner")}
        choices, questions = [], []
        for i in range(count):
            good = rng.random() < 0.5
            opinion = " ".join(sentence("True" if good else "False"))
            columns["reviews"].append(f"{opinion}\t{int(good)}")
            columns["pairs"].append(f"{' '.join(sentence())}\t{opinion}\t{good}")
            found = [name for name in ("class", "string") if rng.random() < 0.5]
            columns["topics"].append(
                json.dumps({"text": " ".join(sentence(*found)), "labels": found})
            )
            number, word = rng.choice([(0.5, "class"), (1, "list"), (5, "string")])
            columns["similarity"].append(
                f'"{" ".join(sentence(word))}, ""so""",the object,{number}'
            )
            words = sentence("Python")
            tags = ["B-NAME" if word == "Python" else "O" for word in words]
            at = words.index("Python") + 1
            words[at:at], tags[at:at] = ["module"], ["I-NAME"]
            columns["ner"].append("".join(f"{w}\t{t}\n" for w, t in zip(words, tags, strict=True)))
            answer = rng.randrange(3)
            texts = [" ".join(sentence("True" if k == answer else "False")) for k in range(3)]
            choices.append(
                json.dumps({"context": "which is it", "choices": texts, "label": answer})
            )
            text, words = rng.choice(["True", "False"]), []
            passage = " ".join(sentence(text))
            answers = [{"text": text, "answer_start": passage.index(text)}]
            question = {"id": f"{split}-{i}", "question": "is it so?", "answers": answers}
            questions.append({"context": passage, "qas": [question]})
        table = {
            "reviews": ("tsv", "sentence\tlabel\n", "\n"),
            "pairs": ("tsv", "sentence1\tsentence2\tlabel\n", "\n"),
            "topics": ("jsonl", "", "\n"),
            "similarity": ("csv", "sentence1,sentence2,score\n", "\n"),
            "ner": ("conll", "", "\n"),
            "choice": ("jsonl", "", "\n"),
            "qa": ("json", "", ""),
        }
        columns["choice"] = choices
        columns["qa"] = [json.dumps({"data": [{"paragraphs": questions}]})]
        for name, (suffix, header, end) in table.items():
            path = folder / name / f"{split}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header + "".join(row + end for row in columns[name]), encoding="utf-8")
