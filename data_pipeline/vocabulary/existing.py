"""Read an existing vocabulary, a `vocab.txt` or a Hugging Face folder, in place of training one.

Its flags have to match those of the config: they are never adopted silently.
"""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import COUNT, read_json, read_utf8
from data_pipeline.config import VocabConfig, check
from data_pipeline.sampling.token_store import SPECIAL_TOKENS
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    build_normalizer,
    train_wordpiece,
)

ADVICE = "correct the path, or put a sound copy there"
FLAG = (bool, None)
SETTINGS = {"do_lower_case?": FLAG, "strip_accents?": FLAG, "tokenize_chinese_chars?": FLAG}
TOKENIZER = {
    "model": {
        "type?": str,
        "vocab": ({str: COUNT}, list),  # a list in other models, which are refused by their type
        "continuing_subword_prefix?": (str, None),
        "max_input_chars_per_word?": COUNT,
    },
    "normalizer?": (
        {"type": str, "lowercase?": FLAG, "strip_accents?": FLAG, "handle_chinese_chars?": FLAG},
        None,
    ),
    "pre_tokenizer?": ({"type": str}, None),
    "added_tokens?": [{"content": str}],
}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the `tokenizer.json` of a folder; raises `UserError` unless it is a sound BERT's."""
    path = folder / "tokenizer.json"
    pieces_of(read_json(path, TOKENIZER, ADVICE), path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own
        raise UserError(f"{path} is no tokenizer: {error}; {ADVICE}") from None


def read_existing(vocab: VocabConfig) -> list[str]:
    """Read the pieces of the vocabulary at `vocab.path`, by id; none if the path is null.

    Raises `UserError` if that is no valid WordPiece vocabulary with BERT's special tokens, if its
    flags differ from the config's, or if `vocab.size` is not its number of pieces.
    """
    if vocab.path is None:
        return []
    path = Path(vocab.path).expanduser()
    check(
        path.exists(),
        f"there is no {path}, which vocab.path or init_from names; download a model of a hub into "
        "a folder, and give that",
    )
    text = path / "vocab.txt" if path.is_dir() else path
    tokenizer = read_optional(text.parent / "tokenizer.json", TOKENIZER)
    settings = read_optional(text.parent / "tokenizer_config.json", SETTINGS)
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
        vocab.size in (None, len(pieces)),
        f"vocab.size is {vocab.size}, and {path} has {len(pieces)} pieces; set vocab.size=null to "
        "take them all, and vocab.extend=N to add N pieces of the corpus",
    )
    check_flags(tokenizer.get("normalizer") or {}, settings, vocab, path)
    return pieces


def make_vocabulary(counts: dict[str, int], vocab: VocabConfig, existing: list[str]) -> list[str]:
    """Make the vocabulary that the config asks for; its pieces by id.

    Keeps the `existing` pieces and adds `vocab.extend` pieces trained on the corpus, or trains all
    pieces if there are none. New pieces are appended and never replace an [unusedN],
    because whoever made the vocabulary may use those ids for their own tokens.
    """
    if existing and not vocab.extend:
        return existing
    return train_wordpiece(counts, replace(vocab, size=final_size(vocab, existing)), existing)


def final_size(vocab: VocabConfig, existing: list[str]) -> int | None:
    """Compute how many pieces there will be before padding; None: as many as by default."""
    return len(existing) + vocab.extend if vocab.extend else vocab.size


def read_optional(path: Path, shape: dict) -> dict:
    return read_json(path, shape, ADVICE) if path.exists() else {}


def read_lines(path: Path) -> list[str]:
    """Read one piece per line; raises `UserError` for an empty or repeated line."""
    lines = read_utf8(path, ADVICE).replace("\r\n", "\n").removesuffix("\n").split("\n")
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
    model = tokenizer["model"]
    for what, found, wanted in (
        ("model", model.get("type", "WordPiece"), "WordPiece"),
        ("normaliser", (tokenizer.get("normalizer") or {}).get("type"), "BertNormalizer"),
        ("pre-tokeniser", (tokenizer.get("pre_tokenizer") or {}).get("type"), "BertPreTokenizer"),
        ("prefix", model.get("continuing_subword_prefix", "##"), "##"),
        ("longest word", model.get("max_input_chars_per_word", 100), MAX_WORD_CHARACTERS),
    ):
        check(found == wanted, f"{path} has {what} {found}; only BERT's {wanted} is served")
    ids = model["vocab"]
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
