"""A **vocabulary that is there already**, in place of a trained one: `vocab.txt` or a Hugging Face
folder, held against the config.

Flags are never taken over in silence: what the files say has to be what the config says.
"""

import json
from pathlib import Path

from data_pipeline.common.errors import UserError
from data_pipeline.config import VocabConfig, check
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    build_normalizer,
    train_wordpiece,
)


def read_existing(vocab: VocabConfig) -> list[str]:
    """The pieces at `vocab.path` by id; none if the path is null.

    Raises `UserError` if there is no sound WordPiece vocabulary with BERT's special tokens, or it
    was made for other flags than the config's, or for fewer pieces than `vocab.size` would keep.
    """
    if vocab.path is None:
        return []
    path = Path(vocab.path).expanduser()
    text = path / "vocab.txt" if path.is_dir() else path
    tokenizer = read_json(text.parent / "tokenizer.json")
    settings = read_json(text.parent / "tokenizer_config.json")
    check(
        text.exists() or path.is_dir() and bool(tokenizer),
        f"vocab.path {path} is neither a vocab.txt nor a folder with vocab.txt or tokenizer.json",
    )
    pieces = read_lines(text) if text.exists() else []
    if tokenizer:
        listed = pieces_of(tokenizer, text.parent / "tokenizer.json")
        check(
            pieces in ([], listed),
            f"{text} and tokenizer.json beside it hold other pieces ({len(pieces)} and "
            f"{len(listed)}); delete the one that is wrong",
        )
        pieces = listed
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    check(not missing, f"{path} lacks {' '.join(missing)}; a BERT vocabulary has all five")
    check(
        vocab.size is None or vocab.size >= len(pieces),
        f"vocab.size {vocab.size} is less than the {len(pieces)} pieces of {path}; leave it out to "
        f"take all, or give a larger one to extend them",
    )
    check_flags(tokenizer.get("normalizer") or {}, settings, vocab, path)
    return pieces


def make_vocabulary(counts: dict[str, int], vocab: VocabConfig, existing: list[str]) -> list[str]:
    """The pieces of the config's vocabulary by id: the `existing` ones as they are, or extended to
    `vocab.size` by what the corpus asks for, or trained if there are none.

    New pieces are appended and never take the place of an [unusedN]: the ids of those may be in use
    by whoever made the vocabulary, which is what they are for.
    """
    if existing and vocab.size in (None, len(existing)):
        return existing
    return train_wordpiece(counts, vocab, existing)


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); put vocab.path right") from None


def read_lines(path: Path) -> list[str]:
    """A piece a line; raises `UserError` at an empty line or one that is there twice."""
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    numbers: dict[str, int] = {}
    for number, piece in enumerate(lines, 1):
        check(piece != "", f"{path}, line {number} is empty; it should hold a piece")
        first = numbers.setdefault(piece, number)
        check(first == number, f"{path} has {piece!r} on line {first} and on line {number}")
    return lines


def pieces_of(tokenizer: dict, path: Path) -> list[str]:
    """The pieces of a `tokenizer.json` by id; raises `UserError` unless it works as BERT's does."""
    model = tokenizer.get("model", {})
    for what, found, wanted in (
        ("model", model.get("type", "WordPiece"), "WordPiece"),
        ("normaliser", (tokenizer.get("normalizer") or {}).get("type"), "BertNormalizer"),
        ("pre-tokeniser", (tokenizer.get("pre_tokenizer") or {}).get("type"), "BertPreTokenizer"),
        ("prefix", model.get("continuing_subword_prefix", "##"), "##"),
        ("longest word", model.get("max_input_chars_per_word", 100), MAX_WORD_CHARACTERS),
    ):
        check(found == wanted, f"{path} has {what} {found}; only BERT's {wanted} is served")
    ids = model.get("vocab", {})
    pieces = sorted(ids, key=ids.get)
    check([ids[p] for p in pieces] == list(range(len(ids))), f"{path}: ids are not 0 to {len(ids)}")
    added = [t["content"] for t in tokenizer.get("added_tokens", []) if t["content"] not in ids]
    check(
        not added,
        f"{path} has {len(added)} added tokens outside its WordPiece ({added[:1]}...); put them "
        f"into vocab.txt as pieces, and delete tokenizer.json",
    )
    return pieces


def check_flags(normalizer: dict, settings: dict, vocab: VocabConfig, path: Path) -> None:
    """Raise `UserError` if the flags of a tokenizer are not the config's.

    As in transformers, `tokenizer_config.json` wins over `tokenizer.json`, and null for accents
    means as lower case.
    """
    wanted, said = build_normalizer(vocab), {}
    for ours, theirs in (
        ("lowercase", "do_lower_case"),
        ("strip_accents", "strip_accents"),
        ("handle_chinese_chars", "tokenize_chinese_chars"),
    ):
        said[ours] = found = settings.get(theirs, normalizer.get(ours))
        if ours == "strip_accents" and found is None:
            found = said["lowercase"]
        check(
            found in (None, getattr(wanted, ours)),
            f"{path} was made with {ours} {str(found).lower()}, the config says "
            f"{str(getattr(wanted, ours)).lower()}; set vocab.{ours}={str(found).lower()}",
        )
