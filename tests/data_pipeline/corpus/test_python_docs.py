import ast
import pickle
from pathlib import Path

import pytest

from data_pipeline.corpus import python_docs
from data_pipeline.corpus.python_docs import list_modules, prose, read_module, read_python_docs

SENTENCE = "The kettle sings softly when the water begins to boil."


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write modules from their sources and make them all there is to read."""

    def write(*sources: str) -> list[str]:
        paths = [tmp_path / f"module_{number}.py" for number in range(len(sources))]
        for path, source in zip(paths, sources, strict=True):
            path.write_text(source, encoding="utf-8")
        monkeypatch.setattr(python_docs, "list_modules", lambda: [str(path) for path in paths])
        return [str(path) for path in paths]

    return write


def test_hard_wrapped_lines_become_one_paragraph():
    text = "The kettle sings softly\n    when the water\n    begins to boil."
    assert prose(text) == [SENTENCE]


def test_a_blank_line_parts_two_paragraphs():
    other = "Nobody in the kitchen hears the song."
    assert prose(f"{SENTENCE}\n\n{other}") == [SENTENCE, other]


def test_a_doctest_block_is_left_out():
    text = f"{SENTENCE}\n\n>>> boil(kettle)\nThe water in the kettle is now hot.\n\nIn short."
    assert prose(text) == [SENTENCE]


def test_a_literal_block_is_left_out_with_its_inner_paragraphs():
    text = (
        "Heat the kettle for a few minutes::\n\n    Put it on the stove and light it.\n\n"
        f"    Then wait until it sings for you.\n\n{SENTENCE}"
    )
    assert prose(text) == ["Heat the kettle for a few minutes:", SENTENCE]


def test_a_fenced_block_is_left_out():
    assert prose(f"```python\nWait until the small kettle sings.\n```\n{SENTENCE}") == [SENTENCE]


@pytest.mark.parametrize("directive", ["code-block:: python", "math::", "versionadded:: 1.2"])
def test_a_directive_is_dropped_with_its_block(directive):
    text = f".. {directive}\n\n    Wait until the small kettle sings.\n\n{SENTENCE}"
    assert prose(text) == [SENTENCE]


def test_the_prose_of_a_note_is_kept_without_its_marker():
    assert prose(f".. note:: {SENTENCE}") == [SENTENCE]
    assert prose(f".. warning::\n    {SENTENCE}") == [SENTENCE]


def test_titles_and_tables_are_left_out():
    title = "A few words about the kettle.\n-----------------------------\n"
    table = "+-------+------+\n| water | hot. |\n+-------+------+\n"
    assert prose(f"{title}{SENTENCE}\n\n{table}") == [SENTENCE]


def test_a_signature_is_left_out():
    assert prose(f"boil(kettle, *, minutes=3) -> Water\n{SENTENCE}") == [SENTENCE]


@pytest.mark.parametrize(
    "text",
    [
        f"Args:\n    kettle (Kettle, optional): {SENTENCE}",
        f"Parameters\n----------\nkettle : Kettle, optional\n    {SENTENCE}",
        f":param kettle: {SENTENCE}",
        f"- **kettle** (*Kettle*): {SENTENCE}",
    ],
)
def test_a_parameter_is_reduced_to_its_description(text):
    assert prose(text) == [SENTENCE]


def test_bullets_lose_their_mark_and_become_paragraphs():
    other = "Nobody in the kitchen hears the song."
    assert prose(f"- The kettle sings softly when\n  the water begins to boil.\n2. {other}") == [
        SENTENCE,
        other,
    ]


@pytest.mark.parametrize(
    "markup",
    [
        "``kettle``",
        "`kettle`",
        "*kettle*",
        "**kettle**",
        ":class:`kettle`",
        ":class:`~kitchen.stove.kettle`",
        ":func:`kettle <kitchen.kettle>`",
        "`kettle <http://example.org>`_",
        "[kettle](http://example.org)",
        ":math:`kettle`",
    ],
)
def test_inline_markup_is_reduced_to_its_words(markup):
    expected = [] if "math" in markup else [SENTENCE]
    assert prose(SENTENCE.replace("kettle", markup)) == expected


def test_only_the_sentence_with_maths_is_left_out():
    assert prose(f"{SENTENCE} It takes :math:`\\frac{{m}}{{P}}` seconds in all.") == [SENTENCE]


@pytest.mark.parametrize(
    "text",
    ["Too short.", "a fragment that never comes to an end", "x = 1, y = 2, z = 3, w = 4, v = 5."],
)
def test_what_does_not_read_as_prose_is_left_out(text):
    assert prose(text) == []


def test_the_docstrings_of_a_module_come_in_source_order(modules):
    source = '''"""The first of all the sentences here."""
class Kettle:
    """The second of all the sentences here."""
    def boil(self):
        """The third of all the sentences here."""
        return "A returned string is not a docstring."
add_docstr(kettle, """The fourth of all the sentences here.""".format(**words))
'''
    (paragraphs,) = read_module(modules(source)[0])
    assert [text.split()[1] for text in paragraphs] == ["first", "second", "third", "fourth"]


def test_a_module_is_never_imported(modules):
    source = f'"""{SENTENCE}"""\nraise RuntimeError("imported")\n'
    assert read_module(modules(source)[0]) == [[SENTENCE]]


def test_a_module_that_does_not_parse_is_skipped(modules):
    assert read_module(modules('"""Unclosed')[0]) == [[]]


def test_a_repeated_paragraph_is_kept_once_and_a_small_document_is_dropped(modules):
    own = [f"{SENTENCE} This is kettle {name}." * 2 for name in ("one", "two", "three", "four")]
    first, second = "\n\n".join(own), f"{own[0].upper()}\n\n{SENTENCE}"
    modules(*(f"{text!r}\n" for text in (first, second)))
    assert list(read_python_docs()) == ["\n".join(own)]


def test_the_inventory_starts_with_the_topics_and_holds_no_tests_nor_site_packages():
    first, *paths = list_modules()
    assert first == "topics"
    assert paths == list_modules()[1:] == pickle.loads(pickle.dumps(paths))
    stdlib = Path(ast.__file__).parent
    inside = [Path(path).relative_to(stdlib).parts for path in paths if Path(path).parent == stdlib]
    assert ("ast.py",) in inside
    assert not any("test" in Path(path).parts[-3:-1] for path in paths)


def test_the_topics_read_as_prose():
    documents = read_module("topics")
    text = " ".join(paragraph for document in documents for paragraph in document)
    assert len(documents) > 50
    assert len(text) > 200_000
    assert "::=" not in text
    assert "****" not in text


@pytest.mark.parametrize("name", ["argparse.py", "threading.py"])
def test_a_module_of_the_standard_library_yields_one_line_paragraphs(name):
    (paragraphs,) = read_module(str(Path(ast.__file__).parent / name))
    assert len(paragraphs) > 10
    assert all(text == " ".join(text.split()) and ">>>" not in text for text in paragraphs)
