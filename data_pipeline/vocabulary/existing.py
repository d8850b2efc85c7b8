"""Read an existing vocabulary, a `vocab.txt` or a Hugging Face folder, instead of training one.

The flags of a BERT vocabulary have to match those of the config: they are never adopted silently. A
tokenizer of another kind (byte-level BPE, SentencePiece) is used as a whole, with its text rules.
"""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, processors

from data_pipeline.common.errors import UserError, check, is_fault
from data_pipeline.common.reading import COUNT, read_json, read_utf8
from data_pipeline.config import VocabConfig
from data_pipeline.sampling.vocabulary import SPECIAL_TOKENS, Vocabulary, list_pieces
from data_pipeline.vocabulary.training import (
    MAX_WORD_CHARACTERS,
    build_normalizer,
    train_wordpiece,
    write_vocabulary,
)

ADVICE = "correct the path, or put an intact copy there"
FLAG = (bool, None)
SETTINGS = {"do_lower_case?": FLAG, "strip_accents?": FLAG, "tokenize_chinese_chars?": FLAG}
SETTINGS["word_tokenizer_type?"] = (str, None)
NORMALIZER = {
    "type": str,
    "lowercase?": FLAG,
    "strip_accents?": FLAG,
    "handle_chinese_chars?": FLAG,
    "clean_text?": FLAG,
}
TOKENIZER = {
    "model": {
        "type?": str,
        "vocab": ({str: COUNT}, list),  # a list in SentencePiece's unigram model
        "continuing_subword_prefix?": (str, None),
        "max_input_chars_per_word?": COUNT,
    },
    "normalizer?": (NORMALIZER, None),
    "pre_tokenizer?": ({"type": str}, None),
    "added_tokens?": [{"content": str, "id": COUNT, "special?": bool}],
}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the `tokenizer.json` of a folder, without the truncation and padding that a file may ask
    for; raises `UserError` unless it is sound."""
    path = folder / "tokenizer.json"
    pieces = pieces_of(read_json(path, TOKENIZER, ADVICE), path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.model.tokenize("\U0010fffd")  # a unigram model without [UNK] fails here
        tokenizer.encode("Some text.")  # and rules that the library takes, but cannot follow, here
    except BaseException as error:  # the library raises no class of its own
        if not is_fault(error):
            raise
        raise UserError(f"{path} is not a valid tokenizer: {error}; {ADVICE}") from None
    read = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    check(read == pieces, f"{path} has added tokens with the ids of other pieces; {ADVICE}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_whole(vocab: VocabConfig) -> Tokenizer | None:
    """Load the tokenizer at `vocab.path` if it is of another kind than BERT's; else None."""
    if vocab.path is None:
        return None
    path = Path(vocab.path).expanduser()
    folder = path if path.is_dir() else path.parent
    return load_tokenizer(folder) if is_whole(folder) else None


def is_whole(folder: Path) -> bool:
    """Tell whether the tokenizer in a folder is of another kind than BERT's."""
    return not is_berts(read_optional(folder / "tokenizer.json", TOKENIZER))


