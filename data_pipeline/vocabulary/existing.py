"""Read an existing vocabulary, a `vocab.txt` or a Hugging Face folder, in place of training one.

Its flags have to match those of the config: they are never adopted silently.
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
    """Read the pieces of the vocabulary at `vocab.path`, by id; none if the path is null.

    Raises `UserError` if that is no valid WordPiece vocabulary with BERT's special tokens, if its
    flags differ from the config's, or if it has more pieces than `vocab.size`.
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
    """Make the vocabulary that the config asks for; its pieces by id.

    Keeps the `existing` pieces and extends them to `vocab.size` by pieces trained on the corpus, or
    trains all pieces if there are none. New pieces are appended and never replace an [unusedN],
    because whoever made the vocabulary may use those ids for their own tokens.
    """
    if existing and vocab.size in (None, len(existing)):
        return existing
    return train_wordpiece(counts, vocab, existing)


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); correct vocab.path") from None


def read_lines(path: Path) -> list[str]:
    """Read one piece per line; raises `UserError` for an empty or repeated line."""
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
    """Read the pieces of a `tokenizer.json` by id.

    Raises `UserError` unless it is a BERT tokenizer: its normaliser, pre-tokeniser and WordPiece.
    """
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
    """Raise `UserError` if the flags of a tokenizer differ from the config's.

    As in transformers, `tokenizer_config.json` takes precedence over `tokenizer.json`, and if
    `strip_accents` is null it follows `lowercase`.
    """
    wanted, flags = build_normalizer(vocab), {}
    for ours, theirs in (
        ("lowercase", "do_lower_case"),
        ("strip_accents", "strip_accents"),
        ("handle_chinese_chars", "tokenize_chinese_chars"),
    ):
        flags[ours] = found = settings.get(theirs, normalizer.get(ours))
        if ours == "strip_accents" and found is None:
            found = flags["lowercase"]
        check(
            found in (None, getattr(wanted, ours)),
            f"{path} was made with {ours} {str(found).lower()}, the config says "
            f"{str(getattr(wanted, ours)).lower()}; set vocab.{ours}={str(found).lower()}",
        )
