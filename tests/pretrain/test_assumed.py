"""A plan before there is any data is near the plan of the data, and names what it assumes."""

import bz2
import gzip
import lzma
import re
import sys
from pathlib import Path

import pytest
import torch
import zstandard
from helpers import ROOT

from data_pipeline.build.prepare import prepare
from data_pipeline.common.errors import UserError, run_command
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.manifest import read_manifest
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary
from data_pipeline.vocabulary.training import SPECIAL_TOKENS
from pretrain import plan
from pretrain.assumed import UNPACKED, assume_data, make_up_store, make_up_vocabulary
from pretrain.config import Config, phases_of

RECIPES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
RECIPES.remove("continue.yaml")  # starts from a folder that a clone lacks
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKERS[".zst"] = zstandard.ZstdCompressor().compress
PARAMETERS = {"bert_base.yaml": 110.1e6, "bert_large.yaml": 336.2e6, "mini.yaml": 11.27e6}


def config_of(prepared: Path, tmp_path: Path, *overrides: str) -> Config:
    """The config of the prepared corpus, with a data folder that is not there."""
    return load_config(
        Config, str(prepared / "config.yaml"), [f"data_dir={tmp_path}/none", *overrides]
    )


@pytest.fixture
def no_trial(monkeypatch) -> None:
    """The arithmetic alone: no step is tried, no activation measured."""
    monkeypatch.setattr(plan, "try_steps", lambda *_: (1e11, 0.1))
    monkeypatch.setattr(plan, "measure_activations", lambda *_: 1e9)


def table_of(out: str) -> dict[str, str]:
    """Name of each row -> what it says; what comes before the table has names of its own."""
    rows = [
        re.match(r"(assumed|epochs unknown|warning|--tokens ignored): (.*)", line)
        or re.match(r"(.{20})(.*)", line)
        for line in out.splitlines()
    ]
    return {row[1].strip(): row[2] for row in rows}


