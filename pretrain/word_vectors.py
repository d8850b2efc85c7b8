"""Initial word vectors of a new run, from the co-occurrence of tokens in its corpus.

Training from random embeddings spends its first million tokens to learn what a co-occurrence table
shows in seconds: which pieces are used alike. The vectors factorise that table's positive pointwise
mutual information (PPMI), which is what word2vec does step by step (Levy and Goldberg 2014), with
the weighting of Levy, Goldberg and Dagan 2015 (TACL, sections 3.1 and 3.3).

Shapes: V vocabulary, C contexts (the most frequent tokens), D vector size.
"""

import numpy as np
import torch
from torch import Tensor

from data_pipeline.sampling.token_store import TokenStore

WINDOW = 5  # tokens on either side; a neighbour at distance d counts 1 - (d - 1) / WINDOW
CONTEXTS = 4096
MOST_CELLS = 1 << 27  # of the table: 0.5 GB
SAMPLE_BLOCKS, BLOCK = 64, 1 << 20  # at most this many blocks of tokens are read
SMOOTHING = 0.75  # exponent of the contexts' frequencies, against the pull of rare contexts
OVERSAMPLING, ITERATIONS = 16, 2  # of the randomised factorisation


def word_vectors(store: TokenStore, size: int, device: torch.device) -> Tensor:
    """Compute a vector of length 1 for each token of the vocabulary, float32 (V, size).

    Vectors of tokens without neighbours are 0; so are the last columns if V < `size`. Uses torch's
    generator.
    """
    table = torch.from_numpy(count_neighbours(store)).to(device)
    to_information(table)
    rank = min(size + OVERSAMPLING, *table.shape)
    left, strength, _ = torch.svd_lowrank(table, q=rank, niter=ITERATIONS)
    vectors = (left * strength.sqrt())[:, :size]
    vectors = torch.where(table.any(1, keepdim=True), vectors, 0)
    vectors = torch.nn.functional.normalize(vectors)
    return torch.nn.functional.pad(vectors, (0, size - vectors.shape[1]))


def count_neighbours(store: TokenStore) -> np.ndarray:
    """Count how often each context occurs within `WINDOW` tokens of each token in its document,
    weighted by distance: float32 (V, C).

    Reads all tokens of a small store, and evenly spaced blocks of a large one.
    """
    vocab_size = len(store.vocabulary)
    n_blocks = -(-len(store) // BLOCK)
    chosen = np.unique(np.linspace(0, n_blocks - 1, min(n_blocks, SAMPLE_BLOCKS)).astype(int))
    blocks = [slice(i * BLOCK, min((i + 1) * BLOCK, len(store))) for i in chosen.tolist()]
    counts = sum(np.bincount(store.tokens[block], minlength=vocab_size) for block in blocks)
    n_contexts = min(CONTEXTS, vocab_size, max(MOST_CELLS // vocab_size, 1))
    column = np.full(vocab_size, -1)
    column[np.argsort(-counts, kind="stable")[:n_contexts]] = np.arange(n_contexts)
    table = np.zeros(vocab_size * n_contexts, np.float32)
    for block in blocks:
        tokens = store.tokens[block].astype(np.int64)
        sentence = np.searchsorted(
            store.sentence_offsets, np.arange(block.start, block.stop), side="right"
        )
        document = np.searchsorted(store.document_offsets, sentence)
        row, context = tokens * n_contexts, column[tokens]
        for distance in range(1, WINDOW + 1):
            is_pair = document[distance:] == document[:-distance]
            weight = np.float32(1 - (distance - 1) / WINDOW)
            for a, b in (
                (row[:-distance], context[distance:]),
                (row[distance:], context[:-distance]),
            ):
                known = is_pair & (b >= 0)
                np.add.at(table, (a + b)[known], weight)
    return table.reshape(vocab_size, n_contexts)


def to_information(table: Tensor) -> None:
    """Turn counts (V, C) into positive pointwise mutual information in nats, in place:
    max(0, log(P(context | token) / P(context))), and 0 where nothing was counted.
    """
    context = table.sum(0).double().pow(SMOOTHING)
    token = table.sum(1, keepdim=True)
    table.div_(token.clamp(min=1e-12)).div_((context / context.sum()).float().clamp(min=1e-12))
    table.log_().clamp_(min=0)  # the logarithm of 0 is -inf
