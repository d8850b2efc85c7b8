"""Judge an exported model by a task: fine-tune it, beside the same network without pretraining and
a bag of words, over several seeds and learning rates.

python scripts/finetune.py --model DIR --task classification --train FILE --dev FILE --out DIR

The learning rate is chosen on dev, by the mean over the seeds; only with that one is the test file
judged. Writes DIR/results.json and prints a table. docs/finetuning.md has a command for each task.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from needed import check_packages

check_packages("torch", "transformers", "data_pipeline")

import numpy as np
import tokenizers
import torch
import transformers
from finetune_data import Example, list_unread, read_examples
from finetune_metrics import find_spans
from finetune_tables import COLUMNS
from finetune_tasks import TASKS, Task, Unit
from finetune_train import (
    LENGTH_MULTIPLE,
    POOLS,
    Network,
    Recipe,
    Run,
    Split,
    build_network,
    finetune,
    fit_head,
    keep_states,
    sorted_batches,
    standardize,
)
from finetune_words import STRENGTHS, fit_words, vectorize
from transformers import AutoTokenizer

from data_pipeline.common.errors import check, run_command
from data_pipeline.common.folders import check_writable, hash_file, write_file
from data_pipeline.common.reading import read_json
from data_pipeline.common.system import progress_bar
from pretrain.families import longest_sequence, read_settings
from pretrain.model_card import project_version
from pretrain.models.cpu import configure_cpu
from pretrain.processes import choose_precision
from pretrain.read_export import check_ids, check_model, load_pretrained

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of a frozen model's head
TITLES = {"pretrained": "pretrained", "random": "random weights", "bow": "bag of words"}
Search = dict[tuple[float, int], Run]  # (setting, seed) -> what came of it


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of an exported model")
    add("--task", choices=TASKS, required=True)
    for split in ("train", "dev", "test"):
        add(f"--{split}", type=Path, required=split != "test", help="formats: docs/finetuning.md")
    add("--out", type=Path, required=True, help="folder for results.json")
    add("--columns", nargs="+", default=[], metavar="WHAT=NAME", help=f"WHAT: {', '.join(COLUMNS)}")
    add("--init", choices=("pretrained", "random"), default="pretrained", help="what is judged")
    add("--also", "--baseline", nargs="+", default=[], choices=("random", "bow"), help="beside it")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--learning-rates", nargs="+", type=float, default=[5e-5, 1e-4, 3e-4])
    add("--metric", help="that settings are chosen by; the first of the task's if not given")
    add("--epochs", type=int, default=3, help="the best one on dev is kept")
    add("--patience", type=int, help="stop after so many epochs that are no better on dev")
    add("--batch-size", type=int, default=32)
    add("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    add("--max-length", type=int, help="tokens of a sequence; 128, or 384 for qa, if not given")
    add("--max-train", type=int, help="train on so many examples, drawn anew for each seed")
    add("--dropout", type=float, help="instead of the probabilities in the model's config")
    add("--pool", choices=POOLS, help="what a sentence is judged by; pooler if not given")
    add("--freeze", action="store_true", help="train the head only (--learning-rates is not used)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    results = args.out / "results.json"
    check(not results.exists(), f"{results} is there already; choose another --out, or remove it")
    check_settings(args)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        configure_cpu()
    bf16 = choose_precision(args.precision, device.type == "cuda") == "bf16"
    splits, task = read_splits(args, device)
    described = {  # what cannot be read, or written, fails before the training
        "model": describe_model(args.model),
        "data": {name: describe_file(getattr(args, name), s) for name, s in splits.items()},
    }
    results = check_writable(results)

    systems = {}
    for system in dict.fromkeys([args.init, *args.also]):
        if system == "bow":
            name, runs = "C", judge_words(args, task, splits)
        else:
            name, runs = judge_network(args, system == "random", task, splits, device, bf16)
        systems[system] = summarize(name, runs, args.metric, task, splits)
        describe_runs(TITLES[system], systems[system], args.metric)
    if baseline := task.baseline():
        title, label = baseline
        systems[title] = {
            name: spread([task.score(split.examples, [label] * len(split.examples))])
            for name, split in splits.items()
            if name != "train"
        }

    found = {
        "settings": vars(args),
        **described,
        "systems": systems,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions(),
        "machine": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "precision": "bf16" if bf16 else "fp32",
            "threads": torch.get_num_threads(),
        },
    }
    write_file(results, (json.dumps(found, indent=2, default=str) + "\n").encode())
    print_table(systems, args.metric, list(splits)[1:])
    print(f"{found['seconds']:,.0f} s; all figures are in {results}")


# --- before the first run -------------------------------------------------------------------------


def check_settings(args: argparse.Namespace) -> None:
    """Check what needs neither data nor model, and bound `max_length` by the model's config."""
    check_model(args.model)
    check(
        (args.model / "tokenizer.json").exists(),
        f"{args.model} has no tokenizer.json; copy that of the model into it, or, where it has "
        "older files such as vocab.txt, load and save the tokenizer by transformers' AutoTokenizer",
    )
    check(not args.out.is_file(), f"--out {args.out} is a file; name a folder")
    settings = read_settings(args.model)
    layers, longest = settings.get("num_hidden_layers", 12), longest_sequence(settings)
    check(
        args.pool != "last4" or layers >= 4,
        f"--pool last4: {args.model} has {layers} layers; use --pool mean",
    )
    longest -= longest % LENGTH_MULTIPLE  # to which sequences are padded
    least = min(16, longest)
    usual = min(384 if args.task == "qa" else 128, longest)
    args.max_length = usual if args.max_length is None else args.max_length
    check(
        least <= args.max_length <= longest,
        f"--max-length {args.max_length}: wanted {least} to {longest}, whole multiples of "
        f"{LENGTH_MULTIPLE} of which {args.model} has positions",
    )
    for name in ("epochs", "patience", "batch_size", "max_train"):
        value = getattr(args, name)
        check(value is None or value > 0, f"--{name.replace('_', '-')} {value}: wanted 1 or more")
    for rate in args.learning_rates:
        check(0 < rate < math.inf, f"--learning-rates {rate:g}: wanted finite numbers above 0")
    check(0 <= args.warmup < 1, f"--warmup {args.warmup}: wanted 0 to below 1")
    dropout = args.dropout
    check(dropout is None or 0 <= dropout < 1, f"--dropout {dropout}: wanted 0 to below 1")
    for name, values in (("seeds", args.seeds), ("learning-rates", args.learning_rates)):
        check(len({*values}) == len(values), f"--{name} holds a number twice")
    for seed in args.seeds:
        check(0 <= seed < 1 << 64, f"--seeds {seed}: wanted 0 or more, and less than 2 ** 64")
    check(
        args.pool is None or not TASKS[args.task].per_token,
        f"--pool {args.pool}: {args.task} judges each token by its own state; leave it out",
    )
    args.pool = args.pool or "pooler"
    metrics = TASKS[args.task].metrics
    args.metric = args.metric or metrics[0]
    known = ", ".join(metrics)
    check(args.metric in metrics, f"--metric {args.metric}: {args.task} has {known}")
    is_classification = args.task in ("classification", "multi_label")
    check("bow" not in args.also or is_classification, f"--also bow: not for {args.task}")
    check(
        "bow" not in args.also or find_spec("sklearn"),
        "--also bow needs scikit-learn; install it: pip install -e '.[finetune]'",
    )
    columns = [column.partition("=")[::2] for column in args.columns]
    for what, name in columns:
        check(
            what in COLUMNS and name,
            f"--columns {what}: wanted WHAT=NAME, WHAT one of {', '.join(COLUMNS)}",
        )
    args.columns = dict(columns)
    check(len(args.columns) == len(columns), "--columns names one thing twice; give each once")


