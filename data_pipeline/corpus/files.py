"""Read the bytes of a corpus file, compressed or not, and guess their format if they are not
text."""

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO
from unicodedata import category, is_normalized

from data_pipeline.common.errors import UserError
from data_pipeline.config import SourceConfig, to_list

ADVICE = "put an intact copy there"
BUFFER_BYTES = 1 << 20
PACKED_BYTES = 1 << 10  # to unpack at once: at most 32 MB, as 4 bytes of a .zst file make 128 KB
MARKS = {  # first bytes of files that users often give as text
    b"\xff\xfe\0\0": "encoding=utf-32",
    b"\xff\xfe": "encoding=utf-16",
    b"\xfe\xff": "encoding=utf-16",
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"PK\x03\x04": "a zip archive",  # Office writes such, too
    b"%PDF": "a PDF",
}
CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1f]")  # not of blanks, line and page ends
JIS = re.compile(rb"\x1b\$[@B]")  # where characters of two bytes begin
SURE_ABOVE = 20  # so many bytes that continue characters are UTF-8, and no other text by chance
CYRILLIC, CENTRAL, BALTIC = ("cp1251", "koi8-r", "cp866"), ("cp1250", "iso-8859-2"), ("cp1257",)
ENCODINGS = {  # legacy encodings of a language, if other than Latin-1
    **dict.fromkeys(("ru", "uk", "be", "bg", "sr", "mk", "kk", "mn", "ky", "tt"), CYRILLIC),
    **dict.fromkeys(("pl", "cs", "sk", "hu", "hr", "sl", "bs", "ro", "sq"), CENTRAL),
    **dict.fromkeys(("lt", "lv", "et"), BALTIC),
    **dict.fromkeys(("ar", "fa", "ur"), ("cp1256",)),
    **dict.fromkeys(("tr", "az"), ("cp1254",)),
    "el": ("cp1253",),
    "he": ("cp1255",),
    "th": ("cp874",),
    "vi": ("cp1258",),
    "ja": ("euc_jp", "cp932"),
    "ko": ("cp949",),
    "zh": ("big5",),  # beside GB18030
}


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


def is_utf8(source: SourceConfig) -> bool:
    """Tell whether a source is read as UTF-8, by any of its names."""
    return codecs.lookup(source.encoding).name.startswith("utf-8")


def check_start(path: str, source: SourceConfig, block: bytes) -> None:
    """Raise `UserError` if the first block of a file is not text, although it may be valid UTF-8,
    as UTF-16 is in many scripts, and ISO-2022-JP."""
    if block[257:262] == b"ustar":
        raise UserError(f"{path} is a tar archive; unpack it and give its files")
    is_odd = is_mostly_controls(block) or (len(block) >= 64 and JIS.search(block))
    if is_odd and is_utf8(source):
        raise not_text(path, source, 0, "many bytes are NUL or other control characters", block)


def is_mostly_controls(block: bytes) -> bool:
    """Tell whether a block has as many NUL bytes and other controls as UTF-16 or binary data, and
    not just a few."""
    controls = block.count(0) + len(CONTROLS.findall(block))
    return len(block) >= 64 and controls > len(block) // 4


def count_utf8(block: bytes, is_first: bool) -> int | None:
    """Count the bytes that continue characters in a block of UTF-8; None if it is not UTF-8.

    The block may end inside a character and, unless it `is_first`, begin inside one.
    """
    if block.isascii():
        return 0
    places = (i for i, byte in enumerate(block[:4]) if is_first or not 0x80 <= byte < 0xC0)
    begin = next(places, 0)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(block[begin:])
    except UnicodeDecodeError:
        return None
    return len(block) - begin - len(text)


def begins_alike(half: bytes) -> bool:
    """Tell whether the bytes at even or odd places may be the first ones of UTF-16: those of the
    letters of a script are often one control character."""
    code, count = Counter(half).most_common(1)[0] if half else (0, 0)
    return code < 32 and code not in b"\r\n" and count > 0.4 * len(half)


