"""Sentence pairs: every rule of `sampling.pairs` against a slow rendering of it, and the
properties that the rules exist for, on real text and on corpora of awkward shapes."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_pairs import (
    Corpus,
    NotPossible,
    copied,
    corpus_of,
    draw,
    gives_no_pairs,
    key,
    make_store,
    reference_pairs,
    segments_of,
)

from data_pipeline.common import streams
from data_pipeline.common.errors import UserError
from data_pipeline.config import PairsConfig
from data_pipeline.sampling import pairs as module
from data_pipeline.sampling.exchange import BUCKET, exchange_second_segments
from data_pipeline.sampling.pairs import cut_segments, draw_pairs

LENGTHS = [32, 64, 128, 512]
RULES = {"objective": "nsp", "short_seq_prob": 0.1, "seed": 3, "epoch": 0}


def pairs_of(store, max_seq_length: int, **rules) -> np.ndarray:
    rules = RULES | rules
    special = module.SPECIALS[rules["objective"]]
    segments = cut_segments(store, max_seq_length - special, rules["objective"] == "sop")
    seed, epoch = rules.pop("seed"), rules.pop("epoch")
    data = PairsConfig(max_seq_length=max_seq_length, **rules)
    return draw_pairs(store, segments, data, seed, epoch)


def lengths(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]


def documents(store, places: np.ndarray) -> np.ndarray:
    starts = store.sentence_offsets[store.document_offsets]
    return np.searchsorted(starts, places, side="right") - 1


def uses(store, pairs: np.ndarray) -> np.ndarray:
    """In how many segments each token is."""
    counts = np.zeros(len(store) + 1, np.int64)
    for start, end in (("a_start", "a_end"), ("b_start", "b_end")):
        np.add.at(counts, pairs[start], 1)
        np.add.at(counts, pairs[end], -1)
    return np.cumsum(counts)[:-1]


def random_corpus(seed: int, n_documents: int, mean_sentences: float) -> Corpus:
    """Documents and sentences of about the spread of real ones; words of 1 to 5 pieces."""
    rng = np.random.default_rng(seed)
    corpus = []
    for n in np.ceil(rng.lognormal(np.log(mean_sentences), 1.0, n_documents)).astype(int):
        words = np.ceil(rng.lognormal(np.log(16), 0.7, n)).astype(int)
        pieces = rng.choice(5, int(words.sum()), p=[0.75, 0.15, 0.06, 0.03, 0.01]) + 1
        ends = np.cumsum(words)
        corpus.append([pieces[e - w : e].tolist() for e, w in zip(ends, words, strict=True)])
    return corpus


# words of one piece mostly, some of many, some longer than a sequence of 8 or 16 tokens
WORD = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 40))
SENTENCE = st.one_of(
    st.lists(st.just(1), min_size=1, max_size=3), st.lists(WORD, min_size=1, max_size=25)
)
DOCUMENT = st.one_of(
    st.lists(SENTENCE, min_size=1, max_size=1), st.lists(SENTENCE, min_size=1, max_size=12)
)
CORPUS = st.lists(DOCUMENT, min_size=1, max_size=12)
hypothesis_settings = settings(
    max_examples=150,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- against the slow rendering -------------------------------------------------------------------


def test_the_generator_is_splitmix64_of_key_and_counter() -> None:
    # the first three outputs of the published generator for state 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    given_state = streams.random_u64(np.uint64(1234567), np.arange(3))
    assert given_state.tolist() == published
    assert int(streams.derive_stream(5, 2**70 + 1, -1)) == key(5, 2**70 + 1, -1)
    stream = streams.derive_stream(1, 2)
    assert streams.random_u64(stream, np.arange(50)).tolist() == [
        draw(key(1, 2), i) for i in range(50)
    ]


@pytest.mark.parametrize("max_seq_length", LENGTHS)
@pytest.mark.parametrize(
    "objective, share", [("nsp", 0.0), ("nsp", 0.3), ("sop", 0.0), ("sop", 1.0), ("none", 0.0)]
)
def test_pairs_of_real_text_are_those_of_the_slow_rules(
    store, objective, share, max_seq_length
) -> None:
    rules = RULES | {"objective": objective, "single_segment_prob": share, "epoch": 2}
    found = pairs_of(store, max_seq_length, **rules)
    wanted = reference_pairs(
        corpus_of(store),
        max_seq_length=max_seq_length,
        bucket_size=BUCKET,
        run=module.RUN,
        **rules,
    )
    assert found.tolist() == wanted


@hypothesis_settings
@given(
    corpus=CORPUS,
    max_seq_length=st.sampled_from([8, 9, 16, 30]),
    objective=st.sampled_from(["nsp", "sop", "none"]),
    single_segment_prob=st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.0]),
    short_seq_prob=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 3),
    run=st.sampled_from([1, 3, 10, module.RUN]),
    copies=st.sampled_from([1, 1, 1, 2, 3]),
)
def test_pairs_of_any_corpus_are_those_of_the_slow_rules(
    corpus, max_seq_length, run, copies, **rules
) -> None:
    store = copied(corpus, copies)
    try:
        wanted = reference_pairs(
            [document for document in corpus for _ in range(copies)],
            max_seq_length=max_seq_length,
            bucket_size=BUCKET,
            run=run,
            copies=copies,
            **rules,
        )
    except NotPossible:
        wanted = None
    with mock.patch.object(module, "RUN", run):
        if not wanted:  # no pair at all is the same mistake
            with pytest.raises(UserError):
                pairs_of(store, max_seq_length, **rules)
        else:
            assert pairs_of(store, max_seq_length, **rules).tolist() == wanted


# --- what must hold on any corpus -----------------------------------------------------------------


@hypothesis_settings
@given(
    corpus=CORPUS,
    max_seq_length=st.sampled_from([8, 16, 30]),
    objective=st.sampled_from(["nsp", "sop"]),
)
def test_pairs_of_any_corpus_keep_the_promises(corpus, max_seq_length, objective) -> None:
    store = make_store(corpus)
    max_tokens = max_seq_length - 3
    try:
        pairs = pairs_of(store, max_seq_length, objective=objective)
    except UserError:
        rules = RULES | {"objective": objective}
        assert gives_no_pairs(corpus, max_seq_length=max_seq_length, **rules)
        return
    a, b = lengths(pairs)
    assert a.min() > 0 and b.min() > 0 and (a + b).max() <= max_tokens
    assert uses(store, pairs).max() == 1
    _, word_starts = segments_of(corpus, max_tokens)
    word_ends = word_starts | {len(store)}
    word_of = np.cumsum([place in word_starts for place in range(len(store))]) - 1
    word_length = np.bincount(word_of)[word_of]
    for pair in pairs:
        for start, end in ((pair["a_start"], pair["a_end"]), (pair["b_start"], pair["b_end"])):
            # only a word that alone is longer than half a sequence may be cut
            assert start in word_starts or word_length[start] > max_tokens // 2
            assert end in word_ends or word_length[end - 1] > max_tokens // 2
    of_a, of_b = documents(store, pairs["a_start"]), documents(store, pairs["b_start"])
    apart = of_a != of_b
    assert (documents(store, pairs["a_end"] - 1) == of_a).all()
    assert (documents(store, pairs["b_end"] - 1) == of_b).all()
    next_one = pairs["label"] == 0
    assert (pairs["b_start"] == pairs["a_end"])[next_one].all()
    if objective == "nsp":
        assert not apart[next_one].any() and apart[~next_one].all()
    else:
        assert not apart.any()
        assert (pairs["b_end"] == pairs["a_start"])[~next_one].all()
    # two documents can only swap B's two by two
    step = 2 if objective == "nsp" and len(np.unique(of_a)) == 2 else 1
    assert (~next_one).sum() == len(pairs) // 2 // step * step


@hypothesis_settings
@given(corpus=CORPUS, max_seq_length=st.sampled_from([8, 16, 30]))
def test_single_segments_hold_every_token_once(corpus, max_seq_length) -> None:
    store = make_store(corpus)
    pairs = pairs_of(store, max_seq_length, objective="none")
    a, b = lengths(pairs)
    assert (uses(store, pairs) == 1).all()
    assert not b.any() and (pairs["label"] == module.NO_PAIR).all()
    assert a.min() > 0 and a.max() <= max_seq_length - 2
    assert (documents(store, pairs["a_start"]) == documents(store, pairs["a_end"] - 1)).all()


@hypothesis_settings
@given(corpus=CORPUS, max_seq_length=st.sampled_from([8, 16, 30]))
def test_swapped_halves_leave_out_only_chunks_of_one_word(corpus, max_seq_length) -> None:
    store = make_store(corpus)
    segments, word_starts = segments_of(corpus, max_seq_length - 3, both_ways=True)
    try:
        left_out = uses(store, pairs_of(store, max_seq_length, objective="sop")) == 0
    except UserError:
        left_out = np.ones(len(store), bool)
    for start, end, _ in segments:
        inner = [place for place in range(start + 1, end) if place in word_starts]
        assert not left_out[start:end].any() or not inner


# --- real text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_seq_length", LENGTHS)
def test_half_of_the_pairs_are_random_and_from_another_document(store, max_seq_length) -> None:
    for epoch in range(5):
        pairs = pairs_of(store, max_seq_length, epoch=epoch)
        random = pairs["label"] == 1
        assert random.sum() == len(pairs) // 2
        apart = documents(store, pairs["a_start"]) != documents(store, pairs["b_start"])
        assert (apart == random).all()
        assert (pairs["a_end"] == pairs["b_start"])[~random].all()


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_share_of_the_chunks_is_whole_and_half_of_the_others_are_random(store, share) -> None:
    pairs = pairs_of(store, 64, single_segment_prob=share)
    single = pairs["label"] == -100
    assert (lengths(pairs[single])[1] == 0).all() and (lengths(pairs[~single])[1] > 0).all()
    assert abs(single.mean() - share) < 0.01  # a chunk of one word gives no pair
    assert abs(pairs["label"][~single].sum() - (~single).sum() / 2) <= 1
    assert (uses(store, pairs) <= 1).all()
    place = np.flatnonzero(single)  # they come mixed with the pairs
    assert place[: len(place) // 2].max() < 0.6 * len(pairs)


@pytest.mark.parametrize("max_seq_length", LENGTHS)
def test_all_but_half_a_percent_of_the_text_is_in_one_pair(store, max_seq_length) -> None:
    used = np.array([uses(store, pairs_of(store, max_seq_length, epoch=e)) for e in range(10)])
    assert used.max() == 1
    assert (used == 0).mean() <= 0.005
    # without exchange nothing is truncated: what is left out then are chunks of one word
    one_word = uses(store, pairs_of(store, max_seq_length, objective="sop")) == 0
    assert one_word.mean() <= 0.001


@pytest.mark.parametrize("max_seq_length", LENGTHS)
def test_segments_of_real_text_are_whole_words(store, max_seq_length) -> None:
    pairs = pairs_of(store, max_seq_length)
    a, b = lengths(pairs)
    assert (a + b).max() <= max_seq_length - 3
    for name in ("a_start", "b_start"):
        assert store.starts_word(pairs[name]).all()
    for name in ("a_end", "b_end"):
        inner = pairs[name][pairs[name] < len(store)]
        assert store.starts_word(inner).all()


def test_boundaries_and_partners_differ_between_epochs_and_seeds(store) -> None:
    first = pairs_of(store, 128)
    assert (first == pairs_of(store, 128)).all()
    partner = dict(first[first["label"] == 1][["a_start", "b_start"]].tolist())
    for other in (pairs_of(store, 128, epoch=1), pairs_of(store, 128, seed=4)):
        for name in ("a_start", "b_start"):
            # a chunk holds 4 sentences of the mean: with fixed chunks all starts come back
            assert np.isin(other[name], first[name]).mean() < 0.75
        again = dict(other[other["label"] == 1][["a_start", "b_start"]].tolist())
        both = set(partner) & set(again)
        assert len(both) > 50
        # partners from buckets sorted by length: most are others, even where chunks come back
        assert sum(partner[start] == again[start] for start in both) < 0.1 * len(both)
    # an A that was paired with what follows it is not always so
    labels = dict(first[["a_start", "label"]].tolist())
    other = dict(pairs_of(store, 128, epoch=1)[["a_start", "label"]].tolist())
    both = set(labels) & set(other)
    # independent halves agree in half: binomial, 5 sigma
    agree = sum(labels[start] == other[start] for start in both) / len(both)
    assert abs(agree - 0.5) < 2.5 / np.sqrt(len(both))


def test_a_b_from_inside_a_sentence_is_as_frequent_under_both_labels(store) -> None:
    for max_seq_length in (64, 128):
        counts = np.zeros(2)
        totals = np.zeros(2)
        for epoch in range(20):
            pairs = pairs_of(store, max_seq_length, epoch=epoch)
            inside = ~np.isin(pairs["b_start"], store.sentence_offsets)
            for label in (0, 1):
                counts[label] += inside[pairs["label"] == label].sum()
                totals[label] += (pairs["label"] == label).sum()
        share = counts.sum() / totals.sum()
        assert share > 0.01  # there are some
        # 5 sigma of the difference of two binomial shares; exchange within sorted buckets varies
        # less
        bound = 5 * np.sqrt(share * (1 - share) * (1 / totals[0] + 1 / totals[1]))
        assert abs(counts[0] / totals[0] - counts[1] / totals[1]) < bound


def test_a_cut_sentence_goes_on_with_a_cut_sentence_under_both_labels(store) -> None:
    # A that ends inside a sentence and B that starts a sentence would give label 1 away
    pairs = np.concatenate([pairs_of(store, 64, epoch=epoch) for epoch in range(10)])
    random = pairs[pairs["label"] == 1]
    a_open = ~np.isin(random["a_end"], store.sentence_offsets)
    b_open = ~np.isin(random["b_start"], store.sentence_offsets)
    # one bucket of each epoch may hold both kinds: a few of its 1,385 pairs
    assert (a_open != b_open).mean() < 0.025


# --- length tells nothing -------------------------------------------------------------------------


def advantage(features: np.ndarray, labels: np.ndarray, test: np.ndarray) -> float:
    """How much a table of the majority of each feature value, fitted outside `test`, beats the
    majority in it."""
    table = np.zeros((features.max() + 1, 2), np.int64)
    np.add.at(table, (features[~test], labels[~test]), 1)
    hits = (table.argmax(1)[features[test]] == labels[test]).mean()
    share = labels[test].mean()
    return hits - max(share, 1 - share)


def length_features(pairs: np.ndarray, max_seq_length: int) -> dict[str, np.ndarray]:
    a, b = lengths(pairs)
    bin_ = max_seq_length // 16
    return {
        "total": a + b,
        "A": a,
        "B": b,
        "A and B": a * max_seq_length + b,
        "A and B, coarse": a // bin_ * 64 + b // bin_,
        "full": (a + b >= max_seq_length - 3).astype(np.int64),
    }


@pytest.mark.parametrize("max_seq_length", [32, 64, 128])
def test_lengths_of_real_text_do_not_tell_the_label(store, max_seq_length) -> None:
    pairs = np.concatenate([pairs_of(store, max_seq_length, epoch=epoch) for epoch in range(100)])
    # fitted on half of the documents, tested on the other: text is not to be recognised
    half = np.random.default_rng(0).permutation(store.n_documents) % 2
    test = half[documents(store, pairs["a_start"])] == 1
    for name, features in length_features(pairs, max_seq_length).items():
        for side in (test, ~test):
            # 1 point, and 5 sigma of a share of one half (0.5 / sqrt(n))
            bound = 0.01 + 2.5 / np.sqrt(side.sum())
            assert advantage(features, pairs["label"], side) < bound, name


@pytest.mark.parametrize("max_seq_length", [64, 128, 512])
def test_lengths_of_a_larger_corpus_do_not_tell_the_label(max_seq_length) -> None:
    store = make_store(random_corpus(1, 700, 20.0))
    pairs = np.concatenate([pairs_of(store, max_seq_length, epoch=epoch) for epoch in range(40)])
    half = np.random.default_rng(0).permutation(store.n_documents) % 2
    test = half[documents(store, pairs["a_start"])] == 1
    for name, features in length_features(pairs, max_seq_length).items():
        bound = 0.01 + 2.5 / np.sqrt(test.sum())
        assert advantage(features, pairs["label"], test) < bound, name


def test_no_length_of_b_is_exchanged_more_often_where_few_lengths_occur() -> None:
    # then many buckets hold two lengths
    rng = np.random.default_rng(0)
    n = 90
    counts = np.zeros((2, 8))
    for _ in range(1000):
        length, draw = rng.integers(1, 8, n), rng.integers(0, 2**64, n, np.uint64)
        _, takers = exchange_second_segments(np.arange(n) % 9, length, np.zeros(n, bool), draw)
        is_random = np.bincount(takers, minlength=n)
        np.add.at(counts, (is_random, length), 1)
    total = counts.sum(0)
    assert (np.abs(counts[1] - total / 2) <= 2.5 * np.sqrt(total)).all(), counts  # 5 sigma


@pytest.mark.parametrize("max_seq_length", [64, 128, 512])
def test_lengths_do_not_tell_whether_halves_are_swapped(max_seq_length) -> None:
    # cut from the start on in all documents, the halves tell 3 points
    store = make_store(random_corpus(1, 700, 20.0))
    pairs = np.concatenate(
        [pairs_of(store, max_seq_length, objective="sop", epoch=epoch) for epoch in range(40)]
    )
    half = np.random.default_rng(0).permutation(store.n_documents) % 2
    test = half[documents(store, pairs["a_start"])] == 1
    features = length_features(pairs, max_seq_length)
    a, b = lengths(pairs)
    features["which is longer"] = (a > b).astype(np.int64)
    for name, values in features.items():
        bound = 0.01 + 2.5 / np.sqrt(test.sum())
        assert advantage(values, pairs["label"], test) < bound, name


@pytest.mark.parametrize("n_sentences", [1, 6])
def test_lengths_do_not_tell_the_order_of_halves_of_a_sentence(n_sentences) -> None:
    # documents of one sentence, and sentences longer than a sequence: split and cut from the left
    # alone, the first half is longer by a token, and the rest of a long sentence is always its end
    rng = np.random.default_rng(5)
    shapes = rng.integers(3, 30, (3000 // n_sentences, n_sentences))
    corpus = [[rng.integers(1, 4, n).tolist() for n in document] for document in shapes.tolist()]
    store = make_store(corpus)
    pairs = np.concatenate([pairs_of(store, 32, objective="sop", epoch=e) for e in range(10)])
    a, b = lengths(pairs)
    longer = np.where(pairs["label"] == 1, b - a, a - b)  # of the first half in the text
    assert abs(longer.mean()) < 0.1 + 5 * longer.std() / np.sqrt(len(longer))
    half = np.random.default_rng(0).permutation(store.n_documents) % 2
    test = half[documents(store, pairs["a_start"])] == 1
    assert advantage(a - b + 32, pairs["label"], test) < 0.01 + 2.5 / np.sqrt(test.sum())


def test_the_published_sampler_would_fail_the_length_test() -> None:
    # google-research/bert: a random B is drawn to fill the target, a true one is what is left; at
    # the end of a document what is left is short
    store = make_store(random_corpus(1, 300, 8.0))
    pairs = np.concatenate([pairs_of(store, 128, epoch=epoch) for epoch in range(20)])
    a, b = lengths(pairs)
    b = np.where(pairs["label"] == 1, 125 - a, b)
    test = np.random.default_rng(0).integers(0, 2, len(pairs)) == 1
    assert advantage(a + b, pairs["label"], test) > 0.05


# --- awkward corpora ------------------------------------------------------------------------------


def sentences(n: int, words: int = 6) -> list[list[int]]:
    return [[1] * words for _ in range(n)]


@pytest.mark.parametrize("n_sentences", range(2, 40))
def test_two_documents_are_enough(n_sentences) -> None:
    # 2 sentences a pair: every count of pairs, also those whose half is odd
    store = make_store([sentences(n_sentences), sentences(n_sentences)])
    pairs = pairs_of(store, 15, short_seq_prob=0.0)
    assert len(pairs) >= n_sentences // 2 * 2
    random = pairs["label"] == 1
    # B's can only be swapped two by two
    assert random.sum() == len(pairs) // 4 * 2
    assert (
        documents(store, pairs["a_start"])[random] != documents(store, pairs["b_start"])[random]
    ).all()


@pytest.mark.parametrize("n_sentences", [13, 15, 17])
def test_two_documents_beside_one_of_a_word_are_enough(n_sentences) -> None:
    # the word gives no pair: B's can only be swapped two by two all the same
    store = make_store([[[1]], sentences(n_sentences, 13), sentences(n_sentences, 13)])
    pairs = pairs_of(store, 16)
    assert len(pairs) == 2 * n_sentences and pairs["label"].sum() == n_sentences - 1


@pytest.mark.parametrize("others", [2, 5])
def test_a_dominating_document_works_up_to_three_quarters_of_the_pairs(others) -> None:
    # sentences as long as a sequence: each is a pair, in every epoch
    def store(dominant: int):
        rest = [sentences(20 // others, 13) for _ in range(others)]
        return make_store([sentences(dominant, 13), *rest])

    for epoch in range(5):
        pairs = pairs_of(store(60), 16, epoch=epoch)
        assert len(pairs) == 80 and pairs["label"].sum() == 40
        apart = documents(store(60), pairs["a_start"]) != documents(store(60), pairs["b_start"])
        assert (apart == (pairs["label"] == 1)).all()
    with pytest.raises(UserError, match=r"\b84 pairs.*\b64 of them from one document.*75 %"):
        pairs_of(store(64), 16)


def test_of_two_segments_of_one_length_the_first_keeps_the_odd_token() -> None:
    store, (a_start, a_end, b_start, b_end) = (
        make_store([sentences(4, 5)]),
        np.array([0, 10, 10, 20])[:, None],
    )
    module.truncate(store, a_start, a_end, b_start, b_end, 15)
    assert (a_end[0], b_end[0]) == (8, 17)


@pytest.mark.parametrize("max_seq_length", [64, 128])
def test_a_random_b_is_never_from_a_copy_of_its_document(max_seq_length) -> None:
    # of four documents thrice, every sixth B of another number is from a copy
    store = copied(random_corpus(5, 4, 30.0), 3)
    for epoch in range(5):
        pairs = pairs_of(store, max_seq_length, epoch=epoch)
        random = pairs["label"] == 1
        assert random.sum() == len(pairs) // 2
        of_a, of_b = (documents(store, pairs[name]) // 3 for name in ("a_start", "b_start"))
        assert ((of_a != of_b) == random).all()
    with pytest.raises(UserError, match="from one document"):
        pairs_of(copied([sentences(40)], 3), 16)


def test_documents_of_equal_lengths_are_no_copies() -> None:
    assert module.number_texts(make_store([sentences(9)] * 5)).tolist() == [0, 1, 2, 3, 4]
    assert module.number_texts(copied([sentences(9)] * 3, 2)).tolist() == [0, 0, 1, 1, 2, 2]
    assert module.number_texts(make_store([])).tolist() == []


def test_a_dominating_document_costs_little_text() -> None:
    corpus = random_corpus(2, 100, 20.0)
    corpus.append([sentence for document in random_corpus(4, 200, 20.0) for sentence in document])
    store = make_store(corpus)
    share = np.diff(store.sentence_offsets[store.document_offsets])[-1] / len(store)
    assert 0.6 < share < 0.74
    pairs = pairs_of(store, 128)
    assert pairs["label"].sum() == len(pairs) // 2
    assert (uses(store, pairs) == 0).mean() < 0.01


@pytest.mark.parametrize(
    ("corpus", "numbers"),
    [
        ([sentences(40)], r"\b\d+ pairs.*, (\d+) of them from one document"),
        (
            [sentences(1), sentences(1), sentences(1)],
            r"needs at least four pairs.* gives 3, 1 of them",
        ),
        ([sentences(100), sentences(1)], r"\b\d+ pairs.*\b\d+ of them from one document"),
    ],
)
def test_a_corpus_without_random_partners_is_a_clear_error(corpus, numbers) -> None:
    with pytest.raises(UserError, match=numbers) as error:
        pairs_of(make_store(corpus), 16)
    assert "sop" in str(error.value) and "corpus.layout" in str(error.value)
    for objective in ("sop", "none"):  # the choices that the message names do work
        assert len(pairs_of(make_store(corpus), 16, objective=objective))


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_an_empty_corpus_is_a_clear_error(objective) -> None:
    with pytest.raises(UserError):
        pairs_of(make_store([]), 16, objective=objective)


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_a_corpus_of_one_word_documents_is_a_clear_error(objective) -> None:
    with pytest.raises(UserError):
        pairs_of(make_store([[[1]]] * 20), 16, objective=objective)


def test_a_word_longer_than_two_sequences_is_cut_not_lost() -> None:
    store = make_store([[[1, 100, 1]], *[sentences(4)] * 6])
    for objective in ("sop", "none"):
        pairs = pairs_of(store, 16, objective=objective)
        assert sum(x.sum() for x in lengths(pairs)) >= len(store) - (
            100 if objective != "none" else 0
        )


def test_short_sequences_are_as_many_as_asked(store) -> None:
    # one draw in the middle of documents: with prob 0 all are full but for the last of a document,
    # the first, and what a next sentence would not fit in
    def full(short_seq_prob: float) -> float:
        pairs = pairs_of(store, 128, objective="sop", short_seq_prob=short_seq_prob)
        return (sum(lengths(pairs)) > 125 // 2).mean()

    assert full(0.0) > full(0.1) > full(0.5) > full(0.9)


def test_swapped_halves_are_half_of_the_pairs(store) -> None:
    pairs = pairs_of(store, 64, objective="sop")
    swapped = pairs["label"] == 1
    assert swapped.sum() == len(pairs) // 2
    assert (pairs["b_end"] == pairs["a_start"])[swapped].all()
    assert (pairs["a_end"] == pairs["b_start"])[~swapped].all()
