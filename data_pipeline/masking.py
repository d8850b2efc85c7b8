"""pairs -> **masks** -> batches: which words of a batch are predicted, and what stands in their
place.

80 % of the chosen words become [MASK], 10 % random pieces, 10 % stay (Devlin et al. 2018, 3.1), a
draw a word, so that whole words are hidden whole. The share of masked words does not depend on
their number of pieces: the usual rule (take words in random order, skip those that exceed the
budget) masks 16 % of short words and 12 % of long ones.
"""

import numpy as np

from data_pipeline.hashing import below, draws

MASKED, RANDOM = 0.8, 0.1  # shares of the chosen words; the rest stay as they are


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
    n, n_sequences = len(word_sequence), len(streams)
    words = np.arange(n, dtype=np.uint64)
    first_word = np.searchsorted(word_sequence, np.arange(n_sequences))
    place = words - first_word.astype(np.uint64)[word_sequence]
    draw = draws(streams[word_sequence], place + np.uint64(1))
    # one sort of sequence (16 bits), draw (24) and word (24) packed in an integer
    packed = (
        (word_sequence.astype(np.uint64) << np.uint64(48))
        | (draw >> np.uint64(40) << np.uint64(24))
        | words
    )
    packed.sort()
    order = (packed & np.uint64(0xFFFFFF)).astype(np.int64)
    length = word_length[order]
    before = np.cumsum(length) - length
    last_word = np.append(first_word[1:], n)
    start_of = np.append(before, length.sum())[first_word]  # tokens before each sequence
    total = np.append(before, length.sum())[last_word] - start_of
    turn = draws(streams, np.zeros(n_sequences, np.int64))
    turn = (turn >> np.uint64(11)).astype(np.float64) * 2.0**-53 * total
    position = before - start_of[word_sequence] + turn[word_sequence]
    circle = total[word_sequence]
    position = np.where(position >= circle, position - circle, position)
    chosen = position < masked_lm_prob * circle
    if max_predictions is not None:
        first = np.minimum.reduceat(position, first_word)  # where the first word on the arc starts
        used = np.rint(position - first[word_sequence]).astype(np.int64) + length
        chosen &= used <= max_predictions
    return np.sort(order[chosen])


def replace_tokens(
    labels: np.ndarray, word: np.ndarray, stream: np.ndarray, mask_id: int, ordinary: np.ndarray
) -> np.ndarray:
    """What stands in the place of the chosen tokens: int64 (M,).

    `labels` int64 (M,): the tokens themselves; `word` int64 (M,): number of the word of each, in
    its sequence; `stream` uint64 (M,): of its sequence; `ordinary` int64: the pieces that a random
    one is drawn from.
    """
    fate = (draws(~stream, word) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    starts = np.append(True, (word[1:] != word[:-1]) | (stream[1:] != stream[:-1]))
    within = np.arange(len(word)) - np.maximum.accumulate(np.where(starts, np.arange(len(word)), 0))
    pieces = ordinary[below(draws(~stream, (word + 1) * (1 << 20) + within), len(ordinary))]
    return np.where(fate < MASKED, mask_id, np.where(fate < MASKED + RANDOM, pieces, labels))
