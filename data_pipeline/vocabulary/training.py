"""words -> **vocabulary**: WordPiece trained on word counts, and the tokenizer files that everyone
loads.

"WordPiece" as in all public code: byte-pair merging of characters inside words (Sennrich et al.
2016), with `##` before a piece that continues a word. Counting words first bounds the memory; a
total order on the merges makes the result a function of the counts.
"""

import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.common.errors import UserError
from data_pipeline.config import MIN_VOCAB_SIZE, VocabConfig

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0 to 4
DEFAULT_SIZE = 30522  # BERT's
MAX_WORD_CHARACTERS = 100  # BERT's: a longer word is one [UNK]
MAX_WORDS = 1 << 22  # that are counted at a time, about 400 MiB
MULTIPLE = 64  # of the vocabulary's size: matrix products like it


class WordCounts(dict[str, int]):
    """How often each word occurs, in bounded memory.

    Past `MAX_WORDS` words the rarest are dropped, of count 1, then 2 and so on, until half as many
    are left. A count is then too small by `shortfall` at most, the sum of those thresholds;
    `dropped` is how many occurrences went in all. Words of more than `MAX_WORD_CHARACTERS`, which
    can only be [UNK], are not counted apart: `junk` is how often there was one.
    """

    def __init__(self) -> None:
        self.junk = self.dropped = self.shortfall = 0

    def add(self, words: Iterable[tuple[str, int]]) -> None:
        """Add the counts of a piece of the corpus; the order of pieces decides what is dropped."""
        for word, count in words:
            if len(word) > MAX_WORD_CHARACTERS:
                self.junk += count
            else:
                self[word] = self.get(word, 0) + count
        if len(self) > MAX_WORDS:
            self.drop_rarest(MAX_WORDS // 2)

    def drop_rarest(self, size: int) -> None:
        counts = np.fromiter(self.values(), np.int64, len(self))
        threshold = int(np.partition(counts, -size - 1)[-size - 1])
        self.dropped += int(counts[counts <= threshold].sum())
        self.shortfall += threshold
        for word in [word for word, count in self.items() if count <= threshold]:
            del self[word]


def build_normalizer(vocab: VocabConfig) -> normalizers.Normalizer:
    """BERT's normaliser with every flag said."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=vocab.handle_chinese_chars,
        strip_accents=vocab.lowercase if vocab.strip_accents is None else vocab.strip_accents,
        lowercase=vocab.lowercase,
    )


def train_wordpiece(
    counts: Mapping[str, int], vocab: VocabConfig, existing: Sequence[str] = ()
) -> list[str]:
    """The pieces of a vocabulary, by id, from the counts of words; a pure function of both.

    Special tokens first, then continuations and beginnings of one character, each by code point,
    then merges, the most frequent pair first, ties to the smaller ids; `[unusedN]` up to a multiple
    of 64. The pieces of an `existing` vocabulary keep their ids; the characters that it lacks and
    merges of its pieces follow them. Raises `UserError` if the words do not yield `vocab.size`
    pieces.
    """
    size = vocab.size or DEFAULT_SIZE
    first = list(existing) or SPECIAL_TOKENS
    alphabet = choose_alphabet(counts, vocab.character_coverage)
    words = sorted(
        word for word in counts if len(word) <= MAX_WORD_CHARACTERS and alphabet.issuperset(word)
    )
    begins = {word[0] for word in words}.difference(first)
    continues = {f"##{c}" for c in set().union(*(word[1:] for word in words))}.difference(first)
    pieces = first + sorted(continues) + sorted(begins)
    if len(pieces) > size:
        raise UserError(
            f"vocab.size {size} is too small: {'vocab.path' if existing else 'special tokens'} and "
            f"single characters alone are {len(pieces)}; raise vocab.size or lower "
            f"vocab.character_coverage"
        )
    model = build_tokenizer(pieces, vocab).model
    spelled = ["".join([chr(token.id) for token in model.tokenize(word)]) for word in words]
    merge_pairs(spelled, [counts[word] for word in words], pieces, size, vocab.min_frequency)
    if len(pieces) < size:
        smaller = f"set vocab.size={len(pieces)} or less, or "
        cure = f"{smaller if len(pieces) >= MIN_VOCAB_SIZE else ''}add text"
        raise UserError(
            f"the corpus yields at most {len(pieces)} pieces ({len(counts)} distinct words), not "
            f"vocab.size {size}; {cure}"
        )
    names = (name for i in itertools.count() if (name := f"[unused{i}]") not in existing)
    return pieces + list(itertools.islice(names, -len(pieces) % MULTIPLE))


def choose_alphabet(counts: Mapping[str, int], coverage: float) -> set[str]:
    """The most frequent characters that make up `coverage` of the text, ties by code point."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    wanted, covered, alphabet = coverage * characters.total(), 0, set()
    for character in sorted(characters, key=lambda c: (-characters[c], c)):
        if covered >= wanted:
            break
        alphabet.add(character)
        covered += characters[character]
    return alphabet


def merge_pairs(
    words: list[str], counts: list[int], pieces: list[str], size: int, min_frequency: int
) -> None:
    """Append to `pieces` the merges of the most frequent neighbours in `words`, until there are
    `size`.

    A word is a string with `chr(id)` for each of its pieces, so that a pair of pieces is a string
    too and finding and replacing it is the string's own work. `words` are rewritten as their pieces
    grow. Only the pairs at the place of a merge change their totals.
    """
    totals: defaultdict[str, int] = defaultdict(int)
    where: defaultdict[str, list[int]] = defaultdict(list)  # words that have, or had, the pair
    for i, word in enumerate(words):
        for pair in map(add, word, word[1:]):
            totals[pair] += counts[i]
            where[pair].append(i)
    ids = {piece: i for i, piece in enumerate(pieces)}
    heap = [(-total, pair) for pair, total in totals.items() if total >= min_frequency]
    heapq.heapify(heap)
    while len(pieces) < size and heap:
        negative, pair = heapq.heappop(heap)
        if totals[pair] != -negative:  # an old entry: its pair has changed since
            if min_frequency <= totals[pair] < -negative:
                heapq.heappush(heap, (-totals[pair], pair))
            continue
        left, right = pair
        piece = pieces[ord(left)] + pieces[ord(right)].removeprefix("##")
        if ids.setdefault(piece, len(pieces)) == len(pieces):  # ab + c and a + bc are one piece
            pieces.append(piece)
        new = chr(ids[piece])
        befores, afters = replace_pair(words, where.pop(pair), pair, new)
        changes = [(before + left, before + new, found) for before, found in befores.items()]
        changes += [(right + after, new + after, found) for after, found in afters.items()]
        for old, fresh, found in changes:
            total = sum(map(counts.__getitem__, found))
            totals[old] -= total
            totals[fresh] += total
            where[fresh] += found
        del totals[pair]  # none is left, whatever overlapping ones (aaa) have taken from it
        for _, fresh, _ in changes:
            if totals[fresh] >= min_frequency:
                heapq.heappush(heap, (-totals[fresh], fresh))


def replace_pair(
    words: list[str], found: list[int], pair: str, new: str
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Replace `pair` by `new` in the words `found`, from the left.

    Returns the piece before, and the piece after, each place -> the words where it stood there, as
    often as it did.
    """
    befores: defaultdict[str, list[int]] = defaultdict(list)
    afters: defaultdict[str, list[int]] = defaultdict(list)
    for i in found:
        word = words[i]
        while pair in word:
            head, _, tail = word.partition(pair)
            if head:
                befores[head[-1]].append(i)
            if tail:
                afters[tail[0]].append(i)
            word = head + new + tail
        words[i] = word
    return befores, afters


def build_tokenizer(pieces: list[str], vocab: VocabConfig) -> Tokenizer:
    """The tokenizer of a vocabulary as `tokenizers` runs it."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer = build_normalizer(vocab)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def write_tokenizer(folder: Path, pieces: list[str], vocab: VocabConfig) -> None:
    """`vocab.txt`, `tokenizer.json` and `tokenizer_config.json`, every flag in them explicit."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(pieces, vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    normalizer = tokenizer.normalizer
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer.lowercase,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.handle_chinese_chars,
        "model_max_length": 512,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
