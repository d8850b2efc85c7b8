"""Write the data report: a page that shows what a run will train on.

`python -m data_pipeline.report CONFIG [key=value ...]` writes `data_dir/report.html` and
`data_dir/report.json`.
"""

import argparse
import html
import json
import math
import re
from pathlib import Path

from data_pipeline.common.errors import red
from data_pipeline.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS, DataConfig, load_config
from data_pipeline.corpus.readers import left_out
from data_pipeline.report.audit import CHINESE, LONG, audit_store, percent, pieces_name
from data_pipeline.sampling.pairs import LABELS
from data_pipeline.sampling.token_store import TokenStore, held_out_shortfall, read_vocabulary

KINDS = {"mask": "[MASK]", "random": "a random piece in its place", "kept": "kept as it was"}
FIGURE = re.compile(r"([≤≥] )?[\d,.]+( %| of [\d,]+)?( ± [\d.]+)?|")
COLOURS = ("#2563eb", "#ea580c")
STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem; background: #fff}
h1 {font-size: 1.6rem; margin: 0} h2 {font-size: 1.2rem; margin: 2.2rem 0 .6rem;
  border-bottom: 1px solid #d1d5db} p {max-width: 75ch; margin: .5rem 0}
table {border-collapse: collapse; margin: .6rem 0} td, th {padding: .15rem .9rem .15rem 0;
  text-align: left; vertical-align: top; border-bottom: 1px solid #eef0f3}
td:first-child {overflow-wrap: anywhere}
th {font-weight: 600; color: #4b5563} .n {text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums}
.good {color: #15803d} .bad {color: #b91c1c; font-weight: 700} .soft {color: #6b7280}
.charts {display: flex; flex-wrap: wrap; gap: 1rem} figure {margin: .4rem 0}
figcaption {font-weight: 600; font-size: .9rem} svg text {font: 11px system-ui, sans-serif;
  fill: #4b5563}
.pair {margin: .9rem 0; padding: .5rem .9rem; border: 1px solid #e5e7eb; border-radius: 6px}
.pair p {max-width: none; line-height: 2.5; margin: 0} .pair b {margin-right: .5rem}
.tag {font-size: .8rem; font-weight: 600; color: #6b7280}
ruby {padding: 0 .25em; border-radius: 4px}
rt {font-size: .7em; color: #374151; padding-bottom: 3px}
.mask {background: #bfdbfe} .random {background: #fed7aa} .kept {background: #bbf7d0}
"""


# ------------------------------------------------------------------------------------- parts


def table(head: list[str], rows: list[list]) -> str:
    """Render an HTML table, with columns of figures after the first aligned right.

    Escapes the cells, except those that are a `<span>`.
    """
    texts = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row] for row in rows]
    right = [
        i > 0 and all(FIGURE.fullmatch(re.sub("<.*?>", "", text)) for text in column)
        for i, column in enumerate(zip(*texts, strict=True))
    ]
    number = ' class="n"'

    def line(row: list[str], tag: str) -> str:
        cells = []
        for text, is_right in zip(row, right, strict=True):
            text = text if text.startswith("<span") else html.escape(text)
            cells.append(f"<{tag}{number * is_right}>{text}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in texts)}</table>"


def chart(
    title: str,
    unit: str,
    ticks: list[tuple[float, str]],
    series: dict[str, list[float]],
    line: float | None = None,
) -> str:
    """Draw fractions (0 to 1) in bins as an SVG figure.

    The first series is an area, others are lines.
    ticks: (position in bins, text) of each tick. line: height of a dashed line.
    """
    left, right, top, bottom = 40, 318, 10, 150
    bins = max(len(values) for values in series.values())
    highest = 1.1 * max([line or 0, *(max(values) for values in series.values())]) or 1
    step = 10 ** math.floor(math.log10(highest))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if highest / s < 6)

    def x(place: float) -> str:
        return f"{left + (right - left) * place / bins:.1f}"

    def y(share: float) -> str:
        return f"{bottom - (bottom - top) * share / highest:.1f}"

    def text(place: str, words: str, anchor: str = "middle") -> str:
        return f'<text {place} text-anchor="{anchor}">{html.escape(words)}</text>'

    parts = []
    for k in range(int(highest / step) + 1):
        at = y(k * step)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at}" y2="{at}" stroke="#e5e7eb"/>')
        parts.append(text(f'x="{left - 5}" y="{at}" dy="4"', f"{100 * k * step:g}%", "end"))
    parts += [text(f'x="{x(place)}" y="{bottom + 15}"', words) for place, words in ticks]
    for number, values in enumerate(series.values()):
        steps = " ".join(f"V{y(v)} H{x(i + 1)}" for i, v in enumerate(values))
        colour, fill = COLOURS[number], "none" if number else COLOURS[0]
        path = f'd="M{x(0)} {y(0)} {steps} V{y(0)}" fill="{fill}" fill-opacity=".18"'
        parts.append(f'<path {path} stroke="{colour}" stroke-width="1.5"/>')
    if line is not None:
        ends = f'x1="{left}" x2="{right}" y1="{y(line)}" y2="{y(line)}"'
        parts.append(f'<line {ends} stroke="#374151" stroke-dasharray="5 4"/>')
    parts.append(text(f'x="{(left + right) / 2}" y="{bottom + 33}"', unit))
    names = [f'<span style="color: {c}">{n}</span>' for n, c in zip(series, COLOURS, strict=False)]
    title = f"{html.escape(title)}: {', '.join(names)}" if len(series) > 1 else html.escape(title)
    size = 'width="340" height="190" viewBox="0 0 340 190" role="img"'
    return f"<figure><figcaption>{title}</figcaption><svg {size}>{''.join(parts)}</svg></figure>"


def histogram_chart(title: str, unit: str, *histograms: dict, names: tuple = ("",)) -> str:
    """Draw a histogram, or several in one chart, one for each of `names`."""
    edges = histograms[0]["edges"]
    ticks = []
    for i in range(0, len(edges), max(1, round((len(edges) - 1) / (4 if edges[-1] <= 1 else 6)))):
        shown = f"{edges[i] / 1000:.3g}k" if edges[i] >= 10_000 else f"{edges[i]:,.0f}"
        ticks.append((i, f"{100 * edges[i]:.0f}%" if edges[-1] <= 1 else shown))
    shares = [[n / max(sum(h["counts"]), 1) for n in h["counts"]] for h in histograms]
    return chart(title, unit, ticks, dict(zip(names, shares, strict=True)))


def charts(*figures: str) -> str:
    """Place charts side by side."""
    return f'<div class="charts">{"".join(figures)}</div>'


# ------------------------------------------------------------------------------------- the page


def render_sources(sources: list[dict]) -> str:
    """Render a table of what was read from each source; "" for old stores without sources."""
    if not sources:
        return ""
    sizes = ("bytes", "documents", "sentences", "words", "tokens")
    rows = [
        [s["name"], s["layout"], f"{s['weight']:g}", *(s[name] for name in sizes)]
        + [left_out(s["rejects"])]
        for s in sources
    ]
    head = ["Source", "Layout", "Weight", *(name.capitalize() for name in sizes), "Left out"]
    return table(head, rows)


def render_corpus(result: dict) -> str:
    corpus, vocabulary, store = result["corpus"], result["vocabulary"], result["store"]
    rows = []
    for split in ("train", "held_out"):
        counts = [store[split][name] for name in ("documents", "sentences", "tokens")]
        each = [f"{b / max(a, 1):,.1f}" for a, b in zip(counts, counts[1:], strict=False)]
        rows.append([split.replace("_", " "), *counts, *each])
    longest = [
        [d["document"], d["tokens"], d["sentences"], percent(d["share"]), d["begins"] + " …"]
        for d in corpus["longest_documents"]
    ]
    entropy = vocabulary["unigram_entropy"]
    facts = [
        ["Pieces of the vocabulary", vocabulary["pieces"]],
        ["Tokens a word", f"{vocabulary['tokens_per_word']:.3f}"],
        ["[UNK]", f"{100 * vocabulary['unknown']:.3f} %"],
        ["Pieces of one letter or Chinese character", percent(vocabulary["single_letters"])],
        ["Pieces that never occur", percent(vocabulary["never_used"])],
        ["Unigram entropy, nats", f"{entropy:.3f}"],
        ["Its perplexity", f"{math.exp(entropy):,.0f}"],
    ]
    head = ["", "Documents", "Sentences", "Tokens", "Sentences a document", "Tokens a sentence"]
    return (
        "<h2>Corpus</h2>" + table(head, rows) + render_sources(store.get("sources", []))
        + charts(
            histogram_chart("Documents", "tokens of a document", corpus["document_tokens"]),
            histogram_chart("Documents", "sentences of a document", corpus["document_sentences"]),
            histogram_chart("Sentences", "tokens of a sentence", corpus["sentence_tokens"]),
        )
        + "<h2>Longest documents</h2>"
        + table(["Document", "Tokens", "Sentences", "Share", "Begins"], longest)
        + "<h2>Vocabulary on this text</h2>" + table(["", ""], facts)
        + "<p>Unigram entropy is the masked-token loss of a model that ignores the context: a run "
        "that stays there has learned nothing else.</p>"
    )  # fmt: skip


def render_pairs(result: dict) -> str:
    epoch, coverage = result["epoch"], result["coverage"]
    facts = [
        ["Sequences of an epoch", epoch["sequences"]],
        ["Tokens a sequence, special ones apart", f"{epoch['tokens_per_sequence']:.1f}"],
        ["Tokens cut off in the middle of a sentence", coverage["cut"]],
        ["Tokens of whole sentences left out (texts of one word)", coverage["left_out"]],
        ["Segments that start or end inside a word", epoch["edges_inside_words"]],
    ]
    text = "<h2>Pairs</h2>" + table(["", ""], facts)
    if "pairs" not in result:
        return text + charts(histogram_chart("Sequences", "tokens of a sequence", epoch["lengths"]))
    pairs, overlap = result["pairs"], result["overlap"]
    rows = [
        [what, percent(figures["accuracy"]), percent(figures["balanced"])]
        for what, figures in (
            ("always the majority", {"accuracy": pairs["majority"], "balanced": 0.5}),
            ("the lengths of A and B", pairs["by_lengths"]),
            ("the total length", pairs["by_total"]),
            ("the share of A's words that B has too", overlap),
        )
    ]
    histograms = [
        (what, f"tokens of {what}", pairs["lengths"][name])
        for name, what in (("a", "A"), ("b", "B"), ("total", "A and B"))
    ]
    histograms.append(("Words of A in B", "share of A's words", overlap["histograms"]))
    names = LABELS[result["settings"]["objective"]]
    return (
        text
        + f"<p>Measured on {pairs['pairs']:,} pairs. What tells the labels apart, fitted on one "
        "half of the documents, tested on the other; with both labels at equal weight, 50 % is "
        "chance. Lengths must tell nothing. Shared words may: they are the meaning "
        "in its simplest form, and what a trained model has to beat.</p>"
        + table(["Label guessed from", "Accuracy", "Labels at equal weight"], rows)
        + charts(*(histogram_chart(what, unit, *x, names=names) for what, unit, x in histograms))
    )


def render_masks(result: dict) -> str:
    masks, prob = result["masks"], result["settings"]["masked_lm_prob"]
    rates = masks["by_pieces"]
    rows = [[pieces_name(r["pieces"]), r["words"], percent(r["masked"])] for r in rates]
    ticks = [(i + 0.5, f"{r['pieces']}{'+' * (r['pieces'] == LONG)}") for i, r in enumerate(rates)]
    by_pieces = {"": [r["masked"] for r in rates]}
    unit = "of its tokens (40% or more in the last bar)"
    return (
        "<h2>Masks</h2>"
        f"<p>Measured on {masks['sequences']:,} sequences ({masks['tokens']:,} tokens); "
        f"{masks['without_masks']:,} of them have no mask.</p>"
        + charts(
            chart("Words masked, by length", "pieces of the word", ticks, by_pieces, prob),
            histogram_chart("Share masked of each sequence", unit, masks["per_sequence"]),
        )
        + table(["Words of", "Number", "Masked"], rows)
    )


def render_words(words: list[tuple[str, str, str]]) -> str:
    """Render the words of a segment; a masked word is coloured, with the original word above it.

    Puts spaces between words except between Chinese characters and before continuations.
    """
    parts, before = [], ""
    for text, shown, kind in words:
        chinese = re.fullmatch(CHINESE * 2, before[-1:] + text[0])
        if parts and not chinese and not text.startswith("##"):
            parts.append(" ")
        before, text = text, html.escape(text.removeprefix("##"))
        if kind:
            text = f'<ruby class="{kind}">{html.escape(shown)}<rt>{text}</rt></ruby>'
        parts.append(text)
    return "".join(parts)


def render_examples(result: dict) -> str:
    legend = [f'<span class="{kind}">&nbsp;{text}&nbsp;</span>' for kind, text in KINDS.items()]
    names = LABELS[result["settings"]["objective"]]
    parts = [
        "<h2>Pairs as the model sees them</h2>",
        f"<p>To be predicted: {', '.join(legend)}.</p>",
    ]
    for number, example in enumerate(result["examples"], 1):
        tag = f"{number} · {names[example['label']]}" if "pairs" in result else str(number)
        lines = [
            f"<p><b>{name}</b>{render_words(words)}</p>"
            for name, words in zip("AB", example["segments"], strict=True)
            if words
        ]
        parts.append(f'<div class="pair"><span class="tag">{tag}</span>{"".join(lines)}</div>')
    return "".join(parts)


def render_checks(result: dict) -> str:
    """Render a table with a row per check.

    `result["beside"]`, if present, maps names of other rules to their checks; each gets a column.
    """
    marks = {True: '<span class="good">✓ holds</span>', False: '<span class="bad">✗ fails</span>'}
    others = result.get("beside", {})
    found = {
        (
            rule,
            check["name"],
        ): f'<span class="{"" if check["holds"] else "bad"}">{check["found"]}</span>'
        for rule, checks in others.items()
        for check in checks
    }
    rows = [
        [marks[check["holds"]], check["name"], check["found"], check["wanted"]]
        + [found.get((rule, check["name"]), "") for rule in others]
        for check in result["checks"]
    ]
    return table(["", "What", "Found", "Wanted", *others], rows)


def render_page(result: dict) -> str:
    """Render the report as one HTML page that loads no other files."""
    bad = sum(not check["holds"] for check in result["checks"])
    verdict = f"{bad} of {len(result['checks'])} checks do not hold" if bad else "All checks hold"
    settings = ", ".join(
        f"{name} {value}" for name, value in result["settings"].items() if value is not None
    )
    shortfall = held_out_shortfall(result["store"])
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        f"<title>Data report</title><style>{STYLE}</style></head><body>",
        f"<h1>What is in {html.escape(result['data_dir'])}</h1>",
        f'<p class="soft">{html.escape(settings)}</p>',
        f'<p class="{"bad" if bad else "good"}">{verdict}.</p>',
        f'<p class="bad">Warning: {shortfall}.</p>' if shortfall else "",
        render_checks(result),
        *(
            render(result)
            for render in (render_corpus, render_pairs, render_masks, render_examples)
        ),
        "</body></html>\n",
    ]
    return "".join(parts)


# ------------------------------------------------------------------------------------- the command


def measure(config: DataConfig) -> dict:
    """Measure everything in the report; raises `UserError` if `data_dir` is not prepared."""
    folder = Path(config.data_dir)
    store = TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    print(f"drawing the pairs of an epoch from {len(store):,} tokens")
    result = {"data_dir": str(config.data_dir), "store": store.manifest}
    result |= audit_store(store, config.data, config.seed)
    return result | {"checks": result["checks"] + check_held_out(store.manifest)}


def check_held_out(manifest: dict) -> list[dict]:
    """Check that the held-out split is large enough for its losses to be trusted."""
    wanted = {"documents": HELD_OUT_DOCUMENTS, "tokens": HELD_OUT_TOKENS}
    found = {name: manifest["held_out"][name] for name in wanted}
    return [
        {
            "name": f"Held-out {name}",
            "found": f"{found[name]:,}",
            "wanted": f"≥ {wanted[name]:,}",
            "holds": found[name] >= wanted[name],
        }
        for name in wanted
    ]


def write_report(result: dict) -> None:
    """Write the result of `measure` to `report.json` and `report.html` in its `data_dir`."""
    folder = Path(result["data_dir"])
    for name, text in (
        ("report.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n"),
        ("report.html", render_page(result)),
    ):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)
    print(f"report: {folder / 'report.html'}")


def main() -> None:
    """Write the report of a prepared corpus, and print its checks."""
    parser = argparse.ArgumentParser(prog="python -m data_pipeline.report", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    config = load_config(
        DataConfig, args.config, args.overrides, others=("model", "train", "tracking", "export")
    )
    result = measure(config)
    for check in result["checks"]:
        line = f"{check['name']}: {check['found']} (wanted {check['wanted']})"
        print(f"holds  {line}" if check["holds"] else red(f"FAILS  {line}"))
    if shortfall := held_out_shortfall(result["store"]):
        print(red(f"warning: {shortfall}"))
    write_report(result)
