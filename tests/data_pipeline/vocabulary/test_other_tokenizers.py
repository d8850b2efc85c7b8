"""existing: tokenizers of other kinds than BERT's, against what `tokenizers` and transformers make
of the same text."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import ALBERTS, KINDS, ROBERTAS, train_byte_level, train_unigram
from tokenizers import Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from data_pipeline.build.prepare import prepare
from data_pipeline.build.probes import encode, encode_texts
from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.common.errors import UserError
from data_pipeline.config import CorpusConfig, DataConfig, PairsConfig, VocabConfig
from data_pipeline.report.audit import audit_vocabulary, decode
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary, list_pieces, read_vocabulary
from data_pipeline.vocabulary.existing import load_tokenizer, load_whole, read_existing, write_whole
from data_pipeline.vocabulary.id_words import (
    IdWords,
    cut_lines,
    find_units,
    keep_spaces,
    read_ids,
    write_ids,
)
from data_pipeline.vocabulary.words import (
    END,
    WordIndex,
)
from pretrain.probes import MaskedCopies


@pytest.fixture(scope="module", params=KINDS)
def folder(request, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `tokenizer.json` alone."""
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param](text).save(str(folder / "tokenizer.json"))
    return folder


def prepare_with(corpus: Path, data_dir: Path, folder: Path, **options) -> None:
    vocab = VocabConfig(path=str(folder))
    options = {"held_out_fraction": 0.1, "deduplicate": False} | options
    source = CorpusConfig(files=str(corpus), **options)
    prepare(DataConfig(data_dir=str(data_dir), corpus=source, vocab=vocab), 1)


@pytest.fixture(scope="module")
def data(folder: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("data")
    prepare_with(prepared / "topics.txt", data_dir, folder)
    return data_dir


def read_documents(store: TokenStore) -> list[list[list[int]]]:
    """The ids of each sentence of each document."""
    ends = store.sentence_offsets
    sentences = [store.tokens[a:b].tolist() for a, b in pairwise(ends)]
    return [sentences[a:b] for a, b in pairwise(store.document_offsets)]


def test_a_store_holds_the_ids_that_the_tokenizer_gives_each_document(
    data: Path, folder: Path, prepared: Path
):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = read_vocabulary(data / "vocab")
    found = []
    for split in ("train", "held_out"):
        found += read_documents(TokenStore.open(data / "store", split, vocabulary))
    found = {tuple(sum(sentences, [])) for sentences in found}
    texts = (prepared / "topics.txt").read_text(encoding="utf-8").split("\n\n")
    wanted = set()
    for text in map(str.strip, filter(str.strip, texts)):
        lines = [line.rstrip() for line in text.split("\n")]  # the spaces between sentences count
        ids = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
        wanted.add(tuple(sum(ids, [])))
    assert found == wanted


def test_sentences_keep_the_spaces_after_them():
    split = sentence_splitter("en")
    line = " One is here. Two is there.“Three” is last. "
    sentences = split_sentences(line, split)
    wanted = [" One is here. ", "Two is there.", "“Three” is last. \n"]
    assert keep_spaces(line, sentences) == wanted
    assert keep_spaces(line, [sentence.strip() for sentence in sentences]) == [
        *wanted[:2],
        "“Three” is last.\n",
    ]
    assert keep_spaces(line, ["One", "was there."]) == [" One", "was there.\n"]
    assert keep_spaces("", []) == []


def test_long_lines_are_encoded_in_parts(prepared: Path):
    tokenizer = train_byte_level((prepared / "topics.txt").read_text(encoding="utf-8")[:20000])
    sentences = ["A sentence that is here. "] * 6000 + ["The last one.\n"]
    index = WordIndex({END: 0})
    numbers, sizes = IdWords(tokenizer, index)(sentences)
    words = [np.frombuffer(word, "<u4").tolist() for word in list(index)[1:]]
    found = [token for number in numbers for token in words[number - 1]]
    assert found == tokenizer.encode("".join(sentences).rstrip(), add_special_tokens=False).ids
    assert len(set(sizes[1:-1].tolist())) == 1 and sizes.sum() == len(numbers)
    assert len(list(cut_lines(sentences))) == 3


RULES = {  # what they do depends on where a text begins
    "a space before each text": (train_unigram, {"pre_tokenizer": Metaspace()}),
    "a space before the first": (
        train_unigram,
        {"pre_tokenizer": Metaspace(prepend_scheme="first")},
    ),
    "no words": (train_unigram, {"pre_tokenizer": Metaspace(split=False)}),
    "a space before bytes": (train_byte_level, {"pre_tokenizer": ByteLevel()}),
    "no spaces at the ends": (train_byte_level, {"normalizer": normalizers.Strip()}),
}


@pytest.mark.parametrize("name", RULES)
def test_sentences_are_encoded_as_in_their_line(prepared: Path, tmp_path: Path, name: str):
    text = "  他们来了。雪山很远！ The sun.  “他们”\t went.Then\u3000they stayed. "
    topics = (prepared / "topics.txt").read_text(encoding="utf-8")
    train, rules = RULES[name]
    tokenizer = train(topics[:20000] + " ".join(text))
    for part, rule in rules.items():
        setattr(tokenizer, part, rule)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"{text}\n{text}\n\n{text}\n", encoding="utf-8")
    prepare_with(tmp_path / "a.txt", tmp_path / "data", tmp_path, held_out_fraction=0)
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    store = TokenStore.open(tmp_path / "data/store", "train", vocabulary)
    tokenizer, found = load_tokenizer(tmp_path), store.tokens.tolist()
    assert found == 3 * tokenizer.encode(text.rstrip(), add_special_tokens=False).ids
    assert len(store.sentence_offsets) - 1 >= 9 and len(store.document_offsets) - 1 == 2


