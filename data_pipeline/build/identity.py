"""Decide whether two token stores are the same: by their settings and the hashes of their text.

Only the settings named here count. Where an older store does not record a setting, it counts as its
default, so that adding a setting to the config leaves existing stores valid. Paths do not count.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from data_pipeline.common.folders import hash_file
from data_pipeline.common.plug_ins import is_file
from data_pipeline.config import CorpusConfig, DatasetConfig, SourceConfig, VocabConfig
from data_pipeline.corpus.readers import FileChunk

SOURCE = ("text_field", "encoding", "errors", "language", "weight")
PLUG_INS = ("word_segmenter", "sentence_splitter")
DATASET = ("path", "name", "split", "data_files", "text_column")
CORPUS = ("deduplicate", "held_out_fraction")
VOCAB = (
    "size",
    "lowercase",
    "strip_accents",
    "handle_chinese_chars",
    "min_frequency",
    "character_coverage",
)
TEXT_HASH = "pieces"  # key of the hash of a source's text in a manifest


def hash_json(value) -> str:
    """Hash a value to the SHA-256 of its JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def store_settings(
    corpus: CorpusConfig, vocab: VocabConfig, chunks: list[FileChunk], existing: list[str]
) -> dict:
    """Collect everything that a store depends on, by config key; files are represented by their
    hashes.

    existing: the pieces of the vocabulary at `vocab.path`, or none.
    """
    settings = {f"corpus.{name}": getattr(corpus, name) for name in CORPUS}
    settings |= {f"vocab.{name}": getattr(vocab, name) for name in VOCAB}
    settings["vocab.path"] = hash_json(existing) if existing else None
    for i, source in enumerate(corpus.each_source()):
        own = [[c.layout, c.start, c.end, c.version or c.path] for c in chunks if c.source == i]
        values = {name: getattr(source, name) for name in SOURCE} | {TEXT_HASH: hash_json(own)}
        values |= {name: identify(getattr(source, name)) for name in PLUG_INS}
        values["dataset"] = describe_dataset(source.dataset)
        settings |= {f"corpus.sources[{i}].{name}": value for name, value in values.items()}
    return settings


def identify(plug_in: str | None) -> str | None:
    """Identify a plug-in in a file by the file's content, and any other plug-in by its name."""
    if not is_file(plug_in or ""):
        return plug_in
    path, _, function = plug_in.rpartition(":")
    return f"{function} of a file with sha256 {hash_file(Path(path))}"


def describe_dataset(dataset: DatasetConfig | None) -> dict | None:
    return dataset and {name: getattr(dataset, name) for name in DATASET}


DEFAULTS = store_settings(CorpusConfig(), VocabConfig(), [], [])


def default_of(name: str):
    return DEFAULTS.get(re.sub(r"\[\d+\]", "[0]", name))


def settings_key(settings: dict) -> str:
    """Hash the settings that differ from their defaults, so that adding one later changes
    nothing."""
    return hash_json({name: v for name, v in settings.items() if v != default_of(name)})


def list_differences(manifest: dict, settings: dict) -> list[str]:
    """Describe how `settings` differ from those that the store of a manifest was built with.

    Returns a phrase per difference.
    """
    built = manifest["settings"]
    one_source = "corpus.sources[1].weight" not in settings
    phrases = []
    for name in sorted(settings.keys() | built.keys()):
        was, now = (side.get(name, default_of(name)) for side in (built, settings))
        short = name.replace("sources[0].", "") if one_source else name
        if was != now and name.endswith(f".{TEXT_HASH}"):
            source = short.removesuffix(f".{TEXT_HASH}")
            phrases.append("the text has changed" if name in settings else f"{source} is gone")
        elif was != now:
            phrases.append(f"{short} was {was!r}, is {now!r}")
    return phrases


def key_of_schema_1(
    corpus: CorpusConfig, vocab: VocabConfig, chunks: list[FileChunk], existing: list[str]
) -> str:
    """Compute the `key` of a manifest of schema 1: a hash of every field that version had, which
    are named here, because others may be added above."""

    def fields(source: SourceConfig) -> dict:
        old = {"source": source.builtin, "files": source.files, "layout": source.layout}
        old |= {"words": source.word_segmenter, "sentences": source.sentence_splitter}
        same = ("text_field", "encoding", "errors", "language", "weight")
        old |= {name: getattr(source, name) for name in same}
        names = ("path", "name", "split", "data_files", "text_column")
        of = source.dataset
        return old | {"dataset": of and {name: getattr(of, name) for name in names}}

    described = fields(corpus) | {"deduplicate": corpus.deduplicate}
    described["held_out"] = corpus.held_out_fraction
    described["sources"] = [fields(source) for source in corpus.sources]
    names = ("size", "lowercase", "strip_accents", "handle_chinese_chars")
    names += ("min_frequency", "character_coverage")
    words = {name: getattr(vocab, name) for name in names} | {"path": existing}
    return hash_json([1, described, words, [asdict(chunk) for chunk in chunks]])
