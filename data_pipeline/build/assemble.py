"""Assemble the token store from encoded shards: one file per array and split, and a manifest.

The manifest holds the hashes of vocabulary and arrays, and its own; `check_data` of
`sampling/soundness.py` compares them with the files.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data_pipeline.build.identity import hash_json
from data_pipeline.common.arrays import pack_bits, save_array, write_array
from data_pipeline.common.errors import UserError, red
from data_pipeline.common.folders import atomic_folder, hash_file
from data_pipeline.common.system import progress_bar
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.readers import FileChunk, left_out
from data_pipeline.corpus.sources import name_source
from data_pipeline.sampling.manifest import SCHEMA, SPLITS, held_out_shortfall, lack_of_sentences
from data_pipeline.sampling.soundness import hash_manifest
from data_pipeline.sampling.token_store import ARRAYS, count_parts, find_run_edges, load_array
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES

SIZES = ("bytes", "documents", "sentences", "words", "tokens")  # counts per source in a manifest
BLOCK = 1 << 24  # elements of an array to copy at once


def assemble_store(
    shards: list[Path],
    store_dir: Path,
    stats: list[dict],
    sources: list[dict],
    settings: dict,
    vocab_dir: Path,
) -> dict:
    """Join the encoded shards into the token store at `store_dir`, and return its manifest.

    shards: folders that `encode_scan` wrote, in the order of file chunks.
    stats, sources, settings: what `scan_group` counted, `describe_sources` and `store_settings`.
    Raises `UserError` if `store_dir` holds anything other than an unfinished store.
    """
    corpus = hashlib.sha256("".join(s["sha256"] for s in stats).encode()).hexdigest()
    manifest = {"schema": SCHEMA, "settings": settings, "corpus_sha256": corpus}
    tokenizer = {name: hash_file(vocab_dir / name) for name in TOKENIZER_FILES}
    vocab_sha256 = tokenizer["vocab.txt"]
    manifest |= {"vocab_sha256": vocab_sha256, "vocab_files": tokenizer, "sources": sources}
    check_unfinished(store_dir)
    entries = [json.loads((shard / "entries.json").read_text()) for shard in shards]
    marked = any(any(shard.glob("*/word_starts.npy")) for shard in shards)
    total = sum(entry["tokens"] for found in entries for entry in found.values())
    with (
        progress_bar("joining", total, "tokens", delay=5) as bar,
        atomic_folder(store_dir) as folder,
    ):
        for split in SPLITS:
            both = zip(shards, entries, strict=True)
            parts = [(shard / split, entry[split]) for shard, entry in both if split in entry]
            manifest[split] = {n: sum(s[split][n] for s in stats) for n in ("bytes", "words")}
            manifest[split] |= join_shards(parts, folder / split, bar, marked)
        if marked:
            manifest["word_starts"] = True
        # identifies the data in a checkpoint: equal for all stores with the same arrays
        derived = "run_edges.npy"
        arrays = {
            split: {n: h for n, h in manifest[split]["sha256"].items() if n != derived}
            for split in SPLITS
        }
        manifest["data_sha256"] = hash_json({"vocab": vocab_sha256} | arrays)
        manifest["sha256"] = hash_manifest(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def check_unfinished(store_dir: Path) -> None:
    """Raise `UserError` if `store_dir` holds a file that does not belong to a token store."""
    ours = (*SPLITS, "manifest.json", "manifest.json.tmp")
    others = sorted(p.name for p in store_dir.glob("*") if p.name not in ours)
    if others:
        raise UserError(
            f"{store_dir} is not a token store but holds {others[0]}; move that away, or choose "
            "another data_dir"
        )


def join_shards(parts: list[tuple[Path, dict]], out: Path, bar, marked: bool) -> dict:
    """Write the arrays of all shards, end to end, to folder `out`; returns their manifest entry.

    parts: folder of each shard, and its sizes. bar: counts the tokens written.
    """
    out.mkdir()
    totals = {n: sum(e[n] for _, e in parts) for n in ("tokens", "sentences", "documents")}
    folders = [folder for folder, _ in parts]
    dtype = load_array(folders[0] / "tokens.npy").dtype if folders else np.dtype(np.uint16)
    sizes = (totals["tokens"], totals["sentences"] + 1, totals["documents"] + 1)
    for name, size in zip(ARRAYS, sizes, strict=True):
        arrays = (load_array(folder / f"{name}.npy") for folder in folders)
        if name == "tokens":
            write_array(out / f"{name}.npy", dtype, size, read_blocks(arrays, bar))
        else:
            write_array(out / f"{name}.npy", np.dtype(np.int64), size, shift_offsets(arrays))
    if marked:  # in a split without documents too
        bits = unpack_bits((load_array(f / "word_starts.npy"), e["tokens"]) for f, e in parts)
        write_array(out / "word_starts.npy", np.uint8, (totals["tokens"] + 7) // 8, pack_bits(bits))
    if (n_parts := count_parts(totals["tokens"])) > 1:
        sentences, documents = (load_array(out / f"{name}.npy") for name in ARRAYS[1:])
        save_array(out / "run_edges.npy", find_run_edges(sentences, documents, n_parts))
    return totals | {"sha256": {path.name: hash_file(path) for path in sorted(out.iterdir())}}


def read_blocks(arrays: Iterator[np.ndarray], bar) -> Iterator[np.ndarray]:
    """Yield the elements of several arrays in blocks, and count them on a progress bar."""
    for array in arrays:
        for start in range(0, len(array), BLOCK):
            yield array[start : start + BLOCK]
            bar.update(min(BLOCK, len(array) - start))


def shift_offsets(arrays: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the offsets of several shards as offsets of the shards laid end to end, in blocks."""
    end = 0
    yield np.zeros(1, np.int64)
    for array in arrays:
        yield array[1:] + end
        end += int(array[-1])


