"""sentences and words: no text is lost on the way to words, and words give the ids of
`tokenizers`."""

import random
from functools import cache

import pytest
import sentencex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_pipeline.build.sentences import (
    HIDING,
    LONG,
    MAX_CHARACTERS,
    sentence_splitter,
    split_sentences,
)
from data_pipeline.config import VocabConfig
from data_pipeline.corpus.readers import clean_text
from data_pipeline.vocabulary.training import build_normalizer
from data_pipeline.vocabulary.words import END, SHORT, WordIndex, WordSplitter, number_words

FEW = settings(max_examples=200)
# every plane; surrogates are no text, and a corpus has no control characters left
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=80)
PROSE = st.text(st.sampled_from("aB é́ñÅ中文。.!?'’-\"\t\u3000\u200d🐎ßİΣ[]#"), max_size=120)
VARIANTS = {  # lowercase, strip_accents
    "uncased": (True, None),
    "cased": (False, None),
    "uncased, accents kept": (True, False),
    "cased, accents dropped": (False, True),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def without_space(text: str) -> str:
    return "".join(text.split())


# ---------------------------------------------------------------------------------- sentences


@FEW
@given(
    st.lists(TEXT | PROSE, max_size=5),
    st.sampled_from(["en", "zh", "de"]),
    st.sampled_from([1, 1, 1, 100]),
)
def test_no_text_is_lost_between_sentences(paragraphs: list[str], language: str, times: int):
    document = "\n".join(paragraph * times for paragraph in paragraphs)
    sentences = split_sentences(document, sentence_splitter(language))
    assert without_space("".join(sentences)) == without_space(document)
    for sentence in sentences:
        assert sentence.strip() and "\n" not in sentence
        assert len(sentence) <= MAX_CHARACTERS


@pytest.mark.parametrize("space", ["\xa0", "\u2028", "\u3000", " \u3000", "\u3000\xa0"])
def test_a_wide_space_before_a_full_stop_is_a_space(space: str):
    split = sentence_splitter("en")
    paragraph = f"Vitamin B{space}. It was J{space}. Smith.\xa0So."
    plain = split(paragraph.replace(space, " " * len(space)))
    assert split(paragraph) != plain and list(map(len, split(paragraph))) == list(map(len, plain))
    assert "".join(split(paragraph)) == paragraph


@pytest.mark.parametrize("space", "\xa0\u3000 ")
def test_a_long_run_of_spaces_takes_no_time_that_grows_faster(space: str):
    """With a pattern that tries each start of a run, these would take days."""
    paragraph = f"Hello\xa0. a{space * 300_000}b."
    assert "".join(sentence_splitter("en")(paragraph)) == paragraph


def test_sentences_end_where_a_reader_says():
    document = "Dr. Smith went to Washington. He came back.\n他来了。他走了！\nno full stop"
    sentences = [s.strip() for s in split_sentences(document, sentence_splitter("en"))]
    assert sentences == [
        "Dr. Smith went to Washington.",
        "He came back.",
        "他来了。",
        "他走了！",
        "no full stop",
    ]


@pytest.mark.parametrize("stop", "。！？｡")
@pytest.mark.parametrize("after", ["2010年", "python", "很好", "Linux", "2.5分"])
def test_a_wide_full_stop_ends_a_sentence_whatever_comes_after_it(stop: str, after: str):
    split, first = sentence_splitter("zh"), f"他去了{stop}"
    assert split(f"{first}{after}，再来") == [first, f"{after}，再来"]
    said = f"他说：“好{stop}”"
    assert split(f"{said}{after}，再来") == [said, f"{after}，再来"]
    quotation = f"他说：“好{stop}{after}，再来”"
    assert split(quotation) == [quotation]


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("ja", ["彼は『来た。", "見た。", "勝った。』", "と言った。", "彼は帰った。"]),
        ("zh", ["主說：『你們當記念。", "當守。』", "他們就去了。"]),
        ("zh", ["〈天來了。〉", "【他走了！】", "好。"]),
        ("zh", ["他说：“好。他来了。”", "她走了。"]),
    ],
)
def test_no_sentence_begins_with_the_closing_mark_of_the_one_before(
    language: str, sentences: list[str]
):
    assert sentence_splitter(language)("".join(sentences)) == sentences


