"""The report: its measures against slow renderings and planted faults, the real text against the
rule of google-research/bert, and a page that is whole by itself."""

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from google_rule import audit_google, documents_of, google_pairs
from helpers import fork
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pairs import make_store, small_vocabulary

from data_pipeline.common.errors import UserError
from data_pipeline.config import DataConfig, PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.report import audit
from data_pipeline.report import page as report
from data_pipeline.report.checks import check_held_out, check_results
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.pairs import PAIR


@pytest.fixture(scope="module")
def config(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """The prepared corpus, in a folder that may be written to."""
    copy = tmp_path_factory.mktemp("report") / "data"
    shutil.copytree(prepared / "data", copy)
    return load_config(DataConfig, str(prepared / "config.yaml"), [f"data_dir={copy}"])


@pytest.fixture(scope="module")
def result(config: DataConfig) -> dict:
    found = report.measure(config)
    report.write_report(found)
    return found


def failing(checks: list[dict]) -> set[str]:
    return {check["name"] for check in checks if not check["holds"]}


# --- real text, two rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.max_seq_length=32"],
        ["data.max_seq_length=64"],
        ["data.max_seq_length=128"],
        ["data.max_seq_length=64", "seed=7"],
        ["data.max_seq_length=64", "data.max_predictions_per_seq=5"],
        ["data.objective=sop"],
        ["data.objective=none"],
        ["data.single_segment_prob=0.5"],
        ["data.single_segment_prob=1"],
        ["data.masking=token"],
        ["data.masking=span"],
        ["data.mask_replace_prob=1.0", "data.random_replace_prob=0.0"],
    ],
    ids=" ".join,
)
def test_on_real_text_every_check_holds(prepared, config, overrides) -> None:
    overrides = [f"data_dir={config.data_dir}", *overrides]
    config = load_config(DataConfig, str(prepared / "config.yaml"), overrides)
    result = report.measure(config)
    assert len(result["checks"]) >= 10
    assert failing(result["checks"]) == {"Held-out documents"}  # of so small a corpus
    assert report.render_page(result).count("<svg") >= 5


def test_the_rule_of_google_fails_what_ours_holds_and_stands_beside_it(store, result) -> None:
    google = audit_google(store, PairsConfig(max_seq_length=128), seed=0, dupe_factor=20)
    checks = check_results(google | {"settings": result["settings"]})
    assert {
        "Random pairs of the epoch",
        "Labels predicted from the total length",
        "Tokens in more than one sequence",
        "Masked words of 1 piece",
        "Masked words of 5 pieces",
        "Special pieces among the random ones",
    } <= failing(checks)
    page = Page(report.render_page(result | {"beside": {"google's": checks}}))
    assert page.rows[0][-1] == "google's"
    assert [row[-1] for row in page.rows[1:3]] == [check["found"] for check in checks[:2]]

    once = google_pairs(documents_of(store), 128, 0.1, random.Random(0))
    assert audit.audit_coverage(once, store.sentence_offsets)["covered"] < 0.97

    def of(rule: dict) -> tuple[float, float, float]:
        rates = {row["pieces"]: row["masked"] for row in rule["masks"]["by_pieces"]}
        random = rule["epoch"]["random"] / rule["epoch"]["sequences"]
        return random, rule["pairs"]["by_total"]["balanced"], rates[1] - rates[5]

    random_share, told, less_masked = of(google)
    assert random_share > 0.52 and told > 0.54 and less_masked > 0.03
    random_share, told, less_masked = of(result)
    assert abs(random_share - 0.5) < 0.001 and told < 0.53 and less_masked < 0.03
    assert google["epoch"]["edges_inside_words"] > 0 == result["epoch"]["edges_inside_words"]


