"""sentences -> **words**: BERT's normaliser and pre-tokeniser as a table, so that each word is
handled once.

What `tokenizers` does to a character does not depend on its neighbours, and WordPiece does not look
past the word. So text becomes words by translating characters, the table being asked of
`tokenizers` itself, and each distinct word gets a number; its pieces are looked up once, when the
vocabulary is there.

Where words are not written apart (Chinese), a segmenter says which of BERT's words are one masking
unit. It reads the text as it was written, and its cuts go through the table as marks, so that both
divisions are of the same characters whatever the normaliser drops or adds.
"""

import importlib
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from data_pipeline.errors import UserError

END = b"\0"  # of a sentence; no word has it, control characters having gone before
CUT, CUT_MARK = "\ud800", b"\1"  # between words of a segmenter, before and after the table
Segmenter = Callable[[str], list[str]]


class WordSplitter:
    """Callable: text, one sentence a line -> words as UTF-8 bytes, `END` after each sentence."""

    def __init__(self, normalizer: normalizers.Normalizer):
        self.normalizer = normalizer
        self.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.table = CharacterTable(self.translate)
        self.table |= {10: " \0 ", ord(CUT): CUT_MARK.decode()}
        kept, dropped, self.spaced = bytearray(range(256)), bytearray(), []
        for code in set(range(128)) - {0, 10}:
            words = self.translate(chr(code))
            if len(words) == 3:  # a word of its own
                self.spaced.append((bytes([code]), f" {chr(code)} ".encode()))
            elif words:
                kept[code] = ord(words)
            else:
                dropped.append(code)
        self.ascii_table, self.ascii_dropped = bytes(kept), bytes(dropped)

    def __call__(self, text: str) -> list[bytes]:
        if text.isascii():
            data = text.encode().translate(self.ascii_table, self.ascii_dropped)
            for mark, spaced in self.spaced:
                if mark in data:
                    data = data.replace(mark, spaced)
            return data.replace(b"\n", b" \0 ").split()
        return text.translate(self.table).encode("utf-8", "replace").split()

    def translate(self, character: str) -> str:
        """What a character becomes: itself or others, ` x ` for a word of its own, ` ` or
        nothing."""
        out = []
        for c in self.normalizer.normalize_str(character):
            if not self.pre_tokenizer.pre_tokenize_str(c):
                out.append(" ")
            elif self.is_punctuation(c):
                out.append(f" {c} ")
            else:
                out.append(c)
        return "".join(out)

    def is_punctuation(self, word: str) -> bool:
        """Whether BERT's pre-tokeniser keeps `word` apart from letters."""
        return len(self.pre_tokenizer.pre_tokenize_str(f"a{word}b")) == 3


class CharacterTable(dict):
    """code point -> what `translate` makes of the character, asked once; for `str.translate`."""

    def __init__(self, translate: Callable[[str], str]):
        self.translate = translate

    def __missing__(self, code: int) -> str:
        self[code] = words = self.translate(chr(code))
        return words


class WordIndex(dict):
    """word -> number, in order of first appearance; an unknown word gets the next number."""

    def __missing__(self, word: bytes) -> int:
        self[word] = number = len(self)
        return number


def number_words(
    sentences: Iterable[str], split: WordSplitter, index: WordIndex
) -> tuple[np.ndarray, np.ndarray]:
    """(word numbers uint32 of the sentences laid end to end, number of words of each sentence
    int32).

    `index[END]` must be 0. A sentence without words (zero-width characters alone) has 0.
    """
    words: list[bytes] = []
    for _, run in groupby(sentences, key=str.isascii):  # the table for ASCII is twice as fast
        words += split("".join(f"{sentence}\n" for sentence in run))
    numbers = np.fromiter(map(index.__getitem__, words), np.uint32, len(words))
    ends = np.flatnonzero(numbers == 0)
    return np.delete(numbers, ends), np.diff(ends, prepend=-1).astype(np.int32) - 1


# ---------------------------------------------------------------------------------- units

LEFT, RIGHT = 2, 1  # sides of a word on which its unit ends whatever stands there


class UnitIndex(dict):
    """word with the cuts in and around it -> 4 x its number + `LEFT` + `RIGHT`, numbers being those
    of `index`.

    Cuts that touch no word have the code `RIGHT`, with the number of `END`.
    """

    def __init__(self, index: WordIndex, split: WordSplitter):
        self.index, self.split = index, split
        self[END] = LEFT | RIGHT

    def __missing__(self, form: bytes) -> int:
        word = form.replace(CUT_MARK, b"")
        if not word:
            code = RIGHT
        elif self.split.is_punctuation(word.decode()):
            code = 4 * self.index[word] + LEFT + RIGHT
        else:
            sides = LEFT * form.startswith(CUT_MARK) + RIGHT * form.endswith(CUT_MARK)
            code = 4 * self.index[word] + sides
        self[form] = code
        return code


def number_units(
    sentences: Iterable[str], units: UnitIndex, segment: Segmenter
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `number_words` gives, and whether a masking unit starts at each word: bool.

    Two words are in one unit when the end of one and the start of the other are in one word of
    `segment`, and neither is punctuation: a unit neither splits one of BERT's words nor spans
    punctuation. In ASCII sentences each word is a unit. Raises `UserError` if what `segment` gives
    is not the sentence, divided.
    """
    codes = []
    for is_ascii, run in groupby(sentences, key=str.isascii):
        if not is_ascii:
            run = (cut_sentence(sentence, segment) for sentence in run)
        words = units.split("\n".join(run) + "\n")
        code = np.fromiter(map(units.__getitem__, words), np.uint32, len(words))
        codes.append(code | (LEFT | RIGHT if is_ascii else 0))
    code = np.concatenate([np.zeros(0, np.uint32), *codes])
    starts = (code & LEFT) > 0
    starts[1:] |= (code[:-1] & RIGHT) > 0
    starts[:1] = True
    is_cut = code == RIGHT
    numbers, starts = code[~is_cut] >> 2, starts[~is_cut]
    ends = np.flatnonzero(numbers == 0)
    sizes = np.diff(ends, prepend=-1).astype(np.int32) - 1
    return np.delete(numbers, ends), sizes, np.delete(starts, ends)


def cut_sentence(sentence: str, segment: Segmenter) -> str:
    """`sentence` with a `CUT` between any two words of `segment`."""
    out = CUT.join(segment(sentence))
    if out.replace(CUT, "") != sentence:
        raise UserError(
            "corpus.words: the words of a segmenter must give the text again, with every space; "
            f"{sentence[:40]!r} became {out.split(CUT)[:10]!r}"
        )
    return out


def load_segmenter(name: str | None) -> Segmenter | None:
    """The function that `corpus.words` names, if any; raises `UserError` if it is not there."""
    if name is None:
        return None
    if name == "segmenter":
        try:
            import rjieba
        except ImportError:
            raise UserError(
                "corpus.words=segmenter needs rjieba: pip install bert-pretrain[chinese]"
            ) from None
        return rjieba.cut
    module, _, function = name.partition(":")
    try:
        segment = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"corpus.words {name} cannot be imported: {error}") from None
    if not callable(segment):
        raise UserError(f"corpus.words {name} is not a function but {type(segment).__name__}")
    return segment
