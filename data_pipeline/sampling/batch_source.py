"""Choose the examples of each step, and build their batches: (seed, step, rank) -> tensors.

Example i of epoch e is a pure function of (seed, e, i), and step k is a fixed list of examples:

    epochs of 10 examples, global batch of 4 sequences, 2 ranks; step 3 on rank 1:

    step 3     takes examples 12 13 14 15 of the run      3 * 4 + (0, 1, 2, 3)
    rank 1     takes                14 15                 the second half
    epoch 1    calls them            4  5                 14 - 10, 15 - 10

    example 4 of epoch 1 = pair 4 of draw_pairs(..., seed, epoch=1), with masks from draw 4 of
    derive_stream(seed, 1, Stream.MASKS)

Nothing in this depends on the batches before it. So workers, ranks and restarts cannot change the
data, there is no loader state to save, and a resumed run just asks for step k.

The pairs of an epoch are drawn at once or, for a large corpus, in several epoch parts; a thread
draws the next part while the run trains on the second half of the current one.
"""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from math import ceil

import numpy as np

from data_pipeline.common.errors import check
from data_pipeline.common.streams import Stream, derive_stream, random_u64
from data_pipeline.common.system import start_thread
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batches import Batch, build_batch
from data_pipeline.sampling.pairs import (
    PAIR,
    SPECIALS,
    Segments,
    cut_segments,
    deal_documents,
    draw_pairs,
)
from data_pipeline.sampling.token_store import StoreView, TokenStore, count_parts

BLOCK_TOKENS = 1 << 16  # small batches are built together, up to this many tokens