def read_splits(args: argparse.Namespace, device: torch.device) -> tuple[dict[str, Split], Task]:
    """Read and encode train, dev and test, and tell how large they are."""
    paths = {name: getattr(args, name) for name in ("train", "dev", "test") if getattr(args, name)}
    examples = {name: read_examples(path, args.task, args.columns) for name, path in paths.items()}
    if args.max_train and args.max_train >= len(examples["train"]):
        print(f"note: {args.train} has no more than --max-train {args.max_train:,}: all are taken")
        args.max_train = None
    if unread := list_unread(args.train, args.task, args.columns):
        names = ", ".join(name or "(without a name)" for name in unread)  # as pandas' index is
        print(f"note: {args.train}: columns that are not read: {names}")
    task = TASKS[args.task](examples["train"])
    if args.task in ("classification", "multi_label", "regression"):
        read = [example for part in examples.values() for example in part]
        places = {len(example.texts): example.place for example in reversed(read)}  # the first ones
        check(
            len(places) == 1,
            f"{places.get(1)} has no second sentence, and {places.get(2)} has one; name its column "
            "with --columns second=NAME",
        )
    check(
        args.task not in ("classification", "tagging") or task.outputs > 1,
        f"{args.train} holds one label only; wanted two or more",
    )
    check(task.outputs, f"{args.train} holds no label")
    for name, part in examples.items():  # such as -1, the label of GLUE's test sets
        check(
            args.task != "regression" or len({example.label for example in part}) > 1,
            f"{paths[name]} holds one number only; wanted two or more",
        )
    tokenizer, splits = load_pretrained(AutoTokenizer, args.model), {}
    for name, part in examples.items():
        units = task.encode(part, tokenizer, args.max_length)
        check_ids(tokenizer, (ids for unit in units for ids, _ in unit.sequences), args.model)
        judged = [] if name == "train" else units  # `judge_network` draws the others
        splits[name] = Split(part, units, sorted_batches(judged, 4 * args.batch_size, device))
        describe_split(args, name, splits[name], task)
        if args.task == "tagging":
            describe_tags(args, name, part, task)
    return splits, task


