"""Read small files that others may have written: regular files of bounded size, and JSON of a
known shape.

A shape describes the allowed values of a JSON value:

    int, float, str, bool, None    of this type; a float is finite, and an int is one too
    object    anything
    range(9), re.compile("[a-z]+")    an integer in the range, a text that matches as a whole
    (shape, shape)    one or the other
    [shape]    a list of such values
    {str: shape}    an object with any keys and such values
    {"key": shape, "more?": shape}    an object with these keys, those with `?` perhaps missing, and
                                      any others
"""

import csv
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.common.errors import UserError

MOST_BYTES = 1 << 27  # a tokenizer.json with a million pieces has 60 MB
COUNT = range(1 << 62)
SHA256 = re.compile("[0-9a-f]{64}")


def check_regular(path: Path) -> int:
    """Return the size of a regular file in bytes; raises OSError, or `UserError` if it is a pipe or
    a device, which may have no end."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is a pipe or a device; give a regular file instead")
    return status.st_size


def read_file(path: Path) -> bytes:
    """Read a small file; raises OSError, or `UserError` for a pipe, a device or a large file."""
    if (size := check_regular(path)) > MOST_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes, but such a file may have at most {MOST_BYTES:,}; give "
            "the right file"
        )
    with open(path, "rb") as file:
        return file.read(os.fstat(file.fileno()).st_size)  # another file may be there by now


def read_utf8(path: Path, advice: str) -> str:
    """Read a small text file, without a byte order mark.

    advice: what the message says at the end. Raises `UserError` if it is not UTF-8.
    """
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); {advice}") from None


def read_json(path: Path, shape: Any, advice: str) -> Any:
    """Read a small JSON file whose value has a shape.

    advice: what the message says at the end.
    Raises `UserError` that names the file and the place of the first fault.
    """
    try:
        value = parse_json(read_utf8(path, advice))
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error}); {advice}") from None
    check_shape(value, shape, path, advice)
    return value


def parse_json(text: str) -> Any:
    """Parse JSON; raises ValueError, also where lists in lists are too deep to be parsed, and for
    half a character such as \\ud83d, which cannot be written anywhere."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it has an unpaired surrogate") from None
    return value


def check_shape(value: Any, shape: Any, path: Path, advice: str) -> None:
    """Raise `UserError` at the first place where the value of a JSON file has another shape."""
    if fault := find_mismatch(value, shape):
        raise UserError(f"{path} is damaged or of another kind: {fault}; {advice}")


def find_mismatch(value: Any, shape: Any) -> str | None:
    """Describe where a value of JSON has another shape; None if it has this one."""
    if (found := find_other(value, shape)) is None:
        return None
    place, other = found
    return f"{place.strip('.') or 'it'} is {'null or missing' if other is None else clip(other)}"


def find_other(value: Any, shape: Any) -> tuple[str, Any] | None:
    """Find the first place where a value has another shape, and what stands there; None if it has
    this one. The place is put together only then: a vocabulary has many values."""
    if isinstance(shape, tuple):
        others = [find_other(value, one) for one in shape]
        return None if None in others else others[0]
    if isinstance(shape, list | dict) and type(value) is type(shape):
        if is_uniform(value, shape):
            return None
        for key, item, one in list_inner(value, shape):
            if other := find_other(item, one):
                name = f"[{key}]" if isinstance(shape, list) else f".{key}"
                return name + other[0], other[1]
        return None
    if shape is None:
        fits = value is None
    elif isinstance(shape, range):
        fits = type(value) is int and value in shape
    elif isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
    elif shape is float:
        fits = type(value) is int or type(value) is float and math.isfinite(value)
    else:
        fits = shape in (object, type(value))
    return None if fits else ("", value)


def is_uniform(value: list | dict, shape: list | dict) -> bool:
    """Tell quickly whether all values are texts, or all are integers of a range, as the shape asks
    and in a vocabulary is so; False means that each has to be looked at."""
    one = shape[0] if isinstance(shape, list) else shape.get(str)
    values = value if isinstance(value, list) else value.values()
    if isinstance(one, range):
        return set(map(type, values)) == {int} and min(values) in one and max(values) in one
    return one is str and set(map(type, values)) == {str}


def list_inner(value: Any, shape: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the index or key of each value in a list or an object, the value and its shape; a key
    that is missing counts as null."""
    if isinstance(shape, list):
        yield from ((i, item, shape[0]) for i, item in enumerate(value))
    elif str in shape:
        yield from ((key, item, shape[str]) for key, item in value.items())
    else:
        for key, one in shape.items():
            name = key.removesuffix("?")
            if name in value or name == key:
                yield name, value.get(name), one


def clip(value: Any) -> str:
    """Show the start of a value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def find_delimiter(header: str, wanted: set[str]) -> str:
    """Find the delimiter of a CSV file: the comma, or whatever gives its header more of the wanted
    names. Spreadsheets write semicolons where numbers have a decimal comma."""
    rows = {mark: next(csv.reader([header], delimiter=mark), []) for mark in ",;\t"}
    return max(rows, key=lambda mark: len(wanted.intersection(rows[mark])))