@pytest.mark.parametrize(
    ("language", "unit"), [("my", "မြန်မာစာ။"), ("ja", "これは!"), ("zh", "好的?"), ("en", "word ")]
)
def test_a_line_without_a_known_stop_is_given_in_parts(language: str, unit: str, monkeypatch):
    given, segment = [], sentencex.segment
    monkeypatch.setattr(
        sentencex, "segment", lambda language, text: given.append(text) or segment(language, text)
    )
    text = unit * 10_000
    assert "".join(sentence_splitter(language)(text)) == text
    assert max(map(len, given)) <= 5 * LONG


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        ("zh", "第{}天他们去了山上看花，然后回家。"),
        ("en", "On day {} they climbed the hills to see flowers. "),
        ("hi", "दिन {} वे पहाड़ पर फूल देखने गए। "),
    ],
)
def test_a_book_in_one_line_is_split_in_parts(language: str, sentence: str, monkeypatch):
    """Given as a whole, it would take time that grows with the square of its length."""
    given, segment = [], sentencex.segment
    monkeypatch.setattr(
        sentencex, "segment", lambda language, text: given.append(text) or segment(language, text)
    )
    told = list(map(sentence.format, range(2000)))
    assert sentence_splitter(language)("".join(told)) == told
    assert "".join(given) == "".join(told) and max(map(len, given)) < LONG + 100


@pytest.mark.parametrize(
    ("language", "first", "sentence", "last"),
    [
        ("zh", '他说："好。', "他们去了山上看花，然后回家。", '他说："好。'),
        ("en", "In the '90s it ran. ", "Rain fell all day. ", "The dogs' bowl is empty. "),
        ("en", "See a) or b). ", "Rain fell all day. ", "He (they say went. "),
        ("en", "He (they say went. ", "Rain fell all day. ", "See a) or b). "),
    ],
)
@pytest.mark.parametrize("n", [30, 3000])
def test_a_quote_or_bracket_without_its_partner_hides_no_sentences(
    language: str, first: str, sentence: str, last: str, n: int
):
    """sentencex pairs it with the next one, however far away."""
    told = [first, *[sentence] * n, last, *[sentence] * n]
    found = sentence_splitter(language)("".join(told))
    assert "".join(found) == "".join(told)
    assert found.count(sentence) > 2 * n - 2 * HIDING / len(sentence)
    assert max(map(len, found)) <= HIDING


@pytest.mark.parametrize(
    ("language", "paragraph", "sentences"),
    [
        ("en", "2. Add the flour. It is mixed.", ["2. Add the flour.", "It is mixed."]),
        (
            "en",
            "They came late. 1998. Then they left.",
            ["They came late. 1998.", "Then they left."],
        ),
        ("de", "3.1. Das Mehl wiegen. Rühren!", ["3.1. Das Mehl wiegen.", "Rühren!"]),
        ("zh", "3．本法自公布之日起施行。", ["3．本法自公布之日起施行。"]),
        ("zh", "很好吃。（2）. 下次还来。", ["很好吃。", "（2）. 下次还来。"]),
        ("en", "12. 13.", ["12. 13."]),
        ("zh", "1.安装软件。2.运行程序。", ["1.安装软件。", "2.运行程序。"]),
    ],
)
def test_what_has_no_letter_is_no_sentence(language: str, paragraph: str, sentences: list[str]):
    found = split_sentences(paragraph, sentence_splitter(language))
    assert [s.strip() for s in found] == sentences


