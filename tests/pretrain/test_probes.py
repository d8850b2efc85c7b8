"""Probes are encoded by preparation and scored at each evaluation, on any number of processes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import Accelerator
from helpers import TWO_STEPS, assert_same_run, command, fork, metrics, run, train_here

from data_pipeline.build.prepare import prepare
from data_pipeline.build.probes import encode_texts, list_files, read_pairs
from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.agreement import turns
from pretrain.probes import (
    MaskedCopies,
    by_phenomenon,
    check_lengths,
    prefers_good,
    score_by_frequency,
    score_sentences,
)
from pretrain.read_export import load_export

SENTENCES = [
    "The [MASK] of a class is that of its objects, and of no others.",
    "It returns a [MASK] [MASK].",
]
PAIRS = [("syntax", "a", "The name is bound.", "The name are bound.")]
PAIRS += [("syntax", "a", "The objects are.", "The objects is."), ("syntax", "b", "A b", "B a")]
PAIRS += [
    ("semantics", "c", "It returns a value.", "It returns value a."),
    ("semantics", "c", *"ab"),
]
KEYS = ("field", "UID", "sentence_good", "sentence_bad")


@pytest.fixture(scope="module")
def probed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the prepared folder, with probes in its config and `data/probes.json`."""
    root = tmp_path_factory.mktemp("probed")
    shutil.copytree(prepared / "data", root / "data")
    shutil.copy(prepared / "topics.txt", root)
    rows = [json.dumps(dict(zip(KEYS, row, strict=True))) for row in PAIRS]
    (root / "pairs.jsonl").write_text("\n".join(rows), encoding="utf-8")
    settings = {"minimal_pairs": f"{root}/pairs.jsonl", "sentences": SENTENCES}
    text = (prepared / "config.yaml").read_text().replace(str(prepared), str(root))
    (root / "config.yaml").write_text(f"{text}eval: {{probes: {json.dumps(settings)}}}\n")
    prepare_here(root)
    return root


def prepare_here(root: Path, *overrides: str) -> None:
    prepare(load_config(DataConfig, str(root / "config.yaml"), overrides), workers=1)


