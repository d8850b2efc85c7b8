"""Plan a run: `python -m pretrain.plan CONFIG [key=value ...]` prints its parameters, FLOPs,
memory, epochs and time, and warns about unusual settings.

Measures the real model on the prepared data or, before there is any, estimates from the size of
the corpus. `--check` overfits one batch instead, to show that the model can learn.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

import numpy as np
import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef

from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import UserError, check, run_command
from data_pipeline.config_file import load_config
from data_pipeline.sampling.batch_source import BatchSource, count_passes
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.token_store import TokenStore
from pretrain.assumed import Assumed, Preparation, assume_data, has_store, round_off
from pretrain.config import Config, Phase, count_kept, phases_of
from pretrain.describe import say_duration, show_sequence
from pretrain.evaluate import sample_counts
from pretrain.init_from import start_from
from pretrain.loss import CHUNK
from pretrain.metrics import PEAK_FLOPS
from pretrain.models.bert import PretrainingModel
from pretrain.models.build import count_weights
from pretrain.models.cpu import TOKEN_MULTIPLE, fill_rows
from pretrain.optim import build_optimizers, update, zero_gradients
from pretrain.processes import build_accelerator, is_compiled, matrix_dtype
from pretrain.run_setup import build_model, build_sources, fingerprint_run, open_token_store

SECONDS, SAMPLE = 10, 256  # length of the trial; sequences to count FLOPs in
GROWTH = 4  # of the number of sequences from one step of the trial to the next
OVERFIT_LOSS, STEPS, SEQUENCES = 1.0, 300, 4  # MLM loss to reach, steps, sequences
USUAL_RATES = {"adamw": (1e-5, 2e-3), "muon": (2e-4, 2e-2), "lamb": (2e-4, 2e-2)}
CARD, CARDS = "H100", (1, 8)  # GPU, and numbers of them, to estimate time for
MFU = 0.4  # assumed of a GPU
LAUNCH = 8e-4  # seconds that a host takes to launch a layer of a pass; the GPU may wait for it


def plan(config: Config, given: float | None = None, cards: Sequence[int] = CARDS) -> None:
    """Print the plan and its warnings.

    given: tokens of a corpus that is not prepared yet; None: estimate them from its files.
    cards: numbers of GPUs to estimate time for.
    Raises `UserError` for what `train` would refuse.
    """
    phases = phases_of(config)
    accelerator = build_accelerator(config.train, phases)
    store, sources, assumed = find_data(config, phases, given)
    fingerprint_run(config, store, accelerator)
    counts = np.ones(len(store.vocabulary)) if assumed else sample_counts(store)
    model = build_model(config, torch.from_numpy(counts))
    if config.init_from:  # before a long preparation, too
        start_from(config.init_from, model, store.vocabulary.pieces)
    model.to(accelerator.device)
    rows, total, unusual = {"parameters": describe_parameters(model)}, 0.0, []
    inside = 0.0 if assumed else share_inside(store)
    is_given = assumed or config.init_from or config.vocab.path
    of_words = None if is_given else counts[store.vocabulary.ordinary]
    for i, (phase, source) in enumerate(zip(phases, sources, strict=True)):
        sample = source.batch(0, min(SAMPLE, source.part_size(0)))
        steps, size = phase.end - phase.start, phase.train.global_batch_size
        tokens = len(sample.input_ids) / len(sample.next_sentence_label)  # per sequence
        operations = model.count_flops(sample)
        epochs, of_what = describe_epochs(source, steps * size, tokens, assumed)
        total += operations / len(sample.next_sentence_label) * steps * size
        rows[f"phase {i}" if len(phases) > 1 else "the run"] = (
            f"{steps:,} steps of {size:,} sequences, {of_what}; "
            f"{operations / len(sample.input_ids):.3g} FLOPs per token"
        )
        unusual += list_unusual(phase, epochs, tokens, of_words, inside)
    if assumed and assumed.preparation:
        rows["preparation"] = describe_preparation(assumed.preparation)
    rows["operations"] = f"{total:.3g} FLOPs"
    rows |= measure_here(config, phases, sources, model, total, accelerator)
    for n in cards:
        rows[f"time on {n} {CARD}"] = estimate_time(
            total, phases, n, config.model.num_hidden_layers
        )
    for name, value in rows.items():
        print(f"{name:20}{value}")
    for line in dict.fromkeys(unusual):
        print(f"warning: {line}")


def find_data(
    config: Config, phases: list[Phase], given: float | None
) -> tuple[TokenStore, list[BatchSource], Assumed | None]:
    """Open the prepared store, or assume one; returns it, the source of each phase, and what was
    assumed."""
    if has_store(config):
        store, sources = open_token_store(config, phases)
        if given:
            found = f"{config.data_dir} holds {len(store):,} tokens to train on"
            print(f"--tokens ignored: the store at {found}")
        return store, sources, None
    assumed = assume_data(config, given)
    print(*assumed.lines, sep="\n")
    return assumed.store, build_sources(phases, assumed.store), assumed


def describe_parameters(model: PretrainingModel) -> str:
    """Describe how many parameters a model has, and where."""
    weights, embeddings, encoder = map(count_weights, (model, model.embeddings, model.layers))
    line = f"{weights:,}: embeddings {embeddings:,}, encoder {encoder:,}"
    for name, part in list(model.parts().items())[1:]:
        line += f"; {name} {count_weights(part):,}, sharing the embeddings"
    return line


def measure_here(
    config: Config,
    phases: list[Phase],
    sources: list[BatchSource],
    model: PretrainingModel,
    operations: float,
    accelerator: Accelerator,
) -> dict[str, str]:
    """Try the model for some seconds, and describe the memory, disk space and time of the run on
    this machine.

    operations: FLOPs of the whole run.
    """
    train, weights = config.train, count_weights(model)
    sizes = [min(p.train.micro_batch_size, p.train.global_batch_size) for p in phases]
    fed = [p.data.max_seq_length * n for p, n in zip(phases, sizes, strict=True)]  # at most
    largest = fed.index(max(fed))
    activations = measure_activations(model, sources[largest], fed[largest], accelerator)
    optimizers = build_optimizers(model, train, matrix_dtype(accelerator))
    if is_compiled(train, accelerator):
        model.compile_layers()
    speed, update_s = try_steps(model, optimizers, sources[0], sizes[0], accelerator)
    kept = (values for one in optimizers for values in one.state.values())
    optimizer = sum(v.numel() * v.element_size() for values in kept for v in values.values())
    saved, memory = 4 * weights + optimizer, 8 * weights + optimizer + activations
    all_saved = count_kept(train) * saved
    seconds = operations / speed + train.max_steps * update_s
    return {
        "device memory": f"{mb(memory)}: weights and gradients {mb(8 * weights)}, "
        f"{train.optimizer} {mb(optimizer)}, activations {mb(activations)}",
        "disk": (
            f"{mb(saved)} per checkpoint, {mb(all_saved)} for all that are kept and one being "
            "written"
        ),
        "time here": (
            f"{say_duration(seconds)} in one process, measured at {speed / 1e12:.3g} TFLOPS on "
            f"{accelerator.device.type}"
        ),
    }


def describe_epochs(
    source: BatchSource, sequences: int, tokens: float, assumed: Assumed | None
) -> tuple[float, str]:
    """Compute and describe the number of epochs that `sequences` make.

    tokens: mean tokens per sequence.
    Returns (epochs, or 0 if unknown; text for the table).
    """
    if not assumed:
        size = source.part_size(0) * source.n_parts  # sequences, approximately
        sizes = f"{size:,} sequences and {size * tokens:,.0f} tokens with [CLS] and [SEP]"
    elif assumed.train_tokens:
        size = source.part_size(0) * assumed.train_tokens / len(source.store)
        sizes = f"about {round_off(size)} sequences and {round_off(size * tokens)} tokens with "
        sizes += "[CLS] and [SEP]"
    else:
        return 0, f"{round_off(sequences * tokens)} tokens in all"
    epochs = sequences / size
    said = f"{epochs:,.1f}" if epochs >= 0.1 else f"{epochs:.1g}"
    return epochs, f"{said} epochs, each of {sizes}"


def describe_preparation(work: Preparation) -> str:
    """Describe the time and disk space of `python -m data_pipeline`."""
    cores = "1 core" if work.cores == 1 else f"{work.cores} cores"
    return (
        f"about {say_duration(work.seconds)} on {cores} of this machine, estimated; store "
        f"{mb(work.store_bytes)}, up to {mb(work.most_bytes)} on disk during preparation"
    )


def estimate_time(operations: float, phases: list[Phase], cards: int, layers: int) -> str:
    """Describe the time of a run on so many GPUs, or why they cannot divide its batch."""
    try:
        passes = [
            count_passes(p.train.global_batch_size, p.train.micro_batch_size, cards) for p in phases
        ]
    except UserError as error:
        return f"impossible: {error}"
    seconds = operations / MFU / PEAK_FLOPS[CARD] / cards
    launched = sum((p.end - p.start) * n for p, n in zip(phases, passes, strict=True)) * layers
    seconds = max(seconds, launched * LAUNCH)
    time = "under a minute" if seconds < 60 else f"about {say_duration(seconds)}"
    said = ", then ".join(f"{n:,}" for n, _ in groupby(passes))
    return (
        f"{time}, estimated at {MFU:.0%} of peak; {said} {'pass' if said == '1' else 'passes'} "
        "per step"
    )


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def measure_activations(
    model: PretrainingModel, source: BatchSource, tokens: float, accelerator: Accelerator
) -> float:
    """Estimate the activation memory of `tokens` tokens, in bytes.

    Extrapolates linearly from what autograd saves for a small and a larger batch, and adds a
    quarter for temporary tensors of the backward pass (measured on a CPU) and a constant for the
    scores of `linear_cross_entropy` with their gradient. With gradient checkpointing, counts the
    activations of one layer and the inputs of all.
    """
    own = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    points, recomputed = [], model.gradient_checkpointing
    model.gradient_checkpointing = False  # the hooks do not see its tensors
    for count in (1, 4):
        kept: dict[int, tuple[StorageWeakRef, int]] = {}

        def note(tensor: torch.Tensor, kept=kept) -> None:
            memory = tensor.untyped_storage()
            reference = StorageWeakRef(memory)  # frees the memory, but not its id
            if reference.cdata not in own:
                kept[reference.cdata] = (reference, memory.nbytes())

        batch = source.batch(0, count).to(accelerator.device)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda _: None), accelerator.autocast():
            rows = model(batch)
        filled = len(fill_rows(batch.input_ids, TOKEN_MULTIPLE))
        points.append((filled, sum(size for _, size in kept.values())))
        del rows
    (x, low), (y, high) = points
    # of short documents four sequences may fill no more rows than one
    slope = (high - low) / (y - x) if y > x else high / y
    kept_bytes = low + slope * (tokens - x)
    layers = model.config.num_hidden_layers
    if recomputed:
        kept_bytes = kept_bytes / layers + 4 * model.config.hidden_size * tokens * layers
    head = CHUNK.get(accelerator.device.type, CHUNK["cuda"]) + model.embeddings.word.weight.numel()
    model.gradient_checkpointing = recomputed
    return 1.25 * kept_bytes + 4 * head


def try_steps(
    model, optimizers, source: BatchSource, most: int, accelerator: Accelerator
) -> tuple[float, float]:
    """Measure the speed of training steps, at the largest size whose step takes a fifth of the
    time, and at most `most` sequences.

    The first steps find that size and are not counted. The learning rate is 0, so the weights stay.
    Returns (FLOP/s of forward and backward passes, seconds of an update).
    """
    timed, updates, size, is_new, begin = [], [], 1, True, now(accelerator)
    while len(timed) < 5 and not (timed and now(accelerator) - begin > SECONDS):
        batch = source.batch(0, size).to(accelerator.device)
        started = now(accelerator)
        backward(model, batch, accelerator)
        middle = now(accelerator)
        update(optimizers, 0.0)
        updates.append(now(accelerator) - middle)
        zero_gradients(optimizers)
        seconds = middle - started
        if size < most and GROWTH * seconds < SECONDS / 5:
            size = min(GROWTH * size, most)
            is_new = True
        elif is_new:  # a GPU compiles, and a CPU prepares its products for this size
            is_new = False
        else:
            timed.append((model.count_flops(batch), seconds))
    operations, seconds = map(sum, zip(*timed, strict=True))
    return operations / seconds, min(updates)


def now(accelerator: Accelerator) -> float:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def backward(model, batch: Batch, accelerator: Accelerator) -> float:
    """Accumulate the gradients of a batch; returns its mean MLM loss in nats."""
    with accelerator.autocast():
        losses = model(batch)[:, 0] / max(len(batch.masked_labels), 1)  # NSP too, so it weighs less
    losses.sum().backward()
    return losses[0].item()


def share_inside(store: TokenStore) -> float:
    """Compute the share of tokens that do not begin a word, in the first million."""
    return 1 - float(store.starts_word(np.arange(min(len(store), 1 << 20))).mean())


def list_unusual(
    phase: Phase, epochs: float, tokens: float, counts: np.ndarray | None, inside: float
) -> Iterator[str]:
    """Yield a warning for each unusual setting of a phase.

    tokens: mean tokens per sequence.
    counts: occurrences of each ordinary token; None if unknown.
    inside: share of tokens that do not begin a word.
    """
    train, data = phase.train, phase.data
    if epochs > 40:
        yield f"each sentence is seen {epochs:.0f} times; add text, or lower train.max_steps"
    if (size := tokens * train.global_batch_size) < 2048:
        yield f"{size:,.0f} tokens per step are few; raise train.global_batch_size"
    if counts is not None and (few := float((counts < 50).mean())) > 0.5:
        size = float(f"{(counts >= 50).sum():.2g}")
        yield f"{few:.0%} of the pieces occur fewer than 50 times; lower vocab.size to {size:,.0f}"
    if train.warmup_steps > train.max_steps / 5:
        yield f"the warm-up takes {train.warmup_steps / train.max_steps:.0%} of the run"
    low, high = USUAL_RATES.get(train.optimizer, (0, 1))
    if not low <= train.learning_rate <= high:
        yield (
            f"train.learning_rate {train.learning_rate:g} is outside the usual range of {low:g} "
            f"to {high:g}"
        )
    keeps_none = data.mask_replace_prob + data.random_replace_prob > 0.999
    if keeps_none and data.masking != "token" and inside > 0.2:
        yield (
            "no token of a masked word is kept, so a single [MASK] inside a word never occurs, "
            f"but {inside:.0%} of the tokens are inside words; lower data.mask_replace_prob, or "
            "set data.masking=token"
        )
    wanted, most = int(data.masked_lm_prob * data.max_seq_length), data.max_predictions_per_seq
    if most and most < wanted:
        yield f"data.max_predictions_per_seq {most} is below the {wanted} masks of a full sequence"


def check_learning(config: Config) -> None:
    """Print an input sequence and overfit a batch, to show that the model can learn it.

    Raises `UserError` if a parameter has no gradient or the loss stays above `OVERFIT_LOSS`.
    """
    check(
        has_store(config),
        f"--check needs prepared data, but there is no store at {config.data_dir}; make one: "
        "python -m data_pipeline CONFIG",
    )
    phases = phases_of(config)
    accelerator = build_accelerator(config.train, phases)
    store, sources = open_token_store(config, phases)
    # pairs, if the run has any: the gradient has to reach their heads too
    paired = (one for one in phases if one.data.single_segment_prob < 1)
    phase = next(paired, phases[0])
    source, top = sources[phases.index(phase)], phase.train.learning_rate
    if 0 < phase.data.single_segment_prob < 1:
        source = BatchSource(store, replace(phase.data, single_segment_prob=0.0), phase.seed)
    fingerprint_run(config, store, accelerator)
    counts = torch.from_numpy(sample_counts(store))
    # without dropout, and scoring all tokens
    model = build_model(config, counts)
    if config.init_from:
        start_from(config.init_from, model, store.vocabulary.pieces)
    model.to(accelerator.device).eval()
    optimizers = build_optimizers(model, config.train, matrix_dtype(accelerator))
    print(show_sequence(source.batch(0, 1), store.vocabulary, config.data.objective))
    batch = source.batch(0, SEQUENCES).to(accelerator.device)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for done in range(STEPS):
        loss = backward(model, batch, accelerator)
        if not done and (without := [n for n, p in trained if p.grad is None or not p.grad.any()]):
            raise UserError(f"no gradient reaches {', '.join(without)}")
        if loss < OVERFIT_LOSS:
            print(f"the model overfits {SEQUENCES} sequences: MLM loss {loss:.3f} at step {done}")
            return
        update(optimizers, top * min(1, (done + 1) / 20))
        zero_gradients(optimizers)
    raise UserError(
        f"the model does not overfit {SEQUENCES} sequences: MLM loss {loss:.3f} after {STEPS} "
        f"steps, not below {OVERFIT_LOSS}; try a train.learning_rate other than {top:g}"
    )


def main() -> None:
    parser = config_parser(__doc__, "python -m pretrain.plan")
    parser.add_argument(
        "--check", action="store_true", help="overfit one batch instead of planning"
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="size of a corpus that is not prepared yet, such as 3.3e9",
    )
    parser.add_argument(
        "--cards",
        type=int,
        metavar="N",
        help=f"number of {CARD}s to estimate the time for (default: 1 and 8)",
    )
    args = parser.parse_intermixed_args()
    check(args.tokens is None or 1 <= args.tokens < inf, f"--tokens {args.tokens} is below 1")
    check(args.cards is None or args.cards >= 1, f"--cards {args.cards} is below 1")
    config = load_config(Config, args.config, args.overrides)
    if args.check:
        check_learning(config)
    else:
        plan(config, args.tokens, [args.cards] if args.cards else CARDS)


if __name__ == "__main__":
    run_command(main)
