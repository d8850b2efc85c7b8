"""Draw the journey of a finished run as one picture, from its store, record and export:

python scripts/draw_journey.py CONFIG OUT.svg [key=value ...]

Shows text, a pair, its masks, the loss and filled masks of held-out sentences.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from fill_mask import fill_mask
from tokenizers import Tokenizer

from data_pipeline.build.sentences import sentence_splitter, split_sentences
from data_pipeline.common.errors import UserError, run_command
from data_pipeline.common.folders import write_file
from data_pipeline.config import PairsConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus.readers import Rejects, read_documents
from data_pipeline.corpus.sources import list_file_chunks
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.manifest import SPLITS
from data_pipeline.sampling.pairs import LABELS, NO_PAIR
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.config import Config, phases_of
from pretrain.read_export import load_export
from pretrain.tracking import read_metrics

SEARCHED = 4000  # documents to choose from, and four times as many pairs and held-out sentences
LONGEST = 28  # tokens of a pair that fits the picture
WIDTH, MARGIN, LEFT, RIGHT, LINE = 830, 26, 66, 480, 21  # pixels; text starts at LEFT
HEIGHT = 1400  # more than is drawn; what is below it is cut off
INK, GREY, PALE, PLAIN = "#1f2328", "#59636e", "#d0d7de", "#eaeef2"
A, B, MASK = "#d8ebff", "#ffe7cf", "#7a3fd1"
CAPTIONS = {  # of a pair, by objective
    "nsp": "B follows A; in the other half of the pairs, B is from another document",
    "sop": "B follows A; in the other half of the pairs, they are swapped",
    "none": "one sequence, without a B",
}
OUTCOMES = ("right", "among its first four", "missed")


@dataclass
class Passage:
    """Consecutive sentences of a document whose tokens are one pair."""

    before: str
    a: str
    b: str
    after: str


@dataclass
class Filled:
    """A held-out sentence with one [MASK], its true word, and the model's (word, probability)."""

    sentence: str
    truth: str
    best: list[tuple[str, float]]

    @property
    def outcome(self) -> str:
        """How the model did: one of `OUTCOMES`."""
        words = [word for word, _ in self.best]
        return OUTCOMES[2 if self.truth not in words else words[0] != self.truth]


# --- what to show ---------------------------------------------------------------------------------


def read_sentences(config: Config) -> Iterator[list[str]]:
    """Yield the sentences of each document of the corpus."""
    sources = config.corpus.each_source()
    for chunk in list_file_chunks(config.corpus):
        source = sources[chunk.source]
        split = sentence_splitter(source.language, source.sentence_splitter)
        for document in read_documents(chunk, source, Rejects()):
            yield [sentence.strip() for sentence in split_sentences(document, split)]


def is_prose(text: str) -> bool:
    """Tell whether a text reads as one plain English sentence or more."""
    return re.fullmatch(r"[A-Z][A-Za-z ,]+[a-z]\.( [A-Z][A-Za-z ,]+[a-z]\.)*", text) is not None


def choose_pair(
    store: TokenStore, source: BatchSource, documents: list[list[str]], tokenizer: Tokenizer
) -> tuple[int, Passage]:
    """Choose the example to draw: plain prose of frequent words, if there is any.

    Returns its number in the run, and the text that it comes from: B follows A in it, or is empty
    if the run has no pairs. Raises `UserError` if no example is short enough.
    """
    passages = list_passages(documents, tokenizer, store.dtype)
    wanted = NO_PAIR if source.data.objective == "none" else 0
    best, chosen = -2.0, None
    pairs, _ = source.examples(0, min(source.part_size(0), SEARCHED * 4))
    for number, pair in enumerate(pairs):
        start, cut, end = int(pair["a_start"]), int(pair["a_end"]), int(pair["b_end"])
        key = store.tokens[start:end].tobytes(), cut - start
        if int(pair["label"]) != wanted or cut != int(pair["b_start"]) or key not in passages:
            continue
        passage, tokens = passages[key], store.tokens[start:end]
        labels = [store.vocabulary.pieces[i] for i in source.batch(number, 1).masked_labels]
        score = sum(map(is_prose, astuple(passage))) + len(set(tokens.tolist())) / LONGEST
        # frequent pieces come first in a vocabulary
        score -= 2 * int(tokens.max()) / len(store.vocabulary)
        score += 4 <= len(labels) <= 5 and all(label.isalpha() for label in labels)
        if score > best:
            best, chosen = score, (number, passage)
    if chosen is None:
        raise UserError(
            f"none of the first {SEARCHED:,} documents has an example of at most {LONGEST} tokens; "
            "the picture needs documents of several short sentences"
        )
    return chosen


