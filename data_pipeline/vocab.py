"""words -> **vocabulary**: WordPiece trained on word counts, and the tokenizer files that everyone
loads.

"WordPiece" as in all public code: byte-pair merging of characters inside words (Sennrich et al.
2016), with `##` before a piece that continues a word. Counting words first bounds the memory; a
total order on the merges makes the result a function of the counts.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.config import VocabConfig
from data_pipeline.errors import UserError

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0 to 4
MAX_WORD_CHARACTERS = 100  # BERT's: a longer word is one [UNK]
MULTIPLE = 64  # of the vocabulary's size: matrix products like it


def build_normalizer(vocab: VocabConfig) -> normalizers.Normalizer:
    """BERT's normaliser with every flag said."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=vocab.handle_chinese_chars,
        strip_accents=vocab.lowercase if vocab.strip_accents is None else vocab.strip_accents,
        lowercase=vocab.lowercase,
    )


def train_wordpiece(counts: Mapping[str, int], vocab: VocabConfig) -> list[str]:
    """The pieces of a vocabulary, by id, from the counts of words; a pure function of both.

    Special tokens first, then continuations and beginnings of one character, each by code point,
    then merges, the most frequent pair first, ties to the smaller ids; `[unusedN]` up to a multiple
    of 64. Raises `UserError` if the words do not yield `vocab.size` pieces.
    """
    alphabet = choose_alphabet(counts, vocab.character_coverage)
    words = sorted(
        (word, count)
        for word, count in counts.items()
        if len(word) <= MAX_WORD_CHARACTERS and alphabet.issuperset(word)
    )
    begins = {word[0] for word, _ in words}
    continues = {character for word, _ in words for character in word[1:]}
    pieces = SPECIAL_TOKENS + sorted("##" + c for c in continues) + sorted(begins)
    if len(pieces) > vocab.size:
        raise UserError(
            f"vocab.size {vocab.size} is too small: special tokens and single characters alone are "
            f"{len(pieces)}; raise vocab.size or lower vocab.character_coverage"
        )
    ids = {piece: i for i, piece in enumerate(pieces)}
    symbols = [[ids[word[0]], *(ids["##" + c] for c in word[1:])] for word, _ in words]
    merge_pairs(symbols, [count for _, count in words], pieces, vocab.size, vocab.min_frequency)
    if len(pieces) < vocab.size:
        raise UserError(
            f"the corpus yields at most {len(pieces)} pieces ({len(counts)} distinct words), not "
            f"vocab.size {vocab.size}; set vocab.size={len(pieces)} or less, or add text"
        )
    padding = -len(pieces) % MULTIPLE
    return pieces + [f"[unused{i}]" for i in range(padding)]


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
    words: list[list[int]], counts: list[int], pieces: list[str], size: int, min_frequency: int
) -> None:
    """Append to `pieces` the merges of the most frequent neighbours in `words`, until there are
    `size`.

    `words` are lists of ids into `pieces` and are rewritten as their pieces grow.
    """
    pair_counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:], strict=False):
            pair_counts[pair] += counts[i]
            where[pair].add(i)
    ids = {piece: i for i, piece in enumerate(pieces)}
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    while len(pieces) < size and heap:
        negative, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        if count != -negative:  # an old entry: its pair has lost words since
            if count > 0:
                heapq.heappush(heap, (-count, pair))
            continue
        if count < min_frequency:
            break
        left, right = pair
        piece = pieces[left] + pieces[right].removeprefix("##")
        new = ids.setdefault(piece, len(pieces))  # ab + c and a + bc are one piece
        if new == len(pieces):
            pieces.append(piece)
        grown = set()
        for i in where.pop(pair):
            word, count = words[i], counts[i]
            for old in zip(word, word[1:], strict=False):
                pair_counts[old] -= count
            j = 0
            while j < len(word) - 1:
                if word[j] == left and word[j + 1] == right:
                    word[j : j + 2] = [new]
                j += 1
            for fresh in zip(word, word[1:], strict=False):
                pair_counts[fresh] += count
                if new in fresh:
                    where[fresh].add(i)
                    grown.add(fresh)
        for fresh in grown:
            heapq.heappush(heap, (-pair_counts[fresh], fresh))


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
