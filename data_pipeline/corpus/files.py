"""Read the bytes of a corpus file, compressed or not."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from data_pipeline.common.errors import UserError

ADVICE = "put an intact copy there"
BUFFER_BYTES = 1 << 20
PACKED_BYTES = 1 << 10  # to unpack at once: at most 32 MB, as 4 bytes of a .zst file make 128 KB


class PackedFile(io.RawIOBase):
    """Read the decompressed bytes of a file of one or more frames, each of which `new_frame` makes
    a decompressor for.

    padding: bytes that may lie between two frames. limit: bytes to unpack at once, if the
    decompressor can stop, as it has to where a hundred bytes of .bz2 make a hundred megabytes.
    Raises `EOFError` for a truncated file, and `OSError` for a damaged one. The readers of
    zstandard, bz2 and lzma take some of them for whole: one that ends inside a frame, or one that
    is damaged at the start of a later frame.
    """

    def __init__(
        self,
        file: BinaryIO,
        new_frame: Callable[[], Any],
        failure: type[Exception],
        padding: bytes = b"",
        limit: int | None = None,
    ):
        self.file, self.new_frame, self.failure, self.padding = file, new_frame, failure, padding
        self.limit = () if limit is None else (limit,)
        self.frame, self.packed, self.ready = new_frame(), b"", memoryview(b"")
        self.inside = False  # whether a frame has begun and not ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.ready:
            if getattr(self.frame, "needs_input", True):
                self.packed = self.packed or self.file.read(PACKED_BYTES)
                if not self.packed:
                    if self.inside:
                        raise EOFError("it ends inside a frame")
                    return 0
            try:
                self.ready = memoryview(self.frame.decompress(self.packed, *self.limit))
            except self.failure as error:
                raise OSError(str(error)) from None
            self.inside, self.packed = True, b""
            if self.frame.eof:
                self.start_frame(self.frame.unused_data)
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n

    def start_frame(self, packed: bytes) -> None:
        """Prepare for the frame that begins in `packed` or after it, behind any padding."""
        while self.padding and not packed.lstrip(self.padding):
            packed = self.file.read(PACKED_BYTES)
            if not packed:
                break
        self.packed = packed.lstrip(self.padding) if self.padding else packed
        self.frame, self.inside = self.new_frame(), False

    def close(self) -> None:
        self.file.close()
        super().close()


def open_bz2(file: BinaryIO) -> BinaryIO:
    unpacked = PackedFile(file, bz2.BZ2Decompressor, OSError, b"\0", BUFFER_BYTES)
    return io.BufferedReader(unpacked, BUFFER_BYTES)


def open_xz(file: BinaryIO) -> BinaryIO:
    unpacked = PackedFile(file, lzma.LZMADecompressor, lzma.LZMAError, b"\0", BUFFER_BYTES)
    return io.BufferedReader(unpacked, BUFFER_BYTES)


def open_zst(file: BinaryIO) -> BinaryIO:
    import zstandard

    # `zstd --long=31` writes windows of 2 GB
    new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    return io.BufferedReader(PackedFile(file, new_frame, zstandard.ZstdError), BUFFER_BYTES)


OPENERS = {".gz": gzip.open, ".bz2": open_bz2, ".xz": open_xz, ".zst": open_zst}
SLOW = (".bz2", ".xz")  # several times as slow to decompress as it is to read a copy


def compression(path: str) -> str:
    """Return the ending of a compressed file, such as ".gz"; "" of any other."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in OPENERS else ""


def open_file(path: str) -> BinaryIO:
    """Open a file without decompressing it; raises `UserError` if permission is denied, or if the
    file has vanished."""
    try:
        return open(path, "rb")
    except PermissionError:
        raise UserError(f"corpus file {path}: permission denied; check its permissions") from None
    except FileNotFoundError:
        raise UserError(f"corpus file {path} is gone; put it back, and start again") from None


def open_bytes(path: str) -> BinaryIO:
    """Open a file for reading its decompressed bytes; only an uncompressed file can seek.

    Raises `UserError` for an empty compressed file, which gzip and zstandard read as empty text.
    """
    suffix, file = compression(path), open_file(path)
    if suffix and not os.path.getsize(path):
        raise UserError(f"{path} is damaged or not what its name says: it is empty; {ADVICE}")
    return OPENERS[suffix](file) if suffix else file


def read(file: BinaryIO, size: int, path: str) -> bytes:
    """Read at most `size` bytes; raises `UserError` if they cannot be decompressed."""
    try:
        return file.read(size)
    except (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise UserError(f"{path} is damaged or not what its name says: {error}; {ADVICE}") from None