def test_words_are_the_pre_tokens_of_the_tokenizer(data: Path):
    tokenizer = load_tokenizer(data / "vocab")
    vocabulary = read_vocabulary(data / "vocab")
    store = TokenStore.open(data / "store", "held_out", vocabulary)
    starts = store.starts_word(np.arange(len(store)))
    words = np.split(store.tokens, np.flatnonzero(starts)[1:])
    assert 1.05 * len(words) < len(store)
    assert audit_vocabulary(store)["tokens_per_word"] == pytest.approx(len(store) / len(words))
    for word in words[:2000]:
        text = decode(vocabulary, word)
        ids = {tuple(tokenizer.encode(t, add_special_tokens=False).ids) for t in (text, " " + text)}
        ids.add(tuple(token.id for token in tokenizer.model.tokenize(text)))  # after no space
        assert tuple(word.tolist()) in ids
    if vocabulary.begin == "Ġ":  # punctuation is a word of its own, though it has no mark
        comma = vocabulary[","]
        assert not vocabulary.continues[comma] and starts[store.tokens == comma].mean() > 0.8


def test_a_probe_hides_the_rest_of_a_word_as_the_pre_tokenizer_divides_them(data: Path):
    """In byte-level BPE an apostrophe begins a word, which none of its pieces shows."""
    tokenizer, vocabulary = load_tokenizer(data / "vocab"), read_vocabulary(data / "vocab")
    text, mask = "they don't re-read (incomprehensible) things.", vocabulary["[MASK]"]
    (found,) = encode(data / "vocab", [text])
    copies = MaskedCopies([tuple(found.ids)], vocabulary, [found.word_ids])
    batch, _ = copies.build(0, len(found.ids) - 2)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    wanted = []
    for i, (begin, _) in enumerate(found.offsets[1:-1], 1):
        (word_end,) = (end for start, end in spans if start <= begin < end)
        for k, (_, end) in enumerate(found.offsets):
            is_hidden = k == i or i < k < len(found.ids) - 1 and end <= word_end
            wanted.append(mask if is_hidden else found.ids[k])
    assert batch.input_ids.tolist() == wanted
    assert wanted.count(mask) > len(found.ids)


