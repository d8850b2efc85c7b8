"""documents -> **sentences** -> words: where a sentence ends, and the limit that none exceeds."""

import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module

from data_pipeline.common.errors import UserError

MAX_CHARACTERS = 2000  # of a sentence; longer ones (logs, tables, missing full stops) are cut
LONGEST_FRAGMENT = 12  # characters: what is longer is taken for a sentence unseen
NUMBER = re.compile(r"\W?\d{1,3}([.．]\d+)*\W+")  # of an item: "1. ", "(2)", "3.1. "


def sentence_splitter(language: str, plug_in: str | None = None) -> Callable[[str], list[str]]:
    """`str -> list[str]` for an ISO 639 language: sentencex, some 300 languages, in Rust.

    A `plug_in`, `package.module:function`, takes its place. Raises `UserError` if it is not there
    or, when called, does not give a list of lines.
    """
    if plug_in:
        return load_splitter(plug_in)
    import sentencex

    def split(paragraph: str) -> list[str]:
        return join_fragments(sentencex.segment(language, paragraph))

    return split


def join_fragments(parts: list[str]) -> list[str]:
    """What has no letter is no sentence: the number of an item goes with the sentence after it,
    marks (a bracket, a smile) go with the one before."""
    sentences, opening = [], ""
    for part in parts:
        if len(part) > LONGEST_FRAGMENT or any(map(str.isalpha, part)):
            sentences.append(opening + part)
            opening = ""
        elif sentences and not NUMBER.fullmatch(part):
            sentences[-1] += opening + part
            opening = ""
        else:
            opening += part
    return [*sentences[:-1], "".join(sentences[-1:]) + opening] if opening else sentences


def load_splitter(plug_in: str) -> Callable[[str], list[str]]:
    module, _, name = plug_in.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"corpus.sentence_splitter {plug_in} cannot be imported from {os.getcwd()}: {error}"
        ) from None

    def split(paragraph: str) -> list[str]:
        sentences = function(paragraph)
        if isinstance(sentences, list) and all(
            isinstance(sentence, str) and "\n" not in sentence for sentence in sentences
        ):
            return sentences
        raise UserError(
            f"corpus.sentence_splitter {plug_in} gave {str(sentences)[:80]!r} for "
            f"{paragraph[:80]!r}; it must give a list of str without line ends"
        )

    return split


def split_sentences(document: str, split: Callable[[str], list[str]]) -> Iterator[str]:
    """The sentences of a document in order; none spans two lines, is blank, or is too long.

    Cutting at white space loses no text; a run of `MAX_CHARACTERS` without any is cut where it
    stands.
    """
    for paragraph in document.split("\n"):
        if not paragraph or paragraph.isspace():
            continue
        for sentence in split(paragraph):
            if len(sentence) <= MAX_CHARACTERS:
                if sentence and not sentence.isspace():
                    yield sentence
                continue
            yield from cut(sentence)


def cut(sentence: str) -> Iterator[str]:
    start = 0
    while start < len(sentence):
        end = start + MAX_CHARACTERS
        if end < len(sentence):
            end = (sentence.rfind(" ", start + 1, end) + 1) or end
        part = sentence[start:end]
        if not part.isspace():
            yield part
        start = end
