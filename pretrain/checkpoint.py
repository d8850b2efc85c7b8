"""Save and load the state of a run, atomically.

`checkpoints/step-00001000/` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and,
written last, `manifest.json` with the sha256 of the others. The loop only copies the tensors. A
thread writes the copies to a temporary folder, hashes and syncs what it has written, renames the
folder, and only then removes older checkpoints. A run renames a checkpoint that does not match its
manifest to `.corrupt`, and uses the one before it. Checkpoints hold no pickle, and no generator
state, since all random numbers are a function of the step.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import hash_file, remove_entry
from data_pipeline.common.reading import COUNT, SHA256, check_regular, read_json
from data_pipeline.common.system import start_thread
from pretrain.sharding import shard_like, unshard
from pretrain.tracking import to_json

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
NAME = re.compile(r"step-(\d{8,})(?:\.old)?")  # nine digits from step 100,000,000 on
PHASE = {"start": COUNT, "end": COUNT, "schedule_start": COUNT, "max_steps?": COUNT}
PHASE |= {"warmup_steps?": COUNT, "decay_steps?": (COUNT, None), "learning_rate?": float}
MONITOR = {  # of `Monitor.state`
    **dict.fromkeys(("skipped?", "in_a_row?", "above?", "rollbacks?", "rolled_back_at?"), COUNT),
    **{"norms?": [float], "losses?": [float], "loss?": float, "said?": [str]},
    "went_back_to?": (NAME, None),
}
STATE = {  # shape of state.json of any schema
    "step": COUNT,
    "running_sums?": [[(float, None)]],
    "window?": [(float, None)],
    "evaluation?": {str: (float, None)},
    "evaluation_due?": bool,
    "evaluated_step?": COUNT,
    "micro_batch_size?": COUNT,
    "part_sizes?": [[COUNT]],
    "longest?": [COUNT],
    "new_heads?": [str],
    "monitor?": MONITOR,
    "restarted?": bool,
}
HASHES = {"vocab_sha256": str, "data_sha256": str}
STATES = (  # schema 1 had a contract
    STATE | {"fingerprint": HASHES | {"schema?": COUNT, "phases?": [PHASE]}},
    STATE | {"contract": HASHES},
)


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict,
    keep: int,
    keep_every: int | None = None,
    writes: bool = True,
) -> Future | None:
    """Copy the state of a run, and start a thread that writes it by `write_checkpoint`.

    A collective call, since tensors may be sharded; only the process with `writes` writes, and gets
    a future of the folder. All processes can continue training at once.
    """
    tensors = [tensors_of(model.state_dict(), writes)]
    tensors.append(tensors_of(optimizer_state(model, optimizers), writes))
    if not writes:
        return None
    final, text = folder / f"step-{state['step']:08d}", to_json(state, indent=1) + "\n"
    return start_thread(write_checkpoint, final, *tensors, text, keep, keep_every)


def write_checkpoint(
    final: Path,
    model_tensors: dict[str, torch.Tensor],
    optimizer_tensors: dict[str, torch.Tensor],
    state: str,
    keep: int,
    keep_every: int | None,
) -> Path:
    """Write the checkpoint `final`, then remove all but the newest `keep` of its folder, and those
    of every `keep_every`th step.

    Raises `UserError` if a tensor is not finite, or if writing fails, as on a full disk; earlier
    checkpoints stay.
    """
    folder = final.parent
    if sick := name_not_finite(model_tensors | optimizer_tensors):
        good = last_good(folder)
        raise UserError(
            f"{sick} is not finite at step {step_of(final):,}, so no checkpoint is written; the "
            f"last good one is {good.name if good else 'none'}. Lower train.learning_rate or "
            "lengthen train.warmup_steps, in another run_dir"
        )
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if not folder.parent.is_dir():  # a new one would have neither the record nor the vocabulary
        raise UserError(
            f"no checkpoint at {final}: {folder.parent} was moved or removed; put it back, and run "
            "the same command again"
        )
    temporary.mkdir(parents=True)
    tensors = [*model_tensors.values(), *optimizer_tensors.values()]
    wanted = sum(t.numel() * t.element_size() for t in tensors) + (1 << 20)
    free = shutil.disk_usage(folder).free
    try:
        if free < wanted:
            raise OSError("disk full")
        save_file(model_tensors, temporary / FILES[0])
        save_file(optimizer_tensors, temporary / FILES[1])
        (temporary / FILES[2]).write_text(state)
        for name in FILES[:2]:  # safetensors makes its files unreadable to other users
            (temporary / name).chmod((temporary / FILES[2]).stat().st_mode)
        manifest = {name: hash_file(temporary / name) for name in FILES}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        is_limit = "File too large" in str(error)  # of safetensors, without a number
        advice = "raise the limit on the size of a file (ulimit -f), or " if is_limit else ""
        kept = "; earlier checkpoints are kept" if list_checkpoints(folder) else ""
        raise UserError(
            f"no checkpoint at {final}: {error} ({wanted / 1e6:,.1f} MB needed, {free / 1e6:,.1f} "
            f"MB free); {advice}free space and run the same command again{kept}"
        ) from None
    before = final.with_name(final.name + ".old")  # of the same step, if its evaluation was due
    if final.exists():
        remove_entry(before)
        final.rename(before)
    temporary.rename(final)
    sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        if not keep_every or step_of(old) % keep_every:
            shutil.rmtree(old, ignore_errors=True)  # tried again next time, if in use
    return final


def step_of(checkpoint: Path) -> int:
    """Read the number of steps done from the name of a checkpoint."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def name_not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """Name the first tensor that holds NaN or an infinity, or return None."""
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def tensors_of(state: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Copy unsharded tensors to the CPU, one at a time; returns none of them unless `keep`."""
    tensors = ((name, unshard(tensor.detach()).contiguous()) for name, tensor in state.items())
    # Copies on a CPU too, since the next steps change the tensors during the write. Copies from a
    # GPU do not block; torch uses page-locked memory for them.
    copies = {n: t.to("cpu", copy=True, non_blocking=True) for n, t in tensors if keep}
    if torch.cuda.is_initialized():  # not if a run on a CPU leaves a GPU unused
        torch.cuda.synchronize()
    return copies