@pytest.mark.parametrize("unit", ["x", "字", "word ", "0123456789" * 250 + " ", "🐎 "])
def test_a_line_without_end_is_cut_and_kept(unit: str):
    document = unit * (1_000_000 // len(unit))
    sentences = split_sentences(document, sentence_splitter("en"))
    assert max(map(len, sentences)) <= MAX_CHARACTERS
    assert without_space("".join(sentences)) == without_space(document)


@pytest.mark.parametrize("space", [" ", "\t", "\u00a0", "\u3000"])
def test_a_long_sentence_is_cut_between_words(space: str):
    words = [f"word{i}" for i in range(5000)]
    sentences = split_sentences(space.join(words), sentence_splitter("en"))
    assert len(sentences) > 1
    assert " ".join(sentences).split() == words


# ---------------------------------------------------------------------------------- words


@cache
def splitter_of(variant: str) -> WordSplitter:
    lowercase, strip_accents = VARIANTS[variant]
    return WordSplitter(
        build_normalizer(VocabConfig(lowercase=lowercase, strip_accents=strip_accents))
    )


@cache
def tokenizer_of(variant: str) -> Tokenizer:
    """What a user of `tokenizers` would write for this variant, with some pieces of each kind."""
    lowercase, strip_accents = VARIANTS[variant]
    letters = "abcdefghijklmnopqrstuvwxyzABCÅéñß中文。.!?'-\"[]#ıς"
    pieces = ["[UNK]", *letters, *(f"##{c}" for c in letters), "ab", "##ab", "the", "##ing"]
    model = models.WordPiece(
        {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        unk_token="[UNK]",
        max_input_chars_per_word=100,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def words_of(variant: str, text: str) -> list[str]:
    return [word.decode() for word in splitter_of(variant)(text)]


@every_variant
@settings(max_examples=250)
@given(TEXT | PROSE | st.text(st.characters(max_codepoint=126, min_codepoint=32)))
@example("a" * 101 + " " + "b" * 100)
@example("[MASK] [SEP]don't")
@example("İstanbul ΑΣ ﬁ Å e\u0301 한국어 か\u3099")
def test_words_give_the_ids_of_tokenizers(variant: str, text: str):
    tokenizer = tokenizer_of(variant)
    words = words_of(variant, text)
    ids = [token.id for word in words for token in tokenizer.model.tokenize(word)]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


@every_variant
def test_every_character_splits_words_as_in_tokenizers(variant: str):
    tokenizer = tokenizer_of(variant)
    normalize, pre_tokenize = (
        tokenizer.normalizer.normalize_str,
        tokenizer.pre_tokenizer.pre_tokenize_str,
    )
    codes = [c for c in range(1, 0x110000) if c != 10 and not 0xD800 <= c < 0xE000]
    # planes 4 to 13 are empty, 15 and 16 private: one character in 64
    codes = [c for c in codes if c < 0x40000 or 0xE0000 <= c < 0xF0000 or c % 64 == 0]
    for start in range(0, len(codes), 4096):
        text = "".join(f"a{chr(code)}b\n" for code in codes[start : start + 4096])
        words = [word for word in words_of(variant, text) if word != END.decode()]
        assert words == [word for word, _ in pre_tokenize(normalize(text))]


@FEW
@given(st.lists(TEXT | PROSE, max_size=6))
def test_sentences_become_numbers_of_words(sentences: list[str]):
    sentences = [clean_text(sentence) for sentence in sentences]
    index = WordIndex({END: 0})
    numbers, sizes = number_words(sentences, splitter_of("uncased"), index)
    names = [word.decode() for word in index]
    assert numbers.dtype == "uint32" and sizes.dtype == "int32"
    assert sizes.tolist() == [len(words_of("uncased", s)) for s in sentences]
    expected = [word for sentence in sentences for word in words_of("uncased", sentence)]
    assert [names[number] for number in numbers] == expected
    assert names[1:] == list(dict.fromkeys(expected))  # in order of first appearance


@pytest.mark.parametrize("slots", [1, 8, 1 << 12])
def test_words_that_share_a_place_keep_their_numbers(slots: int, monkeypatch):
    monkeypatch.setattr("data_pipeline.vocabulary.words.SLOTS", slots)
    rng, index = random.Random(0), WordIndex({END: 0})
    sizes = [*range(1, SHORT + 4), 99]
    words = ["é" * (size // 2) + "x" * (size % 2) + tail for size in sizes for tail in ("", "y")]
    words += [word.replace("é", "ab") for word in words]
    expected: dict[str, int] = {"": 0}
    for _ in range(20):  # batches: what one has put into a place is there for the next
        text = [rng.choice(words) for _ in range(50)]
        numbers, _ = number_words([" ".join(text)], splitter_of("uncased, accents kept"), index)
        assert numbers.tolist() == [expected.setdefault(word, len(expected)) for word in text]
