"""Phases of a run: one learning rate over all, other lengths and batches, exact resume in each."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import assert_same_run, metrics, newest, run, train_here
from safetensors.torch import load_file

from data_pipeline.common.errors import UserError
from data_pipeline.common.streams import Stream, derive_stream
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from pretrain.config import Config, PhaseConfig, phase_at, phase_edges, phases_of
from pretrain.evaluate import HeldOut, build_held_out, evaluate
from pretrain.models.bert import continue_positions
from pretrain.optim import learning_rate
from pretrain.read_export import load_export
from pretrain.run_setup import build_sources
from pretrain.train import dropout_seed, read_steps

CONTINUED = "train.phases=[{steps: 8}, {steps: 4, max_seq_length: 128, global_batch_size: 8, "
CONTINUED += "micro_batch_size: 4}]"  # 12 steps of the config's schedule, as Devlin et al. 2018
RESTARTED = "train.phases=[{steps: 8}, {steps: 4, max_seq_length: 128, learning_rate: 5.0e-4, "
RESTARTED += "warmup_steps: 2}]"  # two schedules, as NVIDIA's LAMB recipe
MICRO_4 = "train.micro_batch_size=4"


def load(prepared: Path, *overrides: str) -> Config:
    return load_config(Config, str(prepared / "config.yaml"), list(overrides))


def rates(config: Config) -> list[float]:
    """The learning rate of every step, as the loop asks for it."""
    phases = phases_of(config)
    out = []
    for step in range(config.train.max_steps):
        phase = phase_at(phases, step)
        out.append(learning_rate(step - phase.schedule_start, phase.train))
    return out


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*"))


def steps_of(config: Config, store: TokenStore, start: int = 0, rank: int = 0, size: int = 1):
    phases = phases_of(config)
    return list(read_steps(phases, build_sources(phases, store), start, rank, size))


def test_the_first_pairs_of_a_phase_are_drawn_in_the_second_half_of_the_one_before(
    prepared: Path, store: TokenStore
) -> None:
    phases = phases_of(load(prepared, CONTINUED))
    for start in (0, 5, 7, 9):
        first, second = build_sources(phases, store)
        assert not second.drawn_parts
        for step, _ in enumerate(read_steps(phases, [first, second], start, 0, 1), start):
            assert list(second.drawn_parts) == ([0] if step >= 4 else [])
            assert bool(first.drawn_parts) == (step < 8)


@pytest.fixture(scope="module")
def straight(prepared: Path, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted run of two phases, 8 + 4 steps."""
    run_dir = tmp_path_factory.mktemp("phases")
    train_here(prepared, run_dir, CONTINUED, MICRO_4, "train.save_every=2", "train.log_every=1")
    return run_dir


# ------------------------------------------------------------------------------ learning rate


def test_a_phase_without_a_learning_rate_goes_on_with_the_schedule_that_runs(prepared) -> None:
    """Warm-up 2 steps, top 1e-3, 12 steps in all."""
    wanted = [0.5e-3, 1e-3] + [1e-3 * (12 - step) / 10 for step in range(2, 12)]
    assert rates(load(prepared, CONTINUED)) == pytest.approx(wanted)
    assert rates(load(prepared, CONTINUED)) == rates(load(prepared))


def test_a_phase_with_a_learning_rate_warms_up_to_it_and_decays_by_itself(prepared) -> None:
    first = [0.5e-3, 1e-3] + [1e-3 * (8 - step) / 6 for step in range(2, 8)]
    second = [2.5e-4, 5e-4, 5e-4, 2.5e-4]
    assert rates(load(prepared, RESTARTED)) == pytest.approx(first + second)


def test_a_schedule_spans_the_phases_up_to_the_next_that_has_its_own(prepared) -> None:
    phases = "{steps: 3}, {steps: 3, masked_lm_prob: 0.2}, {steps: 2, learning_rate: 1}, {steps: 4}"
    config = load(prepared, f"train.phases=[{phases}]")
    spans = [(p.start, p.end, p.schedule_start, p.train.max_steps) for p in phases_of(config)]
    assert spans == [(0, 3, 0, 6), (3, 6, 0, 6), (6, 8, 6, 6), (8, 12, 6, 6)]
    assert [p.train.learning_rate for p in phases_of(config)] == [1e-3, 1e-3, 1, 1]
    assert [p.data.masked_lm_prob for p in phases_of(config)] == [0.15, 0.2, 0.15, 0.15]


