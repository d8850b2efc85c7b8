"""token store -> **pairs** -> masks: one epoch of sentence pairs as spans into the store, drawn
afresh each time.

What BERT's next-sentence rule means to give, and the published samplers do not: exactly half of the
pairs are random, a random B never comes from A's document, every token is in one pair, and neither
label can be told from the lengths. So nothing is drawn that could be drawn twice: documents are cut
into chunks, chunks into A and B, and for half of the chunks the B's are *exchanged* among chunks of
other documents whose B's are about as long.

Label 0: B follows A (IsNext); 1: it does not, as in BERT and in transformers.
"""

from dataclasses import dataclass

import numpy as np

from data_pipeline.errors import UserError
from data_pipeline.hashing import below, draws, key
from data_pipeline.token_store import TokenStore

PAIR = np.dtype(
    [("a_start", "i8"), ("a_end", "i8"), ("b_start", "i8"), ("b_end", "i8"), ("label", "i1")]
)
SPECIALS = {"nsp": 3, "sop": 3, "none": 2}  # [CLS] A [SEP] B [SEP], or [CLS] A [SEP]
BUCKET = 32  # chunks with B's of about equal length, half of which exchange them


@dataclass
class Segments:
    """What chunks are made of: the sentences of a store, those too long for a sequence cut at
    words.

    `offsets` int64 (segments + 1,) in tokens; `document` int64 (segments,) of each.
    """

    offsets: np.ndarray
    document: np.ndarray


def cut_segments(store: TokenStore, max_tokens: int) -> Segments:
    """The segments of a store: none longer than `max_tokens`, none across two sentences."""
    offsets = store.sentence_offsets
    extra = []
    for i in np.flatnonzero(np.diff(offsets) > max_tokens):
        start, end = int(offsets[i]), int(offsets[i + 1])
        while end - start > max_tokens:
            words = start + np.flatnonzero(
                store.starts_word(np.arange(start, start + max_tokens + 1))
            )
            # only a word longer than a whole sequence is cut inside
            start = int(words[-1]) if words[-1] > start else start + max_tokens
            extra.append(start)
    offsets = np.sort(np.concatenate([offsets, np.array(extra, np.int64)]))
    document_starts = store.sentence_offsets[store.document_offsets]
    document = np.searchsorted(document_starts, offsets[:-1], side="right") - 1
    return Segments(offsets, document)


