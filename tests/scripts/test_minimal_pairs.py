"""Minimal pairs are scored as transformers scores them, one masked copy after the other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import ROOT
from safetensors.torch import load_file, save_file

from data_pipeline.build.probes import MinimalPair, encode, encode_texts, read_pairs
from data_pipeline.common.errors import UserError
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain import probes
from pretrain.probes import by_phenomenon, prefers_good, score_by_frequency
from pretrain.read_export import load_export

PAIRS = [
    ("The names are resolved.", "The names is resolved."),
    ("It returns an incomprehensible value.", "It return an incomprehensible value."),
    ("A class.", "A a class, which has more words than the others of this list have."),
    ("An object is an Object.", "An OBJECT is an object."),  # equal in lower case: a tie
]


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/minimal_pairs.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def write_tsv(path: Path, pairs=PAIRS) -> Path:
    path.write_text("".join(f"{good}\t{bad}\n" for good, bad in pairs), encoding="utf-8")
    return path


def slow_score(export: Path, text: str, within_word: bool) -> float:
    """The pseudo-log-likelihood of a sentence by transformers, a pass for each token."""
    from transformers import AutoTokenizer, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = BertForMaskedLM.from_pretrained(export).eval()
    ids, total = tokenizer(text)["input_ids"], 0.0
    words = tokenizer(text).word_ids()
    for i in range(1, len(ids) - 1):
        hidden = [*ids]
        hidden[i] = tokenizer.mask_token_id
        k = i + 1
        while within_word and words[k] == words[i]:
            hidden[k] = tokenizer.mask_token_id
            k += 1
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([hidden])).logits[0, i]
        total += float(logits.double().log_softmax(0)[ids[i]])
    return total


@pytest.mark.parametrize("within_word", [False, True])
@pytest.mark.parametrize("pass_tokens", [40, 1 << 14])  # within sentences, and all at once
def test_scores_are_those_of_transformers(straight, monkeypatch, within_word, pass_tokens) -> None:
    monkeypatch.setitem(probes.PASS_TOKENS, "cpu", pass_tokens)
    export, texts, done = straight / "export", [text for pair in PAIRS for text in pair], []
    encodings = encode(export, texts)
    sentences = [encoding.ids for encoding in encodings]
    model = load_export(export)
    scores = probes.score_sentences(
        model,
        sentences,
        read_vocabulary(export),
        Accelerator(cpu=True),
        [encoding.word_ids for encoding in encodings] if within_word else None,
        done.append,
    )
    wanted = [slow_score(export, text, within_word) for text in texts]
    np.testing.assert_allclose(scores, wanted, atol=1e-4, rtol=0)
    assert scores[6] == scores[7] and len(set(scores)) == 7
    assert sum(done) == probes.count_read_tokens(sentences, model)
    assert (len(done) > 7) == (pass_tokens == 40)


def test_a_word_of_several_pieces_is_easier_with_its_rest_in_sight(straight) -> None:
    """So the two kinds of score differ, and only for such words."""
    text = "It returns an incomprehensible value."
    assert len(encode_texts(straight / "export", [text])[0]) > 2 + 6
    assert slow_score(straight / "export", text, True) != slow_score(
        straight / "export", text, False
    )


def test_a_tie_counts_half() -> None:
    assert prefers_good(np.array([-1.0, -2.0, -3.0, -2.0, -2.0, -2.0])).tolist() == [1, 0.5, 0]


def test_a_pair_without_a_score_is_neither_right_nor_wrong() -> None:
    found = prefers_good(np.array([np.nan, -2.0, -1.0, -1.0, np.nan, -3.0]))
    assert np.array_equal(found, [np.nan, np.nan, 1], equal_nan=True)


def test_means_are_over_the_paradigms_of_a_phenomenon() -> None:
    """A paradigm of many pairs weighs no more than another."""
    small, large, other = ("syntax", "islands", "a"), ("syntax", "islands", "b"), ("m", "n", "c")
    right = np.array([1, 0, 0, 0, 1, 0.5])
    found = by_phenomenon([small, large, large, large, large, other], right)
    assert found["UID"] == {"a": 1, "b": 0.25, "c": 0.5}
    assert found["linguistics_term"] == {"islands": 0.625, "n": 0.5}
    assert found["field"] == {"syntax": 0.625, "m": 0.5}
    assert found["mean"] == pytest.approx((1 + 0.25 + 0.5) / 3)


def test_the_standard_error_is_how_much_means_of_other_pairs_differ() -> None:
    rng, rates = np.random.default_rng(0), (0.9, 0.6, 0.5)
    names = [("f", "t", str(i)) for i, n in enumerate((20, 50, 200)) for _ in range(n)]
    draws = [np.array([rng.random() < rates[int(name)] for *_, name in names]) for _ in range(400)]
    found = [by_phenomenon(names, right.astype(float)) for right in draws]
    errors = [one["standard_error"] for one in found]
    # of 400 draws, the spread is known to 1 / sqrt(800) = 3.5 %
    assert np.mean(errors) == pytest.approx(np.std([one["mean"] for one in found]), rel=0.14)


@pytest.mark.parametrize(
    "header",
    ["good\tbad", "sentence_good\tsentence_bad", "Good\tBad", "sen\twrong_sen"],
)
def test_a_header_is_no_pair_but_a_later_line_like_it_is(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"{header}\nIt rains .\tIt rain .\ngood\tbad\n")
    found = [(pair.good, pair.bad) for pair in read_pairs([str(path)])]
    assert found == [("It rains .", "It rain ."), ("good", "bad")]


def test_a_header_with_the_bad_sentence_first_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("Ungrammatical\tGrammatical\nIt rain .\tIt rains .\n")
    with pytest.raises(UserError, match="has ungrammatical before grammatical; exchange"):
        read_pairs([str(path)])


def test_a_name_that_is_null_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    names = '"UID": null, "linguistics_term": null, "field": null'
    path.write_text(f'{{"sentence_good": "It rains", "sentence_bad": "It rain", {names}}}\n')
    (pair,) = read_pairs([str(path)])
    assert (pair.field, pair.linguistics_term, pair.UID) == ("a", "a", "a")


def test_phenomenon_and_paradigm_are_names_too(tmp_path: Path) -> None:
    """Those of SLING."""
    path = tmp_path / "a.jsonl"
    names = '"UID": null, "phenomenon": "Aspect", "paradigm": "zai_le"'
    path.write_text(f'{{"sentence_good": "他在写", "sentence_bad": "他在写了", {names}}}\n')
    (pair,) = read_pairs([str(path)])
    assert (pair.field, pair.linguistics_term, pair.UID) == ("Aspect", "Aspect", "zai_le")


def test_a_folder_may_hold_folders_of_pairs(tmp_path: Path) -> None:
    for name in ("b/blimp/one.tsv", "a.tsv", "b/.hidden.tsv", "b/.old/two.tsv", "b/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_tsv(tmp_path / name, PAIRS[:1])
    assert [pair.UID for pair in read_pairs([str(tmp_path)])] == ["a", "one"]
    twice = [str(tmp_path / "b"), str(tmp_path), str(tmp_path / "b/../a.tsv")]
    assert [pair.UID for pair in read_pairs(twice)] == ["one", "a"]


def test_files_of_one_name_in_two_folders_are_two_paradigms(tmp_path: Path) -> None:
    for name in ("en/number.tsv", "de/number.tsv", "de/gender.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a b\ta c\n")
    found = [pair.UID for pair in read_pairs([str(tmp_path)])]
    assert found == ["gender", "de/number", "en/number"]


def test_a_limit_below_1_is_refused(tmp_path: Path) -> None:
    data = write_tsv(tmp_path / "a.tsv")
    done = run("--model", tmp_path, "--data", data, "--limit", 0)
    assert (done.returncode, done.stderr) == (2, "error: --limit 0: wanted 1 or more\n")


def test_an_output_that_is_an_input_is_refused_before_any_work(tmp_path: Path) -> None:
    data = write_tsv(tmp_path / "a.tsv")
    before = data.read_bytes()
    done = run("--model", tmp_path, "--data", data, "--out", data)
    assert done.returncode == 2 and "a.tsv is read by this command" in done.stderr
    assert data.read_bytes() == before


def test_a_folder_as_out_is_refused_before_any_work(tmp_path: Path) -> None:
    done = run("--model", "nowhere", "--data", "nowhere", "--out", tmp_path)
    said = f"error: --out {tmp_path} is a folder; name a file in it\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_the_command_measures_a_folder_and_writes_its_results(prepared, straight, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_tsv(data / "own.tsv")
    names = {"field": "syntax", "linguistics_term": "agreement", "UID": "number"}
    rows = [{"sentence_good": a, "sentence_bad": b} | names for a, b in PAIRS[:3]]
    (data / "blimp.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (data / "notes.md").write_text("no pairs")
    options = ("--store", prepared / "data/store", "--limit", 2)
    out = tmp_path / "judged/out.json"  # in a folder that is not there yet
    done = run("--model", straight / "export", "--data", data, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["pairs"] == 4 and results["pairs_per_second"] > 0
    for column in ("accuracy", "unigram"):
        assert results[column]["UID"].keys() == {"number", "own"}
        assert results[column]["field"]["syntax"] == results[column]["UID"]["number"]
    assert f"mean over 2 paradigms{results['accuracy']['mean']:27.3f}" in done.stdout
    assert "scoring: 100%" in done.stderr


def test_the_baseline_knows_how_frequent_tokens_are() -> None:
    found = score_by_frequency([[0, 2], [1, 1]], np.array([6, 0, 1]))
    assert found == pytest.approx(np.log([7 / 10 * 2 / 10, 1 / 10 * 1 / 10]))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"sentence_good": "a"}', "line 1 has no text under sentence_bad"),
        ("a.jsonl", "\nno json", "line 2 is not JSON"),
        ("a.jsonl", "[]", "line 1 is not a JSON object"),
        ("a.tsv", "good\tbad\n\tbad\n", "line 2 has 2 columns, 1 of them with text"),
        ("a.tsv", "one column\n", "line 1 has 1 columns"),
        ("a.tsv", "\n", "no minimal pairs in"),
        ("a.txt", "text", "is in no format of minimal pairs"),
    ],
)
def test_what_is_wrong_with_the_pairs_is_named(tmp_path, name, text, said) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_pairs([str(tmp_path / name)])


def test_what_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="no minimal pairs at"):
        read_pairs([str(tmp_path / "none")])
    with pytest.raises(UserError, match="no .jsonl or .tsv file in"):
        read_pairs([str(tmp_path)])
    with pytest.raises(UserError, match="no exported model in"):
        load_export(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for file in ("model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("")
    with pytest.raises(UserError, match="config.json has no hidden_size"):
        load_export(tmp_path)


def test_a_weight_that_is_not_finite_is_named(straight, tmp_path) -> None:
    folder = shutil.copytree(straight / "export", tmp_path / "export")
    weights = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    weights[name][0, 0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is not finite"):
        load_export(folder)


def test_a_sentence_without_tokens_is_named(straight) -> None:
    with pytest.raises(UserError, match="u200b' has no token"):
        encode_texts(straight / "export", ["a", "\u200b"])


def test_an_error_is_one_line(straight, tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("word\t" + "word " * 600 + "\n")
    done = run("--model", straight / "export", "--data", tmp_path / "a.tsv")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "the model takes 64; shorten the sentence [CLS] " in done.stderr


def test_bytes_that_are_not_text_are_named(tmp_path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"good\tb\xffd\n")
    with pytest.raises(UserError, match="not UTF-8 text .byte 6"):
        read_pairs([str(tmp_path / "a.tsv")])


@pytest.mark.parametrize("within_word", [False, True])
def test_the_good_sentence_is_the_first_one_and_the_baseline_counts_the_training_text(
    prepared, straight, monkeypatch, within_word
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import minimal_pairs

    export, asked = straight / "export", []
    vocabulary = read_vocabulary(export)

    def note(model, sentences, vocabulary, accelerator, words, advance):
        asked.append(words is not None)
        return probes.score_sentences(model, sentences, vocabulary, accelerator, words)

    monkeypatch.setattr(minimal_pairs, "score_sentences", note)
    seen, held_out = (
        TokenStore.open(prepared / "data/store", split, vocabulary).token_counts()
        for split in ("train", "held_out")
    )
    ids = [i for i, piece in enumerate(vocabulary.pieces) if piece.isalpha() and seen[i]]
    a, b = next((a, b) for a in ids for b in ids if seen[a] > seen[b] and held_out[a] < held_out[b])
    texts = [vocabulary.pieces[token] for token in (a, b)]
    good, bad = sorted(texts, key=lambda text: -slow_score(export, text, within_word))
    pairs = [MinimalPair(good, bad, "f", "t", "likelier"), MinimalPair(*texts, "f", "t", "oftener")]
    found = minimal_pairs.measure(export, pairs, within_word, prepared / "data/store")
    assert found["accuracy"]["UID"]["likelier"] == found["unigram"]["UID"]["oftener"] == 1
    assert asked == [within_word]


def test_the_table_counts_one_pair_and_one_paradigm_as_one(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import minimal_pairs

    accuracy = {"field": {}, "linguistics_term": {}, "UID": {"number": 1.0}, "mean": 1.0}
    found = {"paradigms": 1, "accuracy": accuracy, "pairs": 1, "pairs_per_second": 20.0}
    minimal_pairs.print_table(found)
    assert [*map(str.split, capsys.readouterr().out.splitlines())][-2:] == [
        ["mean", "over", "1", "paradigm", "1.000"],
        ["1", "pair,", "20", "per", "second"],
    ]


def test_a_limit_is_for_each_paradigm_though_two_phenomena_have_one_of_a_name(tmp_path) -> None:
    for term in ("agreement", "anaphor"):
        row = {"sentence_good": "a b", "sentence_bad": "a c", "phenomenon": term, "paradigm": "x"}
        (tmp_path / f"{term}.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    pairs = read_pairs([str(tmp_path)], 2)
    assert [pair.linguistics_term for pair in pairs] == 2 * ["agreement"] + 2 * ["anaphor"]
