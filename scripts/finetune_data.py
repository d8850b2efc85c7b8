"""Read the labelled examples of a task from a table, a CoNLL file or SQuAD's JSON."""

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune_tables import NAMES, ROWS, TYPED_ROWS, Row, given_names, read_jsonl, read_text

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.reading import find_mismatch, parse_json

# What a task reads from a row.
READS_TEXTS = ("text", "second", "label")
READS = {"tagging": ("tokens", "tags"), "choice": ("context", "choices", "label")}
FLAGS = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}
LETTERS = "ABCDEFGHIJ"  # of choices, where a label is one
NO_COMMA = re.compile(r"['\"]\s+['\"]")  # between two texts of a list, as numpy writes it
NO_LABEL = "-"  # of a pair about which the annotators did not agree, as in SNLI and OCNLI

# CoNLL
TAG = re.compile(r"O|[BSUIMEL]-.+")
MOST_WORDS = 10_000  # of a sentence
# above a sentence
NOTE = re.compile(r"# (.*=|newdoc$|newpar$)|#(begin|end) document|## [^\t]*\t")
NO_WORD = re.compile(r"\d+[-.]\d+\t")  # of CoNLL-U: several words as one, and one that is left out

# SQuAD
ANSWER = {"text": str, "answer_start?": (int, None)}
QUESTION = {"question": str, "answers": [ANSWER]}
SQUAD = {"data": [{"paragraphs": [{"context": str, "qas": [QUESTION]}]}]}
ANSWERS = {"text": [str], "answer_start?": ([int], None)}
QUESTION_ROW = {"question": str, "context": str, "answers": ANSWERS}
QUESTION_WANTED = (
    "wanted data, paragraphs, context, qas, question, answers, text, answer_start, or for each "
    "question a row with question, context, and answers, which holds lists text and answer_start"
)
# place, question, passage, answers as (text, offset in the passage)
Question = tuple[str, str, str, list[tuple[str, int | None]]]


@dataclass(frozen=True)
class Example:
    """One example of any task."""

    place: str
    """File and line, or file and question, for messages."""
    texts: list[str]
    """One or two sentences; the words of a sentence; question and passage; or context, choices."""
    label: str | float | int | list
    """A label, several labels, a number, a tag for each word, the index of the right choice, or
    answers as (text, offset in the passage)."""


def read_examples(path: Path, task: str, columns: dict[str, str]) -> list[Example]:
    """Read all examples of a file.

    columns: what a task reads (a key of `COLUMNS`) -> the name of its column in this file, or its
    number, from 1, in a file that does not begin with the names; several names with commas between
    them where a task has one column for each choice, or for each label, or several as a context.
    Raises `UserError` that names file and line.
    """
    suffix = path.suffix.lower()
    check(path.exists(), f"no file at {path}; give a file of examples")
    check(not path.is_dir(), f"{path} is a folder; give a file that holds all of its examples")
    if task == "qa":
        check(not columns, f"--columns: {path} is read in SQuAD's form, which has no columns")
        examples = list(read_squad(path))
    elif task == "tagging" and suffix not in TYPED_ROWS:
        examples = list(read_conll(path, columns))
    else:
        known = ", ".join(ROWS)
        advice = "rename it to" if suffix in ("", ".txt") else "convert it to"
        check(suffix in ROWS, f"{path}: unknown format {suffix!r}; {advice} one of {known}")
        rows = (Row(place, cells, columns) for place, cells in ROWS[suffix](path, columns))
        examples = [READERS[task](row) for row in rows]
    if task == "tagging":
        examples = [example for example in examples if example.texts]
        words = {word for example in examples for word in example.texts}
        check(
            not words or not all(map(TAG.fullmatch, words)),
            f"{path}: the words are tags, such as {min(words, default='')!r}; name the columns of "
            "both, as in --columns tokens=2 tags=1",
        )
    if task == "classification":
        examples = with_labels(path, examples)
        check_first_label(examples, columns)
    check(examples, f"{path} holds no examples")
    return examples


def list_unread(path: Path, task: str, columns: dict[str, str]) -> list[str]:
    """List the columns of a table that a task does not read."""
    suffix = path.suffix.lower()
    if task == "qa" or suffix not in (TYPED_ROWS if task == "tagging" else ROWS):
        return []
    row = Row(*next(ROWS[suffix](path, columns)), columns)
    read = {name for what in READS.get(task, READS_TEXTS) for name in row.find_all(what)}
    return [name for name in row.cells if name not in read]


def with_labels(path: Path, examples: list[Example]) -> list[Example]:
    """Leave out the pairs without a label; prints how many, and how many may have none."""
    found = [one for one in examples if len(one.texts) == 1 or one.label != NO_LABEL]
    if lost := len(examples) - len(found):
        print(f"note: {path}: {lost:,} pairs are left out, whose label is {NO_LABEL!r}")
    if marked := sum(one.label == "-1" for one in found):
        print(
            f"note: {path}: {marked:,} examples have the label -1, which counts as any other; "
            "`datasets` marks by it that there is none, as in SNLI: then remove them"
        )
    return found