def read_existing(vocab: VocabConfig) -> list[str]:
    """Read the pieces of the vocabulary at `vocab.path`, by id; none if the path is null.

    Raises `UserError` if that is not a valid vocabulary with BERT's special tokens, if its flags
    differ from the config's, or if `vocab.size` is not its number of pieces.
    """
    if vocab.path is None:
        return []
    path = Path(vocab.path).expanduser()
    check(
        path.exists(),
        f"there is no {path}, to which vocab.path or init_from is set; download a model from a "
        "hub into a folder, and give that",
    )
    export = path / "export"
    check(
        not (export / "tokenizer.json").exists() or (path / "tokenizer.json").exists(),
        f"{path}, to which vocab.path or init_from is set, is a run folder; its export is {export}",
    )
    text = path / "vocab.txt" if path.is_dir() else path
    tokenizer = read_optional(text.parent / "tokenizer.json", TOKENIZER)
    settings = read_optional(text.parent / "tokenizer_config.json", SETTINGS)
    check(
        text.exists() or path.is_dir() and bool(tokenizer),
        f"vocab.path {path} is neither a vocab.txt nor a folder with vocab.txt or tokenizer.json; "
        "convert a folder with other files by "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    )
    pieces = read_lines(text) if text.exists() else []
    if tokenizer:
        listed = pieces_of(tokenizer, text.parent / "tokenizer.json")
        check(
            pieces in ([], listed),
            f"{text} and tokenizer.json beside it hold different pieces ({len(pieces)} and "
            f"{len(listed)}); delete the one that is wrong",
        )
        pieces = listed
    missing = Vocabulary.of(pieces).missing_specials()
    check(
        not missing,
        f"{path} lacks {' '.join(missing)}; a BERT vocabulary has all five special tokens",
    )
    check(
        len(Vocabulary.of(pieces).ordinary),
        f"{path} has no pieces besides the special tokens; save the tokenizer again, from its "
        "vocab.txt",
    )
    more = ", and vocab.extend=N to add N pieces of the corpus" if is_berts(tokenizer) else ""
    check(
        vocab.size in (None, len(pieces)),
        f"vocab.size is {vocab.size}, but {path} has {len(pieces)} pieces; set vocab.size=null to "
        f"use them all{more}",
    )
    splitter = settings.get("word_tokenizer_type")
    check(
        tokenizer or not splitter,
        f"{path} splits words by {splitter}, which is code in transformers "
        "(BertJapaneseTokenizer); give a model whose rules are in a tokenizer.json",
    )
    if is_berts(tokenizer):
        check(
            {*SPECIAL_TOKENS} <= {*pieces},
            f"{path} names its special tokens differently than BERT, as tokenizers of other kinds "
            "do; put its tokenizer.json beside it",
        )
        check_flags(tokenizer.get("normalizer") or {}, settings, vocab, path)
    else:
        check_whole(tokenizer, pieces, vocab, path)
    return pieces


def make_vocabulary(counts: dict[str, int], vocab: VocabConfig, existing: list[str]) -> list[str]:
    """Make the vocabulary that the config asks for; its pieces by id.

    Keeps the `existing` pieces and adds `vocab.extend` pieces trained on the corpus, or trains all
    pieces if there are none. New pieces are appended and never replace an [unusedN],
    because the maker of the vocabulary may use those ids for other tokens.
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


def is_berts(tokenizer: dict) -> bool:
    """Tell whether a `tokenizer.json` is BERT's, with no added tokens besides its special ones,
    which would divide text before all rules; {} means no file, and counts as BERT's."""
    return not tokenizer or has_berts_rules(tokenizer) and not other_tokens(tokenizer)


def other_tokens(tokenizer: dict) -> list[str]:
    """List the added tokens of a `tokenizer.json` besides BERT's special ones."""
    added = (token["content"] for token in tokenizer.get("added_tokens", []))
    return [token for token in added if token not in SPECIAL_TOKENS]