def optimizer_state(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Collect the optimizers' states as `PARAMETER/KEY` -> tensor."""
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
    """List the checkpoint folders, oldest first; other files and links are ignored.

    Raises OSError if `folder` cannot be read, since it may contain some, and `UserError` if it is a
    link to a missing folder, such as a disk that is not mounted.
    """
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"{folder} is a link to {os.readlink(folder)}, which does not exist; nothing was "
            "changed, so run the same command again once it does, or remove the link"
        )
    paths = folder.iterdir() if folder.exists() else ()
    found = [p for p in paths if NAME.fullmatch(p.name) and not p.is_symlink()]
    return sorted(found, key=lambda path: (step_of(path), path.suffix == ""))


def list_others(folder: Path) -> list[Path]:
    """List former checkpoints, such as damaged ones, and stand-ins for one, such as links."""
    known = list_checkpoints(folder)
    return [p for p in sorted(folder.glob("step-*")) if p not in known and p.suffix != ".tmp"]


def find_fault(checkpoint: Path) -> str | None:
    """Check a checkpoint against its manifest; returns the fault, or None.

    Raises `UserError` if a file exists but cannot be read, or is a pipe or a device: that says
    nothing about what was written.
    """
    try:
        for name in ("manifest.json", *FILES):
            check_regular(checkpoint / name)
        try:
            manifest = read_json(checkpoint / "manifest.json", dict.fromkeys(FILES, SHA256), "")
        except UserError:
            return "manifest.json is not what was written"
        for name in FILES:
            if hash_file(checkpoint / name) != manifest[name]:
                return f"{name} is not what was written"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise UserError(
            f"{error.filename or checkpoint} cannot be read: {error.strerror}; nothing was "
            "changed, so run the same command again once it can be read"
        ) from None
    return None


