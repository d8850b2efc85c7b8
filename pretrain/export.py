"""The end of the journey: a checkpoint -> a folder that every BERT class of transformers loads.

`python -m pretrain.export CHECKPOINT_OR_RUN_DIR OUT_DIR` does it for any checkpoint, on a CPU. A
gate reads the folder back and compares it with the model before it says done.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.batches import Batch
from data_pipeline.config import check
from data_pipeline.errors import UserError, run_command
from data_pipeline.processes import written_beside
from data_pipeline.token_store import read_vocabulary
from pretrain.checkpoint import find_fault, load_model, newest_checkpoint, read_state
from pretrain.config import Config, ModelConfig, phases_of
from pretrain.model import BertForPreTraining

TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
NAMES = {  # ours -> transformers'; of a layer after "layers.N."
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.position.weight": "bert.embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.bias": "cls.predictions.bias",
    "nsp": "cls.seq_relationship",
}
LAYER_NAMES = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


def hf_name(name: str) -> str:
    """transformers' name for one of our tensors."""
    if name in NAMES:
        return NAMES[name]
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, number, stem = stem.split(".", 2)
    return f"bert.encoder.layer.{number}.{LAYER_NAMES[stem]}.{kind}"


def to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under transformers' names; the tied decoder is not written, transformers ties
    it."""
    return {hf_name(name): tensor for name, tensor in state.items()}


def from_hf(weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The tensors `names` of our model from transformers' weights."""
    return {name: weights[hf_name(name)] for name in names}


def export(model: BertForPreTraining, vocab_dir: Path, out_dir: Path, card: str) -> None:
    """Write the Hugging Face folder of a model on the CPU to `out_dir`, once the gate has passed
    it.

    Raises `AssertionError` if what is read back is not the model: a fault of ours, nothing is left
    behind.
    """
    with written_beside(out_dir) as folder:
        for name in TOKENIZER_FILES:
            shutil.copy(vocab_dir / name, folder / name)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["model_max_length"] = model.config.max_position_embeddings
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        weights = {name: t.contiguous() for name, t in to_hf(model.state_dict()).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        vocab_size = len(model.mlm.bias)
        config = hf_config(model.config, vocab_size)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        passed = check_export(model, folder)
        (folder / "README.md").write_text(card + f"\nChecked at export: {passed}.\n")


def hf_config(config: ModelConfig, vocab_size: int) -> dict:
    """The `config.json` of a model: BertConfig's names and values."""
    settings = asdict(config)
    settings["intermediate_size"] = config.intermediate_size or 4 * config.hidden_size
    return settings | {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def load_export(folder: Path) -> BertForPreTraining:
    """Our model from an exported folder."""
    settings = json.loads((folder / "config.json").read_text())
    known = {name: settings[name] for name in ModelConfig.__dataclass_fields__}
    model = BertForPreTraining(ModelConfig(**known), settings["vocab_size"])
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(from_hf(weights, list(model.state_dict())))
    return model.eval()


# ---------------------------------------------------------------------------------- the gate


def check_export(model: BertForPreTraining, folder: Path) -> str:
    """Read the folder back and compare; returns what was compared.

    Always: keys, logits of a fresh model, special ids. With transformers installed: its own
    loading, logits, ties, token ids and the polarity of the NSP head.
    """
    model = model.eval()
    batch = probe_batch(len(model.mlm.bias), model.config.max_position_embeddings)
    with torch.no_grad():
        wanted = model.logits(batch)
        found = load_export(folder).logits(batch)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b), f"logits differ by {(a - b).abs().max()} after reading back"
    vocabulary = read_vocabulary(folder)
    assert vocabulary["[PAD]"] == model.config.pad_token_id, "[PAD] has another id in config.json"
    assert len(vocabulary) == len(model.mlm.bias), "vocab.txt and the embeddings differ in length"
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer["model"]["vocab"] == vocabulary.ids, "tokenizer.json"
    for token in tokenizer["added_tokens"]:
        assert vocabulary[token["content"]] == token["id"], token
    try:
        import transformers
    except ImportError:
        return "weights read back, equal logits (transformers was not installed)"
    return check_with_transformers(transformers, folder, batch, wanted)


def probe_batch(vocab_size: int, max_length: int) -> Batch:
    """Two sequences of ordinary ids, of different length, every fourth token to be predicted."""
    lengths = torch.tensor([min(24, max_length), min(17, max_length)])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.arange(5, 5 + int(lengths.sum())) * 7 % (vocab_size - 5) + 5
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])
    sequence = torch.repeat_interleave(torch.arange(2), lengths)
    masked = torch.arange(0, len(ids), 4)
    return Batch(
        ids, (position > 8).long(), position, sequence, cu_seqlens, masked, ids[masked],
        torch.tensor([0, 1]), int(lengths.max()),
    )  # fmt: skip