CHINESE = (
    "他们在北京的大学里学习中文。雪山和沙漠都很远！ABC公司 1998年 𠀀𠀁吧。"
    "ภาษาไทยไม่มีช่องว่าง ひらがなとカタカナ naïve café"
)


@pytest.mark.parametrize("kind", KINDS)
def test_where_words_have_no_spaces_each_character_can_be_masked_alone(
    kind: str, prepared: Path, tmp_path: Path
):
    """Their pre-tokens are clauses; the ids of a character's bytes stay together."""
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    KINDS[kind](text[:20000] + CHINESE).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text(f"{CHINESE}\n\n{CHINESE}\n", encoding="utf-8")
    prepare_with(tmp_path / "a.txt", tmp_path / "data", tmp_path, held_out_fraction=0)
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    store = TokenStore.open(tmp_path / "data/store", "train", vocabulary)
    starts = store.starts_word(np.arange(len(store)))
    words = np.split(store.tokens, np.flatnonzero(starts)[1:])
    texts = [tokenizer.decode(word.tolist()).strip() for word in words]
    assert "\ufffd" not in "".join(texts)
    if kind == "byte-level BPE":
        assert "".join(texts) == 2 * CHINESE.replace(" ", "")
        assert {"ABC", "1998", "naïve", "café"} <= set(texts)
    han = [text for text in texts if any("\u3040" < c < "\ua000" or c > "\uffff" for c in text)]
    assert len(han) > 20 and max(map(len, han)) <= 2


@pytest.mark.parametrize("held_out", [0, 0.2])
def test_the_report_counts_the_longest_words_too(prepared: Path, tmp_path: Path, held_out: float):
    """A clause of Chinese is a word of many ids."""
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    train_unigram(text[:20000] + CHINESE).save(str(tmp_path / "tokenizer.json"))
    clauses = [CHINESE[:13] * n for n in range(1, 11)]
    (tmp_path / "a.txt").write_text("\n\n".join(clauses), encoding="utf-8")
    prepare_with(tmp_path / "a.txt", tmp_path / "data", tmp_path, held_out_fraction=held_out)
    vocabulary = read_vocabulary(tmp_path / "data/vocab")
    split = "held_out" if held_out else "train"
    store = TokenStore.open(tmp_path / "data/store", split, vocabulary)
    report = json.loads((tmp_path / "data/vocab/report.json").read_text())
    assert report["words_too_long"] == 0
    assert report["measured_words"] == store.n_documents
    found = report["sizes"][-1]["tokens_per_word"] * report["measured_words"]
    assert found == pytest.approx(len(store), abs=0.01)


def test_pieces_are_shown_as_people_read_them(data: Path):
    vocabulary, tokenizer = read_vocabulary(data / "vocab"), load_tokenizer(data / "vocab")
    for i, piece in enumerate(vocabulary.pieces):
        text = tokenizer.decode([i], skip_special_tokens=False)
        assert vocabulary.show(i) == (text.strip() or piece)
    vocabulary = Vocabulary.of(["[PAD]", "a", "##b"])
    assert [vocabulary.show(i) for i in range(3)] == vocabulary.pieces


def test_units_begin_at_letters_that_need_no_spaces():
    def units(*pieces: str, is_bytes: bool = False) -> str:
        marks = zip(find_units(list(pieces), is_bytes), pieces, strict=True)
        return "".join(f"|{piece}" if starts else piece for starts, piece in marks)

    assert units("▁un", "know", "n") == "|▁unknown"
    assert units("▁", "iP", "hone", "手", "机壳", "5", "G") == "|▁iPhone|手|机壳|5G"
    assert units("▁", "我", "<0xE9>", "<0xBE>", "<0x98>", "们") == "|▁|我|<0xE9><0xBE><0x98>|们"
    assert units("ä¸", "Ń", "æĸĩ", "A", "BC", is_bytes=True) == "|ä¸Ń|æĸĩ|ABC"  # 中文ABC
    assert units("ä¸", "æĸĩ", is_bytes=True) == "|ä¸|æĸĩ"  # a byte is missing