LIMITS = {  # check -> its figure, a value that just holds and one that just does not
    "Random pairs of the epoch": ("epoch random", 501, 502),
    "Random B's from A's own document": ("pairs random_same_document", 0, 1),
    "IsNext B's that do not come after A": ("pairs next_elsewhere", 0, 1),
    "Labels predicted from the lengths of A and B": ("pairs by_lengths balanced", 0.511, 0.512),
    "Labels predicted from the total length": ("pairs by_total balanced", 0.511, 0.512),
    "Tokens in a sequence of the epoch": ("coverage covered", 0.995, 0.994),
    "Tokens in more than one sequence": ("coverage again", 0, 1),
    "Masked tokens": ("masks masked", 0.1479, 0.1477),
    "Most masked tokens in a sequence": ("masks most_in_a_sequence", 5, 6),
    "Words masked in part": ("masks partly_masked_words", 0, 1),
    "Masked words of 6 pieces or more": ("masks by_pieces 6 masked", 0.1449, 0.1447),
    "In a masked place: [MASK]": ("masks replaced mask", 0.8029, 0.8032),
    "In a masked place: a random piece": ("masks replaced random", 0.1029, 0.1032),
    "In a masked place: the token itself": ("masks replaced kept", 0.1029, 0.1032),
    "Special pieces among the random ones": ("masks special_pieces", 0, 1),
    "Tokens changed but not predicted": ("masks changed_unmasked", 0, 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_check_fails_where_its_figure_passes_its_limit(name: str) -> None:
    """With a million pairs and a hundred million words, whose standard errors are small."""
    figure, holds, fails = LIMITS[name]
    data = PairsConfig(max_predictions_per_seq=5 if name.startswith("Most") else None)
    for value, failed in ((holds, set()), (fails, {name})):
        rows = {k: {"pieces": k, "words": 10**8, "masked": 0.15} for k in (1, audit.LONG)}
        pairs = dict.fromkeys(("random_same_document", "next_elsewhere"), 0) | {"tested": 10**6}
        pairs |= {"by_lengths": {"balanced": 0.5}, "by_total": {"balanced": 0.5}}
        masks = dict.fromkeys(("partly_masked_words", "special_pieces", "changed_unmasked"), 0)
        masks |= {"masked": 0.15, "words_masked": 10**8, "most_in_a_sequence": 0}
        masks |= {"replaced": {"mask": 0.8, "random": 0.1, "kept": 0.1}, "drawn_same": 0.0}
        found = {"settings": vars(data), "epoch": {"pairs": 1000, "random": 500}, "pairs": pairs}
        found |= {"coverage": {"covered": 1.0, "again": 0}, "masks": masks | {"by_pieces": rows}}
        *path, last = (int(key) if key.isdigit() else key for key in figure.split())
        place = found
        for key in path:
            place = place[key]
        place[last] = value
        found["masks"]["by_pieces"] = list(rows.values())
        assert failing(check_results(found)) == failed


def test_the_least_that_may_be_held_out_is_enough() -> None:
    for documents, tokens, wanted in ((50, 20_000, set()), (49, 19_999, {"documents", "tokens"})):
        checks = check_held_out({"held_out": {"documents": documents, "tokens": tokens}})
        assert failing(checks) == {f"Held-out {what}" for what in wanted}


SHAPES = {
    "two documents of two words": [[[1, 1]], [[2, 1]]],
    "four documents of one sentence": [[[1] * 9]] * 4,
    "documents of one word": [[[1]]] * 3 + [[[1, 1]]] * 8,
    "words longer than a sequence": [[[40, 2, 3]]] * 6,
    "many short documents": [[[1, 2], [3], [1, 1, 1]]] * 50,
}


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("error")
def test_the_smallest_corpora_have_a_report_too(shape: str, objective: str, result: dict) -> None:
    data = PairsConfig(max_seq_length=16, objective=objective)
    store = make_store(SHAPES[shape])
    if (shape, objective) == ("two documents of two words", "nsp"):  # which takes four pairs
        with pytest.raises(UserError, match="next-sentence prediction needs"):
            audit.audit_store(store, data, seed=0)
        return
    found = audit.audit_store(store, data, seed=0)
    found["checks"] = check_results(found)
    json.dumps(found, allow_nan=False)
    assert not Page(report.render_page({**result, **found})).open
    exact = {
        "Random B's from A's own document",
        "Words masked in part",
        "Tokens in more than one sequence",
    }
    assert not exact & failing(found["checks"])


@pytest.mark.filterwarnings("error")
def test_a_corpus_of_one_pair_has_a_report_without_nan(result: dict) -> None:
    found = audit.audit_store(make_store([[[1] * 9]]), PairsConfig(objective="sop"), seed=0)
    found["checks"] = check_results(found)
    assert found["epoch"]["sequences"] == 1
    json.dumps(found, allow_nan=False)
    assert not Page(report.render_page({**result, **found})).open
    assert not {name for name in failing(found["checks"]) if name.startswith("Labels told")}


@pytest.mark.parametrize("shares", [(0.0, 1.0), (0.5, 0.5), (0.8, 0.1)])
def test_random_pieces_that_are_the_token_itself_are_expected(shares) -> None:
    # one in 60 is, with 60 ordinary pieces: 1.7 % of the predicted tokens if all become random
    data = PairsConfig(mask_replace_prob=shares[0], random_replace_prob=shares[1])
    store = make_store([[[1, 2, 1, 3, 1, 1, 2, 1]] * 40] * 60)
    found = audit.audit_store(store, data, seed=0)
    assert found["masks"]["drawn_same"] == pytest.approx(1 / 60)
    failed = failing(check_results(found))
    assert not {name for name in failed if name.startswith("In a masked place")}


# --- measures -------------------------------------------------------------------------------------

SENTENCES = np.array([0, 4, 5, 12, 20, 33, 40])


def slow_coverage(spans: list[tuple[int, int]]) -> tuple[int, int, int, int]:
    """(tokens in a span, uses beyond the first, cut off, left out), token by token."""
    uses = [sum(start <= t < end for start, end in spans) for t in range(SENTENCES[-1])]
    sentences = [uses[start:end] for start, end in pairwise(SENTENCES)]
    left_out = sum(len(sentence) for sentence in sentences if not any(sentence))
    covered = sum(used > 0 for used in uses)
    return covered, sum(uses) - covered, uses.count(0) - left_out, left_out


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.tuples(*[st.integers(0, 40)] * 4), min_size=1, max_size=8))
def test_coverage_counts_tokens(quadruples) -> None:
    rows = [(min(p, q), max(p, q), min(r, s), max(r, s), 0) for p, q, r, s in quadruples]
    found = audit.audit_coverage(np.array(rows, PAIR), SENTENCES)
    spans = [span for row in rows for span in (row[:2], row[2:4])]
    numbers = round(found["covered"] * 40), found["again"], found["cut"], found["left_out"]
    assert numbers == slow_coverage(spans)


