"""The checks of an export: read it back, and compare it with its model, by our code and by
transformers'."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.common.errors import check
from data_pipeline.sampling.batches import Batch
from data_pipeline.sampling.vocabulary import list_pieces, read_vocabulary
from pretrain.export_folder import PYTORCH_BIN
from pretrain.models.bert import PretrainingModel
from pretrain.read_export import read_model


def require(holds: object, fault: str) -> None:
    """Raise `AssertionError` unless a check of the gate holds.

    Not an `assert` statement: `python -O` removes those, and with them the gate.
    """
    if not holds:
        raise AssertionError(f"{fault}; this is a bug of bert-pretrain, please report it")


def check_export(model: PretrainingModel, folder: Path) -> str:
    """Read an export back and compare it with its model, whose weights must fit the export's dtype.

    Compares keys, dtype, logits and special ids; with transformers installed also its loading,
    logits, tied weights and token ids. Returns a description of the comparison.
    Raises `UserError` if logits of the model are not finite, and `AssertionError` if the export
    differs from the model.
    """
    model = model.eval()
    weights = load_file(folder / "model.safetensors")
    dtype = json.loads((folder / "config.json").read_text())["torch_dtype"]
    require({t.dtype for t in weights.values()} == {getattr(torch, dtype)}, "another dtype")
    if (folder / PYTORCH_BIN).exists():
        pickled = torch.load(folder / PYTORCH_BIN, weights_only=True)
        require(pickled.keys() == weights.keys(), f"other keys in {PYTORCH_BIN}")
        same = all(equal_tensors(pickled[name], weights[name]) for name in weights)
        require(same, f"other weights in {PYTORCH_BIN}")
    batch = probe_batch(model)
    with torch.no_grad():
        wanted = model.logits(batch)
        check(
            all(logits.isfinite().all() for logits in wanted),
            "the model computes logits that are not finite, so nothing is exported; export an "
            "earlier checkpoint",
        )
        found = read_model(folder).logits(batch)
    for a, b in zip(wanted, found, strict=True):
        require(torch.equal(a, b), f"logits differ by {(a - b).abs().max()} after reading back")
    vocabulary = read_vocabulary(folder)
    same_pad = vocabulary["[PAD]"] == model.config.pad_token_id
    require(same_pad, "[PAD] has another id in config.json than in vocab.txt")
    require(len(vocabulary) == model.vocab_size, "vocab.txt and the embeddings differ in length")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    same_ids = list_pieces(tokenizer) == vocabulary.ids
    require(same_ids, "tokenizer.json has other ids than vocab.txt")
    try:
        import transformers
    except ImportError:
        return "weights read back, equal logits (transformers was not installed)"
    return check_with_transformers(transformers, folder, model, batch, wanted)


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def probe_batch(model: PretrainingModel) -> Batch:
    """Make two sequences of ordinary ids, of different length, with every fourth masked."""
    vocab_size, max_length = model.vocab_size, model.config.max_position_embeddings
    lengths = torch.tensor([min(24, max_length), min(17, max_length)])
    ids = torch.arange(5, 5 + int(lengths.sum())) * 7 % (vocab_size - 5) + 5
    ids[ids == model.config.pad_token_id] = 0  # [PAD] would have no position in RoBERTa
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])
    types = (position > 8).long().clamp(max=model.config.type_vocab_size - 1)
    masked = torch.arange(0, len(ids), 4)
    pairs = torch.tensor([0, 1])
    return Batch.of(ids, lengths, masked, token_type_ids=types, next_sentence_label=pairs)


def check_with_transformers(
    transformers, folder: Path, model: PretrainingModel, batch: Batch, wanted: tuple[Tensor, ...]
) -> str:
    """Compare transformers' model and tokenizer with ours; returns what was compared.

    wanted: logits of our model. Raises `UserError` if transformers refuses entries of
    `model.extra`, and `AssertionError` if anything differs.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        peer, report = getattr(transformers, model.hf_class).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # of many kinds, such as for a field of another type
        check(
            not model.config.extra,
            f"transformers cannot load the export: {error}; correct or remove what is wrong in "
            f"model.extra, {model.config.extra}",
        )
        raise
    other_keys = report["missing_keys"] or report["unexpected_keys"]
    require(not other_keys, f"transformers loads other keys: {report}")
    if model.mlm:
        tied = peer.get_output_embeddings().weight is peer.get_input_embeddings().weight
        require(tied, "transformers does not tie the decoder to the word embeddings")
    padded = batch.padded(model.config.pad_token_id)
    padded.pop("labels"), padded.pop("next_sentence_label")
    with torch.no_grad():
        # without what config.json may ask for beside, such as that of a model to start from
        out = peer.eval()(**padded, output_attentions=False, output_hidden_states=False)
    tokens = out[0][batch.sequence_ids, batch.position_ids]  # of the other head, pairs
    found = (tokens[batch.masked_positions] if model.mlm else tokens, *out[1:])
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        difference = float((a - b).abs().max() / b.abs().max().clamp(min=1))
        require(difference < 1e-5, f"logits {number} differ from transformers' by {difference}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    from tokenizers import Tokenizer

    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        "The quick brown fox.",
        "Ünïcödé, naïve!",
        "中文 ABC",
        "Don't e-mail: a@b.c \u200d 😀",
    ):
        same_ids = tokenizer(text)["input_ids"] == bare.encode(text).ids
        require(same_ids, f"transformers' tokenizer gives other ids for {text!r}")
    compared = "tied decoder, " if model.mlm else ""
    return f"transformers loads every key, equal logits, {compared}equal token ids"