@pytest.mark.parametrize("phases", [CONTINUED, RESTARTED])
def test_no_step_of_the_second_phase_has_a_learning_rate_of_nothing(prepared, phases) -> None:
    """gluon-nlp's second phase took up a schedule that had already ended."""
    assert min(rates(load(prepared, phases))) > 0


def test_the_loop_sets_these_rates(prepared: Path, straight: Path) -> None:
    logged = [line["train/learning_rate"] for line in metrics(straight) if "train/loss" in line]
    assert logged == rates(load(prepared, CONTINUED))


# --------------------------------------------------------------------------------------- data


def test_no_two_streams_of_random_numbers_are_the_same() -> None:
    """The seed of phase 1 was once the stream that deals the parts of epoch 1."""
    assert len(set(Stream)) == len(Stream.__members__) == 11
    streams = {derive_stream(7, i, stream) for i in range(100) for stream in Stream}
    assert len(streams) == 1100
    config = Config(seed=7)
    config.train.phases = [PhaseConfig(steps=0.5), PhaseConfig(steps=0.5)]
    assert phases_of(config)[1].seed not in {
        int(derive_stream(7, 1, s)) for s in Stream if s.name != "PHASES"
    }
    assert dropout_seed(7, 5, 2) not in {
        int(derive_stream(7, 5, s, 2) >> np.uint64(1)) for s in range(7)
    }


def test_lengths_and_batch_sizes_change_where_a_phase_begins(prepared, store) -> None:
    steps = steps_of(load(prepared, CONTINUED, MICRO_4), store)
    assert len(steps) == 12
    for step, batches in enumerate(steps):
        longest = max(batch.max_length for batch in batches)
        assert longest <= 64 if step < 8 else 64 < longest <= 128
        assert [len(batch.next_sentence_label) for batch in batches] == [4] * (4 if step < 8 else 2)


def test_pairs_come_after_single_segments(prepared: Path, tmp_path: Path, store) -> None:
    """A phase of single segments asks nothing of the pair head, whose weights stay and whose
    optimizer has not begun, says nothing of it, and is judged by single segments."""
    phases = "train.phases=[{steps: 8, single_segment_prob: 1}, {steps: 4}]"
    for step, batches in enumerate(steps_of(load(prepared, phases), store)):
        labels = {label for batch in batches for label in batch.next_sentence_label.tolist()}
        assert labels == {-100} if step < 8 else labels <= {0, 1}
    adamw = ("train.optimizer=adamw", "train.save_every=4")
    kept = ("train.log_every=1", "train.eval_every=4", "train.keep_checkpoints=3")
    train_here(prepared, tmp_path, phases, *adamw, *kept)
    logged = {line["step"]: line for line in metrics(tmp_path) if "train/loss" in line}
    assert [step for step, line in logged.items() if "train/nsp_loss" in line] == [9, 10, 11, 12]
    judged = [line for line in metrics(tmp_path) if "eval/loss" in line]
    assert ["eval/nsp_accuracy" in line for line in judged] == [False, False, True]
    assert judged[1]["eval/loss"] == judged[1]["eval/mlm_loss"] > 0
    first, second, last = (load_file(path / "model.safetensors") for path in checkpoints(tmp_path))
    for name in ("pooler.weight", "nsp.weight"):
        assert torch.equal(first[name], second[name]) and not torch.equal(second[name], last[name])
    word = "embeddings.word.weight"
    assert not torch.equal(first[word], second[word])
    steps = [load_file(path / "optimizer.safetensors") for path in checkpoints(tmp_path)]
    assert [[state.get(f"{name}/step") for name in (word, "nsp.bias")] for state in steps] == [
        [4, None],
        [8, None],
        [12, 4],
    ]