class BatchSource:
    """Build the batches of a run from one split of a token store, for any step and rank.

    Caches three results, without which it gives the same batches, only more slowly: the pairs drawn
    last or next (`drawn_parts`), the sizes of all epoch parts drawn so far (`part_sizes`), and the
    sequences built last for `step` (`built`).
    """

    def __init__(self, store: TokenStore, data: PairsConfig, seed: int):
        self.store, self.data, self.seed = store, data, seed
        self.n_parts = count_pair_parts(store, data.objective)  # epoch parts in each epoch
        self.max_tokens = data.max_seq_length - SPECIALS[data.objective]
        self.segments = self.cut(store) if self.n_parts == 1 else None
        self.part_sizes: list[int] = []  # examples in each part
        self.longest = data.max_seq_length  # tokens of a sequence, at most
        self.drawn_parts: dict[int, Future] = {}  # at most two: a step may need the next one
        self.built: tuple[tuple, Batch] | None = None  # what the batch is for, and the batch

    def epoch_part(self, number: int) -> np.ndarray:
        """Return the pairs of an epoch part in the order of training, as a `PAIR` array.

        Parts are numbered through the run: epoch e has the parts `parts_of(e)`.
        """
        self.start_part(number)
        return self.drawn_parts[number].result()

    def start_part(self, number: int) -> None:
        """Start to draw the pairs of an epoch part in a thread; `epoch_part` waits for it.

        numpy releases the GIL meanwhile, so that steps go on.
        """
        if number not in self.drawn_parts:
            for old in self.drawn_parts.keys() - {number - 1}:
                del self.drawn_parts[old]
            self.drawn_parts[number] = start_thread(self.draw_part, number)

    def free_pairs(self) -> None:
        """Free the memory of the pairs; they are drawn again on demand."""
        self.drawn_parts.clear()

    def recall_sizes(self, part_sizes: list[int]) -> None:
        """Take over the `part_sizes` of a source with the same arguments, to resume at once."""
        self.part_sizes = list(part_sizes)

    def cut(self, store: TokenStore | StoreView) -> Segments:
        return cut_segments(store, self.max_tokens, both_ways=self.data.objective == "sop")

    def draw_part(self, number: int) -> np.ndarray:
        if self.segments is not None:
            return draw_pairs(self.store, self.segments, self.data, self.seed, number)
        epoch, place = divmod(number, self.n_parts)
        stream = derive_stream(self.seed, epoch, Stream.PARTS)
        documents = deal_documents(self.store, self.n_parts, stream)[place]
        if not len(documents):
            return np.empty(0, PAIR)
        view = StoreView(self.store, documents)
        pairs = draw_pairs(view, self.cut(view), self.data, self.seed, number)
        for start, end in (("a_start", "a_end"), ("b_start", "b_end")):
            length = pairs[end] - pairs[start]
            pairs[start] = view.in_store(pairs[start])
            pairs[end] = pairs[start] + length
        return pairs

    def find_longest(self) -> None:
        """Set `longest` by the first epoch part: short documents may give no full sequence."""
        pairs = self.epoch_part(0)
        of_a, of_b = (pairs[f"{s}_end"] - pairs[f"{s}_start"] for s in "ab")
        self.longest = int((of_a + of_b + 2 + (of_b > 0)).max())

    def part_size(self, number: int) -> int:
        while len(self.part_sizes) <= number:
            self.part_sizes.append(len(self.epoch_part(len(self.part_sizes))))
        return self.part_sizes[number]

    def pairs(self, epoch: int) -> np.ndarray:
        """Return the pairs of an epoch in the order of training, as a `PAIR` array."""
        parts = [self.epoch_part(n) for n in self.parts_of(epoch)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def epoch_size(self, epoch: int) -> int:
        return sum(map(self.part_size, self.parts_of(epoch)))

    def parts_of(self, epoch: int) -> range:
        return range(epoch * self.n_parts, (epoch + 1) * self.n_parts)

    def examples(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return examples [start, start + count) of an endless run; they may cross epochs.

        Returns their pairs, a `PAIR` array, and the random stream of each, uint64 (count,).
        """
        number, start = self.locate(start)
        parts, streams = [], []
        while count > 0:
            part = self.epoch_part(number)[start : start + count]
            masks = derive_stream(self.seed, number, Stream.MASKS)
            parts.append(part)
            streams.append(random_u64(masks, np.arange(start, start + len(part))))
            count -= len(part)
            start, number = 0, number + 1
        return np.concatenate(parts), np.concatenate(streams)

    def locate(self, start: int) -> tuple[int, int]:
        """Find the epoch part of example `start` of the run, and its place there."""
        number = 0
        while start >= self.part_size(number):
            start -= self.part_size(number)
            number += 1
        return number, start

    def batch(self, start: int, count: int) -> Batch:
        """Build the batch of examples [start, start + count) of the run."""
        return build_batch(self.store, self.data, *self.examples(start, count))

    def step(
        self, step: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
    ) -> list[Batch]:
        """Build the micro-batches of one rank in one step, consecutive slices of the global batch.

        The global batch is divided evenly among the ranks, and the sequences of a rank evenly among
        its `count_passes` micro-batches.
        """
        edges = cut_evenly(global_batch_size, world_size)
        offset, size = edges[rank], edges[rank + 1] - edges[rank]
        batch, first = self.build_steps(step, global_batch_size, offset, size)
        passes = count_passes(global_batch_size, micro_batch_size, world_size)
        return [
            batch.slice(first + start, first + end)
            for start, end in pairwise(cut_evenly(size, passes))
        ]

    def build_steps(
        self, step: int, global_batch_size: int, offset: int, size: int
    ) -> tuple[Batch, int]:
        """Build sequences [offset, offset + size) of the global batches of a step and its next.

        Small batches are built for several steps at once, and kept for the calls that follow,
        because most of their cost is the overhead of numpy calls.
        Returns the batch of all these steps, and the index of the first sequence of `step` in it.
        """
        together = max(1, BLOCK_TOKENS // (size * self.data.max_seq_length))
        block, place = divmod(step, together)
        key = (block, global_batch_size, offset, size)
        if self.built is None or self.built[0] != key:
            steps = range(block * together, (block + 1) * together)
            number, start = self.locate(steps[0] * global_batch_size)
            if 2 * start >= self.part_size(number):
                self.start_part(number + 1)
            parts = [self.examples(k * global_batch_size + offset, size) for k in steps]
            pairs, streams = map(np.concatenate, zip(*parts, strict=True))
            self.built = key, build_batch(self.store, self.data, pairs, streams)
        return self.built[1], place * size


def count_pair_parts(store: TokenStore, objective: str) -> int:
    """Count the epoch parts of a store; fewer if one document would dominate a part.

    If one document had more than three quarters of the pairs of an NSP part, there would be too few
    random B's for them; here none has more than a third.
    """
    n_parts = count_parts(len(store))
    if objective == "nsp" and n_parts > 1:
        longest = int(np.diff(store.document_starts).max())
        n_parts = max(1, min(n_parts, len(store) // (4 * longest)))
    return n_parts


def cut_evenly(n: int, parts: int) -> list[int]:
    """Divide `n` items into `parts` ranges whose sizes differ by at most one; returns their
    edges."""
    return [n * i // parts for i in range(parts + 1)]


def count_passes(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Count the micro-batches of a rank in one step, each of at most `micro_batch_size` sequences.

    Raises `UserError` if there are more ranks than sequences. The count is the same on all ranks,
    because they communicate in each pass. A micro-batch may exceed `micro_batch_size` by one
    sequence where a rank would otherwise have an empty one.
    """
    check(
        global_batch_size >= world_size,
        f"train.global_batch_size {global_batch_size} is too small for {world_size} processes; "
        f"start at most {global_batch_size}, or raise it",
    )
    passes = ceil(ceil(global_batch_size / world_size) / micro_batch_size)
    return min(passes, global_batch_size // world_size)


def largest_pass(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Count the sequences of the largest micro-batch of a step."""
    passes = count_passes(global_batch_size, micro_batch_size, world_size)
    return ceil(global_batch_size / (world_size * passes))


def prefetch(source: Iterator, depth: int = 4) -> Iterator:
    """Yield the items of `source`, which a thread computes up to `depth` items ahead.

    An error in `source` is raised at the place of the item that it prevented.
    """
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(item) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            while put((next(source), None)):
                pass
        except BaseException as error:  # StopIteration, at the end
            put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
        thread.join()
