"""Once in a while: the state of a run on disk, whole or not at all.

`checkpoints/step-00001000/` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and,
written last, `manifest.json` with the sha256 of the others. It is written beside, synced and
renamed; what does not match its manifest is set aside as `.corrupt` and the checkpoint before it
taken. No pickle, no generator state: whatever is drawn is a function of the step.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file
from pretrain.sharding import shard_like, unshard

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict,
    keep: int,
    writes: bool = True,
) -> Path:
    """Write `folder/step-N` for `state["step"]` = N, then remove all but the newest `keep`.

    All processes call it, since each may hold a share of the tensors; the one that `writes` does.
    Raises `UserError` if there is no space for it; the checkpoints before it stay.
    """
    model_tensors = tensors_of(model.state_dict(), writes)
    optimizer_tensors = tensors_of(optimizer_state(model, optimizers), writes)
    final = folder / f"step-{state['step']:08d}"
    if not writes:
        return final
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = [*model_tensors.values(), *optimizer_tensors.values()]
    wanted = sum(t.numel() * t.element_size() for t in tensors) + (1 << 20)
    free = shutil.disk_usage(folder).free
    try:
        if free < wanted:
            raise OSError("disk full")
        save_file(model_tensors, temporary / FILES[0])
        save_file(optimizer_tensors, temporary / FILES[1])
        (temporary / FILES[2]).write_text(to_json(state, indent=1) + "\n")
        manifest = {name: hash_file(temporary / name) for name in FILES}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"no checkpoint at {final}: {error} ({wanted >> 20:,} MB wanted, {free >> 20:,} MB "
            "free); free space and run the same command again, the checkpoints before it are kept"
        ) from None
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    sync(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def tensors_of(state: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, made one after the other; none is kept unless `keep`."""
    tensors = ((name, unshard(tensor.detach())) for name, tensor in state.items())
    return {name: tensor.cpu().contiguous() for name, tensor in tensors if keep}


def optimizer_state(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """`NAME/KEY` -> tensor, for each key of the optimizer's state of parameter NAME."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders, oldest first; other names are not ours."""
    return sorted(p for p in folder.glob("step-*") if NAME.fullmatch(p.name) and not p.is_symlink())


def find_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if they are as they were written."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for name in FILES:
            if hash_file(checkpoint / name) != manifest[name]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__} {error}"
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest sound checkpoint, or None; damaged ones are set aside with a warning."""
    for checkpoint in reversed(list_checkpoints(folder)):
        fault = find_fault(checkpoint)
        if fault is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + ".corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        print(f"warning: {checkpoint} is damaged ({fault}); set aside as {aside.name}")
    return None


def to_json(value, indent: int | None = None) -> str:
    """A value as JSON, which has no NaN and no infinity: null in their place."""

    def finite(part):
        if isinstance(part, dict):
            return {name: finite(item) for name, item in part.items()}
        if isinstance(part, list | tuple):
            return [finite(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def read_state(checkpoint: Path) -> dict:
    """What `save_checkpoint` was given as `state`."""
    return json.loads((checkpoint / "state.json").read_text())


def load_model(checkpoint: Path, model: torch.nn.Module) -> None:
    """Load the weights; raises `UserError` if they are of another model shape."""
    try:
        model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{checkpoint} holds a model of another shape: {reason}") from None


def load_optimizers(
    checkpoint: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Load what `optimizer_state` wrote."""
    parameters = dict(model.named_parameters())
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, value in load_file(checkpoint / "optimizer.safetensors").items():
        parameter_name, key = name.split("/")
        parameter = parameters[parameter_name]
        owner[id(parameter)].state[parameter][key] = shard_like(value, parameter)
