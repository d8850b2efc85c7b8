"""Read tables of examples: TSV, CSV, JSONL, Parquet and Arrow."""

import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.reading import check_regular, find_delimiter, parse_json

# What a task reads -> the names that its column may have, if --columns gives none.
COLUMNS = {
    "text": ("sentence", "sentence1", "text", "text_a", "premise", "question", "review"),
    "second": ("sentence2", "text2", "text_b", "hypothesis", "hypo", "passage"),
    "label": ("label", "labels", "score"),
    "tokens": ("tokens", "words"),
    "tags": ("tags", "ner_tags", "labels"),
    "context": ("context", "passage", "article", "question", "premise"),
    "choices": ("choices", "options", "endings"),
}
# one column for each choice
CHOICE = re.compile(r"((?:choice|ending|option|sol|answer)_?)([0-9]+|[A-J])")
READABLE = {name for names in COLUMNS.values() for name in names}
NAMES = READABLE | {  # of columns, by which a first line that is no example is noticed
    "word", "token", "tag", "pos", "form", "upos", "ner", "ner_tag", "sentiment", "rating", "stars",
    "category",
}  # fmt: skip


def read_text(path: Path) -> str:
    """Read a file of UTF-8, with or without a byte-order mark, with line ends of any system."""
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line} is not UTF-8; convert the file") from None


def given_names(columns: dict[str, str]) -> list[str]:
    """List the names or numbers that `columns` gives."""
    return [name for names in columns.values() for name in names.split(",")]


def name_columns(path: Path, first: list[str], columns: dict[str, str]) -> tuple[list[str], int]:
    """Return the names of the columns, and the number of lines that hold them: 1, or 0 where
    `columns` gives numbers, which are the names then.

    Raises `UserError` if the first line names columns although `columns` gives numbers, since it
    would be an example; and if two columns have a name that a task may read, since one of them
    would be left out unseen.
    """
    numbers = [int(name) for name in given_names(columns) if name.isdecimal()]
    if not numbers:
        twice = sorted(name for name in names_read(columns) if first.count(name) > 1)
        check(
            not twice,
            f"{path}: the first line names {' and '.join(map(repr, twice))} twice; rename a column",
        )
        return first, 1
    cells = {first[number - 1].lower() for number in numbers if 0 < number <= len(first)}
    check(
        not cells or not cells <= NAMES,
        f"{path}:1 names columns ({', '.join(sorted(cells))}), and --columns gives their numbers; "
        "give the names, or remove the first line",
    )
    return [str(number) for number in range(1, len(first) + 1)], 0


def names_read(columns: dict[str, str]) -> set[str]:
    """List the names of columns that a task may read."""
    return READABLE | {*given_names(columns)}


def read_tsv(path: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, column -> text) of a file without quoting."""
    lines = read_text(path).split("\n")  # splitlines would also cut at U+2028
    names, begin = name_columns(path, lines[0].split("\t"), columns)
    for number, line in enumerate(lines[begin:], begin + 1):
        if line:
            cells = line.split("\t")
            if len(cells) != len(names):
                raise UserError(
                    f"{path}:{number} has {len(cells)} columns, and the first line {len(names)}; "
                    "a text in a TSV holds no tab and no line end"
                )
            yield f"{path}:{number}", dict(zip(names, cells, strict=True))


def read_csv(path: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, column -> text) of a file with double quotes."""
    csv.field_size_limit(sys.maxsize)
    text = read_text(path)
    mark = find_delimiter(text.partition("\n")[0], names_read(columns))
    reader = csv.reader(io.StringIO(text), strict=True, delimiter=mark)
    try:
        first = next(reader, [])
        check(
            len(first) != 1 or "\t" not in first[0],
            f"{path}:1 has tabs and no comma; rename the file to .tsv if tabs separate its columns",
        )
        names, line = name_columns(path, first, columns)
        for cells in chain([] if line else [first], reader):
            place, line = f"{path}:{line + 1}", reader.line_num
            if cells:
                if len(cells) != len(names):
                    raise UserError(
                        f"{place} has {len(cells)} columns, and the first line {len(names)}"
                    )
                yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is not CSV: {error}") from None


