"""What `plan` says is what a run then takes, and `--check` finds what cannot learn."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import ROOT, train_here
from safetensors.torch import load_file

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain import plan
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import Config, phases_of
from pretrain.models.bert import PretrainingModel
from pretrain.models.layers import pick
from pretrain.optim import build_optimizers

LARGER = ("model.hidden_size=128", "train.learning_rate=1e-3", "train.max_steps=40")


def config_of(root: Path, *overrides: str) -> Config:
    return load_config(Config, str(root / "config.yaml"), list(overrides))


@pytest.fixture(scope="module")
def table(prepared: Path) -> dict[str, list[float]]:
    """Name of each row -> the numbers in it."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        plan.plan(config_of(prepared, *LARGER))
    rows = [line for line in out.getvalue().splitlines() if not line.startswith("warning")]
    return {
        row[:20].strip(): [
            float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*(?:e[+-]\d+)?", row[20:])
        ]
        for row in rows
    }


def test_parameters_memory_and_disk_are_those_of_the_model(
    prepared: Path, store: TokenStore, table: dict, tmp_path: Path
) -> None:
    config = config_of(prepared, *LARGER)
    model = PretrainingModel(config.model, len(store.vocabulary))
    weights = sum(p.numel() for p in model.parameters())
    rows = len(store.vocabulary) + 512 + 2 + 2  # pieces, positions, types, norm
    assert table["parameters"][:2] == [weights, rows * 128]
    total, both, adamw, activations = table["device memory"]
    assert both == adamw == round(8 * weights / 1e6)
    assert total == pytest.approx(both + adamw + activations, abs=2)
    run_dir = tmp_path / "run"
    train_here(prepared, run_dir, *LARGER, "train.max_steps=3")
    folder = newest_checkpoint(run_dir / "checkpoints")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    assert table["disk"] == pytest.approx([size, 3 * size], abs=2)


def test_a_pass_is_never_larger_than_the_batch(prepared: Path, capsys) -> None:
    memory = []
    for size in (16, 256):
        plan.plan(config_of(prepared, *LARGER, f"train.micro_batch_size={size}"))
        said = capsys.readouterr().out
        memory.append(said.partition("device memory")[2].partition("\n")[0])
    assert memory[0] == memory[1]


def test_epochs_and_tokens_are_those_that_the_loop_would_count(
    store: TokenStore, table: dict
) -> None:
    source = BatchSource(store, PairsConfig(max_seq_length=64), seed=0)
    tokens = len(source.batch(0, source.epoch_size(0)).input_ids)
    steps, batch, epochs, size, found, operations = table["the run"]
    assert (steps, batch, size) == (40, 16, source.epoch_size(0))
    assert epochs == pytest.approx(640 / size, abs=0.05)
    assert found == pytest.approx(tokens, rel=0.02)  # from a sample
    assert table["operations"][0] == pytest.approx(operations * tokens * 640 / size, rel=0.02)
    assert table["time here"][0] >= 0 and table["time here"][1] > 0


@pytest.mark.parametrize("compile", [True, False])
def test_the_time_is_that_of_the_model_that_runs(prepared, compile, monkeypatch, capsys) -> None:
    built: list[str] = []

    def compile_layers(self) -> None:
        built.append("compiled")

    monkeypatch.setattr(PretrainingModel, "compile_layers", compile_layers)
    monkeypatch.setattr(plan, "try_steps", lambda *_: built.append("tried") or (1e9, 1e-3))
    plan.plan(config_of(prepared, f"train.compile={compile}"))
    assert built == ["compiled"] * compile + ["tried"]


@pytest.mark.parametrize(("a_sequence", "size"), [(0.001, 64), (0.1, 16), (30.0, 1)])
def test_steps_are_tried_at_their_size_and_not_with_the_first_of_each(
    prepared, store, a_sequence, size, monkeypatch
) -> None:
    """With a clock that says what a pass takes, and three times as much for one of a new size."""
    config = config_of(prepared)
    model = PretrainingModel(config.model, len(store.vocabulary))
    source, clock, sizes = BatchSource(store, config.data, seed=0), [0.0], []

    def backward(model, batch, accelerator) -> None:
        n = len(batch.next_sentence_label)
        clock[0] += n * a_sequence * (1 if n in sizes else 3)
        sizes.append(n)

    def update(*_) -> None:
        clock[0] += 0.5

    monkeypatch.setattr(plan, "now", lambda _: clock[0])
    monkeypatch.setattr(plan, "backward", backward)
    monkeypatch.setattr(plan, "update", update)
    speed, update_s = plan.try_steps(model, [], source, 64, Accelerator(cpu=True))
    assert speed == pytest.approx(model.count_flops(source.batch(0, size)) / (size * a_sequence))
    assert update_s == pytest.approx(0.5)
    assert max(sizes) == size and sizes.count(size) >= 2


