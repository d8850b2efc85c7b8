"""Probe what a model knows without fine-tuning: score minimal pairs by pseudo-log-likelihood or,
for an ELECTRA, by how likely the discriminator finds each token original.

The pseudo-log-likelihood (PLL) of a sentence is the sum of the log-probabilities of its tokens,
each predicted from all others with that token alone masked (Salazar et al. 2020,
arXiv:1910.14659):

    the cat sleeps      [MASK] cat sleeps      log p(the)
                        the [MASK] sleeps    + log p(cat)
                        the cat [MASK]       + log p(sleeps)
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import softplus

from data_pipeline.common.arrays import ranges
from data_pipeline.common.errors import check
from data_pipeline.common.reading import read_json
from data_pipeline.config import PROBES_FILE
from data_pipeline.sampling.batch_source import largest_pass
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary
from pretrain.agreement import agree_on_signal, turns
from pretrain.config import Config, phases_of
from pretrain.evaluate import sample_counts
from pretrain.models.bert import PretrainingModel

PASS_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 17}  # tokens of a pass; no speed is left in more
SPECIALS = ("[CLS]", "[SEP]")  # not scored
LEVELS = ("field", "linguistics_term", "UID")  # of BLiMP; a UID is a paradigm


def score_sentences(
    model: PretrainingModel,
    sentences: list[list[int]],
    vocabulary: Vocabulary,
    accelerator: Accelerator,
    words: list[list[int | None]] | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
    most_tokens: int = PASS_TOKENS["cuda"],
) -> np.ndarray | None:
    """Compute the pseudo-log-likelihood of each sentence in nats, float64 (N,) (a collective call).

    Returns None if a signal comes before the last pass of a run, as `evaluate` does. An ELECTRA
    reads each sentence once, and its score is the sum of the log-probabilities that a token is
    original.
    Equal sentences have equal scores, since each distinct one is scored once.

    sentences: token ids with [CLS] and [SEP].
    words: the number of each token's word in its sentence; if given, the later pieces of the word
    are masked too, so that they do not give its beginning away (Kauf & Ivanova 2023,
    arXiv:2305.10588).
    advance: called with the number of tokens of each pass, as `count_read_tokens` counts them.
    most_tokens: of a pass, not counting its last sentence.
    """
    distinct = sorted(set(map(tuple, sentences)), key=len)
    device = accelerator.device
    scores = torch.zeros(len(distinct), dtype=torch.float64, device=device)
    if words is not None:
        of_sentence = dict(zip(map(tuple, sentences), words, strict=True))
        words = [of_sentence[sentence] for sentence in distinct]
    copies = MaskedCopies(distinct, vocabulary, words, is_whole=model.rtd is not None)
    fastest = PASS_TOKENS.get(device.type, PASS_TOKENS["cuda"])
    passes = list(copies.passes(min(fastest, most_tokens)))
    was_training = model.training
    model.eval()
    for i, is_counted in turns(len(passes), accelerator):
        if agree_on_signal(accelerator):
            model.train(was_training)
            return None
        batch, sentence = copies.build(*passes[i])
        with accelerator.autocast():
            batch = batch.to(device)
            if model.rtd:
                losses = judge_sentences(model, batch)
            else:
                losses = model.score(batch, mlm_only=True)[0]
        if is_counted:
            scores.index_add_(0, sentence.to(device), -losses.double())
        advance(len(batch.input_ids))
    model.train(was_training)
    found = dict(zip(distinct, accelerator.reduce(scores).tolist(), strict=True))
    return np.array([found[tuple(sentence)] for sentence in sentences])


def count_read_tokens(sentences: list[list[int]], model: PretrainingModel) -> int:
    """Count the tokens that `score_sentences` has to read: each sentence once per scored token, or
    just once for an ELECTRA."""
    distinct = set(map(tuple, sentences))
    return sum(len(s) * (1 if model.rtd else len(s) - len(SPECIALS)) for s in distinct)


class MaskedCopies:
    """All copies of some sentences with one token masked, in the order of the sentences.

    words: the number of each token's word in its sentence, or None; as in `score_sentences`.
    is_whole: each sentence once, with no token masked.
    """

    def __init__(
        self,
        sentences: list[tuple[int, ...]],
        vocabulary: Vocabulary,
        words: list[list[int | None]] | None = None,
        is_whole: bool = False,
    ):
        self.mask_id, self.is_whole = vocabulary["[MASK]"], is_whole
        lengths = np.array([len(sentence) for sentence in sentences])
        self.tokens = np.concatenate([np.array(s, np.int64) for s in sentences])  # end to end
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        if words is not None:
            words = np.concatenate([np.array(word, float) for word in words])  # NaN: in no word
        self.words = words
        specials = [vocabulary[name] for name in SPECIALS]
        self.place = np.flatnonzero(~np.isin(self.tokens, specials))  # masked in copy i
        self.sentence = np.repeat(np.arange(len(sentences)), lengths)[self.place]
        if is_whole:
            self.place, self.sentence = self.starts, np.arange(len(sentences))

    def passes(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Divide the copies into runs [first, last) of about so many tokens."""
        ends = np.cumsum((self.ends - self.starts)[self.sentence])
        edges = np.searchsorted(ends, np.arange(0, ends[-1] + tokens, tokens))
        return pairwise(np.unique(np.append(edges, len(ends))).tolist())

    def build(self, first: int, last: int) -> tuple[Batch, torch.Tensor]:
        """Build the batch of copies [first, last), and the sentence of each, int64 (B,)."""
        sentence, place = self.sentence[first:last], self.place[first:last]
        starts, ends = self.starts[sentence], self.ends[sentence]
        lengths = ends - starts
        source = ranges(starts, ends)  # of each token of the batch, among the sentences' tokens
        target = np.repeat(place, lengths)  # the token to predict in its copy
        is_hidden = source == target
        if self.is_whole:
            is_hidden = np.zeros_like(is_hidden)
        elif self.words is not None:
            is_hidden |= (self.words[source] == self.words[target]) & (source > target)
        ids = np.where(is_hidden, self.mask_id, self.tokens[source])
        masked = np.cumsum(lengths) - ends + place
        arrays = map(torch.from_numpy, (ids, lengths, masked, self.tokens[place]))
        return Batch.of(*arrays), torch.from_numpy(sentence)


