"""Split text into BERT's words and number them, so that each distinct word is tokenized once.

BERT's normaliser and pre-tokeniser treat each character independently of its neighbours, and
WordPiece treats each word independently. So a table of characters, filled by asking `tokenizers`,
is enough to split text into words. (One exception: where accents are stripped, `tokenizers` also
sorts neighbouring marks, of which a few, such as U+302E, stay. Here they stay as written.) Each
distinct word gets a number, and its tokens are looked up once, when the vocabulary has been
trained.

In languages without spaces (Chinese) a segmenter decides which of BERT's words form one masking
unit. It reads the original text, and its cuts pass through the table as special characters, so
that they stay in place whatever characters the normaliser drops or adds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from data_pipeline.common.errors import UserError
from data_pipeline.common.plug_ins import load_plug_in
from data_pipeline.common.reading import clip
from data_pipeline.common.streams import GOLDEN, mix

END = b"\0"  # end of a sentence; not in any word, because control characters were removed
CUT, CUT_MARK = "\ud800", b"\1"  # between words of a segmenter, before and after the table
BETWEEN, INSIDE, ALONE = range(3)  # a byte is between words, in a word, or a word by itself
SHORT = 16  # most bytes of a word that is kept in the arrays of a `WordTable`
SLOTS = 1 << 18  # words in these arrays
FREE = np.uint64(2**64 - 1)  # marks a free slot: cannot occur in UTF-8
LOST = "the words must join to the same text, spaces included"
Segmenter = Callable[[str], list[str]]


@dataclass
class Words:
    """Text as UTF-8, and the bytes at which its words start and end: int64."""

    data: bytes
    starts: np.ndarray
    ends: np.ndarray

    def __iter__(self) -> Iterator[bytes]:
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield self.data[start:end]

    def take(self, which: np.ndarray) -> "Words":
        return Words(self.data, self.starts[which], self.ends[which])


class WordSplitter:
    """Splits text with one sentence per line into `Words`, with `END` after each sentence."""

    def __init__(self, normalizer: normalizers.Normalizer):
        self.normalizer = normalizer
        self.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.table = CharacterTable(self.translate)
        self.table[ord(CUT)] = CUT_MARK.decode()
        kept, dropped, place = bytearray(range(256)), bytearray(), bytearray([INSIDE] * 256)
        for code in range(128):
            words = self.translate(chr(code))
            if words:
                kept[code] = ord(words.strip() or " ")
            else:
                dropped.append(code)
            if len(words) == 3:
                place[code] = ALONE
        kept[10], place[0], place[32] = 0, ALONE, BETWEEN
        self.ascii_table, self.ascii_dropped, self.place = bytes(kept), bytes(dropped), bytes(place)

    def __call__(self, text: str) -> Words:
        data = text.encode("utf-8", "surrogatepass")  # a `CUT` is a surrogate
        data = data.translate(self.ascii_table, self.ascii_dropped)
        if not data.isascii():
            data = self.translate_rest(data)
        place = np.frombuffer(data.translate(self.place), np.uint8)
        alone, inside = place == ALONE, np.pad(place == INSIDE, 1)
        starts = alone | (inside[1:-1] & ~inside[:-2])
        lasts = alone | (inside[1:-1] & ~inside[2:])
        return Words(data, np.flatnonzero(starts), np.flatnonzero(lasts) + 1)

    def translate_rest(self, data: bytes) -> bytes:
        """Translate the characters of `data` that are not ASCII, a run of them at a time."""
        is_rest = np.frombuffer(data, np.int8) < 0
        edges = np.flatnonzero(is_rest[1:] != is_rest[:-1]) + 1
        runs = [data[start:end] for start, end in pairwise([0, *edges.tolist(), len(data)])]
        for i in range(int(not is_rest[0]), len(runs), 2):
            text = runs[i].decode("utf-8", "surrogatepass").translate(self.table)
            runs[i] = text.encode()
        return b"".join(runs)

    def translate(self, character: str) -> str:
        """Translate a character as BERT's normaliser and pre-tokeniser do.

        Returns other characters or the same one, ` x ` for a word by itself, a space, or nothing.
        """
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
        """Tell whether BERT's pre-tokeniser separates `word` from letters beside it."""
        return len(self.pre_tokenizer.pre_tokenize_str(f"a{word}b")) == 3


class CharacterTable(dict):
    """A table for `str.translate` that calls `translate` once per character, when it first
    occurs."""

    def __init__(self, translate: Callable[[str], str]):
        self.translate = translate

    def __missing__(self, code: int) -> str:
        self[code] = words = self.translate(chr(code))
        return words