def test_sequences_are_enclosed_and_masked_by_its_special_tokens(data: Path):
    vocabulary = read_vocabulary(data / "vocab")
    names = [vocabulary.pieces[vocabulary[name]] for name in ("[CLS]", "[SEP]", "[MASK]")]
    assert names in (["<s>", "</s>", "<mask>"], ["[CLS]", "[SEP]", "[MASK]"])
    store = TokenStore.open(data / "store", "train", vocabulary)
    batch = BatchSource(store, PairsConfig(max_seq_length=64, objective="none"), 0).batch(0, 200)
    assert (batch.input_ids[batch.cu_seqlens[:-1]] == vocabulary["[CLS]"]).all()
    assert (batch.input_ids[batch.cu_seqlens[1:] - 1] == vocabulary["[SEP]"]).all()
    seen = batch.input_ids[batch.masked_positions].numpy()
    assert 0.75 < (seen == vocabulary["[MASK]"]).mean() < 0.85
    special = [i for i, piece in enumerate(vocabulary.pieces) if piece in (*ROBERTAS, *ALBERTS)]
    assert len(special) == 5
    assert not np.isin(special, vocabulary.ordinary).any()
    assert not vocabulary.continues[special].any()


@pytest.mark.parametrize("mark, first", [("Ġ", "æĪĳ"), ("▁", "我")])
@pytest.mark.parametrize("names", [ROBERTAS, ALBERTS])
def test_special_tokens_are_told_where_few_pieces_begin_with_a_space(mark, first, names):
    pieces = [*names, mark, f"{mark}the", "##", *(first + str(i) for i in range(100)), "<od>"]
    vocabulary = Vocabulary.of(pieces)
    assert vocabulary.begin == mark
    assert not vocabulary.continues.any()  # the marks do not tell words
    assert not {pieces[i] for i in vocabulary.ordinary} & {*names, "<od>"}
    assert len(vocabulary.ordinary) == len(pieces) - len(names) - 1


def test_special_tokens_of_a_wordpiece_are_told_by_robertas_names_too():
    vocabulary = Vocabulary.of([*ROBERTAS, "▁", "Ġ", "Ġu", "a", *(f"##{c}" for c in "abc")])
    assert vocabulary.begin is None
    assert vocabulary.continues.sum() == 3
    assert vocabulary.ordinary.tolist() == list(range(5, 12))


def test_transformers_reads_the_same_ids_from_the_files_written(data: Path, folder: Path):
    from transformers import AutoTokenizer

    peer, bare = AutoTokenizer.from_pretrained(data / "vocab"), load_tokenizer(data / "vocab")
    vocabulary = read_vocabulary(data / "vocab")
    assert peer.mask_token_id == vocabulary["[MASK]"]
    assert peer.pad_token_id == vocabulary["[PAD]"]
    assert (peer.bos_token, peer.eos_token) == (peer.cls_token, peer.sep_token)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = vocabulary["[CLS]"], vocabulary["[SEP]"]
    for text in ("The first line, naïve!", "中文 ABC", "Don't e-mail: a@b.c 😀", ""):
        wanted = [ends[0], *own.encode(text, add_special_tokens=False).ids, ends[1]]
        assert peer(text)["input_ids"] == bare.encode(text).ids == wanted
    (probe,) = encode_texts(data / "vocab", ["The name of the [MASK] is."])
    assert probe.count(vocabulary["[MASK]"]) == 1


