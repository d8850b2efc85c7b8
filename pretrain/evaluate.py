"""Evaluate the model on held-out documents, always with the same pairs and masks."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from data_pipeline.common.arrays import ranges
from data_pipeline.common.errors import UserError, red
from data_pipeline.config import PairsConfig
from data_pipeline.sampling.batch_source import BatchSource
from data_pipeline.sampling.batches import Batch, lay_out_segments
from data_pipeline.sampling.token_store import TokenStore
from data_pipeline.sampling.vocabulary import Vocabulary
from pretrain.agreement import agree_on_signal, turns
from pretrain.config import Config, Phase
from pretrain.loss import BINS
from pretrain.metrics import area_under_curve, to_metrics
from pretrain.models.bert import PretrainingModel
from pretrain.objectives import ROW, objectives_of

SEED = 20181011  # of held-out pairs and masks, independent of the run's seed, to compare runs
SAMPLE = 1 << 25  # tokens of the training split to count frequencies in, approximately
FREQUENT, MEDIUM = 0.01, 0.11  # bands of the vocabulary by frequency: 1 %, 10 % and the rest
GROUPS = (  # groups of masked tokens, as suffixes of the metrics
    "",  # all
    *("_mask", "_random", "_kept"),  # by the input at the masked position
    *("_1_piece", "_2_pieces", "_3_or_more_pieces"),  # by the length of the token's word
    *("_frequent", "_medium", "_rare"),  # by the bands above
)


class HeldOut:
    """The held-out batches of this rank, with the baselines of models that read no context.

    train: the training split, in which token frequencies are counted.
    examples: evaluate at most this many pairs.
    Raises `UserError` if the held-out documents cannot give pairs.
    """

    def __init__(
        self,
        store_dir: Path,
        train: TokenStore,
        data: PairsConfig,
        examples: int,
        micro_batch_size: int,
        accelerator: Accelerator,
    ):
        store = TokenStore.open(store_dir, "held_out", train.vocabulary)
        if not len(store):
            raise UserError("no document is held out; raise corpus.held_out_fraction")
        source = BatchSource(store, data, SEED)
        self.size = min(examples, source.part_size(0))
        starts = range(0, self.size, micro_batch_size)
        known = sample_counts(train)
        bands = frequency_bands(known)
        self.batches: list[tuple[Batch, torch.Tensor, bool]] = []  # batch, `token_groups`, counted?
        for i, is_counted in turns(len(starts), accelerator):
            start = starts[i]
            count = min(micro_batch_size, self.size - start)
            batch = source.batch(start, count)
            sizes = word_sizes(store, source.examples(start, count)[0], batch)
            groups = token_groups(batch, sizes, bands, train.vocabulary)
            self.batches.append((batch, groups, is_counted))
        pairs, epoch = source.examples(0, self.size)[0], source.epoch_part(0)
        found = store.manifest["held_out"]
        # None for a store of an earlier version, which counted no bytes of its splits
        self.tokens_per_byte = found["tokens"] / found["bytes"] if found.get("bytes") else None
        self.baselines = {
            f"eval/{name}": value
            for one in objectives_of(data.objective)
            for name, value in one.baselines(store, known, pairs, epoch).items()
        }


def sample_counts(store: TokenStore) -> np.ndarray:
    """Count each token in a sample of a split, int64 (V,)."""
    return store.token_counts(every=len(store) // SAMPLE + 1)


def frequency_bands(counts: np.ndarray) -> np.ndarray:
    """Assign each token a band: 0 for the most frequent 1 % of the vocabulary, 1 for the next 10 %,
    2 for the rest.
    """
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return (rank >= FREQUENT * len(counts)).astype(np.int64) + (rank >= MEDIUM * len(counts))


def word_sizes(store: TokenStore, pairs: np.ndarray, batch: Batch) -> np.ndarray:
    """Count the tokens of the word that each masked token belongs to, int64 (M,).

    A word that a segment cuts off counts with the tokens inside the segment.
    """
    segments = lay_out_segments(pairs)
    first, last = segments.text_starts, segments.text_ends
    is_start = np.zeros(len(batch.input_ids) + 1, bool)
    is_start[ranges(first, last)] = store.starts_word(ranges(segments.starts, segments.ends))
    is_start[first] = is_start[last] = True  # a [SEP] ends a word
    word = np.cumsum(is_start)
    return np.bincount(word)[word[batch.masked_positions.numpy()]]


def token_groups(
    batch: Batch, sizes: np.ndarray, bands: np.ndarray, vocabulary: Vocabulary
) -> torch.Tensor:
    """Assign masked tokens to the `GROUPS`, bool (10, M).

    A random token that happens to equal the label counts as kept.
    """
    seen, label = batch.input_ids[batch.masked_positions].numpy(), batch.masked_labels.numpy()
    is_mask, is_label, band = seen == vocabulary["[MASK]"], seen == label, bands[label]
    groups = [np.ones(len(label), bool), is_mask, ~is_mask & ~is_label, ~is_mask & is_label]
    groups += [sizes == 1, sizes == 2, sizes >= 3]
    return torch.from_numpy(np.stack(groups + [band == i for i in range(3)]))


@torch.no_grad()
def evaluate(
    model: PretrainingModel, held_out: HeldOut, accelerator: Accelerator
) -> dict[str, float] | None:
    """Compute the held-out losses (nats) and accuracies (a collective call).

    Includes MLM metrics of each non-empty group of `GROUPS`, and the baselines. Returns None if a
    signal comes before the last batch, so that a run can stop in time.
    """
    model.eval()
    device = accelerator.device
    # columns: count, sum of losses, correct, among the five highest scores
    tokens = torch.zeros(len(GROUPS), 4, dtype=torch.float64, device=device)
    others = torch.zeros(len(model.objectives) - 1, ROW, dtype=torch.float64, device=device)
    curve = torch.zeros(2, BINS, dtype=torch.float64, device=device)
    for batch, groups, is_counted in held_out.batches:
        if agree_on_signal(accelerator):
            model.train()
            return None
        batch = batch.to(device)
        with accelerator.autocast():
            losses, ranks, rows, scored = model.score(batch)
        if not is_counted:
            continue
        scores = torch.stack([torch.ones_like(losses), losses, ranks == 0, ranks < 5], 1)
        tokens += groups.to(device).double() @ scores.double()
        others += rows
        if scored is not None:
            curve += scored
    model.train()
    tokens, others = accelerator.reduce(tokens).tolist(), accelerator.reduce(others)
    metrics = {}
    for name, (count, loss, right, _) in zip(GROUPS, tokens, strict=True):
        if count or not name:
            count = max(count, 1)
            metrics[f"eval/mlm_loss{name}"] = loss / count
            metrics[f"eval/mlm_accuracy{name}"] = right / count
    loss = metrics["eval/mlm_loss"]
    metrics["eval/mlm_perplexity"] = math.exp(min(loss, 700))
    if held_out.tokens_per_byte:
        metrics["eval/mlm_bits_per_byte"] = loss * held_out.tokens_per_byte / math.log(2)
    metrics["eval/mlm_top5"] = tokens[0][3] / max(tokens[0][0], 1)
    mlm, *rest = model.objectives
    found = to_metrics(others, "eval", rest)
    metrics["eval/loss"] = mlm.weight * loss + found.pop("eval/loss")
    metrics |= found
    curve = accelerator.reduce(curve)
    if curve.any(1).all():
        metrics["eval/rtd_auc"] = area_under_curve(curve)
    return metrics | held_out.baselines


def name_length(metrics: dict[str, float], length: int) -> dict[str, float]:
    """Select the losses and accuracies of an evaluation at another length than the run's own, named
    by it: `eval/mlm_loss_at_512`."""
    kept = ("eval/mlm_loss", "eval/mlm_accuracy", "eval/nsp_accuracy", "eval/rtd_auc")
    return {f"{name}_at_{length}": metrics[name] for name in kept if name in metrics}


def build_held_out(
    config: Config, phases: list[Phase], store: TokenStore, accelerator: Accelerator
) -> dict[tuple[int, bool], HeldOut]:
    """Build the held-out batches at `data.max_seq_length` and at the other lengths of the phases.

    Masks follow `data`, with at most as many per sequence as a phase of that length has. A phase
    with single segments only is evaluated on single segments, any other on pairs.

    Returns (length, of single segments?) -> batches, with about as many tokens at each length.
    Lengths for which the held-out split gives no pairs are left out, with a warning.
    """
    if not store.manifest["held_out"]["documents"]:
        return {}  # `open_token_store` has warned
    settings, base, found = config.train, config.data.max_seq_length, {}
    every = [*(phase.data for phase in phases), config.data]  # of equal lengths, the last counts
    most = {data.max_seq_length: data.max_predictions_per_seq for data in every}
    for length, single in sorted({key for phase in phases for key in judged_by(config, phase)}):
        asked = replace(config.data, max_seq_length=length, max_predictions_per_seq=most[length])
        objective = "none" if single else config.data.objective
        try:
            found[length, single] = HeldOut(
                Path(config.data_dir) / "store",
                store,
                replace(asked, objective=objective, single_segment_prob=0.0),
                max(settings.eval_examples * base // length, 1),
                max(settings.micro_batch_size * base // length, 1),
                accelerator,
            )
        except UserError as error:
            by = " on single segments" * single
            accelerator.print(red(f"warning: no evaluation at length {length}{by}: {error}"))
    return found


def judged_by(config: Config, phase: Phase) -> set[tuple[int, bool]]:
    """List the keys of `build_held_out` that an evaluation in a phase uses."""
    single = phase.data.single_segment_prob == 1
    return {(length, single) for length in (config.data.max_seq_length, phase.data.max_seq_length)}
