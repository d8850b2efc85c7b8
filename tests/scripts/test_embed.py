"""Sentence vectors are what their names say, computed by hand from transformers' states."""

import json
import os
import shutil
import subprocess
import sys

import embed
import numpy as np
import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file, save_file

from data_pipeline.common.errors import UserError

TEXTS = ["A class.", "It returns the value of an attribute of the object.", "The end"] * 30


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/embed.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        **options,
    )


@pytest.fixture(scope="module")
def four_layers(prepared, tmp_path_factory):
    """An export of a model of five layers."""
    from helpers import train_here

    run_dir = tmp_path_factory.mktemp("five")
    size = ("model.num_hidden_layers=5", "model.hidden_size=16", "train.max_steps=2")
    train_here(prepared, run_dir, *size, "train.warmup_steps=1", "model.initializer_range=0.3")
    return run_dir / "export"


def states_of(export, text: str) -> list[torch.Tensor]:
    """The output of each layer for one text alone, (S, D), embeddings first."""
    from transformers import BertModel, BertTokenizerFast

    ids = BertTokenizerFast.from_pretrained(export)(text, return_tensors="pt")
    with torch.no_grad():
        out = BertModel.from_pretrained(export).eval()(**ids, output_hidden_states=True)
    return [state[0] for state in out.hidden_states]


def by_hand(export, text: str, pool: str) -> torch.Tensor:
    states = states_of(export, text)
    weights = load_file(export / "model.safetensors")
    pooler = {name: weights[f"bert.pooler.dense.{name}"] for name in ("weight", "bias")}
    return {
        "cls": lambda: states[-1][0],
        "pooler": lambda: torch.tanh(pooler["weight"] @ states[-1][0] + pooler["bias"]),
        "mean": lambda: states[-1].mean(0),
        "sum4": lambda: (states[-1] + states[-2] + states[-3] + states[-4]).mean(0),
        "concat4": lambda: torch.cat([states[i].mean(0) for i in (-4, -3, -2, -1)]),
    }[pool]()


@pytest.mark.parametrize("pool", embed.POOLS)
def test_each_vector_is_that_of_its_text_alone(four_layers, pool) -> None:
    found = embed.embed(four_layers, TEXTS, pool)
    assert found.dtype == np.float32 and len(found) == len(TEXTS) > embed.BATCH
    for i, text in enumerate(TEXTS[:3]):
        wanted = by_hand(four_layers, text, pool).numpy()
        np.testing.assert_allclose(found[i::3], np.tile(wanted, (30, 1)), atol=1e-5)


def test_a_model_without_pooler_gives_no_pooler_vectors(four_layers, tmp_path) -> None:
    """transformers would give it a pooler of random weights, others in each call."""
    shutil.copytree(four_layers, tmp_path / "export")
    weights = load_file(four_layers / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    save_file(kept, tmp_path / "export/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"no weights for pooler\S+, pooler\S+; use --pool cls"):
        embed.embed(tmp_path / "export", TEXTS, "pooler")
    assert embed.embed(tmp_path / "export", TEXTS[:1], "cls").shape == (1, 16)


def test_centred_vectors_have_mean_0(four_layers) -> None:
    plain = embed.embed(four_layers, TEXTS[:3], "mean")
    centred = embed.embed(four_layers, TEXTS[:3], "mean", center=True)
    assert np.abs(centred.mean(0)).max() < 1e-6 < np.abs(plain.mean(0)).max()
    np.testing.assert_allclose(centred - centred[0], plain - plain[0], atol=1e-5)


def test_the_command_reads_lines_and_writes_an_array(straight, tmp_path) -> None:
    text = "\n".join(TEXTS[:3]) + "\n"
    (tmp_path / "texts.txt").write_text(text)
    options = ("--model", straight / "export", "--pool", "cls", "--out")
    first = run(*options, tmp_path / "new/a.npy", input=text.encode())
    second = run(tmp_path / "texts.txt", *options, tmp_path / "b")
    assert first.returncode == second.returncode == 0, second.stderr
    a, b = np.load(tmp_path / "new/a.npy"), np.load(tmp_path / "b")
    assert np.array_equal(a, b) and a.shape == (3, 32) and a.dtype == np.float32


@pytest.mark.parametrize("data", ["\ufeffa b\nc\n", "a b\r\nc\r\n", "\ufeffa b\r\nc"])
def test_line_ends_and_the_mark_of_windows_are_no_text(data, tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_bytes(data.encode())
    read = []
    monkeypatch.setattr(embed, "embed", lambda *a: read.append(a[1]) or np.zeros((2, 3)))
    arguments = ["embed", tmp_path / "a.txt", "--model", tmp_path, "--out", tmp_path / "a.npy"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    embed.main()
    assert read == [["a b", "c"]]


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"a\n\nb\n", b"line 2 of stdin is empty"), (b"caf\xe9", b"stdin is not UTF-8 at byte 3")],
)
def test_a_mistake_is_one_line(straight, tmp_path, data, said) -> None:
    done = run("--model", straight / "export", "--out", tmp_path / "a.npy", input=data)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count(b"\n") == 1
    assert not (tmp_path / "a.npy").exists()


def test_a_table_is_not_taken_for_texts(straight, tmp_path) -> None:
    (tmp_path / "sts.tsv").write_text("A plane.\tAn air plane.\t5.0\n")
    options = ("--model", straight / "export", "--out", tmp_path / "a.npy")
    done = run(tmp_path / "sts.tsv", *options)
    assert done.returncode == 2 and b"sts.tsv is a table; write its texts" in done.stderr


def test_the_mean_of_one_text_is_not_subtracted_from_it(straight, tmp_path) -> None:
    options = ("--model", straight / "export", "--center", "--out", tmp_path / "a.npy")
    done = run(*options, input=b"one text\n")
    assert done.returncode == 2 and b"--center: stdin has one text" in done.stderr
    assert not (tmp_path / "a.npy").exists()


def test_what_a_model_cannot_give_is_refused(straight, tmp_path) -> None:
    with pytest.raises(UserError, match="2 layers, and sum4 wants the last four"):
        embed.embed(straight / "export", TEXTS[:3], "sum4")
    with pytest.raises(UserError, match="no exported model in .*pretrain.export makes one"):
        embed.embed(tmp_path, TEXTS[:3], "mean")


def test_a_text_that_is_too_long_is_cut_and_told(straight, capsys) -> None:
    long = "value " * 600
    found = embed.embed(straight / "export", [long, long[: 6 * 510]], "mean")
    assert "warning: 2 texts cut to 64 tokens" in capsys.readouterr().err
    assert np.array_equal(found[0], found[1])


def test_a_weight_that_is_not_finite_is_named(straight, tmp_path) -> None:
    folder = shutil.copytree(straight / "export", tmp_path / "export")
    weights = load_file(folder / "model.safetensors")
    weights["bert.pooler.dense.bias"][0] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="pooler.dense.bias is not finite"):
        embed.embed(folder, ["a"], "mean")


