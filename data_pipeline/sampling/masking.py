"""Choose the words that the model has to predict, and the tokens that it sees in their place.

80 % of the chosen tokens become [MASK], 10 % become random tokens and 10 % stay unchanged (Devlin
et al. 2018, 3.1). Words are chosen whole, but each token of a chosen word has its own draw, as in
google-research/bert. With one draw per word, a model would never see a half-hidden word, such as a
Chinese word with a single [MASK] inside: held-out loss on such masks is 6.5 instead of 5.1 nats. A
span has one draw, as in SpanBERT; an n-gram has one per token, as in ALBERT.

A word is chosen with the same probability whatever its number of tokens. The usual rule (take words
in random order, skip those that exceed the budget) masks 16 % of short words and 12 % of long ones.
"""

import numpy as np

from data_pipeline.common.streams import random_below, random_u64, random_unit

HIGH24, LOW20 = np.uint64(0xFFFFFF << 40), np.uint64(0xFFFFF)
SPANS = {  # value of data.masking -> how frequent spans of 1, 2, ... words are
    "span": 0.8 ** np.arange(10),  # geometric, SpanBERT (Joshi et al. 2019, 3.1)
    "ngram": 1 / np.arange(1, 4),  # ALBERT (Lan et al. 2019, 4.1)
}


def choose_words(
    word_sequence: np.ndarray,
    word_length: np.ndarray,
    streams: np.ndarray,
    masked_lm_prob: float,
    max_predictions: int | None,
) -> np.ndarray:
    """Select the words to predict in each sequence of a batch.

    Places a sequence's words on a circle in random order, one unit of arc per token, turns the
    circle by a random angle, and takes the words that start on the arc [0, `masked_lm_prob` of the
    circle). An example with `masked_lm_prob` 0.3 and the words A (4 tokens), B (1), C (3), D (2):

        random order D C A B, random turn 7.4

        0             2.4                     6.4   7.4         9.4 10
        +-------------+-----------------------+-----+-----------+---+
          end of C      A                       B     D           C
        ==================)  the arc, 0.3 x 10 = 3 tokens

    Only A starts on the arc and is chosen, with all of its 4 tokens. Because of the turn the start
    of a word lies anywhere on the circle with equal probability, so that it falls on the arc with
    probability 3 / 10, exactly and for every word. So 30 % of the tokens are chosen on average, and
    in each sequence 30 % to within one word. The usual rule with a budget of 3 tokens would never
    choose A, C one time in three, and B and D two times in three.

    word_sequence: int64 (W,), ascending; sequence index of each word.
    word_length: int64 (W,), tokens per word.
    streams: uint64 (B,), random stream of each sequence.
    max_predictions: most tokens to choose in a sequence; drops words from the end of the arc.
    Returns int64 (K,), ascending indices of the chosen words.
    """
    # one row per sequence, one column per word: sorting short rows is many times faster than
    # sorting all words at once
    first_word = np.searchsorted(word_sequence, np.arange(len(streams) + 1))
    counts = np.diff(first_word)[:, None]
    column = np.arange(counts.max())
    is_word = column < counts
    # sort key: draw (24 bits, all ones where there is no word), column (20 bits), length (20 bits)
    packed = random_u64(streams[:, None], column + 1) & HIGH24
    packed |= ~is_word * HIGH24
    packed |= column.astype(np.uint64) << np.uint64(20)
    packed[is_word] |= word_length.astype(np.uint64)
    packed.sort(1)
    length = (packed & LOW20).astype(np.int64)
    after = np.cumsum(length, 1)
    circle = after[:, -1:]
    turn = random_unit(streams, np.zeros(1))
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


def starts_span(segment: np.ndarray, streams: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Divide segments into spans for span masking: bool (W,), whether each word starts a span.

    Each segment becomes a row of spans of random lengths. `choose_words` then selects among spans
    as it does among words, so that masked spans have these lengths and none crosses a [SEP].

    shares: relative frequencies of spans of 1, 2, ... words; a row of `SPANS`.
    segment: int64 (W,), ascending; segment of each word: 2 i is A of sequence i, 2 i + 1 is B.
    streams: uint64 (B,), random stream of each sequence.
    """
    numbers = np.arange(len(segment))
    first = np.searchsorted(segment, segment)  # first word of each word's segment
    counter = (segment % 2 + 1) * (1 << 40) + numbers - first
    draw = random_unit(streams[segment // 2], counter)
    weight = np.cumsum(shares)
    length = 1 + np.searchsorted(weight[:-1] / weight[-1], draw, side="right")
    before = np.cumsum(length) - length
    start = first + before - before[first]
    inside = start < np.searchsorted(segment, segment, side="right")
    out = np.zeros(len(segment), bool)
    out[start[inside]] = True
    return out


def replace_tokens(
    labels: np.ndarray,
    unit: np.ndarray,
    stream: np.ndarray,
    mask_id: int,
    ordinary: np.ndarray,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> np.ndarray:
    """Draw the tokens that the model sees at the masked positions: int64 (M,).

    labels: int64 (M,), the original tokens.
    unit: int64 (M,), ascending in a sequence; tokens of one unit become [MASK], random tokens or
    stay unchanged together.
    stream: uint64 (M,), random stream of each token's sequence.
    ordinary: int64, the ids that random tokens are drawn from.
    mask_share, random_share: fractions of units that become [MASK] or random tokens; the rest stay
    unchanged.
    """
    fate = random_unit(~stream, unit)
    out = np.where(fate < mask_share, mask_id, labels)
    starts = np.append(True, (unit[1:] != unit[:-1]) | (stream[1:] != stream[:-1]))
    place = np.arange(len(unit))
    within = place - np.maximum.accumulate(np.where(starts, place, 0))
    drawn = np.flatnonzero((fate >= mask_share) & (fate < mask_share + random_share))
    counter = (unit[drawn] + 1) * (1 << 20) + within[drawn]
    out[drawn] = ordinary[random_below(random_u64(~stream[drawn], counter), len(ordinary))]
    return out
