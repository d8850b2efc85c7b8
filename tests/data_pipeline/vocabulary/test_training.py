"""vocabulary: a pure function of the counts, equal to the Rust trainer's, and the tokenizer files
say the same to everyone who loads them."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data_pipeline.common.errors import UserError
from data_pipeline.config import VocabConfig
from data_pipeline.corpus.readers import clean_text
from data_pipeline.sampling.vocabulary import Vocabulary
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    build_normalizer,
    build_tokenizer,
    choose_alphabet,
    train_wordpiece,
    write_tokenizer,
)
from data_pipeline.vocabulary.words import WordSplitter

FEW = settings(max_examples=100)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80) | st.text(
    st.sampled_from("the codingÉéèñ中文ßİ. ,'[]#\n\t\u200d🐎-"), max_size=120
)


@pytest.fixture(scope="module")
def counts(prepared: Path) -> Counter[str]:
    """Counts of the lower-case ASCII words of the topics, and once each character alone."""
    words = Counter((prepared / "topics.txt").read_text(encoding="utf-8").lower().split())
    words = Counter({word: n for word, n in words.items() if word.isascii() and len(word) < 40})
    # The Rust trainer keeps a piece for every character; ours, one for those that begin a word.
    return words + Counter(set("".join(words)))


def train_with_rust(counts: Counter[str], size: int, min_frequency: int) -> list[str]:
    """The stock trainer made deterministic: it hashes its alphabet and its `##` pieces in an order
    that changes with every run, so both are given to it."""
    letters = sorted(set("".join(counts)))
    continues = sorted({f"##{c}" for word in counts for c in word[1:]})
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        special_tokens=SPECIAL_TOKENS + continues,
        show_progress=False,
    )
    text = (" ".join([word] * n) for word, n in counts.items())
    tokenizer.train_from_iterator(text, trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.get)


def without_padding(pieces: list[str]) -> list[str]:
    return [piece for piece in pieces if not piece.startswith("[unused")]


def config_of(size: int, **settings) -> VocabConfig:
    return VocabConfig(size=size, character_coverage=1.0, **settings)


# ---------------------------------------------------------------------------------- training


@pytest.mark.parametrize("size", [300, 1000, 2500])
def test_the_pieces_are_those_of_the_rust_trainer_id_for_id(counts: Counter[str], size: int):
    ours = without_padding(train_wordpiece(counts, config_of(size)))
    assert len(ours) == size
    assert ours == train_with_rust(counts, size, min_frequency=2)


@settings(max_examples=60)
@given(
    st.dictionaries(st.text("abcé", min_size=1, max_size=8), st.integers(1, 20), max_size=12),
    st.integers(1, 3),
)
def test_any_counts_give_the_pieces_of_the_rust_trainer(words: dict[str, int], min_frequency: int):
    # small alphabets are full of ties and of pieces that two pairs make
    counts = Counter(words) + Counter("abcé")
    rust = train_with_rust(counts, 200, min_frequency)
    for size in range(max(16, len(rust) - 4), len(rust) + 1):
        config = config_of(size, min_frequency=min_frequency)
        assert without_padding(train_wordpiece(counts, config)) == rust[:size]


TRAIN = """
import json, sys
from pathlib import Path
from data_pipeline.config import VocabConfig
from data_pipeline.vocabulary.training import train_wordpiece, write_tokenizer
counts = json.loads(Path(sys.argv[1]).read_text())
vocab = VocabConfig(size=600)
write_tokenizer(Path(sys.argv[2]), train_wordpiece(counts, vocab), vocab)
"""


def test_every_process_writes_the_same_bytes(counts: Counter[str], tmp_path: Path):
    items = list(counts.items())
    written = []
    for i, (seed, threads) in enumerate([("0", "1"), ("1", "2"), ("12345", "4")]):
        random.Random(i).shuffle(items)  # the order of the counts must not matter either
        (tmp_path / f"{i}.json").write_text(json.dumps(dict(items)))
        environment = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": str(i > 0).lower()}
        subprocess.run(
            [sys.executable, "-c", TRAIN, tmp_path / f"{i}.json", tmp_path / str(i)],
            env={**os.environ, "PYTHONHASHSEED": seed, **environment},
            check=True,
        )
        written.append({p.name: p.read_bytes() for p in (tmp_path / str(i)).iterdir()})
    assert set(written[0]) == {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("size", [255, 256, 257, 320])
def test_special_tokens_come_first_and_the_size_is_a_multiple_of_64(counts, size: int):
    pieces = train_wordpiece(counts, config_of(size))
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(pieces) == -(-size // 64) * 64
    assert pieces[size:] == [f"[unused{i}]" for i in range(len(pieces) - size)]
    assert len(set(pieces)) == len(pieces)


@FEW
@given(
    st.dictionaries(st.text("abc中éß🐎", min_size=1, max_size=5), st.integers(1, 100), max_size=20),
    st.floats(0.01, 1),
)
def test_the_alphabet_is_the_smallest_that_covers_the_share(words: dict[str, int], share: float):
    alphabet = choose_alphabet(words, share)
    text = "".join(word * n for word, n in words.items())
    frequency = Counter(text)
    ranked = sorted(frequency, key=lambda c: (-frequency[c], c))
    sizes = [
        n for n in range(len(ranked) + 1) if sum(map(text.count, ranked[:n])) >= share * len(text)
    ]
    assert alphabet == set(ranked[: min(sizes)])


def test_a_word_with_a_rare_character_is_unknown_and_teaches_nothing():
    counts = {"common": 1000, "words": 1000, "☃snowman": 1, "x" * (MAX_WORD_CHARACTERS + 1): 50}
    pieces = train_wordpiece(counts, VocabConfig(size=22, character_coverage=0.99, min_frequency=1))
    assert not {"☃", "##☃", "##a", "x", "##xx"} & set(pieces)
    tokenizer = build_tokenizer(pieces, VocabConfig())
    assert tokenizer.encode("☃snowman", add_special_tokens=False).tokens == ["[UNK]"]


def test_a_size_below_the_alphabet_says_the_least_that_works(counts: Counter[str]):
    with pytest.raises(UserError, match=r"vocab.size 20 is too small: .* are \d+; raise") as error:
        train_wordpiece(counts, config_of(20))
    least = int(str(error.value).split(" are ")[1].split(";")[0])
    assert len(without_padding(train_wordpiece(counts, config_of(least)))) == least


def test_a_size_beyond_the_corpus_says_the_most_that_works(counts: Counter[str]):
    with pytest.raises(UserError, match=r"yields at most \d+ pieces .*set vocab.size=") as error:
        train_wordpiece(counts, config_of(100_000))
    most = int(str(error.value).split("vocab.size=")[1].split()[0])
    assert len(without_padding(train_wordpiece(counts, config_of(most)))) == most
    with pytest.raises(UserError, match="yields at most"):
        train_wordpiece(counts, config_of(most + 1))


@pytest.mark.parametrize("letters, advised", [("abcdefg", False), ("abcdefgh", True)])
def test_no_size_is_advised_that_the_config_would_refuse(letters: str, advised: bool):
    least = len(SPECIAL_TOKENS) + 8
    with (
        patch("data_pipeline.vocabulary.training.MIN_VOCAB_SIZE", least),
        pytest.raises(UserError, match=rf"yields at most {least - (not advised)} ") as error,
    ):
        train_wordpiece(dict.fromkeys(letters, 1), config_of(100))
    assert ("set vocab.size=" in str(error.value)) is advised
    assert str(error.value).endswith("add text")


# ---------------------------------------------------------------------------------- files


@cache
def load(folder: Path):
    """(fast tokenizer of `transformers`, tokenizer of `tokenizers`), both from the files alone."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )


