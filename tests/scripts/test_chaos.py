"""What is interrupted in any way ends with the bits of what is not."""

import shutil
import time
from copy import copy
from pathlib import Path

import chaos
import pytest
import torch
from helpers import fork

from pretrain.checkpoint import save_checkpoint

OVERRIDES = ["train.micro_batch_size=4", "train.eval_examples=16"]


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> chaos.Chaos:
    def start(ranks: list[list[str]]) -> int:
        return fork(*ranks).returncode

    out = tmp_path_factory.mktemp("chaos")
    return chaos.Chaos(str(prepared / "config.yaml"), out, OVERRIDES, start)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in chaos.KINDS if kind != "mixed"])
def test_six_faults_of_each_kind_come_and_are_survived(runs: chaos.Chaos, kind: str) -> None:
    results = chaos.run_chaos(runs, [kind], 6, seed=0)
    assert all(one["fired"] and one["survived"] for one in results), results
    assert chaos.summarize(results).endswith(f"| {kind} | 6 | 6 | 6 |")


@pytest.mark.parametrize(
    ("point", "call", "processes"),
    [("to_json", 2, 1), ("name_not_finite", 2, 1), ("save_file", 4, 2), ("hash_file", 5, 1)]
    + [("Path.rename", 2, 1), ("sync", 12, 1), ("shutil.rmtree", 7, 1)],
)
def test_a_kill_at_each_part_of_a_save_is_survived(
    runs: chaos.Chaos, point: str, call: int, processes: int
) -> None:
    """Of the second save or the third, where there is something to go on from or to remove."""
    folder, point = runs.out / f"save-{point}", f"pretrain.checkpoint:{point}"
    fault, codes, *_ = chaos.FAULTS["kill"]
    plan = {"point": point, "number": call, "fault": fault}
    assert runs.launch(folder, "kill", processes, "first", **plan) in codes
    assert (folder / "first/fired-0").exists()
    assert runs.launch(folder, "kill", processes, "second") == 0
    assert chaos.explain(folder, runs.reference("kill", processes)) == ""


def test_a_kill_is_survived_and_a_fault_that_never_comes_is_no_survivor(runs: chaos.Chaos) -> None:
    others = copy(runs)  # beside the six faults of each kind
    others.out = runs.out / "others"
    (one,) = chaos.run_chaos(others, ["kill"], 1, seed=1)
    assert one["fired"] and one["survived"], one
    plan = {"point": "pretrain.train:save_run", "number": 99, "fault": "os.abort()"}
    assert runs.launch(runs.out / "never", "kill", 1, "first", **plan) == 0
    assert not list((runs.out / "never/first").glob("fired-*"))
    assert chaos.explain(runs.out / "never", runs.reference("kill", 1)) == ""


def test_a_signal_that_never_comes_is_no_survivor(runs: chaos.Chaos, monkeypatch) -> None:
    others = copy(runs)
    others.out = runs.out / "unsent"
    monkeypatch.setattr("random.Random.randint", lambda *_: 9_999)  # more calls than there are
    (one,) = chaos.run_chaos(others, ["signal"], 1, seed=0)
    assert not one["fired"] and one["codes"] == [0, 0], one


@pytest.mark.slow
def test_runs_that_are_hit_by_one_fault_after_the_other_end_with_the_same_bits(
    runs: chaos.Chaos,
) -> None:
    results = chaos.run_chaos(runs, ["mixed"], 12, seed=0)
    assert len(results) == 12
    assert all(one["fired"] and one["survived"] for one in results), results
    assert max(one["start"] for one in results) >= 3  # of one run
    assert len({one["fault"].split("(")[0] for one in results}) >= 2


def test_a_run_that_ends_with_other_bits_has_survived_none_of_its_faults(
    runs: chaos.Chaos, monkeypatch
) -> None:
    others = copy(runs)
    others.out = runs.out / "differs"
    monkeypatch.setattr(chaos, "explain", lambda *_: "model")
    (one,) = chaos.run_chaos(others, ["mixed"], 1, seed=3)
    assert one["difference"] == "model" and not one["survived"]


