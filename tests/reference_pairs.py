"""The rules of pairs, masks and batches once more, slowly: integers, lists and loops, no numpy.

Written from the rules, not from the vectorised code: jumps are followed one by one, a bucket is a
list, a hash is a Python integer. Also stores made in memory from word lengths, for shapes that the
real text lacks. A corpus is a list of documents, a document a list of sentences, a sentence a list
of words, a word its number of pieces.
"""

import random

import numpy as np

from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.exchange import BUCKET
from data_pipeline.sampling.pairs import RUN
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary

Corpus = list[list[list[int]]]
FULL = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
SPECIAL_COUNT = {"nsp": 3, "sop": 3, "none": 2}


# --- stores ---------------------------------------------------------------------------------------


def small_vocabulary(words: int = 40, continuations: int = 20) -> Vocabulary:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
    pieces += [f"w{i}" for i in range(words)] + [f"##p{i}" for i in range(continuations)]
    return Vocabulary(
        pieces=pieces,
        sha256="0" * 64,
        continues=np.array([piece.startswith("##") for piece in pieces]),
        ordinary=np.arange(7, len(pieces)),
    )


def make_store(corpus: Corpus) -> TokenStore:
    """`corpus` as a store in memory; tokens are drawn."""
    draw = random.Random(0)
    tokens, sentence_offsets, document_offsets = [], [0], [0]
    for document in corpus:
        for sentence in document:
            for pieces in sentence:
                tokens.append(draw.randrange(7, 47))
                tokens += [draw.randrange(47, 67) for _ in range(pieces - 1)]
            sentence_offsets.append(len(tokens))
        document_offsets.append(len(sentence_offsets) - 1)
    return TokenStore(
        small_vocabulary(),
        np.array(tokens, np.uint16),
        np.array(sentence_offsets, np.int64),
        np.array(document_offsets, np.int64),
    )


