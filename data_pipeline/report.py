"""Beside the journey, after the token store: a **report** that proves what a run will train on.

`python -m data_pipeline.report CONFIG [key=value ...]` writes `data_dir/report.html` and
`data_dir/report.json`. The audits are functions of pairs and token arrays and know nothing of the
rule that drew them, so that tests hold other rules against the same measures. Where a corpus is
large they work on samples: the order of training is random, so its first pairs are one.
"""

import argparse
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.batches import BatchSource, build_batch
from data_pipeline.config import DataConfig, PairsConfig, load_config
from data_pipeline.errors import run_command
from data_pipeline.hashing import draws, key
from data_pipeline.pairs import PAIR
from data_pipeline.processes import progress_bar
from data_pipeline.token_store import TokenStore, Vocabulary, read_manifest, read_vocabulary

PAIRS, SEQUENCES = 200_000, 50_000  # at most, for what is measured on pairs and on masks
MASK_TOKENS, COUNT_TOKENS = 1 << 23, 1 << 27  # at most, of those sequences and for word counts
BLOCK = 4096  # pairs that are looked at together
LONG = 6  # pieces: words of as many or more are counted together
EXAMPLES = 12
LABELS = {"nsp": ("IsNext", "random"), "sop": ("in order", "swapped"), "none": ("", "")}
CHINESE = "[\u2e80-\u9fff\uff00-\uff65]"  # characters and marks that are written without spaces


# ------------------------------------------------------------------------------------- audits


def audit_corpus(store: TokenStore) -> dict:
    """Lengths of documents and sentences in tokens, the longest documents, and what they are in
    pieces."""
    starts = store.sentence_offsets[store.document_offsets]
    sizes = np.diff(starts)
    longest = np.argsort(-sizes, kind="stable")[:10]
    sentences = sample(len(store.sentence_offsets) - 1, 2_000_000)
    documents = sample(len(sizes), 2_000_000)
    offsets = store.sentence_offsets
    return {
        "document_tokens": histogram(sizes[documents], log=True),
        "document_sentences": histogram(np.diff(store.document_offsets)[documents], log=True),
        "sentence_tokens": histogram(offsets[sentences + 1] - offsets[sentences], log=True),
        "longest_documents": [
            {
                "document": int(i),
                "tokens": int(sizes[i]),
                "sentences": int(store.document_offsets[i + 1] - store.document_offsets[i]),
                "share": int(sizes[i]) / len(store),
                "begins": decode(
                    store.vocabulary, store.take(starts[i] + np.arange(min(sizes[i], 24)))
                ),
            }
            for i in longest
        ],
    }


def audit_vocabulary(store: TokenStore) -> dict:
    """How well the vocabulary serves the text: shares of its tokens, and their unigram entropy in
    nats."""
    pieces, counts = store.vocabulary.pieces, count_tokens(store)
    bare = [piece.removeprefix("##") for piece in pieces]
    single = np.array([len(piece) == 1 and piece.isalpha() for piece in bare])
    total = counts.sum()
    share = counts[counts > 0] / total
    return {
        "pieces": len(pieces),
        "tokens_counted": int(total),
        "tokens_per_word": float(total / counts[~store.vocabulary.continues].sum()),
        "unknown": float(counts[store.vocabulary["[UNK]"]] / total),
        "single_letters": float(counts[single].sum() / total),
        "never_used": float((counts[store.vocabulary.ordinary] == 0).mean()),
        "unigram_entropy": float(-(share * np.log(share)).sum()),
    }


