"""Train a WordPiece vocabulary on word counts, and write it as Hugging Face tokenizer files.

As in all public code, "WordPiece" means byte-pair merging of characters inside words (Sennrich et
al. 2016), with `##` before a piece that continues a word. Training on word counts bounds the
memory, and a total order of the merges makes the result a function of the counts.
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
from data_pipeline.sampling.vocabulary import SPECIAL_TOKENS, Vocabulary

DEFAULT_SIZE = 30522  # BERT's
MAX_WORD_CHARACTERS = 100  # BERT's: a longer word is one [UNK]
MAX_WORDS = 1 << 22  # distinct words to count at most, in about 400 MiB
SIZE_MULTIPLE = 64  # the vocabulary is padded to a multiple of this, for fast matrix products


class WordCounts(dict[str, int]):
    """Counts how often each word occurs, in bounded memory.

    Beyond `MAX_WORDS` distinct words, drops at least the rarest half. Attributes:

    dropped: occurrences dropped in total.
    shortfall: the most by which a count can be too small because its word was dropped earlier.
    junk: occurrences of words of more than `most` characters, which BERT's rules make [UNK].
    """

    def __init__(self, most: float = MAX_WORD_CHARACTERS) -> None:
        self.most = most
        self.junk = self.dropped = self.shortfall = 0

    def add(self, words: Iterable[tuple[str, int]]) -> None:
        """Add the word counts of a file chunk; which words are dropped depends on their order."""
        for word, count in words:
            if len(word) > self.most:
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
    """Build BERT's normaliser with every flag explicit."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=vocab.handle_chinese_chars,
        strip_accents=vocab.lowercase if vocab.strip_accents is None else vocab.strip_accents,
        lowercase=vocab.lowercase,
    )


def train_wordpiece(
    counts: Mapping[str, int], vocab: VocabConfig, existing: Sequence[str] = ()
) -> list[str]:
    """Train a vocabulary on word counts: its pieces by id, a pure function of the arguments.

    existing: pieces to start from; they keep their ids.
    Raises `UserError` if the words do not yield `vocab.size` pieces, or `vocab.size` is too small.
    The order is: special tokens (or `existing`), single characters that continue a word, single
    characters that begin one (both by code point), merges (the most frequent pair first, ties to
    the smaller ids), and `[unusedN]` up to a multiple of 64.
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
    name, kind = ("vocab.extend", "new") if existing else ("vocab.size", "special tokens and")
    if len(pieces) > size:
        raise UserError(
            f"{name} {size - len(existing)} is too small: {kind} single characters alone are "
            f"{len(pieces) - len(existing)}; raise {name} or lower vocab.character_coverage"
        )
    model = build_tokenizer(pieces, vocab).model
    spelled = ["".join([chr(token.id) for token in model.tokenize(word)]) for word in words]
    merge_pairs(spelled, [counts[word] for word in words], pieces, size, vocab.min_frequency)
    if len(pieces) < size:
        found = len(pieces) - len(existing)
        smaller = f"set {name}={found} or less, or "
        cure = f"{smaller if existing or found >= MIN_VOCAB_SIZE else ''}add text"
        raise UserError(
            f"the corpus yields at most {found}{' new' if existing else ''} pieces ({len(counts)} "
            f"distinct words), not {name} {size - len(existing)}; {cure}"
        )
    names = (name for i in itertools.count() if (name := f"[unused{i}]") not in existing)
    return pieces + list(itertools.islice(names, -len(pieces) % SIZE_MULTIPLE))


def choose_alphabet(counts: Mapping[str, int], coverage: float) -> set[str]:
    """Choose the most frequent characters that cover a fraction `coverage` of the text.

    Breaks ties by code point.
    """
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
    """Merge the most frequent adjacent pieces until there are `size`; appends them to `pieces`.

    words: each a string with `chr(id)` for each of its pieces; rewritten in place. A pair of pieces
    is then a string of two characters, which string methods find and replace fast.
    A merge changes only the totals of neighbouring pairs, so no other pair is counted again.
    """
    totals: defaultdict[str, int] = defaultdict(int)
    where: defaultdict[str, list[int]] = defaultdict(list)  # words that have or had a pair
    for i, word in enumerate(words):
        for pair in map(add, word, word[1:]):
            totals[pair] += counts[i]
            where[pair].append(i)
    ids = {piece: i for i, piece in enumerate(pieces)}
    heap = [(-total, pair) for pair, total in totals.items() if total >= min_frequency]
    heapq.heapify(heap)
    while len(pieces) < size and heap:
        negative, pair = heapq.heappop(heap)
        if totals[pair] != -negative:  # outdated entry: the total has changed since
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
        del totals[pair]  # all are replaced, even overlapping ones (aaa)
        for _, fresh, _ in changes:
            if totals[fresh] >= min_frequency:
                heapq.heappush(heap, (-totals[fresh], fresh))


def replace_pair(
    words: list[str], found: list[int], pair: str, new: str
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Replace `pair` by `new` in the words with the indices `found`, from the left.

    Returns two dictionaries, for the pieces before and after a replaced pair: piece -> indices of
    the words, one for each time that the piece stood there.
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
    """Build the `tokenizers` object of a vocabulary."""
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
    """Write the files of a WordPiece vocabulary, with every flag explicit."""
    tokenizer = build_tokenizer(pieces, vocab)
    normalizer = tokenizer.normalizer
    flags = {
        "do_lower_case": normalizer.lowercase,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.handle_chinese_chars,
    }
    write_vocabulary(folder, tokenizer, pieces, "BertTokenizer", flags)


def write_vocabulary(
    folder: Path, tokenizer: Tokenizer, pieces: list[str], hf_class: str, rules: dict
) -> None:
    """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json`.

    hf_class: transformers' class of the tokenizer. rules: further settings of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # not by `tokenizer.save`, whose error on a full disk is no OSError
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    vocabulary = Vocabulary.of(pieces)
    names = {
        f"{name.strip('[]').lower()}_token": pieces[vocabulary[name]] for name in SPECIAL_TOKENS
    }
    settings = {
        "tokenizer_class": hf_class,
        **rules,
        "model_max_length": 512,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **names,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