def copied(corpus: Corpus, copies: int) -> TokenStore:
    """A store with each document of `corpus` so many times, one after another."""
    store = make_store([document for document in corpus for _ in range(copies)])
    starts = store.sentence_offsets[store.document_offsets]
    tokens = store.tokens
    for i in range(store.n_documents):
        first = starts[i // copies * copies]
        tokens[starts[i] : starts[i + 1]] = tokens[first : first + starts[i + 1] - starts[i]]
    return store


def corpus_of(store: TokenStore) -> Corpus:
    """The word lengths of a store, read from its pieces."""
    tokens = store.tokens.tolist()
    sentences = []
    for start, end in zip(store.sentence_offsets, store.sentence_offsets[1:], strict=False):
        words: list[int] = []
        for token in tokens[start:end]:
            if store.vocabulary.pieces[token].startswith("##"):
                words[-1] += 1
            else:
                words.append(1)
        sentences.append(words)
    offsets = store.document_offsets
    return [sentences[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


# --- hashing --------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & FULL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & FULL
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    value = 0
    for part in parts:
        value = mix((value + part * GOLDEN + GOLDEN) & FULL)
    return value


def draw(stream: int, counter: int) -> int:
    return mix(((counter + 1) * GOLDEN + stream) & FULL)


def below(value: int, limit: int) -> int:
    return ((value >> 32) * limit) >> 32


def unit(value: int) -> float:
    return (value >> 11) * 2.0**-53


# --- pairs ----------------------------------------------------------------------------------------


class NotPossible(Exception):
    """The documents cannot give a random B to half of the pairs."""


def segments_of(
    corpus: Corpus, max_tokens: int, both_ways: bool = False
) -> tuple[list[tuple[int, int, int]], set[int]]:
    """((start, end, document) of each segment, all places where a word starts)."""
    segments, word_starts, place, long = [], set(), 0, 0
    for number, document in enumerate(corpus):
        for sentence in document:
            start = place
            for pieces in sentence:
                word_starts.add(place)
                place += pieces
            end, rest, long = place, [], long + (place - start > max_tokens)
            while both_ways and long % 2 == 0 and end - start > max_tokens:
                cut = end - max_tokens
                while cut < end and cut not in word_starts:
                    cut += 1
                cut = cut if cut < end else end - max_tokens  # a giant word
                rest.insert(0, (cut, end, number))
                end = cut
            while end - start > max_tokens:
                cut = start + max_tokens
                while cut > start and cut not in word_starts:
                    cut -= 1
                cut = cut if cut > start else start + max_tokens  # a giant word
                segments.append((start, cut, number))
                start = cut
            segments += [(start, end, number), *rest]
    return segments, word_starts


def chunks_of(
    segments: list[tuple[int, int, int]],
    max_tokens: int,
    short_seq_prob: float,
    stream: int,
    run: int,
) -> list[list[int]]:
    """Chunks, each a list of segment numbers; none goes past the end of a document or a run."""

    def starts_run(i: int) -> bool:
        return i == 0 or segments[i - 1][2] != segments[i][2] or i % run == stream % run

    chunks, i = [], 0
    while i < len(segments):
        start = segments[i][0]
        value = draw(stream, i)
        target = max_tokens
        if starts_run(i):
            target = max_tokens - below(value, max_tokens - max_tokens // 2 + 1)
        if value % 65536 < round(short_seq_prob * 65536):
            target = 2 + below(value, max_tokens - 1)
        chunk = [i]
        i += 1
        while i < len(segments) and not starts_run(i) and segments[i][1] - start <= target:
            chunk.append(i)
            i += 1
        chunks.append(chunk)
    sizes = [len(chunk) for chunk in chunks]
    for k in range(1, len(chunks)):
        last, only = chunks[k - 1][-1], chunks[k][0]
        if (
            sizes[k] == 1
            and sizes[k - 1] >= 3
            and segments[last][2] == segments[only][2]
            and segments[only][1] - segments[last][0] <= max_tokens
        ):
            chunks[k].insert(0, chunks[k - 1].pop())
    return chunks


def split_at(
    chunk: list[int],
    segments: list[tuple[int, int, int]],
    word_starts: set[int],
    stream: int,
    both_ways: bool,
) -> int | None:
    """Where B starts; None if the chunk is one word."""
    value = draw(stream, chunk[0])
    if len(chunk) > 1:
        return segments[chunk[1 + below(value, len(chunk) - 1)]][0]
    start, end, _ = segments[chunk[0]]
    place = start + 1 + below(value, max(end - start - 1, 1))
    after = [p for p in range(place, end) if p in word_starts]
    before = [p for p in range(start + 1, min(place, end)) if p in word_starts]
    if both_ways and value % 2 and place not in word_starts and before:
        return before[-1]
    return after[0] if after else before[-1] if before else None


def exchanged(
    documents: list[int], lengths: list[int], inside: list[bool], stream: int, bucket_size: int
) -> dict[int, int]:
    """taker -> giver of its B, by chunk number."""
    n = len(documents)
    largest = max((documents.count(d) for d in set(documents)), default=0)
    if n < 4 or n - largest < n // 2 - n // 2 // 2:
        raise NotPossible(n, largest)
    order = sorted(range(n), key=lambda i: (inside[i], lengths[i], draw(stream, i) >> 32))
    size, givers = bucket_size, {}
    todo = set(range(max(n // size, 1)))
    while todo:
        count, failed = max(n // size, 1), set()
        for number in todo:
            bucket = order[number * size : (number + 1) * size if number < count - 1 else n]
            for taker in bucket:
                givers.pop(taker, None)
            found = exchanged_in(bucket, documents, stream)
            if found is None:
                failed.add(number)
            givers |= found or {}
        assert not failed or size < n, "one bucket of all chunks must do"
        size *= 2
        todo = {min(number // 2, max(n // size, 1) - 1) for number in failed}
    return givers


def exchanged_in(bucket: list[int], documents: list[int], stream: int) -> dict[int, int] | None:
    """taker -> giver in one bucket; None if a document has too much of it."""
    places = len(bucket) // 2
    if len(set(documents)) == 2:
        places -= places % 2  # as many B's must go from one document to the other as come back
    within, over, seen = [], [], {}
    for i in sorted(bucket, key=lambda i: (documents[i], draw(stream, i) % 2**32)):
        seen[documents[i]] = seen.get(documents[i], 0) + 1
        (within if seen[documents[i]] <= places // 2 else over).append(i)
    if len(within) < places:
        return None
    takers = sorted(within, key=lambda i: draw(stream, i) % 2**32)[:places]
    takers.sort(key=lambda i: (documents[i], draw(stream, i) % 2**32))
    return {taker: takers[(i + places // 2) % places] for i, taker in enumerate(takers)}


def truncated(pair: list[int], word_starts: set[int], max_tokens: int) -> list[int]:
    """The longer segment loses words at its end, and then, if both pass half, the other."""
    for _ in range(2):
        a, b = pair[1] - pair[0], pair[3] - pair[2]
        if a + b <= max_tokens:
            break
        start, end = (0, 1) if a > b else (2, 3)
        limit = pair[start] + max(max_tokens - min(a, b), max_tokens // 2)
        cut = limit
        while cut > pair[start] and cut not in word_starts:
            cut -= 1
        pair[end] = cut if cut > pair[start] else limit
    return pair


def reference_pairs(
    corpus: Corpus,
    *,
    max_seq_length: int,
    objective: str,
    single_segment_prob: float = 0.0,
    short_seq_prob: float,
    seed: int,
    epoch: int,
    bucket_size: int,
    run: int,
    copies: int = 1,
) -> list[tuple[int, ...]]:
    """What `draw_pairs` must give, as tuples; raises `NotPossible`.

    Of `corpus`, every `copies` documents are one text.
    """
    max_tokens = max_seq_length - SPECIAL_COUNT[objective]
    segments, word_starts = segments_of(corpus, max_tokens, objective == "sop")
    chunks = chunks_of(segments, max_tokens, short_seq_prob, key(seed, epoch, 0), run)
    if objective == "sop":
        # half of the documents are cut from the end back: the same rule before a mirror
        mirror = [(-end, -start, document) for start, end, document in reversed(segments)]
        back = chunks_of(mirror, max_tokens, short_seq_prob, key(seed, epoch, 0), run)
        back = [[len(segments) - 1 - i for i in reversed(chunk)] for chunk in back]
        turned = [draw(key(seed, epoch, 5), number) >> 63 for number in range(len(corpus))]
        chunks = [c for c in chunks if not turned[segments[c[0]][2]]]
        chunks = sorted(chunks + [c for c in back if turned[segments[c[0]][2]]])
    share = 1 if objective == "none" else single_segment_prob
    drawn = sorted(range(len(chunks)), key=lambda i: draw(key(seed, epoch, 10), i) >> 32)
    single = drawn[: round(share * len(chunks))]
    whole, halves, documents, inside = [], [], [], []
    for number, chunk in enumerate(chunks):
        start, end = segments[chunk[0]][0], segments[chunk[-1]][1]
        if number in single:
            whole.append((start, end, end, end, -100))
            continue
        middle = split_at(chunk, segments, word_starts, key(seed, epoch, 2), objective == "sop")
        if middle is not None:
            halves.append([start, middle, middle, end])
            documents.append(segments[chunk[0]][2] // copies)
            inside.append(len(chunk) == 1)
    if objective == "sop" and not halves and len(single) < len(chunks):
        raise NotPossible("no text of two words")
    labels = [0] * len(halves)
    if objective == "sop":
        stream = key(seed, epoch, 3)
        for i in sorted(range(len(halves)), key=lambda i: draw(stream, i))[: len(halves) // 2]:
            halves[i], labels[i] = halves[i][2:] + halves[i][:2], 1
    if objective == "nsp" and len(single) < len(chunks):
        lengths = [half[3] - half[2] for half in halves]
        givers = exchanged(documents, lengths, inside, key(seed, epoch, 3), bucket_size)
        before = [list(half) for half in halves]
        for taker, giver in givers.items():
            halves[taker], labels[taker] = before[taker][:2] + before[giver][2:], 1
        halves = [truncated(half, word_starts, max_tokens) for half in halves]
    pairs = [(*half, label) for half, label in zip(halves, labels, strict=True)] + whole
    stream = key(seed, epoch, 1)
    return [pairs[i] for i in sorted(range(len(pairs)), key=lambda i: draw(stream, i) >> 32)]


def gives_no_pairs(corpus: Corpus, **rules) -> bool:
    """Whether the slow rules refuse a corpus, or find no pair in it."""
    try:
        return not reference_pairs(corpus, bucket_size=BUCKET, run=RUN, **rules)
    except NotPossible:
        return True


# --- masks and batches ----------------------------------------------------------------------------


def reference_chosen(
    word_lengths: list[int], stream: int, masked_lm_prob: float, max_predictions: int | None
) -> list[int]:
    """The words of one sequence to predict: those that start on an arc of the circle of words, from
    the arc's start on for as long as `max_predictions` lasts."""
    circle = sum(word_lengths)
    order = sorted(range(len(word_lengths)), key=lambda i: (draw(stream, i + 1) >> 40, i))
    turn = unit(draw(stream, 0)) * circle
    positions, before = [], 0
    for i in order:
        position = before + turn
        positions.append((position - circle if position >= circle else position, i))
        before += word_lengths[i]
    chosen, used = [], 0
    for position, i in sorted(positions):
        used += word_lengths[i]
        if position >= masked_lm_prob * circle:
            break
        if max_predictions is not None and used > max_predictions:
            break
        chosen.append(i)
    return sorted(chosen)


def reference_replaced(
    token: int, number: int, within: int, stream: int, mask_id: int, ordinary: list[int]
) -> int:
    """What stands in the place of piece `within` of the unit with this number."""
    fate = unit(draw(FULL - stream, number))
    if fate < 0.8:
        return mask_id
    if fate < 0.8 + 0.1:
        value = draw(FULL - stream, (number + 1) * 2**20 + within)
        return ordinary[below(value, len(ordinary))]
    return token


def reference_example(
    store: TokenStore,
    pair: tuple[int, ...],
    stream: int,
    *,
    masking: str,
    masked_lm_prob: float,
    max_predictions: int | None,
) -> dict[str, list[int]]:
    """One sequence: its ids, types, masked positions and labels."""
    text = store.tokens.tolist()
    segments = [text[pair[0] : pair[1]]]
    if pair[2] < pair[3]:
        segments.append(text[pair[2] : pair[3]])
    ids, types, words = [2], [0], []
    for number, segment in enumerate(segments):
        for place, token in enumerate(segment):
            joins = store.vocabulary.pieces[token].startswith("##") and masking == "whole_word"
            if joins and place > 0:
                words[-1].append(len(ids))
            else:
                words.append([len(ids)])
            ids.append(token)
            types.append(number)
        ids.append(3)
        types.append(number)
    chosen = reference_chosen([len(w) for w in words], stream, masked_lm_prob, max_predictions)
    positions = [place for word in chosen for place in words[word]]
    labels = [ids[place] for place in positions]
    for word in chosen:
        for place in words[word]:  # each token by itself
            ids[place] = reference_replaced(
                ids[place], place, 0, stream, 4, [int(i) for i in store.vocabulary.ordinary]
            )
    return {"ids": ids, "types": types, "masked": positions, "labels": labels, "label": pair[4]}


def rows(*batches: Batch) -> list[dict[str, list[int]]]:
    """The sequences of batches, each as lists, with places counted from its own start."""
    out = []
    for batch in batches:
        edges = batch.cu_seqlens.tolist()
        for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            here = (batch.masked_positions >= start) & (batch.masked_positions < end)
            out.append(
                {
                    "ids": batch.input_ids[start:end].tolist(),
                    "types": batch.token_type_ids[start:end].tolist(),
                    "masked": (batch.masked_positions[here] - start).tolist(),
                    "labels": batch.masked_labels[here].tolist(),
                    "label": int(batch.next_sentence_label[number]),
                }
            )
    return out
