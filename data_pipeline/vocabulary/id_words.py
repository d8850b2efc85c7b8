"""Number the words of text as tokenizers of other kinds divide it: byte-level BPE, SentencePiece.

Here a word's tokens may depend on what is beside it, so it is numbered by its tokens and not by its
letters, as in `words`.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import ByteLevel

from data_pipeline.common.arrays import run_starts
from data_pipeline.common.errors import UserError, is_fault
from data_pipeline.common.reading import clip
from data_pipeline.vocabulary.words import WordIndex

LONG_LINE = 1 << 16  # characters to encode at once, since an encoding takes a hundred times as much
# letters of scripts without spaces between words: Thai to Tibetan, Burmese, Khmer, kana, Han
UNSPACED = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


class IdWords:
    """Numbers words as any kind of tokenizer sees them in running text.

    A word is what the pre-tokeniser separates, kept as the bytes of its tokens' ids; one that
    continues into the next sentence is cut there. A line is encoded as a whole, since tokens may
    depend on what is before them: SentencePiece puts a space before any text that it is given.
    """

    def __init__(self, tokenizer: Tokenizer, index: WordIndex):
        tokenizer.encode_special_tokens = True  # a <s> in the text is text
        self.encode, self.index = tokenizer.encode, index

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Number the words of sentences from `keep_spaces`; returns what `number_words` does."""
        numbers, sizes = [], np.zeros(len(sentences), np.int32)
        gap = ""  # before the next part of a long line
        for first, last in cut_lines(sentences):
            some = [s.encode("utf-8", "replace").decode() for s in sentences[first:last]]
            some[0] = gap + some[0]
            line = "".join(some)
            bare = line.rstrip()
            gap = "" if line.endswith("\n") else line[len(bare) :]
            found = self.encode_line(bare)
            # a token belongs to the sentence in which it starts, or after whose text it starts
            begins = np.cumsum([0, *map(len, some)])[:-1]
            ends = begins + [len(sentence.rstrip()) for sentence in some]  # of their texts
            starts = np.array([start for start, _ in found.offsets], np.int64)
            places = np.maximum.accumulate(np.searchsorted(ends[:-1], starts, side="right"))
            is_first = run_starts(places, np.array(found.word_ids, float))  # None: nan
            edges = [*np.flatnonzero(is_first).tolist(), len(places)]
            ids = np.array(found.ids, "<u4").tobytes()
            numbers += [self.index[ids[4 * a : 4 * b]] for a, b in pairwise(edges)]
            sizes[first:last] = np.bincount(places[is_first], minlength=last - first)
        return np.array(numbers, np.uint32), sizes

    def encode_line(self, line: str) -> Encoding:
        try:
            return self.encode(line, add_special_tokens=False)
        except BaseException as error:
            if not is_fault(error):
                raise
            raise UserError(f"the tokenizer fails on {clip(line)}: {error}") from None


def write_ids(word: bytes) -> bytes:
    """Write a word of `IdWords` as text, "71 5"; `END` is "", as it has no ids."""
    return b" ".join(b"%d" % i for i in np.frombuffer(word, "<u4", len(word) // 4))


def read_ids(word: str) -> list[int]:
    """Read the ids of a word from `write_ids`."""
    return list(map(int, word.split()))


def cut_lines(sentences: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the lines of sentences from `keep_spaces`, [first, last), in parts if they are long."""
    first = size = 0
    for i, sentence in enumerate(sentences, 1):
        size += len(sentence)
        if sentence.endswith("\n") or size > LONG_LINE or i == len(sentences):
            yield first, i
            first, size = i, 0


def keep_spaces(line: str, sentences: list[str]) -> list[str]:
    """Restore the spaces after the sentences of a line, which a splitter may have dropped, and add
    a line end to the last one."""
    out, at = [], 0
    for sentence in sentences:
        start = max(line.find(sentence, at), at)  # not found: the splitter has changed it
        if out:
            out[-1] += line[at:start]
            out.append(sentence)
        else:
            out.append(line[:start] + sentence)
        at = start + len(sentence)
    if out:
        out[-1] += "\n"
    return out


def find_units(pieces: list[str], is_bytes: bool) -> list[bool]:
    """Mark the pieces of a pre-token at which a masking unit starts: the first piece and, since a
    clause in a script without spaces is one pre-token, each piece that begins or follows a letter
    of such a script.

    is_bytes: whether the pieces are of byte-level BPE, where a letter can be several.
    """
    text = ByteLevel().decode(pieces) if is_bytes else "".join(pieces)
    if not UNSPACED.search(text):
        return [i == 0 for i in range(len(pieces))]
    sizes = [len(letter.encode()) if is_bytes else 1 for letter in text]
    alone = np.repeat([UNSPACED.match(letter) is not None for letter in text], sizes)
    is_start = np.zeros(len(alone), bool)
    is_start[np.cumsum(sizes) - sizes] = True
    is_start[1:] &= alone[1:] | alone[:-1]
    starts = np.cumsum([0, *map(len, pieces)])
    if starts[-1] != len(is_start):  # the vocabulary lacks some bytes
        return [True] * len(pieces)
    return is_start[starts[:-1]].tolist()