@pytest.mark.parametrize("text", ["\u200b", "\x01"])
def test_a_text_without_tokens_is_refused(straight, text) -> None:
    with pytest.raises(UserError, match="text 2 has no token in this vocabulary; remove it"):
        embed.embed(straight / "export", ["a", text], "mean")


def test_a_tokenizer_without_the_special_tokens_of_an_encoder_is_refused(
    straight, tmp_path
) -> None:
    shutil.copytree(straight / "export", tmp_path / "bare")
    path = tmp_path / "bare/tokenizer_config.json"
    rules = json.loads(path.read_text())
    path.write_text(json.dumps(rules | {"sep_token": None}))
    with pytest.raises(UserError, match="bare: its tokenizer has no sep_token"):
        embed.embed(tmp_path / "bare", TEXTS[:3], "mean")


def test_a_folder_without_a_tokenizer_gives_no_vectors(straight, tmp_path) -> None:
    """transformers makes an empty tokenizer there, to which each word is [UNK]."""
    ignored = shutil.ignore_patterns("tokenizer*", "vocab.txt")
    folder = shutil.copytree(straight / "export", tmp_path / "bare", ignore=ignored)
    with pytest.raises(UserError, match="bare has no tokenizer; copy the tokenizer.json"):
        embed.embed(folder, TEXTS[:3], "mean")


def test_an_output_that_is_an_input_is_refused_before_any_work(straight, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("a text\n")
    done = run("--model", straight / "export", "--out", tmp_path / "a.txt", tmp_path / "a.txt")
    assert done.returncode == 2 and b"a.txt is read by this command" in done.stderr
    assert (tmp_path / "a.txt").read_text() == "a text\n"


def test_a_closed_input_is_named(straight, tmp_path) -> None:
    words = [sys.executable, "scripts/embed.py", "--model", straight, "--out", tmp_path / "a.npy"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(closed, cwd=ROOT, env=env, capture_output=True, text=True)
    said = "error: stdin is closed; name a file with a text a line\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_folder_as_out_is_refused_before_any_work(straight, tmp_path) -> None:
    done = run("--model", straight / "export", "--out", tmp_path, input=b"a\n")
    assert done.returncode == 2 and b"is a folder; name a file in it" in done.stderr
    assert b"embedding" not in done.stderr and not list(tmp_path.iterdir())


def test_cut_weights_are_named(straight, tmp_path) -> None:
    shutil.copytree(straight / "export", tmp_path / "cut")
    os.truncate(tmp_path / "cut/model.safetensors", 1000)
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        embed.embed(tmp_path / "cut", TEXTS[:3], "mean")


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("tokenizer_config.json", "model_input_names", ["input_ids", True], r"names\[1\] is True"),
        ("tokenizer_config.json", "model_max_length", "", "model_max_length is ''"),
        ("tokenizer_config.json", "cls_token", "<new>", "gives '<new>' the id .* embeddings"),
        ("config.json", "hidden_size", 768, "a model of .* parameters, but .* has fewer bytes"),
    ],
)
def test_settings_that_transformers_takes_on_trust_are_checked(
    straight, tmp_path, name, key, value, said
) -> None:
    shutil.copytree(straight / "export", tmp_path / "a")
    settings = json.loads((tmp_path / "a" / name).read_text())
    (tmp_path / "a" / name).write_text(json.dumps(settings | {key: value}))
    with pytest.raises(UserError, match=said):
        embed.embed(tmp_path / "a", TEXTS[:1], "mean")