def guess(head: bytes, seen: bytes, language: str) -> str:
    """Guess the format of a file that is not UTF-8: `encoding=...`, a suffix, or a description.

    head: the first bytes of the file. seen: some bytes around the first one that is not UTF-8.
    language: the configured ISO 639 code.
    """
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return name
    if JIS.search(seen):
        return "encoding=iso2022_jp"
    halves = [order for i, order in enumerate(("be", "le")) if begins_alike(seen[i::2])]
    if len(halves) == 1:
        return f"encoding=utf-16-{halves[0]}"
    if halves or is_mostly_controls(seen) or len(CONTROLS.findall(seen)) > len(seen) // 100:
        return "binary data"
    text = seen.decode("utf-8", "replace")
    above = [c for c in text if c > "\x7f"]
    if not above:
        return "encoding=utf-8"
    if above.count("\ufffd") * 2 < len(above):
        return "UTF-8 with errors"
    if is_gb18030(seen):
        return "encoding=gb18030"
    shares = {e: share_of_letters(seen, e) for e in ENCODINGS.get(language.split("-")[0], ())}
    if max(shares.values(), default=0) > 0.5:
        return f"encoding={max(shares, key=shares.get)}"
    if sum("\u0800" <= c != "\ufffd" for c in above) * 10 > above.count("\ufffd"):
        return "UTF-8 with errors"  # three such bytes in a row are rare in Latin-1
    if len(above) * 2 > len(text):
        return "binary data, or text in an unknown encoding"
    return "encoding=" + ("cp1252" if re.search(rb"[\x80-\x9f]", seen) else "latin-1")


def share_of_letters(seen: bytes, encoding: str) -> float:
    """Compute the share of small letters, or of those without case, in what is above ASCII. In the
    wrong encoding many become capitals, signs, or the narrow letters of Japanese."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(seen)
    except UnicodeDecodeError:
        return 0.0
    above = [c for c in text if c > "\x7f"]
    letters = (c for c in above if category(c)[0] in "LM" and is_normalized("NFKC", c))
    return sum(not c.isupper() for c in letters) / max(len(above), 1)


def not_text(
    path: str, source: SourceConfig, offset: int, reason: str, seen: bytes | None
) -> UserError:
    """Build the error for a byte that is invalid in a file's encoding, with a guess at the cause.

    offset: of the byte in the file. reason: of the decoder. seen: the bytes around it; None: the
    file is UTF-8 up to the character that it ends in.
    """
    with open_bytes(path) as file:
        head = read(file, 8, path)
    looks = "UTF-8 with errors" if seen is None else guess(head, seen, source.language)
    names = to_list(source.files)
    of_many = len(names) > 1 or any(c in name for name in names for c in "*?[")
    if looks == "UTF-8 with errors" and not is_utf8(source):
        looks = "encoding=utf-8"
    advice = f"it looks like {looks.removeprefix('encoding=')}: "
    if looks.startswith("encoding="):
        advice += f"set corpus.{looks}"
        if of_many:
            advice += (
                ", or, if only some files have it, convert these to UTF-8 or give them a source "
                "of their own (corpus.sources)"
            )
    elif looks.startswith("."):
        advice += f"rename it to end in {looks}"
    elif looks.startswith("a "):
        advice += "extract its text to a file"
    elif looks == "UTF-8 with errors":
        advice += "repair the file, or set corpus.errors=replace"
    else:
        advice += "remove it from corpus.files, or set corpus.encoding"
        if "encoding" in looks and source.language == "en":
            advice += ", or corpus.language, for which other encodings are tried"
    return UserError(f"{path}: byte {offset} is not {source.encoding} ({reason}); {advice}")


def is_gb18030(seen: bytes) -> bool:
    """Tell whether bytes decode as GB18030 to mostly its 3,755 common characters (rows 16-55)."""
    try:
        text = codecs.getincrementaldecoder("gb18030")().decode(seen)
    except UnicodeDecodeError:
        return False
    codes = [c.encode("gb18030") for c in text if "\u4e00" <= c <= "\u9fff"]
    return sum(0xB0 <= c[0] <= 0xD7 and c[1] > 0xA0 for c in codes) * 2 > max(len(codes), 6) and (
        100 * sum(map(text.count, "的一是在有")) > len(codes)  # not so in Korean or Japanese
    )
