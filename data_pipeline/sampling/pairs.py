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

from data_pipeline.common.errors import UserError
from data_pipeline.common.streams import Stream, derive_stream, random_below, random_u64
from data_pipeline.sampling.token_store import StoreView, TokenStore, count_parts, find_run_edges

PAIR = np.dtype([(name, "i8") for name in ("a_start", "a_end", "b_start", "b_end", "label")])
LABELS = {"nsp": ("IsNext", "random"), "sop": ("in order", "swapped"), "none": ("", "")}
SPECIALS = {"nsp": 3, "sop": 3, "none": 2}  # [CLS] A [SEP] B [SEP], or [CLS] A [SEP]
RUN = 4096  # segments that are cut into chunks one after another
BUCKET = 4  # chunks with B's of about equal length, half of which exchange them


@dataclass
class Segments:
    """What chunks are made of: the sentences of a store, those too long for a sequence cut at
    words.

    `offsets` int64 (segments + 1,) in tokens; `document` int64 (segments,) of each; `texts` int64
    (documents,), one number for all copies of a document.
    """

    offsets: np.ndarray
    document: np.ndarray
    texts: np.ndarray


def deal_documents(store: TokenStore, n_parts: int, stream: np.uint64) -> list[np.ndarray]:
    """The documents of each of `n_parts` parts of the store, as `StoreView` takes them.

    Runs of documents, hundreds a part, are dealt by chance, so that each part is a sample of the
    whole. A part is empty only beside a document that is longer than a part.
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


def cut_segments(store: TokenStore | StoreView, max_tokens: int) -> Segments:
    """The segments of a store: none longer than `max_tokens`, none across two sentences."""
    offsets = store.sentence_offsets
    extra = []
    for i in np.flatnonzero(np.diff(offsets) > max_tokens):
        start, end = int(offsets[i]), int(offsets[i + 1])
        while end - start > max_tokens:
            inner = np.arange(start + 1, start + max_tokens + 1)
            words = inner[store.starts_word(inner)]
            # only a word longer than a whole sequence is cut inside
            start = int(words[-1]) if len(words) else start + max_tokens
            extra.append(start)
    offsets = np.sort(np.concatenate([offsets, np.array(extra, np.int64)]))
    document_starts = store.sentence_offsets[store.document_offsets]
    document = np.searchsorted(document_starts, offsets[:-1], side="right") - 1
    return Segments(offsets, document, number_texts(store))


def number_texts(store: TokenStore | StoreView) -> np.ndarray:
    """A number for each document, the same for copies: int64 (documents,).

    The copies that a source's weight asks for follow one another in the store.
    """
    starts = store.sentence_offsets[store.document_offsets]
    n_tokens, n_sentences = np.diff(starts), np.diff(store.document_offsets)
    alike = (n_tokens[1:] == n_tokens[:-1]) & (n_sentences[1:] == n_sentences[:-1])
    second = np.flatnonzero(alike) + 1
    before = store.spans(starts[second - 1], starts[second])
    these = store.spans(starts[second], starts[second + 1])
    is_copy = np.zeros(len(n_tokens), bool)
    is_copy[second] = [a.tobytes() == b.tobytes() for a, b in zip(before, these, strict=True)]
    return np.cumsum(~is_copy) - 1


def draw_pairs(
    store: TokenStore | StoreView,
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
    texts of one word (which have no second half) and what a pair with an exchanged B is too long
    by, at the end of its longer segment, at a word. Raises `UserError` if the documents cannot give
    a random B (see `check_documents`).
    """
    if not len(segments.document):
        raise UserError("the corpus has no text to make sequences of; add text")
    max_tokens = max_seq_length - SPECIALS[objective]
    cuts = derive_stream(seed, epoch, Stream.CHUNKS)
    starts = chunk_starts(segments, max_tokens, short_seq_prob, cuts)
    if objective == "sop":
        back = chunk_starts(mirrored(segments), max_tokens, short_seq_prob, cuts)
        starts = choose_directions(
            segments, starts, back, derive_stream(seed, epoch, Stream.DIRECTIONS)
        )
    edges = np.append(segments.offsets[starts], segments.offsets[-1])
    document = segments.document[starts]
    order = derive_stream(seed, epoch, Stream.ORDER)
    if objective == "none":
        return shuffle(order, edges[:-1], edges[1:], edges[1:], edges[1:], np.zeros_like(starts))
    middle, inside = split_chunks(
        store, segments, starts, edges, derive_stream(seed, epoch, Stream.SPLIT)
    )
    whole = np.flatnonzero(middle > edges[:-1])  # chunks of two words or more
    a_start, b_start, b_end = edges[:-1][whole], middle[whole], edges[1:][whole]
    a_end, label = b_start.copy(), np.zeros(len(whole), np.int64)
    draw = random_u64(derive_stream(seed, epoch, Stream.EXCHANGE), np.arange(len(whole)))
    if objective == "sop":
        if not len(whole):
            raise UserError(
                f"sentence order needs texts of two words or more, and none of {len(starts):,} is; "
                "divide the documents otherwise (corpus.layout) or set data.objective=none"
            )
        swap = np.argsort(draw, kind="stable")[: len(whole) // 2]
        a_start[swap], b_start[swap] = b_start[swap], a_start[swap]
        a_end[swap], b_end[swap] = b_end[swap], a_end[swap]
        label[swap] = 1
    else:
        text = segments.texts[document[whole]]
        givers, takers = exchange_second_segments(text, b_end - b_start, inside[whole], draw)
        b_start[takers], b_end[takers] = b_start[givers], b_end[givers]
        label[takers] = 1
        truncate(store, a_start, a_end, b_start, b_end, max_tokens)
    return shuffle(order, a_start, a_end, b_start, b_end, label)


def chunk_starts(
    segments: Segments, max_tokens: int, short_seq_prob: float, stream: np.uint64
) -> np.ndarray:
    """The first segment of each chunk, int64: as many segments of one document as fit, from its
    start on.

    A share `short_seq_prob` of the chunks, and the first of each document, aim at a random shorter
    length, so that boundaries differ between epochs. Where a chunk starts depends on the chunk
    before: all documents are gone through side by side, a long one in runs (a chunk starts at every
    `RUN`th segment), so that none holds up the rest.
    """
    offsets, document = segments.offsets, segments.document
    draw = random_u64(stream, np.arange(len(document)))
    is_start = run_starts(document)
    is_start[int(stream) % RUN :: RUN] = True
    first = np.flatnonzero(is_start)
    short = np.flatnonzero(draw & np.uint64(0xFFFF) < np.uint64(round(short_seq_prob * 65536)))
    limit = offsets[:-1] + max_tokens  # where the chunk ends that starts there
    limit[first] -= random_below(draw[first], max_tokens - max_tokens // 2 + 1)
    limit[short] = offsets[short] + 2 + random_below(draw[short], max_tokens - 1)
    at, end = first, np.append(first[1:], len(document))  # the chunk to be cut of each run
    while len(at):
        at = np.maximum(offsets.searchsorted(limit[at], side="right") - 1, at + 1)
        more = at < end
        at, end = at[more], end[more]
        is_start[at] = True
    return rebalance_single_segment_chunks(offsets, document, np.flatnonzero(is_start), max_tokens)


def mirrored(segments: Segments) -> Segments:
    """The segments from the last to the first."""
    offsets = segments.offsets[-1] - segments.offsets[::-1]
    return Segments(offsets, segments.document[::-1], segments.texts)


def choose_directions(
    segments: Segments, forth: np.ndarray, back: np.ndarray, stream: np.uint64
) -> np.ndarray:
    """`forth`, but in half of the documents, by chance, the chunks whose ends are `back` in the
    mirror.

    A sentence that does not fit begins the next chunk, so halves that come first are longer, and
    swapped ones would show by their lengths; cut from the end back, they are as much shorter.
    """
    back = np.append(0, len(segments.document) - back[:0:-1])
    turned = random_u64(stream, np.arange(segments.document[-1] + 1)) >> np.uint64(63) == 1
    of_forth, of_back = turned[segments.document[forth]], turned[segments.document[back]]
    return np.sort(np.concatenate([forth[~of_forth], back[of_back]]))


def rebalance_single_segment_chunks(
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
    store: TokenStore | StoreView,
    segments: Segments,
    starts: np.ndarray,
    edges: np.ndarray,
    stream: np.uint64,
) -> tuple[np.ndarray, np.ndarray]:
    """(token where B starts in each chunk, whether that is inside a sentence).

    Between two segments where there are two; else at a word. A chunk of one word cannot be split:
    its own start.
    """
    size = np.diff(starts, append=len(segments.document))
    draw = random_u64(stream, starts)
    middle = segments.offsets[
        starts + np.minimum(1 + random_below(draw, np.maximum(size - 1, 1)), size - 1)
    ]
    single = np.flatnonzero(size == 1)
    middle[single] = word_near(store, edges[single], edges[single + 1], draw[single])
    inside = size == 1
    return middle, inside


def word_near(
    store: TokenStore | StoreView, start: np.ndarray, end: np.ndarray, draw: np.ndarray
) -> np.ndarray:
    """A word start in each (start, end): the first at or after a random place, else the last before
    it."""
    place = start + 1 + random_below(draw, np.maximum(end - start - 1, 1))
    for step in (1, -1):
        open_ = np.flatnonzero((place > start) & (place < end))
        while len(open_):
            open_ = open_[~store.starts_word(place[open_])]
            place[open_] += step
            open_ = open_[(place[open_] > start[open_]) & (place[open_] < end[open_])]
        place[place >= end] = end[place >= end] - 1  # and back, from the last token
    return np.where((place > start) & (place < end), place, start)


def exchange_second_segments(
    document: np.ndarray, length: np.ndarray, inside: np.ndarray, draw: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(givers, takers): chunk `takers[i]` gets the B of `givers[i]`; half of all chunks, none from
    its document.

    Chunks are sorted by the length of B (those that start inside a sentence apart) and dealt into
    buckets. In each, half of the chunks take part, a document with at most half of the places;
    sorted by document and turned by half, no B meets its own document. Where a document has too
    much of a bucket, that one and its neighbour become one.
    """
    n = len(document)
    check_documents(document)
    by_length = sort_rows(inside, length, draw=draw)
    document, draw = document[by_length], draw[by_length]
    two = np.count_nonzero(np.bincount(document)) == 2
    giver = np.full(n, -1)
    size, rows = BUCKET, np.arange(n)  # of the buckets to be dealt with
    while True:
        bucket = np.minimum(rows // size, max(n // size - 1, 0))
        first = bucket * size
        places = np.bincount(bucket) // 2  # chunks of each bucket that exchange
        if two:
            places -= places % 2  # two documents can only swap B's
        # in each bucket by document, and which of them are over their document's limit
        by_document = first + sort_packed(
            bucket, document[rows], draw=draw[rows], last=rows - first
        )
        numbers = np.arange(len(rows))
        runs = run_starts(bucket, document[by_document])
        over = numbers - np.maximum.accumulate(np.where(runs, numbers, 0)) >= (places // 2)[bucket]
        # half of them, those over the limit last
        chosen_first = sort_packed(bucket, over, draw=draw[by_document], last=rows - first)
        chosen_first += numbers - (rows - first)
        chosen = np.zeros(len(rows), bool)
        chosen[chosen_first[rows - first < places[bucket]]] = True
        takers, of_taker = by_document[chosen], bucket[chosen]
        before, places = (np.cumsum(places) - places)[of_taker], places[of_taker]
        turned = (np.arange(len(takers)) - before + places // 2) % places
        giver[rows] = -1
        giver[takers] = takers[before + turned]
        failed = bucket[chosen & over]  # some document has more than three quarters of it
        if not len(failed):
            break
        if size >= n:
            raise AssertionError("check_documents lets no such corpus pass")
        size *= 2
        merged = np.minimum(np.arange(n) // size, max(n // size - 1, 0))
        rows = np.flatnonzero(np.isin(merged, np.minimum(failed // 2, merged[-1])))
    takers = np.flatnonzero(giver >= 0)
    return by_length[giver[takers]], by_length[takers]


def sort_rows(*columns: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """The order of rows by the columns, then by the upper 32 bits of `draw`: int64 (n,).

    Keys of 16 bits are what numpy sorts by radix, three times as fast as whole numbers.
    """
    halves = draw.astype("<u8").view("<u2").reshape(-1, 4).T[2:]
    keys = [column.astype(np.min_scalar_type(column.max())) for column in reversed(columns)]
    return np.lexsort([*halves, *keys])


def sort_packed(*columns: np.ndarray, draw: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Sort rows by the columns, the first of which ascends already, then by `draw`, then by `last`;
    returns `last` in that order.

    All in one integer a row: of `draw`, random uint64, as many bits as the others, non-negative,
    leave. The stable sort is the fast one of numbers that are nearly in order.
    """
    bits = [int(column.max()).bit_length() for column in (*columns, last)]
    room = max(64 - sum(bits), 0)
    assert sum(bits) <= 64, f"{len(last)} rows are too many to sort at once"
    packed = np.zeros(len(last), np.uint64)
    for column, size in zip(columns, bits, strict=False):
        packed = (packed << np.uint64(size)) | column.astype(np.uint64)
    if room:
        packed = (packed << np.uint64(room)) | (draw >> np.uint64(64 - room))
    packed = (packed << np.uint64(bits[-1])) | last.astype(np.uint64)
    packed.sort(kind="stable")
    return (packed & np.uint64(2 ** bits[-1] - 1)).astype(np.int64)


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


def truncate(
    store: TokenStore | StoreView,
    a_start: np.ndarray,
    a_end: np.ndarray,
    b_start: np.ndarray,
    b_end: np.ndarray,
    max_tokens: int,
) -> None:
    """Shorten pairs of more than `max_tokens`: the longer segment loses whole words at its end, and
    then, where both are longer than half a sequence, the other."""
    for _ in range(2):
        a, b = a_end - a_start, b_end - b_start
        for i in np.flatnonzero(a + b > max_tokens):
            longer = (a_start, a_end) if a[i] > b[i] else (b_start, b_end)
            start = longer[0][i]
            limit = start + max(max_tokens - min(a[i], b[i]), max_tokens // 2)
            words = np.flatnonzero(store.starts_word(np.arange(start + 1, limit + 1)))
            # only a word longer than half a sequence is cut inside
            longer[1][i] = start + 1 + words[-1] if len(words) else limit


def shuffle(stream: np.uint64, *columns: np.ndarray) -> np.ndarray:
    """A `PAIR` array of the columns, its rows in an order drawn from `stream`."""
    order = sort_rows(draw=random_u64(stream, np.arange(len(columns[0]))))
    rows = np.stack(columns, axis=1)
    return rows.take(order, axis=0).view(PAIR)[:, 0]
