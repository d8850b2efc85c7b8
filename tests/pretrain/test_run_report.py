"""The page of a run: its figures are those of metrics.jsonl, it judges a run rightly, it lays runs
over each other, and it can harm none."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, SCHEMA_1, assert_same_run, metrics, train_here
from html_page import Page
from safetensors.numpy import save_file

from data_pipeline.common.errors import UserError
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain import report
from pretrain.config import Config
from pretrain.report import find_neighbours, judge_run, render_runs, say_progress
from pretrain.run_record import MOST_LINES, RECENT, RunRecord

ENTROPY = 6.0


def page_of(*run_dirs: Path) -> Page:
    page = Page(render_runs([RunRecord(run_dir) for run_dir in run_dirs]))
    page.assert_whole()
    return page


def write_run(folder: Path, lines: list[dict], **train: object) -> RunRecord:
    """A run folder with this record, of 16 sequences a step."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"max_steps": 1000, "global_batch_size": 16, "micro_batch_size": 16} | train
    (folder / "config.yaml").write_text(json.dumps({"train": given}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunRecord(folder)


def trained(step: int, loss: float) -> dict:
    """A log line of a run whose sequences have 50 tokens, at 8 sequences a second."""
    rates = {"perf/tokens_per_second": 400.0, "perf/sequences_per_second": 8.0}
    return {"step": step, "train/mlm_loss": loss} | rates


def evaluated(step: int, loss: float | None, **others: object) -> dict:
    return {"step": step, "eval/mlm_loss": loss, "eval/unigram_entropy": ENTROPY} | others


# --- figures --------------------------------------------------------------------------------------


def test_the_page_shows_the_figures_of_the_record(straight: Path) -> None:
    record, page = metrics(straight), page_of(straight)
    of_dots = [float(x) for x in re.findall(r"<title>[^<]* tokens: ([\d.]+)</title>", page.source)]
    losses = [line["eval/mlm_loss"] for line in record if "eval/mlm_loss" in line]
    assert of_dots == [round(loss, 3) for loss in losses]
    newest = {name: value for line in record for name, value in line.items()}
    for name in ("train/mlm_loss", "eval/mlm_loss", "eval/unigram_entropy", "train/grad_norm"):
        assert f"{newest[name]:.3f}" in page.text
    assert "bits per byte of text" in page.text
    assert f"{newest['eval/mlm_bits_per_byte']:.3f}" in page.text
    for band in ("frequent", "medium", "rare"):
        assert f"{band} {newest[f'eval/mlm_loss_{band}']:.3f}" in page.text
    for name in ("nsp_accuracy", "nsp_majority", "nsp_by_shared_words"):
        assert f"{100 * newest[f'eval/{name}']:.1f} %" in page.text
    assert f"{newest['eval/mlm_accuracy']:.1%}" in page.text
    assert "Step 12 of 12" in page.text and "finished." in page.text
    assert page.tags["figure"] == 7


def test_tokens_are_those_that_the_run_has_seen(
    straight: Path, prepared: Path, store: TokenStore
) -> None:
    config = load_config(Config, str(prepared / "config.yaml"))
    source = BatchSource(store, config.data, config.seed)
    seen = np.cumsum([len(source.batch(16 * step, 16).input_ids) for step in range(12)])
    found = dict(RunRecord(straight).curve("train/mlm_loss"))
    assert list(found) == pytest.approx(seen[1::2].tolist())
    assert [x for x, _ in RunRecord(straight).curve("eval/mlm_loss")] == pytest.approx(seen[5::6])


def test_minimal_pairs_and_fillings_are_shown_where_they_are_recorded(tmp_path: Path) -> None:
    lines = [trained(10, 7.0)]
    for step in range(10, 100, 10):
        masks = [[["cat", step / 1000], ["dog", 0.01]], [["sat", 0.5]]]
        filling = {"sentence": "the [MASK] [MASK]", "masks": masks}
        pairs = {"eval/minimal_pairs": 0.6, "eval/minimal_pairs/syntax": 0.5 + step / 1000}
        lines.append(
            evaluated(step, 5.0, fillings=[filling], **pairs, **{report.UNIGRAM_PAIRS: 0.52})
        )
    text = " ".join(page_of(write_run(tmp_path, lines).run_dir).text.split())
    assert "all 60.0 % syntax 59.0 % without context 52.0 %" in text
    assert "the [MASK] [MASK] step 10 cat 1%, dog 1%; sat 50%" in text
    assert "step 90 cat 9%, dog 1%; sat 50%" in text
    assert text.count("; sat 50%") == report.MOMENTS


def test_neighbours_are_the_nearest_vectors_of_frequent_words(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + "ord" for a in letters for b in letters[:10]]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##ing", "a", "1987", *words, "我"]
    vectors = rng.normal(size=(len(pieces), 16)).astype(np.float32)
    vectors[9::2] = vectors[8:-1:2] + 0.01  # each pair of words lies close together
    run = write_run(tmp_path, [])
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    checkpoint = tmp_path / "checkpoints/step-00000007"
    checkpoint.mkdir(parents=True)
    bias = -np.arange(len(pieces), dtype=np.float32)  # earlier pieces are more frequent
    save_file(
        {"embeddings.word.weight": vectors, "mlm.bias": bias}, checkpoint / "model.safetensors"
    )
    found = find_neighbours(run)
    assert found["step"] == 7
    skipped = len(words + ["a", "我"]) // 4
    assert [word for word, _ in found["words"]] == words[skipped - 1 :][: report.WORDS]
    for word, near in found["words"]:
        i = words.index(word)
        assert near[0] == words[i + 1 if i % 2 == 0 else i - 1]
        assert len(near) == report.NEIGHBOURS and word not in near
    assert words[skipped - 1] in page_of(tmp_path).text


# --- in words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "training", "held_out"),
    [
        ("Learns", [6.5, 5.0], [5.9, 5.2]),
        ("Learns", [6.5, 5.0], [5.9, 5.2, 5.24]),
        ("Has not left the plateau", [6.5, 5.95], [6.4, 5.95]),
        ("Overfits", [5.0, 4.0, 2.0], [5.5, 5.0, 5.2]),
        ("Gets worse", [5.0, 4.0, 4.5], [5.5, 5.0, 5.2]),
        ("Broken", [5.0, 4.0], [5.5, None]),
        ("Not evaluated yet", [5.0, 4.0], []),
    ],
)
def test_a_run_is_judged_by_its_losses(tmp_path: Path, verdict, training, held_out) -> None:
    lines = [
        trained(100 * i + 5 * k, loss) for i, loss in enumerate(training, 1) for k in range(-19, 1)
    ]
    lines += [evaluated(100 * i, loss) for i, loss in enumerate(held_out, 1)]
    lines.append(trained(500, training[-1]))
    run = write_run(tmp_path, sorted(lines, key=lambda line: line["step"]))
    assert judge_run(run)[0] == verdict
    assert verdict in page_of(tmp_path).text


@pytest.mark.parametrize(
    ("training", "verdict", "end"),
    [
        ([5.8], "Gets worse", "at step 0"),
        ([6.0, 5.8], "Overfits", "at step 0, while the training loss has fallen"),
    ],
)
def test_a_run_that_is_worse_than_its_start_is_told(
    tmp_path: Path, training, verdict: str, end: str
) -> None:
    lines = [trained(100 * i, loss) for i, loss in enumerate(training, 1)]
    run = write_run(tmp_path, [evaluated(0, 5.0), *lines, evaluated(200, 5.2)])
    found, why = judge_run(run)
    assert found == verdict and why == f"the held-out loss is 5.200, 0.20 nats above its best {end}"
    assert "Best held-out loss so far: 5.000 at step 0." in page_of(tmp_path).text
    assert report.refresh_report(tmp_path, print) == f"{verdict.lower()}: {why}"
    write_run(tmp_path / "good", [evaluated(0, 5.0), evaluated(200, 4.8)])
    assert report.refresh_report(tmp_path / "good", print) == ""


def test_losses_of_pairs_are_not_compared_with_those_of_single_segments(tmp_path: Path) -> None:
    phases = [{"steps": 0.5, "single_segment_prob": 1}, {"steps": 0.5}]
    losses = {250: 5.5, 500: 3.0, 750: 5.3, 1000: 5.2}
    lines = [line for at in losses for line in (trained(at, losses[at]), evaluated(at, losses[at]))]
    run = write_run(tmp_path, lines, phases=phases)
    assert judge_run(run)[0] == "Learns"
    assert "Best held-out loss so far: 5.200 at step 1,000." in page_of(tmp_path).text
    assert judge_run(write_run(tmp_path / "alike", lines))[0] == "Gets worse"
    lines[-1]["eval/mlm_loss"] = 5.4
    assert judge_run(write_run(tmp_path / "worse", lines, phases=phases))[0] == "Overfits"


def test_runs_of_one_name_are_told_apart_on_a_page_in_a_new_folder(tmp_path: Path) -> None:
    lines = [trained(10, 5.0), evaluated(10, 5.0)]
    dirs = [write_run(tmp_path / name, lines).run_dir for name in ("a/run", "b/run", "c")]
    report.write_report(dirs, tmp_path / "new/pages/compared.html")
    page = (tmp_path / "new/pages/compared.html").read_text()
    assert page.count(f"{tmp_path}/a/run") > 1 and page.count(f"{tmp_path}/b/run") > 1
    assert f"{tmp_path}/c" not in page


def test_the_figures_are_those_of_one_evaluation(tmp_path: Path) -> None:
    lines = [trained(10, 5.0), evaluated(10, 5.0, **{"eval/nsp_accuracy": 0.75})]
    page = page_of(write_run(tmp_path, lines).run_dir)
    assert "pairs correct" in page.text and "75.0%" in page.text
    lines += [trained(20, 4.0), evaluated(20, 4.0)]  # of single segments
    assert "pairs correct" not in page_of(write_run(tmp_path, lines).run_dir).text


def test_a_loss_that_is_not_finite_stands_beside_no_figure_of_an_earlier_evaluation(
    tmp_path: Path,
) -> None:
    lines = [trained(10, 5.0), evaluated(10, 5.0, **{"eval/nsp_accuracy": 0.75})]
    lines.append(evaluated(20, None, **{"eval/nsp_accuracy": None}))
    page = page_of(write_run(tmp_path, lines).run_dir)
    assert "Broken" in page.text and "pairs correct" not in page.text
    assert "Best held-out loss so far: 5.000 at step 10." in page.text


def test_fillings_of_a_broken_model_are_shown_as_such(tmp_path: Path) -> None:
    filling = {"sentence": "the [MASK]", "masks": [[["[SEP]", None]]]}
    lines = [trained(10, 5.0), evaluated(10, None, fillings=[filling])]
    assert "[SEP] nan%" in page_of(write_run(tmp_path, lines).run_dir).text


def test_fields_of_minimal_pairs_are_not_compared_with_the_baseline_of_all(tmp_path: Path) -> None:
    pairs = {"eval/minimal_pairs": 0.6, "eval/minimal_pairs/syntax": 0.5, report.UNIGRAM_PAIRS: 0.4}
    lines = [trained(10, 5.0), evaluated(10, 5.0, **pairs)]
    page = page_of(*(write_run(tmp_path / name, lines).run_dir for name in "ab"))
    charts = [c for c in re.findall(r"<figure.*?</figure>", page.source, re.S) if "Minimal" in c]
    assert [("syntax" in c, "without context" in c) for c in charts] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_settings_that_one_of_two_runs_has_are_told(tmp_path: Path, order) -> None:
    corpora = {"files": ["a.txt"]}, {"dataset": {"path": "hub/x"}}
    runs = []
    for i in order:
        write_run(tmp_path / str(i), [trained(10, 5.0)])
        settings = {"train": {"max_steps": 1000}, "corpus": corpora[i]}
        (tmp_path / str(i) / "config.yaml").write_text(json.dumps(settings))
        runs.append(RunRecord(tmp_path / str(i)))
    found = report.list_differences(runs)
    assert "corpus.dataset.path hub/x" in found[order.index(1)]
    assert "corpus.dataset.path None" in found[order.index(0)]


def test_the_best_loss_and_the_time_left_are_told(tmp_path: Path) -> None:
    lines = [trained(250, 5.0), evaluated(250, 5.1), trained(500, 4.9), evaluated(500, 5.12)]
    run = write_run(tmp_path, lines)
    # 500 steps of 16 sequences at 8 a second; 50 tokens a sequence
    assert say_progress(run) == "Step 500 of 1,000, 400k tokens; about 17 min of training left."
    assert "Best held-out loss so far: 5.100 at step 250." in page_of(tmp_path).text
    phases = [{"steps": 0.5}, {"steps": 0.5, "max_seq_length": 512}]
    longer = write_run(tmp_path / "phases", lines[:2], phases=phases)
    shorter = write_run(tmp_path / "one", lines[:2])
    assert longer.seconds_left() == pytest.approx(shorter.seconds_left() * (250 + 500 * 4) / 750)


def test_the_page_of_a_long_run_is_drawn_from_few_of_its_log_lines(tmp_path: Path) -> None:
    steps, entropy = 400_000, {"eval/unigram_entropy": ENTROPY}
    lines = [trained(step, 8 - step / steps) for step in range(10, steps + 1, 10)]
    lines[7777] |= {"train/mlm_loss": None}
    judged = [evaluated(step, 8 - 3 * step / steps, **entropy) for step in range(5, steps, 1000)]
    skipped = {"step": 31_415, "skipped": {"step": 31_414}}
    whole = sorted([*lines, *judged, skipped], key=lambda line: line["step"])
    run = write_run(tmp_path / "long", whole, max_steps=2 * steps)
    assert len(run.lines) <= len(judged) + MOST_LINES + RECENT + 1
    assert [line for line in run.lines if "train/mlm_loss" not in line] == [
        line for line in whole if "train/mlm_loss" not in line
    ]
    assert run.lines[-RECENT:] == whole[-RECENT:]
    assert run.tokens == pytest.approx(steps * 16 * 50, rel=1e-9)
    assert judge_run(run)[0] == "Learns"
    left = steps * 16 / 8
    assert run.seconds_left() == pytest.approx(left, rel=1e-9)
    train = [loss for _, loss in run.losses("train")]
    assert train == sorted(train, reverse=True) and train[0] > 7.999 and train[-1] == 7


def test_warnings_of_the_monitor_are_told_with_their_first_step(tmp_path: Path) -> None:
    lines = [trained(i, 5.0) | ({"monitor/nsp": 1.0} if i > 2 else {}) for i in range(1, 6)]
    write_run(tmp_path, lines)
    assert "Step 3: the accuracy on pairs was no better than guessing." in page_of(tmp_path).text


# --- runs of all kinds ----------------------------------------------------------------------------


def test_several_runs_lie_over_each_other(straight: Path, prepared: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train_here(prepared, other, "seed=7", "train.max_steps=8")
    page = page_of(straight, other)
    assert "2 runs" in page.text
    assert "seed 0, train.max_steps 12" in page.text and "seed 7, train.max_steps 8" in page.text
    assert "run_dir" not in page.text
    for folder in (straight, other):
        last = [line["eval/mlm_loss"] for line in metrics(folder) if "eval/mlm_loss" in line][-1]
        assert re.search(rf"{RunRecord(folder).name}\s+{last:.3f}", page.text)
    loss = page.source[page.source.index("<figure") : page.source.index("</figure>")]
    assert {'<path class="c0 dots"', '<path class="c1 dots"'} <= set(
        re.findall(r'<path class="c\d dots"', loss)
    )
    assert loss.count('class="grey dashed"') == 2  # one line, in legend and chart: the runs agree
    assert page.tags["figure"] == 9


def test_a_run_without_evaluation_or_without_a_line_has_a_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a", [trained(10, 7.0), trained(20, 6.5)]).run_dir)
    assert "Not evaluated yet" in page.text and "training 6.500" in " ".join(page.text.split())
    line = evaluated(10, 7.0)
    del line["eval/unigram_entropy"]  # as damage does
    assert "Not evaluated yet" in page_of(write_run(tmp_path / "c", [line]).run_dir).text
    page = page_of(write_run(tmp_path / "b", []).run_dir)
    assert "Step 0 of 1,000, 0 tokens." in page.text and not page.tags["figure"]


def test_values_that_are_not_finite_and_a_damaged_last_line_are_left_out(tmp_path: Path) -> None:
    lines = [trained(10, 7.0), trained(20, 6.5) | {"train/grad_norm": None}, evaluated(20, 6.4)]
    write_run(tmp_path, lines)
    whole = page_of(tmp_path).source
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "train/mlm')
    assert page_of(tmp_path).source == whole


def test_a_run_of_the_first_version_has_a_page(tmp_path: Path) -> None:
    shutil.copytree(SCHEMA_1 / "job", tmp_path / "job")
    steps = [line["step"] for line in metrics(tmp_path / "job")]
    assert f"Step {max(steps)} of {max(steps)}" in page_of(tmp_path / "job").text


def test_what_users_wrote_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)<&'"
    filling = {"sentence": f"{evil} [MASK]", "masks": [[[evil, 0.5]]]}
    lines = [trained(10, 7.0), evaluated(10, 5.0, fillings=[filling])]
    first = write_run(tmp_path / evil, lines, learning_rate=1e-4).run_dir
    second = write_run(tmp_path / "b", lines, learning_rate=2e-4).run_dir
    for runs in ((first,), (first, second)):
        page = page_of(*runs)
        assert page.text.count(evil) >= 3


# --- the command and the training run -------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pretrain.report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_writes_the_page_where_it_is_asked_to(straight: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(straight, copy)
    (copy / "report.html").unlink()
    done = run(copy)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"report: {copy / 'report.html'}\n"
    one = (copy / "report.html").read_bytes()
    done = run(copy, straight)
    assert done.stdout == f"report: {copy / 'compared.html'}\n"
    done = run(copy, straight, "--out", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "2 runs" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert (copy / "report.html").read_bytes() == one


def test_a_folder_as_out_is_refused(straight: Path, tmp_path: Path) -> None:
    done = run(straight, "--out", tmp_path)
    said = f"error: --out {tmp_path} is a folder; name a file in it\n"
    assert (done.returncode, done.stderr) == (2, said) and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.returncode == 2 and not (tmp_path / "none").exists()
    assert re.fullmatch(r"error: .*none holds no metrics\.jsonl; give the run_dir.*\n", done.stderr)
    with pytest.raises(UserError, match="holds no config.yaml"):
        write_run(tmp_path, [])
        (tmp_path / "config.yaml").unlink()
        RunRecord(tmp_path)


def test_training_leaves_the_page_of_all_its_steps(straight: Path) -> None:
    page = Page((straight / "report.html").read_text(encoding="utf-8"))
    assert "Step 12 of 12" in page.text
    assert "word embeddings of step 12" in " ".join(page.text.split())


def test_a_page_that_fails_does_not_stop_training(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def fail(runs: list) -> str:
        raise RuntimeError("no\nfont")

    monkeypatch.setattr(report, "render_runs", fail)
    train_here(prepared, tmp_path)
    warning = "warning: report.html was not written, the run continues: RuntimeError: no font\n"
    assert capsys.readouterr().out.count(warning) == 3  # two evaluations and the end
    assert not (tmp_path / "report.html").exists()
    assert_same_run(tmp_path, straight)
