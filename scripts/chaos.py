"""Interrupt a run and a preparation at random and at named points, start them again, and compare
what they end with, bit by bit, with one that nothing interrupted:
`python scripts/chaos.py CONFIG --out FOLDER [--each 6] [--kinds kill signal ...] [--seed 0]`.

`mixed` faults come one after the other, at each start of the same run, until it ends.

Use a recipe of few steps, such as `train.max_steps: 12` with checkpoints and evaluations between,
whose data are prepared; for `elastic` without dropout, or with `train.micro_batch_size` a quarter
of the global one, since dropout is drawn for each pass. Each fault is planted at one call of a
function and writes a file first, so that one that never came is counted too. After a signal at most
one more step may begin, none if the run ends with exit code 0, and the newest checkpoint has to be
of the last step. Prints a line a fault, and a table by kind; exits with code 1 if anything did not
survive.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import check, run_command
from data_pipeline.common.folders import hash_file
from data_pipeline.config_file import load_config
from pretrain.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    read_state,
    step_of,
)
from pretrain.config import Config
from pretrain.tracking import read_metrics

# Where a fault may come: module:function, whose calls a run without faults counts first.
TRAINING = (
    "pretrain.train:learning_rate",  # each step
    # planning and reading, in a thread
    "data_pipeline.sampling.batch_source:BatchSource.build_steps",
    "pretrain.models.bert:PretrainingModel.score",  # evaluation
    "pretrain.train:save_run",
    *(f"pretrain.checkpoint:{name}" for name in ("save_file", "hash_file", "to_json", "sync")),
    "pretrain.train:export_checkpoint",
    "pretrain.export:save_file",
    "pretrain.train:refresh_report",
)
PREPARATION = tuple(
    f"data_pipeline.common.folders:{name}" for name in ("write_file", "sync_files", "hash_file")
)
PATIENCE = 30.0  # seconds that the other ranks have to end too
SIZES = (50_000, 200_000)  # bytes that a file may have where the disk is full
STOPS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
FAULTS = {  # kind -> what one process does, the exit codes that may follow, processes, points
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", {-9, 1, 137}, (1, 2), TRAINING),
    "signal": ("os.kill(os.getpid(), signal.{stop})", {75, 0}, (1, 2), TRAINING),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", {1}, (2,), TRAINING[:1]),
    "disk": ("limit_files({size})", {2}, (1, 2), TRAINING[3:7]),
    "prepare": ("os.kill(os.getpid(), signal.SIGKILL)", {-9, 137}, (1,), PREPARATION),
}
TRAINED = ("kill", "signal", "stop", "disk")  # those that come to training
KINDS = (*FAULTS, "damage", "elastic", "mixed")
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {  # what becomes of a file; None: it is gone
    "a flipped bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + bytes(1),
    "missing": lambda data: None,
}
PLANT = """
import hashlib, importlib, os, resource, runpy, signal, sys
plan, rank = {plan!r}, os.environ.get("RANK", "0")

def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def wrap(point, before):
    module, _, name = point.partition(":")
    home = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        home = getattr(home, part)
    real, calls = getattr(home, last), []
    def planted(*arguments, **options):
        calls.append(1)
        before(len(calls), *arguments)
        return real(*arguments, **options)
    setattr(home, last, planted)

def note(name, text):
    with open(os.path.join(plan["notes"], name + "-" + rank), "a") as file:
        print(text, file=file)

def fail(number, *_):
    if number == plan["number"] and rank == plan["rank"]:
        note("fired", step[0])
        exec(plan["fault"])

step = [-1]

def see(number, seed, of_run, *_):
    step[0] = of_run
    note("steps", of_run)

def list_sequences(number, objectives, batches, *_):
    for batch in batches:
        ends = batch.cu_seqlens.tolist()
        for a, b in zip(ends, ends[1:]):
            digest = hashlib.sha256(batch.input_ids[a:b].numpy().tobytes()).hexdigest()[:16]
            note("sequences", str(number) + " " + digest)

for point in plan["counted"]:
    wrap(point, lambda number, *_, point=point: note("calls", point))
if plan["fault"]:
    if plan["program"] == "pretrain":
        wrap("pretrain.train:dropout_seed", see)
    wrap(plan["point"], fail)
if plan["lists"]:
    wrap("pretrain.train:count_labels", list_sequences)
