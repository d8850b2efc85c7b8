"""Turn each line of a text into a vector by an exported model:

python scripts/embed.py --model DIR --pool mean --out vectors.npy < FILE
"""

import argparse
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from needed import check_packages

check_packages("torch", "data_pipeline")

import numpy as np
import torch
from torch import Tensor

from data_pipeline.common.errors import UserError, check, run_command
from data_pipeline.common.folders import check_writable, write_file
from data_pipeline.common.system import progress_bar
from pretrain.families import longest_sequence
from pretrain.read_export import check_ids, check_model, load_encoder, load_pretrained, unusable

BATCH = 64  # texts of about equal length in one pass
TABLES = (".tsv", ".csv", ".jsonl", ".json")  # a line of which is more than a text


def mean_of_tokens(layer: Tensor, mask: Tensor) -> Tensor:
    """Average the states of the real tokens, [CLS] and [SEP] included: (B, S, D) -> (B, D)."""
    weight = mask[..., None].to(layer.dtype)
    return (layer * weight).sum(1) / weight.sum(1)


# name -> (what transformers returns for a batch, attention mask (B, S)) -> vectors (B, N)
POOLS: dict[str, Callable[..., Tensor]] = {
    "cls": lambda out, mask: out.last_hidden_state[:, 0],
    "pooler": lambda out, mask: out.pooler_output,
    "mean": lambda out, mask: mean_of_tokens(out.last_hidden_state, mask),
    "sum4": lambda out, mask: mean_of_tokens(torch.stack(out.hidden_states[-4:]).sum(0), mask),
    "concat4": lambda out, mask: mean_of_tokens(torch.cat(out.hidden_states[-4:], -1), mask),
}


def embed(model_dir: Path, texts: list[str], pool: str, center: bool = False) -> np.ndarray:
    """Compute the vector of each text, float32 (N, D), or (N, 4 D) for `concat4`.

    center: subtract the mean vector of these texts.
    Texts of more tokens than the model takes are cut, with a warning. Raises `UserError` without
    transformers, and if the folder holds no model or lacks weights that the vectors need.
    """
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise UserError(
            "transformers is not installed; install it: pip install -e '.[hf]'"
        ) from None
    check_model(model_dir)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = load_pretrained(AutoTokenizer, model_dir)
    sequences = tokenizer(texts)["input_ids"]
    check_ids(tokenizer, sequences, model_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_encoder(AutoModel, model_dir, pool == "pooler", dtype=torch.float32)
    model = model.eval().to(device)
    layers, longest = model.config.num_hidden_layers, longest_sequence(model.config.to_dict())
    check(
        layers >= 4 or not pool.endswith("4"),
        f"the model has {layers} layers, and {pool} wants the last four; use --pool mean",
    )
    check(
        pool != "pooler" or hasattr(model, "pooler"),
        f"an {type(model).__name__} has no pooler; use --pool cls",
    )
    try:  # settings that fit neither each other nor the weights show only now
        with torch.no_grad():
            trial = tokenizer(texts[:1], truncation=True, max_length=longest, return_tensors="pt")
            model(**trial.to(device))
    except Exception as error:
        raise unusable(model_dir, error) from None
    lengths = [len(ids) for ids in sequences]
    specials = tokenizer.num_special_tokens_to_add()
    for number, length in enumerate(lengths, 1):
        check(length > specials, f"text {number} has no token in this vocabulary; remove it")
    if cut := sum(length > longest for length in lengths):
        print(f"warning: {cut:,} texts cut to {longest:,} tokens", file=sys.stderr)
    order, vectors = np.argsort(lengths, kind="stable"), None
    with progress_bar("embedding", len(texts), "texts", delay=2) as bar, torch.no_grad():
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            batch = tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=longest,
                return_attention_mask=True,
                return_tensors="pt",
            ).to(device)
            out = model(**batch, output_hidden_states=True)
            found = POOLS[pool](out, batch["attention_mask"]).cpu().numpy()
            if vectors is None:
                vectors = np.empty((len(texts), found.shape[1]), np.float32)
            vectors[rows] = found
            bar.update(len(rows))
    return vectors - vectors.mean(0) if center else vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="?", type=Path, help="a text a line; default: stdin")
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--pool", choices=POOLS, default="mean", help="default: mean")
    parser.add_argument("--center", action="store_true", help="subtract the mean of all vectors")
    parser.add_argument("--out", type=Path, required=True, help=".npy file, float32 (N, D)")
    args = parser.parse_args()
    name = args.texts or "stdin"
    check(
        not args.texts or args.texts.suffix.lower() not in TABLES,
        f"{name} is a table; write its texts to a file, one on each line, such as by cut -f 1",
    )
    try:
        check(args.texts or sys.stdin, "stdin is closed; name a file with a text a line")
        data = args.texts.read_bytes() if args.texts else sys.stdin.buffer.read()
        texts = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UserError(f"no file at {name}; give a file with a text a line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 at byte {error.start:,}; convert it") from None
    for number, text in enumerate(texts, 1):
        check(text.strip(), f"line {number} of {name} is empty; a line is a text")
    check(
        not args.center or len(texts) > 1,
        f"--center: {name} has one text, which is its own mean; give more, or leave it out",
    )
    check(not args.out.is_dir(), f"--out {args.out} is a folder; name a file in it")
    args.out = check_writable(args.out, [args.model, *([args.texts] if args.texts else [])])
    vectors = embed(args.model, texts, args.pool, args.center)
    np.save(file := BytesIO(), vectors)
    write_file(args.out, file.getbuffer())
    print(f"{args.out}: {len(vectors):,} vectors of {vectors.shape[1]:,} numbers")


if __name__ == "__main__":
    run_command(main)
