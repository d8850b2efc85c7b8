"""Array functions that several stages share: list ranges, mark runs, write to disk.

A full disk raises an OSError with its number. `ndarray.tofile` and `np.save` would raise one
without a number, and a memory map would end the process by SIGBUS.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """List the integers of all ranges [start, end), one range after another: int64."""
    sizes = ends - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """Mark the rows that differ from the row before in any column: bool (n,)."""
    return np.logical_or.reduce([np.diff(c, prepend=c[:1] - 1) != 0 for c in columns])


def write_array(
    path: Path, dtype: np.dtype | type, size: int, blocks: Iterable[np.ndarray]
) -> None:
    """Write a one-dimensional array of `size` elements to a `.npy` file, block by block."""
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": (size,)})
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array to a `.npy` file."""
    array = np.ascontiguousarray(array)
    with open(path, "wb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)


def append_array(path: Path, array: np.ndarray) -> None:
    """Append the bytes of an array to a file."""
    with open(path, "ab") as file:
        file.write(np.ascontiguousarray(array).data)


def pack_bits(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pack blocks of bools, or of bytes that are 0 or 1, without gaps between the blocks.

    Yields uint8 arrays, eight bits to a byte, the lowest bit first.
    """
    rest = np.zeros(0, bool)  # does not fill a byte yet
    for block in blocks:
        bits = np.concatenate([rest, block])
        whole = len(bits) // 8 * 8
        yield np.packbits(bits[:whole], bitorder="little")
        rest = bits[whole:]
    yield np.packbits(rest, bitorder="little")
