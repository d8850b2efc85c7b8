"""Measure how often an exported model prefers the acceptable sentence of minimal pairs:

python scripts/minimal_pairs.py --model DIR --data DIR_OR_FILES
"""

import argparse
import json
import time
from pathlib import Path

from needed import check_packages

check_packages("accelerate", "data_pipeline")

from accelerate import Accelerator

from data_pipeline.build.probes import MinimalPair, encode, read_pairs
from data_pipeline.common.errors import check, run_command
from data_pipeline.common.folders import check_writable, write_file
from data_pipeline.common.system import progress_bar
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import read_vocabulary
from pretrain.models.cpu import configure_cpu
from pretrain.probes import (
    LEVELS,
    by_phenomenon,
    check_lengths,
    count_read_tokens,
    prefers_good,
    score_by_frequency,
    score_sentences,
)
from pretrain.read_export import load_export


def measure(
    model_dir: Path, pairs: list[MinimalPair], within_word: bool, store_dir: Path | None
) -> dict:
    """Score pairs by the model and, given a token store, by the frequencies of its tokens.

    Returns `paradigms` and `pairs` (counts), `pairs_per_second`, `accuracy` and, with a
    store, `unigram`, as `by_phenomenon` returns them.
    """
    accelerator = Accelerator()
    if accelerator.device.type == "cpu":
        configure_cpu()
    model, vocabulary = load_export(model_dir), read_vocabulary(model_dir)
    texts = [pair.good for pair in pairs] + [pair.bad for pair in pairs]
    encodings = encode(model_dir, texts)
    sentences = [encoding.ids for encoding in encodings]
    words = [encoding.word_ids for encoding in encodings] if within_word else None
    check_lengths(sentences, vocabulary, model.config.max_position_embeddings)
    paradigms = [pair.paradigm for pair in pairs]
    unigram = {}
    if store_dir:
        counts = TokenStore.open(store_dir, "train", vocabulary).token_counts()
        right = prefers_good(score_by_frequency(sentences, counts))
        unigram = {"unigram": by_phenomenon(paradigms, right)}
    model.to(accelerator.device)
    began = time.perf_counter()
    with progress_bar("scoring", count_read_tokens(sentences, model), "tokens") as bar:
        scores = score_sentences(
            model, sentences, vocabulary, accelerator, words, advance=bar.update
        )
    speed = len(pairs) / (time.perf_counter() - began)
    accuracy = by_phenomenon(paradigms, prefers_good(scores))
    counts = {"paradigms": len({*paradigms}), "pairs": len(pairs)}
    return {**counts, "pairs_per_second": speed, "accuracy": accuracy, **unigram}


def print_table(results: dict) -> None:
    """Print the accuracies by field and by phenomenon, beside the baseline if there is one."""
    columns = [results[name] for name in ("accuracy", "unigram") if name in results]
    print(f"{'':40}accuracy" + "   unigram" * (len(columns) - 1))
    for level in LEVELS[:2]:
        for name in columns[0][level]:
            print(f"{name:38}" + "".join(f"{column[level][name]:10.3f}" for column in columns))
        print()
    means = "".join(f"{column['mean']:10.3f}" for column in columns)
    paradigms, pairs = results["paradigms"], results["pairs"]
    title = f"mean over {paradigms} paradigm{'s' * (paradigms != 1)}"
    print(f"{title:38}{means}")
    if pairs > paradigms:
        errors = "".join(f"{column['standard_error']:10.3f}" for column in columns)
        print(f"{'standard error of the mean':38}{errors}")
    print(f"{pairs:,} pair{'s' * (pairs != 1)}, {results['pairs_per_second']:,.0f} per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument(
        "--data", nargs="+", required=True, help="folders or files, .jsonl (BLiMP) or .tsv"
    )
    parser.add_argument("--limit", type=int, help="use the first N pairs of each paradigm")
    parser.add_argument("--store", type=Path, help="store of the run, for the unigram baseline")
    parser.add_argument(
        "--within-word", action="store_true", help="also mask the later pieces of the same word"
    )
    parser.add_argument("--out", type=Path, help="write the results of all paradigms as JSON")
    args = parser.parse_args()
    check(args.limit is None or args.limit > 0, f"--limit {args.limit}: wanted 1 or more")
    if args.out:
        check(not args.out.is_dir(), f"--out {args.out} is a folder; name a file in it")
        args.out = check_writable(args.out, [args.model, *args.data])
    pairs = read_pairs(args.data, args.limit)
    results = measure(args.model, pairs, args.within_word, args.store)
    print_table(results)
    if args.out:
        settings = {"model": str(args.model), "limit": args.limit, "within_word": args.within_word}
        write_file(args.out, (json.dumps(settings | results, indent=1) + "\n").encode())


if __name__ == "__main__":
    run_command(main)