def describe_split(args: argparse.Namespace, name: str, split: Split, task: Task) -> None:
    """Print the size of a split, the labels of train, and how many sequences may have been cut."""
    units = split.units
    words = f"{name}: {len(split.examples):,} examples"
    if args.task == "qa":
        words += f" in {len(units):,} windows"
    if name == "train" and hasattr(task, "labels"):
        words += f" of {len(task.labels):,} labels ({list_few(task.labels)})"
    if lost := sum(unit.target is None for unit in units):
        words += f", {lost:,} windows without a known answer"
    full = sum(unit.length == args.max_length for unit in units) / len(units)
    print(f"{words}; {full:.1%} reach the limit of {args.max_length} tokens")


def describe_tags(args: argparse.Namespace, name: str, examples: list[Example], task: Task) -> None:
    """Print what F1 counts as an entity in a split, and the tags that train lacks."""
    tags = Counter(tag for example in examples for tag in example.label)
    spans = [span for example in examples for span in find_spans(example.label, tags)]
    kinds = sorted({kind for *_, kind in spans})
    few = list_few([kind or "unnamed" for kind in kinds])
    print(f"{name}: {len(spans):,} entities of {len(kinds):,} types ({few})")
    if unknown := [tag for tag in tags if tag not in task.labels]:
        number, few = sum(tags[tag] for tag in unknown), ", ".join(unknown[:3])
        print(f"note: {number:,} words have tags that {args.train} lacks ({few}): all wrong")


def list_few(names: list[str]) -> str:
    """List the first five names, with dots if there are more."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def draw_examples(count: int, wanted: int | None, seed: int) -> list[int]:
    """Draw the examples to train on: all, or `wanted` of them, a set of its own for each seed."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(np.random.default_rng(seed).permutation(count)[:wanted].tolist())


# --- the systems ----------------------------------------------------------------------------------


def judge_network(
    args: argparse.Namespace,
    is_random: bool,
    task: Task,
    splits: dict[str, Split],
    device: torch.device,
    bf16: bool,
) -> tuple[str, Search]:
    """Train the network with every setting and seed.

    Returns the name of the setting, and the runs.
    """

    def network(seed: int) -> Network:
        return build_network(args.model, is_random, task, args.pool, args.dropout, seed).to(device)

    def train_units(seed: int) -> list[Unit]:
        chosen = set(draw_examples(len(splits["train"].examples), args.max_train, seed))
        units = splits["train"].units
        units = [unit for unit in units if unit.example in chosen and unit.target is not None]
        check(units, f"{args.train} holds nothing to train on: no passage holds an answer")
        return units

    title = TITLES["random" if is_random else "pretrained"]
    if not args.freeze:
        total = len(args.learning_rates) * args.epochs
        total *= sum(len(train_units(seed)) for seed in args.seeds)
        with progress_bar(title, total, "examples") as bar:

            def run(rate: float, seed: int) -> Run:
                patience = args.patience or args.epochs
                recipe = Recipe(
                    rate, args.epochs, patience, args.batch_size, args.warmup, args.metric, bf16
                )
                data = train_units(seed), splits["dev"], splits.get("test")
                return finetune(network(seed), task, recipe, seed, *data, bar.update)

            return "learning_rate", search(args.learning_rates, args.seeds, run)

    # a frozen encoder is run once per seed, and its head has no randomness of its own
    seeds = args.seeds if is_random or args.max_train else args.seeds[:1]
    total = sum(len(train_units(seed)) for seed in seeds)
    total += len(seeds) * sum(len(s.units) for name, s in splits.items() if name != "train")
    with progress_bar(title, total, "examples") as bar:

        @lru_cache(maxsize=1)
        def frozen(seed: int) -> tuple[Network, dict[str, Split]]:
            model, found = network(seed), {}
            for name, split in splits.items():
                units = train_units(seed) if name == "train" else split.units
                batches = sorted_batches(units, 4 * args.batch_size, device)
                keep_states(model, batches, bf16, bar.update)
                found[name] = replace(split, batches=batches)
            standardize(model, found["train"].batches)
            return model, found

        def run(penalty: float, seed: int) -> Run:
            model, found = frozen(seed)
            data = found["train"].batches, found["dev"], found.get("test")
            return fit_head(model, task, *data, penalty)

        return "penalty", search(PENALTIES, seeds, run)