def unpack_bits(parts: Iterable[tuple[np.ndarray, int]]) -> Iterator[np.ndarray]:
    """Yield the packed bits of several shards as bytes of 0 or 1, in blocks.

    parts: (uint8 array, number of bits) of each shard.
    """
    for packed, n in parts:
        for start in range(0, len(packed), BLOCK):
            block = packed[start : start + BLOCK]
            count = min(8 * len(block), n - 8 * start)
            yield np.unpackbits(block, bitorder="little", count=count)


# ---------------------------------------------------------------------------------- manifest


def describe_sources(
    corpus: CorpusConfig, groups: list[list[FileChunk]], stats: list[dict], shards: list[Path]
) -> list[dict]:
    """Describe each source for the manifest: its sizes, and what was skipped, by cause.

    Bytes are counted as read, all other sizes as stored, in both splits together.
    """
    described = []
    for number, source in enumerate(corpus.each_source()):
        sizes, rejects, layouts = Counter(dict.fromkeys(SIZES, 0)), Counter(), {}
        for group, found, shard in zip(groups, stats, shards, strict=True):
            if group[0].source != number:
                continue
            layouts[group[0].layout] = True
            rejects.update(found["rejects"])
            sizes["bytes"] += found["bytes"]
            for split in SPLITS:
                sizes.update({n: value for n, value in found[split].items() if n != "bytes"})
            for entry in json.loads((shard / "entries.json").read_text()).values():
                sizes["tokens"] += entry["tokens"]
        about = {"name": name_source(source), "layout": ", ".join(layouts), "weight": source.weight}
        described.append({**about, **sizes, "rejects": dict(rejects)})
    return described


def print_store(manifest: dict) -> None:
    """Print what was read from each source, and what each split holds."""
    for source in manifest["sources"]:
        print(
            f"corpus: {source['name']} (layout {source['layout']}, weight {source['weight']:g}): "
            + ", ".join(f"{source[name]:,} {name}" for name in SIZES)
            + f", left out: {left_out(source['rejects'])}"
        )
    for split in SPLITS:
        part = manifest[split]
        print(
            f"{split.replace('_', ' ')}: " + ", ".join(f"{part[name]:,} {name}" for name in SIZES)
        )


def warn_store(manifest: dict, objective: str) -> None:
    """Print a warning in red if documents have too few sentences for pairs, and one if the held-out
    split is too small for its losses to be trusted."""
    for fault in (lack_of_sentences(manifest, objective), held_out_shortfall(manifest)):
        if fault:
            print(red(f"warning: {fault}"))
