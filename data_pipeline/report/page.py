"""Write the data report: a page that shows what a run will train on.

`python -m data_pipeline.report CONFIG [key=value ...]` writes `data_dir/report.html` and
`data_dir/report.json`.
"""

import json
import math
import re
from pathlib import Path

from markupsafe import Markup, escape

from data_pipeline.build.assemble import SIZES
from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import red
from data_pipeline.common.folders import write_file
from data_pipeline.common.pages import Line, draw_chart, render_template
from data_pipeline.common.reading import read_json
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus.readers import left_out
from data_pipeline.report.audit import CHINESE, LONG, audit_store
from data_pipeline.report.checks import check_held_out, check_results, percent, pieces_name
from data_pipeline.sampling.manifest import (
    SPLITS,
    held_out_shortfall,
    lack_of_sentences,
    list_other_settings,
)
from data_pipeline.sampling.pairs import LABELS, NO_PAIR
from data_pipeline.sampling.soundness import check_data
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from data_pipeline.vocabulary.coverage import describe_accents

KINDS = {"mask": "[MASK]", "random": "a random piece in its place", "kept": "kept as it was"}
FEW_DOCUMENTS = 1000  # below this, random segments B often come from the same few documents
MUCH_OF_THE_TEXT = 0.1  # share of the text above which a document is too long for one topic
MUCH_UNKNOWN = 0.01  # share of [UNK]


# ------------------------------------------------------------------------------------- warnings


def list_warnings(result: dict) -> list[str]:
    """List unusual properties of the text and the vocabulary, their effects, and remedies."""
    store, warnings = result["store"], []
    if result["other_settings"]:
        warnings.append(
            "the store was built with other settings than the config's "
            f"({'; '.join(result['other_settings'])}); it is measured as it is"
        )
    if shortfall := held_out_shortfall(store):
        warnings.append(shortfall)
    if few := lack_of_sentences(store, result["settings"]["objective"]):
        warnings.append(few)
    if (documents := store["train"]["documents"]) < FEW_DOCUMENTS:
        found = f"only {documents:,} document{' is' if documents == 1 else 's are'} trained on"
        warnings.append(
            f"{found}, so the text has few topics, and random segments come from the "
            "same few documents again and again; add text, or mark where "
            "documents begin"
        )
    longest = result["corpus"]["longest_documents"][0]
    if longest["share"] > MUCH_OF_THE_TEXT:
        warnings.append(
            f"document {longest['document']:,} holds {longest['share']:.0%} of all tokens; if it "
            "consists of several texts, mark where they begin (corpus.layout)"
        )
    if lost := describe_accents(result.get("accents", {})):
        warnings.append(lost)
    if (unknown := result["vocabulary"]["unknown"]) > MUCH_UNKNOWN:
        warnings.append(
            f"{percent(unknown)} of the tokens are [UNK], since the vocabulary lacks their "
            "characters; raise vocab.character_coverage, or check corpus.encoding"
        )
    return warnings


# ------------------------------------------------------------------------------------- charts


def draw_bins(
    title: str,
    unit: str,
    ticks: list[tuple[float, str]],
    series: dict[str, list[float]],
    level: float | None = None,
) -> dict:
    """Draw fractions (0 to 1) in bins: the first series as an area, others as lines.

    ticks: (position in bins, text) of each tick. level: height of a dashed line.
    """
    lines = []
    for number, (name, values) in enumerate(series.items()):
        edges = [(i + side, value) for i, value in enumerate(values) for side in (0, 1)]
        points = [(0, 0.0), *edges, (len(values), 0.0)]
        lines.append(Line(name, points, number, "outline" if number else "area"))
    if level is not None:
        bins = max(map(len, series.values()))
        lines.append(Line("wanted", [(0, level), (bins, level)], None, "dashed"))
    return draw_chart(title, "", lines, x_unit=unit, x_ticks=ticks, from_zero=True, percent=True)


def draw_histogram(title: str, unit: str, *histograms: dict, names: tuple = ("",)) -> dict:
    """Draw a histogram, or several in one chart, one for each of `names`."""
    edges = histograms[0]["edges"]
    are_shares = edges[-1] <= 1
    step = max(1, round((len(edges) - 1) / (4 if are_shares else 5)))

    def say(edge: float) -> str:
        if are_shares:
            return f"{100 * edge:.0f}%"
        return f"{edge / 1000:.3g}k" if edge >= 10_000 else f"{edge:,.0f}"

    ticks = [(i, say(edges[i])) for i in range(0, len(edges), step)]
    shares = [[n / max(sum(h["counts"]), 1) for n in h["counts"]] for h in histograms]
    return draw_bins(title, unit, ticks, dict(zip(names, shares, strict=True)))