def check_with_transformers(transformers, folder: Path, batch: Batch, wanted) -> str:
    transformers.utils.logging.disable_progress_bar()
    peer, report = transformers.BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert peer.cls.predictions.decoder.weight is peer.bert.embeddings.word_embeddings.weight
    padded = batch.padded()
    padded.pop("labels"), padded.pop("next_sentence_label")
    with torch.no_grad():
        out = peer.eval()(**padded)
    mlm = out.prediction_logits[batch.sequence_ids, batch.position_ids][batch.masked_positions]
    for name, a, b in (("MLM", mlm, wanted[0]), ("NSP", out.seq_relationship_logits, wanted[1])):
        difference = float((a - b).abs().max() / b.abs().max().clamp(min=1))
        assert difference < 1e-5, f"{name} logits differ from transformers' by {difference}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    from tokenizers import Tokenizer

    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        "The quick brown fox.",
        "Ünïcödé, naïve!",
        "中文 ABC",
        "Don't e-mail: a@b.c \u200d 😀",
    ):
        assert tokenizer(text)["input_ids"] == bare.encode(text).ids, text
    return "transformers loads every key, equal logits, tied decoder, equal token ids"


# ---------------------------------------------------------------------------------- by itself


def model_card(config: Config, state: dict, parameters: int) -> str:
    """README.md of the exported folder: what it is, from what, how it is loaded."""
    labels = {"nsp": "B follows A, 1 that it is random", "sop": "A and B are in order, 1 swapped"}
    pairs = ""
    if config.data.objective in labels:
        pairs = "In `BertForNextSentencePrediction`, label 0 says that "
        pairs += f"{labels[config.data.objective]}.\n"
    metrics = "\n".join(f"- {name}: {value:.4f}" for name, value in state["evaluation"].items())
    sizes = " and ".join(
        f"{phase.train.global_batch_size} sequences of at most {phase.data.max_seq_length} tokens"
        + (f" (from step {phase.start:,})" if phase.start else "")
        for phase in phases_of(config)
        if phase.start < max(state["step"], 1)
    )
    data = config.data
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
tags: [bert]
---
# BERT, pretrained from scratch with bert-pretrain

{parameters:,} parameters, {state["step"]:,} steps of {sizes}.
Objective: masked words ({data.masking}, {data.masked_lm_prob:.0%}) and sentence pairs
({data.objective}).

```python
from transformers import AutoModel, AutoTokenizer, pipeline
tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModel.from_pretrained(".")
pipeline("fill-mask", model=".")("A sentence with a [MASK].")
```

A class for another task (`BertForSequenceClassification`, ...) starts with a new head and says so;
that is as it should be.
{pairs}
On held-out documents:

{metrics or "- not evaluated"}

- vocabulary sha256 {state["contract"]["vocab_sha256"]}
- token store sha256 {state["contract"]["data_sha256"]}
"""


def export_checkpoint(checkpoint: Path, config: Config, vocab_dir: Path, out_dir: Path) -> None:
    """Export a checkpoint of the run that `config` tells."""
    vocabulary = read_vocabulary(vocab_dir)
    state = read_state(checkpoint)
    check(
        state["contract"]["vocab_sha256"] == vocabulary.sha256,
        f"{checkpoint} was trained with another vocabulary than {vocab_dir} holds",
    )
    model = BertForPreTraining(config.model, len(vocabulary))
    load_model(checkpoint, model)
    card = model_card(config, state, sum(p.numel() for p in model.parameters()))
    export(model, vocab_dir, out_dir, card)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pretrain.export", description=__doc__)
    parser.add_argument("source", metavar="CHECKPOINT_OR_RUN_DIR", type=Path)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    args = parser.parse_args()
    checkpoint, out_dir = args.source.resolve(), args.out_dir.resolve()
    empty = not out_dir.exists() or out_dir.is_dir() and not any(out_dir.iterdir())
    check(
        empty or (out_dir / "config.json").exists(),  # an older export is replaced
        f"{out_dir} exists and is not an exported folder; choose another OUT_DIR",
    )
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = newest_checkpoint(checkpoint / "checkpoints")
        check(checkpoint is not None, f"{args.source} has no sound checkpoint yet")
    elif fault := find_fault(checkpoint):
        raise UserError(
            f"{checkpoint} is neither a run folder nor a sound checkpoint ({fault}); give a "
            "run_dir or one of its checkpoints/step-*"
        )
    config_path = checkpoint.parent.parent / "config.yaml"
    check(config_path.exists(), f"no {config_path}; keep a checkpoint in its run folder")
    config = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(config_path))
    )
    export_checkpoint(checkpoint, config, Path(config.data_dir) / "vocab", out_dir)
    print(f"exported {checkpoint} to {out_dir}")


if __name__ == "__main__":
    run_command(main)