def check_first_label(examples: list[Example], columns: dict[str, str]) -> None:
    """Raise `UserError` if columns have numbers, and the first line seems to be their names: it has
    the only label that occurs once."""
    if len(examples) > 4 and any(map(str.isdecimal, given_names(columns))):
        counts = Counter(example.label for example in examples)
        first = examples[0]
        check(
            [label for label, count in counts.items() if count == 1] != [first.label],
            f"{first.place}: no other line has the label {first.label!r}; if this one names the "
            "columns, give --columns the names, or remove it",
        )


def texts_with_label(row: Row) -> Example:
    """Read one or two sentences and their label from a row."""
    texts, label = row.sentences(), row.get("label")
    has_label = label is not None and str(label).strip()
    check(has_label, f"{row.place} has no label; give it one, or remove the rows without")
    check(is_name(label), f"{row.place}: label is {label!r:.60}, not a name or a number")
    return Example(row.place, texts, label_name(label))


def texts_with_number(row: Row) -> Example:
    """Read one or two sentences and their number from a row."""
    texts, label = row.sentences(), row.get("label")
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    check(math.isfinite(number), f"{row.place}: label is {label!r}, not a number")
    return Example(row.place, texts, number)


def texts_with_labels(row: Row) -> Example:
    """Read one or two sentences and any number of labels from a row."""
    texts, columns = row.sentences(), row.find_all("label")
    if len(columns) > 1:
        return Example(row.place, texts, flagged(row, columns))
    label = row.get("label")
    names = label if isinstance(label, list) else [] if label is None else split_names(label)
    check(
        not isinstance(label, bool | dict)
        and all(map(is_name, names))
        and len(set(names)) == len(names),
        f"{row.place}: label is {label!r:.60}; wanted the names of the labels, each once",
    )
    return Example(row.place, texts, [name for name in map(label_name, names) if name])


def flagged(row: Row, names: list[str]) -> list[str]:
    """List the columns of labels that hold 1, or true."""
    flags = {name: str(row.cells[name]).strip().lower() for name in names}
    for name, flag in flags.items():
        check(flag in FLAGS, f"{row.place}: {name} is {row.cells[name]!r}; wanted 0 or 1")
    return [name for name, flag in flags.items() if FLAGS[flag]]


def split_names(label: object) -> list:
    """Split the names of labels at commas, or read the list that pandas writes into a cell."""
    text = label_name(label)
    if not (text.startswith("[") and text.endswith("]")):
        return text.split(",")
    if NO_COMMA.search(text):
        return [None]  # Python would join the texts
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return [None]


def label_name(label: object) -> str:
    """Return the name of a label; that of a whole number is the same with and without ".0", since
    JSON may hold both."""
    is_whole = isinstance(label, float) and label.is_integer()
    return str(int(label) if is_whole else label).strip()


def is_name(label: object) -> bool:
    """Tell whether a cell names a label; what pandas writes for a missing one does not."""
    return isinstance(label, str | int) or (isinstance(label, float) and math.isfinite(label))


def tagged_words(row: Row) -> Example:
    """Read the words of a sentence, and a tag for each, from a row."""
    words, tags = row.texts("tokens"), row.get("tags")
    check(
        not (isinstance(tags, list) and tags and all(isinstance(tag, int) for tag in tags)),
        f"{row.place}: tags are numbers; wanted their names, such as B-PER: `datasets` has them in "
        "features[NAME].feature.names",
    )
    tags = row.texts("tags")
    check(len(words) == len(tags), f"{row.place}: {len(words)} words and {len(tags)} tags")
    return Example(row.place, words, tags)


def choices(row: Row) -> Example:
    """Read a context, the choices, and the index of the right one from a row."""
    names, label, parts = row.find_all("choices"), row.get("label"), row.find_all("context")
    texts = row.text_under_each(names) if len(names) > 1 else row.texts("choices")
    context = " ".join(row.text_under_each(parts)) if len(parts) > 1 else row.text("context")
    check(len(texts) > 1, f"{row.place} has {len(texts)} choices; wanted two or more")
    index = label_name(LETTERS.index(label) if label in [*LETTERS] else label)
    is_index = index in map(str, range(len(texts)))
    wanted = f"0 to {len(texts) - 1}, or A to {LETTERS[: len(texts)][-1]}"
    check(is_index, f"{row.place}: label is {label!r}; wanted {wanted}")
    return Example(row.place, [context, *texts], int(index))


READERS: dict[str, Callable[[Row], Example]] = {  # of a row, by task
    "classification": texts_with_label,
    "multi_label": texts_with_labels,
    "regression": texts_with_number,
    "tagging": tagged_words,
    "choice": choices,
}


# --- formats of one task --------------------------------------------------------------------------