def list_passages(
    documents: list[list[str]], tokenizer: Tokenizer, dtype: np.dtype
) -> dict[tuple[bytes, int], Passage]:
    """List the passages of at most `LONGEST` tokens, of one or two sentences as A and up to two as
    B: bytes of the tokens, and number of those of A -> passage."""
    found = {}
    for sentences in documents:
        ids = [np.array(one.ids, dtype) for one in encode(tokenizer, sentences)]
        for i in range(len(ids)):
            for middle in range(i + 1, min(i + 3, len(ids) + 1)):
                for end in range(middle, min(middle + 3, len(ids) + 1)):  # middle: without a B
                    tokens = np.concatenate(ids[i:end])
                    if len(tokens) <= LONGEST:
                        cut = len(np.concatenate(ids[i:middle]))
                        found[tokens.tobytes(), cut] = Passage(
                            sentences[i - 1] if i else "",
                            " ".join(sentences[i:middle]),
                            " ".join(sentences[middle:end]),
                            sentences[end] if end < len(sentences) else "",
                        )
    return found


def encode(tokenizer: Tokenizer, sentences: list[str]) -> list:
    return tokenizer.encode_batch(sentences, add_special_tokens=False)


def fill_sentences(
    export: Path, tokenizer: Tokenizer, held_out: TokenStore, documents: list[list[str]]
) -> list[Filled]:
    """Mask the middle word of held-out sentences; returns one example for each of `OUTCOMES`, of
    those that occur."""
    ends = held_out.sentence_offsets[: SEARCHED * 4]
    spans = {held_out.tokens[a:b].tobytes() for a, b in pairwise(ends)}
    model, filled = load_export(export), {}
    for sentences in documents:
        sentences = [s for s in sentences if is_prose(s) and 30 < len(s) < 46]
        for sentence, encoding in zip(sentences, encode(tokenizer, sentences), strict=True):
            if np.array(encoding.ids, held_out.dtype).tobytes() not in spans:
                continue
            pieces = [*encoding.tokens, ""]
            whole = [
                i
                for i, piece in enumerate(pieces[:-1])
                if piece.isalpha() and len(piece) > 4 and not pieces[i + 1].startswith("##")
            ]
            if not whole:
                continue
            middle = whole[len(whole) // 2]
            start, end = encoding.offsets[middle]
            masked = f"{sentence[:start]}[MASK]{sentence[end:]}"
            (best,) = fill_mask(model, export, masked, k=4)
            one = Filled(masked, pieces[middle], best)
            filled.setdefault(one.outcome, one)
            break  # one sentence of a document
    return [filled[outcome] for outcome in OUTCOMES if outcome in filled]


# --- how to show it -------------------------------------------------------------------------------


class Page:
    """A figure that is drawn in pixels from the top left, and cut off below what was drawn."""

    def __init__(self):
        try:
            import matplotlib
        except ImportError:
            raise UserError("matplotlib is missing; pip install -e '.[dev]'") from None
        matplotlib.use("svg")
        # glyphs as outlines, since the reader's fonts have other widths; the same file every time
        matplotlib.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "journey"}
        from matplotlib import pyplot as plt
        from matplotlib.font_manager import FontProperties
        from matplotlib.patches import Circle, FancyBboxPatch
        from matplotlib.textpath import text_to_path

        self.y = 0.0
        self.figure = plt.figure(figsize=(WIDTH / 96, HEIGHT / 96), dpi=96)
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.axis("off")
        self.font, self.measure = FontProperties, text_to_path
        self.patch, self.circle = FancyBboxPatch, Circle

    def width(self, text: str, size: float, weight: str = "normal") -> float:
        font = self.font(size=size, weight=weight)
        return self.measure.get_text_width_height_descent(text, font, ismath=False)[0]

    def write(self, x: float, y: float, text: str, size: float = 13, color: str = INK, **options):
        """Write a line of text whose baseline begins at (x, y)."""
        weight = options.pop("weight", "normal")
        font = self.font(size=size * 0.75, weight=weight)
        self.axes.text(x, y, text, fontproperties=font, color=color, parse_math=False, **options)

    def box(self, x: float, y: float, width: float, height: float, color: str, **options) -> None:
        """Draw a filled box with round corners and its top left corner at (x, y)."""
        shape = f"round,pad=0,rounding_size={options.pop('radius', 4)}"
        options = {"linewidth": 0} | options
        self.axes.add_patch(self.patch((x, y), width, height, shape, facecolor=color, **options))

    def heading(self, number: int, title: str, caption: str, x: float = LEFT) -> None:
        """Write the number, title and caption of a stage."""
        self.axes.add_patch(self.circle((x - 27, self.y - 5), 12, color=INK, linewidth=0))
        self.write(x - 27, self.y, str(number), 13, "white", weight="bold", ha="center")
        self.write(x, self.y, title, 15, weight="bold")
        self.write(x + self.width(title, 15, "bold") + 12, self.y, caption, 12, GREY)

    def flow(self, runs: list[tuple[str, str]]) -> None:
        """Write words on lines, each (text, background or "")."""
        size = 13
        x, space = LEFT, self.width("n n", size) - self.width("nn", size)
        for (word, color), (_, following) in pairwise([*runs, ("", "")]):
            width = self.width(word, size)
            if x + width > WIDTH - MARGIN:
                x, self.y = LEFT, self.y + LINE
            if color:  # as far as the next word, where that has the same colour
                more = 6 + space * (following == color)
                self.box(x - 3, self.y - 14, width + more, 19, color, radius=3)
            self.write(x, self.y, word, size, INK if color else GREY)
            x += width + space + 4 * (following != color)

    def chips(
        self, tokens: list[tuple[str, str, str]], line: float, x: float = LEFT, size: float = 12
    ) -> None:
        """Draw tokens in boxes on lines: each (token, background, what to predict or "")."""
        for token, color, label in tokens:
            width = max(self.width(token, size), self.width(label, 11.5)) + 9
            if x + width > WIDTH - MARGIN:
                x, self.y = LEFT, self.y + line
            self.box(x, self.y - 14, width, 20, color)
            ink = {MASK: "white", PLAIN: GREY}.get(color, INK)
            self.write(x + width / 2, self.y, token, size, ink, ha="center")
            if label:
                self.write(
                    x + width / 2, self.y + 20, label, 11.5, MASK, ha="center", weight="bold"
                )
            x += width + 3

    def save(self, path: Path) -> None:
        """Write what was drawn, on a white card, as SVG with numbers of one decimal."""
        from matplotlib.transforms import Bbox

        edge = {"radius": 12, "edgecolor": PALE, "linewidth": 1, "zorder": -2}
        self.box(1, 1, WIDTH - 2, self.y - 2, "white", **edge)
        file, top = BytesIO(), HEIGHT / 96
        cut = Bbox([[0, top - self.y / 96], [WIDTH / 96, top]])
        options = {"transparent": True, "metadata": {"Date": None}}
        self.figure.savefig(file, format="svg", bbox_inches=cut, **options)
        # a third of the size is layout of the file, comments and long names
        text = re.sub(r"<!--.*?-->|DejaVu|\s+", " ", file.getvalue().decode()).replace("> <", "><")
        text = re.sub(r"(scale\([^)]*\)|version=.1\.\d|\.\d)\d*", r"\1", text)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())


