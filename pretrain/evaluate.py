"""Once in a while: what the model has learned, on held-out documents with pairs and masks that
never change."""

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from data_pipeline.batches import Batch, BatchSource
from data_pipeline.config import PairsConfig
from data_pipeline.errors import UserError
from data_pipeline.token_store import TokenStore, Vocabulary
from pretrain.metrics import TALLY, tally, to_metrics

SEED = 20181011  # of held-out pairs and masks, whatever the run's seed: runs can be compared


class HeldOut:
    """The held-out pairs of a data folder, this rank's share of them, and the baselines to beat.

    Raises `UserError` if the held-out documents cannot give pairs.
    """

    def __init__(
        self,
        store_dir: Path,
        vocabulary: Vocabulary,
        data: PairsConfig,
        examples: int,
        micro_batch_size: int,
        accelerator: Accelerator,
    ):
        store = TokenStore(store_dir, "held_out", vocabulary)
        if not len(store):
            raise UserError("no document is held out; raise corpus.held_out")
        source = BatchSource(store, data, SEED)
        self.size = min(examples, source.part_size(0))
        starts = range(0, self.size, micro_batch_size)
        mine = starts[accelerator.process_index :: accelerator.num_processes]
        self.batches: list[Batch] = [
            source.batch(start, min(micro_batch_size, self.size - start)) for start in mine
        ]
        self.objective = data.objective
        labels = source.examples(0, self.size)[0]["label"]
        self.baselines = {"eval/unigram_entropy": unigram_entropy(store.token_counts())}
        if data.objective != "none":
            self.baselines["eval/nsp_majority"] = float(max(labels.mean(), 1 - labels.mean()))


def unigram_entropy(counts: np.ndarray) -> float:
    """Nats a token: the loss of a model that knows how often each token occurs, and no context."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, held_out: HeldOut, accelerator: Accelerator
) -> dict[str, float]:
    """Held-out losses (nats) and accuracies over all ranks, each token and pair counted once."""
    model.eval()
    sums = torch.zeros(TALLY, dtype=torch.float64, device=accelerator.device)
    for batch in held_out.batches:
        batch = batch.to(accelerator.device)
        sums += tally(*model(batch), batch)
    model.train()
    return to_metrics(accelerator.reduce(sums), "eval", held_out.objective) | held_out.baselines
