"""Read and encode the probes of a model: minimal pairs (two sentences that differ in one point of
grammar), and sentences with a [MASK]."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Encoding

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import write_file
from data_pipeline.common.reading import parse_json, read_utf8
from data_pipeline.config import PROBES_FILE, ProbesConfig
from data_pipeline.sampling.vocabulary import read_vocabulary
from data_pipeline.vocabulary.existing import load_tokenizer

SUFFIXES = (".jsonl", ".tsv")
WANTED = ".jsonl (BLiMP's JSON lines) or .tsv (good<TAB>bad)"
# a first line of a .tsv that is no pair; the last one is of MultiBLiMP
HEADERS = [["good", "bad"], ["sentence_good", "sentence_bad"], ["grammatical", "ungrammatical"]]
HEADERS += [["acceptable", "unacceptable"], ["correct", "incorrect"], ["sen", "wrong_sen"]]


@dataclass
class MinimalPair:
    """An acceptable sentence and an unacceptable one, with the phenomenon that they test.

    A paradigm (`UID`) belongs to a phenomenon (`linguistics_term`), and that to a `field`, as in
    BLiMP (Warstadt et al. 2020, arXiv:1912.00582).
    """

    good: str
    bad: str
    field: str
    linguistics_term: str
    UID: str

    @property
    def paradigm(self) -> tuple[str, str, str]:
        """Names of field, phenomenon and paradigm; two phenomena may have one of the same name."""
        return self.field, self.linguistics_term, self.UID


def read_pairs(names: list[str], limit: int | None = None) -> list[MinimalPair]:
    """Read the minimal pairs of files, or of all files in folders, up to `limit` a paradigm.

    A `.jsonl` file has BLiMP's keys, of which `sentence_good` and `sentence_bad` are required; a
    line of a `.tsv` file is good<TAB>bad, the first perhaps a header. The paradigm defaults to the
    name of the file, with that of its folder if another file has the same.
    Raises `UserError` that names file and line.
    """
    pairs, counts = [], Counter()
    files = list_files(names)
    stems = Counter(path.stem for path in files)
    for path in files:
        shared = stems[path.stem] > 1
        for pair in read_file(path, f"{path.parent.name}/{path.stem}" if shared else path.stem):
            counts[pair.paradigm] += 1
            if limit is None or counts[pair.paradigm] <= limit:
                pairs.append(pair)
    check(bool(pairs), f"no minimal pairs in {', '.join(names)}: all files there are empty")
    return pairs


def list_files(names: list[str]) -> list[Path]:
    """List the files of minimal pairs, each once; those in a folder and its subfolders in the order
    of their names, without hidden ones."""
    files = {}
    for path in (Path(name).expanduser() for name in names):
        check(
            path.exists(),
            f"no minimal pairs at {path}; give files of minimal pairs, or a folder of them",
        )
        found = [path]
        if path.is_dir():
            found = sorted(
                p
                for p in path.rglob("*")
                if p.suffix in SUFFIXES
                and p.is_file()
                and not any(part.startswith(".") for part in p.relative_to(path).parts)
            )
            check(bool(found), f"no {' or '.join(SUFFIXES)} file in {path}; give {WANTED}")
        files |= {one.resolve(): one for one in found if one.resolve() not in files}
    return list(files.values())


def read_file(path: Path, paradigm: str) -> list[MinimalPair]:
    check(path.suffix in SUFFIXES, f"{path} is in no format of minimal pairs; give {WANTED}")
    lines = read_utf8(path, "convert it").split("\n")
    first = lines[0].strip().lower().split("\t")
    check(
        first[::-1] not in HEADERS,
        f"{path} has {first[0]} before {first[-1]}; exchange its columns: a line is good<TAB>bad",
    )
    parse = parse_blimp if path.suffix == ".jsonl" else parse_tsv
    pairs = [
        parse(line, paradigm, f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not (number == 1 and first in HEADERS)
    ]
    strange = [pair for pair in pairs if not are_alike(pair.good, pair.bad)]
    if 2 * len(strange) > len(pairs):
        good, bad = strange[0].good, strange[0].bad
        raise UserError(
            f"{path} has no minimal pairs: {good!r:.60} and {bad!r:.60} have no word in common; "
            f"give {WANTED}"
        )
    return pairs


def are_alike(a: str, b: str) -> bool:
    """Tell whether two texts share a word, or a character where neither has blanks."""
    a, b = a.lower(), b.lower()
    return bool(set(a.split()) & set(b.split()) if " " in a + b else set(a) & set(b))


def parse_blimp(line: str, paradigm: str, place: str) -> MinimalPair:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}); correct it") from None
    check(
        isinstance(row, dict),
        f"{place} is not a JSON object; write one per line, with sentence_good and sentence_bad",
    )
    for key in ("sentence_good", "sentence_bad"):
        found = row.get(key)
        is_text = isinstance(found, str) and found.strip()
        check(is_text, f"{place} has no text under {key}; its keys are {', '.join(row)}")
    uid = first_given(row.get("UID"), row.get("paradigm"), paradigm)
    term = first_given(row.get("linguistics_term"), row.get("phenomenon"), uid)
    field = first_given(row.get("field"), term)
    return MinimalPair(row["sentence_good"], row["sentence_bad"], field, term, uid)


def first_given(*names: object) -> str:
    """Return the first name that is not null, as text."""
    return str(next(name for name in names if name is not None))


def parse_tsv(line: str, paradigm: str, place: str) -> MinimalPair:
    cells = [cell.strip() for cell in line.split("\t")]
    check(
        len(cells) == 2 and all(cells),
        f"{place} has {len(cells)} columns, {sum(map(bool, cells))} of them with text; a line "
        "must be good<TAB>bad",
    )
    return MinimalPair(*cells, paradigm, paradigm, paradigm)


def encode_texts(folder: Path, texts: list[str]) -> list[list[int]]:
    """Encode texts by the `tokenizer.json` in `folder`, with [CLS] and [SEP], as `encode`."""
    return [encoding.ids for encoding in encode(folder, texts)]


def encode(folder: Path, texts: list[str]) -> list[Encoding]:
    """Encode texts with [CLS] and [SEP], and keep which word each token belongs to.

    A [MASK] in a text is the mask token, whatever the tokenizer calls it.
    Raises `UserError` for a text without tokens, such as one of control characters.
    """
    tokenizer, vocabulary = load_tokenizer(folder), read_vocabulary(folder)
    mask = vocabulary.pieces[vocabulary["[MASK]"]]
    for text in texts:
        check(
            not any("\ud800" <= c <= "\udfff" for c in text),
            f"{text!r} has an unpaired surrogate, as of a byte that is not UTF-8; remove it",
        )
    texts = [text.replace("[MASK]", mask) for text in texts]
    found = tokenizer.encode_batch(texts)
    for encoding, text in zip(found, texts, strict=True):
        check(len(encoding.ids) > 2, f"{text!r} has no token in this vocabulary; remove it")
    return found


def write_probes(data_dir: Path, probes: ProbesConfig, pairs: list[MinimalPair]) -> None:
    """Encode the probes of a config, and write them to `data_dir` for training.

    The file holds the ids of all sentences, the names of each pair's field, phenomenon and
    paradigm, and what training compares with its own config and vocabulary.
    """
    vocab_dir = data_dir / "vocab"
    found = {"settings": asdict(probes), "vocab_sha256": read_vocabulary(vocab_dir).sha256}
    found["paradigms"] = [pair.paradigm for pair in pairs]
    found["good"] = encode_texts(vocab_dir, [pair.good for pair in pairs])
    found["bad"] = encode_texts(vocab_dir, [pair.bad for pair in pairs])
    found["sentences"] = encode_texts(vocab_dir, probes.sentences)
    write_file(data_dir / PROBES_FILE, json.dumps(found).encode() + b"\n", shared=True)
    print(
        f"probes: {len(pairs):,} minimal pairs of {len({*found['paradigms']}):,} paradigms, "
        f"{len(probes.sentences):,} sentences to fill in"
    )
