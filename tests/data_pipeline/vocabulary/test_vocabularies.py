"""vocabulary: merges against a slow rendering, counts in bounded memory, existing vocabularies,
extension, and the report."""

import json
import random
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prose import write_prose

from data_pipeline.build.prepare import prepare
from data_pipeline.build.stages import is_chinese
from data_pipeline.common.errors import UserError
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, SourceConfig, VocabConfig
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from data_pipeline.vocabulary.coverage import measure_accents, print_report, report_vocabulary
from data_pipeline.vocabulary.existing import make_vocabulary, read_existing
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    WordCounts,
    build_normalizer,
    build_tokenizer,
    merge_pairs,
    train_wordpiece,
    write_tokenizer,
)
from pretrain.config import Config
from pretrain.train import train

FEW = settings(max_examples=100)


# ---------------------------------------------------------------------------------- merges


def merge_slowly(
    words: list[list[str]], counts: list[int], pieces: list[str], size: int, min_frequency: int
) -> list[str]:
    """The rule alone: count all pairs, merge the best everywhere, begin again."""
    pieces = list(pieces)
    while len(pieces) < size:
        totals: Counter[tuple[int, int]] = Counter()
        for word, count in zip(words, counts, strict=True):
            for pair in zip(word, word[1:], strict=False):
                totals[pieces.index(pair[0]), pieces.index(pair[1])] += count
        if not totals or max(totals.values()) < min_frequency:
            break
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        left, right = pieces[best[0]], pieces[best[1]]
        new = left + right.removeprefix("##")
        if new not in pieces:
            pieces.append(new)
        for i, word in enumerate(words):
            out: list[str] = []
            for piece in word:  # from the left, each piece merged once
                if out and out[-1] is not None and (out[-1], piece) == (left, right):
                    out[-1:] = [new, None]  # None: what is before it may not merge again
                else:
                    out.append(piece)
            words[i] = [piece for piece in out if piece]
    return pieces


@FEW
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 9), max_size=10),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_merges_are_those_of_counting_all_pairs_anew_each_time(words, min_frequency, more):
    first = [*SPECIAL_TOKENS, "##a", "##b", "##c", "a", "b", "c"]
    spelled = [[word[0], *(f"##{c}" for c in word[1:])] for word in words]
    as_text = ["".join(chr(first.index(piece)) for piece in word) for word in spelled]
    size, counts, fast = len(first) + more, list(words.values()), list(first)
    merge_pairs(as_text, counts, fast, size, min_frequency)
    assert fast == merge_slowly(spelled, counts, first, size, min_frequency)


# ---------------------------------------------------------------------------------- counts


@FEW
@given(
    st.lists(st.dictionaries(st.text("abcd", min_size=1, max_size=3), st.integers(1, 50))),
    st.integers(2, 30),
)
def test_counts_in_bounded_memory_are_short_by_no_more_than_they_say(parts, limit: int):
    table, true = WordCounts(), Counter()
    with patch("data_pipeline.vocabulary.training.MAX_WORDS", limit):
        for part in parts:
            table.add(part.items())
            true.update(part)
            assert len(table) <= limit
    assert sum(table.values()) + table.dropped == true.total()
    for word, count in true.items():
        assert table.get(word, 0) <= count <= table.get(word, 0) + table.shortfall
    if len(true) <= limit:
        assert table == true and table.shortfall == 0


def test_words_too_long_are_counted_and_take_no_place():
    table = WordCounts()
    table.add([("a" * MAX_WORD_CHARACTERS, 2), ("b" * (MAX_WORD_CHARACTERS + 1), 3), ("c", 1)])
    assert (list(table.values()), table.junk) == ([2, 1], 3)