def draw_text(page: Page, counts: dict, passage: Passage) -> None:
    """Draw a passage of the corpus, with the sentences of the pair in colour."""
    page.y += 42
    page.heading(1, "Text", f"{counts['documents']:,} documents, {counts['sentences']:,} sentences")
    page.y += 28
    parts = ((passage.before, ""), (passage.a, A), (passage.b, B), (passage.after, ""))
    page.flow([(word, color) for text, color in parts for word in text.split()])


def draw_pair(page: Page, batch: Batch, pieces: list[str], data: PairsConfig) -> None:
    """Draw a batch of one sequence twice: as it was, and with its masks."""
    label = LABELS[data.objective][0]
    page.y += 46
    page.heading(
        2,
        "A pair" if label else "A sequence",
        f"{label}: " * bool(label) + CAPTIONS[data.objective],
    )
    labels = dict(zip(batch.masked_positions.tolist(), batch.masked_labels.tolist(), strict=True))
    tokens = [pieces[token] for token in batch.input_ids.tolist()]
    whole = [pieces[labels[i]] if i in labels else token for i, token in enumerate(tokens)]
    colors = [
        PLAIN if token in ("[CLS]", "[SEP]") else (A, B)[segment]
        for token, segment in zip(whole, batch.token_type_ids.tolist(), strict=True)
    ]
    page.y += 30
    page.chips([(token, color, "") for token, color in zip(whole, colors, strict=True)], 25)
    page.y += 48
    rate, unit = f"{data.masked_lm_prob:.0%} of the tokens", data.masking.replace("_", " ")
    caption = f"{rate}, by {unit}, afresh every epoch; below each, what to predict"
    page.heading(3, "Masks", caption)
    page.y += 30
    masked = [
        (token, MASK, whole[i]) if i in labels else (token, colors[i], "")
        for i, token in enumerate(tokens)
    ]
    page.chips(masked, 45)


