"""What each task asks of a model: encoding, loss, predictions and scores.

An example becomes units: one sequence, or one for each choice of multiple choice, or one for each
window of a long passage. A model gives each sequence (or each of its tokens) some scores, and a
task turns them into a loss or into predictions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from finetune_data import Example
from finetune_metrics import (
    answer_scores,
    is_chinese,
    label_scores,
    label_set_scores,
    number_scores,
    span_scores,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from data_pipeline.common.errors import UserError

WINDOW_OVERLAP = 128  # tokens that neighbouring windows of a passage share, as in SQuAD's baseline
MAX_QUESTION_TOKENS = 64  # likewise; longer questions are cut


@dataclass
class Unit:
    """What is scored at once, and what is wanted of it."""

    example: int
    sequences: list[tuple[list[int], list[int]]]
    """Token ids and token types."""
    target: Any
    """What `loss` compares the scores with; None where a unit is of no use for training."""
    window: Any = None
    """Position of the first passage token, and the character offsets of the passage tokens."""

    @property
    def length(self) -> int:
        return max(len(ids) for ids, _ in self.sequences)


class Task:
    """A task as its training examples show it; knows nothing of how a model is trained."""

    metrics: tuple[str, ...]
    """The first is what settings are chosen by, unless told otherwise."""
    per_token = False
    """Whether a score belongs to a token, or to a sequence."""
    criterion: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of scores, from the targets of a batch as a tensor."""
    compare: Callable[[list, list], dict[str, float]]
    """Each of `metrics`, from labels and predictions."""

    def __init__(self, examples: list[Example]):
        """Learn from the training examples what can be answered."""
        self.training = examples

    @property
    def outputs(self) -> int:
        """The number of scores for a sequence or token: of labels, or a number of its own."""
        return len(self.labels)

    def target(self, example: Example) -> Any:
        """Return what `loss` compares the scores of an example with."""
        raise NotImplementedError

    def encode(
        self, examples: list[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> list[Unit]:
        """Encode one or two texts as one sequence; the longer text is cut first."""
        texts = [example.texts for example in examples]
        sequences = encode_texts(texts, tokenizer, max_length)
        return [
            Unit(i, [sequence], self.target(example))
            for i, (sequence, example) in enumerate(zip(sequences, examples, strict=True))
        ]

    def loss(self, scores: Tensor, units: list[Unit]) -> Tensor:
        """Return the mean loss of a batch.

        scores: float32 (R, outputs), or (R, S, outputs) per token; R sequences.
        """
        targets = torch.tensor([unit.target for unit in units], device=scores.device)
        return self.criterion(scores, targets)

    def count(self, units: list[Unit]) -> int:
        """Count what `loss` is the mean of."""
        return len(units)

    def predict(
        self, scores: list[Tensor], units: list[Unit], examples: list[Example]
    ) -> list[Any]:
        """Return what is predicted for each example, in the form of its label.

        scores: those of each unit, (its sequences, outputs) or (its tokens, outputs).
        """
        raise NotImplementedError

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        """Compare predictions with labels by each of `metrics`."""
        return self.compare([example.label for example in examples], predictions)

    def baseline(self) -> tuple[str, Any] | None:
        """Return the name and value of the best prediction that sees no text, if there is one."""
        return None


def encode_texts(
    texts: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[tuple[list[int], list[int]]]:
    """Encode sequences of one text each, or of two each."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    found = tokenizer(*columns, truncation=True, max_length=max_length, return_token_type_ids=True)
    return list(zip(found["input_ids"], found["token_type_ids"], strict=True))


def index_of(label: str, labels: list[str], place: str) -> int:
    """Return the index of a label. Raises `UserError` if the training file lacks it."""
    if label not in labels:
        known = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
        raise UserError(f"{place}: label {label!r} is not among those to train on: {known}")
    return labels.index(label)


# --- sentences ------------------------------------------------------------------------------------


class Classification(Task):
    """One label for one or two sentences."""

    metrics = ("accuracy", "macro_f1", "matthews")
    criterion = staticmethod(F.cross_entropy)
    compare = staticmethod(label_scores)

    @cached_property
    def labels(self) -> list[str]:
        return sorted({example.label for example in self.training})

    def target(self, example: Example) -> int:
        return index_of(example.label, self.labels, example.place)

    def predict(self, scores, units, examples):
        return [self.labels[row[0].argmax()] for row in scores]

    def baseline(self):
        label = Counter(example.label for example in self.training).most_common(1)[0][0]
        return f"always {label!r}", label


class MultiLabel(Classification):
    """Any number of labels for one or two sentences."""

    metrics = ("micro_f1", "macro_f1", "exact_match")
    criterion = staticmethod(F.binary_cross_entropy_with_logits)
    compare = staticmethod(label_set_scores)

    @cached_property
    def labels(self) -> list[str]:
        return sorted({label for example in self.training for label in example.label})

    def target(self, example: Example) -> list[float]:
        chosen = {index_of(label, self.labels, example.place) for label in example.label}
        return [float(i in chosen) for i in range(len(self.labels))]

    def predict(self, scores, units, examples):
        return [
            [label for label, score in zip(self.labels, row[0], strict=True) if score > 0]
            for row in scores
        ]

    def baseline(self):
        return None


class Regression(Task):
    """A number for one or two sentences; the model learns it in standard deviations."""

    metrics = ("pearson", "spearman", "r2")
    outputs = 1
    compare = staticmethod(number_scores)

    def __init__(self, examples: list[Example]):
        super().__init__(examples)
        labels = [example.label for example in examples]
        self.mean, self.scale = float(np.mean(labels)), float(np.std(labels)) or 1.0

    def target(self, example: Example) -> float:
        return (example.label - self.mean) / self.scale

    def criterion(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(scores[:, 0], targets)

    def predict(self, scores, units, examples):
        return [self.mean + self.scale * float(row[0, 0]) for row in scores]


class Choice(Task):
    """Which of several texts goes with a context; the number may differ between examples."""

    metrics = ("accuracy",)
    outputs = 1

    def encode(self, examples, tokenizer, max_length):
        """Encode context and choice as one sequence, for each choice."""
        pairs = [[e.texts[0], choice] for e in examples for choice in e.texts[1:]]
        sequences = iter(encode_texts(pairs, tokenizer, max_length))
        return [
            Unit(i, [next(sequences) for _ in example.texts[1:]], example.label)
            for i, example in enumerate(examples)
        ]

    def loss(self, scores: Tensor, units: list[Unit]) -> Tensor:
        each = scores[:, 0].split([len(unit.sequences) for unit in units])
        targets = torch.tensor([unit.target for unit in units], device=scores.device)
        return F.cross_entropy(pad_sequence(each, True, -1e9), targets)

    def predict(self, scores, units, examples):
        return [int(rows[:, 0].argmax()) for rows in scores]

    def score(self, examples, predictions):
        right = [e.label == found for e, found in zip(examples, predictions, strict=True)]
        return {"accuracy": float(np.mean(right))}

    def baseline(self):
        label = Counter(example.label for example in self.training).most_common(1)[0][0]
        return f"always choice {label}", label


# --- words ----------------------------------------------------------------------------------------


class Tagging(Task):
    """A tag for each word of a sentence, predicted at its first piece.

    Words past `max_length`, or without a piece, are predicted to be O, so that they count.
    """

    metrics = ("f1", "precision", "recall", "accuracy")
    per_token = True
    compare = staticmethod(span_scores)

    @cached_property
    def labels(self) -> list[str]:
        return sorted({tag for example in self.training for tag in example.label})

    def encode(self, examples, tokenizer, max_length):
        """A unit's target: positions of first pieces, their words, their tags (-100: unknown)."""
        ids = {label: i for i, label in enumerate(self.labels)}
        texts = [example.texts for example in examples]
        # byte-level BPE has the space before a word in its first piece; to others it is nothing
        spaced = [[*words[:1], *(f" {word}" for word in words[1:])] for words in texts]
        found = tokenizer(spaced, is_split_into_words=True, truncation=True, max_length=max_length)
        units = []
        for i, example in enumerate(examples):
            first = {}  # word -> position
            for position, word in enumerate(found.word_ids(i)):
                if word is not None:
                    first.setdefault(word, position)
            tags = [ids.get(example.label[word], -100) for word in first]
            sequence = found["input_ids"][i], [0] * len(found["input_ids"][i])
            units.append(Unit(i, [sequence], (list(first.values()), list(first), tags)))
        return units

    def loss(self, scores: Tensor, units: list[Unit]) -> Tensor:
        rows = [row for row, unit in enumerate(units) for _ in unit.target[0]]
        positions = [position for unit in units for position in unit.target[0]]
        # a batch may have no word that has a piece: the tags of none are no floats, and the mean is
        # a sum over a count that cannot be 0
        tags = [tag for unit in units for tag in unit.target[2]]
        tags = torch.tensor(tags, dtype=torch.int64, device=scores.device)
        total = F.cross_entropy(scores[rows, positions], tags, reduction="sum")
        return total / max(len(tags), 1)

    def count(self, units):
        return sum(len(unit.target[2]) for unit in units)

    def predict(self, scores, units, examples):
        predictions = []
        for rows, unit, example in zip(scores, units, examples, strict=True):
            tags = ["O"] * len(example.texts)
            positions, words, _ = unit.target
            for word, best in zip(words, rows[positions].argmax(-1).tolist(), strict=True):
                tags[word] = self.labels[best]
            predictions.append(tags)
        return predictions


# --- answers --------------------------------------------------------------------------------------


class QuestionAnswering(Task):
    """The answer to a question as a span of a passage, which is read in overlapping windows.

    An answer that is not at its offset is looked for elsewhere in the passage. A question that has
    none of its answers in the passage is not trained on, but it is scored.
    """

    metrics = ("f1", "exact_match")
    per_token = True
    outputs = 2  # for the first and for the last token of the answer
    criterion = staticmethod(F.cross_entropy)  # (B, S, 2) and (B, 2): over the positions

    def __init__(self, examples: list[Example]):
        super().__init__(examples)
        self.longest = 1  # tokens of an answer in training; no longer one is predicted

    def encode(self, examples, tokenizer, max_length):
        passages = {example.texts[1] for example in examples}
        passages = {passage: encode_with_offsets(passage, tokenizer) for passage in passages}
        first, between, last = special_tokens(tokenizer)
        is_training, units = examples is self.training, []
        for i, example in enumerate(examples):
            question = encode_with_offsets(example.texts[0], tokenizer)[0]
            question = question[: min(MAX_QUESTION_TOKENS, max_length // 3)]
            ids, offsets = passages[example.texts[1]]
            answer = find_answer(example, offsets)
            if answer and is_training:
                self.longest = max(self.longest, answer[1] - answer[0] + 1)
            head = [*first, *question, *between]
            room = max_length - len(head) - len(last)
            step = room - min(WINDOW_OVERLAP, room // 2)
            for start in range(0, max(len(ids) - room + step, 1), step):
                part = ids[start : start + room]
                sequence = [*head, *part, *last]
                types = [0] * len(head) + [1] * (len(part) + len(last))
                target = None
                if answer:  # at [CLS] where the window does not hold all of it
                    inside = start <= answer[0] and answer[1] < start + len(part)
                    shift = len(head) - start
                    target = (answer[0] + shift, answer[1] + shift) if inside else (0, 0)
                window = len(head), offsets[start : start + room]
                units.append(Unit(i, [(sequence, types)], target, window))
        return units

    def loss(self, scores: Tensor, units: list[Unit]) -> Tensor:
        lengths = torch.tensor([[unit.length] for unit in units], device=scores.device)
        padding = torch.arange(scores.shape[1], device=scores.device) >= lengths
        return super().loss(scores.masked_fill(padding[..., None], -1e9), units)

    def predict(self, scores, units, examples):
        best = [(-float("inf"), "")] * len(examples)
        for rows, unit in zip(scores, units, strict=True):
            first, offsets = unit.window
            if offsets:
                rows = rows[first : first + len(offsets)]
                pairs = rows[:, :1] + rows[:, 1]  # (first token, last token)
                pairs = pairs.masked_fill(~allowed_spans(len(rows), self.longest), -torch.inf)
                start, end = divmod(int(pairs.argmax()), len(rows))
                text = examples[unit.example].texts[1][offsets[start][0] : offsets[end][1]]
                best[unit.example] = max(best[unit.example], (float(pairs.max()), text))
        return [text for _, text in best]

    def score(self, examples, predictions):
        wanted = [[text for text, _ in example.label] for example in examples]
        # of the questions that are judged: those to train on may be of another language
        is_cmrc = is_chinese([text for texts in wanted for text in texts])
        return answer_scores(wanted, predictions, is_cmrc)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Return the ids before, between and after two texts: RoBERTa has two separators between."""
    found = tokenizer("a", "a")
    ids, sides = found["input_ids"], found.sequence_ids()
    first, second = sides.index(0), sides.index(1)
    pieces = sides.count(0)
    return ids[:first], ids[first + pieces : second], ids[second + pieces :]


def allowed_spans(tokens: int, longest: int) -> Tensor:
    """Mark the spans that an answer may have, of at most `longest` tokens: bool (first, last)."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    return ones.triu().tril(longest - 1)


def encode_with_offsets(
    text: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text without special tokens; returns the ids, and the characters of each."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], found["offset_mapping"]


def find_answer(example: Example, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Find the first and last token of the first answer that the passage holds.

    Takes the occurrence that is nearest to the stated offset.
    """
    passage = example.texts[1]
    for text, stated in example.label:
        found = [i for i in range(len(passage)) if text and passage.startswith(text, i)]
        if found:
            stated = stated if isinstance(stated, int) else 0
            start = min(found, key=lambda i: abs(i - stated))
            inside = [
                token for token, (a, b) in enumerate(offsets) if a < start + len(text) and b > start
            ]
            if inside:
                return inside[0], inside[-1]
    return None


TASKS = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "tagging": Tagging,
    "qa": QuestionAnswering,
    "choice": Choice,
}