def make_pairs(n: int, rng: np.random.Generator) -> np.ndarray:
    """Pairs in documents of 1,000 tokens, half of them with a B of the next document."""
    pairs = np.zeros(n, PAIR)
    pairs["label"] = rng.permutation(n) % 2
    pairs["a_start"] = 1000 * np.arange(n) + rng.integers(0, 100, n)
    pairs["a_end"] = pairs["a_start"] + rng.integers(1, 100, n)
    pairs["b_start"] = pairs["a_end"] + 1000 * pairs["label"]
    pairs["b_end"] = pairs["b_start"] + rng.integers(1, 100, n)
    return pairs


def audited(pairs: np.ndarray) -> dict:
    return audit.audit_pairs(pairs, lambda positions: positions // 1000)


def test_pairs_without_a_leak_are_at_chance() -> None:
    found = audited(make_pairs(20_000, np.random.default_rng(0)))
    assert found["random"] == 0.5
    assert found["random_same_document"] == found["next_elsewhere"] == found["empty"] == 0
    for name in ("by_lengths", "by_total"):
        assert abs(found[name]["balanced"] - 0.5) < 0.02
        assert abs(found[name]["accuracy"] - 0.5) < 0.02


def test_planted_faults_of_pairs_are_counted() -> None:
    pairs = make_pairs(1000, np.random.default_rng(0))
    near, far = (np.flatnonzero(pairs["label"] == label)[:7] for label in (0, 1))
    for name in ("b_start", "b_end"):
        pairs[name][far] -= 1000
        pairs[name][near[:5]] += 1000
    pairs["b_end"][near[5:]] = pairs["b_start"][near[5:]]
    found = audited(pairs)
    counts = [found[name] for name in ("random_same_document", "next_elsewhere", "empty")]
    assert counts == [7, 5, 2]


@pytest.mark.parametrize("leak", ["B", "difference", "majority"])
def test_a_planted_leak_of_lengths_is_found(leak: str) -> None:
    pairs = make_pairs(20_000, np.random.default_rng(0))
    if leak == "B":  # random B's are four tokens longer on average
        pairs["b_end"] += 4 * pairs["label"]
    a, b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    if leak == "difference":  # seen in both lengths together, in neither alone
        pairs = pairs[(a > b) == pairs["label"]]
    if leak == "majority":  # no leak at all
        pairs = np.delete(pairs, np.flatnonzero(pairs["label"] == 0)[::2])
    found = audited(pairs)
    if leak == "majority":
        assert abs(found["majority"] - 2 / 3) < 0.02
        assert abs(found["by_lengths"]["accuracy"] - found["majority"]) < 0.02
        assert abs(found["by_lengths"]["balanced"] - 0.5) < 0.02
    else:
        assert found["by_lengths"]["balanced"] > (0.85 if leak == "difference" else 0.51)


def test_a_table_finds_what_it_can_and_no_more() -> None:
    rng = np.random.default_rng(0)
    label, values, fit = rng.random(9000) < 0.3, rng.random(9000), np.arange(9000) % 2 == 0
    chance = audit.accuracy([values], label, fit)
    assert abs(chance["balanced"] - 0.5) < 0.03 and abs(chance["accuracy"] - 0.7) < 0.03
    told = audit.accuracy([np.where(label, values, values + 0.9)], label, fit)
    assert told["balanced"] > 0.93 and told["accuracy"] > 0.93


def test_shared_words_are_the_words_that_a_reader_sees_twice(store, config) -> None:
    source = BatchSource(store, config.data, 0)
    pairs = source.pairs(0)[:200]
    shares = [[], []]
    for pair in pairs.tolist():
        words = [
            audit.decode(store.vocabulary, store.take(np.arange(*pair[k : k + 2]))).split(" ")
            for k in (0, 2)
        ]
        shares[pair[4]].append(sum(word in words[1] for word in words[0]) / len(words[0]))
    found = audit.audit_overlap(store, pairs, lambda positions: positions)
    assert found["shared_words"] == pytest.approx([np.mean(x) for x in shares], abs=1e-6)


def slow_masks(original, seen, masked, starts, ordinary) -> dict:
    words: list[list[int]] = []
    for i, start in enumerate(starts):
        words.append([i]) if start else words[-1].append(i)
    hidden = [[masked[i] for i in word] for word in words]
    kinds = Counter(
        "mask" if seen[i] == 4 else "kept" if seen[i] == original[i] else "random"
        for i in range(len(seen))
        if masked[i]
    )
    by_pieces = {}
    for word in hidden:
        by_pieces.setdefault(min(len(word), audit.LONG), []).append(any(word))
    return {
        "words_masked": sum(map(any, hidden)),
        "masked": sum(masked) / len(masked),
        "partly_masked_words": sum(any(word) and not all(word) for word in hidden),
        "by_pieces": [
            {"pieces": k, "words": len(v), "masked": sum(v) / len(v)}
            for k, v in sorted(by_pieces.items())
        ],
        "replaced": {k: kinds[k] / max(sum(masked), 1) for k in ("mask", "random", "kept")},
        "special_pieces": sum(
            m and s not in ordinary and s not in (4, o)
            for o, s, m in zip(original, seen, masked, strict=True)
        ),
        "changed_unmasked": sum(
            not m and s != o for o, s, m in zip(original, seen, masked, strict=True)
        ),
    }


TOKEN = st.tuples(st.integers(7, 9), st.integers(2, 9), st.booleans(), st.integers(0, 2))


@settings(max_examples=200, derandomize=True)
@given(st.lists(TOKEN, min_size=1, max_size=40))
def test_masks_are_counted_as_one_by_one(tokens) -> None:
    original, seen, masked, joins = (list(column) for column in zip(*tokens, strict=True))
    starts = [i == 0 or join == 0 for i, join in enumerate(joins)]
    vocabulary = small_vocabulary()
    arrays = [np.array(column) for column in (original, seen, masked, starts)]
    found = audit.audit_masks(*arrays, np.zeros(len(seen), int), vocabulary)
    wanted = slow_masks(original, seen, masked, starts, set(vocabulary.ordinary.tolist()))
    assert {name: found[name] for name in wanted} == wanted


# --- the report -----------------------------------------------------------------------------------


def test_the_json_is_what_was_measured(config, result) -> None:
    saved = json.loads((Path(config.data_dir) / "report.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(result))
    assert {"corpus", "vocabulary", "coverage", "pairs", "overlap", "masks", "checks"} <= set(saved)
    assert saved["store"]["train"]["tokens"] == saved["coverage"]["tokens"]


def test_the_corpus_is_counted(result, store) -> None:
    corpus, vocabulary = result["corpus"], result["vocabulary"]
    assert sum(corpus["document_tokens"]["counts"]) == store.n_documents
    assert sum(corpus["sentence_tokens"]["counts"]) == len(store.sentence_offsets) - 1
    tokens = store.tokens.tolist()
    counts = Counter(tokens)
    pieces = store.vocabulary.pieces
    single = sum(n for t, n in counts.items() if re.fullmatch(r"(##)?[^\W\d_]", pieces[t]))
    assert vocabulary["single_letters"] == pytest.approx(single / len(tokens), rel=0.01)
    assert vocabulary["unknown"] == counts[1] / len(tokens)
    entropy = -sum(n / len(tokens) * np.log(n / len(tokens)) for n in counts.values())
    assert vocabulary["unigram_entropy"] == pytest.approx(entropy)
    sizes = [d["tokens"] for d in corpus["longest_documents"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] < len(store)


def test_the_examples_are_pairs_of_the_store_with_their_masks(config, result, store) -> None:
    examples = result["examples"]
    assert Counter(example["label"] for example in examples) == {0: 6, 1: 6}
    text = audit.decode(store.vocabulary, store.tokens)
    kinds: Counter[str] = Counter()
    for example in examples:
        for segment in example["segments"]:
            assert " ".join(word for word, _, _ in segment) in text
            for word, shown, kind in segment:
                kinds[kind] += 1
                masks = shown.split(" ")
                assert ("[MASK]" in masks) == (kind == "mask")
                assert (shown.replace(" ##", "") == word) == (kind in ("", "kept"))
    assert kinds["mask"] > kinds["random"] > 0 and kinds["kept"] > 0 and kinds[""] > 100


def test_the_page_is_whole_and_loads_nothing(config, result) -> None:
    page = Page((Path(config.data_dir) / "report.html").read_text(encoding="utf-8"))
    page.assert_whole()
    assert page.tags["figure"] == 9
    assert page.text.count("IsNext") >= 6 and page.tags["ruby"] > 12
    rows = {row[0]: row for row in page.rows}
    for check in result["checks"]:
        assert rows[check["name"]][1:3] == [check["found"], check["wanted"]]


def test_checks_are_folded_only_if_all_hold(result) -> None:
    good = [check | {"holds": True} for check in result["checks"]]
    text = report.render_page(result | {"checks": good})
    assert f"<details><summary>All {len(good)} checks hold</summary>" in text
    bad = [good[0] | {"holds": False}, *good[1:]]
    text = report.render_page(result | {"checks": bad})
    assert f"<details open><summary>1 of {len(good)} checks does not hold</summary>" in text
    assert f"{bad[0]['name']}: {bad[0]['found']}, wanted {bad[0]['wanted']}." in Page(text).text


def test_what_is_unusual_comes_first(result) -> None:
    store = result["store"]

    def warned(
        documents=5000, share=0.01, unknown=0.001, lost=0.0, others=(), sentences=10**5
    ) -> list[str]:
        counts = {"documents": documents, "tokens": 10**6, "sentences": sentences}
        return report.list_warnings(
            {
                "store": {
                    "train": counts,
                    "held_out": counts,
                },
                "corpus": {"longest_documents": [{"document": 3, "share": share}]},
                "vocabulary": {"unknown": unknown},
                "accents": {"lost": lost, "examples": [("schön", "schon")]},
                "other_settings": others,
                "settings": {"objective": "sop"},
            }
        )

    assert not warned()
    assert not warned(1000, 0.1, 0.01, 0.001, sentences=1500)  # the limits themselves
    for beyond in (
        {"documents": 999},
        {"share": 0.101},
        {"unknown": 0.0101},
        {"lost": 0.0011},
        {"documents": 1000, "sentences": 1499},
    ):
        assert len(warned(**beyond)) == 1
    for unusual in (
        {"documents": 300},
        {"share": 0.4},
        {"unknown": 0.03},
        {"lost": 0.04},
        {"others": ["vocab.size was 1, is 2"]},
        {"sentences": 6000},
    ):
        (line,) = warned(**unusual)
        found = "300 documents|40% of all|3.00 % of the tokens|schön becomes schon|was 1, is 2"
        found += "|1.2 sentences on average, so most pairs"
        assert re.search(found, line)

    page = Page(report.render_page(result)).text
    first = page.index("documents are trained on")
    assert f"Only {store['train']['documents']:,} documents" in page
    assert first < page.index("checks") < page.index("Tokens of a document")


def test_the_legend_has_only_the_fates_that_masked_tokens_have(result: dict) -> None:
    masks = result["masks"] | {"replaced": {"mask": 1.0, "random": 0.0, "kept": 0.0}}
    for found, are_shown in ((result, True), (result | {"masks": masks}, False)):
        text = Page(report.render_page(found)).text
        assert "To be predicted: [MASK]" in " ".join(text.split())
        assert ("a random piece in its place" in text) == are_shown
        assert ("kept as it was" in text) == are_shown


def test_text_of_the_corpus_cannot_become_markup() -> None:
    words = [("<script>", "<script>", ""), ("a&b", "<i>", "random"), ("##c", "##c", "")]
    assert report.render_words(words) == (
        '&lt;script&gt; <ruby class="random">&lt;i&gt;<rt>a&amp;b</rt></ruby>c'
    )


def test_chinese_words_stand_without_spaces() -> None:
    words = [("我们", "我们", ""), ("北京", "[MASK] [MASK]", "mask"), ("bert", "bert", "")]
    shown = report.render_words(words)
    assert shown == '我们<ruby class="mask">[MASK] [MASK]<rt>北京</rt></ruby> bert'


def test_each_source_has_its_row(result) -> None:
    (source,) = result["store"]["sources"]
    assert source["documents"] == sum(
        result["store"][x]["documents"] for x in ("train", "held_out")
    )
    more = source | {"name": "a & b", "weight": 0.5, "rejects": {"empty": 1, "too long": 1200}}
    page = Page(
        report.render_page(result | {"store": result["store"] | {"sources": [source, more]}})
    )
    head = next(i for i, row in enumerate(page.rows) if row[0] == "Source")
    rows = page.rows[head:]
    assert rows[0][-1] == "Left out"
    assert rows[1][0] == source["name"] and f"{source['bytes']:,}" in rows[1]
    assert rows[2][0] == "a & b" and rows[2][-1] == "1 empty, 1,200 too long" and "0.5" in rows[2]


def test_a_store_that_does_not_name_its_sources_has_a_page(result) -> None:
    old = {name: value for name, value in result["store"].items() if name != "sources"}
    assert "Sources" not in Page(report.render_page(result | {"store": old})).text


def run(*arguments: object) -> subprocess.CompletedProcess:
    return fork(["-m", "data_pipeline.report", *map(str, arguments)])


def test_the_command_writes_both_files_and_says_what_holds(prepared, tmp_path) -> None:
    shutil.copytree(prepared / "data", tmp_path / "data")
    done = run(prepared / "config.yaml", f"data_dir={tmp_path}/data")
    assert done.returncode == 0, done.stderr
    assert f"report: {tmp_path}/data/report.html" in done.stdout
    assert "holds  Random B's from A's own document: 0 (wanted 0)" in done.stdout
    assert {p.name for p in (tmp_path / "data").glob("report*")} == {"report.html", "report.json"}


def test_without_a_store_the_command_says_which_one_makes_it(prepared, tmp_path) -> None:
    done = run(prepared / "config.yaml", f"data_dir={tmp_path}/none")
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*python -m data_pipeline CONFIG\n", done.stderr)
