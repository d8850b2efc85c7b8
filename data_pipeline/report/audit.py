"""Audit the data that a run will train on: its text, vocabulary, pairs and masks.

The measures take pairs and token arrays and do not depend on the rule that drew them, so that tests
can apply them to other rules. On a large corpus they use the first pairs of the epoch, which are a
random sample because the order of training is random.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import decoders

from data_pipeline.common.arrays import ranges
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.baselines import (
    accuracy,
    half_of,
    share_of_words,
    unigram_entropy,
)
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import build_batch, lay_out_segments
from data_pipeline.sampling.pairs import NO_PAIR, PAIR
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary

PAIRS, SEQUENCES = 200_000, 50_000  # most pairs to measure, and most sequences to measure masks on
MASK_TOKENS, SIZES = 1 << 23, 2_000_000  # most tokens of those sequences; most lengths to sample
BLOCK = 512  # pairs to build batches of at once
DECODERS = {"Ġ": decoders.ByteLevel(), "▁": decoders.Metaspace()}  # by `Vocabulary.begin`
LONG = 6  # words with at least this many pieces are counted together
EXAMPLES = 12
CHINESE = "[\u2e80-\u9fff\uff00-\uff65]"  # characters and punctuation written without spaces


def histogram(values: np.ndarray, *, log: bool = False, bins: int = 32, top: float = 0) -> dict:
    """Count values in bins of equal width up to `top`, or with `log` in two bins per octave."""
    top = top or values.max(initial=2)
    if log:
        edges = np.unique(np.rint(2 ** (np.arange(2 * math.log2(top) + 2) / 2)))
    elif top <= 1:
        edges = np.linspace(0, top, bins + 1)
    else:
        width = math.ceil((top + 1) / bins)
        edges = np.arange(0, top + 1 + width, width)
    return {"edges": edges.tolist(), "counts": np.histogram(values, edges)[0].tolist()}


def decode(vocabulary: Vocabulary, tokens: np.ndarray) -> str:
    """Turn tokens into text: joins the pieces of words, and Chinese without spaces."""
    pieces = [vocabulary.pieces[token] for token in tokens]
    if vocabulary.begin is None:
        text = " ".join(pieces).replace(" ##", "")
    else:
        mask = vocabulary.pieces[vocabulary["[MASK]"]]
        pieces = [vocabulary.begin + piece if piece == mask else piece for piece in pieces]
        text = DECODERS[vocabulary.begin].decode(pieces).strip()
    return re.sub(f"(?<={CHINESE}) (?={CHINESE})", "", text)


def spell(vocabulary: Vocabulary, tokens: np.ndarray) -> str:
    """Turn the tokens of a word into text, without the marks of pieces."""
    if vocabulary.begin is None:
        return "".join(vocabulary.pieces[token].removeprefix("##") for token in tokens)
    return decode(vocabulary, tokens) or " "


# ------------------------------------------------------------------------------------- the text


def audit_corpus(store: TokenStore) -> dict:
    """Measure the lengths of documents and sentences, and describe the longest documents."""
    starts = store.document_starts
    sizes, sentences = np.diff(starts), np.diff(store.document_offsets)
    longest = np.argsort(-sizes, kind="stable")[:10].tolist()

    def spread(offsets: np.ndarray) -> dict:
        every = len(offsets) // SIZES + 1
        return histogram(offsets[1::every] - offsets[:-1:every], log=True)

    return {
        "document_tokens": spread(starts),
        "document_sentences": spread(store.document_offsets),
        "sentence_tokens": spread(store.sentence_offsets),
        "longest_documents": [
            {
                "document": i,
                "tokens": int(sizes[i]),
                "sentences": int(sentences[i]),
                "share": int(sizes[i]) / len(store),
                "begins": decode(
                    store.vocabulary, store.take(starts[i] + np.arange(min(sizes[i], 24)))
                ),
            }
            for i in longest
        ],
    }


def audit_vocabulary(store: TokenStore) -> dict:
    """Measure how well the vocabulary fits the text, and the unigram entropy of its tokens in
    nats."""
    vocabulary, counts = store.vocabulary, store.token_counts()
    bare = [vocabulary.show(i).removeprefix("##") for i in range(len(vocabulary))]
    single = np.array([len(piece) == 1 and piece.isalpha() for piece in bare])
    share = counts / counts.sum()
    words = counts[~vocabulary.continues].sum()
    if store.word_starts is not None:
        words = np.bitwise_count(store.word_starts).sum()
    return {
        "pieces": len(vocabulary),
        "tokens_per_word": float(len(store) / words),
        "unknown": float(share[vocabulary["[UNK]"]]),
        "single_letters": float(share[single].sum()),
        "never_used": float((share[vocabulary.ordinary] == 0).mean()),
        "unigram_entropy": unigram_entropy(counts),
    }


# ------------------------------------------------------------------------------------- pairs


def audit_pairs(pairs: np.ndarray, document_of: Callable[[np.ndarray], np.ndarray]) -> dict:
    """Measure the labels and lengths of a `PAIR` array, and how well lengths predict the labels.

    document_of: returns the document of each token position.
    The baselines are fitted on the pairs whose A is from one half of the documents and tested on
    the others (see `accuracy`).
    """
    label = pairs["label"].astype(bool)
    a, b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    of_a, of_b = document_of(pairs["a_start"]), document_of(pairs["b_start"])
    fit, elsewhere = half_of(of_a), of_a != of_b
    return {
        "pairs": len(pairs),
        "tested": int((~fit).sum()),
        "random": float(label.mean()),
        "random_same_document": int((label & ~elsewhere).sum()),
        "next_elsewhere": int((~label & (elsewhere | (pairs["b_start"] < pairs["a_end"]))).sum()),
        "empty": int(((a == 0) | (b == 0)).sum()),
        "longest": int((a + b).max()),
        "majority": majority(label[~fit]),
        "by_lengths": accuracy([a, b], label, fit),
        "by_total": accuracy([a + b], label, fit),
        "lengths": {
            name: [histogram(values[label == x], top=int((a + b).max())) for x in (False, True)]
            for name, values in (("a", a), ("b", b), ("total", a + b))
        },
    }


def majority(label: np.ndarray) -> float:
    """Compute the share of the more frequent label; 0.5 without any."""
    return float(max(label.mean(), 1 - label.mean())) if len(label) else 0.5


def audit_overlap(
    store: TokenStore, pairs: np.ndarray, document_of: Callable[[np.ndarray], np.ndarray]
) -> dict:
    """Measure how well words shared by A and B predict the labels.

    This is not a leak, since shared words are part of the meaning; it is a baseline to beat.
    """
    shared = share_of_words(store, pairs)
    label = pairs["label"].astype(bool)
    return {
        "shared_words": [
            float(shared[label == x].sum() / max((label == x).sum(), 1)) for x in (False, True)
        ],
        "histograms": [histogram(shared[label == x], top=1) for x in (False, True)],
        **accuracy([shared], label, half_of(document_of(pairs["a_start"]))),
    }


def audit_coverage(pairs: np.ndarray, sentence_offsets: np.ndarray) -> dict:
    """Count the tokens of a corpus that the pairs of an epoch use, use again, or leave out.

    Tokens left out are counted apart if they were cut off from a sentence of which other tokens are
    used (`cut`), or belong to whole sentences that are not used (`left_out`).
    """
    spans = np.concatenate(
        [np.stack([pairs[f"{x}_start"], pairs[f"{x}_end"]], 1) for x in "ab"], dtype=np.int64
    )
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0])]
    reached = np.maximum.accumulate(np.append(0, spans[:, 1]))
    gap_start, gap_end = reached, np.append(spans[:, 0], sentence_offsets[-1])
    gaps = gap_end > gap_start
    gap_start, gap_end = gap_start[gaps], gap_end[gaps]
    # the whole sentences of a gap, from the first that starts in it to the last that ends in it
    first = sentence_offsets[np.searchsorted(sentence_offsets, gap_start, side="left")]
    last = sentence_offsets[np.searchsorted(sentence_offsets, gap_end, side="right") - 1]
    left_out = int(np.maximum(last - first, 0).sum())
    tokens, missing = int(sentence_offsets[-1]), int((gap_end - gap_start).sum())
    return {
        "tokens": tokens,
        "covered": (tokens - missing) / tokens,
        "again": int((spans[:, 1] - spans[:, 0]).sum()) - (tokens - missing),
        "cut": missing - left_out,
        "left_out": left_out,
    }


def audit_boundaries(store: TokenStore, pairs: np.ndarray) -> int:
    """Count the segment boundaries that are inside a word."""
    edges = np.concatenate([pairs[name] for name in PAIR.names[:4]])
    edges = edges[(edges > 0) & (edges < len(store))]
    return int((~store.starts_word(edges)).sum())


# ------------------------------------------------------------------------------------- masks


def read_sequences(
    store: TokenStore, data: PairsConfig, pairs: np.ndarray, streams: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Build the sequences of pairs as training does: the array arguments of `audit_masks`.

    Returns them in order, and then the segment (0: A, 1: B) of each token.
    """
    parts = []
    for first in range(0, len(pairs), BLOCK):
        part = pairs[first : first + BLOCK]
        batch = build_batch(store, data, part, streams[first : first + BLOCK])
        segments, seen = lay_out_segments(part), batch.input_ids.numpy()
        places = ranges(segments.starts, segments.ends)
        ordinary = ranges(segments.text_starts, segments.text_ends)
        masked = np.zeros(len(seen), bool)
        masked[batch.masked_positions.numpy()] = True
        segment = batch.token_type_ids.numpy()[ordinary]
        sequence = batch.sequence_ids.numpy()[ordinary]
        starts = store.starts_word(places) | (data.masking == "token")
        starts |= np.diff(2 * sequence + segment, prepend=-1) != 0
        arrays = store.take(places), seen[ordinary], masked[ordinary], starts
        parts.append((*arrays, sequence + first, segment))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def audit_masks(
    original: np.ndarray,
    seen: np.ndarray,
    masked: np.ndarray,
    starts: np.ndarray,
    sequence: np.ndarray,
    vocabulary: Vocabulary,
) -> dict:
    """Measure how many tokens are masked, in which words, and what they are replaced by.

    The arrays (T,) cover the tokens of all sequences except special tokens:
    original, seen: the token, and the token that the model sees.
    masked, starts: bool, whether the token has to be predicted, and whether it starts a word.
    sequence: index of its sequence.
    """
    word = np.cumsum(starts) - 1
    pieces, hidden = np.bincount(word), np.bincount(word, masked)
    size = np.minimum(pieces, LONG)
    words, masked_words = np.bincount(size, minlength=LONG + 1), np.bincount(size, hidden > 0)
    labels, shown = original[masked], seen[masked]
    is_mask, is_kept = shown == vocabulary["[MASK]"], shown == labels
    is_random = ~is_mask & ~is_kept
    n = max(len(labels), 1)
    in_sequence = np.bincount(sequence, masked)
    share = in_sequence / np.bincount(sequence)
    return {
        "sequences": len(share),
        "tokens": len(original),
        "words_masked": int((hidden > 0).sum()),
        "masked": float(masked.mean()),
        "per_sequence": histogram(np.minimum(share, 0.4), bins=40, top=0.4),
        "most_in_a_sequence": int(in_sequence.max()),
        "without_masks": int((in_sequence == 0).sum()),
        "partly_masked_words": int(((hidden > 0) & (hidden < pieces)).sum()),
        "by_pieces": [
            {"pieces": k, "words": int(words[k]), "masked": float(masked_words[k] / words[k])}
            for k in range(1, LONG + 1)
            if words[k]
        ],
        "replaced": {
            "mask": float(is_mask.sum() / n),
            "random": float(is_random.sum() / n),
            "kept": float((~is_mask & is_kept).sum() / n),
        },
        # share of the random pieces that are the token itself by chance, and count as kept
        "drawn_same": float(np.isin(labels, vocabulary.ordinary).sum() / n)
        / len(vocabulary.ordinary),
        "special_pieces": int((~np.isin(shown[is_random], vocabulary.ordinary)).sum()),
        "changed_unmasked": int((original != seen)[~masked].sum()),
    }


