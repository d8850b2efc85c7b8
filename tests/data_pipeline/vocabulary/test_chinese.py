"""Whole words where none are written: masking units of a segmenter, from the text to the masks.

The slow rendering asks `tokenizers` where each word stands in the raw text and looks there which
word of the segmenter it is in, a character at a time.
"""

import hashlib
import random
import sys
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import rjieba
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_pairs import make_store
from tokenizers import Tokenizer

from data_pipeline.build.encode import SPLITS, write_word_starts
from data_pipeline.build.prepare import prepare
from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.common.errors import UserError
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, SourceConfig, VocabConfig
from data_pipeline.corpus.readers import clean_text
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.pairs import SPECIALS
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from data_pipeline.vocabulary.training import build_normalizer, build_tokenizer
from data_pipeline.vocabulary.words import (
    END,
    UnitIndex,
    WordIndex,
    WordSplitter,
    load_segmenter,
    number_units,
    number_words,
)

WORDS = (
    "我们 他们 今天 明天 学生 老师 喜欢 学习 语言 模型 电脑 图书馆 人工智能 中华人民共和国 的 了 "
    "在 是 和 去 北京 天安门 大学 问题 方法 研究 非常 重要 自然语言 BERT GPU 卡拉OK don't 2024 3.5"
).split()