def numbers(text: str) -> list[float]:
    found = re.findall(r"\d[\d,]*\.?\d*(?:e[+-]\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


# ---------------------------------------------------------------------------------- the store


@pytest.mark.parametrize(("length", "wanted"), [(64, 48.5), (128, 100.5), (512, 391.6)])
def test_sequences_of_the_made_up_store_are_as_long_as_those_of_english(length, wanted) -> None:
    """Wanted: tokens of a sequence in 95 MB of books, encyclopaedia, news and technical prose."""
    vocabulary = Vocabulary.of([*SPECIAL_TOKENS, *map(str, range(995))])
    source = BatchSource(make_up_store(vocabulary), PairsConfig(max_seq_length=length), 0)
    count = source.part_size(0)
    assert len(source.batch(0, count).input_ids) / count == pytest.approx(wanted, rel=0.04)


def test_the_made_up_store_has_words_of_several_pieces_and_frequent_ones(
    prepared: Path, tmp_path: Path
) -> None:
    vocabulary, _ = make_up_vocabulary(config_of(prepared, tmp_path, "vocab.size=30522").vocab)
    store = make_up_store(vocabulary)
    assert 0.03 < vocabulary.continues[store.tokens].mean() < 0.09
    assert store.token_counts().max() / len(store) == pytest.approx(0.053, rel=0.1)  # as "the"
    assert store.sentence_offsets[-1] == len(store)
    assert store.document_offsets[-1] == len(store.sentence_offsets) - 1


def test_without_data_the_plan_is_near_that_of_the_data(
    prepared: Path, store: TokenStore, tmp_path: Path, no_trial, capsys
) -> None:
    """All but the size of the corpus, which the next test is about."""
    plan.plan(load_config(Config, str(prepared / "config.yaml"), []))
    real = table_of(capsys.readouterr().out)
    plan.plan(config_of(prepared, tmp_path), given=len(store) / 0.8)  # a fifth is held out
    found = table_of(capsys.readouterr().out)
    assert found.pop("assumed").startswith(f"no store at {tmp_path}/none yet; 1,024 pieces")
    assert found.pop("preparation")
    found.pop("warning", None), real.pop("warning", None)
    assert found.keys() == real.keys()
    assert found["parameters"] == real["parameters"]
    assert found["disk"] == real["disk"]
    steps, batch, epochs, sequences, tokens, operations = numbers(real["the run"])
    said = numbers(found["the run"])
    assert said[:2] == [steps, batch]
    assert said[2:5] == pytest.approx([epochs, sequences, tokens], rel=0.05)
    assert said[5] == pytest.approx(operations, rel=0.05)
    assert numbers(found["operations"]) == pytest.approx(numbers(real["operations"]), rel=0.05)


def test_files_say_how_many_tokens_the_store_will_have(prepared: Path, tmp_path: Path) -> None:
    """Of 94.7 MB of English 20.3 M are estimated, as it has; a text as small as this one is
    fitted better by its own vocabulary, so that fewer are found."""
    source = read_manifest(prepared / "data/store")["sources"][0]
    found = assume_data(config_of(prepared, tmp_path)).train_tokens / 0.8
    assert 0.95 * source["tokens"] < found < 1.35 * source["tokens"]


def test_the_trial_runs_on_the_made_up_store(prepared: Path, tmp_path: Path, capsys) -> None:
    plan.plan(config_of(prepared, tmp_path))
    found = table_of(capsys.readouterr().out)
    assert numbers(found["time here"])[1] > 0
    assert numbers(found["device memory"])[-1] > 10  # MB: the scores of the head alone


def test_a_plan_before_the_data_leaves_out_what_needs_real_words(
    prepared: Path, tmp_path: Path, no_trial, capsys
) -> None:
    plan.plan(config_of(prepared, tmp_path, "vocab.size=30522"))
    assert "occur fewer than" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------- the corpus


def test_given_tokens_make_the_epochs(prepared: Path, tmp_path: Path, no_trial, capsys) -> None:
    plan.plan(config_of(prepared, tmp_path), given=3.3e9)
    found = table_of(capsys.readouterr().out)
    assert "3,300,000,000 tokens (--tokens)" in found["assumed"]
    *_, sequences, tokens, _ = numbers(found["the run"])
    assert tokens == pytest.approx(0.8 * 3.3e9 * 51 / 48, rel=0.03)  # a fifth is held out
    assert tokens / sequences == pytest.approx(48, rel=0.05)


def test_where_there_is_a_store_given_tokens_are_ignored_in_one_line(
    prepared: Path, store: TokenStore, no_trial, capsys
) -> None:
    plan.plan(load_config(Config, str(prepared / "config.yaml"), []), given=3.3e9)
    found = table_of(capsys.readouterr().out)
    assert f"holds {len(store):,} tokens to train on" in found["--tokens ignored"]
    assert "assumed" not in found


@pytest.mark.parametrize("is_upper", [False, True])
@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_counted_as_the_text_in_them(
    prepared, tmp_path, suffix, is_upper: bool
) -> None:
    text = (prepared / "topics.txt").read_bytes()
    path = tmp_path / f"topics.txt{suffix.upper() if is_upper else suffix}"
    path.write_bytes(PACKERS[suffix](text))
    plain = assume_data(config_of(prepared, tmp_path))
    packed = assume_data(config_of(prepared, tmp_path, f"corpus.files={path}"))
    assert packed.train_tokens == pytest.approx(plain.train_tokens, rel=0.35)
    assert (
        f"about {path.stat().st_size * UNPACKED[suffix] / 1e6:.1f} MB unpacked" in packed.lines[0]
    )


def test_the_text_of_slow_files_is_counted_as_a_copy_on_disk(prepared, tmp_path) -> None:
    path = tmp_path / "topics.txt.xz"
    path.write_bytes(lzma.compress((prepared / "topics.txt").read_bytes()))
    most = []
    for deduplicate in ("false", "true"):
        settings = f"corpus.deduplicate={deduplicate}", "corpus.held_out_fraction=0"
        config = config_of(prepared, tmp_path, f"corpus.files={path}", *settings)
        most.append(assume_data(config).preparation.most_bytes)
    assert most[1] - most[0] == pytest.approx(path.stat().st_size * UNPACKED[".xz"])


def test_of_a_small_corpus_documents_are_compared_to_be_held_out(prepared, tmp_path) -> None:
    path = tmp_path / "topics.txt.xz"
    path.write_bytes(lzma.compress((prepared / "topics.txt").read_bytes()))
    most = []
    for fraction in (0, 0.2):
        settings = "corpus.deduplicate=false", f"corpus.held_out_fraction={fraction}"
        config = config_of(prepared, tmp_path, f"corpus.files={path}", *settings)
        most.append(assume_data(config).preparation.most_bytes)
    assert most[1] - most[0] == pytest.approx(path.stat().st_size * UNPACKED[".xz"])


def test_chinese_has_a_token_for_each_character(prepared: Path, tmp_path: Path) -> None:
    path = tmp_path / "zh.txt"
    path.write_text("今天天气很好，我们去公园散步。\n" * 200, encoding="utf-8")
    assumed = assume_data(config_of(prepared, tmp_path, f"corpus.files={path}", "vocab.size=8192"))
    assert assumed.train_tokens == pytest.approx(0.8 * 200 * 15, rel=0.02)


def test_a_weight_repeats_tokens_in_the_store(prepared: Path, tmp_path: Path) -> None:
    once, thrice = (
        assume_data(config_of(prepared, tmp_path, f"corpus.weight={weight}")) for weight in (1, 3)
    )
    assert thrice.train_tokens == pytest.approx(3 * once.train_tokens)
    assert thrice.preparation.store_bytes == pytest.approx(3 * once.preparation.store_bytes)
    assert thrice.preparation.seconds == once.preparation.seconds


def test_a_missing_corpus_leaves_epochs_out_and_says_how_to_get_them(
    prepared: Path, tmp_path: Path, no_trial, capsys
) -> None:
    plan.plan(config_of(prepared, tmp_path, f"corpus.files={tmp_path}/*.txt"))
    found = table_of(capsys.readouterr().out)
    assert re.search(
        "no file matches .*--tokens 3.3e9.*python -m data_pipeline CONFIG", found["epochs unknown"]
    )
    assert "epochs" not in found["the run"] and "tokens in all" in found["the run"]
    assert "preparation" not in found


@pytest.mark.parametrize("source", ["builtin: python-docs", "dataset: {path: wikipedia}"])
def test_what_is_not_files_is_not_fetched_for_a_plan(
    prepared: Path, tmp_path: Path, source: str, no_trial, monkeypatch, capsys
) -> None:
    def refuse(*_):
        raise AssertionError("a plan opens no dataset")

    for module in ("readers", "sources"):
        monkeypatch.setattr(f"data_pipeline.corpus.{module}.open_dataset", refuse)
    config = config_of(prepared, tmp_path, "corpus.files=null", f"corpus={{{source}}}")
    plan.plan(config)
    found = table_of(capsys.readouterr().out)
    assert re.search("(python-docs|wikipedia) is known only once", found["epochs unknown"])
    plan.plan(config, given=1e6)
    assert "epochs, each of about" in table_of(capsys.readouterr().out)["the run"]


@pytest.mark.parametrize("text", ["", "\n\n\n"])
def test_a_corpus_without_text_is_named(prepared: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    assumed = assume_data(config_of(prepared, tmp_path, f"corpus.files={tmp_path}/empty.txt"))
    assert assumed.train_tokens is None and "holds no text" in assumed.lines[1]


# ------------------------------------------------------------------------------ the vocabulary


def test_a_vocabulary_that_is_there_is_taken_as_it_is(prepared, tmp_path, no_trial, capsys) -> None:
    pieces = ["<s>", *SPECIAL_TOKENS, *(f"w{i}" for i in range(100))]
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    given = (f"vocab.path={path}", "vocab.size=null")
    with pytest.raises(UserError, match=r"\[PAD\] has id 1 in the vocabulary"):
        plan.plan(config_of(prepared, tmp_path, *given))
    capsys.readouterr()
    plan.plan(config_of(prepared, tmp_path, *given, "model.pad_token_id=1"))
    found = table_of(capsys.readouterr().out)
    assert "106 pieces (vocab.path)" in found["assumed"]
    assert numbers(found["parameters"])[1] == (106 + 512 + 2 + 2) * 32
    grown = config_of(prepared, tmp_path, *given, "vocab.extend=94")
    vocabulary, origin = make_up_vocabulary(grown.vocab)
    assert (len(vocabulary), origin) == (256, "vocab.path and vocab.extend")
    assert vocabulary.pieces[:106] == pieces


def test_a_vocabulary_that_cannot_be_used_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="there is no .*none, to which vocab.path or init_from is set"
    ):
        assume_data(config_of(prepared, tmp_path, f"vocab.path={tmp_path}/none"))


# ---------------------------------------------------------------------------------- preparation


def test_preparation_takes_the_disk_that_was_estimated(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """Most of it lies there just before the work folder is removed."""
    found, text = [], (prepared / "topics.txt").read_text(encoding="utf-8")
    with open(tmp_path / "large.txt", "w", encoding="utf-8") as file:
        file.writelines(f"{text}\n\n" for _ in range(4))

    def measure(work_dir: Path, _) -> None:
        files = [path for path in work_dir.parent.rglob("*") if path.is_file()]
        found.append(sum(path.stat().st_size for path in files))

    config = config_of(prepared, tmp_path, f"corpus.files={tmp_path}/large.txt")
    source = read_manifest(prepared / "data/store")["sources"][0]
    wanted = assume_data(config, 4 * source["tokens"]).preparation
    monkeypatch.setattr("data_pipeline.build.stages.remove_entries", measure)
    overrides = [f"data_dir={tmp_path}/data", f"corpus.files={tmp_path}/large.txt"]
    prepare(load_config(DataConfig, str(prepared / "config.yaml"), overrides), workers=1)
    assert wanted.most_bytes == pytest.approx(max(found), rel=0.2)
    folder = tmp_path / "data/store"
    store = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert wanted.store_bytes == pytest.approx(store, rel=0.2)


def test_one_file_that_cannot_be_cut_is_prepared_by_one_core(
    prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("pretrain.assumed.count_cpus", lambda: 8)
    config = config_of(prepared, tmp_path)
    assert assume_data(config).preparation.cores == 1
    assert assume_data(config, 1e6).preparation.cores == 1
    config.corpus.files = f"{tmp_path}/*.txt"  # not there yet
    assert assume_data(config, 1e6).preparation.cores == 8


# ---------------------------------------------------------------------------------- cards


def test_time_on_cards_is_told_with_the_passes_of_each(prepared: Path, tmp_path: Path) -> None:
    phases = "[{steps: 6}, {steps: 6, micro_batch_size: 4}]"
    one = phases_of(config_of(prepared, tmp_path))
    two = phases_of(config_of(prepared, tmp_path, f"train.phases={phases}"))
    hour = 3600 * plan.MFU * plan.PEAK_FLOPS["H100"]
    assert plan.estimate_time(8 * hour, one, 1, 2) == (
        "about 8 h, estimated at 40% of peak; 1 pass per step"
    )
    assert "about 4 h, " in plan.estimate_time(8 * hour, two, 2, 2)
    assert "1, then 2 passes per step" in plan.estimate_time(8 * hour, two, 2, 2)
    assert "under a minute" in plan.estimate_time(hour / 100, one, 1, 2)
    assert "16 is too small for 17 processes" in plan.estimate_time(8 * hour, one, 17, 2)


def test_rows_of_cards_are_one_and_eight_or_the_number_given(
    prepared: Path, tmp_path: Path, no_trial, capsys, monkeypatch
) -> None:
    arguments = [str(prepared / "config.yaml"), f"data_dir={tmp_path}/none"]
    for options, wanted in (([], ["1", "8"]), (["--cards", "32", "--tokens", "1e6"], ["32"])):
        monkeypatch.setattr(sys, "argv", ["plan", *options, *arguments])
        plan.main()
        out = capsys.readouterr().out
        assert re.findall(r"^time on (\d+) H100 ", out, re.M) == wanted
        assert ("1,000,000 tokens (--tokens)" in out) == bool(options)


@pytest.mark.parametrize("option", ["--tokens=0", "--tokens=nan", "--cards=0"])
def test_numbers_below_one_are_refused(option: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", "config.yaml", option])
    with pytest.raises(UserError, match="is below 1"):
        plan.main()


def test_a_check_without_data_ends_in_one_line_and_exit_code_2(
    prepared: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    arguments = ["--check", str(prepared / "config.yaml"), f"data_dir={tmp_path}/none"]
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(plan.main)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no store at {tmp_path}/none; make one: python -m data_pipeline CONFIG" in line


# ---------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned_in_a_fresh_clone(
    name: str, tmp_path: Path, no_trial, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor)  # seconds
    config = load_config(Config, str(ROOT / "configs" / name), ["train.precision=fp32"])
    plan.plan(config)
    found = table_of(capsys.readouterr().out)
    assert found["epochs unknown"]
    assert numbers(found["operations"])[0] > 1e12
    assert {"time here", "time on 1 H100", "time on 8 H100"} < found.keys()
    rows = ["the run"] if len(phases_of(config)) == 1 else ["phase 0", "phase 1"]
    assert sum(numbers(found[row])[0] for row in rows) == config.train.max_steps
    if name in PARAMETERS:
        assert numbers(found["parameters"])[0] == pytest.approx(PARAMETERS[name], rel=0.002)
