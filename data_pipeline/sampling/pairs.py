"""Draw the sentence pairs of one epoch, as positions in the token store.

BERT's next-sentence task is meant to have these properties, and the published samplers miss them:
exactly half of the pairs are random, a random B never comes from A's document, every token is in
one pair, and the lengths do not reveal the label. Drawing random B's from the corpus loses all
four. Here, documents are cut into chunks and chunks into A and B, and then half of the chunks
exchange their B's with chunks of other documents whose B's are about as long:

    document x:  [A1 | B1] [A2 | B2]            pairs   A1 B1   IsNext
    document y:  [A3 | B3] [A4 | B4]                    A2 B3   random
                                                        A3 B2   random
    B2 and B3 are about as long: exchange them          A4 B4   IsNext

An exchange only moves segments around, so every token stays in exactly one pair and the random B's
are as long as the B's that they replace. `exchange_second_segments` has an example with numbers.

Label 0: B follows A (IsNext); 1: it does not. BERT and transformers number them like this too.
"""

from dataclasses import dataclass

import numpy as np

from data_pipeline.common.arrays import run_starts
from data_pipeline.common.errors import UserError
from data_pipeline.common.streams import Stream, derive_stream, random_below, random_u64
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.exchange import exchange_second_segments, sort_rows
from data_pipeline.sampling.token_store import StoreView, TokenStore, count_parts, find_run_edges

PAIR = np.dtype([(name, "i8") for name in ("a_start", "a_end", "b_start", "b_end", "label")])
NO_PAIR = -100  # label of a sequence of one segment, as torch's losses ignore it
LABELS = {"nsp": ("IsNext", "random"), "sop": ("in order", "swapped"), "none": ("", "")}
SPECIALS = {"nsp": 3, "sop": 3, "none": 2}  # at most: [CLS] A [SEP] B [SEP], or [CLS] A [SEP]
RUN = 4096  # most segments to cut into chunks one after another


@dataclass
class Segments:
    """The units that chunks are made of: sentences, cut at words if too long for a sequence.

    offsets: int64 (segments + 1,), token at which each segment starts, and the end.
    document: int64 (segments,), document of each segment.
    texts: int64 (documents,), a number for each text: copies of a document share one.
    """

    offsets: np.ndarray
    document: np.ndarray
    texts: np.ndarray


def deal_documents(store: TokenStore, n_parts: int, stream: np.uint64) -> list[np.ndarray]:
    """Divide the documents of a store at random among the `n_parts` parts of an epoch.

    Returns for each part int64 (runs, 2), the runs of documents that `StoreView` takes. A part has
    hundreds of runs from all over the store, so that it is a sample of the whole. A part can be
    empty only if some document is longer than a part.
    """
    edges = store.run_edges
    if edges is None or n_parts != count_parts(len(store)):
        edges = find_run_edges(store.sentence_offsets, store.document_offsets, n_parts)
    documents, starts = edges.T
    runs = np.stack([documents[:-1], documents[1:]], axis=1)
    dealt = sort_rows(draw=random_u64(stream, np.arange(len(runs))))
    tokens = np.diff(starts)[dealt]
    part = (np.cumsum(tokens) - tokens) * n_parts // len(store)
    return [runs[np.sort(dealt[part == number])] for number in range(n_parts)]


def cut_segments(
    store: TokenStore | StoreView, max_tokens: int, both_ways: bool = False
) -> Segments:
    """Cut the sentences of a store into segments of at most `max_tokens`, at words.

    both_ways: cut every second long sentence from its end, so that the short remainder is as often
    the first of its segments as the last; otherwise it would reveal the order to objective `sop`.
    """
    offsets = store.sentence_offsets
    extra = []
    for number, i in enumerate(np.flatnonzero(np.diff(offsets) > max_tokens)):
        start, end = int(offsets[i]), int(offsets[i + 1])
        while both_ways and number % 2 and end - start > max_tokens:
            inner = np.arange(end - max_tokens, end)
            words = inner[store.starts_word(inner)]
            end = int(words[0]) if len(words) else end - max_tokens  # as below
            extra.append(end)
        while end - start > max_tokens:
            inner = np.arange(start + 1, start + max_tokens + 1)
            words = inner[store.starts_word(inner)]
            # a word is cut only if it alone is longer than a sequence
            start = int(words[-1]) if len(words) else start + max_tokens
            extra.append(start)
    offsets = np.sort(np.concatenate([offsets, np.array(extra, np.int64)]))
    document = np.searchsorted(store.document_starts, offsets[:-1], side="right") - 1
    return Segments(offsets, document, number_texts(store))


