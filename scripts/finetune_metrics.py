"""Score predictions; in every metric more is better."""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

# --- labels and numbers ---------------------------------------------------------------------------


def label_scores(wanted: Sequence, found: Sequence) -> dict[str, float]:
    """Score single labels: accuracy, F1 averaged over the labels, Matthews' correlation."""
    labels = {label: i for i, label in enumerate(dict.fromkeys([*wanted, *found]))}
    table = np.zeros((len(labels), len(labels)))
    np.add.at(table, ([labels[x] for x in wanted], [labels[x] for x in found]), 1)
    right, rows, columns = np.diag(table), table.sum(1), table.sum(0)
    total = table.sum()
    norm = np.sqrt((total**2 - rows @ rows) * (total**2 - columns @ columns))
    return {
        "accuracy": right.sum() / total,
        "macro_f1": (2 * right / (rows + columns)).mean(),
        "matthews": (total * right.sum() - rows @ columns) / norm if norm else 0.0,
    }


def label_set_scores(wanted: Sequence[list], found: Sequence[list]) -> dict[str, float]:
    """Score sets of labels: F1 over all labels, averaged over labels, and whole sets found."""
    labels = {label for item in [*wanted, *found] for label in item}
    right, total = Counter(), Counter()  # total: in the reference + predicted
    for a, b in zip(wanted, found, strict=True):
        right.update(set(a) & set(b))
        total.update([*set(a), *set(b)])
    each = [2 * right[label] / total[label] for label in labels]
    same = [set(a) == set(b) for a, b in zip(wanted, found, strict=True)]
    return {
        "micro_f1": 2 * right.total() / total.total() if total else 1.0,
        "macro_f1": float(np.mean(each)) if each else 1.0,
        "exact_match": float(np.mean(same)),
    }