def has_berts_rules(tokenizer: dict) -> bool:
    """Tell whether a `tokenizer.json` has BERT's normaliser, pre-tokeniser and WordPiece."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
    found = (
        model.get("type", "WordPiece"),
        normalizer.get("type"),
        normalizer.get("clean_text") is not False,
        (tokenizer.get("pre_tokenizer") or {}).get("type"),
        model.get("continuing_subword_prefix", "##"),
        model.get("max_input_chars_per_word", MAX_WORD_CHARACTERS),
    )
    berts = ("WordPiece", "BertNormalizer", True, "BertPreTokenizer", "##", MAX_WORD_CHARACTERS)
    return found == berts and {*SPECIAL_TOKENS} <= model["vocab"].keys()


def pieces_of(tokenizer: dict, path: Path) -> list[str]:
    """Read the pieces of a `tokenizer.json` by id; raises `UserError` unless each has one."""
    ids = list_pieces(tokenizer)
    pieces = sorted(ids, key=ids.get)
    check(
        [ids[p] for p in pieces] == list(range(len(ids))),
        f"{path}: ids are not 0 to {len(ids) - 1}, each once; {ADVICE}",
    )
    own = list_pieces({"model": tokenizer["model"]})
    added = [
        token["content"]
        for token in tokenizer.get("added_tokens", [])
        if token["content"] not in own and not token.get("special")
    ]
    is_wordpiece = tokenizer["model"].get("type", "WordPiece") == "WordPiece"
    cure = "put them into vocab.txt as pieces, and delete tokenizer.json"
    check(
        not added,
        f"{path} has {len(added)} added tokens outside its vocabulary ({added[:1]}...); "
        f"{cure if is_wordpiece else 'give a tokenizer without them'}",
    )
    return pieces


def check_whole(tokenizer: dict, pieces: list[str], vocab: VocabConfig, path: Path) -> None:
    """Raise `UserError` if a tokenizer of another kind than BERT's cannot be used as a whole."""
    model = tokenizer["model"]
    kind = f"{path} has {model.get('type', 'WordPiece')} with other text rules than BERT's"
    if has_berts_rules(tokenizer):
        more = " ".join(other_tokens(tokenizer)[:3])
        kind = f"{path} has added tokens that divide text before BERT's rules apply ({more})"
    check(vocab.extend is None, f"{kind}, so vocab.extend cannot add to it; remove vocab.extend")
    check(
        bool(tokenizer.get("pre_tokenizer")),
        f"{kind}, and no pre-tokeniser to find words with; give another tokenizer",
    )
    check(not model.get("dropout"), f"{kind}, and drops merges at random; set its dropout to null")
    added = [t["content"] for t in tokenizer.get("added_tokens", []) if not t.get("special")]
    check(
        not added,
        f"{path} has {len(added)} added tokens ({added[:1]}...) that divide text before its rules "
        "apply; remove them from added_tokens, but not from the pieces",
    )
    broken = [piece for piece in pieces if {"\n", "\r"} & {*piece}]
    check(not broken, f"{kind}, and a piece with a line end, {broken[:1]}, which is not supported")


def write_whole(folder: Path, tokenizer: Tokenizer) -> None:
    """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json` of a tokenizer of any kind.

    A sequence is `[CLS] text [SEP]` here, so a tokenizer that builds another one is changed to
    this.
    """
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    vocabulary = Vocabulary.of(pieces)
    cls, sep = vocabulary["[CLS]"], vocabulary["[SEP]"]
    if tokenizer.encode("").ids != [cls, sep]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{pieces[cls]}:0 $A:0 {pieces[sep]}:0",
            pair=f"{pieces[cls]}:0 $A:0 {pieces[sep]}:0 $B:1 {pieces[sep]}:1",
            special_tokens=[(pieces[cls], cls), (pieces[sep], sep)],
        )
    normalizer = tokenizer.normalizer
    lowercase = normalizer is not None and normalizer.normalize_str("A").strip() == "a"
    settings = {"do_lower_case": lowercase}
    if vocabulary.begin is not None:  # RoBERTa, ALBERT and others use these names too
        settings |= {"bos_token": pieces[cls], "eos_token": pieces[sep]}
    five = {vocabulary[name] for name in SPECIAL_TOKENS}
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    more = [token.content for i, token in added if token.special and i not in five]
    if more:
        settings["additional_special_tokens"] = more
    # any other class of transformers may build its own rules for text, and not read this file
    write_vocabulary(folder, tokenizer, pieces, "PreTrainedTokenizerFast", settings)


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
        says = f"but the config says {str(getattr(wanted, ours)).lower()}"
        if getattr(vocab, ours) is None:
            says = "but where it is not set, it is as lowercase"
        check(
            found in (None, getattr(wanted, ours)),
            f"{path} was made with {ours} {str(found).lower()}, {says}; set "
            f"vocab.{ours}={str(found).lower()}",
        )
