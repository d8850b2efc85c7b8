"""Write made-up English prose: the corpus of the tests, the same on every machine.

Documents of all lengths, each about a topic: its words come again, so that the sentences of a
document can be told from those of others. Words are frequent, rare and of several parts; there
are commas, quotations, numbers, names of code and abbreviations.
"""

from random import Random

DOCUMENTS = 76
SHORTEST, LONGEST = 220, 36_000  # characters
WORDS, TOPIC_WORDS = 1500, 40
SHARE_OF_TOPIC = 0.4  # of the content words of a document
SHARE_LONGER = 0.25  # of the sentences, and again of those

FUNCTION = (
    "the of and to a in is that it for as with be by on are this an or which from not at if its"
    " when all can no one other has only may but will each after then there any such than must"
    " because however does while until where so their these both"
).split()
STARTS = "b br c ch d f fl g gr h j k l m n p pl qu r s st str t tr v w".split()
VOWELS = "a e i o u ai ea ee ou".split()
ENDS = ["", "", "", "l", "m", "n", "nd", "r", "rt", "s", "st", "t", "x"]
SUFFIXES = [""] * 20 + "s s ed ing er ly able ation ness".split()
# N a content word, F a function word, C a name of code, D a number
SENTENCES = [
    "the N N the N F the N.",
    "F N F the N F N, F the N N F N.",
    "the N, the N and the N are F N F N.",
    "if the N is N, the N of the N is N; F it is N F the N.",
    'the N is "N", e.g. the N of D N.',
    "F the N N F N (F D N or D N) F the N F N F a N N F the N of N N.",
    "when a N N the N, C is N F C, which is N F the N.",
    "is the N N F the N?",
    "N N are N.",
    "a N-N N of the N is N by C, but F the N of N F the N F N N F no N.",
    "see also the N of Mr. N for the N N!",
]


def write_prose() -> list[str]:
    """Returns the documents, of which each line is a paragraph."""
    rng = Random(4)
    words = list(dict.fromkeys(write_word(rng) for _ in range(WORDS)))
    return [write_document(rng, words, i) for i in range(DOCUMENTS)]


def write_document(rng: Random, words: list[str], number: int) -> str:
    rank = (number * 29 % DOCUMENTS + 0.5) / DOCUMENTS  # lengths in no order
    length = SHORTEST * (LONGEST / SHORTEST) ** (rank**1.8)
    topic = [pick(rng, words) for _ in range(TOPIC_WORDS)]
    paragraphs: list[str] = []
    while not paragraphs or sum(map(len, paragraphs)) < length:
        n_sentences = 1 + int(rng.random() * 5)
        paragraphs.append(" ".join(write_sentence(rng, words, topic) for _ in range(n_sentences)))
    return "\n".join(paragraphs)


def write_sentence(rng: Random, words: list[str], topic: list[str]) -> str:
    def fill(kind: str) -> str:
        if kind == "N":
            own = rng.random() < SHARE_OF_TOPIC
            return pick_often(rng, topic if own else words) + pick(rng, SUFFIXES)
        if kind == "F":
            return pick_often(rng, FUNCTION)
        if kind == "C":
            return f"{pick(rng, topic)}.__{pick(rng, words)}__()"
        return str(int(10 ** (4 * rng.random())))

    template = pick(rng, SENTENCES)
    while rng.random() < SHARE_LONGER:
        template = template[:-1] + "; " + pick(rng, SENTENCES)
    text = "".join(fill(c) if c in "NFCD" else c for c in template)
    return text[0].upper() + text[1:]


def write_word(rng: Random) -> str:
    syllables = 1 + int(3 * rng.random())
    return "".join(
        pick(rng, STARTS) + pick(rng, VOWELS) + pick(rng, ENDS) for _ in range(syllables)
    )


def pick(rng: Random, things: list[str]) -> str:
    """One of `things`. `Random.random` gives the same in every Python, `choice` need not."""
    return things[int(rng.random() * len(things))]


def pick_often(rng: Random, things: list[str]) -> str:
    """One of `things`, the first ones most often, as Zipf's law has it."""
    return things[int(len(things) ** rng.random()) - 1]