def count_tokens(store: TokenStore) -> np.ndarray:
    """How often each piece occurs, int64 (V,): in all of the store, or in evenly spaced parts."""
    size = 1 << 20
    blocks = size * sample(-(-len(store) // size), COUNT_TOKENS // size)
    counts = np.zeros(len(store.vocabulary), np.int64)
    with progress_bar("counting", len(blocks), "Mtoken") as bar:
        for start in blocks:
            part = store.take(np.arange(start, min(start + size, len(store))))
            counts += np.bincount(part, minlength=len(counts))
            bar.update()
    return counts


def audit_pairs(pairs: np.ndarray, document_of: Callable[[np.ndarray], np.ndarray]) -> dict:
    """Labels and lengths of a `PAIR` array, and what lengths alone tell about labels.

    `document_of` gives the document of each token position. The classifiers are fitted on the pairs
    whose A is from one half of the documents and tested on the others; `balanced` gives both labels
    equal weight, so that it is 0.5 for what tells nothing, whatever the majority.
    """
    label = pairs["label"].astype(bool)
    a, b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    of_a, of_b = document_of(pairs["a_start"]), document_of(pairs["b_start"])
    fit = half_of(of_a)
    return {
        "pairs": len(pairs),
        "tested": int((~fit).sum()),
        "random": float(label.mean()),
        "random_same_document": int((label & (of_a == of_b)).sum()),
        "next_elsewhere": int(
            (~label & ((of_a != of_b) | (pairs["b_start"] < pairs["a_end"]))).sum()
        ),
        "empty": int(((a == 0) | (b == 0)).sum()),
        "longest": int((a + b).max()),
        "majority": float(max(label[~fit].mean(), 1 - label[~fit].mean())),
        "by_lengths": table_accuracy([a, b], label, fit),
        "by_total": table_accuracy([a + b], label, fit),
        "lengths": {
            name: [histogram(values[label == x], top=int((a + b).max())) for x in (False, True)]
            for name, values in (("a", a), ("b", b), ("total", a + b))
        },
    }


def half_of(document: np.ndarray) -> np.ndarray:
    """Whether each is of the half that classifiers are fitted on: of every second document, or, in
    a single one, every second."""
    names, number = np.unique(document, return_inverse=True)
    return (number if len(names) > 1 else np.arange(len(document))) % 2 == 0


def table_accuracy(features: list[np.ndarray], label: np.ndarray, fit: np.ndarray) -> dict:
    """Accuracies on `~fit` of the best guess for each cell of a table of the features' quantiles,
    with some 100 pairs of `fit` a cell."""
    n = int(np.clip((fit.sum() / 100) ** (1 / len(features)), 2, 32))
    cell = np.zeros(len(label), np.int64)
    for values in features:
        edges = np.unique(np.quantile(values[fit], np.arange(1, n) / n))
        cell = cell * n + np.searchsorted(edges, values, side="right")
    total, random = (np.bincount(cell[w], minlength=n ** len(features)) for w in (fit, fit & label))
    return accuracies(random[cell], (total - random)[cell], label, fit)


def threshold_accuracy(values: np.ndarray, label: np.ndarray, fit: np.ndarray) -> dict:
    """Accuracies on `~fit` of the rule "random below a threshold" that is best on `fit`."""
    order = np.argsort(values[fit], kind="stable")
    ordered, random = values[fit][order], label[fit][order]
    result = {}
    for name, weight in (("accuracy", 1.0), ("balanced", (~random).sum() / max(random.sum(), 1))):
        gain = np.append(0, np.cumsum(np.where(random, weight, -1)))
        threshold = np.append(ordered, np.inf)[gain.argmax()]
        result[name] = score(values < threshold, label, ~fit)[name]
    return result


def accuracies(
    random: np.ndarray, following: np.ndarray, label: np.ndarray, fit: np.ndarray
) -> dict:
    """Accuracies on `~fit` of guessing the label that each pair's cell has more of, in `fit`."""
    n_random, n_following = max(label[fit].sum(), 1), max((~label[fit]).sum(), 1)
    often = n_random > n_following  # what an empty cell guesses
    plain = np.where(random == following, often, random > following)
    even = random / n_random > following / n_following
    return {
        "accuracy": score(plain, label, ~fit)["accuracy"],
        "balanced": score(even, label, ~fit)["balanced"],
    }


def score(guess: np.ndarray, label: np.ndarray, test: np.ndarray) -> dict:
    """Accuracy, and the mean of the accuracies on the two labels."""
    right, label = (guess == label)[test], label[test]
    each = [right[label == x].mean() for x in (False, True) if (label == x).any()]
    return {"accuracy": float(right.mean()), "balanced": float(np.mean(each))}


def audit_overlap(
    store: TokenStore, pairs: np.ndarray, document_of: Callable[[np.ndarray], np.ndarray]
) -> dict:
    """What shared words tell about labels: not a leak, but what a model has to beat."""
    shared = np.empty(len(pairs))
    with progress_bar("comparing words", len(pairs), "pair") as bar:
        for first in range(0, len(pairs), BLOCK):
            part = pairs[first : first + BLOCK]
            (a, of_a), (b, of_b) = (pair_words(store, part, name) for name in "ab")
            found = np.isin(draws(a, of_a), draws(b, of_b))  # the same word in the same pair
            words = np.bincount(of_a, minlength=len(part))
            shared[first : first + BLOCK] = np.bincount(of_a, found, len(part)) / words
            bar.update(len(part))
    label = pairs["label"].astype(bool)
    return {
        "shared_words": [float(shared[label == x].mean()) for x in (False, True)],
        "histograms": [histogram(shared[label == x], top=1) for x in (False, True)],
        **threshold_accuracy(shared, label, half_of(document_of(pairs["a_start"]))),
    }


def pair_words(store: TokenStore, pairs: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(a hash of each word of segment `name` of the pairs uint64, the number of its pair int64)."""
    starts, ends = pairs[f"{name}_start"], pairs[f"{name}_end"]
    places = ranges(starts, ends)
    tokens, begins = store.take(places), store.starts_word(places)
    begins[(np.cumsum(ends - starts) - (ends - starts))[ends > starts]] = True
    word = np.flatnonzero(begins)
    place = np.arange(len(tokens)) - word[np.cumsum(begins) - 1]
    words = np.add.reduceat(draws(draws(key(1), place), tokens), word)
    return words, np.repeat(np.arange(len(pairs)), ends - starts)[word]


def audit_coverage(pairs: np.ndarray, sentence_offsets: np.ndarray) -> dict:
    """Which tokens the pairs of an epoch use: in any pair, in several; and of the others, those cut
    off in the middle of a sentence, and those of whole sentences. Counts of tokens."""
    spans = np.concatenate(
        [np.stack([pairs[f"{x}_start"], pairs[f"{x}_end"]], 1) for x in "ab"], dtype=np.int64
    )
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0])]
    reached = np.maximum.accumulate(np.append(0, spans[:, 1]))
    gap_start, gap_end = reached, np.append(spans[:, 0], sentence_offsets[-1])
    gaps = gap_end > gap_start
    gap_start, gap_end = gap_start[gaps], gap_end[gaps]
    sentence_end = sentence_offsets[np.searchsorted(sentence_offsets, gap_start, side="left")]
    cut = np.minimum(sentence_end, gap_end) - gap_start
    missing, used = int((gap_end - gap_start).sum()), int((spans[:, 1] - spans[:, 0]).sum())
    covered = int(sentence_offsets[-1]) - missing
    return {
        "tokens": int(sentence_offsets[-1]),
        "covered": covered / int(sentence_offsets[-1]),
        "again": used - covered,
        "cut": int(cut.sum()),
        "left_out": missing - int(cut.sum()),
    }


def audit_boundaries(store: TokenStore, pairs: np.ndarray) -> int:
    """How many segments start or end inside a word."""
    edges = np.concatenate([pairs[name] for name in PAIR.names[:4]])
    edges = edges[(edges > 0) & (edges < len(store))]
    return int((~store.starts_word(edges)).sum())


def audit_masks(
    original: np.ndarray,
    seen: np.ndarray,
    masked: np.ndarray,
    starts: np.ndarray,
    sequence: np.ndarray,
    vocabulary: Vocabulary,
) -> dict:
    """How much is masked, of which words, and what stands in its place.

    Arrays (T,) over the tokens of all sequences, special ones left out: the token, what the model
    sees, whether it is to be predicted, whether a word starts there, the number of its sequence.
    """
    word = np.cumsum(starts) - 1
    pieces, hidden = np.bincount(word), np.bincount(word, masked)
    size = np.minimum(pieces, LONG)
    words, masked_words = np.bincount(size, minlength=LONG + 1), np.bincount(size, hidden > 0)
    labels, shown = original[masked], seen[masked]
    is_mask = shown == vocabulary["[MASK]"]
    is_random = ~is_mask & (shown != labels)
    n = max(len(labels), 1)
    per_sequence = np.bincount(sequence, masked) / np.bincount(sequence)
    return {
        "sequences": len(per_sequence),
        "tokens": len(original),
        "words_masked": int((hidden > 0).sum()),
        "masked": float(masked.mean()),
        "per_sequence": histogram(np.minimum(per_sequence, 0.4), bins=40, top=0.4),
        "most_in_a_sequence": int(np.bincount(sequence, masked).max()),
        "without_masks": int((per_sequence == 0).sum()),
        "partly_masked_words": int(((hidden > 0) & (hidden < pieces)).sum()),
        "by_pieces": [
            {"pieces": k, "words": int(words[k]), "masked": float(masked_words[k] / words[k])}
            for k in range(1, LONG + 1)
            if words[k]
        ],
        "replaced": {
            "mask": float(is_mask.sum() / n),
            "random": float(is_random.sum() / n),
            "kept": float((~is_mask & ~is_random).sum() / n),
        },
        "special_pieces": int((~np.isin(shown[is_random], vocabulary.ordinary)).sum()),
        "changed_unmasked": int((original != seen)[~masked].sum()),
    }


# ------------------------------------------------------------------------------------- samples


def sample(n: int, limit: int) -> np.ndarray:
    """At most `limit` of the numbers below n, evenly spaced: int64."""
    return np.arange(n) if n <= limit else np.linspace(0, n - 1, limit).astype(np.int64)


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers of all [start, end), one range after another."""
    sizes = ends - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def histogram(values: np.ndarray, *, log: bool = False, bins: int = 32, top: float = 0) -> dict:
    """Counts of values between edges: of equal width up to `top`, or two an octave."""
    top = top or values.max(initial=2)
    if log:
        edges = np.unique(np.rint(2 ** (np.arange(2 * math.log2(top) + 2) / 2)))
    elif top <= 1:
        edges = np.linspace(0, top, bins + 1)
    else:
        width = math.ceil((top + 1) / bins)
        edges = np.arange(0, top + 1 + width, width)
    return {"edges": edges.tolist(), "counts": np.histogram(values, edges)[0].tolist()}


def read_sequences(
    store: TokenStore, data: PairsConfig, pairs: np.ndarray, streams: np.ndarray
) -> tuple[np.ndarray, ...]:
    """What training sees of the pairs, as `audit_masks` wants it, and the segment (0: A, 1: B) of
    each token."""
    parts = []
    with progress_bar("masking", len(pairs), "sequence", disable=len(pairs) <= EXAMPLES) as bar:
        for first in range(0, len(pairs), BLOCK // 8):
            part = pairs[first : first + BLOCK // 8]
            batch = build_batch(store, data, part, streams[first : first + BLOCK // 8])
            seen, cu = batch.input_ids.numpy(), batch.cu_seqlens.numpy()
            ordinary, masked = np.ones(len(seen), bool), np.zeros(len(seen), bool)
            masked[batch.masked_positions.numpy()] = True
            for special in (cu[:-1], cu[:-1] + part["a_end"] - part["a_start"] + 1, cu[1:] - 1):
                ordinary[special] = False
            spans = [
                np.stack([part[f"a_{x}"], part[f"b_{x}"]], 1).ravel() for x in ("start", "end")
            ]
            places = ranges(*spans)
            segment = batch.token_type_ids.numpy()[ordinary]
            sequence = batch.sequence_ids.numpy()[ordinary]
            starts = store.starts_word(places) | (data.masking == "token")
            starts |= np.diff(2 * sequence + segment, prepend=-1) != 0
            arrays = store.take(places), seen[ordinary], masked[ordinary], starts
            parts.append((*arrays, sequence + first, segment))
            bar.update(len(part))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def decode(vocabulary: Vocabulary, tokens: np.ndarray) -> str:
    """Tokens as text: continuations joined to what they continue, Chinese without spaces."""
    text = " ".join(vocabulary.pieces[token] for token in tokens).replace(" ##", "")
    return re.sub(f"(?<={CHINESE}) (?={CHINESE})", "", text)


# ------------------------------------------------------------------------------------- the report


def audit(config: DataConfig) -> dict:
    """All that the report says; raises `UserError` if `data_dir` is not prepared."""
    folder = Path(config.data_dir)
    vocabulary = read_vocabulary(folder / "vocab")
    store = TokenStore(folder / "store", "train", vocabulary)
    manifest = read_manifest(folder / "store")
    result = {"data_dir": str(config.data_dir), "store": manifest}
    return result | audit_store(store, config.data, config.seed)


def audit_store(store: TokenStore, data: PairsConfig, seed: int) -> dict:
    """The store, and the first epoch that a run with these settings draws from it."""
    print(f"drawing the pairs of an epoch from {len(store):,} tokens")
    source = BatchSource(store, data, seed)
    pairs, streams = source.examples(0, min(PAIRS, source.epoch_size(0)))
    n = min(SEQUENCES, MASK_TOKENS // data.max_seq_length)
    *sequences, _ = read_sequences(store, data, pairs[:n], streams[:n])
    result = {
        "settings": vars(data) | {"seed": seed},
        "corpus": audit_corpus(store),
        "vocabulary": audit_vocabulary(store),
        **audit_rule(store, source.pairs(0), sequences, data),
        "examples": choose_examples(store, data, pairs, streams),
    }
    return result | {"checks": check_results(result)}


def audit_rule(
    store: TokenStore, epoch: np.ndarray, sequences: Sequence[np.ndarray], data: PairsConfig
) -> dict:
    """What holds for the pairs of an epoch, in random order, and for sequences as `audit_masks`
    wants them; both by any rule."""
    starts = store.sentence_offsets[store.document_offsets]
    pairs = epoch[:PAIRS]

    def document_of(positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(starts, positions, side="right") - 1

    lengths = epoch["a_end"] - epoch["a_start"] + epoch["b_end"] - epoch["b_start"]
    result = {
        "epoch": {
            "sequences": len(epoch),
            "random": int(epoch["label"].sum()),
            "tokens_per_sequence": float(lengths.mean()),
            "edges_inside_words": audit_boundaries(store, pairs),
            "lengths": histogram(lengths),
        },
        "coverage": audit_coverage(epoch, store.sentence_offsets),
        "masks": audit_masks(*sequences, store.vocabulary),
    }
    if data.objective != "none":
        result["pairs"] = audit_pairs(pairs, document_of)
        result["overlap"] = audit_overlap(store, pairs, document_of)
    return result


def choose_examples(
    store: TokenStore, data: PairsConfig, pairs: np.ndarray, streams: np.ndarray
) -> list[dict]:
    """The first pairs of each label, decoded: (text, what the model sees, kind) of each word; kind
    "" if it is not masked."""
    each = EXAMPLES // 2 if data.objective != "none" else EXAMPLES
    first = [np.flatnonzero(pairs["label"] == label)[:each] for label in (0, 1)]
    chosen = np.sort(np.concatenate(first))
    original, seen, masked, starts, sequence, segment = read_sequences(
        store, data, pairs[chosen], streams[chosen]
    )
    pieces, mask = store.vocabulary.pieces, store.vocabulary["[MASK]"]
    examples = [{"label": int(pairs["label"][i]), "segments": ([], [])} for i in chosen]
    word = np.flatnonzero(starts)
    for i, end in zip(word, np.append(word[1:], len(starts)), strict=True):
        text = "".join(pieces[t].removeprefix("##") for t in original[i:end])
        text = "##" * pieces[original[i]].startswith("##") + text
        shown, kind = " ".join(pieces[t] for t in seen[i:end]), ""
        if masked[i:end].any():
            is_mask, kept = (seen[i:end] == mask).all(), (seen[i:end] == original[i:end]).all()
            kind = "mask" if is_mask else "kept" if kept else "random"
        examples[sequence[i]]["segments"][segment[i]].append((text, shown, kind))
    return examples


def check_results(result: dict) -> list[dict]:
    """What the pairs and masks are to hold: name, what was found, what was wanted, whether it
    holds. What is drawn may be off by three standard errors of the sample besides."""
    settings, coverage, masks = result["settings"], result["coverage"], result["masks"]
    epoch, n = result["epoch"], masks["words_masked"]
    checks = []

    def check(name: str, found: str, wanted: str, holds: bool) -> None:
        checks.append({"name": name, "found": found, "wanted": wanted, "holds": bool(holds)})

    def near(name: str, found: float, wanted: float, within: float, n: int) -> None:
        within += 3 * math.sqrt(wanted * (1 - wanted) / max(n, 1))
        text = f"{percent(wanted)} ± {100 * within:.2f}"
        check(name, percent(found), text, abs(found - wanted) <= within)

    def none(name: str, found: int) -> None:
        check(name, f"{found:,}", "0", found == 0)

    if settings["objective"] != "none":
        half = epoch["sequences"] // 2
        found, pairs = epoch["random"], result["pairs"]
        what = "Random pairs of the epoch" if settings["objective"] == "nsp" else "Swapped pairs"
        check(what, f"{found:,} of {epoch['sequences']:,}", f"{half:,}", abs(found - half) <= 1)
    if settings["objective"] == "nsp":
        none("Random B's from A's own document", pairs["random_same_document"])
        none("IsNext B's that do not come after A", pairs["next_elsewhere"])
    if settings["objective"] != "none":
        limit = 0.51 + 1.5 / math.sqrt(max(pairs["tested"], 1))
        for name, text in (("by_lengths", "lengths of A and B"), ("by_total", "total length")):
            told = pairs[name]["balanced"]
            check(f"Labels told by the {text}", percent(told), f"≤ {percent(limit)}", told <= limit)
    check(
        "Tokens in a pair of the epoch", percent(coverage["covered"]), "≥ 99.50 %",
        coverage["covered"] >= 0.995,
    )  # fmt: skip
    none("Tokens in more than one", coverage["again"])
    bound = settings["max_predictions_per_seq"]
    if bound is None:
        near("Masked tokens", masks["masked"], settings["masked_lm_prob"], 0.002, n)
    else:
        found = masks["most_in_a_sequence"]
        check("Most masked tokens of a sequence", f"{found:,}", f"≤ {bound:,}", found <= bound)
    if settings["masking"] == "whole_word":
        none("Words masked in part", masks["partly_masked_words"])
    if bound is None:
        for row in masks["by_pieces"]:
            name = f"Masked words of {pieces_name(row['pieces'])}"
            near(name, row["masked"], settings["masked_lm_prob"], 0.005, row["words"])
    for (name, found), wanted in zip(masks["replaced"].items(), (0.8, 0.1, 0.1), strict=True):
        text = {"mask": "[MASK]", "random": "a random piece", "kept": "the token itself"}[name]
        near(f"In a masked place: {text}", found, wanted, 0.003, n)
    none("Special pieces among the random ones", masks["special_pieces"])
    none("Tokens changed but not predicted", masks["changed_unmasked"])
    return checks


# ------------------------------------------------------------------------------------- the page

STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem; background: #fff}
h1 {font-size: 1.6rem; margin: 0} h2 {font-size: 1.2rem; margin: 2.2rem 0 .6rem;
  border-bottom: 1px solid #d1d5db} p {max-width: 75ch; margin: .5rem 0}
table {border-collapse: collapse; margin: .6rem 0} td, th {padding: .15rem .9rem .15rem 0;
  text-align: left; vertical-align: top; border-bottom: 1px solid #eef0f3}
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
COLOURS = ("#2563eb", "#ea580c")


def write_report(config: DataConfig) -> dict:
    """Write `report.json` and `report.html` to `data_dir`; returns what they say."""
    result = audit(config)
    folder = Path(config.data_dir)
    for name, text in (
        ("report.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n"),
        ("report.html", render_page(result)),
    ):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)
    return result


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def pieces_name(pieces: int) -> str:
    return {1: "1 piece", LONG: f"{LONG} pieces or more"}.get(pieces, f"{pieces} pieces")


def table(head: list[str], rows: list[list]) -> str:
    """An HTML table; columns of figures after the first are set right."""
    texts = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row] for row in rows]
    figures = [
        all(re.match(r"[\d≤≥]", text) for text in column) for column in zip(*texts, strict=True)
    ]

    def line(row: list[str], tag: str) -> str:
        cells = []
        for i, text in enumerate(row):
            right = ' class="n"' if i and figures[i] else ""
            text = text if text.startswith("<span") else html.escape(text)
            cells.append(f"<{tag}{right}>{text}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in texts)}</table>"


def chart(
    title: str,
    unit: str,
    ticks: list[tuple[float, str]],
    series: dict[str, list[float]],
    line: float | None = None,
) -> str:
    """An SVG of shares (0 to 1) in bins: the first series as an area, others as lines, and a dashed
    one at height `line`; `ticks` are (place in bins, text)."""
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


def histogram_chart(title: str, unit: str, *histograms: dict, names: Sequence[str] = ("",)) -> str:
    """A chart of one histogram, or of one for each of `names`."""
    edges = histograms[0]["edges"]
    ticks = []
    for i in range(0, len(edges), max(1, round((len(edges) - 1) / (4 if edges[-1] <= 1 else 6)))):
        shown = f"{edges[i] / 1000:.3g}k" if edges[i] >= 10_000 else f"{edges[i]:,.0f}"
        ticks.append((i, f"{100 * edges[i]:.0f}%" if edges[-1] <= 1 else shown))
    shares = [[n / max(sum(h["counts"]), 1) for n in h["counts"]] for h in histograms]
    return chart(title, unit, ticks, dict(zip(names, shares, strict=True)))


def render_page(result: dict) -> str:
    """The report as one HTML page that loads nothing."""
    bad = sum(not check["holds"] for check in result["checks"])
    verdict = f"{bad} of {len(result['checks'])} checks do not hold" if bad else "All checks hold"
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    marks = {True: '<span class="good">✓ holds</span>', False: '<span class="bad">✗ fails</span>'}
    rows = [[marks[c["holds"]], c["name"], c["found"], c["wanted"]] for c in result["checks"]]
    parts = [
        f"<h1>What is in {html.escape(result['data_dir'])}</h1>",
        f'<p class="soft">{html.escape(settings)}</p>',
        f'<p class="{"bad" if bad else "good"}">{verdict}.</p>',
        table(["", "What", "Found", "Wanted"], rows),
        render_corpus(result),
        render_pairs(result),
        render_masks(result),
        render_examples(result),
    ]
    head = f'<meta charset="utf-8"><title>Data report</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    )


def render_corpus(result: dict) -> str:
    corpus, vocabulary, store = result["corpus"], result["vocabulary"], result["store"]
    rows = []
    for split in ("train", "held_out"):
        name, shards = split.replace("_", " "), store[split]["shards"]
        rows.append([name, *sizes([store[split]])])
        for source in dict.fromkeys(shard["source"] for shard in shards if "source" in shard):
            own = [shard for shard in shards if shard.get("source") == source]
            rows.append([f"{name}, {source}", *sizes(own)])
    head = ["", "Documents", "Sentences", "Tokens", "Sentences a document", "Tokens a sentence"]
    longest = [
        [d["document"], d["tokens"], d["sentences"], percent(d["share"]), d["begins"] + " …"]
        for d in corpus["longest_documents"]
    ]
    entropy = vocabulary["unigram_entropy"]
    facts = [
        ["Pieces of the vocabulary", vocabulary["pieces"]],
        ["Tokens counted", vocabulary["tokens_counted"]],
        ["Tokens a word", f"{vocabulary['tokens_per_word']:.3f}"],
        ["[UNK]", f"{100 * vocabulary['unknown']:.3f} %"],
        ["Pieces of one letter or Chinese character", percent(vocabulary["single_letters"])],
        ["Pieces that never occur", percent(vocabulary["never_used"])],
        ["Unigram entropy", f"{entropy:.3f} nats (perplexity {math.exp(entropy):,.0f})"],
    ]
    return (
        "<h2>Corpus</h2>" + table(head, rows) + '<div class="charts">'
        + histogram_chart("Documents", "tokens of a document", corpus["document_tokens"])
        + histogram_chart("Documents", "sentences of a document", corpus["document_sentences"])
        + histogram_chart("Sentences", "tokens of a sentence", corpus["sentence_tokens"])
        + "</div><h2>Longest documents</h2>"
        + table(["Document", "Tokens", "Sentences", "Share", "Begins"], longest)
        + "<h2>Vocabulary on this text</h2>" + table(["", ""], facts)
        + "<p>Unigram entropy is the masked-token loss of a model that ignores the context: a run "
        "that stays there has learned nothing else.</p>"
    )  # fmt: skip


def sizes(parts: list[dict]) -> list:
    """Documents, sentences and tokens of parts of a store, and how many each in the one before."""
    counts = [sum(p[name] for p in parts) for name in ("documents", "sentences", "tokens")]
    return counts + [f"{b / max(a, 1):,.1f}" for a, b in zip(counts, counts[1:], strict=False)]


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
        chart = histogram_chart("Sequences", "tokens of a sequence", epoch["lengths"])
        return text + f'<div class="charts">{chart}</div>'
    pairs, overlap, names = (
        result["pairs"],
        result["overlap"],
        LABELS[result["settings"]["objective"]],
    )
    rows = [
        [what, percent(figures["accuracy"]), percent(figures["balanced"])]
        for what, figures in (
            ("always the majority", {"accuracy": pairs["majority"], "balanced": 0.5}),
            ("the lengths of A and B", pairs["by_lengths"]),
            ("the total length", pairs["by_total"]),
            ("the share of A's words that B has too", overlap),
        )
    ]
    charts = [
        histogram_chart(what, f"tokens of {of}", *pairs["lengths"][name], names=names)
        for name, what, of in (
            ("a", "A", "A"),
            ("b", "B", "B"),
            ("total", "A and B", "A and B"),
        )
    ]
    shared = overlap["histograms"]
    charts.append(histogram_chart("Words of A in B", "share of A's words", *shared, names=names))
    return (
        text
        + f"<p>Measured on {pairs['pairs']:,} pairs. What tells the labels apart, fitted on one "
        "half of the documents, tested on the other; with both labels at equal weight, 50 % is "
        "chance. Lengths must tell nothing. Shared words may: they are the meaning "
        "in its simplest form, and what a trained model has to beat.</p>"
        + table(["Label guessed from", "Accuracy", "Labels at equal weight"], rows)
        + f'<div class="charts">{"".join(charts)}</div>'
    )


def render_masks(result: dict) -> str:
    masks, prob = result["masks"], result["settings"]["masked_lm_prob"]
    rates = masks["by_pieces"]
    rows = [[pieces_name(r["pieces"]), r["words"], percent(r["masked"])] for r in rates]
    ticks = [(i + 0.5, f"{r['pieces']}{'+' * (r['pieces'] == LONG)}") for i, r in enumerate(rates)]
    by_pieces = {"": [r["masked"] for r in rates]}
    return (
        "<h2>Masks</h2>"
        + f"<p>Measured on {masks['sequences']:,} sequences ({masks['tokens']:,} tokens); "
        f"{masks['without_masks']:,} of them have no mask.</p>"
        + '<div class="charts">'
        + chart("Words masked, by length", "pieces of the word", ticks, by_pieces, prob)
        + histogram_chart(
            "Share masked of each sequence",
            "of its tokens (40% or more in the last bar)",
            masks["per_sequence"],
        )
        + "</div>"
        + table(["Words of", "Number", "Masked"], rows)
    )


def render_examples(result: dict) -> str:
    """Pairs as the model sees them, each masked word in its colour under what was there."""
    legend = ", ".join(
        f'<span class="{kind}">&nbsp;{text}&nbsp;</span>'
        for kind, text in (
            ("mask", "[MASK]"),
            ("random", "a random piece in its place"),
            ("kept", "kept as it was"),
        )
    )
    names = LABELS[result["settings"]["objective"]]
    parts = [f"<h2>Pairs as the model sees them</h2><p>To be predicted: {legend}.</p>"]
    for number, example in enumerate(result["examples"], 1):
        tag = f"{number} · {names[example['label']]}" if "pairs" in result else str(number)
        lines = [
            f"<p><b>{name}</b>{render_words(words)}</p>"
            for name, words in zip("AB", example["segments"], strict=True)
            if words
        ]
        parts.append(f'<div class="pair"><span class="tag">{tag}</span>{"".join(lines)}</div>')
    return "".join(parts)


def render_words(words: list[tuple[str, str, str]]) -> str:
    """Words with spaces between, but for Chinese ones and continuations."""
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline.report", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    config = load_config(
        DataConfig, args.config, args.overrides, others=("model", "train", "tracking")
    )
    result = write_report(config)
    for check in result["checks"]:
        mark = "holds" if check["holds"] else "FAILS"
        print(f"{mark}  {check['name']}: {check['found']} (wanted {check['wanted']})")
    print(f"report: {Path(config.data_dir) / 'report.html'}")


if __name__ == "__main__":
    run_command(main)
