"""What is interrupted in any way ends with the bits of what is not."""

import sys
import time
from copy import copy
from pathlib import Path

import pytest
from helpers import ROOT, fork

sys.path.append(str(ROOT / "scripts"))
import chaos  # noqa: E402

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


def test_a_signal_that_is_ignored_is_no_survivor(runs: chaos.Chaos, monkeypatch) -> None:
    others = copy(runs)
    others.out = runs.out / "ignored"
    monkeypatch.setitem(chaos.FAULTS, "signal", ("pass", *chaos.FAULTS["signal"][1:]))
    (one,) = chaos.run_chaos(others, ["signal"], 1, seed=0)
    assert one["fired"] and one["codes"] == [0, 0] and not one["survived"], one


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