def chart_corpus(corpus: dict) -> list[dict]:
    return [
        draw_histogram("Tokens of a document", "tokens", corpus["document_tokens"]),
        draw_histogram("Sentences of a document", "sentences", corpus["document_sentences"]),
        draw_histogram("Tokens of a sentence", "tokens", corpus["sentence_tokens"]),
    ]


def chart_pairs(result: dict) -> list[dict]:
    if "pairs" not in result:
        return [draw_histogram("Tokens of a sequence", "tokens", result["epoch"]["lengths"])]
    pairs, overlap = result["pairs"], result["overlap"]
    names = LABELS[result["settings"]["objective"]]
    lengths = (("a", "Tokens of A"), ("b", "Tokens of B"), ("total", "Tokens of A and B"))
    return [
        *(draw_histogram(t, "tokens", *pairs["lengths"][x], names=names) for x, t in lengths),
        draw_histogram(
            "Words of A in B", "share of A's words", *overlap["histograms"], names=names
        ),
    ]


def chart_masks(result: dict) -> list[dict]:
    masks, prob = result["masks"], result["settings"]["masked_lm_prob"]
    rates = masks["by_pieces"]
    ticks = [(i + 0.5, f"{r['pieces']}{'+' * (r['pieces'] == LONG)}") for i, r in enumerate(rates)]
    unit = "of its tokens (40% or more in the last bar)"
    return [
        draw_bins(
            "Words masked, by length",
            "pieces of the word",
            ticks,
            {"masked": [r["masked"] for r in rates]},
            prob,
        ),
        draw_histogram("Share masked of each sequence", unit, masks["per_sequence"]),
    ]


# ------------------------------------------------------------------------------------- tables


def list_sizes(result: dict) -> list[tuple[str, str, str]]:
    """List the sizes of the corpus: (what, number, remark)."""
    epoch = result["epoch"]
    train, held_out = (result["store"][split] for split in SPLITS)
    remark = f"{epoch['tokens_per_sequence']:.1f} tokens each, without special ones"
    return [
        *(
            (name, f"{train[name]:,}", f"{held_out[name]:,} more held out")
            for name in ("documents", "sentences", "tokens")
        ),
        ("sequences of an epoch", f"{epoch['sequences']:,}", remark),
    ]


def list_sources(sources: list[dict]) -> list[list]:
    """List what was read from each source, in the order of the table's columns."""
    return [
        [s["name"], s["layout"], f"{s['weight']:g}", *(s[name] for name in SIZES)]
        + [left_out(s["rejects"])]
        for s in sources
    ]


def list_vocabulary(vocabulary: dict) -> list[tuple[str, str, str]]:
    """List how well the vocabulary fits the text: (what, number, remark)."""
    entropy = vocabulary["unigram_entropy"]
    return [
        ("pieces", f"{vocabulary['pieces']:,}", f"{percent(vocabulary['never_used'])} never occur"),
        (
            "tokens per word",
            f"{vocabulary['tokens_per_word']:.3f}",
            "a word is what is masked whole",
        ),
        ("[UNK]", f"{100 * vocabulary['unknown']:.3f} %", "of the tokens"),
        (
            "single letters",
            percent(vocabulary["single_letters"]),
            "or Chinese characters, of the tokens",
        ),
        ("unigram entropy, nats", f"{entropy:.3f}", f"a perplexity of {math.exp(entropy):,.0f}"),
    ]


def list_guesses(result: dict) -> list[list]:
    """List what tells the labels apart, and how well: over all pairs, labels at equal weight."""
    if "pairs" not in result:
        return []
    pairs = result["pairs"]
    rows = (
        ("always the majority", {"accuracy": pairs["majority"], "balanced": 0.5}),
        ("the lengths of A and B", pairs["by_lengths"]),
        ("the total length", pairs["by_total"]),
        ("the share of A's words that B has too", result["overlap"]),
    )
    return [[what, percent(x["accuracy"]), percent(x["balanced"])] for what, x in rows]


def list_checks(result: dict) -> tuple[list[str], list[list]]:
    """List the checks: the head of their table, and a row for each.

    `result["beside"]`, if present, maps names of other rules to their checks; each gets a column.
    """
    marks = {
        True: Markup('<span class="good">✓ holds</span>'),
        False: Markup('<span class="bad">✗ fails</span>'),
    }
    others = result.get("beside", {})
    bad = Markup('<span class="bad">{}</span>')
    found = {
        (rule, check["name"]): check["found"] if check["holds"] else bad.format(check["found"])
        for rule, checks in others.items()
        for check in checks
    }
    rows = [
        [check["name"], check["found"], check["wanted"], marks[check["holds"]]]
        + [found.get((rule, check["name"]), "") for rule in others]
        for check in result["checks"]
    ]
    return ["What", ">Found", ">Wanted", "", *(f">{rule}" for rule in others)], rows


