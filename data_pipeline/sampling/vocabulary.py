"""The pieces of a vocabulary, as pairs, masks and the model need them, without `tokenizers`."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import read_file

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0 to 4 where we train them
OTHER_NAMES = {"[PAD]": "<pad>", "[UNK]": "<unk>", "[CLS]": "<s>", "[SEP]": "</s>"}
OTHER_NAMES["[MASK]"] = "<mask>"  # as RoBERTa and SentencePiece call them
BYTES_BEGIN = "Ġ"  # mark of a piece with a space before it, in byte-level BPE
BEGINS = (BYTES_BEGIN, "▁")  # and in SentencePiece
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are a letter there
BYTES = {chr(byte): byte for byte in PLAIN} | {
    chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(PLAIN)))
}  # letter of byte-level BPE -> byte (Radford et al. 2019)
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")


@dataclass
class Vocabulary:
    """A vocabulary as pairs, masks and model use it; needs no `tokenizers` library."""

    pieces: list[str]
    sha256: str
    continues: np.ndarray  # bool (V,): whether the piece continues a word (##, or no such mark)
    ordinary: np.ndarray  # int64: ids that may replace a masked token: not special, not [unusedN]
    begin: str | None = None  # mark of a piece that begins a word, of `BEGINS`; None: WordPiece

    @classmethod
    def of(cls, pieces: list[str], sha256: str = "") -> "Vocabulary":
        """Build a vocabulary from its pieces in the order of their ids.

        It is not WordPiece if more pieces have one of the marks `BEGINS` than begin with ##. If
        fewer than a tenth have it, as in Chinese, marks do not delimit words, and each piece is a
        word.
        """
        counts = Counter(piece[:1] for piece in pieces)
        inside = np.array([piece.startswith("##") for piece in pieces], bool)
        begin = max(BEGINS, key=lambda mark: counts[mark])
        begin = begin if counts[begin] > inside.sum() else None
        ends = {"[": "]"} if begin is None else {"[": "]", "<": ">"}
        others = set(OTHER_NAMES.values())
        named = [len(p) > 2 and ends.get(p[0]) == p[-1] or p in others for p in pieces]
        named = np.array(named, bool)
        if begin is None:
            continues = inside
        elif 10 * counts[begin] > len(pieces):
            inside = [p[:1] != begin and any(map(str.isalnum, p)) for p in pieces]  # no comma
            continues = ~named & np.array(inside)
        else:
            continues = np.zeros(len(pieces), bool)
        return cls(pieces, sha256, continues, np.flatnonzero(~named), begin)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, piece: str) -> int:
        """Return the id of a piece; a special token is found by BERT's name too."""
        return self.ids[piece if piece in self.ids else OTHER_NAMES.get(piece, piece)]

    def show(self, token: int) -> str:
        """Return a piece in readable form: without the mark of a space, and bytes decoded to
        text."""
        piece = self.pieces[token]
        if self.begin is None:
            return piece
        shown = piece.replace(self.begin, " ")
        if self.begin == BYTES_BEGIN:
            shown = bytes(BYTES.get(c, 32) for c in piece).decode("utf-8", "replace")
        return shown.strip() or piece

    @cached_property
    def ids(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def missing_specials(self) -> list[str]:
        """List the special tokens that are missing, under both of their names."""
        return [name for name in SPECIAL_TOKENS if not {name, OTHER_NAMES[name]} & self.ids.keys()]


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary in `folder/vocab.txt`; raises `UserError` if there is none."""
    path = folder / "vocab.txt"
    if not path.exists():
        raise UserError(
            f"no vocabulary at {path.absolute()}; make one: python -m data_pipeline CONFIG"
        )
    data = read_file(path)
    try:
        pieces = data.decode("utf-8").split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is damaged: byte {error.start:,} is not UTF-8; put an intact copy back"
        ) from None
    vocabulary = Vocabulary.of(pieces, hashlib.sha256(data).hexdigest())
    if missing := vocabulary.missing_specials():
        raise UserError(f"{path} is damaged: it has no {missing[0]}; put an intact copy back")
    return vocabulary


def list_pieces(tokenizer: dict) -> dict[str, int]:
    """Read the ids of all pieces and added tokens of a `tokenizer.json` of any kind.

    Raises `UserError` for a vocabulary that is neither an object nor a list of [piece, score].
    """
    pieces = tokenizer["model"]["vocab"]
    if isinstance(pieces, list):  # of SentencePiece's unigram model
        is_sound = all(isinstance(row, list) and row and isinstance(row[0], str) for row in pieces)
        if not is_sound:
            raise UserError("tokenizer.json: model.vocab is not a list of [piece, score]")
        pieces = {row[0]: i for i, row in enumerate(pieces)}
    return pieces | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
