"""Build a batch from pairs: join their tokens and mask words.

A batch holds its sequences end to end, without padding. A sequence is a pure function of its pair
and of its random stream, whatever batch it is in.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

from data_pipeline.common.arrays import ranges
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.masking import SPANS, choose_words, replace_tokens, starts_span
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary


@dataclass
class Batch:
    """B sequences with T tokens in total and M masked positions; all tensors are int64."""

    input_ids: torch.Tensor  # (T,)
    token_type_ids: torch.Tensor  # (T,) 0 in [CLS] A [SEP], 1 in B [SEP]
    position_ids: torch.Tensor  # (T,) position in the sequence
    sequence_ids: torch.Tensor  # (T,) index of the sequence in the batch
    cu_seqlens: torch.Tensor  # (B + 1,) start of each sequence, and T
    masked_positions: torch.Tensor  # (M,) ascending, indices into the T tokens
    masked_labels: torch.Tensor  # (M,) the original tokens at these positions
    next_sentence_label: torch.Tensor  # (B,) 0 IsNext, 1 random, -100 a single segment
    max_length: int  # tokens of the longest sequence
    pairs: int = -1  # sequences of two segments; counted on the host, where the labels begin

    def __post_init__(self) -> None:
        if self.pairs < 0:
            self.pairs = int((self.next_sentence_label.numpy() >= 0).sum())

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        masked_positions: torch.Tensor,
        masked_labels: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
    ) -> "Batch":
        """Build a batch of sequences with the given lengths, laid end to end.

        lengths: int64 (B,). By default the labels are the tokens at the masked positions, and
        sequence labels and token types are 0.
        """
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        return cls(
            input_ids,
            torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids,
            torch.arange(len(input_ids)) - cu_seqlens[sequence],
            sequence,
            cu_seqlens,
            masked_positions,
            input_ids[masked_positions] if masked_labels is None else masked_labels,
            torch.zeros_like(lengths) if next_sentence_label is None else next_sentence_label,
            max_length=int(lengths.numpy().max()),
        )

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to `device`, without waiting for it; a no-op on the CPU."""
        if device.type == "cpu":
            return self
        values = (getattr(self, item.name) for item in fields(self))
        return Batch(*(send(v, device) if torch.is_tensor(v) else v for v in values))

    def slice(self, first: int, last: int) -> "Batch":
        """Return sequences [first, last) as a batch that shares memory with this one where
        possible."""
        cu_seqlens = self.cu_seqlens[first : last + 1]
        start, end = int(cu_seqlens[0]), int(cu_seqlens[-1])
        tokens = slice(start, end)
        masked = slice(*np.searchsorted(self.masked_positions.numpy(), (start, end)))
        return Batch(
            self.input_ids[tokens],
            self.token_type_ids[tokens],
            self.position_ids[tokens],
            self.sequence_ids[tokens] - first,
            cu_seqlens - start,
            self.masked_positions[masked] - start,
            self.masked_labels[masked],
            self.next_sentence_label[first:last],
            max_length=int(np.diff(cu_seqlens.numpy()).max()),
        )

    def padded(self, pad_id: int = 0, length: int | None = None) -> dict[str, torch.Tensor]:
        """Pad the batch to the tensors that transformers expects.

        length: tokens of a row; None: those of the longest sequence.
        Returns input_ids, token_type_ids, attention_mask and labels (B, length), and
        next_sentence_label (B,). Labels are -100 where nothing is predicted.
        """
        shape = (len(self.next_sentence_label), length or self.max_length)
        where = (self.sequence_ids, self.position_ids)
        labels = torch.full_like(self.input_ids, -100)
        labels[self.masked_positions] = self.masked_labels
        out = {"next_sentence_label": self.next_sentence_label}
        for name, values, filler in (
            ("input_ids", self.input_ids, pad_id),
            ("token_type_ids", self.token_type_ids, 0),
            ("attention_mask", torch.ones_like(self.input_ids), 0),
            ("labels", labels, -100),
        ):
            rows = torch.full(shape, filler, dtype=torch.int64)
            rows[where] = values
            out[name] = rows
        return out


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to `device`, without waiting for work queued there; a no-op on the
    CPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # a copy from other memory would block