def write_files(folder: Path, count: int = 3) -> list[str]:
    """Text of `WORDS` in some files, each a shard later."""
    draw = random.Random(0)
    for number in range(count):
        documents = []
        for _ in range(20):
            sentences = [
                "".join(draw.choice(WORDS) for _ in range(draw.randint(4, 20)))
                + draw.choice("。！")
                for _ in range(draw.randint(3, 8))
            ]
            documents.append("".join(sentences) + "\nAn English line, as everywhere.")
        (folder / f"{number}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return [str(folder / f"{number}.txt") for number in range(count)]


def config_of(files: list[str], data_dir: Path, words: str | None) -> DataConfig:
    return DataConfig(
        data_dir=str(data_dir),
        corpus=CorpusConfig(
            files=files, language="zh", word_segmenter=words, held_out_fraction=0.1
        ),
        vocab=VocabConfig(size=140, character_coverage=1.0),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`units` and `characters`: the same three files prepared with and without a segmenter."""
    root = tmp_path_factory.mktemp("chinese")
    files = write_files(root)
    prepare(config_of(files, root / "units", "segmenter"), workers=1)
    prepare(config_of(files, root / "characters", None), workers=1)
    return root


def open_store(data_dir: Path, split: str = "train") -> TokenStore:
    return TokenStore.open(data_dir / "store", split, read_vocabulary(data_dir / "vocab"))


@pytest.fixture(scope="module")
def chinese(folder: Path) -> TokenStore:
    return open_store(folder / "units")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_corpus_of_which_some_sources_have_a_segmenter_has_the_units_of_all(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    """Each word of the others is a unit, in whichever order the sources come."""
    (file,) = write_files(tmp_path, 1)
    english = tmp_path / "english.txt"
    english.write_text("\n\n".join(f"A line of an unlikely number {i}." for i in range(40)))
    sources = [
        SourceConfig(files=file, language="zh", word_segmenter="segmenter"),
        SourceConfig(files=str(english)),
    ]
    corpus = CorpusConfig(sources=[sources[i] for i in order], held_out_fraction=0)
    data_dir = tmp_path / "data"
    vocab = VocabConfig(size=140, character_coverage=1.0)
    prepare(DataConfig(data_dir=str(data_dir), corpus=corpus, vocab=vocab), workers=1)
    check_data(data_dir)  # although nothing is held out
    store, pieces = open_store(data_dir), read_vocabulary(data_dir / "vocab").pieces
    starts = store.starts_word(np.arange(len(store.tokens)))
    units = "".join("|" * int(s) + pieces[t] for t, s in zip(store.tokens, starts, strict=True))
    assert "|中华人民共和国|" in units and "|##" not in units
    assert units.replace("##", "").count("|line|") == 20 + 40  # those of the Chinese file too


# --- from text to units ---------------------------------------------------------------------------


def every_third(sentence: str) -> list[str]:
    """A segmenter that knows no language, and cuts where it must not matter."""
    return [sentence[i : i + 3] for i in range(0, len(sentence), 3)]


def at_spaces(sentence: str) -> list[str]:
    """A segmenter whose words hold punctuation and letters of every kind."""
    return sentence.replace(" ", "\n \n").split("\n")


SEGMENTERS = {"rjieba": rjieba.cut, "every third": every_third, "at spaces": at_spaces}
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)
MIXED = st.lists(
    st.sampled_from(
        [*WORDS, *"，。！ （）-'.aBcé́ÅİΣﬁ\u200b\u3000\u200dかな한국ＡＢ１２😀👍🇨🇳𠀀豈①￥_"]
    ),
    max_size=30,
).map("".join)


@cache
def tokenizer() -> Tokenizer:
    characters = sorted(set("".join(WORDS).lower()))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    return build_tokenizer(pieces + [f"##{c}" for c in characters], VocabConfig())


def is_punctuation(word: str) -> bool:
    return all(
        unicodedata.category(c).startswith("P") or (c < "\x7f" and not c.isalnum()) for c in word
    )


def slow_units(text: str, segment) -> list[tuple[list[int], bool]]:
    """(ids, whether a unit starts) of each word that `tokenizers` finds in `text`."""
    segment_of = [i for i, word in enumerate(segment(text)) for _ in word]
    encoding = tokenizer().encode(text, add_special_tokens=False)
    words: dict[int, list[int]] = {}
    for token, word in enumerate(encoding.word_ids):
        words.setdefault(word, []).append(token)
    out, last, alone_before = [], None, True
    for tokens in words.values():
        start, end = encoding.offsets[tokens[0]][0], encoding.offsets[tokens[-1]][1]
        word = tokenizer().normalizer.normalize_str(text[start:end]).strip()
        alone = is_punctuation(word) or text.isascii()
        starts = alone or alone_before or segment_of[start] != segment_of[last]
        out.append(([encoding.ids[token] for token in tokens], starts))
        last, alone_before = end - 1, alone
    return out


def fast_units(sentences: list[str], segment) -> list[list[tuple[list[int], bool]]]:
    split, index = WordSplitter(build_normalizer(VocabConfig())), WordIndex({END: 0})
    numbers, sizes, starts = number_units(sentences, UnitIndex(index, split), segment)
    assert starts.dtype == bool and len(starts) == len(numbers)
    plain = WordIndex({END: 0})
    same_numbers, same_sizes = number_words(sentences, split, plain)
    assert list(index) == list(plain)
    assert (numbers == same_numbers).all() and (sizes == same_sizes).all()
    names, model = [word.decode() for word in index], tokenizer().model
    words = [[token.id for token in model.tokenize(names[number])] for number in numbers]
    ends = np.cumsum(sizes)
    pairs = list(zip(words, starts.tolist(), strict=True))
    return [pairs[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@settings(max_examples=200)
@given(sentences=st.lists(MIXED | TEXT, max_size=4))
@example(
    ["我们don't去卡拉OK，ＧＰＵ很e\u0301", "ASCII only, really.", "\u200b", "İ\u200b我\u200b们"]
)
def test_units_are_those_of_the_slow_rendering(segmenter: str, sentences: list[str]):
    # one line each, and no [MASK]: `tokenizers` looks for it in text, where it has no business
    sentences = [
        clean_text(sentence).replace("\n", " ").replace("[", "(") for sentence in sentences
    ]
    segment = SEGMENTERS[segmenter]
    assert fast_units(sentences, segment) == [slow_units(text, segment) for text in sentences]


def units_of(sentence: str, segment) -> list[str]:
    split, index = WordSplitter(build_normalizer(VocabConfig())), WordIndex({END: 0})
    numbers, _, starts = number_units([sentence], UnitIndex(index, split), segment)
    names, out = [word.decode() for word in index], []
    for number, start in zip(numbers, starts, strict=True):
        out += [names[number]] if start else []
        out[-1] += "" if start else names[number]
    return out


def test_units_are_the_words_that_a_reader_sees():
    assert units_of("我们今天去卡拉OK，don't喜欢BERT。", rjieba.cut) == (
        ["我们", "今天", "去", "卡拉", "ok", "，", "don", "'", "t", "喜欢", "bert", "。"]
    )
    assert units_of("去卡拉OK吧", lambda _: ["去", "卡拉OK", "吧"]) == ["去", "卡拉ok", "吧"]
    # a cut inside a word of BERT's is none, one beside it is; a word of two segments joins neither
    assert units_of("学习unhappy语言", lambda _: ["学", "习un", "happy语", "言"]) == (
        ["学", "习unhappy语", "言"]
    )
    assert units_of("中 文。字", lambda s: [s]) == ["中文", "。", "字"]  # punctuation stands alone
    assert units_of("plain words, one by one", every_third) == "plain words , one by one".split()


@settings(max_examples=100)
@given(st.lists(st.sampled_from([w for w in WORDS if not w[0].isascii()]), max_size=20))
def test_chinese_units_join_to_the_words_of_the_segmenter(words: list[str]):
    assert units_of("".join(words), lambda _: words) == [word.lower() for word in words]


# --- from units to the store ----------------------------------------------------------------------


def sentences_in(store: TokenStore) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    everything = np.arange(len(store))
    ids, starts = store.take(everything).tolist(), store.starts_word(everything).tolist()
    offsets = store.sentence_offsets.tolist()
    return [
        (tuple(ids[a:b]), tuple(starts[a:b])) for a, b in zip(offsets, offsets[1:], strict=False)
    ]


def test_a_store_of_several_shards_has_the_units_of_its_text(folder: Path, monkeypatch):
    made = Tokenizer.from_file(str(folder / "units/vocab/tokenizer.json"))
    monkeypatch.setattr(sys.modules[__name__], "tokenizer", lambda: made)
    wanted = []
    for file in sorted(folder.glob("*.txt")):
        for document in file.read_text(encoding="utf-8").split("\n\n"):
            for sentence in split_sentences(document, sentence_splitter("zh")):
                words = slow_units(sentence, rjieba.cut)
                ids = [i for ids, _ in words for i in ids]
                starts = [s and i == 0 for ids, s in words for i in range(len(ids))]
                wanted.append((tuple(ids), tuple(starts)))
    stores = [open_store(folder / "units", split) for split in SPLITS]
    assert all(stores)
    assert sorted(s for store in stores for s in sentences_in(store)) == sorted(wanted)


def test_a_segmenter_changes_nothing_but_the_bits(folder: Path):
    units, characters = (
        {p.relative_to(folder / d): p.read_bytes() for p in (folder / d).rglob("*") if p.is_file()}
        for d in ("units", "characters")
    )
    bits = {path for path in units if path.name == "word_starts.npy"}
    assert bits and units.keys() - bits == characters.keys()
    assert {p for p in characters if units[p] != characters[p]} == {Path("store/manifest.json")}


def test_starts_are_one_bit_a_token_and_memory_mapped(chinese: TokenStore):
    bits = chinese.word_starts
    assert isinstance(bits.base, np.memmap)
    assert bits.dtype == np.uint8 and len(bits) == -(-len(chinese) // 8)


def test_places_in_any_order_have_their_own_bits(chinese: TokenStore):
    whole = chinese.starts_word(np.arange(len(chinese)))
    places = np.random.default_rng(0).integers(0, len(chinese), 5000)
    assert (chinese.starts_word(places) == whole[places]).all()
    assert not (whole & chinese.vocabulary.continues[chinese.take(np.arange(len(chinese)))]).any()


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_bits_do_not_depend_on_how_many_are_packed_at_once(tmp_path: Path, monkeypatch, batch: int):
    draw = np.random.default_rng(batch)
    lengths, words = np.array([0, 1, 2, 9]), draw.integers(1, 4, 100)
    units = draw.random(100) < 0.5
    monkeypatch.setattr("data_pipeline.build.encode.BATCH_WORDS", batch)
    n = int(lengths[words].sum())
    write_word_starts(tmp_path / "bits.npy", n, words, units, lengths)
    expected = [u and i == 0 for w, u in zip(words, units, strict=True) for i in range(lengths[w])]
    found = np.unpackbits(np.load(tmp_path / "bits.npy"), bitorder="little")
    assert found[:n].tolist() == expected and not found[n:].any()


@pytest.mark.parametrize("damage", ["short", "absent"])
def test_a_store_without_its_bits_is_refused(tmp_path: Path, damage: str):
    prepare(config_of(write_files(tmp_path), tmp_path / "data", "segmenter"), workers=1)
    path = next((tmp_path / "data").rglob("train/word_starts.npy"))
    path.unlink() if damage == "absent" else np.save(path, np.load(path)[:-1])
    with pytest.raises(UserError, match=r"(word_starts\.npy|damaged).*python -m data_pipeline"):
        open_store(tmp_path / "data")


# --- from the store to the masks ------------------------------------------------------------------


def units_and_masks(store: TokenStore, data: PairsConfig, epochs: int):
    """(unit of each text token, whether it is masked) over some epochs."""
    unit_of = np.cumsum(store.starts_word(np.arange(len(store))))
    source, parts, turn = BatchSource(store, data, seed=3), [], 0
    for epoch in range(epochs):
        pairs = source.pairs(epoch)
        batch = source.batch(sum(map(source.epoch_size, range(epoch))), len(pairs))
        hit = np.zeros(len(batch.input_ids), bool)
        hit[batch.masked_positions.numpy()] = True
        for pair, start in zip(pairs, batch.cu_seqlens.tolist(), strict=False):
            for name, first in (
                ("a", start + 1),
                ("b", start + 2 + pair["a_end"] - pair["a_start"]),
            ):
                here = np.arange(pair[f"{name}_start"], pair[f"{name}_end"])
                places = slice(first, first + len(here))
                parts.append((unit_of[here] + turn, hit[places]))
                turn += unit_of[-1]  # the same unit in another segment is another one
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def test_units_are_chosen_whole_and_whatever_their_length(chinese: TokenStore):
    unit, hit = units_and_masks(chinese, PairsConfig(max_seq_length=48), epochs=30)
    starts = np.flatnonzero(np.diff(unit, prepend=-1))
    length = np.diff(starts, append=len(unit))
    masked = np.add.reduceat(hit, starts)
    assert ((masked == 0) | (masked == length)).all()
    for size in (1, 2, 3, 4, 7):
        n = np.count_nonzero(length == size)
        share = np.count_nonzero(masked[length == size]) / n
        assert n > 1000
        assert abs(share - 0.15) < 5 * np.sqrt(0.15 * 0.85 / n)  # binomial, 5 sigma


@pytest.mark.parametrize("objective", SPECIALS)
def test_pairs_are_cut_between_units(chinese: TokenStore, objective: str):
    data = PairsConfig(max_seq_length=20, objective=objective)
    pairs = BatchSource(chinese, data, seed=0).pairs(0)
    places = np.concatenate([pairs[name] for name in ("a_start", "a_end", "b_start", "b_end")])
    assert chinese.starts_word(places[places < len(chinese)]).all()
    inside = ~np.isin(places, chinese.sentence_offsets)
    assert inside.sum() > 50  # so short that units, not sentences, are where most of them are cut


CORPUS = [[[1 + (i * j) % 5 for j in range(3 + i % 9)]] * (1 + i % 4) for i in range(60)]


# another digest is other data: runs that have begun cannot go on with it
DIGESTS = {"nsp": "bf97d913265b78e1", "sop": "3484644dd0141693", "none": "e630035a182bbefc"}


def digest(store: TokenStore, objective: str) -> str:
    found = hashlib.sha256()
    for masking in ("whole_word", "token"):
        data = PairsConfig(max_seq_length=32, objective=objective, masking=masking)
        batch = BatchSource(store, data, seed=5).batch(0, 200)
        for values in (batch.input_ids, batch.masked_positions, batch.masked_labels):
            found.update(values.numpy().astype("<i8").tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("objective", DIGESTS)
def test_without_a_segmenter_batches_stay_what_they_are(objective: str):
    assert digest(make_store(CORPUS), objective) == DIGESTS[objective]


@pytest.mark.parametrize("objective", DIGESTS)
def test_bits_that_say_what_the_table_says_give_the_same_batches(objective: str):
    store, same = make_store(CORPUS), make_store(CORPUS)
    same.word_starts = np.packbits(~same.vocabulary.continues[same.tokens], bitorder="little")
    assert digest(store, objective) == digest(same, objective)


# --- other segmenters, and mistakes ---------------------------------------------------------------


def test_any_function_can_be_the_segmenter(folder: Path, tmp_path: Path):
    files = [str(path) for path in sorted(folder.glob("*.txt"))]
    prepare(config_of(files, tmp_path, "test_chinese:every_third"), workers=1)
    store = open_store(tmp_path)
    lengths = np.diff(np.flatnonzero(store.starts_word(np.arange(len(store)))))
    assert np.bincount(lengths).argmax() == 3
    assert (
        store.take(np.arange(len(store)))
        == open_store(folder / "units").take(np.arange(len(store)))
    ).all()


def drops_spaces(sentence: str) -> list[str]:
    return sentence.split()


def test_a_segmenter_that_loses_text_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("我们 今天\n\n学习 语言\n", encoding="utf-8")
    config = config_of([str(tmp_path / "a.txt")], tmp_path / "data", "test_chinese:drops_spaces")
    with pytest.raises(UserError, match="for 'A first .*; the words .*must join to the same text"):
        prepare(config, workers=1)
    assert not (tmp_path / "data/store").exists()


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "no_such_module:cut",
            "corpus.word_segmenter no_such_module:cut cannot be imported from .*: No module",
        ),
        ("test_chinese:no_such", "cannot be imported from .*no attribute 'no_such'"),
        ("test_chinese:WORDS", "corpus.word_segmenter test_chinese:WORDS is not a function"),
    ],
)
def test_a_segmenter_that_is_not_there_is_refused(name: str, message: str):
    with pytest.raises(UserError, match=message):
        load_segmenter(name)


def test_without_rjieba_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(UserError, match=r"pip install -e .\.\[chinese\]") as error:
        load_segmenter("segmenter")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["jieba", "a.b", ":f", "a:", "a b:c", "a/b.py:c", "../a.py:c"])
def test_a_name_that_cannot_be_one_is_refused_with_the_config(name: str):
    with pytest.raises(UserError, match="it can be null, segmenter, package.module:function, or"):
        CorpusConfig(files="a.txt", word_segmenter=name).validate()
    name = "my_package.words:cut"
    CorpusConfig(files="a.txt", word_segmenter=name, plug_ins=["my_package.words"]).validate()