@pytest.fixture(scope="module")
def run_dir(probed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 12 steps with probes; not to be written to."""
    folder = tmp_path_factory.mktemp("run")
    train_here(probed, folder)
    return folder


@pytest.mark.parametrize("global_batch_size, micro_batch_size", [(16, 2), (2, 16)])
def test_a_pass_of_probes_has_about_as_many_tokens_as_one_of_training_at_most(
    probed: Path, tmp_path: Path, monkeypatch, global_batch_size: int, micro_batch_size: int
) -> None:
    sizes, real = [], MaskedCopies.build

    def build(*arguments):
        batch, sentence = real(*arguments)
        sizes.append(len(batch.input_ids))
        return batch, sentence

    monkeypatch.setattr(MaskedCopies, "build", build)
    data = (f"data_dir={tmp_path / 'data'}", "eval.probes.sentences=[]")
    prepare_here(probed, *data)
    sizes_of_a_step = (
        "data.max_seq_length=24",
        f"train.global_batch_size={global_batch_size}",
        f"train.micro_batch_size={micro_batch_size}",
    )
    train_here(probed, tmp_path / "run", *data, *sizes_of_a_step)
    assert len(sizes) > 4 and max(sizes) < 48 + 24  # the last sentence of a pass may exceed it


def evaluations(folder: Path) -> list[dict]:
    return [line for line in metrics(folder) if "eval/minimal_pairs" in line]


def test_the_last_evaluation_is_that_of_the_export(probed: Path, run_dir: Path) -> None:
    first, last = evaluations(run_dir)
    assert (first["step"], last["step"]) == (6, 12)
    export = run_dir / "export"
    pairs = read_pairs([f"{probed}/pairs.jsonl"])
    sentences = encode_texts(export, [p.good for p in pairs] + [p.bad for p in pairs])
    model, vocabulary = load_export(export), read_vocabulary(export)
    scores = score_sentences(model, sentences, vocabulary, Accelerator(cpu=True))
    names = [(pair.field, pair.linguistics_term, pair.UID) for pair in pairs]
    found = by_phenomenon(names, prefers_good(scores))
    assert last["eval/minimal_pairs"] == found["mean"]
    for field, mean in found["field"].items():
        assert last[f"eval/minimal_pairs/{field}"] == mean
    counts = TokenStore.open(probed / "data/store", "train", vocabulary).token_counts()
    right = prefers_good(score_by_frequency(sentences, counts))
    assert last["eval/minimal_pairs_unigram"] == by_phenomenon(names, right)["mean"]


def test_fillings_are_those_of_transformers(run_dir: Path) -> None:
    from transformers import pipeline

    found = evaluations(run_dir)[-1]["fillings"]
    assert [item["sentence"] for item in found] == SENTENCES
    assert [len(item["masks"]) for item in found] == [1, 2]
    wanted = pipeline("fill-mask", model=str(run_dir / "export"))(SENTENCES)
    for candidates, items in zip(
        [found[0]["masks"][0], *found[1]["masks"]], [wanted[0], *wanted[1]], strict=True
    ):
        assert [p for _, p in candidates] == pytest.approx([i["score"] for i in items], rel=1e-4)
        assert [piece for piece, _ in candidates] == [i["token_str"] for i in items]


def test_the_rest_of_a_run_is_as_it_is_without_probes(run_dir: Path, straight: Path) -> None:
    ours = [
        {k: v for k, v in line.items() if "minimal_pairs" not in k and k != "fillings"}
        for line in metrics(run_dir)
    ]
    assert ours == metrics(straight)


def test_probes_are_in_the_summary_and_the_card(probed: Path, tmp_path: Path, capsys) -> None:
    train_here(probed, tmp_path / "run", "train.max_steps=2", "train.warmup_steps=1")
    said = capsys.readouterr().out
    mean = evaluations(tmp_path / "run")[-1]["eval/minimal_pairs"]
    assert f"it prefers the acceptable sentence in {mean:.1%} of the minimal pairs" in said
    assert f"; minimal pairs {mean:.3f} (unigram " in said
    card = (tmp_path / "run/export/README.md").read_text()
    assert f"| Minimal pairs | {mean:.1%} |" in card


@pytest.mark.parametrize("shards", [False, True])
def test_many_processes_score_as_one(probed, run_dir, tmp_path, shards) -> None:
    options = ("train.max_steps=6", "train.warmup_steps=2", "train.micro_batch_size=8")
    train_here(probed, tmp_path / "one", *options)
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if shards else {}
    done = run(probed, tmp_path / "two", *options, processes=2, **env)
    assert done.returncode == 0, done.stderr
    (one,), (two,) = evaluations(tmp_path / "one"), evaluations(tmp_path / "two")
    assert one.keys() == two.keys()
    assert one["eval/minimal_pairs"] == two["eval/minimal_pairs"]
    for a, b in zip(one["fillings"], two["fillings"], strict=True):
        assert [[name for name, _ in mask] for mask in a["masks"]] == [
            [name for name, _ in mask] for mask in b["masks"]
        ]
        assert np.allclose(
            [[p for _, p in mask] for mask in a["masks"]],
            [[p for _, p in mask] for mask in b["masks"]],
            atol=1e-5,
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_pass_counts_once_and_every_rank_has_as_many(ranks: int) -> None:
    for n in range(1, 9):
        places = (SimpleNamespace(process_index=i, num_processes=ranks) for i in range(ranks))
        found = [list(turns(n, place)) for place in places]
        assert len(set(map(len, found))) == 1
        assert sorted(i for one in found for i, counts in one if counts) == list(range(n))


def test_a_sentence_may_have_as_many_tokens_as_the_model_takes_and_no_more(vocabulary) -> None:
    check_lengths([[5] * 8], vocabulary, 8)
    with pytest.raises(UserError, match="9 tokens, but the model takes 8"):
        check_lengths([[5] * 8, [5] * 9], vocabulary, 8)


def test_a_pass_that_is_repeated_for_other_ranks_changes_no_score(
    probed: Path, run_dir: Path, monkeypatch
) -> None:
    export, accelerator = run_dir / "export", Accelerator(cpu=True)
    model, vocabulary = load_export(export), read_vocabulary(export)
    sentences = encode_texts(export, [text for row in PAIRS for text in row[2:]])
    given = (model, sentences, vocabulary, accelerator)
    wanted = score_sentences(*given, most_tokens=40)
    monkeypatch.setattr(
        "pretrain.probes.turns", lambda n, _: [*((i, True) for i in range(n)), (0, False)]
    )
    assert score_sentences(*given, most_tokens=40).tolist() == wanted.tolist()


def test_probes_may_change_when_a_run_resumes(probed: Path, tmp_path: Path) -> None:
    run_dir, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(probed / "data", data)
    train_here(probed, run_dir, "train.max_steps=8", f"data_dir={data}", "train.extend=true")
    options = (f"data_dir={data}", "eval.probes.sentences=['A new [MASK].']", "train.extend=true")
    with pytest.raises(UserError, match="was made from other probes"):
        train_here(probed, run_dir, *options)
    prepare_here(probed, *options[:2])
    train_here(probed, run_dir, *options)
    (*_, last) = evaluations(run_dir)
    assert [item["sentence"] for item in last["fillings"]] == ["A new [MASK]."]


def test_probes_need_no_held_out_text(probed: Path, tmp_path: Path) -> None:
    shutil.copy(probed / "config.yaml", tmp_path)
    options = [f"data_dir={tmp_path}/data", "corpus.held_out_fraction=0"]
    prepare_here(probed, *options)
    train_here(probed, tmp_path / "run", *options, "train.max_steps=2", "train.warmup_steps=1")
    (line,) = evaluations(tmp_path / "run")
    assert "eval/mlm_loss" not in line and line["fillings"]


def test_probes_that_are_not_encoded_are_asked_for(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="probes.json is missing; .*python -m data_pipeline CONFIG"):
        train_here(prepared, tmp_path / "run", "eval.probes.sentences=['A [MASK].']")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("positions", [8, 512])
def test_a_probe_longer_than_the_trained_positions_is_shown(
    probed: Path, tmp_path: Path, positions: int
) -> None:
    short = (f"model.max_position_embeddings={positions}", "data.max_seq_length=8")
    with pytest.raises(UserError, match=r"the model takes 8; shorten the sentence \[CLS\]"):
        train_here(probed, tmp_path / "run", *short)


def test_pairs_that_are_not_there_stop_preparation_at_once(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no minimal pairs at"):
        prepare_here(prepared, f"data_dir={tmp_path / 'data'}", "eval.probes.minimal_pairs=none")
    assert not (tmp_path / "data").exists()


def test_pairs_are_found_at_home(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list_files(["~/pairs.tsv"]) == [tmp_path / "pairs.tsv"]


def test_a_sentence_without_a_mask_is_refused(prepared: Path) -> None:
    with pytest.raises(UserError, match=r"eval.probes.sentences: no \[MASK\] in 'A b.'"):
        prepare_here(prepared, "eval.probes.sentences=['A b.']")


def test_each_paradigm_gives_so_many_pairs(probed: Path, tmp_path: Path) -> None:
    shutil.copytree(probed / "data", tmp_path / "data")
    options = (f"data_dir={tmp_path / 'data'}", "eval.probes.pairs_per_paradigm=1")
    prepare_here(probed, *options)
    found = json.loads((tmp_path / "data/probes.json").read_text())
    assert [uid for _, _, uid in found["paradigms"]] == ["a", "b", "c"]


MANY_PASSES = """
import os, runpy, signal, time
import pretrain.probes as module
module.PASS_TOKENS["cpu"] = 32
real, calls = module.MaskedCopies.build, []
def planted(*arguments):
    calls.append(arguments)
    {fault}
    return real(*arguments)
module.MaskedCopies.build = planted
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


def test_a_signal_leaves_the_probes_between_two_passes_and_they_are_scored_later(
    probed: Path, run_dir: Path, tmp_path: Path
) -> None:
    code = MANY_PASSES.format(fault="len(calls) == 2 and os.kill(os.getpid(), signal.SIGTERM)")
    done = fork(["-c", code, *command(probed, tmp_path)[2:]])
    assert done.returncode == 75 and "stopped at step 6 on SIGTERM" in done.stderr, done.stderr
    train_here(probed, tmp_path)
    assert_same_run(tmp_path, run_dir)


def test_probes_may_take_longer_than_ranks_wait_for_each_other(
    probed: Path, tmp_path: Path
) -> None:
    """A rank that does not go on ends after 4 s."""
    words = command(probed, tmp_path, *TWO_STEPS, "train.timeout_s=8")[2:]
    done = fork(*[["-c", MANY_PASSES.format(fault="time.sleep(1.5)"), *words]] * 2)
    assert done.returncode == 0, done.stderr


def test_a_rank_without_the_probes_of_the_others_is_named(probed: Path, tmp_path: Path) -> None:
    other = ["eval.probes.minimal_pairs=null", "eval.probes.sentences=[]"]
    done = run(probed, tmp_path, *TWO_STEPS, processes=2, rank_1=other)
    assert done.returncode == 2
    assert "different config or data: eval.probes is" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "rows",
    [
        "A good film .\t1\nA bad one .\t0\n",
        "sentence\tlabel\nA good film .\tpositive\nA bad one .\tnegative\n",
        "很好\t正面\n",
    ],
)
def test_sentences_with_labels_are_no_minimal_pairs(tmp_path: Path, rows: str) -> None:
    (tmp_path / "a.tsv").write_text(rows, encoding="utf-8")
    with pytest.raises(UserError, match="have no word in common; give .jsonl"):
        read_pairs([str(tmp_path / "a.tsv")])


def test_pairs_of_single_words_and_some_that_share_nothing_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(
        "geese\tgooses\n他看书\t他书看\nI am\tYou are\n", encoding="utf-8"
    )
    assert len(read_pairs([str(tmp_path / "a.tsv")])) == 3
