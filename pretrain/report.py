"""Write the page of a run, or one that compares several runs: their state, their curves, and the
words that their newest checkpoints have learned.

`python -m pretrain.report RUN_DIR [RUN_DIR ...] [--out FILE]` writes `report.html` to the run
folder, as training does at each evaluation, or for several runs `compared.html` to the first of
their folders. It reads nothing but the run folders.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from data_pipeline.common.errors import check, run_command
from data_pipeline.common.folders import check_writable, write_file
from data_pipeline.common.pages import Line, draw_chart, format_short, render_template
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.checkpoint import list_checkpoints, step_of
from pretrain.config import Config
from pretrain.describe import say_duration
from pretrain.monitor import PLATEAU
from pretrain.run_record import RECENT, RunRecord
from pretrain.tracking import say_fillings

OVERFIT = 0.05  # nats above the best held-out loss, while the training loss falls
FUNCTION_WORDS, WORDS, NEIGHBOURS = 100, 9, 6  # words to pass over, to show, and neighbours of each
LEAST_LETTERS = 4  # of a word to show
MOMENTS = 5  # evaluations to show the fillings of
NEAR = 3000  # most frequent words to look for neighbours in; rare ones have hardly been trained
EXPLODED = 4  # times the median gradient norm, above which a chart is cut off
WARNINGS = {  # metric of the monitor -> what it says
    "monitor/skipped": "the gradient of a step was not finite; the step was skipped",
    "monitor/spike": "the MLM loss was far above the usual one for several steps",
    "monitor/outlier": "the MLM loss of one step was ten times the usual one",
    "monitor/exploding": "a gradient norm was far above the usual one",
    "monitor/plateau": "the model did not use context yet",
    "monitor/nsp": "the accuracy on pairs was no better than guessing",
    "monitor/unknown": "more than 5 % of the training tokens are [UNK]",
}
PAGES = ("report.html", "compared.html")  # of one run, and of several
UNTROUBLED = ("Learns", "Not evaluated yet")  # verdicts on a run
UNIGRAM_PAIRS = "eval/minimal_pairs_unigram"
FIGURES = {  # metric -> what it is, form of its value
    "eval/mlm_loss": ("held-out loss, nats", "{:.3f}"),
    "eval/mlm_bits_per_byte": ("bits per byte of text", "{:.3f}"),
    "eval/mlm_accuracy": ("masked tokens correct", "{:.1%}"),
    "eval/nsp_accuracy": ("pairs correct", "{:.1%}"),
    "eval/rtd_auc": ("replaced tokens, area under the curve", "{:.3f}"),
    "eval/minimal_pairs": ("minimal pairs correct", "{:.1%}"),
    "perf/tokens_per_second": ("tokens per second", "{:,.0f}"),
    "perf/mfu": ("model FLOP utilization", "{:.1%}"),
}
BASELINES = {  # metric -> what to compare it with, how that guesses
    "eval/mlm_loss": ("eval/unigram_entropy", "without context"),
    "eval/mlm_accuracy": ("eval/unigram_accuracy", "always the same token"),
    "eval/nsp_accuracy": ("eval/nsp_by_shared_words", "by shared words alone"),
    "eval/minimal_pairs": (UNIGRAM_PAIRS, "by token frequencies alone"),
}
PAIR_TITLES = {"nsp": "Next sentence", "sop": "Sentence order", "none": ""}


# ----------------------------------------------------------------------------------- in words


def judge_run(run: RunRecord) -> tuple[str, str]:
    """Judge where a run stands; returns the verdict and the reason for it."""
    losses, entropies = run.losses("eval"), run.series("eval/unigram_entropy")
    recorded = [line["eval/mlm_loss"] for line in run.lines if "eval/mlm_loss" in line]
    if recorded and recorded[-1] is None:
        return "Broken", "the newest held-out loss is not a finite number"
    if not losses or not entropies:
        return "Not evaluated yet", "there is no held-out loss yet"
    (_, entropy), (_, last) = entropies[-1], losses[-1]
    best_step, best = min(losses, key=lambda point: point[1])
    below = f"{abs(entropy - last):.2f} nats {'below' if last < entropy else 'above'} the unigram "
    below += f"entropy of {entropy:.2f}, the loss of a model that ignores the context"
    if last > entropy - PLATEAU:
        return "Has not left the plateau", f"the held-out loss of {last:.3f} is {below}"
    if last > best + OVERFIT:
        told = f"the held-out loss is {last:.3f}, {last - best:.2f} nats above its best at step "
        told += f"{best_step:,}"
        trained = run.losses("train")
        before = [loss for step, loss in trained if step <= best_step][-RECENT:]
        then = before or [loss for _, loss in trained[: len(trained) // 2]]
        now = [loss for _, loss in trained[-RECENT:]]
        if then and statistics.mean(now) < statistics.mean(then):
            return "Overfits", f"{told}, while the training loss has fallen"
        return "Gets worse", told + ", and the training loss has not fallen since" * bool(before)
    return "Learns", f"the held-out loss of {last:.3f} is {below}"


def say_progress(run: RunRecord) -> str:
    """Say how far a run is, and how long the rest will take."""
    steps = run.config.train.max_steps
    said = f"Step {run.step:,} of {steps:,}, {format_short(float(f'{run.tokens:.3g}'))} tokens"
    if run.step >= steps:
        return f"{said}: finished."
    seconds = run.seconds_left()
    return said + (f"; about {say_duration(seconds)} of training left." if seconds else ".")


def say_best(run: RunRecord) -> str:
    """Name the best held-out loss so far; "" if there is none."""
    losses = run.losses("eval")
    if not losses:
        return ""
    step, best = min(losses, key=lambda point: point[1])
    return f"Best held-out loss so far: {best:.3f} at step {step:,}."


def list_warnings(run: RunRecord) -> list[str]:
    """List the warnings of the monitor, with the step from which each holds."""
    said = []
    for name, text in WARNINGS.items():
        if points := run.series(name):
            said.append(f"Step {points[0][0]:,}: {text}.")
    return said


def list_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """List (what, value, what to compare it with) of the newest evaluation and log line."""
    newest = {name: points[-1] for name, points in run.columns.items()}
    judged = max((line["step"] for line in run.lines if "eval/mlm_loss" in line), default=0)
    newest = {
        name: value
        for name, (step, value) in newest.items()
        if step == judged or not name.startswith("eval/")  # pairs of an earlier phase are left out
    }
    figures = []
    for name, (what, form) in FIGURES.items():
        if name in newest:
            baseline, guess = BASELINES.get(name, ("", ""))
            beside = f"{guess} {form.format(newest[baseline])}" if baseline in newest else ""
            figures.append((what, form.format(newest[name]), beside))
    return figures


def list_differences(runs: list[RunRecord]) -> list[str]:
    """Describe, for each run, the settings in which the runs differ."""
    flat = [flatten(asdict(run.config)) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one if name != "run_dir")
    names = [name for name in names if any(one.get(name) != flat[0].get(name) for one in flat)]
    return [", ".join(f"{name} {one.get(name)}" for name in names) for one in flat]


def flatten(section: dict, prefix: str = "") -> dict:
    """Flatten nested sections to {"train.learning_rate": ...}."""
    flat = {}
    for name, value in section.items():
        is_section = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def describe_model(config: Config) -> str:
    """Describe model and optimization in one line."""
    model, train, data = config.model, config.train, config.data
    return (
        f"{model.num_hidden_layers} layers of width {model.hidden_size}; {train.optimizer} at "
        f"{train.learning_rate:g}; {train.global_batch_size:,} sequences of at most "
        f"{data.max_seq_length} tokens per step; seed {config.seed}"
    )


# ----------------------------------------------------------------------------------- in charts


def draw_curves(runs: list[RunRecord]) -> list[dict]:
    """Draw a chart for each question that the runs have data for."""
    pairs = PAIR_TITLES[runs[0].config.data.objective] or "Pairs"
    norms = [value for run in runs for _, value in run.series("train/grad_norm")]
    zero, share, auc = {"from_zero": True}, {"percent": True}, {"eval/rtd_auc": ""}
    cut = {"top": EXPLODED * statistics.median(norms or [1])}
    of_probes = share | {"baselines": {UNIGRAM_PAIRS: "without context"}}
    probes = {
        name: name.removeprefix("eval/minimal_pairs").lstrip("/_").replace("_", " ") or "all"
        for run in runs
        for name in run.columns
        if name.startswith("eval/minimal_pairs") and name != UNIGRAM_PAIRS
    }
    frequencies = {f"eval/mlm_loss_{name}": name for name in ("frequent", "medium", "rare")}
    return [
        *draw_both_splits(
            runs,
            "mlm_loss",
            "Loss on masked tokens",
            "nats",
            {"eval/unigram_entropy": "without context"},
        ),
        *draw_both_splits(
            runs,
            "nsp_accuracy",
            pairs,
            "share of pairs classified correctly",
            {
                "eval/nsp_by_shared_words": "by shared words alone",
                "eval/nsp_majority": "always the same",
            },
            percent=True,
        ),
        *chain.from_iterable(
            draw_metrics(runs, title, unit, metrics, **options)
            for title, unit, metrics, options in (
                ("Replaced tokens", "area under the curve; guessing: 0.5", auc, {}),
                ("Loss by frequency of the token", "held out, nats", frequencies, {}),
                ("Minimal pairs", "share whose good sentence is likelier", probes, of_probes),
                ("Learning rate", "", {"train/learning_rate": ""}, zero),
                ("Gradient norm", "before clipping", {"train/grad_norm": ""}, zero | cut),
                ("Speed", "tokens per second", {"perf/tokens_per_second": ""}, zero),
                ("Waiting for data", "share of the time", {"perf/data_wait": ""}, zero | share),
            )
        ),
    ]


def draw_both_splits(
    runs: list[RunRecord],
    metric: str,
    title: str,
    unit: str,
    baselines: dict[str, str],
    percent: bool = False,
) -> list[dict]:
    """Draw a metric in training and held out, with baselines; no chart if no run has it.

    baselines: metric -> its name in the legend.
    """
    is_one, lines = len(runs) == 1, []
    for i, run in enumerate(runs):
        trained, held_out = (run.curve(f"{split}/{metric}") for split in ("train", "eval"))
        name = "training" if is_one else "" if held_out else run.name
        lines.append(Line(name, trained, i, "faint"))
        lines.append(Line("held out" if is_one else run.name, held_out, i, "dots"))
    if not any(line.points for line in lines):
        return []
    unit += "" if is_one else "; thin lines: training"
    lines += draw_baselines(runs, baselines)
    return [draw_chart(title, unit, lines, x_unit="tokens", percent=percent)]


def draw_baselines(runs: list[RunRecord], baselines: dict[str, str]) -> list[Line]:
    """Draw dashed lines across the chart; one for all runs if they agree."""
    longest, lines = max(run.tokens for run in runs), []
    for metric, name in baselines.items():
        found = [(i, run.series(metric)) for i, run in enumerate(runs)]
        levels = [(i, points[-1][1]) for i, points in found if points]
        if len({level for _, level in levels}) == 1:
            levels = [(None, levels[0][1])]
        for i, level in levels:
            label = name if i is None else f"{name}, {runs[i].name}"
            lines.append(Line(label, [(0, level), (longest, level)], i, "dashed"))
    return lines


def draw_metrics(
    runs: list[RunRecord],
    title: str,
    unit: str,
    metrics: dict[str, str],
    baselines: dict[str, str] | None = None,
    **options,
) -> list[dict]:
    """Draw the metrics of one run in one chart, or those of several runs in a chart each.

    metrics, baselines: metric -> its name in the legend. options: of `draw_chart`.
    """
    if len(runs) == 1:
        groups = [(title, [(name or "now", runs[0], metric) for metric, name in metrics.items()])]
    else:
        groups = [
            (f"{title}: {name}" if name else title, [(run.name, run, metric) for run in runs])
            for metric, name in metrics.items()
        ]
    charts = []
    for heading, members in groups:
        lines = [Line(name, run.curve(m), i) for i, (name, run, m) in enumerate(members)]
        if any(line.points for line in lines):
            if members[0][2] == next(iter(metrics)):  # a baseline is that of the first metric
                lines += draw_baselines(runs, baselines or {})
            charts.append(draw_chart(heading, unit, lines, x_unit="tokens", **options))
    return charts


# ----------------------------------------------------------------------------- what it has learned


def list_fillings(run: RunRecord) -> list[tuple[str, list[tuple[int, str]]]]:
    """List the probe sentences, each with (step, likeliest fillings) at some evaluations."""
    lines = [line for line in run.lines if line.get("fillings")]
    places = np.linspace(0, len(lines) - 1, min(len(lines), MOMENTS)).round().astype(int)
    found: dict[str, list[tuple[int, str]]] = {}
    for line in (lines[i] for i in places):
        for filling in line["fillings"]:
            said = line["step"], say_fillings(filling)
            found.setdefault(filling["sentence"], []).append(said)
    return list(found.items())


def find_neighbours(run: RunRecord) -> dict | None:
    """Find the nearest words of some frequent ones by the newest checkpoint's word embeddings.

    The MLM bias tells how frequent a token is. The most frequent words are passed over, since they
    are function words.
    Returns {step, words: [(word, its neighbours)]}; None without a sound checkpoint or vocabulary.
    """
    checkpoints = list_checkpoints(run.run_dir / "checkpoints")
    if not checkpoints or not (run.run_dir / "vocab/vocab.txt").exists():
        return None
    vocabulary = read_vocabulary(run.run_dir / "vocab")
    try:
        with safe_open(checkpoints[-1] / "model.safetensors", "np") as tensors:
            vectors = tensors.get_tensor("embeddings.word.weight")
            bias = tensors.get_tensor("mlm.bias")
    except (SafetensorError, OSError):
        return None
    if not len(vocabulary) == len(vectors) == len(bias):
        return None
    pieces = list(map(vocabulary.show, range(len(vocabulary))))
    words = [i for i in vocabulary.ordinary.tolist() if pieces[i].isalpha()]
    words = [i for i in words if not vocabulary.continues[i]]
    words = sorted(words, key=lambda i: -bias[i])[:NEAR]
    near = vectors[words] - vectors[words].mean(0)
    near /= np.linalg.norm(near, axis=1, keepdims=True) + 1e-12
    later = range(min(FUNCTION_WORDS, len(words) // 4), len(words))
    shown = [k for k in later if is_long(pieces[words[k]])][:WORDS]
    found = []
    for k in shown:
        likeness = near @ near[k]
        likeness[k] = -np.inf
        best = np.argsort(-likeness)[:NEIGHBOURS]
        found.append((pieces[words[k]], [pieces[words[i]] for i in best]))
    return {"step": step_of(checkpoints[-1]), "words": found}


def is_long(word: str) -> bool:
    """Tell whether a word is long enough to have a meaning of its own; Chinese ones always are."""
    return len(word) >= LEAST_LETTERS or word.upper() == word.lower()


# ----------------------------------------------------------------------------------- the page


def render_runs(runs: list[RunRecord]) -> str:
    """Render the page of one run, or of several laid over each other."""
    is_one = len(runs) == 1
    settings = [describe_model(runs[0].config)] if is_one else list_differences(runs)
    standings = [
        {
            "name": run.name,
            "verdict": judge_run(run),
            "progress": say_progress(run),
            "best": say_best(run),
            "warnings": list_warnings(run),
            "settings": setting,
            "fillings": list_fillings(run),
            "neighbours": find_neighbours(run),
        }
        for run, setting in zip(runs, settings, strict=True)
    ]
    return render_template(
        Path(__file__).with_name("report.html"),
        runs=standings,
        figures=list_figures(runs[0]) if is_one else [],
        charts=draw_curves(runs),
    )


def write_report(run_dirs: list[Path], out: Path) -> list[RunRecord]:
    """Write the page of some runs, and return them.

    Raises `UserError` if a folder is not that of a run.
    """
    runs = [RunRecord(run_dir) for run_dir in run_dirs]
    names = Counter(run.name for run in runs)
    for run in runs:
        if names[run.name] > 1:
            run.name = str(run.run_dir)
    write_file(check_writable(out), render_runs(runs).encode("utf-8"))
    return runs


def refresh_report(run_dir: Path, log_line: Callable[[str], None]) -> str:
    """Write `report.html` of a run at work, and return its verdict with the reason; "" if it has no
    trouble.

    A failure is one warning, since it must stop no run.
    """
    try:
        (run,) = write_report([run_dir], run_dir / "report.html")
        verdict, reason = judge_run(run)
        return "" if verdict in UNTROUBLED else f"{verdict.lower()}: {reason}"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log_line(f"warning: report.html was not written, the run continues: {reason}")
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pretrain.report", description=__doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="file to write (default: report.html or compared.html in the first run folder)",
    )
    args = parser.parse_args()
    out = args.out or args.run_dirs[0] / PAGES[len(args.run_dirs) > 1]
    check(not out.is_dir(), f"--out {out} is a folder; name a file in it")
    write_report(args.run_dirs, out)
    print(f"report: {out}")


if __name__ == "__main__":
    run_command(main)