def test_activations_are_a_line_in_the_tokens(prepared: Path, store: TokenStore) -> None:
    """As many bytes as autograd keeps of a batch that the line was not drawn through."""
    config = config_of(prepared, *LARGER)
    model = PretrainingModel(config.model, len(store.vocabulary))
    source = BatchSource(store, config.data, seed=0)
    batch = source.batch(100, 64)
    tokens, own = len(batch.input_ids), {p.data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _rows = model(batch)  # or what it keeps would be freed
    wanted = sum(size for where, size in kept.items() if where not in own)
    head = 4 * (plan.CHUNK["cpu"] + model.embeddings.word.weight.numel())
    found = plan.measure_activations(model, source, tokens, Accelerator(cpu=True)) - head
    assert found == pytest.approx(1.25 * wanted, rel=0.15)
    model.gradient_checkpointing = True
    less = plan.measure_activations(model, source, tokens, Accelerator(cpu=True)) - head
    assert 0.5 * found < less < 0.8 * found  # of two layers one is kept
    assert model.gradient_checkpointing


def test_phases_are_planned_one_by_one(prepared: Path, capsys) -> None:
    phases = "[{steps: 30}, {steps: 10, max_seq_length: 32, global_batch_size: 32}]"
    plan.plan(config_of(prepared, *LARGER, f"train.phases={phases}"))
    out = capsys.readouterr().out
    assert re.search(r"^phase 0 +30 steps of 16 sequences", out, re.M)
    assert re.search(r"^phase 1 +10 steps of 32 sequences", out, re.M)
    assert "the run" not in out


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.max_steps=100000"], "each sentence is seen"),
        (["train.global_batch_size=16"], "tokens per step are few"),
        (["train.warmup_steps=30"], "the warm-up takes 30%"),
        (
            ["train.learning_rate=0.1"],
            "train.learning_rate 0.1 is outside the usual range of 1e-05 to 0.002",
        ),
        (["data.max_predictions_per_seq=5"], "is below the 9 masks"),
        (
            ["data.mask_replace_prob=0.9", "data.random_replace_prob=0.1"],
            "50% of the tokens are inside words",
        ),
    ],
)
def test_what_is_unusual_is_named_and_nothing_else(prepared, overrides, named) -> None:
    config = config_of(prepared, "train.max_steps=100", "train.global_batch_size=64", *overrides)
    epochs = config.train.max_steps / 100
    found = list(plan.list_unusual(phases_of(config)[0], epochs, 60.0, np.full(1000, 500), 0.5))
    assert len(found) == 1 and named in found[0]


@pytest.mark.parametrize(
    ("holds", "fails"),
    [
        ({"epochs": 40}, {"epochs": 41}),
        ({"tokens": 32.0}, {"tokens": 31.9}),  # of 64 sequences
        ({"counts": np.repeat([49, 50], [50, 50])}, {"counts": np.repeat([49, 50], [51, 49])}),
        ({"warmup_steps": 20}, {"warmup_steps": 21}),
        ({"learning_rate": 2e-3}, {"learning_rate": 2.1e-3}),
        ({"learning_rate": 1e-5}, {"learning_rate": 9e-6}),
        ({"random_replace_prob": 0.2, "inside": 0.2}, {"random_replace_prob": 0.2}),
        ({"random_replace_prob": 0.19}, {"random_replace_prob": 0.2}),
        ({"max_predictions_per_seq": 9}, {"max_predictions_per_seq": 8}),
    ],
)
def test_a_setting_is_unusual_beyond_its_limit_and_not_at_it(prepared, holds, fails) -> None:
    for given, warnings in ((holds, 0), (fails, 1)):
        given = {"epochs": 1, "tokens": 60.0, "counts": None, "inside": 0.21} | given
        figures = [given.pop(name) for name in ("epochs", "tokens", "counts", "inside")]
        of_data = ("random_replace_prob", "max_predictions_per_seq")
        options = [f"{'data' if n in of_data else 'train'}.{n}={v}" for n, v in given.items()]
        usual = ("train.max_steps=100", "train.global_batch_size=64")
        (phase,) = phases_of(config_of(prepared, *usual, *options))
        assert len(list(plan.list_unusual(phase, *figures))) == warnings