def test_a_full_table_gives_the_same_files_for_any_number_of_workers(
    prepared: Path, tmp_path: Path
):
    lines = (prepared / "topics.txt").read_text(encoding="utf-8").split("\n\n")
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("\n\n".join(lines[i::4]), encoding="utf-8")
    written = []
    for workers in (1, 3):
        config = DataConfig(
            data_dir=str(tmp_path / str(workers)),
            corpus=CorpusConfig(files=str(tmp_path / "*.txt"), held_out_fraction=0.1),
            vocab=VocabConfig(size=512),
        )
        with patch("data_pipeline.vocabulary.training.MAX_WORDS", 2000):
            prepare(config, workers)
        written.append({p.name: p.read_bytes() for p in (tmp_path / f"{workers}/vocab").iterdir()})
    assert written[0] == written[1]
    assert json.loads(written[0]["report.json"])["counts_too_small_by_at_most"] > 0


# ---------------------------------------------------------------------------------- existing ones

# [PAD] first and the others past a hundred, as in Google's files
GOOGLE = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,()'0123456789"
OLD = [*GOOGLE, *LETTERS, *(f"##{c}" for c in LETTERS), "the", "mod", "##ule", "##ing", "is"]


def write_vocabulary(folder: Path, pieces: list[str] = OLD, **flags) -> Path:
    write_tokenizer(folder, pieces, VocabConfig(**flags))
    return folder


def prepare_with(prepared: Path, data_dir: Path, **vocab) -> None:
    corpus = CorpusConfig(files=str(prepared / "topics.txt"), held_out_fraction=0.1)
    prepare(DataConfig(data_dir=str(data_dir), corpus=corpus, vocab=VocabConfig(**vocab)), 1)


def test_a_vocabulary_is_read_from_any_of_its_files(tmp_path: Path):
    folder = write_vocabulary(tmp_path / "v")
    assert read_existing(VocabConfig(path=str(folder))) == OLD
    assert read_existing(VocabConfig(path=str(folder / "vocab.txt"))) == OLD
    (folder / "vocab.txt").rename(tmp_path / "list.txt")
    assert read_existing(VocabConfig(path=str(folder))) == OLD
    text = (tmp_path / "list.txt").read_text(encoding="utf-8")
    (tmp_path / "list.txt").write_bytes(text.strip().replace("\n", "\r\n").encode())
    assert read_existing(VocabConfig(path=str(tmp_path / "list.txt"))) == OLD
    assert read_existing(VocabConfig()) == []


