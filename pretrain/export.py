"""Write a checkpoint as a folder that the classes of transformers can load.

`python -m pretrain.export CHECKPOINT_OR_RUN_DIR OUT_DIR` exports any checkpoint, on a CPU. The
export is read back and compared with the model before OUT_DIR changes.
"""

import argparse
import copy
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data_pipeline.common.errors import UserError, check, run_command
from data_pipeline.common.folders import atomic_folder, hash_file
from data_pipeline.common.reading import read_json
from data_pipeline.sampling.vocabulary import TOKENIZER_FILES, read_vocabulary
from pretrain.checkpoint import find_fault, load_model, name_not_finite, newest_checkpoint
from pretrain.config import Config, known_positions, phases_begun
from pretrain.export_folder import (
    MARKER,
    PYTORCH_BIN,
    SCHEMA,
    STAGE,
    check_export_folder,
    move_files,
    read_marker,
    remove_export,
)
from pretrain.export_gate import check_export
from pretrain.families import hf_config
from pretrain.model_card import format_hashes, generator_card, model_card, project_version
from pretrain.models.bert import PretrainingModel, resize_positions, settle_embeddings
from pretrain.models.build import count_parameters, count_weights, model_of
from pretrain.models.electra import GENERATOR
from pretrain.read_run import find_manifest, find_vocabulary, read_run_config, read_run_state