def read_jsonl(path: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, column -> value) of a file with a JSON object per line, or an array of them."""

    def parse(text: str, place: str):
        try:
            return parse_json(text)
        except ValueError as error:
            raise UserError(
                f"{place} is not JSON: {error}; wanted an object on each line, or an array of them"
            ) from None

    text = read_text(path)
    if text.lstrip().startswith("["):
        rows = ((f"{path}: item {i}", row) for i, row in enumerate(parse(text, str(path)), 1))
    else:
        lines = ((f"{path}:{i}", line) for i, line in enumerate(text.split("\n"), 1))
        rows = ((place, parse(line, place)) for place, line in lines if line.strip())
    for place, cells in rows:
        check(isinstance(cells, dict), f"{place} is not a JSON object; wanted one on each line")
        yield place, cells


def read_table(path: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, column -> value) of a Parquet or Arrow file.

    The tags of words are numbers there, and `datasets` keeps their names beside them.
    """
    from datasets import ClassLabel, Dataset, List  # slow, and few files need it
    from datasets.table import InMemoryTable
    from pyarrow.parquet import read_table as read_parquet

    kind = path.suffix.lower()
    check_regular(path)
    try:
        if kind == ".parquet":
            table = Dataset(InMemoryTable(read_parquet(path)))
        else:
            table = Dataset.from_file(str(path))
        rows = list(table)
    except Exception as error:  # of many types, from pyarrow and datasets
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as {kind}: {reason}; download it again") from None
    tags = {
        name: dict(enumerate(column.feature.names))
        for name, column in table.features.items()
        if isinstance(column, List) and isinstance(column.feature, ClassLabel)
    }
    for number, row in enumerate(rows, 1):
        for name, names in tags.items():
            row[name] = [names.get(tag, tag) for tag in row[name] or []]
        yield f"{path}: row {number}", row


JSON_ROWS = {".jsonl": read_jsonl, ".json": read_jsonl}
TYPED_ROWS = {**JSON_ROWS, ".parquet": read_table, ".arrow": read_table}  # cells of any type
ROWS = {".tsv": read_tsv, ".csv": read_csv, **TYPED_ROWS}


@dataclass(frozen=True)
class Row:
    """A row of a table, whose cells are found by what a task reads."""

    place: str
    cells: dict
    columns: dict[str, str]

    def find(self, what: str) -> str | None:
        """Find the name of a column; None if the table has none.

        Raises `UserError` if several columns may be meant: one would be left out unseen.
        """
        if what in self.columns:
            return self.columns[what] if self.columns[what] in self.cells else None
        taken = given_names(self.columns)
        names = [name for name in COLUMNS[what] if name in self.cells and name not in taken]
        both = f"context={','.join(names[::-1])} for both"  # the passage last: its end may be cut
        check(
            len(names) < 2,
            f"{self.place}: {' and '.join(names)} may each be the column for {what}; name it with "
            f"--columns {what}=NAME, as in --columns "
            + (both if what == "context" else "text=question second=sentence"),
        )
        return names[0] if names else None

    def find_all(self, what: str) -> list[str]:
        """Find the names of one column, or of several: those that `columns` names with commas, or
        those of choices that are numbered."""
        names = self.columns.get(what, "").split(",")
        if len(names) > 1:
            missing = [name for name in names if name not in self.cells]
            check(not missing, f"{self.place}: no column {', '.join(missing)}, for {what}")
            return names
        name = self.find(what)
        if name is None and what == "choices" and what not in self.columns:
            return self.find_choices()
        return [name] if name else []

    def find_choices(self) -> list[str]:
        """Find the names of the columns of choices that are numbered, in order.

        Raises `UserError` if two groups of columns may be meant.
        """
        groups: dict[str, list[str]] = {}
        for found in filter(None, map(CHOICE.fullmatch, self.cells)):
            groups.setdefault(found[1], []).append(found[0])
        groups = {stem: names for stem, names in groups.items() if len(names) > 1}
        check(
            len(groups) < 2,
            f"{self.place}: {' and '.join(names[0] for names in groups.values())} may each begin "
            "the columns for choices; name them all, as in --columns choices=option1,option2",
        )
        names = next(iter(groups.values()), [])
        return sorted(names, key=lambda name: (len(name), name))  # 2 before 10

    def get(self, what: str):
        """Return a cell. Raises `UserError` if the table has no such column."""
        name = self.find(what)
        if name is None:
            known = ", ".join(COLUMNS[what])
            is_text = Path(self.place.rpartition(":")[0]).suffix.lower() not in TYPED_ROWS
            number = f", or, if the first line is no header, by its number, as in {what}=1"
            raise UserError(
                f"{self.place}: no column for {what} ({self.columns.get(what, known)}) among "
                f"{', '.join(self.cells)}; name it with --columns {what}=NAME{number * is_text}"
            )
        return self.cells[name]

    def text(self, what: str) -> str:
        value = self.get(what)
        check(isinstance(value, str), f"{self.place}: {what} is {value!r:.60}, not a text")
        return value

    def sentences(self) -> list[str]:
        """Return the text, and the second one if the table has one."""
        texts = [self.text("text")]
        if self.find("second") or "second" in self.columns:
            texts.append(self.text("second"))
        return texts

    def text_under_each(self, names: list[str]) -> list[str]:
        texts = [self.cells[name] for name in names]
        is_text = all(isinstance(text, str) for text in texts)
        check(is_text, f"{self.place}: wanted a text under each of {', '.join(names)}")
        return texts

    def texts(self, what: str) -> list[str]:
        value = self.get(what)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        check(is_list, f"{self.place}: {what} is {value!r:.60}, not a list of texts")
        return value
