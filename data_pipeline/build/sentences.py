"""Split documents into sentences of limited length."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, pairwise

from data_pipeline.common.plug_ins import load_plug_in

MAX_CHARACTERS = 2000  # longer sentences (logs, tables, missing full stops) are cut
LONGEST_FRAGMENT = 12  # anything with more characters counts as a sentence
NUMBER = re.compile(r"\W?\d{1,3}([.．]\d+)*\W+")  # the number of a list item: "1. ", "(2)", "3.1. "
# white space before a full stop; with one beyond ASCII, as in "B\xa0.", sentencex 1.0.32 panics;
# possessive, and begun once only, so that a long run of spaces takes linear time
SPACE = re.compile(r"(?<!\s)\s++(?=\.)")
STOPS = "。！？｡"  # ends of sentences in Chinese or Japanese
STOP = re.compile(f"[{STOPS}][”’」』]*")
# what continues a sentence after "approx.", but not after such a stop
AFTER_STOP = re.compile(f"({STOP.pattern})[0-9a-z]")
LONG = 4096  # characters after which a paragraph is cut at the next stop of any script
ANY_STOP = re.compile(rf"""{STOP.pattern}|[.!?؟۔।॥።][”’»)\]"']*+\s++(?=\S)""")
CLOSING = "』〉》】〕〟」”）"  # at the start of a sentence, these are of the one before
# sentencex pairs a quote or bracket with the next one, and finds no sentence end between them
HIDING = 512  # length of a sentence above which its quotes and brackets are ignored
NO_MARKS = str.maketrans(dict.fromkeys("\"'`“”„‘’«»‹›「」『』()[]{}<>", " "))


def sentence_splitter(language: str, plug_in: str | None = None) -> Callable[[str], list[str]]:
    """Return the function that splits a paragraph into sentences.

    language: ISO 639 code; sentencex splits about 300 languages.
    plug_in: `package.module:function` to use instead.
    Raises `UserError` if the plug-in cannot be imported or, when called, does not return a list of
    lines.
    """
    if plug_in:
        return load_plug_in("corpus.sentence_splitter", plug_in, find_lost_text)
    import sentencex

    def segment(text: str) -> list[str]:
        wide = not text.isascii()
        if wide and any(part[-1:] > "\x7f" and part[-1:].isspace() for part in text.split(".")):
            spaced = SPACE.sub(lambda found: " " * len(found[0]), text)
            return cut_alike(text, sentencex.segment(language, spaced))
        return sentencex.segment(language, text)

    def split(paragraph: str) -> list[str]:
        has_stops = not paragraph.isascii() and any(stop in paragraph for stop in STOPS)
        if len(paragraph) <= HIDING and not has_stops:
            return join_fragments(segment(paragraph))
        text = AFTER_STOP.sub(r"\1A", paragraph) if has_stops else paragraph
        parts = chain.from_iterable(map(segment, cut_at_stops(text)))
        plain = (segment(p.translate(NO_MARKS)) if len(p) > HIDING else [p] for p in parts)
        sentences = cut_alike(paragraph, chain.from_iterable(plain))
        return join_fragments(close_marks(sentences) if has_stops else sentences)

    return split


def cut_alike(text: str, parts: Iterable[str]) -> list[str]:
    """Cut a text into as many characters as each of the parts has."""
    return [text[a:b] for a, b in pairwise(accumulate(map(len, parts), initial=0))]


def close_marks(sentences: list[str]) -> list[str]:
    """Move closing quotes and brackets from the start of a sentence to the end of the one before,
    since sentencex 1.0.32 ends a sentence at a stop inside some of them, such as 『』."""
    found = []
    for sentence in sentences:
        if sentence[:1] in CLOSING and found:
            rest = sentence.lstrip(CLOSING)
            found[-1] += sentence[: len(sentence) - len(rest)]
            sentence = rest
        if sentence:
            found.append(sentence)
    return found


def cut_at_stops(paragraph: str) -> Iterator[str]:
    """Yield a paragraph in parts of `LONG` characters and the rest of a sentence, or in parts of
    five times as many that end at a space if possible.

    The time that sentencex 1.0.32 takes grows with the square of the number of stops: for a book in
    one line it would be hours.
    """
    start = 0
    while len(paragraph) > start + LONG:
        latest = start + 5 * LONG
        if found := ANY_STOP.search(paragraph, start + LONG, latest):
            end = found.end()
        elif len(paragraph) > latest:  # its stops are not known here
            places = range(latest - 1, start + LONG, -1)
            end = next((i + 1 for i in places if paragraph[i].isspace()), latest)
        else:
            break
        yield paragraph[start:end]
        start = end
    yield paragraph[start:]


def join_fragments(parts: list[str]) -> list[str]:
    """Join fragments without letters to a sentence beside them.

    The number of a list item joins the sentence after it; other marks (a bracket, an emoji) join
    the sentence before.
    """
    if parts and min(map(len, parts)) > LONGEST_FRAGMENT:
        return parts
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
    if opening:  # no sentence follows
        last = sentences.pop() if sentences else ""
        sentences.append(last + opening)
    return sentences


def find_lost_text(paragraph: str, sentences: list[str]) -> str | None:
    """Describe what is wrong with the sentences of a plug-in; None if nothing is."""
    if isinstance(sentences, list) and all(
        isinstance(sentence, str) and "\n" not in sentence for sentence in sentences
    ):
        return None
    return "it must return a list of str without line ends"


def split_sentences(document: str, split: Callable[[str], list[str]]) -> list[str]:
    """Split a document into sentences: each within a line, not blank, at most `MAX_CHARACTERS`.

    A longer sentence is cut at a space, or inside a word if it has no space to cut at.
    """
    found = []
    for paragraph in document.split("\n"):
        if not paragraph or paragraph.isspace():
            continue
        sentences = split(paragraph)
        if sentences and max(map(len, sentences)) > MAX_CHARACTERS:
            sentences = chain.from_iterable(map(cut, sentences))
        found += [sentence for sentence in sentences if sentence and not sentence.isspace()]
    return found


def cut(sentence: str) -> Iterator[str]:
    """Yield the parts of a sentence, each of at most `MAX_CHARACTERS`."""
    start = 0
    while start < len(sentence):
        end = start + MAX_CHARACTERS
        if end < len(sentence):
            places = range(end - 1, start, -1)
            end = next((i + 1 for i in places if sentence[i].isspace()), end)
        yield sentence[start:end]
        start = end