@torch.no_grad()
def judge_sentences(model: PretrainingModel, batch: Batch) -> torch.Tensor:
    """Compute each sentence's sum of the losses for all its tokens being original, (B,)."""
    losses = softplus(model.replaced_logits(batch).float())
    losses[batch.cu_seqlens[:-1]] = losses[batch.cu_seqlens[1:] - 1] = 0  # [CLS] and [SEP]
    return losses.new_zeros(len(batch.cu_seqlens) - 1).index_add_(0, batch.sequence_ids, losses)


def score_by_frequency(sentences: list[list[int]], counts: np.ndarray) -> np.ndarray:
    """Compute the log-probability of each sentence under token frequencies alone, (N,).

    counts: int64 (V,); one is added to each, so that no token is impossible.
    """
    log_p = np.log((counts + 1) / (counts.sum() + len(counts)))
    return np.array([log_p[sentence].sum() for sentence in sentences])


def prefers_good(scores: np.ndarray) -> np.ndarray:
    """Return 1 where the good sentence scores higher, 0 where the bad one does, 0.5 for a tie, and
    NaN where a score is NaN.

    scores: (2 x pairs,), of all good sentences and then of all bad ones.
    Returns float64 (pairs,).
    """
    good, bad = np.split(scores, 2)
    return np.where(np.isnan(good + bad), np.nan, (good > bad) + 0.5 * (good == bad))


def by_phenomenon(paradigms: list[tuple[str, str, str]], right: np.ndarray) -> dict:
    """Average over the pairs of each paradigm, and over the paradigms of each phenomenon.

    paradigms: the names of each pair's field, phenomenon and paradigm, as in `LEVELS`.
    right: from `prefers_good`.
    Returns `mean`, over all paradigms, its `standard_error`, by which other pairs of the same
    paradigms would differ, and a dict from name to mean for each of `LEVELS`.
    """
    pairs: dict[tuple[str, str, str], list[float]] = {}
    for names, value in zip(paradigms, right.tolist(), strict=True):
        pairs.setdefault(names, []).append(value)
    means = {names: float(np.mean(values)) for names, values in pairs.items()}
    error = sum(np.var(values) / len(values) for values in pairs.values()) ** 0.5 / len(pairs)
    found = {"mean": float(np.mean(list(means.values()))), "standard_error": float(error)}
    for level, name in enumerate(LEVELS):
        groups: dict[str, list[float]] = {}
        for names, mean in means.items():
            groups.setdefault(names[level], []).append(mean)
        found[name] = {group: float(np.mean(values)) for group, values in groups.items()}
    return found


def check_lengths(sentences: list[list[int]], vocabulary: Vocabulary, longest: int) -> None:
    """Raise `UserError` that shows the first sentence with more tokens than the model takes."""
    for ids in sentences:
        check(
            len(ids) <= longest,
            f"{len(ids):,} tokens, but the model takes {longest:,}; shorten the sentence "
            f"{' '.join(vocabulary.pieces[i] for i in ids[:8])} ...",
        )


# ------------------------------------------------------------------------------------ [MASK]