def judge_words(args: argparse.Namespace, task: Task, splits: dict[str, Split]) -> Search:
    """Train the bag of words with every strength, on the examples of every seed."""
    train, *others = (split.examples for split in splits.values())

    @lru_cache(maxsize=1)
    def vectorized(seed: int) -> tuple[list[Example], list]:
        chosen = [train[i] for i in draw_examples(len(train), args.max_train, seed)]
        return chosen, vectorize(chosen, others)

    def run(strength: float, seed: int) -> Run:
        return fit_words(task, *vectorized(seed), strength, others)

    return search(STRENGTHS, args.seeds if args.max_train else args.seeds[:1], run)


def search(settings: list[float], seeds: list[int], run: Callable[[float, int], Run]) -> Search:
    return {(setting, seed): run(setting, seed) for seed in seeds for setting in settings}


# --- what came of it ------------------------------------------------------------------------------


def summarize(name: str, runs: Search, metric: str, task: Task, splits: dict[str, Split]) -> dict:
    """Choose a setting by its mean on dev, and judge test with it.

    A setting of which a run has diverged comes after all others.
    """
    by_setting: dict[float, list[Run]] = {}
    for (setting, _), run in runs.items():
        by_setting.setdefault(setting, []).append(run)

    def rank(setting: float) -> tuple[bool, float]:
        group = by_setting[setting]
        is_sound = not any(run.has_diverged for run in group)
        return is_sound, statistics.mean(run.dev[run.best][metric] for run in group)

    chosen = max(by_setting, key=rank)
    scores = {"dev": spread([run.dev[run.best] for run in by_setting[chosen]])}
    if test := splits.get("test"):
        scores["test"] = spread([task.score(test.examples, r.test) for r in by_setting[chosen]])
    return {
        "setting": name,
        "chosen": chosen,
        **scores,
        "runs": [
            {
                name: setting, "seed": seed, "dev": run.dev, "best_epoch": run.best + 1,
                "seconds": round(run.seconds, 2), "has_diverged": run.has_diverged,
            }
            for (setting, seed), run in runs.items()
        ],
    }  # fmt: skip


def spread(rows: list[dict[str, float]]) -> dict[str, dict]:
    """Compute the mean, standard deviation (None of one value) and values of each metric."""
    return {
        metric: {
            "mean": statistics.mean(row[metric] for row in rows),
            "std": statistics.stdev(row[metric] for row in rows) if len(rows) > 1 else None,
            "values": [row[metric] for row in rows],
        }
        for metric in rows[0]
    }


def describe_runs(title: str, system: dict, metric: str) -> None:
    """Print the best dev score of each setting, a column per seed."""
    name, rows = system["setting"], {}
    for run in system["runs"]:
        best = run["dev"][run["best_epoch"] - 1][metric]
        cell = f"{best:.3f}"
        if name == "learning_rate":  # the others are fitted at once, without epochs
            cell += f" (epoch {run['best_epoch']}{', diverged' * run['has_diverged']})"
        rows.setdefault(run[name], []).append(cell)
    print(f"{title}: dev {metric} by {name}, a column per seed")
    for setting, cells in rows.items():
        print(f"  {setting:<8g} {'  '.join(cells)}{'  *' if setting == system['chosen'] else ''}")


def describe_model(folder: Path) -> dict:
    """Identify a model by its config, the hashes of its files, and what its export says of it."""
    marker = folder / "export.json"
    found = {"folder": str(folder), "config": read_settings(folder)}
    patterns = "model*.safetensors", "pytorch_model*.bin", "tokenizer.json"
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    found["sha256"] = {path.name: hash_file(path) for path in files}
    if marker.exists():
        told = read_json(marker, {str: object}, "put an intact copy back")
        found |= {name: told[name] for name in told if name not in ("files", "schema")}
    return found


def describe_file(path: Path, split: Split) -> dict:
    return {"file": str(path), "sha256": hash_file(path), "examples": len(split.examples)}


def versions() -> dict[str, str]:
    modules = [torch, transformers, tokenizers, np]
    if "sklearn" in sys.modules:
        modules.append(sys.modules["sklearn"])
    found = {module.__name__: module.__version__ for module in modules}
    return {"project": project_version(), "python": platform.python_version(), **found}


def print_table(systems: dict[str, dict], metric: str, parts: list[str]) -> None:
    """Print a line per system: the chosen setting, mean and standard deviation over the seeds."""
    rows = [["", "setting", *(f"{part} {metric}" for part in parts)]]
    for name, system in systems.items():
        setting = f"{system['setting']} {system['chosen']:g}" if "setting" in system else ""
        cells = []
        for part in parts:
            score = system[part][metric]
            more = "" if score["std"] is None else f" +- {score['std']:.3f}"
            cells.append(f"{score['mean']:.3f}{more}")
        rows.append([TITLES.get(name, name), setting, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


if __name__ == "__main__":
    run_command(main)