def test_pairs_that_never_come_are_refused(prepared) -> None:
    for asked in (
        "data.single_segment_prob=1",
        "train.phases=[{steps: 12, single_segment_prob: 1}]",
    ):
        with pytest.raises(UserError, match="single_segment_prob is 1 throughout"):
            load(prepared, asked)
    with pytest.raises(UserError, match="all sequences have one segment; remove it"):
        load(prepared, "data.objective=none", "data.single_segment_prob=0.5")


def test_the_first_phase_is_what_a_run_without_phases_sees_and_the_next_differs(
    prepared, store
) -> None:
    plain = steps_of(load(prepared), store)
    phases = steps_of(load(prepared, "train.phases=[{steps: 6}, {steps: 6}]"), store)
    for step in range(6):
        assert torch.equal(phases[step][0].input_ids, plain[step][0].input_ids)
    seen = {tuple(batch.input_ids.tolist()) for (batch,) in plain}
    assert not seen & {tuple(batch.input_ids.tolist()) for (batch,) in phases[6:]}


def test_a_phase_begins_with_the_first_example_of_its_own(prepared, store) -> None:
    """Examples are numbered from 0 in each phase, whatever was read before."""
    config = load(prepared, RESTARTED)
    second = phases_of(config)[1]
    wanted = BatchSource(store, second.data, second.seed).batch(0, 16)
    assert torch.equal(steps_of(config, store)[8][0].input_ids, wanted.input_ids)


def test_a_step_is_the_same_from_any_start_and_on_any_number_of_processes(prepared, store) -> None:
    config = load(prepared, CONTINUED, MICRO_4)
    whole = steps_of(config, store)
    for start in (3, 8, 10):
        ranks = [steps_of(config, store, start, rank, 2) for rank in (0, 1)]
        for wanted, *halves in zip(whole[start:], *ranks, strict=True):
            found = [batch.input_ids for half in halves for batch in half]
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b.input_ids) for a, b in zip(found, wanted, strict=True))


# --------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("kept", ["step-00000006", "step-00000008", "step-00000010"])
def test_a_run_that_was_stopped_in_a_phase_or_between_two_goes_on_to_the_same_end(
    prepared: Path, straight: Path, tmp_path: Path, kept: str
) -> None:
    options = (CONTINUED, MICRO_4, "train.log_every=1")
    train_here(prepared, tmp_path, *options, f"train.save_every={int(kept[-2:])}")
    for path in (tmp_path / "checkpoints").iterdir():
        if path.name != kept:
            shutil.rmtree(path)
    train_here(prepared, tmp_path, *options)
    assert_same_run(tmp_path, straight)


def test_a_phase_that_is_changed_before_it_begins_has_the_data_of_its_new_settings(
    prepared: Path, tmp_path: Path
) -> None:
    """More sequences than one epoch of the long ones has, and less than one of the short ones."""
    phases = "train.phases=[{{steps: 8}}, {{steps: 4, max_seq_length: {}, global_batch_size: 400}}]"
    options = ("train.micro_batch_size=16", "train.keep_checkpoints=3")
    train_here(prepared, tmp_path / "run", phases.format(16), *options)
    for step in (8, 12):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    for name in ("run", "straight"):
        train_here(prepared, tmp_path / name, phases.format(128), *options)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def positions(run_dir: Path) -> torch.Tensor:
    return newest(run_dir)["embeddings.position.weight"]