@cache
def splitter(lowercase: bool) -> WordSplitter:
    return WordSplitter(build_normalizer(VocabConfig(lowercase=lowercase)))


@FEW
@given(TEXT)
@example("Don't [stop], e\u0301t\u00e9 " + "x" * 101)
def test_everyone_who_loads_the_files_gets_the_ids_of_the_store(prepared: Path, text: str):
    # The libraries take a special token's name in a text for the token; the store keeps it text.
    assume(not any(token in text for token in SPECIAL_TOKENS))
    auto, rust = load(prepared / "data/vocab")
    text = clean_text(text)  # control characters: the corpus makes them spaces, BERT drops them
    ids = rust.encode(text).ids
    assert auto(text)["input_ids"] == ids
    words = [word.decode() for word in splitter(True)(text) if word != b"\0"]
    ours = [token.id for word in words for token in rust.model.tokenize(word)]
    assert [2, *ours, 3] == ids


def test_a_pair_has_bert_s_form(prepared: Path):
    for encoded in (
        load(prepared / "data/vocab")[0]("the module", "a class"),
        load(prepared / "data/vocab")[1].encode("the module", "a class"),
    ):
        ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded.ids
        types = encoded["token_type_ids"] if hasattr(encoded, "keys") else encoded.type_ids
        assert ids[0] == 2 and ids[-1] == 3 and ids.count(3) == 2
        assert types == [0] * (ids.index(3) + 1) + [1] * (len(ids) - ids.index(3) - 1)


def test_the_vocabulary_file_and_the_tokenizer_file_agree(prepared: Path, vocabulary: Vocabulary):
    auto, rust = load(prepared / "data/vocab")
    lines = (prepared / "data/vocab/vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert lines == vocabulary.pieces
    assert rust.get_vocab() == auto.get_vocab() == {piece: i for i, piece in enumerate(lines)}
    assert auto.all_special_ids == [vocabulary[token] for token in auto.all_special_tokens]
    named = (auto.pad_token_id, auto.unk_token_id, auto.cls_token_id, auto.sep_token_id)
    assert (*named, auto.mask_token_id) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
def test_every_flag_is_said_and_honoured(tmp_path: Path, lowercase, strip_accents, chinese):
    vocab = VocabConfig(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    letters = "AaÉéEe中文"
    write_tokenizer(tmp_path, [*SPECIAL_TOKENS, *letters, *(f"##{c}" for c in letters)], vocab)
    strips = lowercase if strip_accents is None else strip_accents  # BERT's rule
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert said["do_lower_case"] is lowercase
    assert said["strip_accents"] is strips
    assert said["tokenize_chinese_chars"] is chinese
    expected = "AÉ" if not lowercase else "aé"
    expected = expected.replace("É", "E").replace("é", "e") if strips else expected
    tokens = [expected[0], f"##{expected[1]}", "中", "文" if chinese else "##文"]
    auto, rust = load(tmp_path)
    assert auto.tokenize("AÉ 中文") == tokens
    assert rust.encode("AÉ 中文", add_special_tokens=False).tokens == tokens
