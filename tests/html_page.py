"""Read an HTML page as a browser would, to compare what it shows with what it was made from."""

import re
from collections import Counter
from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags that are open, all tags and attributes, the text, and the rows of all tables."""

    def __init__(self, text: str):
        super().__init__()
        self.source = text
        self.open, self.tags, self.attributes, self.text = [], Counter(), set(), ""
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attributes}
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def assert_whole(self) -> None:
        """Assert that all tags are closed, and that nothing is loaded or run."""
        assert not self.open
        assert not {"script", "link", "img", "iframe", "object", "base"} & set(self.tags)
        assert not {"src", "href"} & self.attributes
        assert not [name for name in self.attributes if name.startswith("on")]
        assert not [x for x in ("url(", "@import", "http:", "https:") if x in self.source]
        assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", self.source, re.S))