def test_a_vocabulary_too_large_for_its_text_is_named(prepared: Path) -> None:
    config = config_of(prepared, "train.max_steps=100", "train.global_batch_size=64")
    assert (
        list(
            plan.list_unusual(phases_of(config)[0], 1.0, 60.0, np.repeat([10, 100], [49, 51]), 0.0)
        )
        == []
    )
    found = list(
        plan.list_unusual(phases_of(config)[0], 1.0, 60.0, np.repeat([10, 100], [60, 40]), 0.0)
    )
    assert "60% of the pieces occur fewer than 50 times; lower vocab.size to 40" in found[0]


def test_hiding_all_of_a_word_is_named_only_where_words_have_many_tokens(prepared: Path) -> None:
    """A single character of a Chinese word costs then 1.6 nats more: docs/experiments.md."""
    usual = ("train.max_steps=100", "train.global_batch_size=64")
    hidden = (*usual, "data.mask_replace_prob=1", "data.random_replace_prob=0")
    for overrides, inside in [(usual, 0.5), (hidden, 0.04), ((*hidden, "data.masking=token"), 0.5)]:
        (phase,) = phases_of(config_of(prepared, *overrides))
        assert not list(plan.list_unusual(phase, 1.0, 60.0, None, inside))


def test_the_share_of_tokens_inside_words_is_counted(prepared: Path) -> None:
    config = config_of(prepared)
    folder = Path(config.data_dir)
    store = TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    pieces = [store.vocabulary.pieces[i] for i in store.tokens.tolist()]
    wanted = sum(piece.startswith("##") for piece in pieces) / len(pieces)
    assert 0 < wanted == pytest.approx(plan.share_inside(store))


@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_a_model_that_can_learn_learns_a_batch_by_heart(prepared, objective, capsys) -> None:
    plan.check_learning(config_of(prepared, *LARGER, f"data.objective={objective}"))
    out = capsys.readouterr().out
    assert "[CLS]" in out and "[MASK](" in out
    assert re.search(r"the model overfits 4 sequences: MLM loss 0\.\d+ at step \d+", out)


@pytest.mark.parametrize("share", [1, 0.9])
def test_a_recipe_whose_first_phase_has_single_segments_is_checked_by_pairs(
    prepared, share, capsys
) -> None:
    phases = f"train.phases=[{{steps: 0.75, single_segment_prob: {share}}}, {{steps: 0.25}}]"
    plan.check_learning(config_of(prepared, *LARGER, phases))
    assert "the model overfits 4 sequences: MLM loss 0." in capsys.readouterr().out


def test_a_small_model_waits_for_the_host_that_launches_it(prepared: Path) -> None:
    phases = phases_of(config_of(prepared, "train.max_steps=100000"))
    assert plan.estimate_time(1.0, phases, 1, 2).startswith("about 2.7 min")
    assert plan.estimate_time(1e20, phases, 1, 2).startswith("about 2.9 days")


def test_documents_as_short_as_queries_are_planned_for(tmp_path, capsys) -> None:
    text = "\n\n".join(f"the value of {i % 9}" for i in range(4000))
    (tmp_path / "a.txt").write_text(text)
    given = {"max_seq_length": 128, "objective": "none"}
    options = [f"corpus.files={tmp_path / 'a.txt'}", f"data_dir={tmp_path / 'data'}"]
    options += [f"run_dir={tmp_path / 'run'}", "vocab.size=29", "train.precision=fp32"]
    options += ["corpus.deduplicate=false"]
    options += [f"data.{name}={value}" for name, value in given.items()]
    path = str(ROOT / "configs/tiny.yaml")
    prepare(load_config(DataConfig, path, options), workers=1)
    plan.plan(load_config(Config, path, options), None, plan.CARDS)
    assert "memory" in capsys.readouterr().out


