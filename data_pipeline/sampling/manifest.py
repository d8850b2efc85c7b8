"""The manifest of a token store: what it was built from, and the sizes and hashes of its files."""

import re
from pathlib import Path

from data_pipeline.common.errors import UserError
from data_pipeline.common.plug_ins import is_file
from data_pipeline.common.reading import COUNT, SHA256, check_shape, read_json
from data_pipeline.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS, DataConfig

SCHEMA = 2  # version of manifest and file layout; 1 had a folder per shard and can still be read
FEW_SENTENCES = 1.5  # of a document: with fewer, half of the documents or more have a single one
SPLITS = ("train", "held_out")  # of a corpus: a folder and a token store each
SIZES = {"tokens": COUNT, "sentences": COUNT, "documents": COUNT}
OF_SOURCE = re.compile(r"corpus\.sources\[(\d+)\]\.(\w+)")  # a setting of a source
HASHES = {str: SHA256}
SPLIT = SIZES | {"bytes?": COUNT, "words?": COUNT}
SHARDS = [SIZES | {"name": str, "sha256": HASHES}]
MANIFEST = {  # shape of a manifest of either schema
    "vocab_sha256": SHA256,
    "sha256": SHA256,
    "data_sha256?": SHA256,
    "vocab_files?": HASHES,
    "settings?": {str: object},
    "word_starts?": bool,
    "sources": [
        {"name": str, "layout": str, "weight": float, "rejects": {str: COUNT}, "bytes": COUNT}
        | {"words": COUNT, **SIZES}
    ],
    **dict.fromkeys(SPLITS, (SPLIT | {"sha256": HASHES}, SPLIT | {"shards": SHARDS})),
}


def read_manifest(folder: Path) -> dict:
    """Read the manifest of a finished store, with its schema number.

    Raises `UserError` if there is none, or if a later version of the project wrote it.
    """
    path = folder / "manifest.json"
    if not path.exists():
        inner = folder / "store"
        advice = (
            f"there is one at {inner}"
            if inner.exists()
            else "make one: python -m data_pipeline CONFIG"
        )
        raise UserError(f"no token store at {folder}; {advice}")
    advice = f"delete {folder} and run python -m data_pipeline"
    manifest = read_json(path, {"schema?": COUNT, "format?": COUNT}, advice)
    schema = manifest.get("schema", manifest.get("format"))
    if schema not in (1, SCHEMA):
        raise UserError(
            f"{path} has schema {schema}, but this version reads 1 to {SCHEMA}; use the version "
            "of bert-pretrain that wrote it, or a later one"
        )
    check_shape(manifest, MANIFEST, path, advice)
    data = manifest.get("data_sha256", manifest.get("sha256"))  # schema 1 had a single hash
    return manifest | {"schema": schema, "data_sha256": data}


def held_out_shortfall(manifest: dict) -> str | None:
    """Describe why the held-out split is too small for its losses to be trusted; None if it is
    not."""
    documents, tokens = (manifest["held_out"][name] for name in ("documents", "tokens"))
    if documents >= HELD_OUT_DOCUMENTS and tokens >= HELD_OUT_TOKENS:
        return None
    found = f"only {documents:,} document{'s' * (documents > 1)} of {tokens:,} tokens are held out"
    if not documents:
        found = "no document is held out, so there is no evaluation"
    fraction = manifest.get("settings", {}).get("corpus.held_out_fraction", 0.01)
    in_all = documents + manifest.get("train", {}).get("documents", 0)
    # up to a fifth changes nothing, where a small corpus has that much held out in any case
    least = fraction if 0 < documents < in_all / 10 else max(fraction, 0.2)
    advice = f"add text, or raise corpus.held_out_fraction above {least:g}"
    if any(source["layout"] == "file" for source in manifest.get("sources", [])):
        advice += "; each file is one document here: corpus.layout=line makes each line one"
    return (
        f"{found}; losses on held-out text need {HELD_OUT_DOCUMENTS} documents and "
        f"{HELD_OUT_TOKENS:,} tokens to be reliable; "
        + (advice if fraction else "raise corpus.held_out_fraction, to 0.01 for example")
    )


def lack_of_sentences(manifest: dict, objective: str) -> str | None:
    """Describe why sentence pairs are of little use here; None if documents have several sentences,
    or if no pairs are made."""
    documents, sentences = (manifest["train"][name] for name in ("documents", "sentences"))
    if objective == "none" or sentences >= FEW_SENTENCES * documents:
        return None
    return (
        f"documents have {sentences / documents:.1f} sentences on average, so most pairs "
        f"(data.objective {objective}) consist of two parts of one sentence; put blank lines "
        "between documents if lines belong together, or set data.objective=none"
    )


def list_other_settings(config: DataConfig, manifest: dict) -> list[str]:
    """Describe how settings of vocabulary and corpus differ from those that a manifest's store was
    built with, as far as this shows without the text."""
    built, sources = manifest.get("settings", {}), config.corpus.each_source()
    places = {str(i): source for i, source in enumerate(sources)}
    number = len({match[1] for key in built if (match := OF_SOURCE.fullmatch(key))})
    if number not in (0, len(sources)):
        return [f"corpus had {number} sources, has {len(sources)}"]
    differences = []
    for key, was in built.items():
        section, _, name = key.partition(".")
        place = getattr(config, section, None)
        if match := OF_SOURCE.fullmatch(key):
            place, name = places.get(match[1]), match[2]
            key = f"corpus.{name}" if len(sources) == 1 else key
        now = getattr(place, name, was)
        if name in ("path", "dataset") or is_file(str(now)) or (now is None and name == "size"):
            continue  # of which the manifest has a hash, or a part
        if now != was:
            differences.append(f"{key} was {was!r}, is {now!r}")
    return differences