def choose_examples(
    store: TokenStore, data: PairsConfig, pairs: np.ndarray, streams: np.ndarray
) -> list[dict]:
    """Decode the first pairs of each label for display.

    Returns for each the label and, for segments A and B, (text, what the model sees, kind) of each
    word; kind is mask if any of its tokens is [MASK], else random if any is, else kept, and "" if
    the word is not masked.
    """
    labels = np.unique(pairs["label"])
    first = [np.flatnonzero(pairs["label"] == x)[: EXAMPLES // len(labels)] for x in labels]
    chosen = np.sort(np.concatenate(first))
    original, seen, masked, starts, sequence, segment = read_sequences(
        store, data, pairs[chosen], streams[chosen]
    )
    pieces, mask = store.vocabulary.pieces, store.vocabulary["[MASK]"]
    continues = store.vocabulary.continues
    examples = [{"label": int(pairs["label"][i]), "segments": ([], [])} for i in chosen]
    word = np.flatnonzero(starts)
    for i, end in zip(word, np.append(word[1:], len(starts)), strict=True):
        text = "##" * bool(continues[original[i]]) + spell(store.vocabulary, original[i:end])
        shown, kind = " ".join(pieces[t] for t in seen[i:end]), ""
        if masked[i:end].any():
            is_mask, kept = (seen[i:end] == mask).any(), (seen[i:end] == original[i:end]).all()
            kind = "mask" if is_mask else "kept" if kept else "random"
        examples[sequence[i]]["segments"][segment[i]].append((text, shown, kind))
    return examples


# ------------------------------------------------------------------------------------- the whole


def audit_rule(store: TokenStore, epoch: np.ndarray, sequences: Sequence[np.ndarray]) -> dict:
    """Audit the pairs of an epoch and some of its sequences, drawn by any rule.

    epoch: `PAIR` array, in random order. sequences: the array arguments of `audit_masks`.
    """
    starts = store.document_starts
    pairs = epoch[epoch["label"] != NO_PAIR]

    def document_of(positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(starts, positions, side="right") - 1

    lengths = epoch["a_end"] - epoch["a_start"] + epoch["b_end"] - epoch["b_start"]
    result = {
        "epoch": {
            "sequences": len(epoch),
            "pairs": len(pairs),
            "random": int(pairs["label"].sum()),
            "tokens_per_sequence": float(lengths.mean()),
            "edges_inside_words": audit_boundaries(store, epoch[:PAIRS]),
            "lengths": histogram(lengths),
        },
        "coverage": audit_coverage(epoch, store.sentence_offsets),
        "masks": audit_masks(*sequences, store.vocabulary),
    }
    if len(pairs):
        result["pairs"] = audit_pairs(pairs[:PAIRS], document_of)
        result["overlap"] = audit_overlap(store, pairs[:PAIRS], document_of)
    return result


def audit_store(store: TokenStore, data: PairsConfig, seed: int) -> dict:
    """Audit a store, and the first epoch that a run with these settings draws from it."""
    source = BatchSource(store, data, seed)
    pairs, streams = source.examples(0, min(PAIRS, source.epoch_size(0)))
    n = min(SEQUENCES, MASK_TOKENS // data.max_seq_length)
    *sequences, _ = read_sequences(store, data, pairs[:n], streams[:n])
    return {
        "settings": vars(data) | {"seed": seed},
        "corpus": audit_corpus(store),
        "vocabulary": audit_vocabulary(store),
        **audit_rule(store, source.pairs(0), sequences),
        "examples": choose_examples(store, data, pairs, streams),
    }
