"""vocabulary: merges against a slow rendering, counts in bounded memory, existing vocabularies,
extension, and the report."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.vocab import SPECIAL_TOKENS, merge_pairs

FEW = settings(max_examples=100, deadline=None)


# ---------------------------------------------------------------------------------- merges


def merge_slowly(
    words: list[list[str]], counts: list[int], pieces: list[str], size: int, min_frequency: int
) -> list[str]:
    """The rule alone: count all pairs, merge the best everywhere, begin again."""
    pieces = list(pieces)
    while len(pieces) < size:
        totals: Counter[tuple[int, int]] = Counter()
        for word, count in zip(words, counts, strict=True):
            for pair in zip(word, word[1:], strict=False):
                totals[pieces.index(pair[0]), pieces.index(pair[1])] += count
        if not totals or max(totals.values()) < min_frequency:
            break
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        left, right = pieces[best[0]], pieces[best[1]]
        new = left + right.removeprefix("##")
        if new not in pieces:
            pieces.append(new)
        for i, word in enumerate(words):
            out: list[str] = []
            for piece in word:  # from the left, each piece merged once
                if out and out[-1] is not None and (out[-1], piece) == (left, right):
                    out[-1:] = [new, None]  # None: what is before it may not merge again
                else:
                    out.append(piece)
            words[i] = [piece for piece in out if piece]
    return pieces


@FEW
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 9), max_size=10),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_merges_are_those_of_counting_all_pairs_anew_each_time(words, min_frequency, more):
    first = [*SPECIAL_TOKENS, "##a", "##b", "##c", "a", "b", "c"]
    spelled = [[word[0], *(f"##{c}" for c in word[1:])] for word in words]
    as_text = ["".join(chr(first.index(piece)) for piece in word) for word in spelled]
    size, counts, fast = len(first) + more, list(words.values()), list(first)
    merge_pairs(as_text, counts, fast, size, min_frequency)
    assert fast == merge_slowly(spelled, counts, first, size, min_frequency)