def number_scores(wanted: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """Score numbers: Pearson's and Spearman's correlation, and the variance explained.

    What a model that has diverged predicts is not finite, and counts as 0.
    """
    a, b = np.asarray(wanted, float), np.asarray(found, float)
    b = np.where(np.isfinite(b), b, 0)
    return {
        "pearson": correlation(a, b),
        "spearman": correlation(ranks(a), ranks(b)),
        "r2": 1 - ((a - b) ** 2).mean() / a.var() if np.ptp(a) else 0.0,
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Compute Pearson's correlation; 0 where one side is constant."""
    if not (np.ptp(a) and np.ptp(b)):  # a mean of equal numbers, rounded, may differ from them
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return a @ b / norm if norm else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank values from 1; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


# --- entities -------------------------------------------------------------------------------------


SCHEME = re.compile(r"([BSUIMEL])(?:[-_](.*))?")  # B-PER, or B_PER


def find_spans(
    tags: Sequence[str], known: Collection[str] | None = None
) -> set[tuple[int, int, str]]:
    """Find the entities of a sentence tagged in IOB2, BMES, BMEOS, BIOES, BILOU or IO.

    B, S and U begin an entity; E, L, S and U end one; I, M, E and L continue one of the same type,
    and begin one where there is none, as conlleval counts. Other tags, such as parts of speech, are
    entities of one word each, or in IO, where O is among the tags, of all equal tags beside it.

    known: the tags of a file, as they should be; those of this sentence if not given. A bare S is a
    position only if all of them are positions, and else a part of speech.
    Returns {(first word, word after the last, type)}.
    """
    spans, start, kind = set(), None, None
    known = set(tags if known is None else known)
    has_bare = all(SCHEME.fullmatch(tag) for tag in known - {"O"})
    for i, tag in enumerate([*tags, "O"]):
        match = SCHEME.fullmatch(tag)
        if match and (match[2] is not None or has_bare):
            prefix, name = match.groups(default="")
        else:
            prefix, name = "I" if "O" in known else "S", tag
        if start is not None and (prefix in "BSU" or name != kind):
            spans.add((start, i, kind))
            start = None
        if tag != "O":
            if start is None:
                start, kind = i, name
            if prefix in "ELSU":
                spans.add((start, i + 1, kind))
                start = None
    return spans


def span_scores(wanted: Sequence[list[str]], found: Sequence[list[str]]) -> dict[str, float]:
    """Score entities by span and type over all sentences, and words by tag."""
    known = {tag for tags in wanted for tag in tags}  # of words past the end O is predicted
    both = zip(wanted, found, strict=True)
    pairs = [(find_spans(a, known), find_spans(b, known)) for a, b in both]
    right = sum(len(a & b) for a, b in pairs)
    wanted_count, found_count = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    words = [x == y for a, b in zip(wanted, found, strict=True) for x, y in zip(a, b, strict=True)]
    return {
        "f1": 2 * right / (wanted_count + found_count) if right else 0.0,
        "precision": right / found_count if found_count else 0.0,
        "recall": right / wanted_count if wanted_count else 0.0,
        "accuracy": float(np.mean(words)),
    }


# --- answers --------------------------------------------------------------------------------------

HAN = re.compile("[\u4e00-\u9fff]")
# all but the marks that nltk's word tokenizer separates: 20℃ is one word, and 20% are two
WORD = r"""[^\s\u4e00-\u9fa5.,:;@#$%&?!()\[\]{}<>"'«»“”‘’„`\u2012-\u2015]"""
CMRC_PIECES = re.compile(
    rf"[\u4e00-\u9fa5]|{WORD}+(?:(?:\.|,(?=\d)){WORD}+)*|[^\w\s]"
)  # 3.5 is one
# its list has …… in one, which is no character: a … is not left out
CMRC_MARKS = set("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")


def answer_scores(
    wanted: Sequence[list[str]], found: Sequence[str], chinese: bool
) -> dict[str, float]:
    """Score answers against the best of their references: F1 and exact match.

    chinese: by the rules of CMRC 2018 (characters, longest common run) instead of SQuAD's (words).
    """
    f1, normalize = (cmrc_f1, cmrc_text) if chinese else (squad_f1, squad_text)
    pairs = list(zip(wanted, found, strict=True))
    exact = [any(normalize(text) == normalize(answer) for text in a) for a, answer in pairs]
    return {
        "f1": float(np.mean([max(f1(text, answer) for text in a) for a, answer in pairs])),
        "exact_match": float(np.mean(exact)),
    }


def is_chinese(answers: Sequence[str]) -> bool:
    """Tell whether most answers hold Chinese characters."""
    return 2 * sum(bool(HAN.search(answer)) for answer in answers) > len(answers)


def squad_text(text: str) -> str:
    """Lower-case a text without punctuation, English articles and repeated blanks (SQuAD 1.1)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_f1(wanted: str, found: str) -> float:
    """Compute the F1 of the bags of words."""
    a, b = squad_text(wanted).split(), squad_text(found).split()
    return f1_of((Counter(a) & Counter(b)).total(), len(a), len(b))


def cmrc_text(text: str) -> str:
    """Lower-case a text without the marks that CMRC 2018 leaves out."""
    return "".join(c for c in text.lower().strip() if c not in CMRC_MARKS)


def cmrc_f1(wanted: str, found: str) -> float:
    """Compute the F1 of the longest common run of Chinese characters, and of words and numbers of
    other scripts."""
    a, b = CMRC_PIECES.findall(cmrc_text(wanted)), CMRC_PIECES.findall(cmrc_text(found))
    longest, before = 0, [0] * (len(b) + 1)
    for x in a:
        row = [0] * (len(b) + 1)  # length of the run that ends at x and at each piece of b
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else 0
        longest, before = max(longest, *row), row
    return f1_of(longest, len(a), len(b))


def f1_of(common: int, wanted: int, found: int) -> float:
    """Compute the F1 of a number of common parts; 0 without any."""
    return 2 * common / (wanted + found) if common else 0.0