def draw_filled(page: Page, filled: list[Filled], accuracy: float | None) -> None:
    """Draw held-out sentences with the words that the model finds most likely, to the right."""
    said = "held out" if accuracy is None else f"held out; {accuracy:.0%} of all are right"
    page.heading(5, "Filled masks", said, RIGHT)
    for one in filled:
        page.y += 30
        page.write(RIGHT, page.y, one.sentence, 12.5)
        page.y += 23
        best = [(f"{w} {p:.0%}", MASK if w == one.truth else PLAIN, "") for w, p in one.best]
        page.chips(best, 25, RIGHT, 11.5)
        page.y += 20
        page.write(RIGHT, page.y, f"truth: {one.truth} ({one.outcome})", 12, GREY)


def draw_loss(page: Page, lines: list[dict], x: float, y: float, width: float, height: float):
    """Draw the losses against steps, with the unigram entropy, in a box of the page."""
    place = (x / WIDTH, 1 - (y + height) / HEIGHT, width / WIDTH, height / HEIGHT)
    axes = page.figure.add_axes(place, facecolor="none")
    points = {
        name: np.array([(i["step"], i[name]) for i in lines if i.get(name) is not None])
        for name in ("train/mlm_loss", "eval/mlm_loss", "eval/unigram_entropy")
    }
    train, held_out, entropy = points.values()
    axes.plot(*train.T, color="#54a0e8", linewidth=1.2)
    small, last = page.font(size=9), train[-1, 0]
    if len(held_out):
        axes.plot(*held_out.T, "o-", color=MASK, linewidth=1.5, markersize=4)
        axes.axhline(entropy[-1, 1], color=INK, linewidth=1, dashes=(4, 3))
        at = dict(fontproperties=small, ha="right", va="bottom")
        axes.text(
            last, entropy[-1, 1] + 0.08, f"unigram entropy: {entropy[-1, 1]:.2f}", color=INK, **at
        )
        axes.text(last, held_out[-1, 1] + 0.2, f"held out: {held_out[-1, 1]:.2f}", color=MASK, **at)
    i = len(train) // 10
    axes.text(*(train[i] + (last / 40, 0.1)), "training", fontproperties=small, color="#2f7fcc")
    axes.set_xlim(0, last * 1.02)
    low = min(train[:, 1].min(), *held_out[:, 1]) if len(held_out) else train[:, 1].min()
    axes.set_ylim(low - 0.8, train[:, 1].max() + 0.2)
    axes.locator_params(nbins=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(colors=GREY, length=3, color=PALE, labelsize=8.5)
    axes.set_xlabel("step", fontproperties=small, color=GREY)


def draw_journey(config: Config, out: Path) -> None:
    """Draw a run's journey to `out`; raises `UserError` if it is not finished, or has no text that
    fits."""
    page = Page()
    data, run, export = Path(config.data_dir), Path(config.run_dir), Path(config.run_dir, "export")
    lines = read_metrics(run / "metrics.jsonl")
    if not lines or not (export / "config.json").exists():
        raise UserError(f"no finished run in {run}; python -m pretrain CONFIG makes one")
    vocabulary = read_vocabulary(data / "vocab")
    store, held_out = (TokenStore.open(data / "store", split, vocabulary) for split in SPLITS)
    phases = phases_of(config)
    phase = next((one for one in phases if one.data.single_segment_prob < 1), phases[0])
    source = BatchSource(store, phase.data, phase.seed)
    tokenizer = Tokenizer.from_file(str(data / "vocab/tokenizer.json"))
    documents = list(islice(read_sentences(config), SEARCHED))
    number, passage = choose_pair(store, source, documents, tokenizer)
    batch = source.batch(number, 1)
    filled = fill_sentences(export, tokenizer, held_out, documents)

    draw_text(page, store.manifest["train"], passage)
    draw_pair(page, batch, vocabulary.pieces, phase.data)
    page.y += 68
    top = page.y
    page.heading(4, "Training", f"masked-LM loss in nats, {lines[-1]['step']:,} steps")
    draw_loss(page, lines, LEFT + 18, top + 14, 330, 190)
    draw_filled(page, filled, lines[-1].get("eval/mlm_accuracy"))
    page.y = top + 260
    page.save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("out", metavar="OUT.svg", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    draw_journey(load_config(Config, args.config, args.overrides), args.out)
    print(f"drew {args.out}")


if __name__ == "__main__":
    run_command(main)
