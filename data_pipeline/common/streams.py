"""The project's random numbers: a hash of integers, so that any draw can be made alone, in any
order.

splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) of (key,
counter). A numpy generator object for every example would cost more than building the example.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)


class Stream(IntEnum):
    """What a stream of draws is for: a part of its key, so that no two streams are the same."""

    CHUNKS = 0  # where documents are cut
    ORDER = 1  # of pairs in an epoch
    SPLIT = 2  # of a chunk into A and B
    EXCHANGE = 3  # of second segments
    MASKS = 4
    DIRECTIONS = 5  # from which end a document is cut
    PARTS = 6  # of a corpus that is too large to plan at once
    PHASES = 7  # a seed for each phase
    DROPOUT = 8


def mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser of each uint64 of `x`; overwrites `x`."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache
def derive_stream(*parts: int) -> np.uint64:
    """One uint64 from integers, in order: the key of a stream of draws."""
    value = np.zeros(1, np.uint64)
    for part in parts:
        value = mix(value + np.array([part % 2**64], np.uint64) * GOLDEN + GOLDEN)
    return value[0]


def random_u64(stream: np.uint64 | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Draw number `counters` of `stream`: uint64, uniform; both broadcast."""
    return mix(np.multiply(counters.astype(np.uint64) + np.uint64(1), GOLDEN) + stream)


def random_below(draw: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    """Each uint64 of `draw` as an int64 in [0, limit), limit < 2**32; bias under 2**-32 * limit."""
    return (
        ((draw >> np.uint64(32)) * np.asarray(limit).astype(np.uint64)) >> np.uint64(32)
    ).astype(np.int64)