def test_positions_that_a_phase_adds_continue_those_that_are_trained(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    """Four small steps leave them near."""
    found = positions(straight)
    wanted = continue_positions(found[:64], 128)[64:]
    assert torch.cosine_similarity(found[64:128], wanted).min() > 0.9
    train_here(prepared, tmp_path, "train.phases=[{steps: 8}, {steps: 4}]", MICRO_4)
    random = positions(tmp_path)
    wanted = continue_positions(random[:64], 128)[64:]
    assert torch.cosine_similarity(random[64:128], wanted).max() < 0.7


def test_positions_go_on_as_a_line_and_what_is_left_beside_it_is_repeated() -> None:
    """Compared with least squares; three times as many positions drift as far again in all."""
    torch.manual_seed(0)
    table = torch.randn(8, 5) + torch.arange(8)[:, None] * torch.randn(5)
    slope, start = np.polyfit(np.arange(8), table.numpy(), 1)
    beside = table.numpy() - start - np.arange(8)[:, None] * slope
    found = continue_positions(table, 16).numpy()
    line = start + np.arange(16)[:, None] * slope
    np.testing.assert_allclose(found, line + np.tile(beside, (2, 1)), atol=1e-4)
    found = continue_positions(table, 20)
    assert torch.equal(found[:8], table)
    drift = np.repeat([4, 8], [8, 4])[:, None] * slope
    np.testing.assert_allclose(found[8:], table[[*range(8), *range(4)]] + drift, atol=1e-4)
    assert torch.equal(continue_positions(table, 3), table[:3])
    assert torch.equal(continue_positions(table[:1], 3), table[[0, 0, 0]])


def test_positions_of_other_weights_are_left_alone(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    """Those of a model to start from are all trained."""
    model = load_export(straight / "export")
    options = (f"init_from={straight / 'export'}", "model.max_position_embeddings=128")
    train_here(prepared, tmp_path, CONTINUED, MICRO_4, "train.learning_rate=1e-9", *options)
    torch.testing.assert_close(positions(tmp_path), model.embeddings.position.weight.detach())


def test_one_phase_that_changes_nothing_is_a_run_without_phases(
    prepared: Path, tmp_path: Path
) -> None:
    train_here(prepared, tmp_path / "a", "train.phases=[{steps: 12}]")
    train_here(prepared, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_two_processes_have_the_learning_rates_and_losses_of_one(
    prepared: Path, straight: Path, tmp_path: Path
) -> None:
    done = run(prepared, tmp_path, CONTINUED, MICRO_4, "train.log_every=1", processes=2)
    assert done.returncode == 0, done.stderr
    for one, two in zip(metrics(straight), metrics(tmp_path), strict=True):
        assert one.get("train/learning_rate") == two.get("train/learning_rate")
        assert one == pytest.approx(two, rel=1e-5)
    for line in ("step 0 to 8: 16 sequences of at most 64", "step 8 to 12: 8 sequences of at most"):
        assert line in done.stdout


def test_every_evaluation_is_made_at_the_length_of_the_config(straight: Path, prepared) -> None:
    """So that it can be compared over the run; and the run's own config says all of it again."""
    baselines = {
        (line["eval/unigram_entropy"], line["eval/nsp_majority"])
        for line in metrics(straight)
        if "eval/mlm_loss" in line
    }
    assert len(baselines) == 1
    config = load_config(Config, str(straight / "config.yaml"))
    assert phases_of(config) == phases_of(
        load(prepared, CONTINUED, MICRO_4, "train.save_every=2", "train.log_every=1")
    )


def test_a_phase_of_another_length_is_evaluated_at_it_too(straight: Path, prepared, store) -> None:
    at_length = [[key for key in line if key.endswith("_at_128")] for line in metrics(straight)]
    evaluated = ["eval/mlm_loss" in line for line in metrics(straight)]
    assert [bool(keys) for keys in at_length] == [
        is_one and line["step"] > 8
        for is_one, line in zip(evaluated, metrics(straight), strict=True)
    ]
    model = load_export(straight / "export")
    data = replace(load(prepared, CONTINUED).data, max_seq_length=128)
    held_out = HeldOut(prepared / "data/store", store, data, 32, 8, Accelerator(cpu=True))
    wanted, last = evaluate(model, held_out, Accelerator(cpu=True)), metrics(straight)[-1]
    for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy"):
        assert last[f"eval/{name}_at_128"] == pytest.approx(wanted[f"eval/{name}"], rel=1e-4)


def test_a_long_phase_is_evaluated_with_as_many_masks_as_it_allows(prepared, store) -> None:
    """A sequence of 64 tokens with the 4 masks of one of 32 would have half the share of masks."""
    phases = "[{steps: 8}, {steps: 4, max_seq_length: 64, max_predictions_per_seq: 10}]"
    short = ("data.max_seq_length=32", "data.max_predictions_per_seq=4")
    config = load(prepared, *short, f"train.phases={phases}")
    found = build_held_out(config, phases_of(config), store, Accelerator(cpu=True))
    most = {
        length: max(
            batch.sequence_ids[batch.masked_positions].bincount().max().item()
            for batch, *_ in held_out.batches
        )
        for (length, _), held_out in found.items()
    }
    assert most == {32: 4, 64: 10}


def test_other_phases_are_another_run(prepared: Path, straight: Path) -> None:
    before = newest(straight)
    with pytest.raises(UserError, match="phase 1: schedule_start was 0, is 8"):
        train_here(prepared, straight, RESTARTED, MICRO_4)
    assert newest(straight).keys() == before.keys()


def test_the_card_of_the_export_names_the_phases(straight: Path) -> None:
    card = (straight / "export/README.md").read_text()
    assert "16 sequences of at most 64 tokens and 8 sequences of at most 128 tokens" in card


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "phases, message",
    [
        ("[{steps: 8}, {steps: 8}]", "phases add up to 16, but train.max_steps is 12; give shares"),
        ("[{}]", r"train.phases\[0\].steps 0.0 is not in"),
        ("[{steps: 12, lenght: 3}]", r"unknown key train.phases\[0\].lenght"),
        ("{steps: 12}", "train.phases is not a list of phases"),
        ("[{steps: 8}, {steps: 4, warmup_steps: 1}]", r"phases\[1\]\.warmup_steps is set without"),
        (
            "[{steps: 8}, {steps: 4, learning_rate: 1, warmup_steps: 4}]",
            r"train.phases\[1\]: train.warmup_steps 4 is not below the 4 steps of the schedule",
        ),
        (
            "[{steps: 8}, {steps: 4, max_seq_length: 513}]",
            r"train.phases\[1\]: data.max_seq_length 513 exceeds model.max_position_embeddings 512",
        ),
        (
            "[{steps: 8}, {steps: 0.5}]",
            r"train.phases mixes steps and shares of train.max_steps; give one or the other",
        ),
        (
            "[{steps: 0.5}, {steps: 0.4}]",
            r"train.phases add up to 0.9, .*; give shares that add up to 1",
        ),
        (
            "[{steps: 8}, {steps: 4.5}]",
            r"train.phases\[1\].steps 4.5 is neither steps nor a share",
        ),
        ("[{steps: 12, masked_lm_prob: 1}]", r"train.phases\[0\].masked_lm_prob 1.0 is not in"),
        ("[{steps: 12, learning_rate: 0}]", r"train.phases\[0\].learning_rate 0.0 is not in"),
    ],
)
def test_phases_that_cannot_be_are_refused_by_name(prepared: Path, phases, message) -> None:
    with pytest.raises(UserError, match=message):
        load(prepared, f"train.phases={phases}")


def test_each_phase_has_a_step_however_small_its_share() -> None:
    assert phase_edges([0.5, 0.499, 0.001], 10) == [0, 5, 9, 10]
    assert phase_edges([0.001, 0.001, 0.998], 10) == [0, 1, 2, 10]


@pytest.mark.parametrize(
    "share, number, steps", [("0.1666667", 6, 10_000_000), ("0.3333333", 3, 8_000_000)]
)
def test_the_last_phase_ends_with_the_run_however_shares_are_rounded(
    prepared: Path, share: str, number: int, steps: int
) -> None:
    shares = ", ".join([f"{{steps: {share}}}"] * number)
    phases = phases_of(load(prepared, f"train.phases=[{shares}]", f"train.max_steps={steps}"))
    assert [phase.start for phase in phases[1:]] == [phase.end for phase in phases[:-1]]
    assert phases[-1].end == steps


def test_a_phase_whose_pairs_the_corpus_cannot_give_is_refused_at_the_start(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    real = BatchSource.part_size

    def part_size(source, number):
        if source.data.max_seq_length == 128:
            raise UserError("no pairs of this length")
        return real(source, number)

    monkeypatch.setattr(BatchSource, "part_size", part_size)
    with pytest.raises(UserError, match="no pairs of this length"):
        train_here(prepared, tmp_path / "run", CONTINUED, MICRO_4)
    assert not (tmp_path / "run").exists()