def number_texts(store: TokenStore | StoreView) -> np.ndarray:
    """Number the documents so that copies of a text share a number: int64 (documents,).

    Compares each document with the one before only, because the copies that a source weight above 1
    makes are neighbours in the store.
    """
    starts = store.document_starts
    n_tokens, n_sentences = np.diff(starts), np.diff(store.document_offsets)
    alike = (n_tokens[1:] == n_tokens[:-1]) & (n_sentences[1:] == n_sentences[:-1])
    second = np.flatnonzero(alike) + 1
    before = store.spans(starts[second - 1], starts[second])
    these = store.spans(starts[second], starts[second + 1])
    is_copy = np.zeros(len(n_tokens), bool)
    is_copy[second] = [a.tobytes() == b.tobytes() for a, b in zip(before, these, strict=True)]
    return np.cumsum(~is_copy) - 1


def draw_pairs(
    store: TokenStore | StoreView, segments: Segments, data: PairsConfig, seed: int, epoch: int
) -> np.ndarray:
    """Draw the pairs of one epoch, in the order of training; a pure function of its arguments.

    Returns a `PAIR` array of token positions in the store. A share `single_segment_prob` of the
    chunks, and all of objective "none", stay whole: `b_start == b_end`, and label `NO_PAIR`.
    Raises `UserError` if the documents cannot give random B's (see `check_documents`).
    Two kinds of tokens are left out: texts of a single word, which cannot be split into A and B,
    and the end of the longer segment where a pair with an exchanged B exceeds a sequence.
    """
    if not len(segments.document):
        raise UserError("the corpus has no text to build sequences from; add text")
    objective, short_seq_prob = data.objective, data.short_seq_prob
    max_tokens = data.max_seq_length - SPECIALS[objective]
    cuts = derive_stream(seed, epoch, Stream.CHUNKS)
    starts = chunk_starts(segments, max_tokens, short_seq_prob, cuts)
    if objective == "sop":
        back = chunk_starts(mirrored(segments), max_tokens, short_seq_prob, cuts)
        directions = derive_stream(seed, epoch, Stream.DIRECTIONS)
        starts = choose_directions(segments, starts, back, directions)
    edges = np.append(segments.offsets[starts], segments.offsets[-1])
    order = derive_stream(seed, epoch, Stream.ORDER)
    share = 1.0 if objective == "none" else data.single_segment_prob
    single = choose_share(len(starts), share, derive_stream(seed, epoch, Stream.SINGLE))
    a, b = edges[:-1][single], edges[1:][single]
    whole = a, b, b, b, np.full(len(a), NO_PAIR)
    if single.all():
        return shuffle(order, *whole)
    split = derive_stream(seed, epoch, Stream.SPLIT)
    middle, inside = split_chunks(store, segments, starts, edges, split, objective == "sop")
    halved = np.flatnonzero((middle > edges[:-1]) & ~single)  # chunks of two words or more
    a_start, b_start, b_end = edges[:-1][halved], middle[halved], edges[1:][halved]
    a_end, label = b_start.copy(), np.zeros(len(halved), np.int64)
    draw = random_u64(derive_stream(seed, epoch, Stream.EXCHANGE), np.arange(len(halved)))
    if objective == "sop":
        if not len(halved):
            raise UserError(
                "sentence-order prediction needs texts of two words or more, but all "
                f"{(~single).sum():,} texts have a single word; change how documents are "
                "separated (corpus.layout) or set data.objective=none"
            )
        swap = np.argsort(draw, kind="stable")[: len(halved) // 2]
        a_start[swap], b_start[swap] = b_start[swap], a_start[swap]
        a_end[swap], b_end[swap] = b_end[swap], a_end[swap]
        label[swap] = 1
    else:
        text = segments.texts[segments.document[starts][halved]]
        givers, takers = exchange_second_segments(text, b_end - b_start, inside[halved], draw)
        b_start[takers], b_end[takers] = b_start[givers], b_end[givers]
        label[takers] = 1
        truncate(store, a_start, a_end, b_start, b_end, max_tokens)
    pairs = a_start, a_end, b_start, b_end, label
    return shuffle(order, *map(np.append, pairs, whole))


def choose_share(n: int, share: float, stream: np.uint64) -> np.ndarray:
    """Choose a share of `n` rows at random, rounded to whole rows: bool (n,)."""
    chosen = np.full(n, share == 1)
    if 0 < share < 1:
        chosen[sort_rows(draw=random_u64(stream, np.arange(n)))[: round(share * n)]] = True
    return chosen


def chunk_starts(
    segments: Segments, max_tokens: int, short_seq_prob: float, stream: np.uint64
) -> np.ndarray:
    """Cut documents into chunks, as many segments each as fit: int64, the first segment of each.

    A fraction `short_seq_prob` of the chunks and the first chunk of each document aim at a random
    shorter length, so that boundaries differ between epochs. Where a chunk starts depends on the
    chunk before, which forbids cutting the chunks of a document at once. So all documents are cut
    side by side, one chunk of each per iteration, and long documents in runs of `RUN` segments,
    so that none needs many more iterations than the others.
    """
    offsets, document = segments.offsets, segments.document
    draw = random_u64(stream, np.arange(len(document)))
    is_start = run_starts(document)
    is_start[int(stream) % RUN :: RUN] = True
    first = np.flatnonzero(is_start)
    short = np.flatnonzero(draw & np.uint64(0xFFFF) < np.uint64(round(short_seq_prob * 65536)))
    limit = offsets[:-1] + max_tokens  # latest end of a chunk that starts at each segment
    limit[first] -= random_below(draw[first], max_tokens - max_tokens // 2 + 1)
    limit[short] = offsets[short] + 2 + random_below(draw[short], max_tokens - 1)
    at, end = first, np.append(first[1:], len(document))  # current chunk and end of each run
    while len(at):
        at = np.maximum(offsets.searchsorted(limit[at], side="right") - 1, at + 1)
        more = at < end
        at, end = at[more], end[more]
        is_start[at] = True
    return rebalance_single_segment_chunks(offsets, document, np.flatnonzero(is_start), max_tokens)


def mirrored(segments: Segments) -> Segments:
    """Reverse the order of the segments, so that chunks can be cut from the end of documents."""
    offsets = segments.offsets[-1] - segments.offsets[::-1]
    return Segments(offsets, segments.document[::-1], segments.texts)


def choose_directions(
    segments: Segments, forth: np.ndarray, back: np.ndarray, stream: np.uint64
) -> np.ndarray:
    """Choose for each document at random whether its chunks are cut from its start or its end.

    forth: int64, first segments of the chunks cut from the start.
    back: int64, the same for the `mirrored` segments.
    Returns int64, ascending first segments of the chosen chunks. Cut from the start, a sentence
    that does not fit begins the next chunk, which makes first halves longer on average: a swapped
    pair would show by its lengths. Cut from the end, first halves are shorter by the same amount.
    """
    back = np.append(0, len(segments.document) - back[:0:-1])
    turned = random_u64(stream, np.arange(segments.document[-1] + 1)) >> np.uint64(63) == 1
    of_forth, of_back = turned[segments.document[forth]], turned[segments.document[back]]
    return np.sort(np.concatenate([forth[~of_forth], back[of_back]]))


def rebalance_single_segment_chunks(
    offsets: np.ndarray, document: np.ndarray, starts: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Move a segment from the chunk before to each chunk that has only one; returns the new
    `starts`.

    The chunk before must be of the same document and have three segments or more, and the segment
    must fit. A chunk of one segment could be split into A and B only inside a sentence.
    """
    size = np.diff(starts, append=len(document))
    before = np.append(0, size[:-1])
    same = np.append(False, document[starts[1:]] == document[starts[:-1]])
    end = offsets[np.append(starts[1:], len(document))]
    fits = end - offsets[np.maximum(starts - 1, 0)] <= max_tokens
    return starts - ((size == 1) & (before >= 3) & same & fits)


def split_chunks(
    store: TokenStore | StoreView,
    segments: Segments,
    starts: np.ndarray,
    edges: np.ndarray,
    stream: np.uint64,
    both_ways: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Split each chunk at random into A and B.

    Returns the token at which B starts, int64 (chunks,), and whether that is inside a segment, bool
    (chunks,). Splits between two segments if the chunk has two or more, else at a word (see
    `word_near` for `both_ways`). A chunk of one word cannot be split: its B starts at the start of
    the chunk.
    """
    size = np.diff(starts, append=len(segments.document))
    draw = random_u64(stream, starts)
    middle = segments.offsets[starts + 1 + random_below(draw, np.maximum(size - 1, 1))]
    inside = size == 1
    single = np.flatnonzero(inside)
    middle[single] = word_near(store, edges[single], edges[single + 1], draw[single], both_ways)
    return middle, inside


def word_near(
    store: TokenStore | StoreView,
    start: np.ndarray,
    end: np.ndarray,
    draw: np.ndarray,
    both_ways: bool,
) -> np.ndarray:
    """Find a random word start inside each (start, end): int64 (n,), `start` where there is none.

    Takes the first word start at or after a random token, or the last one before it. This makes
    the part before it the longer one on average, by half a word.
    both_ways: search in the other direction first for a random half, so that neither part is
    longer.
    """
    place = start + 1 + random_below(draw, np.maximum(end - start - 1, 1))
    first = np.where(both_ways & (draw & np.uint64(1) == 1), -1, 1)
    for step in (first, -first):
        place = np.clip(place, start + 1, end - 1)  # keep inside the range
        open_ = np.flatnonzero((place > start) & (place < end))
        while len(open_):
            open_ = open_[~store.starts_word(place[open_])]
            place[open_] += step[open_]
            open_ = open_[(place[open_] > start[open_]) & (place[open_] < end[open_])]
    return np.where((place > start) & (place < end), place, start)


def truncate(
    store: TokenStore | StoreView,
    a_start: np.ndarray,
    a_end: np.ndarray,
    b_start: np.ndarray,
    b_end: np.ndarray,
    max_tokens: int,
) -> None:
    """Shorten pairs that exceed `max_tokens`, in place.

    Drops whole words from the end of the longer segment, which keeps at least half a sequence (less
    a word); if that is not enough, shortens the other segment in the same way.
    """
    for _ in range(2):
        a, b = a_end - a_start, b_end - b_start
        for i in np.flatnonzero(a + b > max_tokens):
            longer = (a_start, a_end) if a[i] > b[i] else (b_start, b_end)
            start = longer[0][i]
            limit = start + max(max_tokens - min(a[i], b[i]), max_tokens // 2)
            words = np.flatnonzero(store.starts_word(np.arange(start + 1, limit + 1)))
            # a word is cut only if it alone is longer than half a sequence
            longer[1][i] = start + 1 + words[-1] if len(words) else limit


def shuffle(stream: np.uint64, *columns: np.ndarray) -> np.ndarray:
    """Make a `PAIR` array of the columns, with its rows in a random order drawn from `stream`."""
    order = sort_rows(draw=random_u64(stream, np.arange(len(columns[0]))))
    rows = np.stack(columns, axis=1)
    return rows.take(order, axis=0).view(PAIR)[:, 0]