@pytest.mark.parametrize("point", ["models.bert:PretrainingModel.score", "checkpoint:hash_file"])
def test_a_signal_that_is_ignored_is_no_survivor(
    runs: chaos.Chaos, monkeypatch, point: str
) -> None:
    others = copy(runs)
    others.out = runs.out / f"ignored-{point}"
    ignored = ("pass", *chaos.FAULTS["signal"][1:3], (f"pretrain.{point}",))
    monkeypatch.setitem(chaos.FAULTS, "signal", ignored)
    monkeypatch.setattr("random.Random.randint", lambda *_: 1)  # the first call of that function
    (one,) = chaos.run_chaos(others, ["signal"], 1, seed=0)
    assert one["fired"] and one["codes"] == [0, 0] and not one["survived"], one


def test_a_signal_that_is_obeyed_too_late_or_without_a_checkpoint_is_no_survivor(
    tmp_path: Path,
) -> None:
    notes, checkpoints = tmp_path / "first", tmp_path / "run/checkpoints"
    notes.mkdir()
    checkpoints.parent.mkdir()

    def judge(fired: int, steps: list[int], newest: int, code: int) -> bool:
        (notes / "fired-0").write_text(f"{fired}\n")
        (notes / "steps-0").write_text("".join(f"{step}\n" for step in steps))
        shutil.rmtree(checkpoints, ignore_errors=True)
        state = {"step": newest, "running_sums": [], "part_sizes": [], "evaluation": {}}
        save_checkpoint(checkpoints, torch.nn.Linear(2, 2), [], state, 2).result()
        return chaos.goes_on(tmp_path, "first", "0", code)

    assert not judge(3, [2, 2, 3], 4, 75)
    assert not judge(3, [2, 3, 4], 5, 75)  # it came between two steps
    assert not judge(-1, [8], 9, 75)  # before the first step of this start
    assert not judge(11, [10, 11], 12, 0)
    assert judge(3, [2, 3, 4, 5], 6, 75)
    assert judge(3, [2, 3], 3, 75)
    assert judge(10, [10, 11], 12, 0)


def test_steps_that_two_starts_have_done_do_not_count_as_one(
    runs: chaos.Chaos, monkeypatch
) -> None:
    others, read = copy(runs), chaos.read_state
    others.out = runs.out / "twice"

    def read_less(checkpoint: Path) -> dict:
        state = read(checkpoint)
        return state | {"step": max(state["step"] - 1, 1)}

    (one,) = chaos.run_chaos(others, ["elastic"], 1, seed=0)
    assert one["survived"], one
    others.out = runs.out / "once more"
    monkeypatch.setattr(chaos, "read_state", read_less)
    (one,) = chaos.run_chaos(others, ["elastic"], 1, seed=0)
    assert one["difference"] == "sequences" and not one["survived"], one


@pytest.mark.parametrize(
    ("kind", "least"), [("kill", 6), ("signal", 6), ("disk", 4), ("prepare", 3)]
)
def test_six_faults_reach_the_steps_the_saves_and_the_page(
    runs: chaos.Chaos, kind: str, least: int, monkeypatch
) -> None:
    for processes in chaos.FAULTS[kind][2]:
        runs.reference(kind, processes)

    def launch(*_, point: str = "", **plan) -> int:
        found.append(point)
        return 0

    found: list[str] = []
    monkeypatch.setattr(chaos.Chaos, "launch", launch)
    monkeypatch.setattr(chaos, "explain", lambda *_: "")
    monkeypatch.setattr(chaos, "goes_on", lambda *_: False)
    chaos.run_chaos(runs, [kind], 6, seed=0)
    assert len({*found} - {""}) >= least
    if kind in ("kill", "signal"):
        assert {"pretrain.train:learning_rate", "pretrain.train:refresh_report"} <= {*found}


def test_the_code_of_a_rank_is_seen_while_the_first_one_hangs(monkeypatch) -> None:
    monkeypatch.setattr(chaos, "PATIENCE", 1.0)
    began = time.monotonic()
    hangs, fails = ["-c", "import time; time.sleep(1000)"], ["-c", "raise SystemExit(3)"]
    assert chaos.start_processes([hangs, fails]) == 3
    assert time.monotonic() - began < 300  # of the 600 that a job may take
    assert chaos.start_processes([["-c", ""], ["-c", ""]]) == 0


def test_what_differs_is_named(runs: chaos.Chaos) -> None:
    code = runs.launch(runs.out / "other", "kill", 1, "first", point="", number=0)
    assert code == 0
    path = next((runs.out / "other/run/checkpoints").glob("step-00000012"))
    path.rename(runs.out / "away")
    assert chaos.explain(runs.out / "other", runs.reference("kill", 1)) == "model"
