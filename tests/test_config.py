"""config: what is written in YAML or on the command line is what runs, and a slip is named."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from helpers import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data_pipeline.config
import pretrain.config
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from pretrain.config import Config, PhaseConfig, phases_of

MINIMAL = "corpus: {files: a.txt}\n"


def load(folder: Path, text: str, *overrides: str, schema: type = Config) -> Config:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(schema, str(path), list(overrides))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.name)
def test_a_config_of_the_project_loads_and_its_commands_name_it(path: Path):
    config = load_config(Config, str(path))
    for phase in phases_of(config):
        phase.data.validate()
        phase.train.validate()
        processes = 8 if "gpu_8.yaml" in path.read_text() else 1
        share, rest = divmod(phase.train.global_batch_size, processes)
        assert rest == 0 and share % min(phase.train.micro_batch_size, share) == 0
    names = set(re.findall(r"[ =](configs/\w+\.yaml)", path.read_text().split("\nrun_dir")[0]))
    assert names == {f"configs/{path.name}"} or path.name == "quickstart.yaml"
    assert config.run_dir == f"runs/{path.stem}" and config.data_dir == f"data/{path.stem}"


@pytest.mark.parametrize("number", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_1e_4_is_a_number(tmp_path: Path, number: str):
    # in YAML 1.1, which PyYAML reads, 1e-4 without a dot is a string
    text = MINIMAL + f"train: {{learning_rate: {number}}}\n"
    assert load(tmp_path, text).train.learning_rate == 1e-4
    assert load(tmp_path, MINIMAL, f"train.learning_rate={number}").train.learning_rate == 1e-4


def test_an_override_beats_the_file_and_the_file_beats_the_default(tmp_path: Path):
    text = MINIMAL + "vocab: {size: 500, lowercase: false}\nseed: 3\n"
    config = load(tmp_path, text, "vocab.size=600", "corpus.files=[b.txt, c.txt]", "run_dir=x")
    assert (config.vocab.size, config.vocab.lowercase, config.seed) == (600, False, 3)
    assert config.corpus.files == ["b.txt", "c.txt"]
    assert (config.run_dir, config.data_dir, config.train.max_steps) == ("x", "data/data", 10**6)
    dataset = load(tmp_path, "corpus: {dataset: {path: json}}", "corpus.dataset.name=n")
    assert (dataset.corpus.dataset.path, dataset.corpus.dataset.name) == ("json", "n")


def test_preparation_leaves_the_sections_of_training_alone(tmp_path: Path):
    (tmp_path / "c.yaml").write_text(MINIMAL + "model: {anything: 1}\n")
    config = load_config(DataConfig, str(tmp_path / "c.yaml"), ["train.max_steps=1", "seed=7"])
    assert config.seed == 7 and not hasattr(config, "train")


def test_a_section_of_comments_alone_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + "train:\n  # max_steps: 3\nmodel:\nexport:\n")
    found = load_config(Config, str(tmp_path / "c.yaml"), ["train.save_every=7"])
    assert found.train == replace(Config().train, save_every=7) and found.model == Config().model


def test_a_value_of_another_type_is_blamed_on_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + "train: {max_steps: 3}")
    path = str(tmp_path / "c.yaml")
    with pytest.raises(UserError, match=r"^command line, key train\.max_steps: .*'sixty'"):
        load_config(Config, path, ["train.max_steps=sixty"])
    (tmp_path / "c.yaml").write_text(MINIMAL + "train: {max_steps: sixty}")
    with pytest.raises(UserError, match=r"c\.yaml, key train\.max_steps: .*'sixty'"):
        load_config(Config, path, ["train.save_every=3"])


@pytest.mark.parametrize(
    "text, override, message",
    [
        (MINIMAL + "sead: 1", None, r"c\.yaml: unknown key sead; did you mean seed\?"),
        (MINIMAL, "max_steps=3", r"command line: unknown key max_steps; .*mean train\.max_steps\?"),
        (MINIMAL + "phases: []", None, r"unknown key phases; did you mean train\.phases\?"),
        (MINIMAL + "validate: 1", None, r"unknown key validate; (?!.*\.validate)"),
        (MINIMAL + "1: a", None, r"c\.yaml: unknown key 1; keys: "),
        (MINIMAL + "a" * 999 + ": 1", None, r"c\.yaml: unknown key a{60}; "),
        (MINIMAL + "vocab: {sise: 9}", None, r"c\.yaml: unknown key vocab\.sise; .*vocab\.size\?"),
        (
            "corpus: {dataset: {pth: x}}",
            None,
            r"c\.yaml: unknown key corpus\.dataset\.pth; did you mean corpus\.dataset\.path\?",
        ),
        (MINIMAL, "train.max_step=3", r"command line: unknown key train\.max_step.*max_steps\?"),
        (MINIMAL + "qqqq: 1", None, r"c\.yaml: unknown key qqqq; keys: run_dir, .*train"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, text, override, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text, *([override] if override else []))


@pytest.mark.parametrize(
    "text, message",
    [
        (MINIMAL + "vocab: {size: big}", r"c\.yaml, key vocab\.size: .*'big'"),
        (MINIMAL + "vocab: {size: 1.5}", r"c\.yaml, key vocab\.size: .*'1\.5'"),
        (MINIMAL + "vocab: {lowercase: maybe}", r"c\.yaml, key vocab\.lowercase: .*'maybe'"),
        (MINIMAL + "vocab: 3", r"c\.yaml: vocab is not a section"),
        (MINIMAL + "vocab: [a]", r"c\.yaml: vocab is not a section"),
        (MINIMAL + "seed:", r"c\.yaml, key seed: "),
        ("corpus: {files: 3}", r"c\.yaml.* corpus\.files"),
        ("corpus: {files: true}", r"c\.yaml.* corpus\.files"),
        ("corpus: {dataset: {path: json, data_files: 3}}", r"corpus\.dataset\.data_files is 3"),
        (MINIMAL + "eval: {probes: {minimal_pairs: 5}}", r"eval\.probes\.minimal_pairs is 5"),
        ("corpus: {files: {a: b}}", r"c\.yaml.* corpus\.files"),
        (MINIMAL + "seed: 1\nseed: 2", r"c\.yaml is not a readable YAML file: (?s:.*)seed"),
        (MINIMAL + "a: [", r"c\.yaml is not a readable YAML file"),
        (MINIMAL + "a: !!python/object/apply:os.getcwd []", r"c\.yaml is not a readable YAML"),
        ("corpus: {files: a, language: no}", r"language is 'False'; give an ISO 639 code"),
        ("corpus: {files: a, language: German}", r"language is 'German'; give an ISO 639 code"),
        ("corpus: {files: a, language: jp}", r"language is 'jp', which is the code of no"),
        ("corpus: {files: a, language: cn-TW}", r"language is 'cn-TW', which is the code of no"),
        ("- a\n- b", r"c\.yaml is not a mapping"),
        ("3", r"c\.yaml is not a "),
        ("", r"c\.yaml: corpus needs exactly one of builtin, files and dataset"),
        (MINIMAL + "null: 3", r"c\.yaml"),
        (MINIMAL + "vocab: ${absent}", r"c\.yaml.* vocab"),
        (MINIMAL + "run_dir: ${absent}", r"c\.yaml, key run_dir: .*absent"),
        (MINIMAL + "vocab: ???", r"c\.yaml.* vocab"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_the_place(tmp_path: Path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "override, message",
    [
        ("eval.probes.sentences=[[a]]", r"eval\.probes\.sentences: \[\['a'\]\] is not a text"),
        ("corpus.plug_ins=[[]]", r"corpus\.plug_ins: \[\[\]\] is not a text; give a list"),
        ("tracking.tags=[[1]]", r"tracking\.tags: \[\[1\]\] is not a text"),
        ("init_from=${nope}", "^[^?]*Interpolation key 'nope' not found"),
        ("seed=-1", r"seed -1 is not in \[0, 9223372036854775808\)"),
        ("seed=9223372036854775808", "seed 9223372036854775808 is not in"),
        ("corpus.builtin=python-docs", "corpus needs exactly one of"),
        ("corpus.errors=ignore", "corpus.errors is 'ignore'; it can be strict, replace"),
        ("corpus.encoding=utf-9", "corpus.encoding 'utf-9' is unknown to Python"),
        ("corpus.encoding=idna", "corpus.encoding 'idna' is unknown"),
        ("corpus.encoding=unicode_escape", "corpus.encoding 'unicode_escape' is unknown"),
        ("corpus.encoding=utf7", "corpus.encoding 'utf7' is unknown"),
        ("corpus.plug_ins=['???']", r"^command line, corpus, plug_ins, 0: \?\?\? is no value"),
        ("train.max_steps=???", r"^command line, train, max_steps: \?\?\? is no value; give"),
        ("corpus.encoding=undefined", "corpus.encoding 'undefined'"),  # raises UnicodeError
        ("corpus.held_out_fraction=1", r"corpus.held_out_fraction 1.0 is not in \[0, 1\)"),
        ("corpus.held_out_fraction=nan", r"corpus.held_out_fraction nan is not in \[0, 1\)"),
        ("vocab.size=3", r"vocab.size 3 is not in \[16, 1e6\]"),
        ("vocab.character_coverage=0", r"vocab.character_coverage 0.0 is not in \(0, 1\]"),
        ("data.max_seq_length=7", r"data.max_seq_length 7 is not in \[8, 1e6\]"),
        ("data.max_seq_length=513", "513 exceeds model.max_position_embeddings 512; lower it"),
        ("data.objective=mlm", "data.objective is 'mlm'; it can be nsp, sop, none"),
        ("data.masked_lm_prob=1", r"data.masked_lm_prob 1.0 is not in \(0, 1\)"),
        ("data.max_predictions_per_seq=-1", "data.max_predictions_per_seq -1 is not in"),
        ("data.max_predictions_per_seq=0", "data.max_predictions_per_seq 0 is not in"),
        ("model.hidden_size=100", "model.hidden_size 100 is not a multiple of"),
        ("model.num_attention_heads=0", "model.num_attention_heads"),
        ("model.hidden_act=swish", "model.hidden_act is 'swish'; it can be gelu"),
        ("train.warmup_steps=1.5", "train.warmup_steps 1.5 is neither steps nor a share"),
        ("train.micro_batch_size=0", "train.micro_batch_size 0 is not in"),
        ("train.save_every=0", "train.save_every 0 is not in"),
        ("train.learning_rate=nan", "train.learning_rate"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("train.warmup_steps=1000000", "train.warmup_steps 1,000,000 is not below"),
        ("train.schedule=poly", "train.schedule is 'poly'; it can be linear, cosine, polynomial"),
        ("train.schedule=trapezoid", "train.decay_steps is None; .* needs 1 to 990,000"),
        ("train.decay_steps=9", "train.decay_steps is set, but train.schedule linear decays"),
        ("train.decay_power=0", "train.decay_power 0.0 is not in"),
        ("train.decay_power=2", "train.decay_power is 2, but train.schedule linear has no power"),
        ("model.generator_size=0.5", "model.generator_size is 0.5, but BERT has no generator"),
        ("model.extra={is_decoder: true}", "model.extra: is_decoder is true"),
        ("model.extra={auto_map: {}}", "model.extra: auto_map says that the model is computed by"),
        ("init_from=runs/run/export/generator", "is the export of run_dir itself"),
        ("train.precision=fp16", "train.precision is 'fp16'; it can be auto, fp32, bf16"),
        ("seed", "'seed' is not key=value"),
        ("--seed=3", "'--seed=3' is not key=value"),
        ("vocab=3", "command line: vocab is not a section"),
        ("train.phases[0].steps=3", "phases is not a list .*, the whole list: single items cannot"),
        ("tracking.tags=a", "command line: tracking.tags is not a list of tags; write it as"),
        ("tracking.tags=[{a: b}]", "tracking.tags is not a list of tags; write it as"),
        ("corpus.files=[a", "corpus.files"),
        ("vocab.size=${absent}", "vocab.size"),
        ("train.keep_every=0", "train.keep_every 0 is not in"),
        ("train.keep_every=1500", "train.keep_every 1500 is not a multiple"),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path: Path, override: str, message: str):
    with pytest.raises(UserError, match=message):
        load(tmp_path, MINIMAL, override)


def each_number(section: object, key: str = "") -> Iterator[tuple[str, str | None]]:
    """Key and interval of each number in a config."""
    for item in fields(section):
        value, name = getattr(section, item.name), f"{key}.{item.name}".lstrip(".")
        if hasattr(value, "__dataclass_fields__"):
            yield from each_number(value, name)
        elif {int, float} & {item.type, *get_args(item.type)}:
            yield name, item.metadata.get("interval")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data_dir=''", "data_dir is empty; name a folder"),
        ("run_dir=' '", "run_dir is empty; name a folder"),
        ("data_dir=runs/../runs/run", "data_dir and run_dir are the same folder, runs/../runs/run"),
    ],
)
def test_data_and_run_have_a_folder_each(tmp_path: Path, override: str, message: str):
    with pytest.raises(UserError, match=message):
        load(tmp_path, MINIMAL, override)


NUMBERS = [*each_number(Config()), *each_number(PhaseConfig(), "train.phases[0]")]


def test_every_number_of_a_config_has_its_bounds():
    assert len(NUMBERS) > 50
    assert [name for name, interval in NUMBERS if not interval] == []


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-1", "1.0e+30", "10000000000000"])
@pytest.mark.parametrize("key", [name for name, _ in NUMBERS])
def test_no_number_out_of_bounds_is_taken(tmp_path: Path, key: str, value: str):
    """With `model.num_hidden_layers: 1.0e+12` a command never came to an end."""
    override = f"{key}={value}"
    if key.startswith("train.phases"):
        others = "" if key.endswith(".steps") else "steps: 1000000, "
        override = f"train.phases=[{{{others}{key.rpartition('.')[2]}: {value}}}]"
    if key == "seed" and value == "10000000000000":
        return
    with pytest.raises(UserError, match=key.rpartition(".")[2]):
        load(tmp_path, MINIMAL, override)


@pytest.mark.parametrize("value", [r'"a\0b"', "a\udcff"])
@pytest.mark.parametrize("key", ["run_dir", "corpus.files"])
def test_a_text_that_no_file_can_have_is_refused(tmp_path: Path, key: str, value: str):
    with pytest.raises(UserError, match="has a NUL or an unpaired surrogate|is not key=value"):
        load(tmp_path, MINIMAL, f"{key}={value}")


KEYS = st.sampled_from(["seed", "vocab.size", "vocab", "corpus.files", "corpus.dataset", "a"])
VALUES = st.text("[]{}:,'\"$?!&*#%@`|>- \n\tab1.é", max_size=8) | st.integers(0, 999).map(str)


@settings(max_examples=200)
@given(st.builds("{}={}".format, KEYS, VALUES) | st.text(max_size=12))
@example("seed=[")
@example("a..b=1")
@example("vocab={}")
@example("vocab=")
def test_any_override_is_taken_or_refused(tmp_path_factory, override: str):
    try:
        config = load(tmp_path_factory.getbasetemp(), MINIMAL, override)
    except UserError:
        assert not re.fullmatch(r"seed=\d+", override)
    else:
        key, value = override.split("=", 1)
        known = ("seed", "vocab.size", "corpus.files", "corpus.dataset")
        assert key.strip() in known or (key, yaml.safe_load(value)) == ("vocab", {})
        assert key != "seed" or config.seed == int(yaml.safe_load(value))


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"no config at .*absent\.yaml"):
        load_config(Config, str(tmp_path / "absent.yaml"))
    with pytest.raises(UserError, match=r"no config at mini .*; did you mean configs/mini\.yaml\?"):
        load_config(Config, "mini")
    with pytest.raises(UserError, match="is a folder; give a YAML file"):
        load_config(Config, str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match=r"binary\.yaml is not UTF-8 text"):
        load_config(Config, str(tmp_path / "binary.yaml"))


def test_a_reference_to_nothing_names_the_file_or_the_override_that_has_it(tmp_path):
    (tmp_path / "config.yaml").write_text("run_dir: ${nowhere}\n")
    path = str(tmp_path / "config.yaml")
    with pytest.raises(UserError) as caught:
        load_config(Config, path, ["seed=1"])
    assert str(caught.value).startswith(f"{path}, key run_dir: Interpolation key")
    with pytest.raises(UserError) as caught:
        load_config(Config, path, ["run_dir=${missing}", "seed=1"])
    expected = f"{path} run_dir=${{missing}}, key run_dir: Interpolation key"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "module", [data_pipeline.config, pretrain.config], ids=lambda m: m.__name__
)
def test_every_field_has_a_sentence_after_it(module):
    missing = []
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign):
                value = getattr(getattr(after, "value", None), "value", None)
                if not (isinstance(value, str) and value.rstrip().endswith(".")):
                    missing.append(f"{node.name}.{line.target.id}")
    assert missing == []


def test_a_mistake_on_the_command_line_is_named_by_its_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"c\.yaml data\.masked_lm_prob=2: data\.masked_lm"):
        load(tmp_path, MINIMAL, "seed=1", "data.masked_lm_prob=2")