runpy.run_module(plan["program"], run_name="__main__", alter_sys=True)
"""
Start = Callable[[list[list[str]]], int]


def start_processes(ranks: list[list[str]]) -> int:
    """Run `python` with the words of each rank; returns the exit code of the first to fail."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(len(ranks))}
    env |= {"MASTER_PORT": str(random.randrange(20000, 60000)), "LOCAL_WORLD_SIZE": str(len(ranks))}
    running = []
    for rank, words in enumerate(ranks):
        if len(ranks) > 1:
            one = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        else:
            one = {name: value for name, value in env.items() if name != "WORLD_SIZE"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running.append(subprocess.Popen([sys.executable, *words], env=one, cwd=ROOT, **quiet))
    code, end = 0, time.monotonic() + 600
    while None in (codes := [process.poll() for process in running]) and time.monotonic() < end:
        if not code and any(codes):
            code, end = next(filter(None, codes)), min(end, time.monotonic() + PATIENCE)
        time.sleep(0.05)
    for process in running:
        process.kill()
        code = code or process.wait()
    return code


class Chaos:
    """Runs of one recipe in folders of `out`, and what they have to end with.

    start: runs the ranks of a job, each given as the words after `python`.
    """

    def __init__(self, config: str, out: Path, overrides: list[str], start: Start):
        self.config, self.out, self.overrides, self.start = config, out, overrides, start
        self.whole: dict[tuple[str, int], Path] = {}

    def launch(self, folder: Path, kind: str, processes: int, notes: str, **plan) -> int:
        """Start a run or a preparation once, with a plan of faults; returns its exit code."""
        is_data = kind == "prepare"
        place = f"data_dir={folder / 'data'}" if is_data else f"run_dir={folder / 'run'}"
        (folder / notes).mkdir(parents=True)
        empty = {"counted": (), "fault": "", "lists": False, "rank": "0"}
        program = "data_pipeline" if is_data else "pretrain"
        plan = empty | {"program": program, "notes": str(folder / notes)} | plan
        # a stopped rank is found soon
        options = ["--workers", "1"] if is_data else ["train.timeout_s=20"]
        words = ["-c", PLANT.format(plan=plan), self.config, place, *self.overrides, *options]
        return self.start([words] * processes)

    def reference(self, kind: str, processes: int) -> Path:
        """Make the run or preparation that nothing interrupts, once; returns its folder."""
        key = ("prepare" if kind == "prepare" else "train"), processes
        if key not in self.whole:
            folder = self.out / "whole" / f"{key[0]}-{processes}"
            counted = PREPARATION if kind == "prepare" else TRAINING
            code = self.launch(folder, kind, processes, "notes", counted=counted)
            if code:
                raise SystemExit(f"the run without faults ended with exit code {code}")
            self.whole[key] = folder
        return self.whole[key]

    def interrupt(self, kind: str, number: int, rng: random.Random) -> dict:
        """Plant one fault, start again until the end, and compare; returns what came of it."""
        fault, codes, choices, points = FAULTS[kind]
        processes = choices[number % len(choices)]
        whole = self.reference(kind, processes)
        rank = choose_rank(kind, processes, rng)
        calls = count_calls(whole, rank)
        points = [point for point in points if calls[point]]
        point = points[5 * number // len(choices) % len(points)]  # few faults reach far
        call = rng.randint(1, calls[point])
        fault = fault.format(stop=STOPS[number % len(STOPS)], size=rng.choice(SIZES))
        folder = self.out / f"{kind}-{number}"
        plan = {"point": point, "number": call, "rank": rank, "fault": fault}
        first = self.launch(folder, kind, processes, "first", **plan)
        fired = (folder / "first" / f"fired-{rank}").exists()
        went_on = kind == "signal" and fired and goes_on(folder, "first", rank, first)
        again = self.launch(folder, kind, processes, "second")
        difference = explain(folder, whole)
        return plan | {
            "kind": kind,
            "processes": processes,
            "fired": fired,
            "codes": [first, again],
            "survived": first in codes and again == 0 and not difference and not went_on,
            "difference": difference or "the signal was not obeyed" * went_on,
        }

    def damage(self, number: int) -> dict:
        """Damage a file of the newest checkpoint of a finished run in one of the ways, start again,
        and compare; it has to be set aside, and the run to go on from the one before."""
        whole, folder = self.reference("kill", 1), self.out / f"damage-{number}"
        shutil.copytree(whole / "run", folder / "run")
        newest = newest_checkpoint(folder / "run/checkpoints")
        files = sorted(newest.iterdir())
        path, way = files[number % len(files)], [*DAMAGES][number // len(files) % len(DAMAGES)]
        data = DAMAGES[way](path.read_bytes())
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        code = self.launch(folder, "damage", 1, "again")
        aside = newest.with_name(newest.name + ".corrupt").exists()
        difference = explain(folder, whole)
        return {
            "kind": "damage",
            "point": f"{path.name}, {way}",
            "fired": True,
            "codes": [code],
            "survived": code == 0 and aside and not difference,
            "difference": difference or "it was not set aside" * (not aside),
        }

    def mix(self, count: int, rng: random.Random) -> Iterator[dict]:
        """Interrupt runs of 1 and of 2 processes in turn by faults of all kinds, start after start
        until each ends, and compare; yields a row a fault, `count` in all."""
        came, runs = 0, 0
        while came < count:
            folder, processes = self.out / f"mixed-{runs}", 1 + runs % 2
            whole = self.reference("kill", processes)
            rows, runs, starts, code = [], runs + 1, 0, 1
            while code:
                kind, plan = self.plan_any(whole, processes, rng) if came < count else ("", {})
                code = self.launch(folder, "mixed", processes, f"start-{starts}", **plan)
                if any((folder / f"start-{starts}").glob("fired-*")):
                    came += 1
                    went_on = kind == "signal" and goes_on(
                        folder, f"start-{starts}", plan["rank"], code
                    )
                    row = {"kind": "mixed", "processes": processes, "start": starts}
                    row |= {"codes": [code], "survived": code in FAULTS[kind][1] and not went_on}
                    rows.append(plan | row)
                elif code:
                    raise SystemExit(f"a start without a fault ended with exit code {code}")
                starts += 1
            difference = explain(folder, whole)  # any of them may have made it
            for row in rows:
                survived = row["survived"] and not difference
                yield row | {"fired": True, "survived": survived, "difference": difference}

    def plan_any(self, whole: Path, processes: int, rng: random.Random) -> tuple[str, dict]:
        """Draw a fault for a run of some processes; returns its kind and its plan. It comes in the
        first half of a run, since a start may have little left to do."""
        kind = rng.choice([kind for kind in TRAINED if processes in FAULTS[kind][2]])
        fault, _, _, points = FAULTS[kind]
        rank = choose_rank(kind, processes, rng)
        calls = count_calls(whole, rank)
        point = rng.choice([point for point in points if calls[point]])
        number = rng.randint(1, -(-calls[point] // 2))
        fault = fault.format(stop=rng.choice(STOPS), size=rng.choice(SIZES))
        return kind, {"point": point, "number": number, "rank": rank, "fault": fault}

    def change_processes(self, number: int, rng: random.Random) -> dict:
        """Stop a run three times and go on with 1, 2, 4 and 1 processes; every sequence has to come
        once, in its step."""
        whole = self.out / "sequences"
        if not whole.exists() and self.launch(whole, "elastic", 1, "notes", lists=True):
            raise SystemExit("the run without faults failed")
        wanted = sequences(whole / "notes")
        steps = sorted(rng.sample(range(1, len(wanted)), 3))
        folder, codes, fired = self.out / f"elastic-{number}", [], 0
        found, done, repeated = {}, 0, False
        for turn, processes in enumerate((1, 2, 4, 1)):
            plan = {"lists": True, "rank": str(rng.randrange(processes))}
            if turn < 3:
                plan |= {"fault": f"os.kill(os.getpid(), signal.{STOPS[turn]})"}
                plan |= {"point": TRAINING[0], "number": max(steps[turn] - done, 1)}
            codes.append(self.launch(folder, "elastic", processes, f"turn-{turn}", **plan))
            fired += any((folder / f"turn-{turn}").glob("fired-*"))
            seen = sequences(folder / f"turn-{turn}")
            seen = {done + step: names for step, names in seen.items()}
            repeated |= bool(found.keys() & seen.keys())
            found |= seen
            done = read_state(newest_checkpoint(folder / "run/checkpoints"))["step"]
        drift = largest_difference(folder, whole)
        differs = "sequences" if found != wanted or repeated else ""
        differs = differs or "weights" * (drift > 1e-4)
        return {
            "kind": "elastic",
            "point": f"{steps}, 1, 2, 4 and 1 processes",
            "drift": drift,  # sums are taken in another order
            "fired": fired == 3,
            "codes": codes,
            "survived": codes == [75, 75, 75, 0] and not differs,
            "difference": differs,
        }


def goes_on(folder: Path, notes: str, rank: str, code: int) -> bool:
    """Tell whether a run has gone on after a signal: for more than a step, or to its end although
    steps were left; or whether its newest checkpoint is not of its last step."""
    fired = int((folder / notes / f"fired-{rank}").read_text())
    path = folder / notes / f"steps-{rank}"
    steps = set(map(int, path.read_text().split())) if path.exists() else set()
    if len([step for step in steps if step > fired]) > (code != 0):
        return True
    newest = newest_checkpoint(folder / "run/checkpoints")
    return bool(steps) and (newest is None or step_of(newest) != max(steps) + 1)


def choose_rank(kind: str, processes: int, rng: random.Random) -> str:
    """Choose the rank that a fault comes to; the first alone writes, and so meets a full disk."""
    return str(rng.randrange(processes) if kind != "disk" else 0)


def count_calls(whole: Path, rank: str) -> Counter[str]:
    """Count the calls of each point by a rank of the run that nothing interrupted."""
    return Counter((whole / "notes" / f"calls-{rank}").read_text().splitlines())


def sequences(notes: Path) -> dict[int, list[str]]:
    """Read which sequences all ranks have trained on: step since the start -> sorted digests."""
    found: dict[int, list[str]] = {}
    for path in notes.glob("sequences-*"):
        for line in path.read_text().splitlines():
            step, name = line.split()
            found.setdefault(int(step), []).append(name)
    return {step: sorted(names) for step, names in found.items()}


def explain(folder: Path, whole: Path) -> str:
    """Compare what two runs or preparations have ended with; returns "" or what differs."""
    if (whole / "data").exists():
        a, b = (hash_store(path / "data/store") for path in (folder, whole))
        return "" if a == b else "store"
    if not list_checkpoints(folder / "run/checkpoints"):
        return "no checkpoint"
    for name in ("model", "optimizer"):
        a, b = (read_tensors(path, name) for path in (folder, whole))
        if a.keys() != b.keys() or any(not a[key].equal(b[key]) for key in a):
            return name
    a, b = (json.dumps(read_record(path)) for path in (folder, whole))
    if a != b:
        return "metrics.jsonl"
    a, b = (path / "run/export/model.safetensors" for path in (folder, whole))
    return "" if a.exists() and a.read_bytes() == b.read_bytes() else "export"


def largest_difference(folder: Path, whole: Path) -> float:
    """Compare the weights that two runs have ended with."""
    a, b = (read_tensors(path, "model") for path in (folder, whole))
    return max((a[name] - b[name]).abs().max().item() for name in b)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the model or the optimizer that a run has ended with."""
    return load_file(newest_checkpoint(folder / "run/checkpoints") / f"{name}.safetensors")


def read_record(folder: Path) -> list[dict]:
    """Read the record of a run without speeds and warnings of waiting, which no two runs share."""
    lines = read_metrics(folder / "run/metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def hash_store(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): hash_file(path)
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def summarize(results: list[dict]) -> str:
    """Draw the table: kind, tried, fired, survived."""
    rows = ["| fault | tried | came | survived |", "| --- | --- | --- | --- |"]
    for kind in dict.fromkeys(one["kind"] for one in results):
        some = [one for one in results if one["kind"] == kind]
        counts = len(some), sum(one["fired"] for one in some), sum(one["survived"] for one in some)
        rows.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


def run_chaos(chaos: Chaos, kinds: list[str], each: int, seed: int) -> list[dict]:
    """Try `each` faults of each kind; returns a row a fault, and prints it."""
    results = []
    for kind in kinds:
        for row in try_kind(chaos, kind, each, seed):
            print(json.dumps(row), flush=True)
            results.append(row)
    return results


def try_kind(chaos: Chaos, kind: str, each: int, seed: int) -> Iterator[dict]:
    """Try `each` faults of one kind; yields a row a fault."""
    if kind == "mixed":
        yield from chaos.mix(each, random.Random(f"{seed} {kind}"))
        return
    for number in range(each):
        rng = random.Random(f"{seed} {kind} {number}")
        if kind == "damage":
            yield chaos.damage(number)
        elif kind == "elastic":
            yield chaos.change_processes(number, rng)
        else:
            yield chaos.interrupt(kind, number, rng)


def main() -> None:
    parser = config_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for all runs")
    parser.add_argument("--each", type=int, default=6, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    check(args.each > 0, f"--each {args.each}: wanted 1 or more")
    load_config(Config, args.config, args.overrides)  # before there is a folder
    args.out.mkdir(parents=True)
    chaos = Chaos(args.config, args.out, args.overrides, start_processes)
    results = run_chaos(chaos, args.kinds, args.each, args.seed)
    print(summarize(results))
    sys.exit(0 if all(one["fired"] and one["survived"] for one in results) else 1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this
    run_command(main)
