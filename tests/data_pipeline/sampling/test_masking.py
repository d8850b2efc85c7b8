"""Whole-word masks: the vectorised rule against a slow rendering, the shares that it promises by
statistics, and on real text that only whole words are hidden and never a special token."""

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pairs import make_store, reference_chosen, reference_replaced, small_vocabulary

from data_pipeline.common.streams import derive_stream, random_u64
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import build_batch
from data_pipeline.sampling.masking import choose_words, replace_tokens
from data_pipeline.sampling.pairs import PAIR

CLS, SEP, MASK = 2, 3, 4
hypothesis_settings = settings(max_examples=200, derandomize=True)


def streams_of(n: int, seed: int = 0) -> np.ndarray:
    return random_u64(derive_stream(seed, 0, 4), np.arange(n))


def flat(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, length) of each word."""
    counts = [len(words) for words in sequences]
    return np.repeat(np.arange(len(counts)), counts), np.array(list(chain(*sequences)), np.int64)


def random_words(n_sequences: int, n_words: int, seed: int = 0) -> list[list[int]]:
    """Sequences of words of 1 to 6 pieces, as many of each."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 7, (n_sequences, n_words)).tolist()


# --- against the slow rendering -------------------------------------------------------------------


@hypothesis_settings
@given(
    sequences=st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=40), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**63),
    masked_lm_prob=st.sampled_from([0.01, 0.15, 0.5, 0.99]),
    max_predictions=st.sampled_from([None, 1, 2, 5, 20]),
)
def test_chosen_words_are_those_of_the_slow_rule(
    sequences, seed, masked_lm_prob, max_predictions
) -> None:
    streams = streams_of(len(sequences), seed)
    sequence, length = flat(sequences)
    found = choose_words(sequence, length, streams, masked_lm_prob, max_predictions)
    wanted, first = [], 0
    for words, stream in zip(sequences, streams.tolist(), strict=True):
        chosen = reference_chosen(words, stream, masked_lm_prob, max_predictions)
        wanted += [first + word for word in chosen]
        first += len(words)
    assert found.tolist() == wanted


def test_replacements_are_those_of_the_slow_rule() -> None:
    rng = np.random.default_rng(0)
    ordinary = small_vocabulary().ordinary
    streams = streams_of(300)
    words = [
        (s, w, k) for s in range(300) for w in (0, 1, 5, 200) for k in range(rng.integers(1, 6))
    ]
    sequence, word, within = np.array(words).T
    labels = rng.choice(ordinary, len(words))
    found = replace_tokens(labels, word, streams[sequence], MASK, ordinary)
    wanted = [
        reference_replaced(int(t), int(w), int(k), int(streams[s]), MASK, ordinary.tolist())
        for t, s, w, k in zip(labels, sequence, word, within, strict=True)
    ]
    assert found.tolist() == wanted


@pytest.mark.parametrize("words", [[1] * 3000, [2, 3000, 1]])
def test_words_of_a_long_sequence_are_chosen_by_the_same_rule(words) -> None:
    streams = streams_of(20)
    found = choose_words(*flat([words] * 20), streams, 0.4, None)
    wanted = [reference_chosen(words, stream, 0.4, None) for stream in streams.tolist()]
    assert found.tolist() == [i * len(words) + word for i, row in enumerate(wanted) for word in row]


def test_what_replaces_a_token_does_not_depend_on_the_sequence_before() -> None:
    # units of one number at the end of a sequence and at the start of the next
    unit, streams, ordinary = np.zeros(50, np.int64), streams_of(50), np.arange(7, 2007)
    labels = np.full(50, 5)
    together = replace_tokens(labels, unit, streams, MASK, ordinary, 0.0, 1.0)
    alone = [
        replace_tokens(labels[i : i + 1], unit[:1], streams[i : i + 1], MASK, ordinary, 0.0, 1.0)
        for i in range(50)
    ]
    assert together.tolist() == np.concatenate(alone).tolist()


def test_no_word_to_predict_is_no_error() -> None:
    nothing = np.empty(0, np.int64)
    assert len(replace_tokens(nothing, nothing, np.empty(0, np.uint64), MASK, np.arange(7, 9))) == 0


