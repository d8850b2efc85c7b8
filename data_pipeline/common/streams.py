"""Draw random numbers as hashes of integers, so that draws can be made independently and in any
order.

Draw number `counter` of a stream is the splitmix64 hash of (stream, counter) (Steele, Lea, Flood:
Fast Splittable Pseudorandom Number Generators, 2014). There is no generator state to save. Creating
a numpy generator for each example would take longer than building the example.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Stream(IntEnum):
    """The purpose of a random stream; part of its key, so that no two purposes share a stream."""

    CHUNKS = 0  # boundaries of chunks
    ORDER = 1  # order of the pairs in an epoch
    SPLIT = 2  # where a chunk is split into A and B
    EXCHANGE = 3  # which chunks exchange their second segments
    MASKS = 4  # masked words and their replacements
    DIRECTIONS = 5  # the end that a document is cut into chunks from
    PARTS = 6  # documents of each epoch part
    PHASES = 7  # seed of each phase
    DROPOUT = 8
    SAMPLE = 9  # of the vocabulary, to estimate a loss from
    SINGLE = 10  # which chunks stay one segment


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 finaliser to each uint64 of `x`, in place; returns `x`."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache
def derive_stream(*parts: int) -> np.uint64:
    """Derive a random stream from integers, whose order matters: uint64, the key of its draws."""
    value = np.zeros(1, np.uint64)
    for part in parts:
        value = mix(value + np.array([part % 2**64], np.uint64) * GOLDEN + GOLDEN)
    return value[0]


def random_u64(stream: np.uint64 | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return the draws with numbers `counters` of `stream`: uniform uint64; both broadcast."""
    return mix(np.multiply(counters.astype(np.uint64) + np.uint64(1), GOLDEN) + stream)


def random_unit(stream: np.uint64 | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return the same draws as numbers in [0, 1): float64."""
    return (random_u64(stream, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_below(draw: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    """Map uniform uint64 to int64 in [0, limit), limit < 2**32, with a bias below limit / 2**32."""
    scaled = (draw >> np.uint64(32)) * np.asarray(limit).astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)