def fetch(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a tensor to the CPU, without waiting for it.

    Returns a function that waits for the copy and returns it. It does not wait for work queued on
    the GPU later.
    """
    copy = tensor.to("cpu", non_blocking=True)  # pinned, if it comes from a GPU
    if tensor.device.type == "cpu":
        return lambda: copy
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return copy

    return wait


def build_batch(
    store: TokenStore, data: PairsConfig, pairs: np.ndarray, streams: np.ndarray
) -> Batch:
    """Build a batch from pairs: [CLS] A [SEP] B [SEP] of each, end to end, with masks applied.

    pairs: `PAIR` array (B,), positions in `store`.
    streams: uint64 (B,), random stream of each pair, from which its masks are drawn.
    """
    segments = lay_out_segments(pairs)
    input_ids = join_tokens(store, segments)
    words = find_words(store, data.masking, segments, streams, input_ids)
    masked, labels = mask_words(
        store.vocabulary, data, words, streams, segments.cu_seqlens, input_ids
    )
    sizes, lengths = segments.sizes, np.diff(segments.cu_seqlens)
    arrays = (
        input_ids,
        np.repeat(np.arange(len(sizes)) & 1, sizes),
        np.arange(len(input_ids)) - np.repeat(segments.cu_seqlens[:-1], lengths),
        np.repeat(np.arange(len(pairs)), lengths),
        segments.cu_seqlens,
        masked,
        labels,
        pairs["label"].astype(np.int64),
    )
    return Batch(*map(torch.from_numpy, arrays), max_length=int(lengths.max()))


@dataclass
class SegmentLayout:
    """The places of 2 B segments in the T tokens of a batch, A and B of each pair in turn.

    A segment comes with its special tokens: [CLS] A [SEP], then B [SEP], or nothing without a B.
    """

    starts: np.ndarray  # int64 (2 B,), token of the store that each segment starts at
    ends: np.ndarray  # int64 (2 B,)
    edges: np.ndarray  # int64 (2 B + 1,), token of the batch that each starts at, and T

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each segment in the batch: int64 (2 B,)."""
        return np.diff(self.edges)

    @property
    def text_starts(self) -> np.ndarray:
        """Token of the batch at which the text of each segment starts: int64 (2 B,)."""
        places = self.edges[:-1].copy()
        places[::2] += 1  # after [CLS]
        return places

    @property
    def text_ends(self) -> np.ndarray:
        """Token of the batch after the text of each segment: int64 (2 B,)."""
        return self.text_starts + self.ends - self.starts

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        return self.edges[::2].copy()


@dataclass
class MaskingUnits:
    """The W masking units in the T tokens of a batch."""

    start: np.ndarray  # int64 (W,), ascending
    length: np.ndarray  # int64 (W,), in tokens
    sequence: np.ndarray  # int64 (W,), index of the sequence
    first: np.ndarray  # int64 (B + 1,), first word of each sequence, and W


def lay_out_segments(pairs: np.ndarray) -> SegmentLayout:
    """Lay the segments of `pairs` end to end, with their special tokens."""
    starts = np.stack([pairs["a_start"], pairs["b_start"]], 1)
    ends = np.stack([pairs["a_end"], pairs["b_end"]], 1)
    sizes = ends - starts
    sizes += np.stack([np.full(len(pairs), 2), sizes[:, 1] > 0], 1)
    edges = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    return SegmentLayout(starts.ravel(), ends.ravel(), edges)


def join_tokens(store: TokenStore, segments: SegmentLayout) -> np.ndarray:
    """Join slices of the store and special tokens into the tokens of a batch: int64 (T,)."""
    spans = store.spans(segments.starts, segments.ends)
    cls, sep = (store.dtype.type(store.vocabulary[name]).tobytes() for name in ("[CLS]", "[SEP]"))
    n = len(spans) // 2
    runs: list = [sep] * (5 * n)
    runs[0::5], runs[1::5], runs[3::5] = [cls] * n, spans[::2], spans[1::2]
    runs[4::5] = [sep if size else b"" for size in segments.sizes[1::2].tolist()]
    return np.frombuffer(b"".join(runs), store.dtype).astype(np.int64)


def find_words(
    store: TokenStore,
    masking: str,
    segments: SegmentLayout,
    streams: np.ndarray,
    tokens: np.ndarray,
) -> MaskingUnits:
    """Find the masking units: words, spans of words, or single tokens.

    A word runs from one word start to the next; a segment always starts with one.
    streams: uint64 (B,), to draw the lengths of spans. tokens: int64 (T,), before masking.
    """
    edges, cu_seqlens, total = segments.edges, segments.cu_seqlens, len(tokens)
    is_text = np.ones(total, bool)
    is_text[cu_seqlens[:-1]] = is_text[edges[1:] - 1] = False
    is_start = np.ones(total + 1, bool)
    if masking != "token":
        text_starts = segments.text_starts
        # position of each token in the store; special tokens get any valid position
        shift = segments.starts - text_starts
        origins = np.arange(total) + np.repeat(shift, segments.sizes)
        is_start[:-1] = store.starts_word(origins.clip(0, len(store) - 1), tokens) | ~is_text
        is_start[text_starts] = True
    start = np.flatnonzero(is_text & is_start[:-1])
    if masking in SPANS:  # from here on, treat each span as one masking unit
        segment = np.searchsorted(edges, start, side="right") - 1
        is_first = starts_span(segment, streams, SPANS[masking])
        is_start[start[~is_first]] = False
        start = start[is_first]
    length = np.flatnonzero(is_text & is_start[1:]) - start + 1
    first = np.searchsorted(start, cu_seqlens)
    sequence = np.repeat(np.arange(len(streams)), np.diff(first))
    return MaskingUnits(start, length, sequence, first)


def mask_words(
    vocabulary: Vocabulary,
    data: PairsConfig,
    words: MaskingUnits,
    streams: np.ndarray,
    cu_seqlens: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the words to predict, and replace their tokens, in place.

    tokens: int64 (T,). Returns int64 (M,), ascending positions of the masked tokens, and int64
    (M,), their original ids.
    """
    chosen = choose_words(
        words.sequence, words.length, streams, data.masked_lm_prob, data.max_predictions_per_seq
    )
    size, sequence = words.length[chosen], words.sequence[chosen]
    masked = ranges(words.start[chosen], words.start[chosen] + size)
    sequence = np.repeat(sequence, size)
    if data.masking == "span":
        unit = np.repeat(chosen, size) - words.first[sequence]
    else:
        unit = masked - cu_seqlens[sequence]
    labels = tokens[masked]
    tokens[masked] = replace_tokens(
        labels,
        unit,
        streams[sequence],
        vocabulary["[MASK]"],
        vocabulary.ordinary,
        data.mask_replace_prob,
        data.random_replace_prob,
    )
    return masked, labels