def read_conll(path: Path, columns: dict[str, str]) -> Iterator[Example]:
    """Yield sentences of a file with a word and its tag per line, and blank lines between them.

    Columns are separated by tabs, or else by blanks; the first is the word, the last its tag, and
    in a `.conllu` the second and the fourth, unless `columns` has other numbers. Where documents
    begin (-DOCSTART-) and what is noted above a sentence (`# id = 3`) are no words, nor are the
    ranges and empty nodes of a `.conllu`.
    """
    is_conllu = path.suffix.lower() == ".conllu"
    word, tag = number_columns(path, columns, is_conllu)
    lines = [*read_text(path).split("\n"), ""]
    # a word may hold other spaces than blanks, or be one
    rows = [x.split("\t") if "\t" in x else re.split(" +", x.strip(" ")) for x in lines]
    widths = Counter(len(row) for row in rows if row != [""] and not row[0].startswith("#"))
    width = max(widths, key=widths.get, default=2)  # of most lines, notes aside
    words, tags, start = [], [], 1
    for number, (line, cells) in enumerate(zip(lines, rows, strict=True), 1):
        if is_conllu and NO_WORD.match(line):
            continue
        is_note = line.startswith("#") and (
            is_conllu or NOTE.match(line) or (cells[0] in ("#", "##") and len(cells) != width)
        )
        if not words and is_note:
            start = number + 1
        elif not line.strip() or cells[0] == "-DOCSTART-":  # a tab alone, as in WNUT-17, is blank
            if words:
                check(
                    len(words) < 3 or words != [str(i + 1) for i in range(len(words))],
                    f"{path}:{start}: the words are numbers from 1 to {len(words)}; name the "
                    "columns of words and tags, as in --columns tokens=2 tags=3",
                )
                yield Example(f"{path}:{start}", words, tags)
            words, tags, start = [], [], number + 1
        elif len(cells) > 1 and len(cells) >= max(word, tag) and cells[tag - 1].strip():
            check(
                number > 1 or not {cells[word - 1].lower(), cells[tag - 1].lower()} <= NAMES,
                f"{path}:1 names columns; wanted a word and its tag on each line, the first too",
            )
            check(
                tag > 0 or len(cells) == width,
                f"{path}:{number} has {len(cells)} columns, and most lines have {width}; "
                "wanted a word and its tag on each line; where other columns follow, name that of "
                "the tags, as in --columns tags=3",
            )
            words.append(cells[word - 1])
            tags.append(cells[tag - 1].strip())
            check(
                len(words) <= MOST_WORDS,
                f"{path}:{start}: a sentence of more than {MOST_WORDS:,} words; a line has a word "
                "and its tag, and a blank line ends a sentence",
            )
        else:
            raise UserError(f"{path}:{number}: wanted a word, a tab and a tag, found {line!r:.60}")


def number_columns(path: Path, columns: dict[str, str], is_conllu: bool) -> tuple[int, int]:
    """Find the numbers, from 1, of the columns of words and of tags; 0: the last one."""
    for what, name in columns.items():
        check(
            what in ("tokens", "tags"),
            f"--columns {what}={name}: words and their tags are read from tokens and tags",
        )
        check(
            name.isdecimal() and int(name) > 0,
            f"--columns {what}={name}: {path} has no names of columns; give a number, from 1",
        )
    word, tag = (2, 4) if is_conllu else (1, 0)
    return int(columns.get("tokens", word)), int(columns.get("tags", tag))


def read_squad(path: Path) -> Iterator[Example]:
    """Yield the questions of a SQuAD file that have an answer; prints how many have none."""
    unanswered, read = 0, TYPED_ROWS.get(path.suffix.lower(), read_jsonl)
    if read is read_jsonl and re.search(r'"data"\s*:', text := read_text(path)):  # SQuAD's own
        questions = nested_questions(path, text)
    else:
        questions = question_rows(read(path, {}))
    for place, question, context, answers in questions:
        answers = [(text, start) for text, start in answers if text.strip()]
        if answers:
            yield Example(place, [question, context], answers)
        else:
            unanswered += 1
    if unanswered:
        print(f"note: {path}: {unanswered} questions without an answer are left out")


def question_rows(rows: Iterator[tuple[str, dict]]) -> Iterator[Question]:
    """Yield the questions of a file with a row for each, as `datasets` writes it."""
    for place, row in rows:
        fault = find_mismatch(row, QUESTION_ROW)
        check(not fault, f"{place} is not in SQuAD's form: {fault}; {QUESTION_WANTED}")
        texts = row["answers"]["text"]
        starts = row["answers"].get("answer_start") or [None] * len(texts)
        check(
            len(texts) == len(starts),
            f"{place}: answers holds {len(texts)} text and {len(starts)} answer_start",
        )
        yield place, row["question"], row["context"], list(zip(texts, starts, strict=True))


def nested_questions(path: Path, text: str) -> Iterator[Question]:
    """Yield the questions of SQuAD's own JSON."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    fault = find_mismatch(found, SQUAD)
    check(not fault, f"{path} is not in SQuAD's form: {fault}; {QUESTION_WANTED}")
    for article in found["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                place = f"{path}: question {question.get('id', question['question'])}"
                answers = [(a["text"], a.get("answer_start")) for a in question["answers"]]
                yield place, question["question"], paragraph["context"], answers