WEIGHTS = ("model.safetensors", PYTORCH_BIN)
# what a loader would read besides: weights of other kinds, and tokens
OTHERS = ("*.bin", "*.h5", "*.msgpack", "*.safetensors", "*.index.json", "adapter_config.json")
OTHERS += ("added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "*.model")
MOST_POSITIONS = 1_000_000  # of model.max_position_embeddings
DTYPES = ("float32", "bfloat16", "float16")


def export(
    model: PretrainingModel,
    vocab_dir: Path,
    out_dir: Path,
    card: str,
    origin: dict,
    dropout: float = 0.1,
    dtype: str = "float32",
    pytorch_bin: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the Hugging Face folder of a model on the CPU to `out_dir`, after `check_export`.

    origin: `step`, `vocab_sha256` and `data_sha256` of the checkpoint, for the marker.
    dropout: of hidden states and attention, in `config.json`, for fine-tuning.
    Raises `UserError` if a file of the user would be lost, and `AssertionError` if the files differ
    from the model (a bug in this project); `out_dir` is then unchanged.
    """
    model = copy.deepcopy(model).to(getattr(torch, dtype)).float()  # round to the exported dtype
    stage = out_dir / STAGE if out_dir.is_dir() else out_dir.with_name(out_dir.name + STAGE)
    with atomic_folder(stage) as folder:
        write_tokenizer(model, vocab_dir, folder)
        try:
            write_weights(model, dtype, pytorch_bin, folder)
        except (SafetensorError, RuntimeError) as error:  # such as a full disk
            raise UserError(
                f"no export at {out_dir}: {error}; free space and run the same command again"
            ) from None
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        settings = hf_config(asdict(model.config), model.vocab_size, model.hf_class, dtype)
        if model.config.family.tells_ends:
            vocabulary = read_vocabulary(folder)
            settings |= {"bos_token_id": vocabulary["[CLS]"], "eos_token_id": vocabulary["[SEP]"]}
        write_json(folder / "config.json", settings | dropouts)
        passed = check_export(model, folder)
        hashes = {path.name: hash_file(path) for path in sorted(folder.iterdir())}
        of_weights = {name: hashes[name] for name in WEIGHTS if name in hashes}
        card = f"{card}\n{format_hashes(of_weights)}\nChecked at export: {passed}.\n"
        (folder / "README.md").write_text(card)
        hashes["README.md"] = hash_file(folder / "README.md")
        marker = {"schema": SCHEMA, "made_by": project_version(), **origin, "files": hashes}
        write_json(folder / MARKER, marker)
        check_export_folder(out_dir, overwrite, pytorch_bin)  # it may have changed meanwhile
    move_files(stage, out_dir)
    others = {path.name for pattern in OTHERS for path in out_dir.glob(pattern)}
    if others := sorted(others - hashes.keys()):
        print(
            f"note: {out_dir} also holds {', '.join(others)}, which this export did not write; a "
            "loader may read them instead of what was written, so remove what you do not need"
        )


def write_tokenizer(model: PretrainingModel, vocab_dir: Path, folder: Path) -> None:
    """Copy the files of the tokenizer, for the lengths and segments that the model takes."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(vocab_dir / name, folder / name)  # which may be read-only
    settings = read_json(folder / "tokenizer_config.json", dict, "put an intact copy back")
    settings["model_max_length"] = model.config.max_position_embeddings
    if model.config.type_vocab_size == 1:  # a second segment would have a type of its own
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    write_json(folder / "tokenizer_config.json", settings)
    if model.nsp:
        enclose_pairs(folder)


def write_weights(model: PretrainingModel, dtype: str, pytorch_bin: bool, folder: Path) -> None:
    """Write the weights under transformers' names; raises `UserError` if one is not finite."""
    weights = model.config.family.to_hf(model.state_dict())
    weights = {n: t.to(getattr(torch, dtype)).contiguous() for n, t in weights.items()}
    sick = name_not_finite(weights)
    check(
        sick is None,
        f"{sick} is not finite in {dtype}, so nothing is exported; export an earlier checkpoint"
        f"{'' if dtype == 'float32' else ', or leave out --dtype'}",
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if pytorch_bin:
        torch.save(weights, folder / PYTORCH_BIN)
    readable = (folder / "tokenizer_config.json").stat().st_mode  # by the umask
    (folder / "model.safetensors").chmod(readable)


def enclose_pairs(folder: Path) -> None:
    """Make the `tokenizer.json` of a folder build pairs as training did, [CLS] A [SEP] B [SEP] with
    types 0 and 1; RoBERTa's tokenizers put two [SEP] between A and B, and have no types."""
    vocabulary, path = read_vocabulary(folder), folder / "tokenizer.json"
    tokenizer = read_json(path, dict, "put an intact copy back")

    def special(name: str, segment: int) -> dict:
        return {"SpecialToken": {"id": vocabulary.pieces[vocabulary[name]], "type_id": segment}}

    single = [special("[CLS]", 0), {"Sequence": {"id": "A", "type_id": 0}}, special("[SEP]", 0)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, special("[SEP]", 1)]
    names = {vocabulary.pieces[vocabulary[name]]: vocabulary[name] for name in ("[CLS]", "[SEP]")}
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()}
    rule = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
    if tokenizer.get("post_processor") != rule:
        text = json.dumps(tokenizer | {"post_processor": rule}, ensure_ascii=False, indent=2)
        path.write_text(text, encoding="utf-8")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# ---------------------------------------------------------------------------------- the run


def export_checkpoint(
    checkpoint: Path, config: Config, out_dir: Path, positions: int | None = None, **options
) -> None:
    """Export a checkpoint that lies in its run folder.

    positions: number of positions to export; None: the trained ones, since untrained ones are still
    random and would make predictions there worse than without context. A model of `init_from` keeps
    all its original positions, which were trained before.
    options: `dtype`, `pytorch_bin` and `overwrite` of `export`.
    """
    state = read_run_state(checkpoint)
    fingerprint = state["fingerprint"]
    is_new = not config.init_from or "nsp" in state.get("new_heads", [])
    if is_new and all(p.data.single_segment_prob == 1 for p in phases_begun(config, state)):
        # the pair heads are still random
        config = replace(config, data=replace(config.data, objective="none"))
    vocab_dir = find_vocabulary(checkpoint.parent.parent, config, fingerprint["vocab_sha256"])
    vocabulary = read_vocabulary(vocab_dir)
    pieces, mask = len(vocabulary), vocabulary.pieces[vocabulary["[MASK]"]]
    check_size(checkpoint, config, pieces)
    model = model_of(config.model, pieces, config.data.objective)
    load_model(checkpoint, model)
    if config.init_from is None:  # a model of init_from keeps the scale of its embeddings
        settle_embeddings(model)
    trained = known_positions(config, state)
    positions = positions or trained
    resize_positions(model, trained, positions)
    shape, advice = {"do_lower_case": bool}, "put an intact copy back"
    lowercase = read_json(vocab_dir / "tokenizer_config.json", shape, advice)["do_lower_case"]
    manifest = find_manifest(config, fingerprint["data_sha256"])
    origin = {name: fingerprint[name] for name in ("vocab_sha256", "data_sha256")}
    origin["step"] = state["step"]
    for name, part in model.parts().items():
        parameters = count_weights(part)
        if name == GENERATOR:
            card = generator_card(config, parameters)
        else:
            card = model_card(config, state, parameters, lowercase, positions, manifest, mask)
        export(part, vocab_dir, out_dir / name, card, origin, config.export.dropout, **options)
    if GENERATOR not in model.parts():
        remove_export(out_dir / GENERATOR)  # left by an earlier export of an ELECTRA


def check_size(checkpoint: Path, config: Config, pieces: int) -> None:
    """Raise `UserError` if a config's model has more parameters than a checkpoint holds, before it
    is built: with a damaged `config.yaml` it may have any size."""
    weights = checkpoint / "model.safetensors"
    number = count_parameters(config.model, pieces, config.data.objective)
    check(
        4 * number <= weights.stat().st_size,
        f"{checkpoint.parent.parent / 'config.yaml'} describes a model of {number:,} parameters, "
        f"but {weights} has fewer; put an intact copy of config.yaml back",
    )


def push(out_dir: Path, repo_id: str, private: bool) -> str:
    """Upload the files of an export to a repository on the hub; returns its address.

    Creates the repository if needed. Raises `UserError` if the hub refuses, or if a repository that
    is to be private exists and is public.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        is_public = private and not api.model_info(url.repo_id).private
        if not is_public:
            files = [*read_marker(out_dir), MARKER]
            files += [f"{GENERATOR}/{name}" for name in (*read_marker(out_dir / GENERATOR), MARKER)]
            api.upload_folder(repo_id=url.repo_id, folder_path=out_dir, allow_patterns=files)
    except Exception as error:  # network, hub or name
        raise UserError(
            f"{out_dir} is exported, but not pushed to {repo_id}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Log in with `hf auth login`, check the name, and run the "
            "same command again"
        ) from None
    check(not is_public, f"{repo_id} exists and is public, so nothing is pushed; make it private")
    return str(url)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pretrain.export", description=__doc__)
    parser.add_argument("source", metavar="CHECKPOINT_OR_RUN_DIR", type=Path)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)"
    )
    parser.add_argument(
        "--positions",
        type=int,
        metavar="N",
        help=(
            "longest sequence that the exported model accepts (default: the trained length, or "
            "with init_from that of the initial model); further positions continue the trained "
            "ones"
        ),
    )
    parser.add_argument(
        "--pytorch-bin",
        action="store_true",
        help=f"also write {PYTORCH_BIN}, for loaders without safetensors support",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace existing files that have the names of exported ones, and no others",
    )
    parser.add_argument(
        "--push", metavar="REPO_ID", help="upload the export to this repository of the hub"
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: use a private repository"
    )
    args = parser.parse_args()
    if args.private and not args.push:
        parser.error("--private needs --push REPO_ID")
    if args.positions is not None and not 8 <= args.positions <= MOST_POSITIONS:
        parser.error(f"--positions must be at least 8, and at most {MOST_POSITIONS:,}")
    checkpoint, out_dir = args.source.resolve(), args.out_dir.resolve()
    check_export_folder(out_dir, args.overwrite, args.pytorch_bin)
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = newest_checkpoint(checkpoint / "checkpoints")
        check(
            checkpoint is not None,
            f"{args.source} has no intact checkpoint; put an intact copy of one back",
        )
    elif not checkpoint.exists():
        raise UserError(
            f"there is no {checkpoint}; give a run_dir, or one of the checkpoints that it keeps"
        )
    elif fault := find_fault(checkpoint):
        raise UserError(
            f"{checkpoint} is neither a run folder nor an intact checkpoint ({fault}); give a "
            "run_dir or one of its checkpoints/step-*"
        )
    config = read_run_config(checkpoint.parent.parent)
    options = {"dtype": args.dtype, "pytorch_bin": args.pytorch_bin, "overwrite": args.overwrite}
    export_checkpoint(checkpoint, config, out_dir, args.positions, **options)
    print(f"exported {checkpoint} to {out_dir}")
    if args.push:
        print(f"pushed to {push(out_dir, args.push, args.private)}")


def run() -> None:
    """Run the command; a mistake of the user ends in one line and exit code 2."""
    run_command(main)


if __name__ == "__main__":
    run()
