"""Check that a corpus file's bytes are text in its encoding, and guess what they are if not."""

import codecs
import re
from collections import Counter
from unicodedata import category, is_normalized

from data_pipeline.common.errors import UserError
from data_pipeline.config import SourceConfig, to_list
from data_pipeline.corpus.files import open_bytes, read

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


class Utf8Watch:
    """Recognises a file that is UTF-8, but read in another encoding that takes any bytes."""

    def __init__(self, path: str, source: SourceConfig):
        self.path, self.source = path, source
        self.is_known = is_utf8(source)  # or is not UTF-8
        self.first, self.continuing = None, 0  # byte that is not ASCII; bytes of UTF-8 after such

    def look(self, block: bytes, position: int) -> None:
        """Look at the block that begins at a byte of the file; raises `UserError` as soon as all
        so far can only be UTF-8."""
        if self.is_known or block.isascii():
            return
        if self.first is None:
            self.first = position + next(i for i, byte in enumerate(block) if byte > 127)
        found = count_utf8(block, position == 0)
        if found is None:
            self.is_known = True
            return
        self.continuing += found
        if self.continuing >= SURE_ABOVE:
            reason = "the text from there on is valid UTF-8"
            raise not_text(self.path, self.source, self.first, reason, block)


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


def decoding_error(
    path: str, source: SourceConfig, error: UnicodeError, block: bytes, position: int
) -> UserError:
    """Describe where decoding failed.

    block: what was decoded; empty at the end of the file. position: of its first byte in the file.
    """
    reason, seen = str(error), block  # UTF-16 without a BOM
    if isinstance(error, UnicodeDecodeError):  # its object begins in the block before
        position += len(block) - len(error.object) + error.start
        line = error.object.rfind(b"\n", 0, error.start) + 1
        reason, seen = error.reason, error.object[line:]
    if not block and is_utf8(source):  # all before it was UTF-8
        seen = None
    return not_text(path, source, position, reason, seen)