def test_text_of_any_kind_goes_through_as_the_tokenizer_sees_it(data: Path):
    tokenizer, index = load_tokenizer(data / "vocab"), WordIndex({END: 0})
    number = IdWords(load_tokenizer(data / "vocab"), index)
    tokenizer.encode_special_tokens = True

    @settings(max_examples=200)
    @given(st.lists(st.text(st.characters(blacklist_characters="\n")), max_size=4))
    def goes_through(sentences: list[str]) -> None:
        numbers, sizes = number([*sentences[:-1], *(f"{s}\n" for s in sentences[-1:])])
        words = [write_ids(list(index)[i]).decode() for i in numbers.tolist()]
        line = "".join(sentences).encode("utf-8", "replace").decode().rstrip()
        wanted = tokenizer.encode(line, add_special_tokens=False).ids
        assert [token for word in words for token in read_ids(word)] == wanted
        assert len(sizes) == len(sentences) and sizes.sum() == len(numbers)

    goes_through()


@pytest.mark.parametrize("change", ["added token", "clean_text"])
def test_a_bert_with_rules_of_its_own_is_taken_whole(prepared: Path, tmp_path: Path, change: str):
    """A special token that is a piece divides text before all other rules."""
    from transformers import AutoTokenizer

    rules = json.loads((prepared / "data/vocab/tokenizer.json").read_text(encoding="utf-8"))
    piece = next(piece for piece, i in rules["model"]["vocab"].items() if i == 600)
    if change == "clean_text":
        rules["normalizer"]["clean_text"] = False
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        rules["added_tokens"].append({"id": 600, "content": piece, "special": True} | flags)
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
    write_whole(tmp_path / "out", load_whole(VocabConfig(path=str(tmp_path))))
    source, kept = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (f"a{piece}b", "the\u200bvalue"):
        assert kept(text)["input_ids"] == source.encode(text).ids
    berts = load_tokenizer(prepared / "data/vocab")
    text = "the\u200bvalue" if change == "clean_text" else f"a{piece}b"
    assert source.encode(text).ids != berts.encode(text).ids
    assert (piece in kept.all_special_tokens) == (change == "added token")


def test_an_added_token_is_named_where_it_keeps_a_bert_from_being_extended(
    prepared: Path, tmp_path: Path
):
    change(prepared / "data/vocab", tmp_path, add_entity)
    with pytest.raises(UserError, match=r"added tokens .* \(\[ENT\]\), so vocab.extend cannot"):
        read_existing(VocabConfig(path=str(tmp_path), extend=10))


def test_padding_and_truncation_of_a_file_are_not_taken(folder: Path, tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=99)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("a b c d e f g").ids) in range(7, 30)


def change(folder: Path, tmp_path: Path, edit) -> str:
    value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    edit(value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    return str(tmp_path)


def add_word(value: dict) -> None:
    entry = dict(value["added_tokens"][0], content="covid", special=False)
    value["added_tokens"].append(entry | {"id": len(list_pieces(value))})


def add_piece(value: dict) -> None:
    vocab = value["model"]["vocab"]
    piece, number = (vocab[50][0], 50) if isinstance(vocab, list) else ("a", vocab["a"])
    entry = dict(value["added_tokens"][0], content=piece, id=number, special=False)
    value["added_tokens"].append(entry)


def add_entity(value: dict) -> None:
    entry = dict(value["added_tokens"][0], content="[ENT]", special=True)
    value["added_tokens"].append(entry | {"id": len(list_pieces(value))})


def add_line_end(value: dict) -> None:
    entry = dict(value["added_tokens"][0], content="a\rb", special=True)
    value["added_tokens"].append(entry | {"id": len(list_pieces(value))})


def drop_mask(value: dict) -> None:
    value["added_tokens"] = [t for t in value["added_tokens"] if "mask" not in t["content"].lower()]
    vocab = value["model"]["vocab"]
    if isinstance(vocab, list):
        value["model"]["vocab"] = [row for row in vocab if row[0] != "[MASK]"]


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda value: value.update(pre_tokenizer=None), "no pre-tokeniser to find words with"),
        (add_word, "1 added tokens outside its vocabulary .*give a tokenizer without them"),
        (add_piece, "1 added tokens .* that divide text before its rules apply; remove them"),
        (drop_mask, r"lacks \[MASK\]"),
        (add_line_end, "a piece with a line end"),
        (lambda value: value["model"].update(dropout=0.1), "drops merges at random; set its"),
        (lambda value: value["model"].update(vocab=[1]), "not a list of .piece, score."),
    ],
)
def test_what_cannot_be_taken_whole_is_said(folder: Path, tmp_path: Path, edit, message: str):
    path = change(folder, tmp_path, edit)
    with pytest.raises(UserError, match=message):
        read_existing(VocabConfig(path=path))


