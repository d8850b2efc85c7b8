"""Measure how well a vocabulary fits held-out text, at several sizes, so that users can choose one.

The pieces are in the order of training, so the first part of a vocabulary is the smaller vocabulary
of the same corpus, which can be measured without further training.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tokenizers import Tokenizer

from data_pipeline.common.errors import red
from data_pipeline.config import VocabConfig
from data_pipeline.sampling.vocabulary import SPECIAL_TOKENS, Vocabulary
from data_pipeline.vocabulary.id_words import read_ids
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    WordCounts,
    build_normalizer,
    build_tokenizer,
)
from data_pipeline.vocabulary.words import END, WordSplitter

LONGEST = 10  # number of longest pieces to show
MUCH_UNKNOWN = 0.05  # fraction of [UNK] tokens that causes a warning
MUCH_TOO_LONG = 0.01  # fraction of the characters in words that are too long, likewise
MUCH_LOST = 0.001  # fraction of words that lose their accents to another word, likewise


def report_vocabulary(
    pieces: list[str],
    kept: int,
    train: WordCounts,
    held_out: WordCounts,
    vocab: VocabConfig,
    whole: bool = False,
) -> dict:
    """Compile the report of a vocabulary: its size, its longest pieces, and how well it fits.

    kept: number of first pieces that come from an existing vocabulary.
    whole: whether the tokenizer is of another kind than BERT's.
    Measures the fit after a quarter, a half, three quarters and all of the merges, on the held-out
    words, or on the training words if none are held out.
    """
    size = sum(not piece.startswith("[unused") for piece in pieces[kept:]) + kept
    learned = [piece for piece in pieces[kept:size] if piece not in SPECIAL_TOKENS]
    merges = next((i for i in range(kept, size) if is_merge(pieces[i])), size)
    sizes = sorted({merges + (size - merges) * quarter // 4 for quarter in (1, 2, 3, 4)})
    words = held_out or train
    return {
        "size": len(pieces),
        "pieces_kept": kept,
        "words": sum(train.values()) + train.dropped + train.junk,
        "distinct_words": len(train),
        "words_too_long": train.junk,
        "share_too_long": round(share_too_long(train), 6),
        "occurrences_of_rare_words_dropped": train.dropped,
        "counts_too_small_by_at_most": train.shortfall,
        "longest_pieces": sorted(learned, key=lambda p: (-len(bare(p)), p))[:LONGEST],
        "measured_on": "held_out" if held_out else "train",
        "measured_words": sum(words.values()) + words.junk,
        "sizes": [
            {"size": n}
            | measure_fit(None if whole else build_tokenizer(pieces[:n], vocab), pieces[:n], words)
            for n in sizes
        ],
    }


def share_too_long(words: WordCounts) -> float:
    """Compute a lower bound for the share of characters that are in overlong words."""
    least = words.junk * (MAX_WORD_CHARACTERS + 1)
    return least / max(sum(len(word) * n for word, n in words.items()) + least, 1)


def bare(piece: str) -> str:
    return piece.removeprefix("##")


def is_merge(piece: str) -> bool:
    return len(bare(piece)) > 1 and piece not in SPECIAL_TOKENS


def measure_fit(
    tokenizer: Tokenizer | None, pieces: list[str], words: WordCounts
) -> dict[str, float]:
    """Measure how a tokenizer divides words; None: the words of `IdWords`. pieces: by id.

    Returns tokens per word (fertility), the fraction of words that are a single piece, and the
    fractions of tokens that are [UNK] or a single character of a longer word.
    """
    unknown = Vocabulary.of(pieces)["[UNK]"]
    junk = words.junk  # one [UNK] each
    lone = [len(bare(piece)) == 1 for piece in pieces]
    tokens = whole = unknowns = characters = 0
    for word, count in words.items():
        ids = [t.id for t in tokenizer.model.tokenize(word)] if tokenizer else read_ids(word)
        ids = ids or [unknown]
        tokens += count * len(ids)
        unknowns += count * ids.count(unknown)
        if len(ids) > 1:
            characters += count * sum(map(lone.__getitem__, ids))
        elif ids != [unknown]:
            whole += count
    tokens, unknowns = tokens + junk, unknowns + junk
    total = max(1, sum(words.values()) + junk)
    return {
        "tokens_per_word": round(tokens / total, 4),
        "whole_words": round(whole / total, 6),
        "unknown": round(unknowns / max(1, tokens), 6),
        "single_characters": round(characters / max(1, tokens), 6),
    }


def measure_accents(texts: Iterable[str], vocab: VocabConfig) -> dict:
    """Measure on a sample of the text what is lost when accents are dropped.

    A word is lost if another word that becomes the same as it is more frequent (German `schön`
    becomes `schon`; where `là` is the more frequent, it is `la` that is lost), or if it falls apart
    into more characters (Korean syllables into letters). Of two that are as frequent one is lost.
    Returns the fraction of `lost` words and up to three `examples`, (before, after), of the most
    frequent ones; {} if accents are kept.
    """
    normalizers = build_normalizer(vocab), build_normalizer(replace(vocab, strip_accents=False))
    if not normalizers[0].strip_accents:
        return {}
    drop, keep = map(WordSplitter, normalizers)
    counts = Counter(word for text in texts for word in keep(text) if word != END)
    same: dict[bytes, list[bytes]] = {}  # without accents -> words, the most frequent first
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        short = word if word.isascii() else b"".join(drop(word.decode()))
        same.setdefault(short, []).append(word)
    lost, examples = Counter(), {}
    for short, words in same.items():
        for i, word in enumerate(words):
            apart = len(short.decode()) > len(word.decode())
            if i or apart:
                lost[word] = counts[word]
                before = word if word != short else words[0]
                examples[word] = before.decode(), ("+" if apart else "").join(short.decode())
    examples = [examples[word] for word, _ in lost.most_common(3)]
    return {"lost": lost.total() / max(counts.total(), 1), "examples": examples}


def describe_accents(accents: dict) -> str | None:
    """Warn if much is lost with the accents; accents: from `measure_accents`."""
    if accents.get("lost", 0) <= MUCH_LOST:
        return None
    examples = ", ".join(f"{before} becomes {after}" for before, after in accents["examples"])
    return (
        f"{accents['lost']:.1%} of the words turn into other words when accents are dropped "
        f"({examples}); set vocab.strip_accents=false to keep accents"
    )


def describe_long_words(report: dict) -> str | None:
    """Warn if many words are as long as clauses, because their script has no spaces."""
    if report["share_too_long"] <= MUCH_TOO_LONG:
        return None
    return (
        f"at least {report['share_too_long']:.1%} of the text is in words of more than "
        f"{MAX_WORD_CHARACTERS} characters, which become [UNK], as in scripts without spaces "
        "between words; insert spaces, or use the tokenizer of a model of that language "
        "(vocab.path); data.masking=token masks pieces of shorter ones, not all at once"
    )


def print_report(report: dict) -> None:
    """Print the report of a vocabulary for a human reader."""
    for warning in (describe_accents(report["accents"]), describe_long_words(report)):
        if warning:
            print(red(f"warning: {warning}"))
    print(f"vocabulary: {report['size']:,} pieces, {report['distinct_words']:,} distinct words")
    if report["longest_pieces"]:
        print(f"  longest new pieces: {' '.join(report['longest_pieces'])}")
    if report["words_too_long"]:
        print(f"  words that are too long and become [UNK]: {report['words_too_long']:,}")
    if report["counts_too_small_by_at_most"]:
        print(
            "  rare words dropped to save memory: "
            f"{report['occurrences_of_rare_words_dropped']:,} occurrences; counts are too small "
            f"by at most {report['counts_too_small_by_at_most']:,}"
        )
    where = report["measured_on"].replace("_", "-")
    print(f"  on {report['measured_words']:,} {where} words:")
    print("      pieces  tokens per word  whole words   [UNK]  single characters of words")
    for row in report["sizes"]:
        print(
            f"  {row['size']:10,}  {row['tokens_per_word']:15.3f}  {row['whole_words']:11.1%}  "
            f"{row['unknown']:6.2%}  {row['single_characters']:6.2%}"
        )
    if report["sizes"][-1]["unknown"] > MUCH_UNKNOWN:
        print("  warning: many tokens are [UNK]; raise vocab.character_coverage, or choose a")
        print("  vocabulary that has the characters of this corpus")