@torch.no_grad()
def fill_masks(
    model: PretrainingModel,
    sentences: list[list[int]],
    vocabulary: Vocabulary,
    accelerator: Accelerator,
    k: int = 5,
) -> list[list[list[tuple[str, float]]]]:
    """Predict the `k` likeliest tokens for each [MASK] of each sentence, with probabilities.

    Under FSDP2 a collective call, to which all ranks pass the same sentences.

    sentences: token ids with [CLS] and [SEP].
    Returns a list of (piece, probability) for each [MASK], in a list for each sentence.
    """
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    ids = torch.tensor([token for sentence in sentences for token in sentence])
    masked = torch.nonzero(ids == vocabulary["[MASK]"])[:, 0]
    batch = Batch.of(ids, lengths, masked)
    check(model.mlm is not None, "the model has no head for masked tokens; give its generator")
    was_training = model.training
    model.eval()
    with accelerator.autocast():
        logits = model.logits(batch.to(accelerator.device))[0]
    model.train(was_training)
    best = logits.float().softmax(-1).topk(k)
    found: list[list] = [[] for _ in sentences]
    for i, tokens, p in zip(
        batch.sequence_ids[masked].tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    ):
        found[i].append([(vocabulary.show(t), value) for t, value in zip(tokens, p, strict=True)])
    return found


# ---------------------------------------------------------------------------------- training


class Probes:
    """The probes of a run, which each evaluation runs on its model.

    found: what `data_pipeline.build.probes.write_probes` wrote.
    counts: int64 (V,), tokens of the training split, for the baseline.
    longest: tokens that the model takes. Raises `UserError` if a sentence has more.
    most_tokens: of a pass; at most that of training, so that an evaluation fits in memory too.
    """

    def __init__(
        self,
        found: dict,
        vocabulary: Vocabulary,
        counts: np.ndarray,
        longest: int,
        most_tokens: int,
    ):
        self.vocabulary, self.texts = vocabulary, found["settings"]["sentences"]
        self.most_tokens = most_tokens
        self.pairs, self.sentences = found["good"] + found["bad"], found["sentences"]
        self.paradigms = [tuple(names) for names in found["paradigms"]]
        check_lengths(self.pairs + self.sentences, vocabulary, longest)
        self.baseline = {}
        if self.pairs:
            right = prefers_good(score_by_frequency(self.pairs, counts))
            mean = by_phenomenon(self.paradigms, right)["mean"]
            self.baseline = {"eval/minimal_pairs_unigram": mean}

    def measure(self, model: PretrainingModel, accelerator: Accelerator) -> dict[str, float] | None:
        """Score the minimal pairs, if there are any: means over paradigms, and the baseline (a
        collective call). Returns None if a signal comes before the last of them is scored."""
        if not self.pairs:
            return {}
        most = self.most_tokens
        scores = score_sentences(model, self.pairs, self.vocabulary, accelerator, most_tokens=most)
        if scores is None:
            return None
        found = by_phenomenon(self.paradigms, prefers_good(scores))
        fields = {f"eval/minimal_pairs/{name}": mean for name, mean in found["field"].items()}
        return {"eval/minimal_pairs": found["mean"]} | fields | self.baseline

    def fill(self, model: PretrainingModel, accelerator: Accelerator) -> dict[str, list]:
        """Fill in the sentences, if there are any (a collective call).

        Returns `fillings`: for each sentence its text and, for each [MASK], (piece, probability) of
        the five likeliest tokens.
        """
        if not self.sentences:
            return {}
        found = fill_masks(model, self.sentences, self.vocabulary, accelerator)
        both = zip(self.texts, found, strict=True)
        return {"fillings": [{"sentence": text, "masks": masks} for text, masks in both]}


def build_probes(config: Config, store: TokenStore, longest: int, world_size: int) -> Probes | None:
    """Read the probes that preparation has encoded; None if `eval.probes` is empty.

    longest: tokens of a sequence for which the model will have trained positions.
    Raises `UserError` if they are missing, encode another config or vocabulary, or are too long.
    """
    settings = config.eval.probes
    if not (settings.minimal_pairs or settings.sentences):
        return None
    path = Path(config.data_dir) / PROBES_FILE
    ids = [[range(len(store.vocabulary))]]
    shape = {"settings": dict, "vocab_sha256": str, "paradigms": [[str]]}
    shape |= {"good": ids, "bad": ids, "sentences": ids}
    advice = "encode eval.probes with python -m data_pipeline CONFIG"
    found = read_json(path, shape, advice) if path.exists() else {}
    expected = {"settings": asdict(settings), "vocab_sha256": store.vocabulary.sha256}
    check(
        found
        and expected.items() <= found.items()
        and len(found["good"]) == len(found["bad"]) == len(found["paradigms"])
        and all(len(names) == 3 for names in found["paradigms"]),
        f"{path} {'was made from other probes or another vocabulary' if found else 'is missing'}; "
        + advice,
    )
    most_tokens = max(
        largest_pass(p.train.global_batch_size, p.train.micro_batch_size, world_size)
        * p.data.max_seq_length
        for p in phases_of(config)
    )
    return Probes(found, store.vocabulary, sample_counts(store), longest, most_tokens)
