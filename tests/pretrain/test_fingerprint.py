"""What makes two commands the same run: named settings, in any schema, with a stated stretch."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import NO_DROPOUT, SCHEMA_1, contents, metrics, newest, train_here
from safetensors.torch import load_file

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file
from data_pipeline.config import PairsConfig
from data_pipeline.config_file import load_config
from pretrain.checkpoint import newest_checkpoint, read_state
from pretrain.config import Config, ModelConfig, TrainConfig
from pretrain.fingerprint import build_fingerprint, check_fingerprint, read_fingerprint
from pretrain.train import train

TRAPEZOID = ("train.schedule=trapezoid", "train.decay_steps=4")


def fingerprint(*overrides: str) -> dict:
    config = load_config(Config, str(SCHEMA_1 / "config.yaml"), list(overrides))
    return build_fingerprint(config, "vocabulary", "data", "fp32")


def check(was: dict, now: dict, step: int = 4, extend: bool = False) -> list[str]:
    return check_fingerprint(was, now, step, "runs/x", extend)


# --- schema 1 -------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path, monkeypatch) -> Path:
    """A copy of what the version before schema 2 left, as the current directory."""
    shutil.copytree(SCHEMA_1, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def test_a_run_of_schema_1_goes_on_to_where_it_would_have_come(old: Path, capsys) -> None:
    """The model and the last metrics nearly as that version would have left them: the masks and
    pairs of the last steps are drawn otherwise since. The store has schema 1 too."""
    expected = json.loads((old / "expected.json").read_text())
    train(load_config(Config, "config.yaml"))
    assert "an earlier version started this run" in capsys.readouterr().out
    model = load_file(newest_checkpoint(old / "job/checkpoints") / "model.safetensors")
    for name, (total, squares) in expected["model_step_8"].items():
        found = model[name].double()
        assert found.sum().item() == pytest.approx(total, abs=0.1)
        assert found.square().sum().item() == pytest.approx(squares, rel=0.05, abs=1e-3)
    last = [line for line in metrics(old / "job") if line["step"] == 8]
    for line, wanted in zip(last, expected["last_metrics"], strict=True):
        losses = [name for name in line.keys() & wanted.keys() if name.endswith("loss")]
        assert losses
        for name in losses:
            assert line[name] == pytest.approx(wanted[name], rel=0.1), name
    assert read_state(newest_checkpoint(old / "job/checkpoints"))["fingerprint"]["schema"] == 5


def test_another_config_is_refused_for_a_run_of_schema_1_too(old: Path) -> None:
    before = contents(old / "job/checkpoints")
    with pytest.raises(UserError, match="train.optimizer was 'adamw', is 'lamb'"):
        train(load_config(Config, "config.yaml", ["train.optimizer=lamb"]))
    assert contents(old / "job/checkpoints") == before


def test_the_phases_of_a_run_of_schema_1_are_read(old: Path) -> None:
    state = read_state(newest_checkpoint(old / "job_phases/checkpoints"))
    phases = "train.phases=[{steps: 4}, {steps: 4, max_seq_length: 24}]"
    wanted = fingerprint(phases)
    hashes = {name: state["contract"][name] for name in ("vocab_sha256", "data_sha256")}
    (line,) = check(read_fingerprint(state), wanted | hashes)
    assert "and the data of phases after the first" in line
    with pytest.raises(UserError, match="phase 0: data.max_seq_length was 32, is 16"):
        check(read_fingerprint(state), fingerprint(phases, "data.max_seq_length=16") | hashes)


def test_a_checkpoint_of_a_later_schema_is_refused() -> None:
    with pytest.raises(UserError, match="has schema 6, but this version reads 1 to 5"):
        read_fingerprint({"fingerprint": fingerprint() | {"schema": 6}})


@pytest.mark.parametrize("schema", [1, 2, 3, 4])
def test_a_run_of_an_earlier_schema_is_told_that_its_data_are_drawn_otherwise(schema: int) -> None:
    now = fingerprint()
    (line,) = check(now | {"schema": schema}, now)
    assert "an earlier version started this run: from step 4 on, its pairs" in line
    assert check(now | {"schema": schema}, now, step=0) == check(now, now) == []


# --- named settings -------------------------------------------------------------------------------


def test_a_setting_that_a_checkpoint_does_not_know_counts_as_its_default() -> None:
    saved = fingerprint()
    del saved["train.max_grad_norm"], saved["model.hidden_act"]
    saved["phases"] = [
        {k: v for k, v in p.items() if k != "short_seq_prob"} for p in saved["phases"]
    ]
    assert check(read_fingerprint({"fingerprint": saved}), fingerprint()) == []
    with pytest.raises(UserError, match="train.max_grad_norm was 1.0, is 2.0"):
        check(read_fingerprint({"fingerprint": saved}), fingerprint("train.max_grad_norm=2"))


@pytest.mark.parametrize(
    "free",
    [
        "train.micro_batch_size=2",
        "train.log_every=1",
        "train.eval_every=2",
        "train.save_every=1",
        "train.keep_checkpoints=1",
        "train.timeout_s=5",
        "train.gradient_checkpointing=true",
        "model.intermediate_size=64",  # 4 x hidden_size, which null means
        "train.warmup_steps=0.25",  # 2 of 8 steps
        "corpus.files=moved.txt",
        "data_dir=elsewhere",
        "tracking.wandb=project",
    ],
)
def test_what_changes_neither_data_nor_mathematics_is_free(free: str) -> None:
    assert check(fingerprint(), fingerprint(free)) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=4", "seed was 3, is 4"),
        ("model.layer_norm_eps=1e-5", "model.layer_norm_eps was"),
        ("data.objective=sop", "data.objective was 'nsp', is 'sop'"),
        ("data.max_seq_length=24", "data.max_seq_length was 32, is 24"),
        ("train.global_batch_size=16", "train.global_batch_size was 8, is 16"),
        ("train.learning_rate=2e-3", "train.learning_rate was 0.001, is 0.002"),
        ("train.schedule=cosine", "train.schedule was 'linear', is 'cosine'"),
    ],
)
def test_what_changes_them_is_refused_by_name_even_with_extend(override: str, named: str) -> None:
    for extend in (False, True):
        with pytest.raises(UserError, match=named):
            check(fingerprint(), fingerprint(override), extend=extend)


@pytest.mark.parametrize("name", ["vocab_sha256", "data_sha256", "train.precision"])
def test_another_vocabulary_text_or_precision_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} was 'another'|differs? \({name}"):
        check(fingerprint() | {name: "another"}, fingerprint(), extend=True)


FREE = {  # change neither data nor mathematics
    *("extra", "extend", "compile", "gradient_checkpointing", "micro_batch_size"),
    *("log_every", "eval_every", "eval_examples", "save_every", "keep_checkpoints", "timeout_s"),
    *("keep_every", "restart", "on_spike"),
}


def test_every_setting_of_model_data_and_training_is_compared_or_free() -> None:
    found = fingerprint()
    compared = {name.rpartition(".")[2] for name in found} | found["phases"][0].keys()
    settings = {f.name for part in (ModelConfig, PairsConfig, TrainConfig) for f in fields(part)}
    assert settings - compared == FREE


# --- more steps -----------------------------------------------------------------------------------


def test_more_steps_are_free_where_the_rates_of_the_steps_done_stay_the_same() -> None:
    short, long = fingerprint(*TRAPEZOID), fingerprint(*TRAPEZOID, "train.max_steps=16")
    (line,) = check(short, long, step=4)  # of 8, the last 4 of which fall
    assert line.startswith("from step 4 to 16 instead of 8: the learning rate continues at 0.001 ")
    assert check(short, long, step=0)
    with pytest.raises(UserError, match="train.max_steps was 8, is 16.*train.extend=true"):
        check(short, long, step=6)


def test_a_linear_schedule_is_stretched_only_when_asked() -> None:
    short, long = fingerprint(), fingerprint("train.max_steps=16")
    with pytest.raises(UserError, match="train.max_steps was 8, is 16.*set train.extend=true"):
        check(short, long, step=8)
    (line,) = check(short, long, step=8, extend=True)
    assert "learning rate continues at 0.000571 instead of 0" in line


def test_fewer_steps_than_are_done_are_refused() -> None:
    for extend in (False, True):
        with pytest.raises(UserError, match="has done 8 steps, but train.max_steps is 6"):
            check(fingerprint(), fingerprint("train.max_steps=6"), step=8, extend=extend)
        with pytest.raises(UserError, match="has done 7 steps, but train.max_steps is 6"):
            check(fingerprint(), fingerprint("train.max_steps=6"), step=7, extend=extend)


def test_a_phase_that_is_over_keeps_its_steps() -> None:
    def two(a: float, b: float) -> dict:
        return fingerprint(
            f"train.max_steps={a + b}", f"train.phases=[{{steps: {a}}}, {{steps: {b}}}]"
        )

    assert check(two(4, 4), two(4, 12), step=6, extend=True)
    with pytest.raises(UserError, match="phase 1: start was 4, is 8"):
        check(two(4, 4), two(8, 8), step=6, extend=True)
    assert check(two(4, 4), two(8, 8), step=2, extend=True)


def test_shares_that_move_with_more_steps_are_named_with_numbers_that_do_not() -> None:
    shares = "train.phases=[{steps: 0.75}, {steps: 0.25, masked_lm_prob: 0.3}]"
    done, longer = fingerprint(shares), ("train.max_steps=16",)
    message = (
        "phase 1: start was 6, is 12.*as numbers that keep the phases in place, such as 6 and 10"
    )
    with pytest.raises(UserError, match=message):
        check(done, fingerprint(shares, *longer), step=8, extend=True)
    numbers = shares.replace("0.75", "6").replace("0.25", "10")
    assert check(done, fingerprint(numbers, *longer), step=8, extend=True)


def test_a_phase_may_change_until_its_first_step_is_done_and_the_first_one_never() -> None:
    def two(prob: float) -> dict:
        return fingerprint(f"train.phases=[{{steps: 4}}, {{steps: 4, masked_lm_prob: {prob}}}]")

    assert check(two(0.2), two(0.3), step=4) == []
    with pytest.raises(UserError, match="phase 1: data.masked_lm_prob was 0.2, is 0.3"):
        check(two(0.2), two(0.3), step=5)
    with pytest.raises(UserError, match="data.masked_lm_prob was 0.15, is 0.3"):
        check(fingerprint(), fingerprint("data.masked_lm_prob=0.3"), step=0)


def test_a_phase_that_has_begun_keeps_the_start_of_its_schedule() -> None:
    whole, own = (
        fingerprint(f"train.phases=[{{steps: 4}}, {{steps: 4{rate}}}]")
        for rate in ("", ", learning_rate: 1.0e-3")
    )
    for extend in (False, True):
        with pytest.raises(UserError, match="phase 1: schedule_start was 0, is 4"):
            check(whole, own, step=6, extend=extend)


def test_a_phase_that_would_have_begun_is_refused() -> None:
    """Its positions would never start, and its first examples never be seen."""

    def phases(*steps: int) -> dict:
        return fingerprint(f"train.phases=[{', '.join(f'{{steps: {n}}}' for n in steps)}]")

    for saved, wanted in (((8,), (4, 4)), ((2, 6), (2, 2, 4)), ((2, 5, 1), (2, 2, 4))):
        number = len(wanted) - 1
        with pytest.raises(UserError, match=f"phase {number}: it is new, but .* begun at step 4"):
            check(phases(*saved), phases(*wanted), step=5)
        assert check(phases(*saved), phases(*wanted), step=4) == []
    with pytest.raises(UserError, match="phase 1: it was removed"):
        check(phases(4, 4), phases(8), step=5)


def test_a_finished_run_goes_on_and_ends_as_one_that_was_longer_from_the_start(
    prepared: Path, tmp_path: Path
) -> None:
    """Trapezoid before its fall: the same bits. Steps 6 to 12 of 12, of which the last 6 fall."""
    schedule = ("train.schedule=trapezoid", "train.decay_steps=6", "train.save_every=2")
    train_here(prepared, tmp_path / "long", *schedule, *NO_DROPOUT)
    train_here(
        prepared,
        tmp_path / "a",
        "train.max_steps=8",
        *schedule[::2],
        "train.decay_steps=2",
        *NO_DROPOUT,
    )
    shutil.rmtree(tmp_path / "a/checkpoints/step-00000008")
    train_here(prepared, tmp_path / "a", *schedule, *NO_DROPOUT)
    a, long = newest(tmp_path / "a"), newest(tmp_path / "long")
    assert a.keys() == long.keys() and all(torch.equal(a[name], long[name]) for name in a)
    for one, other in zip(metrics(tmp_path / "a"), metrics(tmp_path / "long"), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("monitor/")} == {
            k: v for k, v in other.items() if not k.startswith("monitor/")
        }  # when it looks depends on max_steps


def test_a_finished_run_is_extended_and_says_at_what_rate(
    prepared: Path, tmp_path: Path, capsys
) -> None:
    train_here(prepared, tmp_path, "train.max_steps=4")
    with pytest.raises(UserError, match="train.extend=true"):
        train_here(prepared, tmp_path)
    train_here(prepared, tmp_path, "train.extend=true")
    assert "from step 4 to 12 instead of 4" in capsys.readouterr().out
    assert metrics(tmp_path)[-1]["step"] == 12


def test_another_size_of_passes_goes_on_and_says_what_differs(
    prepared: Path, tmp_path: Path, capsys
) -> None:
    train_here(prepared, tmp_path / "a", *NO_DROPOUT)
    train_here(
        prepared,
        tmp_path / "b",
        "train.max_steps=8",
        "train.micro_batch_size=4",
        "train.extend=true",
        *NO_DROPOUT,
    )
    capsys.readouterr()
    train_here(prepared, tmp_path / "b", "train.extend=true", *NO_DROPOUT)
    said = capsys.readouterr().out
    assert (
        "train.micro_batch_size was 4, is 16: the gradients stay the same, except for dropout"
        in said
    )


# --- the folder of a run --------------------------------------------------------------------------


def test_a_run_keeps_its_vocabulary_and_fingerprint(prepared: Path, tmp_path: Path) -> None:
    train_here(prepared, tmp_path / "run", "train.max_steps=1", "train.warmup_steps=0")
    vocab = contents(prepared / "data/vocab")
    kept = contents(tmp_path / "run/vocab")
    assert kept == {name: vocab[name] for name in kept} and "vocab.txt" in kept and len(kept) == 3
    said = json.loads((tmp_path / "run/fingerprint.json").read_text())
    hashes = {name: hash_file(tmp_path / "run/vocab" / name) for name in kept}
    assert said.pop("vocab_files") == hashes
    assert said == read_state(newest_checkpoint(tmp_path / "run/checkpoints"))["fingerprint"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints", "vocab", "lock"])
def test_a_folder_with_files_of_the_users_is_no_run_folder(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    run_dir = tmp_path / "project"
    run_dir.mkdir()
    (run_dir / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds {name}, which bert-pretrain did not write"):
        train_here(prepared, run_dir)
    assert contents(run_dir) == {name: b"mine"}


def test_a_log_of_the_users_in_the_run_folder_is_no_hindrance(
    prepared: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/slurm-17.out").write_text("mine")
    train_here(prepared, tmp_path / "run", "train.max_steps=1", "train.warmup_steps=0")
    assert (tmp_path / "run/slurm-17.out").read_text() == "mine"


def test_a_schedule_of_other_steps_is_named_with_both() -> None:
    saved, wanted = fingerprint("train.warmup_steps=1"), fingerprint("train.warmup_steps=4")
    with pytest.raises(UserError, match="config: train.warmup_steps was 1, is 4. .*train.extend="):
        check(saved, wanted, step=6)


def test_rates_that_differ_by_half_a_percent_are_others() -> None:
    short, long = fingerprint("train.max_steps=1000"), fingerprint("train.max_steps=1005")
    with pytest.raises(UserError, match="train.max_steps was 1,000, is 1,005"):
        check(short, long, step=500)