# --- shares ---------------------------------------------------------------------------------------


def rates(sequences: list[list[int]], chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share of the words of each number of pieces that were chosen, how many there are)."""
    _, length = flat(sequences)
    total = np.bincount(length)[1:]
    return np.bincount(length[chosen], minlength=len(total) + 1)[1:] / total, total


def budget_rule(sequences: list[list[int]], masked_lm_prob: float) -> list[int]:
    """The usual rule: words in random order, skipped where they exceed what is left to mask."""
    draw, chosen, first = random.Random(0), [], 0
    for words in sequences:
        budget = max(1, round(masked_lm_prob * sum(words)))
        for word in draw.sample(range(len(words)), len(words)):
            if words[word] <= budget:
                budget -= words[word]
                chosen.append(first + word)
        first += len(words)
    return chosen


@pytest.mark.parametrize("n_words", [9, 36])
def test_the_rate_is_the_same_for_words_of_any_number_of_pieces(n_words) -> None:
    sequences = random_words(300_000 // n_words, n_words)
    sequence, length = flat(sequences)
    chosen = choose_words(sequence, length, streams_of(len(sequences)), 0.15, None)
    share, total = rates(sequences, chosen)
    # binomial, 5 sigma: words of one sequence exclude each other, which only narrows it
    assert (np.abs(share - 0.15) < 5 * np.sqrt(0.15 * 0.85 / total)).all()
    # which the usual rule does not keep: it would not pass
    usual, _ = rates(sequences, np.array(budget_rule(sequences, 0.15)))
    assert usual[0] - usual[5] > 0.02


@pytest.mark.parametrize("masked_lm_prob", [0.15, 0.4])
def test_each_sequence_has_its_share_of_tokens_to_within_a_word(masked_lm_prob) -> None:
    sequences = [words[: 1 + i % 40] for i, words in enumerate(random_words(4000, 40))]
    sequence, length = flat(sequences)
    chosen = choose_words(sequence, length, streams_of(len(sequences)), masked_lm_prob, None)
    assert (np.diff(chosen) > 0).all()
    masked = np.bincount(sequence[chosen], length[chosen], minlength=len(sequences))
    total = np.bincount(sequence, length)
    longest = np.array([max(words) for words in sequences])
    assert (np.abs(masked - masked_lm_prob * total) < longest).all()
    # and of all tokens exactly the share: a deviation below a word (6) each, so sigma < 6 sqrt(n)
    assert abs(masked.sum() - masked_lm_prob * total.sum()) < 5 * 6 * np.sqrt(len(sequences))


def test_every_word_of_a_sequence_is_chosen_as_often_wherever_it_stands() -> None:
    sequences = [[1, 3, 1, 2, 1, 1, 4, 1, 2, 1]] * 20_000
    sequence, length = flat(sequences)
    chosen = choose_words(sequence, length, streams_of(20_000), 0.15, None)
    share = np.bincount(chosen % 10, minlength=10) / 20_000
    assert (np.abs(share - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 20_000)).all()
    # neighbours are not chosen together more often than others: drawn order, not an arc of the text
    hit = np.zeros((20_000, 10), bool)
    hit[chosen // 10, chosen % 10] = True
    both = (hit[:, :-1] & hit[:, 1:]).mean(0)
    assert (both < 0.15**2 + 5 * np.sqrt(0.15**2 / 20_000)).all()


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_max_predictions_bounds_what_is_predicted(bound) -> None:
    sequences = random_words(2000, 30)
    sequence, length = flat(sequences)
    streams = streams_of(len(sequences))
    free = choose_words(sequence, length, streams, 0.15, None)
    chosen = choose_words(sequence, length, streams, 0.15, bound)
    masked = np.bincount(sequence[chosen], length[chosen], minlength=len(sequences))
    # the bound is reached, and where it is not, no more than a word is missing
    assert masked.max() == bound
    wanted = np.minimum(np.bincount(sequence[free], length[free], minlength=2000), bound)
    assert (wanted - masked).max() < 6
    assert np.isin(chosen, free).all()
    # a bound that nothing meets changes nothing
    assert choose_words(sequence, length, streams, 0.15, 1000).tolist() == free.tolist()


def test_max_predictions_counts_tokens_not_places_on_the_arc() -> None:
    # 20 words of one piece, 3 to predict: a bound of 3 takes none away, one of 1 leaves one
    sequences = [[1] * 20] * 500
    sequence, length = flat(sequences)
    for bound in (1, 2, 3):
        chosen = choose_words(sequence, length, streams_of(500), 0.15, bound)
        assert (np.bincount(sequence[chosen], minlength=500) == bound).all()


def test_units_become_mask_random_or_stay_eight_to_one_to_one() -> None:
    n, ordinary = 60_000, np.arange(7, 2007)
    word = np.repeat(np.arange(n) % 50, 3)
    stream = np.repeat(streams_of(n // 50), 150)
    labels = np.full(3 * n, 5)  # not in `ordinary`, so that no random piece is the old one
    found = replace_tokens(labels, word, stream, MASK, ordinary).reshape(n, 3)
    masked, kept = found == MASK, found == 5
    drawn = ~masked & ~kept
    for fate, share in ((masked, 0.8), (drawn, 0.1), (kept, 0.1)):
        assert (fate.all(1) == fate.any(1)).all()  # one fate a unit
        assert abs(fate[:, 0].mean() - share) < 5 * np.sqrt(share * (1 - share) / n)
    # pieces of a unit are drawn apart, from all of the ordinary ones alike
    pieces = found[drawn[:, 0]]
    assert np.isin(pieces, ordinary).all()
    same = (pieces[:, 0] == pieces[:, 1]).mean()
    assert same < 1 / 2000 + 5 * np.sqrt(1 / 2000 / len(pieces))
    tenths = np.bincount((pieces.ravel() - 7) // 200, minlength=10) / pieces.size
    assert (np.abs(tenths - 0.1) < 5 * np.sqrt(0.09 / pieces.size)).all()


def test_fate_is_independent_of_the_sequence_next_to_it() -> None:
    # word 0 of one sequence next to word 0 of another is two words, not one
    found = replace_tokens(
        np.full(3000, 5), np.zeros(3000, np.int64), streams_of(3000), MASK, np.arange(7, 2007)
    )
    # 80 %, binomial, 5 sigma
    assert abs((found == MASK).mean() - 0.8) < 5 * np.sqrt(0.16 / 3000)
    drawn = found[(found != MASK) & (found != 5)]
    assert len(np.unique(drawn)) > 0.85 * len(drawn)  # some 300 of 2000 pieces: 7 % meet


# --- on real text ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(store):
    """A batch of an epoch of real text, as numpy arrays, and what stood there before."""
    source = BatchSource(store, PairsConfig(max_seq_length=64), seed=1)
    batch = source.batch(0, source.epoch_size(0))
    before = batch.input_ids.numpy().copy()
    before[batch.masked_positions.numpy()] = batch.masked_labels.numpy()
    return batch, before


def test_only_ordinary_pieces_may_replace_a_token(vocabulary) -> None:
    ordinary = {vocabulary.pieces[i] for i in vocabulary.ordinary}
    assert not {p for p in ordinary if p in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    assert not {p for p in ordinary if p.startswith("[unused")}
    assert len(ordinary) == sum(
        not (p.startswith("[") and p.endswith("]") and len(p) > 2) for p in vocabulary.pieces
    )
    assert "[" in ordinary or "[" not in vocabulary.pieces  # a bracket is text


def test_no_special_token_is_predicted_or_drawn(real, vocabulary) -> None:
    batch, before = real
    masked, ids = batch.masked_positions.numpy(), batch.input_ids.numpy()
    ends = batch.cu_seqlens.numpy()
    assert (np.diff(masked) > 0).all()
    assert not np.isin(masked, ends[:-1]).any() and not np.isin(masked, ends[1:] - 1).any()
    assert not np.isin(batch.masked_labels.numpy(), [0, CLS, SEP, MASK]).any()
    assert (np.bincount(batch.sequence_ids.numpy()[ids == SEP]) == 2).all()
    drawn = ids[masked][(ids[masked] != MASK) & (ids[masked] != before[masked])]
    assert len(drawn) > 300
    assert np.isin(drawn, vocabulary.ordinary).all()
    assert not np.isin(before, [MASK, 0]).any()


def test_words_are_chosen_whole_and_each_of_their_tokens_is_replaced_by_itself(
    real, vocabulary
) -> None:
    batch, before = real
    ids, masked = batch.input_ids.numpy(), np.zeros(len(before), bool)
    masked[batch.masked_positions.numpy()] = True
    starts = [i for i, token in enumerate(before) if not vocabulary.pieces[token].startswith("##")]
    pairs = np.zeros((2, 2))  # of the first two tokens of a word: is each [MASK]?
    for start, end in zip(starts, starts[1:] + [len(before)], strict=True):
        assert masked[start] == masked[end - 1] == masked[start:end].mean()
        if masked[start] and end - start > 1:
            first, second = ids[start : start + 2] == MASK
            pairs[int(first), int(second)] += 1
    n = pairs.sum()
    wanted = np.outer((0.2, 0.8), (0.2, 0.8))  # independent
    assert n > 500
    assert (np.abs(pairs / n - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / n)).all()


def test_real_sequences_have_fifteen_percent_of_their_tokens_masked(real, vocabulary) -> None:
    batch, before = real
    n = len(batch.next_sentence_label)
    sequence = batch.sequence_ids.numpy()
    masked = np.bincount(sequence[batch.masked_positions.numpy()], minlength=n)
    tokens = np.bincount(sequence, minlength=n) - 3  # without [CLS] and both [SEP]
    word = np.cumsum(~vocabulary.continues[before]) - 1
    longest = np.zeros(n, np.int64)
    np.maximum.at(longest, sequence, np.bincount(word)[word])
    assert (np.abs(masked - 0.15 * tokens) < longest).all()


def test_a_word_that_segments_cut_does_not_span_a_separator() -> None:
    # A and B both start inside a word of 60 pieces, as only giant words make it happen
    store = make_store([[[60, 3, 1]], [[60, 2]]])
    pairs = np.array([(10, 20, 20, 30, 0), (5, 15, 70, 80, 1)] * 200, PAIR)
    data = PairsConfig(max_seq_length=64, masked_lm_prob=0.4)
    batch = build_batch(store, data, pairs, streams_of(len(pairs))).padded()
    labels = batch["labels"].numpy()
    a, b = labels[:, 1:11] != -100, labels[:, 12:22] != -100
    assert (labels[:, [0, 11, 22]] == -100).all()
    assert (a.all(1) == a.any(1)).all() and (b.all(1) == b.any(1)).all()
    assert (a[:, 0] != b[:, 0]).any()  # two words, not one


def test_single_tokens_are_masked_each_by_itself(store, vocabulary) -> None:
    data = PairsConfig(max_seq_length=64, masking="token")
    source = BatchSource(store, data, seed=1)
    batch = source.batch(0, source.epoch_size(0))
    sequence = batch.sequence_ids.numpy()
    tokens = np.bincount(sequence) - 3
    masked = np.bincount(sequence[batch.masked_positions.numpy()], minlength=len(tokens))
    assert (np.abs(masked - 0.15 * tokens) < 1).all()
    # continuations are masked as often as any: binomial, 5 sigma
    labels = vocabulary.continues[batch.masked_labels.numpy()]
    before = batch.input_ids.numpy().copy()
    before[batch.masked_positions.numpy()] = batch.masked_labels.numpy()
    continuing = vocabulary.continues[before]
    share = labels.sum() / continuing.sum()
    assert abs(share - 0.15) < 5 * np.sqrt(0.15 * 0.85 / continuing.sum())
    # and without the piece before them, mostly: 85 %
    hit = np.zeros(len(before), bool)
    hit[batch.masked_positions.numpy()] = True
    alone = ~hit[np.flatnonzero(hit & continuing) - 1]
    assert abs(alone.mean() - 0.85) < 5 * np.sqrt(0.15 * 0.85 / len(alone))
