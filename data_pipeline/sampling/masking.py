"""pairs -> **masks** -> batches: which words of a batch are predicted, and what stands in their
place.

80 % of the chosen words become [MASK], 10 % random pieces, 10 % stay (Devlin et al. 2018, 3.1), a
draw a word, so that whole words are hidden whole. The share of masked words does not depend on
their number of pieces: the usual rule (take words in random order, skip those that exceed the
budget) masks 16 % of short words and 12 % of long ones.
"""

import numpy as np

from data_pipeline.common.streams import random_below, random_u64

HIGH24, LOW20 = np.uint64(0xFFFFFF << 40), np.uint64(0xFFFFF)
SPAN_P, LONGEST_SPAN = 0.2, 10  # of the geometric distribution of span lengths, in words


def choose_words(
    word_sequence: np.ndarray,
    word_length: np.ndarray,
    streams: np.ndarray,
    masked_lm_prob: float,
    max_predictions: int | None,
) -> np.ndarray:
    """The words to predict, of all sequences of a batch: ascending numbers, int64.

    `word_sequence` int64 (W,) ascending: sequence of each word; `word_length` int64 (W,) in tokens;
    `streams` uint64 (B,): the random stream of each sequence. The words of a sequence are laid on a
    circle in random order, one token a unit, and those are chosen that start on an arc of
    `masked_lm_prob` of it: each with exactly this probability, and in all that share of the tokens,
    to within a word. `max_predictions` drops words from the end of the arc.
    """
    # a row a sequence, a column a word: short rows sort many times faster than all words at once
    first_word = np.searchsorted(word_sequence, np.arange(len(streams) + 1))
    counts = np.diff(first_word)[:, None]
    column = np.arange(counts.max())
    is_word = column < counts
    # what is sorted: draw (24 bits, all ones where there is no word), column (20) and length (20)
    packed = random_u64(streams[:, None], column + 1) & HIGH24
    packed |= ~is_word * HIGH24
    packed |= column.astype(np.uint64) << np.uint64(20)
    packed[is_word] |= word_length.astype(np.uint64)
    packed.sort(1)
    length = (packed & LOW20).astype(np.int64)
    after = np.cumsum(length, 1)
    circle = after[:, -1:]
    turn = (random_u64(streams, np.zeros(1)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    position = after - length + turn[:, None] * circle
    position -= circle * (position >= circle)
    chosen = (position < masked_lm_prob * circle) & is_word
    if max_predictions is not None:
        first = np.where(is_word, position, circle).min(1, keepdims=True)
        chosen &= np.rint(position - first) + length <= max_predictions
    row = np.nonzero(chosen)[0]
    is_chosen = np.zeros(len(word_sequence), bool)
    is_chosen[first_word[row] + (packed[chosen] >> np.uint64(20) & LOW20).astype(np.int64)] = True
    return np.flatnonzero(is_chosen)


def starts_span(segment: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """Which words of each segment start a span, when spans are what is masked whole: bool (W,).

    `segment` int64 (W,) ascending: segment of each word, 2 i and 2 i + 1 those of sequence i;
    `streams` uint64 (B,). The segment is laid out in spans of 1 to 10 words, their lengths drawn
    from a geometric distribution with p = 0.2 (SpanBERT, Joshi et al. 2019, 3.1), so that the spans
    that `choose_words` takes are of those lengths and none crosses a [SEP].
    """
    numbers = np.arange(len(segment))
    first = np.searchsorted(segment, segment)  # word that each word's segment starts with
    counter = (segment % 2 + 1) * (1 << 40) + numbers - first
    draw = random_u64(streams[segment // 2], counter) >> np.uint64(11)
    share = np.cumsum((1 - SPAN_P) ** np.arange(LONGEST_SPAN))
    length = 1 + np.searchsorted(share[:-1] / share[-1], draw * 2.0**-53, side="right")
    before = np.cumsum(length) - length
    start = first + before - before[first]
    inside = start < np.searchsorted(segment, segment, side="right")
    out = np.zeros(len(segment), bool)
    out[start[inside]] = True
    return out


def replace_tokens(
    labels: np.ndarray,
    word: np.ndarray,
    stream: np.ndarray,
    mask_id: int,
    ordinary: np.ndarray,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> np.ndarray:
    """What stands in the place of the chosen tokens: int64 (M,).

    `labels` int64 (M,): the tokens themselves; `word` int64 (M,): number of the word of each, in
    its sequence; `stream` uint64 (M,): of its sequence; `ordinary` int64: the pieces that a random
    one is drawn from; the shares are of words, and what they leave stays as it is.
    """
    fate = (random_u64(~stream, word) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    out = np.where(fate < mask_share, mask_id, labels)
    starts = np.append(True, (word[1:] != word[:-1]) | (stream[1:] != stream[:-1]))
    place = np.arange(len(word))
    within = place - np.maximum.accumulate(np.where(starts, place, 0))
    drawn = np.flatnonzero((fate >= mask_share) & (fate < mask_share + random_share))
    counter = (word[drawn] + 1) * (1 << 20) + within[drawn]
    out[drawn] = ordinary[random_below(random_u64(~stream[drawn], counter), len(ordinary))]
    return out