def test_special_tokens_may_have_any_ids(prepared: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    folder = write_vocabulary(tmp_path / "v")
    prepare_with(prepared, tmp_path / "data", path=str(folder))
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    assert vocabulary.pieces == OLD
    store = TokenStore.open(tmp_path / "data/store", "train", vocabulary)
    batch = BatchSource(store, PairsConfig(max_seq_length=32), 0).batch(0, 100)
    starts = batch.cu_seqlens[:-1]
    assert (batch.input_ids[starts] == 101).all()
    assert (batch.input_ids[batch.cu_seqlens[1:] - 1] == 102).all()
    labels, ids = batch.masked_labels, batch.input_ids[batch.masked_positions]
    assert (ids == 103).sum() > len(ids) / 2
    assert not torch.isin(labels, torch.tensor([0, 101, 102, 103])).any()
    peer = AutoTokenizer.from_pretrained(folder)
    assert peer("the module")["input_ids"] == [101, *map(OLD.index, ["the", "mod", "##ule"]), 102]


def test_a_run_with_special_tokens_elsewhere_trains_and_passes_the_gate(
    prepared: Path, tmp_path: Path
):
    pieces = ["the", "[SEP]", "[MASK]", "[PAD]", "[CLS]", "[UNK]"]
    pieces += [piece for piece in OLD if piece not in pieces]
    folder = write_vocabulary(tmp_path / "v", pieces)
    settings = ["train.max_steps=2", "train.warmup_steps=1", f"vocab={{path: {folder}}}"]
    settings += [f"run_dir={tmp_path}/run", f"data_dir={tmp_path}/data"]
    config = load_config(Config, str(prepared / "config.yaml"), settings)
    config.vocab.size = None
    prepare(config, 1)
    with pytest.raises(UserError, match=r"set model.pad_token_id=3"):
        train(config)
    config.model.pad_token_id = 3
    train(config)
    assert json.loads((tmp_path / "run/export/config.json").read_text())["pad_token_id"] == 3
    assert "transformers loads every key" in (tmp_path / "run/export/README.md").read_text()


def change_json(name: str, *path: str, to: object):
    """A change of one value in a JSON file of a folder."""

    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        inner = settings
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to
        (folder / name).write_text(json.dumps(settings), encoding="utf-8")

    return change


def change_text(old: str, new: str):
    """A change of `vocab.txt`, which then stands alone."""

    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        text = (folder / "vocab.txt").read_text(encoding="utf-8")
        assert old in text
        (folder / "vocab.txt").write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def only_special_tokens(folder: Path) -> None:
    """As transformers saves a tokenizer whose vocab_file it has ignored."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in SPECIAL_TOKENS))


def japanese(folder: Path) -> None:
    """As the models of cl-tohoku are: `vocab.txt`, and code that splits words."""
    (folder / "tokenizer.json").unlink()
    change_json("tokenizer_config.json", "word_tokenizer_type", to="mecab")(folder)


ADDED = [{"id": len(OLD), "content": "covid"}]


@pytest.mark.parametrize(
    "change, flags, message",
    [
        (None, {"lowercase": False}, "lowercase true, .* says false; set vocab.lowercase=true"),
        (None, {"strip_accents": False}, "set vocab.strip_accents=true"),
        (None, {"handle_chinese_chars": False}, "set vocab.handle_chinese_chars=true"),
        (None, {"size": 1000}, "set vocab.size=null to use them all, and vocab.extend=N to add"),
        (None, {"size": 100}, r"vocab.size is 100, but .* has \d+ pieces"),
        (change_json("tokenizer.json", "normalizer", to=None), {"extend": 9}, "cannot add to it"),
        (change_json("tokenizer.json", "pre_tokenizer", to=None), {}, "no pre-tokeniser to find"),
        (change_json("tokenizer.json", "model", "vocab", "zz", to=7777), {}, "ids are not 0 to"),
        (change_json("tokenizer.json", "added_tokens", to=ADDED), {}, "1 added tokens outside"),
        (change_json("tokenizer_config.json", "do_lower_case", to=False), {}, "lowercase false"),
        (change_text("[CLS]\n", ""), {}, r"lacks \[CLS\]; a BERT"),
        (change_text("[CLS]\n", "<s>\n"), {}, "put its tokenizer.json beside it"),
        (only_special_tokens, {}, "no pieces besides the special tokens; save the tokenizer again"),
        (japanese, {}, "splits words by mecab, which is code in transformers"),
        (change_text("the\n", "\n"), {}, r"line \d+ is empty"),
        (change_text("the\n", "a\n"), {}, r"'a' on line 105 and on line \d+"),
        (lambda f: (f / "vocab.txt").write_text("[PAD]\n"), {}, "hold different pieces"),
        (lambda f: (f / "vocab.txt").write_bytes(b"a\xff\n"), {}, r"not UTF-8 text \(byte 1\)"),
        (lambda f: (f / "tokenizer.json").write_text("{"), {}, "is not JSON"),
        (lambda f: [p.unlink() for p in f.iterdir()], {}, "is neither a vocab.txt nor a folder"),
    ],
)
def test_a_vocabulary_that_is_not_what_the_config_says_is_refused(
    tmp_path: Path, change, flags: dict, message: str
):
    folder = write_vocabulary(tmp_path / "v")
    if change:
        change(folder)
    with pytest.raises(UserError, match=message):
        read_existing(VocabConfig(path=str(folder), **flags))


def test_null_for_accents_means_as_lower_case_and_the_config_file_wins(tmp_path: Path):
    folder = write_vocabulary(tmp_path / "v", lowercase=False)
    change_json("tokenizer.json", "normalizer", "lowercase", to=True)(folder)
    change_json("tokenizer_config.json", "strip_accents", to=None)(folder)
    assert read_existing(VocabConfig(path=str(folder), lowercase=False)) == OLD
    with pytest.raises(UserError, match="set vocab.strip_accents=false"):
        read_existing(VocabConfig(path=str(folder), lowercase=False, strip_accents=True))


def test_another_vocabulary_under_the_same_path_is_another_corpus(prepared: Path, tmp_path: Path):
    folder = write_vocabulary(tmp_path / "v")
    prepare_with(prepared, tmp_path / "data", path=str(folder))
    write_vocabulary(folder, [*OLD, "module"])
    with pytest.raises(UserError, match="with other settings in corpus or vocab"):
        prepare_with(prepared, tmp_path / "data", path=str(folder))
    with pytest.raises(UserError, match=r"vocab.size was None, is \d+, vocab.extend included"):
        prepare_with(prepared, tmp_path / "data", path=str(folder), extend=10)


# ---------------------------------------------------------------------------------- extension


@FEW
@given(
    st.dictionaries(st.text("abcdé", min_size=1, max_size=8), st.integers(1, 20), min_size=1),
    st.lists(st.text("abcd", min_size=2, max_size=3), unique=True, max_size=5),
    st.integers(0, 20),
)
def test_an_extension_keeps_all_ids_and_merges_what_is_split(words, known, more: int):
    old = [*GOOGLE, "a", "b", "##a", "##b", *known]
    existing = build_tokenizer(
        [*old, *(c for c in "cdé"), *(f"##{c}" for c in "cdé")], VocabConfig()
    )
    config = VocabConfig(character_coverage=1, min_frequency=1, size=len(old))
    lacking = {f"##{c}" for word in words for c in word[1:]} - set(old)
    first = [*old, *sorted(lacking), *sorted({word[0] for word in words} - set(old))]
    spelled = [[token.value for token in existing.model.tokenize(word)] for word in words]
    slow = merge_slowly(spelled, list(words.values()), first, len(first) + more, 1)
    config.size = len(slow)
    pieces = train_wordpiece(words, config, old)
    assert pieces[: len(slow)] == slow
    assert len(pieces) % 64 == 0 and len(set(pieces)) == len(pieces)
    assert all(piece.startswith("[unused") for piece in pieces[len(slow) :])


def test_an_extended_vocabulary_spells_the_corpus_in_fewer_pieces(prepared: Path, tmp_path: Path):
    folder = write_vocabulary(tmp_path / "v")
    prepare_with(prepared, tmp_path / "old", path=str(folder))
    prepare_with(prepared, tmp_path / "new", path=str(folder), extend=500 - len(OLD))
    with pytest.raises(UserError, match="vocab.size was 500, is 400"):
        prepare_with(prepared, tmp_path / "new", path=str(folder), extend=400 - len(OLD))
    old, new = (read_vocabulary(tmp_path / name / "vocab") for name in ("old", "new"))
    assert len(new) == 512 and new.pieces[: len(old)] == old.pieces
    stores = [
        TokenStore.open(tmp_path / n / "store", "train", v) for n, v in (("old", old), ("new", new))
    ]
    assert len(stores[1]) < 0.7 * len(stores[0])
    tokenizer = json.loads((tmp_path / "new/vocab/tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer["model"]["vocab"] == new.ids
    assert {token["content"] for token in tokenizer["added_tokens"]} == set(SPECIAL_TOKENS)


def test_an_extension_by_fewer_pieces_than_new_characters_or_more_than_there_are_is_refused():
    vocab, counts = VocabConfig(extend=1, character_coverage=1), {"éñß": 3, "ßßñ": 2}
    with pytest.raises(UserError, match="extend 1 is too small: new single characters alone are 4"):
        make_vocabulary(counts, vocab, GOOGLE)
    vocab.extend = 50
    with pytest.raises(UserError, match="at most 8 new pieces .*set vocab.extend=8 or less"):
        make_vocabulary(counts, vocab, GOOGLE)
    vocab.extend = 8
    added = make_vocabulary(counts, vocab, GOOGLE)[len(GOOGLE) : len(GOOGLE) + 8]
    assert sorted(added) == sorted("é ß ##ñ ##ß ##ñß éñß ##ßñ ßßñ".split())


def test_an_extension_needs_a_vocabulary_and_no_size(prepared: Path):
    for vocab, named in (
        (VocabConfig(extend=5), "vocab.extend 5 needs an existing vocabulary"),
        (VocabConfig(extend=5, size=600, path="v"), "and vocab.size 600 are both set"),
        (VocabConfig(extend=0, path="v"), r"vocab.extend 0 is not in \[1, 1e6\]"),
    ):
        corpus = CorpusConfig(files=str(prepared / "topics.txt"))
        with pytest.raises(UserError, match=named):
            DataConfig(corpus=corpus, vocab=vocab).validate()


# ---------------------------------------------------------------------------------- the report


def test_a_smaller_vocabulary_is_the_first_part_of_a_larger_one(prepared: Path):
    counts = Counter((prepared / "topics.txt").read_text(encoding="utf-8").lower().split())
    large = train_wordpiece(counts, VocabConfig(size=1000))
    assert train_wordpiece(counts, VocabConfig(size=512)) == large[:512]


def test_the_report_counts_what_the_tokenizer_gives(prepared: Path):
    report = json.loads((prepared / "data/vocab/report.json").read_text())
    vocabulary = read_vocabulary(prepared / "data/vocab")
    store = TokenStore.open(prepared / "data/store", "held_out", vocabulary)
    tokens = store.token_counts()
    assert report["measured_on"] == "held_out" and report["size"] == 1024
    assert [row["size"] for row in report["sizes"]] == sorted(r["size"] for r in report["sizes"])
    whole = report["sizes"][-1]
    assert whole["size"] == 1024
    words = tokens[~vocabulary.continues].sum()
    assert report["measured_words"] == words
    assert whole["tokens_per_word"] == pytest.approx(tokens.sum() / words, abs=1e-4)
    assert whole["unknown"] == pytest.approx(tokens[1] / tokens.sum(), abs=1e-6)
    assert report["sizes"][0]["tokens_per_word"] > whole["tokens_per_word"]
    lengths = [len(piece.removeprefix("##")) for piece in vocabulary.pieces]
    assert len(report["longest_pieces"][0].removeprefix("##")) == max(lengths)


def test_the_report_s_shares_are_those_of_a_text_worked_by_hand():
    pieces = [*SPECIAL_TOKENS, "##b", "##c", "a", "z", "ab"]
    words = WordCounts()
    words.add({"ab": 4, "abc": 2, "az": 1, "z": 1, "y" * 200: 2}.items())
    report = report_vocabulary(pieces, 0, words, WordCounts(), VocabConfig())
    assert report["measured_on"] == "train" and report["words_too_long"] == 2
    rows = {row.pop("size"): row for row in report["sizes"]}
    shares = ("tokens_per_word", "whole_words", "unknown", "single_characters")
    # without ab: a ##b x4, a ##b ##c x2, [UNK] (no ##z), z, [UNK] x2: 18 tokens of 10 words
    wanted = [1.8, 0.1, 3 / 18, 14 / 18]
    assert [rows[9][share] for share in shares] == pytest.approx(wanted, abs=1e-6)
    # with it: ab x4, ab ##c x2, [UNK], z, [UNK] x2: 12 tokens
    wanted = [1.2, 0.5, 3 / 12, 2 / 12]
    assert [rows[10][share] for share in shares] == pytest.approx(wanted, abs=1e-6)


def test_what_is_not_counted_is_said(capsys: pytest.CaptureFixture):
    words = WordCounts()
    with patch("data_pipeline.vocabulary.training.MAX_WORDS", 4):
        words.add({"aa": 9, "ab": 8, "a": 7, "b": 2, "ba": 1, "y" * 200: 1234}.items())
    pieces = [*SPECIAL_TOKENS, "##a", "##b", "a", "b", "aa"]
    report = report_vocabulary(pieces, 9, words, WordCounts(), VocabConfig()) | {"accents": {}}
    assert report["words"] == 9 + 8 + 7 + 2 + 1 + 1234 and report["pieces_kept"] == 9
    assert report["distinct_words"] == 2 and report["longest_pieces"] == ["aa"]
    print_report(report)
    said = " ".join(capsys.readouterr().out.split())
    assert "words that are too long and become [UNK]: 1,234 " in said
    assert "rare words dropped to save memory: 10 occurrences; counts are too small" in said
    assert "by at most 7 on 1,251 train words:" in said


def test_much_that_is_unknown_is_said(capsys: pytest.CaptureFixture):
    words = WordCounts()
    words.add([("ab", 9), ("中", 1)])
    for pieces, said in ((["a", "##b", "中"], False), (["a", "##b"], True)):
        report = report_vocabulary(
            [*SPECIAL_TOKENS, *pieces], 0, words, WordCounts(), VocabConfig()
        ) | {"accents": {}}
        print_report(report)
        assert ("warning: many tokens are [UNK]" in capsys.readouterr().out) is said


# --- accents --------------------------------------------------------------------------------------


def test_words_that_accents_tell_apart_are_counted_as_lost_once_the_more_frequent_one_takes_them():
    text = "schön schon schon schon über übers ein"
    found = measure_accents([text, "schön schon"], VocabConfig(strip_accents=True))
    assert found == {"lost": 2 / 9, "examples": [("schön", "schon")]}
    other_way = measure_accents(["là là la avó avô"], VocabConfig(strip_accents=True))
    assert other_way == {"lost": 2 / 5, "examples": [("là", "la"), ("avô", "avo")]}
    korean = measure_accents(["가 x"], VocabConfig(strip_accents=True))
    assert korean == {"lost": 0.5, "examples": [("가", "\u1100+\u1161")]}
    assert measure_accents([text], VocabConfig(strip_accents=False)) == {}
    assert measure_accents([], VocabConfig(strip_accents=True))["lost"] == 0


@pytest.mark.parametrize(
    "languages, given, strips",
    [
        (["en"], {}, True),
        (["en", "zh"], {}, True),
        (["en", "de"], {}, False),
        (["ko"], {}, False),
        (["en"], {"lowercase": False}, False),
        (["de"], {"strip_accents": True}, True),
        (["en"], {"strip_accents": False}, False),
    ],
)
def test_accents_are_dropped_by_default_where_published_models_do(languages, given, strips) -> None:
    corpus = CorpusConfig(sources=[SourceConfig(files=["a.txt"], language=x) for x in languages])
    rules = DataConfig(corpus=corpus, vocab=VocabConfig(**given)).text_rules()
    assert build_normalizer(rules).strip_accents is strips


def test_an_existing_vocabulary_keeps_its_own_rule() -> None:
    config = DataConfig(corpus=CorpusConfig(language="de"), vocab=VocabConfig(path="bert"))
    assert build_normalizer(config.text_rules()).strip_accents is True


def test_preparation_warns_of_words_that_lose_their_accents(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("schön ist es schon, und schon.\n\n" * 200)
    corpus = CorpusConfig(files=[str(tmp_path / "a.txt")], language="de", deduplicate=False)
    for strips in (None, True):
        vocab = VocabConfig(size=20, strip_accents=strips)
        config = DataConfig(data_dir=str(tmp_path / str(strips)), corpus=corpus, vocab=vocab)
        prepare(config, workers=1)
        assert ("schön becomes schon" in capsys.readouterr().out) == bool(strips)
        settings = json.loads((tmp_path / str(strips) / "vocab/tokenizer_config.json").read_text())
        assert settings["strip_accents"] is bool(strips)


def test_preparation_warns_of_chinese_that_is_called_something_else(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("他去了北京，回来了。\n\n" * 200, encoding="utf-8")
    for language in ("en", "zh", "yue", "zh-hant"):
        files = [str(tmp_path / "a.txt")]
        corpus = CorpusConfig(files=files, language=language, deduplicate=False)
        data_dir, vocab = str(tmp_path / language), VocabConfig(size=14)
        prepare(DataConfig(data_dir=data_dir, corpus=corpus, vocab=vocab), workers=1)
        warning = "a.txt: most of the text is Chinese, but its language is set to en; set corpus."
        warning += "language=zh"
        assert (warning in capsys.readouterr().out) == (language == "en")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("Он уехал в Москву.", True), ("Ia plecat la Москва, și atât.", False), ("2026: 5", False)],
)
def test_preparation_warns_of_other_scripts_where_no_language_is_given(
    text: str, wanted: bool, tmp_path, capsys
) -> None:
    (tmp_path / "a.txt").write_text(f"{text}\n\n" * 200, encoding="utf-8")
    for language in ("en", "ru"):
        files = [str(tmp_path / "a.txt")]
        corpus = CorpusConfig(files=files, language=language, deduplicate=False)
        vocab = VocabConfig(size=16, min_frequency=1)
        config = DataConfig(data_dir=str(tmp_path / language), corpus=corpus, vocab=vocab)
        with suppress(UserError):  # too small a vocabulary, after the warning
            prepare(config, workers=1)
        found = (
            "most of its letters are not Latin, but its language is set to en"
            in capsys.readouterr().out
        )
        assert found == (wanted and language == "en")


def test_preparation_warns_of_lines_that_are_wrapped(tmp_path, capsys) -> None:
    lines = [line for text in write_prose()[:20] for line in text.splitlines()]
    texts = {
        "paragraphs": "\n\n".join(lines),
        "wrapped": "\n\n".join(textwrap.fill(line, 72) for line in lines),
        "sentences": "\n".join(". ".join(lines).split(". ")),
    }
    for name, found in texts.items():
        (tmp_path / name).write_text(found, encoding="utf-8")
        corpus = CorpusConfig(files=[str(tmp_path / name)], deduplicate=False)
        config = DataConfig(data_dir=str(tmp_path / f"{name}_data"), corpus=corpus)
        config.vocab = VocabConfig(size=100)
        prepare(config, workers=1)
        warning = f"{name}: its lines seem wrapped at 72 characters" in capsys.readouterr().out
        assert warning == (name == "wrapped")


def test_preparation_warns_of_words_as_long_as_clauses(tmp_path, capsys) -> None:
    for length in (90, 110):
        words = "".join(random.Random(0).choices("กขคงจฉ", k=length))
        (tmp_path / "a.txt").write_text(
            f"the cat and the hen and a man: {words}\n\n" * 200, encoding="utf-8"
        )
        corpus = CorpusConfig(files=[str(tmp_path / "a.txt")], language="th", deduplicate=False)
        vocab = VocabConfig(size=24)
        prepare(DataConfig(data_dir=str(tmp_path / str(length)), corpus=corpus, vocab=vocab), 1)
        warning = "of the text is in words of more than 100 characters, which become [UNK]"
        assert (warning in capsys.readouterr().out) == (length > 100)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("他去了北京。", True), ("What does 好 mean?", False), ("彼は東京へ行った。", False)]
    + [("日本国憲法はこれを認める", False), ("C++，一九八五年", True), ("2026: 2.5 %", False)],
)
def test_chinese_is_told_from_texts_with_chinese_characters(text: str, wanted: bool) -> None:
    assert is_chinese(text) == wanted