ODD_RULES = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
     | {"single": [{"SpecialToken": {"id": "X", "type_id": 0}}]}},
]  # fmt: skip


@pytest.mark.parametrize("rules", ODD_RULES)
def test_rules_that_panic_are_refused(folder: Path, tmp_path: Path, rules: dict):
    change(folder, tmp_path, lambda value: value.update(rules))
    with pytest.raises(UserError, match="is not a valid tokenizer: .*put an intact copy there"):
        load_tokenizer(tmp_path)


def test_text_that_a_rule_fails_at_is_named(folder: Path, tmp_path: Path):
    rule = {"type": "Split", "pattern": {"Regex": "([b-y]|[b-y]{2}|[a-z]+)+$^"}}
    rule |= {"behavior": "Isolated", "invert": False}
    change(folder, tmp_path, lambda value: value.update(pre_tokenizer=rule, normalizer=None))
    number = IdWords(load_tokenizer(tmp_path), WordIndex({END: 0}))
    assert number(["a 1\n"])[1].tolist() > [0]
    with pytest.raises(UserError, match="the tokenizer fails on 'b+"):
        number(["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"])


def test_it_is_not_extended_and_takes_no_segmenter(folder: Path, prepared: Path, tmp_path: Path):
    with pytest.raises(UserError, match="vocab.extend cannot add to it"):
        read_existing(VocabConfig(path=str(folder), extend=10))
    with pytest.raises(UserError, match="set vocab.size=null to use them all$"):
        read_existing(VocabConfig(path=str(folder), size=10))
    pytest.importorskip("rjieba")
    with pytest.raises(UserError, match="corpus.word_segmenter works on BERT's words"):
        prepare_with(prepared / "topics.txt", tmp_path, folder, word_segmenter="segmenter")


def test_no_segmenter_is_advised_where_it_would_be_refused(folder: Path, tmp_path: Path, capsys):
    (tmp_path / "zh.txt").write_text("他去了北京，回来了。\n\n" * 200, encoding="utf-8")
    prepare_with(tmp_path / "zh.txt", tmp_path / "data", folder)
    (warning,) = [x for x in capsys.readouterr().out.splitlines() if "text is Chinese" in x]
    assert "corpus.language=zh" in warning and "word_segmenter" not in warning


def test_other_merges_of_the_same_pieces_are_another_corpus(prepared: Path, tmp_path: Path):
    text = (prepared / "topics.txt").read_text(encoding="utf-8")
    (tmp_path / "t").mkdir()
    train_byte_level(text).save(str(tmp_path / "t/tokenizer.json"))
    prepare_with(prepared / "topics.txt", tmp_path / "data", tmp_path / "t")
    change(tmp_path / "t", tmp_path / "t", lambda value: value["model"]["merges"].pop())
    with pytest.raises(UserError, match="with other settings in corpus or vocab"):
        prepare_with(prepared / "topics.txt", tmp_path / "data", tmp_path / "t")