def draw_pairs(
    store: TokenStore,
    segments: Segments,
    *,
    max_seq_length: int,
    objective: str,
    short_seq_prob: float,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """The pairs of one epoch in the order of training, as a `PAIR` array; a pure function of its
    arguments.

    Spans are in tokens of the store; `b_start == b_end` for `objective` "none". Left out are only
    texts of one word (which have no second half) and what an exchanged B is too long by, at the end
    of B, at a word. Raises `UserError` if the documents cannot give a random B (see
    `check_documents`).
    """
    max_tokens = max_seq_length - SPECIALS[objective]
    starts = chunk_starts(segments, max_tokens, short_seq_prob, key(seed, epoch, 0))
    edges = np.append(segments.offsets[starts], segments.offsets[-1])
    document = segments.document[starts]
    order = key(seed, epoch, 1)
    if objective == "none":
        pairs = make_pairs(edges[:-1], edges[1:], edges[1:], edges[1:], np.zeros(len(starts)))
        return shuffle(pairs, order)
    middle, inside = split_chunks(store, segments, starts, edges, key(seed, epoch, 2))
    whole = np.flatnonzero(middle > edges[:-1])  # chunks of two words or more
    a_start, b_start, b_end = edges[:-1][whole], middle[whole], edges[1:][whole]
    document, inside = document[whole], inside[whole]
    label = np.zeros(len(whole), np.int8)
    if objective == "sop":
        swap = balanced(len(whole), key(seed, epoch, 3))
        label[swap] = 1
        pairs = make_pairs(a_start, b_start, b_start, b_end, label)
        first, second = pairs[["a_start", "a_end"]][swap], pairs[["b_start", "b_end"]][swap]
        pairs["a_start"][swap], pairs["a_end"][swap] = second["b_start"], second["b_end"]
        pairs["b_start"][swap], pairs["b_end"][swap] = first["a_start"], first["a_end"]
        return shuffle(pairs, order)
    givers, takers = exchange(document, b_end - b_start, inside, key(seed, epoch, 3))
    label[takers] = 1
    a_end = b_start.copy()
    b_start[takers], b_end[takers] = b_start[givers], b_end[givers]
    pairs = make_pairs(a_start, a_end, b_start, b_end, label)
    truncate(store, pairs, max_tokens)
    return shuffle(pairs, order)


def chunk_starts(
    segments: Segments, max_tokens: int, short_seq_prob: float, stream: np.uint64
) -> np.ndarray:
    """The first segment of each chunk, int64: as many segments of one document as fit, from its
    start on.

    A share `short_seq_prob` of the chunks, and the first of each document, aim at a random shorter
    length, so that boundaries differ between epochs. Where a chunk starts depends on the chunk
    before; which segments are starts is found for all documents at once by following the jumps in
    powers of two.
    """
    offsets, document = segments.offsets, segments.document
    n = len(document)
    numbers = np.arange(n)
    draw = draws(stream, numbers)
    first = np.diff(document, prepend=-1) != 0
    short = (draw & np.uint64(0xFFFF)) < np.uint64(round(short_seq_prob * 65536))
    target = np.full(n, max_tokens)
    target[first] = max_tokens // 2 + below(draw[first], max_tokens - max_tokens // 2 + 1)
    target[short] = 2 + below(draw[short], max_tokens - 1)
    document_end = np.append(np.flatnonzero(first), n)[np.cumsum(first)]
    jump = np.searchsorted(offsets, offsets[:-1] + target, side="right") - 1
    jump = np.minimum(np.maximum(jump, numbers + 1), document_end)
    is_start = np.append(first, True)
    jump = np.append(jump, n)
    longest = np.bincount(document).max()
    reach = jump.copy()
    for _ in range(int(longest).bit_length()):
        is_start[reach[np.flatnonzero(is_start)]] = True
        reach = reach[reach]
    starts = np.flatnonzero(is_start[:-1])
    return borrow(offsets, document, starts, max_tokens)


def borrow(
    offsets: np.ndarray, document: np.ndarray, starts: np.ndarray, max_tokens: int
) -> np.ndarray:
    """`starts` with a segment moved to each chunk that has only one, from the chunk before if it
    has three."""
    size = np.diff(starts, append=len(document))
    before = np.append(0, size[:-1])
    same = np.append(False, document[starts[1:]] == document[starts[:-1]])
    end = offsets[np.append(starts[1:], len(document))]
    fits = end - offsets[np.maximum(starts - 1, 0)] <= max_tokens
    return starts - ((size == 1) & (before >= 3) & same & fits)


def split_chunks(
    store: TokenStore, segments: Segments, starts: np.ndarray, edges: np.ndarray, stream: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """(token where B starts in each chunk, whether that is inside a sentence).

    Between two segments where there are two; else at a word. A chunk of one word cannot be split:
    its own start.
    """
    size = np.diff(starts, append=len(segments.document))
    draw = draws(stream, starts)
    middle = segments.offsets[
        starts + np.minimum(1 + below(draw, np.maximum(size - 1, 1)), size - 1)
    ]
    single = np.flatnonzero(size == 1)
    middle[single] = word_near(store, edges[single], edges[single + 1], draw[single])
    inside = size == 1
    return middle, inside


def word_near(
    store: TokenStore, start: np.ndarray, end: np.ndarray, draw: np.ndarray
) -> np.ndarray:
    """A word start in each (start, end): the first at or after a random place, else the last before
    it."""
    place = start + 1 + below(draw, np.maximum(end - start - 1, 1))
    for step in (1, -1):
        open_ = np.flatnonzero((place > start) & (place < end))
        while len(open_):
            open_ = open_[~store.starts_word(place[open_])]
            place[open_] += step
            open_ = open_[(place[open_] > start[open_]) & (place[open_] < end[open_])]
        place[place >= end] = end[place >= end] - 1  # and back, from the last token
    return np.where((place > start) & (place < end), place, start)


def exchange(
    document: np.ndarray, length: np.ndarray, inside: np.ndarray, stream: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """(givers, takers): chunk `takers[i]` gets the B of `givers[i]`; half of all chunks, none from
    its document.

    Chunks are sorted by the length of B (those that start inside a sentence apart) and dealt into
    buckets. In each, half of the chunks take part, a document with at most half of the places;
    sorted by document and turned by half, no B meets its own document.
    """
    n = len(document)
    check_documents(document)
    draw = draws(stream, np.arange(n))
    by_length = np.lexsort((draw, length, inside))
    size = BUCKET
    while True:
        bucket = np.empty(n, np.int64)
        bucket[by_length] = np.minimum(np.arange(n) // size, max(n // size - 1, 0))
        # in each bucket, chunks in order of document, and their place in it
        order = np.lexsort((draw, document, bucket))
        runs = run_starts(bucket[order], document[order])
        place = np.arange(n) - np.maximum.accumulate(np.where(runs, np.arange(n), 0))
        places = np.bincount(bucket) // 2  # chunks of each bucket that exchange
        over = place >= (places // 2)[bucket[order]]
        # the first half of each bucket, those over their document's limit last
        chosen_order = np.lexsort((draw[order], over, bucket[order]))
        rank = np.empty(n, np.int64)
        firsts = np.cumsum(np.bincount(bucket)) - np.bincount(bucket)
        rank[chosen_order] = np.arange(n) - firsts[bucket[order][chosen_order]]
        chosen = rank < places[bucket[order]]
        if not (chosen & over).any():
            break
        if size >= n:
            raise AssertionError("check_documents lets no such corpus pass")
        size *= 2  # some document has more than three quarters of a bucket
    takers = order[chosen]
    firsts = (np.cumsum(places) - places)[bucket[takers]]
    turned = np.arange(len(takers)) - firsts + (places // 2)[bucket[takers]]
    return takers[firsts + turned % places[bucket[takers]]], takers


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """Whether each row differs from the one before in any column: bool (n,)."""
    return np.logical_or.reduce([np.diff(c, prepend=c[:1] - 1) != 0 for c in columns])


def check_documents(document: np.ndarray) -> None:
    """Raise `UserError` if one document has so many chunks that the others cannot give half of all
    B's."""
    n = len(document)
    largest = int(np.bincount(document).max()) if n else 0
    if n < 4 or n - largest < (n // 2) - (n // 2) // 2:
        raise UserError(
            f"next-sentence prediction needs random B's from other documents: {n:,} pairs can be "
            f"cut from the corpus, {largest:,} of them from one document (at most 75 % may be). "
            "Divide the documents otherwise (corpus.layout), add text, or set data.objective=sop "
            "or none"
        )


def balanced(n: int, stream: np.uint64) -> np.ndarray:
    """Half of 0..n-1, drawn."""
    return np.argsort(draws(stream, np.arange(n)), kind="stable")[: n // 2]


def truncate(store: TokenStore, pairs: np.ndarray, max_tokens: int) -> None:
    """Shorten pairs of more than `max_tokens`: the longer segment loses whole words at its end."""
    a, b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    for i in np.flatnonzero(a + b > max_tokens):
        longer, shorter = ("a", b[i]) if a[i] > b[i] else ("b", a[i])
        start = pairs[f"{longer}_start"][i]
        limit = start + max_tokens - shorter
        words = np.flatnonzero(store.starts_word(np.arange(start + 1, limit + 1)))
        # only a word longer than half a sequence is cut inside
        pairs[f"{longer}_end"][i] = start + 1 + words[-1] if len(words) else limit


def make_pairs(a_start, a_end, b_start, b_end, label) -> np.ndarray:
    pairs = np.empty(len(a_start), PAIR)
    for name, column in zip(PAIR.names, (a_start, a_end, b_start, b_end, label), strict=True):
        pairs[name] = column
    return pairs


def shuffle(pairs: np.ndarray, stream: np.uint64) -> np.ndarray:
    return pairs[np.argsort(draws(stream, np.arange(len(pairs))), kind="stable")]