def render_words(words: list[tuple[str, str, str]]) -> Markup:
    """Render the words of a segment; a masked word is coloured, with the original word above it.

    Puts spaces between words except between Chinese characters and before continuations.
    """
    parts, before = [], ""
    for text, shown, kind in words:
        chinese = re.fullmatch(CHINESE * 2, before[-1:] + text[0])
        if parts and not chinese and not text.startswith("##"):
            parts.append(" ")
        before, text = text, escape(text.removeprefix("##"))
        if kind:
            text = Markup('<ruby class="{}">{}<rt>{}</rt></ruby>').format(kind, shown, text)
        parts.append(text)
    return Markup("").join(parts)


def list_examples(result: dict) -> list[tuple[str, list[tuple[str, Markup]]]]:
    """List the example sequences: (heading, [(name of the segment, its words)])."""
    names = dict(enumerate(LABELS[result["settings"]["objective"]])) | {NO_PAIR: "one segment"}
    return [
        (
            f"{number} · {names[example['label']]}",
            [
                (name, render_words(words))
                for name, words in zip("AB", example["segments"], strict=True)
                if words
            ],
        )
        for number, example in enumerate(result["examples"], 1)
    ]


def render_page(result: dict) -> str:
    """Render the report as one HTML page that loads no other files."""
    corpus, masks = result["corpus"], result["masks"]
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    return render_template(
        Path(__file__).with_name("page.html"),
        result=result,
        settings=", ".join(f"{name} {value}" for name, value in settings.items()),
        warnings=list_warnings(result),
        sizes=list_sizes(result),
        checks=list_checks(result),
        failing=[check for check in result["checks"] if not check["holds"]],
        sources=list_sources(result["store"].get("sources", [])),
        corpus_charts=chart_corpus(corpus),
        longest=[
            [d["document"], d["tokens"], d["sentences"], percent(d["share"]), d["begins"] + " …"]
            for d in corpus["longest_documents"]
        ],
        vocabulary=list_vocabulary(result["vocabulary"]),
        guesses=list_guesses(result),
        pair_charts=chart_pairs(result),
        mask_charts=chart_masks(result),
        mask_rates=[
            [pieces_name(r["pieces"]), r["words"], percent(r["masked"])] for r in masks["by_pieces"]
        ],
        kinds={kind: text for kind, text in KINDS.items() if masks["replaced"][kind]},
        examples=list_examples(result),
    )


# ------------------------------------------------------------------------------------- the command


def measure(config: DataConfig) -> dict:
    """Measure everything in the report; raises `UserError` if `data_dir` is not prepared."""
    folder = Path(config.data_dir)
    check_data(folder)
    store = TokenStore.open(folder / "store", "train", read_vocabulary(folder / "vocab"))
    print(f"drawing the pairs of an epoch from {len(store):,} tokens")
    result = {"data_dir": str(config.data_dir), "store": store.manifest}
    result |= audit_store(store, config.data, config.seed)
    shape = {"accents?": {"lost?": float, "examples?": [[str]]}}
    fit = read_json(folder / "vocab/report.json", shape, "put an intact copy back")
    return result | {
        "other_settings": list_other_settings(config, store.manifest),
        "accents": fit.get("accents", {}),  # stores of earlier versions did not measure it
        "checks": check_results(result) + check_held_out(store.manifest),
    }


def write_report(result: dict) -> None:
    """Write the result of `measure` to `report.json` and `report.html` in its `data_dir`."""
    folder = Path(result["data_dir"])
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    page = render_page(result)
    write_file(folder / "report.json", text.encode("utf-8"))
    write_file(folder / "report.html", page.encode("utf-8"))
    print(f"report: {folder / 'report.html'}")


def main() -> None:
    """Write the report of a prepared corpus, and print its checks."""
    parser = config_parser(__doc__, "python -m data_pipeline.report")
    args = parser.parse_intermixed_args()
    config = load_config(DataConfig, args.config, args.overrides)
    result = measure(config)
    for check in result["checks"]:
        line = f"{check['name']}: {check['found']} (wanted {check['wanted']})"
        print(f"holds  {line}" if check["holds"] else red(f"FAILS  {line}"))
    for warning in list_warnings(result):
        print(red(f"warning: {warning}"))
    write_report(result)