def find_sound(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest intact checkpoint, or None, and the faults of those after it."""
    faults: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(folder)):
        fault = find_fault(checkpoint)
        if fault is None:
            return checkpoint, faults
        faults[checkpoint] = fault
    return None, faults


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest intact checkpoint, or None; warns of damaged ones, and changes nothing."""
    found, faults = find_sound(folder)
    for checkpoint, fault in faults.items():
        print(f"warning: {checkpoint} is damaged ({fault})")
    return found


def last_good(
    folder: Path, latest: float = math.inf, passed_over: Sequence[int] = ()
) -> Path | None:
    """Find the newest intact checkpoint whose last step was not skipped, or None.

    latest: maximum step. passed_over: steps whose weights a run has dropped.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        step = step_of(checkpoint)
        if step <= latest and step not in passed_over and find_fault(checkpoint) is None:
            if not read_state(checkpoint).get("monitor", {}).get("in_a_row"):
                return checkpoint
    return None


def resume_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint to resume from, or None in a new run.

    Damaged ones after it are renamed, with a warning. Raises `UserError` if all of them are
    damaged, and renames none, so that no run goes back to step 0 by itself.
    """
    found, faults = find_sound(folder)
    listed = [f"{checkpoint.name} ({fault})" for checkpoint, fault in faults.items()]
    listed += [path.name for path in list_others(folder)]
    if found is None and listed:
        raise UserError(
            f"no checkpoint in {folder} is intact: {', '.join(listed)}; put an intact copy of one "
            "back, or set train.restart=true to start at step 0, which moves them to another "
            "folder"
        )
    for path in folder.glob("step-*.tmp"):  # of a start that was killed while it wrote
        shutil.rmtree(path, ignore_errors=True)
    for checkpoint, fault in faults.items():
        aside = checkpoint.with_name(checkpoint.name + ".corrupt")
        remove_entry(aside)
        checkpoint.rename(aside)
        print(f"warning: {checkpoint} is damaged ({fault}); set aside as {aside.name}")
    return found


def read_state(checkpoint: Path) -> dict:
    """Read the `state` that `save_checkpoint` was given; raises `UserError` if it is another."""
    return read_json(checkpoint / "state.json", STATES, "put an intact copy of the checkpoint back")


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a file; raises `UserError` if it is damaged."""
    check_regular(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}; put an intact copy back") from None


def load_model(checkpoint: Path, model: torch.nn.Module) -> None:
    """Load the weights; raises `UserError` if their shapes differ from the model's.

    Drops the heads that the model lacks: runs without sentence pairs once kept them, untrained.
    """
    weights, own = load_tensors(checkpoint / "model.safetensors"), model.state_dict()
    for name in list(weights):
        if name in own:
            weights[name] = shard_like(weights[name], own[name])
        elif name.startswith(("pooler.", "nsp.")):
            del weights[name]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{checkpoint} holds a model of another shape: {reason}") from None


def load_optimizers(
    checkpoint: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Load the states of the optimizers from a checkpoint, replacing their own.

    Raises `UserError` if they belong to another model or optimizer: fused kernels do not check
    shapes, and would write beyond a tensor that is too small.
    """
    parameters = dict(model.named_parameters())
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    path, states = checkpoint / "optimizer.safetensors", {}
    for name, value in load_tensors(path).items():
        parameter_name, _, key = name.partition("/")
        states.setdefault(parameter_name, {})[key] = value
    for optimizer in optimizers:
        optimizer.state.clear()  # a checkpoint from before the pairs has none of their heads
    for name, state in states.items():
        parameter = parameters.get(name)
        optimizer = owner.get(id(parameter))
        if optimizer is None:
            raise UserError(
                f"{path} has {name}, which the model does not have; it belongs to another model"
            )
        found = {key: (value.shape, value.dtype) for key, value in state.items()}
        if found != state_shapes(optimizer, parameter):
            kind = type(optimizer).__name__
            raise UserError(
                f"{path} has {', '.join(state)} of {name} that do not fit {kind} or its shape "
                f"{tuple(parameter.shape)}; put an intact copy of the checkpoint back"
            )
        for key, value in state.items():
            # a copy, since a tensor of `load_file` keeps the file mapped
            optimizer.state[parameter][key] = shard_like(value.clone(), parameter)


def state_shapes(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Tell which tensors an optimizer keeps of a parameter: key -> (shape, type)."""
    whole = parameter.shape, torch.float32
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": whole}
    return {"step": (torch.Size(), torch.float32), "exp_avg": whole, "exp_avg_sq": whole}
