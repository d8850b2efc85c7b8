"""Exchange the second segments of half of the pairs, so that exactly half become random, no random
B comes from its A's document, and lengths do not reveal the label.

Works on columns of numbers alone: the document of each chunk and the length of its B.
"""

import numpy as np

from data_pipeline.common.arrays import run_starts
from data_pipeline.common.errors import UserError

BUCKET = 4  # chunks with B's of about equal length; half of them exchange their B's


def exchange_second_segments(
    document: np.ndarray, length: np.ndarray, inside: np.ndarray, draw: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange the B's of half of the chunks, each with a B of similar length from another
    document.

    document, length, inside: (chunks,), document of each chunk, tokens of its B, and whether its B
    starts inside a segment. draw: uint64 (chunks,), random numbers.
    Returns (givers, takers), int64: chunk `takers[i]` gets the B of chunk `givers[i]`. Both list
    the same chunks, so every B is used exactly once. Raises `UserError` (see `check_documents`).

    Sorts the chunks by the length of B (those split inside a segment apart) and divides them into
    buckets of `BUCKET`. In each bucket half of the chunks exchange their B's:

        chunk         0   1   2   3   4   5   6   7
        document      x   x   x   y   y   z   z   z
        tokens of B   9  30  12  11  33  10  31  29

        sorted by tokens of B    0  5  3  2   |   7  1  6  4      two buckets of 4
        exchange (at random)        5     2   |   7  1            half of each bucket
        receive the B of            2     5   |   1  7            10 <-> 12 and 29 <-> 30 tokens

    Exactly half of the pairs become random, and their B's are as long as the others, because each
    bucket gives away the same B's that it takes back. No document may have more than half of the
    exchanging chunks of a bucket: sorted by document and rotated by half of their number, no chunk
    then receives a B of its own document. If one document has too many of a bucket's chunks for
    this limit, the bucket is merged with its neighbour and drawn again.
    """
    n = len(document)
    check_documents(document)
    by_length = sort_rows(inside, length, draw=draw)
    # use the lower half of the draws: the upper half orders B's of equal length, so choosing by it
    # would choose the longer B's in a bucket with two lengths
    document, draw = document[by_length], draw[by_length] << np.uint64(32)
    swaps_only = np.count_nonzero(np.bincount(document)) == 2  # all that two documents can do
    giver = np.full(n, -1)
    size, rows = BUCKET, np.arange(n)  # of the buckets that are still to be drawn
    while True:
        bucket = bucket_of(rows, size, n)
        places = np.bincount(bucket) // 2  # chunks of each bucket that exchange
        if swaps_only:
            places -= places % 2
        takers, of_taker, failed = choose_takers(rows, bucket, size, places, document, draw)
        giver[rows] = -1
        giver[takers] = rotate_by_half(takers, of_taker, places)
        if not len(failed):
            break
        if size >= n:
            raise AssertionError("check_documents should have refused this corpus")
        size *= 2
        merged = bucket_of(np.arange(n), size, n)
        rows = np.flatnonzero(np.isin(merged, np.minimum(failed // 2, merged[-1])))
    takers = np.flatnonzero(giver >= 0)
    return by_length[giver[takers]], by_length[takers]


def check_documents(document: np.ndarray) -> None:
    """Raise `UserError` if one document has too many of the chunks for B's to be exchanged."""
    n = len(document)
    largest = int(np.bincount(document).max()) if n else 0
    choices = (
        "Change how documents are separated (corpus.layout), add text, or set data.objective=sop "
        "or none"
    )
    if n < 4:
        raise UserError(
            "next-sentence prediction needs at least four pairs, to exchange the B's of two: the "
            f"corpus gives {n:,}, {largest:,} of them from one document. {choices}"
        )
    if n - largest < (n // 2) - (n // 2) // 2:
        raise UserError(
            "next-sentence prediction takes random B's from other documents, but the corpus gives "
            f"{n:,} pairs, {largest:,} of them from one document (75 % at most may be). " + choices
        )


def bucket_of(rows: np.ndarray, size: int, n: int) -> np.ndarray:
    """Number the bucket of each of `n` rows; the last bucket takes those that do not fill one."""
    return np.minimum(rows // size, max(n // size - 1, 0))


def choose_takers(
    rows: np.ndarray,
    bucket: np.ndarray,
    size: int,
    places: np.ndarray,
    document: np.ndarray,
    draw: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose at random the rows of each bucket that exchange, at most half from one document.

    rows, bucket: all rows of some buckets, ascending, and the bucket of each. size: of the buckets.
    places: rows to choose in each bucket. document, draw: of each row, by its number.
    Returns the chosen rows, in the order of bucket and document; the bucket of each; and the
    buckets that failed, because one document has too many of their rows for that limit.
    """
    first = bucket * size
    by_document = first + sort_packed(bucket, document[rows], draw=draw[rows], last=rows - first)
    numbers = np.arange(len(rows))
    runs = run_starts(bucket, document[by_document])
    rank = numbers - np.maximum.accumulate(np.where(runs, numbers, 0))  # among its document's
    is_over = rank >= (places // 2)[bucket]
    # those beyond the limit come last, so that they are chosen only if nothing else is left
    order = sort_packed(bucket, is_over, draw=draw[by_document], last=rows - first)
    order += numbers - (rows - first)
    chosen = np.zeros(len(rows), bool)
    chosen[order[rows - first < places[bucket]]] = True
    return by_document[chosen], bucket[chosen], bucket[chosen & is_over]


def rotate_by_half(takers: np.ndarray, bucket: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Rotate the rows of each bucket by half of their number: int64 (n,), the giver of each.

    takers: rows in the order of bucket and document. bucket: of each. places: rows per bucket.
    """
    before, places = (np.cumsum(places) - places)[bucket], places[bucket]
    turned = (np.arange(len(takers)) - before + places // 2) % places
    return takers[before + turned]


def sort_rows(*columns: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Sort rows by the columns, then by the upper 32 bits of `draw`: int64 (n,), their order.

    Sorts the draw as two keys of 16 bits, because numpy has a radix sort for these, which is three
    times as fast as its sort of wider integers.
    """
    halves = draw.astype("<u8").view("<u2").reshape(-1, 4).T[2:]
    keys = [column.astype(np.min_scalar_type(column.max())) for column in reversed(columns)]
    return np.lexsort([*halves, *keys])


def sort_packed(*columns: np.ndarray, draw: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Sort rows by the columns, then by `draw`, then by `last`: int64 (n,), `last` in that order.

    columns, last: non-negative integers; the first column is ascending already.
    draw: random uint64.
    Packs a row into one uint64, with as many bits of `draw` as the other columns leave free, and
    uses the stable sort, which is fast on numbers that are nearly in order.
    """
    bits = [int(column.max()).bit_length() for column in (*columns, last)]
    room = 64 - sum(bits)
    if room < 0:
        raise AssertionError(f"{len(last)} rows are too many to sort at once")
    packed = np.zeros(len(last), np.uint64)
    for column, size in zip(columns, bits, strict=False):
        packed = (packed << np.uint64(size)) | column.astype(np.uint64)
    if room:
        packed = (packed << np.uint64(room)) | (draw >> np.uint64(64 - room))
    packed = (packed << np.uint64(bits[-1])) | last.astype(np.uint64)
    packed.sort(kind="stable")
    return (packed & np.uint64(2 ** bits[-1] - 1)).astype(np.int64)