def test_a_check_of_a_run_that_continues_a_model_starts_from_it(
    prepared, straight, monkeypatch
) -> None:
    class Seen(Exception):
        pass

    def backward(model, batch, accelerator) -> None:
        weights = load_file(straight / "export/model.safetensors")
        assert torch.equal(
            model.embeddings.word.weight, weights["bert.embeddings.word_embeddings.weight"]
        )
        raise Seen

    monkeypatch.setattr(plan, "backward", backward)
    with pytest.raises(Seen):
        plan.check_learning(config_of(prepared, f"init_from={straight}/export"))


def test_weights_to_start_from_are_looked_at_before_there_is_a_store(
    prepared, straight, tmp_path
) -> None:
    shutil.copytree(straight / "export", tmp_path / "in")
    path = tmp_path / "in/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        plan.plan(config_of(prepared, f"data_dir={tmp_path}/none", f"init_from={tmp_path}/in"))


def test_a_model_that_does_not_learn_is_refused_in_one_line(prepared, monkeypatch) -> None:
    monkeypatch.setattr(plan, "STEPS", 30)
    with pytest.raises(UserError, match="does not overfit 4 sequences: MLM loss .* after 30 steps"):
        plan.check_learning(config_of(prepared, "train.learning_rate=1e-9"))


def test_a_parameter_without_a_gradient_is_named(prepared, monkeypatch) -> None:
    build = plan.build_model

    def build_cut(config, counts):
        model = build(replace(config), counts)
        model.layers[1].forward = lambda x, batch, rows: pick(x, rows)
        return model

    monkeypatch.setattr(plan, "build_model", build_cut)
    with pytest.raises(UserError, match=r"no gradient reaches layers\.1\.attention\.query\.weight"):
        plan.check_learning(config_of(prepared))


def test_without_a_store_the_error_of_a_check_names_the_command(prepared, tmp_path) -> None:
    with pytest.raises(UserError, match="make one: python -m data_pipeline CONFIG"):
        plan.check_learning(config_of(prepared, f"data_dir={tmp_path}/none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "pieces", "wanted"),
    [
        ("albert_base", 30_000, (11_683_584,)),  # without the heads
        ("electra_small", 30_522, (13_549_057, 4_620_026)),  # discriminator, generator
    ],
)
def test_a_recipe_of_its_published_size_is_planned_and_takes_a_step(
    recipe, pieces, wanted, prepared, store, tmp_path, capsys
) -> None:
    own = (f"corpus.files={prepared}/topics.txt", f"data_dir={tmp_path}", f"vocab.size={pieces}")
    few = ("train.global_batch_size=2", "train.micro_batch_size=2", "train.precision=fp32")
    config = load_config(Config, str(ROOT / f"configs/{recipe}.yaml"), [*own, *few])
    model = plan.build_model(config, torch.ones(pieces)).eval()  # no dropout
    parts = list(model.parts().values())
    if recipe == "albert_base":
        parts = [torch.nn.ModuleList((model.embeddings, model.project, model.layers, model.pooler))]
    assert tuple(map(plan.count_weights, parts)) == wanted

    batch = BatchSource(store, config.data, 0).batch(0, 2)
    optimizers = build_optimizers(model, config.train)
    accelerator = Accelerator(cpu=True)
    before = plan.backward(model, batch, accelerator)
    plan.update(optimizers, 1e-4)
    with torch.no_grad():
        after = model(batch)[0, 0].item() / len(batch.masked_labels)
    assert after < before - 0.01

    plan.plan(config)
    said = capsys.readouterr().out
    rows = -pieces % 64  # the vocabulary is padded
    total = plan.count_weights(model) + rows * (config.model.embedding_size + 1)
    assert f"parameters          {total:,}: " in said
    memory = said.partition("device memory")[2].partition("\n")[0]
    kept = [float(n.replace(",", "")) for n in re.findall(r"([\d,]+) MB", memory)]
    assert kept[0] == pytest.approx(sum(kept[1:]), abs=2)
    assert kept[1] == kept[2] == round(8 * total / 1e6) and kept[3] > 0
