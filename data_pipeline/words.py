"""sentences -> **words**: BERT's normaliser and pre-tokeniser as a table, so that each word is
handled once.

What `tokenizers` does to a character does not depend on its neighbours, and WordPiece does not look
past the word. So text becomes words by translating characters, the table being asked of
`tokenizers` itself, and each distinct word gets a number; its pieces are looked up once, when the
vocabulary is there.
"""

from collections.abc import Iterable
from itertools import groupby

import numpy as np
from tokenizers import normalizers, pre_tokenizers

END = b"\0"  # of a sentence; no word has it, control characters having gone before


class WordSplitter:
    """Callable: text, one sentence a line -> words as UTF-8 bytes, `END` after each sentence."""

    def __init__(self, normalizer: normalizers.Normalizer):
        self.normalizer = normalizer
        self.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.table: dict[int, str] = {10: " \0 "}
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
        for character in set(text):
            if ord(character) not in self.table:
                self.table[ord(character)] = self.translate(character)
        words = text.translate(self.table).encode("utf-8", "replace").split(b" ")
        return [word for word in words if word]

    def translate(self, character: str) -> str:
        """What a character becomes: itself or others, ` x ` for a word of its own, ` ` or
        nothing."""
        out = []
        for c in self.normalizer.normalize_str(character):
            if not self.pre_tokenizer.pre_tokenize_str(c):
                out.append(" ")
            elif len(self.pre_tokenizer.pre_tokenize_str(f"a{c}b")) == 3:
                out.append(f" {c} ")
            else:
                out.append(c)
        return "".join(out)


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