class WordTable(dict):
    """A dictionary from word to number, with a fast path for many words; subclasses define
    `__missing__`.

    A dictionary lookup needs a Python object per word. So short words are also kept in arrays of
    `SLOTS` entries, indexed by a hash of their bytes, where `look_up` finds many words at once. A
    slot keeps the first word that hashes to it, since frequent words tend to come early.
    """

    masks = (np.tri(SHORT + 1, SHORT, -1, np.uint8) * 255).view("<u8")  # row i keeps i bytes

    def __init__(self, numbers: dict[bytes, int]):
        super().__init__(numbers)
        self.keys = np.full((SLOTS, 2), FREE)
        self.numbers = np.zeros(SLOTS, np.uint32)

    def look_up(self, words: Words) -> np.ndarray:
        """Look up the number of each word: uint32."""
        data = words.data + bytes(SHORT)
        heads = np.ndarray(len(words.data) + 1, f"S{SHORT}", data, strides=(1,))  # from every byte
        lengths = words.ends - words.starts
        keys = heads[words.starts].view("<u8").reshape(-1, 2)
        keys &= self.masks.take(lengths, 0, mode="clip")
        slots = (mix(keys[:, 0] * GOLDEN ^ keys[:, 1]) % np.uint64(SLOTS)).astype(np.int64)
        there, is_short = self.keys.take(slots, 0), lengths <= SHORT
        found = (there[:, 0] == keys[:, 0]) & (there[:, 1] == keys[:, 1]) & is_short
        numbers = self.numbers.take(slots)
        rest = np.flatnonzero(~found)
        numbers[rest] = [self[word] for word in words.take(rest)]
        new = rest[(is_short & (there[:, 0] == FREE))[rest]]
        self.keys[slots[new]], self.numbers[slots[new]] = keys[new], numbers[new]
        return numbers


class WordIndex(WordTable):
    """Numbers words in order of first appearance: an unknown word gets the next number."""

    def __missing__(self, word: bytes) -> int:
        self[word] = number = len(self)
        return number


def number_words(
    sentences: list[str], split: WordSplitter, index: WordIndex
) -> tuple[np.ndarray, np.ndarray]:
    """Number the words of sentences.

    index: the numbers so far, extended by new words; `index[END]` must be 0.
    Returns uint32 (words,), the word numbers of all sentences end to end, and int32 (sentences,),
    the number of words in each: 0 if it has none, as with zero-width characters alone.
    """
    numbers = index.look_up(split("\n".join([*sentences, ""])))
    return numbers[numbers > 0], sentence_sizes(numbers)


def sentence_sizes(numbers: np.ndarray) -> np.ndarray:
    """Count the words before each `END`, whose number is 0: int32 (sentences,)."""
    return np.diff(np.flatnonzero(numbers == 0), prepend=-1).astype(np.int32) - 1


# ---------------------------------------------------------------------------------- units

LEFT, RIGHT = 2, 1  # sides of a word on which its masking unit ends


class UnitIndex(WordTable):
    """Maps a word with the cuts in and around it to a code: 4 x its number in `index` + sides.

    The sides are `LEFT`, `RIGHT`, both or none. Cuts that touch no word have the code `RIGHT` and
    the number of `END`.
    """

    def __init__(self, index: WordIndex, split: WordSplitter):
        super().__init__({END: LEFT | RIGHT})
        self.index, self.split = index, split

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
    sentences: list[str], units: UnitIndex, segment: Segmenter
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the words of sentences, and mark those that start a masking unit.

    Returns what `number_words` does, and bool (words,), whether a masking unit starts at each word.
    Raises `UserError` if the words of `segment` do not join to the sentence.
    Adjacent words are in one unit if the end of the first and the start of the second are in the
    same word of `segment`, and neither is punctuation. So a unit neither splits one of BERT's words
    nor joins punctuation with another word. In ASCII sentences each word is a unit.
    """
    is_ascii = np.array([sentence.isascii() for sentence in sentences], bool)
    cuts = (s if s.isascii() else cut_sentence(s, segment) for s in sentences)
    code = units.look_up(units.split("\n".join([*cuts, ""])))
    ends = np.flatnonzero(code == (LEFT | RIGHT))
    code[np.repeat(is_ascii, np.diff(ends, prepend=-1))] |= LEFT | RIGHT
    starts = (code & LEFT) > 0
    starts[1:] |= (code[:-1] & RIGHT) > 0
    starts[:1] = True
    is_cut = code == RIGHT
    numbers, starts = code[~is_cut] >> 2, starts[~is_cut]
    return numbers[numbers > 0], sentence_sizes(numbers), starts[numbers > 0]


def cut_sentence(sentence: str, segment: Segmenter) -> str:
    """Insert a `CUT` between any two words of `segment`; raises `UserError` if text is lost."""
    out = CUT.join(words := segment(sentence))
    if out.replace(CUT, "") != sentence:
        raise UserError(
            f"corpus.word_segmenter divided {clip(sentence)} into {clip(words)}; {LOST}"
        )
    return out


def find_lost_text(sentence: str, words: list[str]) -> str | None:
    """Tell what is wrong with the words of a segmenter; None if nothing is."""
    are_texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return None if are_texts and "".join(words) == sentence else LOST


def load_segmenter(name: str | None) -> Segmenter | None:
    """Load the function that `corpus.word_segmenter` names; None if it is null.

    Raises `UserError` if it cannot be imported.
    """
    if name is None:
        return None
    if name == "segmenter":
        try:
            import rjieba
        except ImportError:
            raise UserError(
                "corpus.word_segmenter=segmenter needs rjieba: pip install -e '.[chinese]'"
            ) from None
        return rjieba.cut
    return load_plug_in("corpus.word_segmenter", name, find_lost_text)
