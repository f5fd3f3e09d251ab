"""Trained weights for the user's own, unsplit model: from a checkpoint, or a file that `save_weights` named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.folders import find
from planner.executor.checkpoint.index import load_checkpoint
from planner.executor.checkpoint.read_parts import read_weights
from planner.executor.checkpoint.tensor_file import SUFFIX, read_tensors, write_tensors
from planner.formats.files import replacing


@dataclass(frozen=True)
class Exported:
    """What `export_weights` wrote."""

    checkpoint: Path  # read
    path: Path  # written
    tensors: int  # parameters and buffers; tied ones count once for each of their names
    size_bytes: int  # of the file
    minibatch: int  # after which the checkpoint was written


def export_weights(checkpoint: str | Path, path: str | Path) -> Exported:
    """Write a checkpoint's parameters and buffers to one safetensors file, under the names in the model.

    The file has tied parameters under every name, so that `model.load_state_dict` accepts it.

    Args:
        checkpoint: a checkpoint, or a folder of checkpoints, whose newest is taken.
        path: of the file; an existing one is replaced.

    Raises:
        InputError: when there is no checkpoint, or a file of it is damaged.
        PlannerError: when the file cannot be written; an existing one is left as it was.
    """
    saved, path = load_checkpoint(find(Path(checkpoint))), Path(path)
    weights = read_weights(saved.path, saved.first_replicas)
    try:
        with replacing(path) as temporary:
            written = write_tensors(temporary, weights)
    except OSError as cause:
        raise PlannerError(
            f"the weights cannot be written to '{path}': {cause.strerror or cause}", hint="choose another path"
        ) from None
    return Exported(saved.path, path, len(weights), written.size_bytes, saved.index.minibatch)


def read_trained(path: str | Path) -> dict[str, Tensor]:
    """Read parameters and buffers by their names in the model: a state dict for `model.load_state_dict`.

    Nothing that is read is ever executed.

    Args:
        path: a checkpoint or a folder of checkpoints, a .safetensors file, or a file that `save_weights` named.

    Raises:
        InputError: when there is no such file or folder, or it is damaged.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        saved = load_checkpoint(find(path))
        return read_weights(saved.path, saved.first_replicas)
    if path.suffix == SUFFIX:
        return read_tensors(path)
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError):
        raise InputError(
            f"'{path}' is no complete file of tensors",
            hint="give a checkpoint, a .safetensors file, or a file that training wrote with `save_weights`",
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(
            f"'{path}' holds no state dict of tensors", hint="give a file that training wrote with `save_weights`"
        )
    return state


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Overwrite all parameters and buffers of `model`, the user's own, unsplit model, with trained ones.

    Raises:
        InputError: when there are no weights at `path`, or they are damaged or another model's; `model` is then
            unchanged.
    """
    saved, own = read_trained(path), model.state_dict(keep_vars=True)
    hint = "build the model as the model file did when it was trained"
    # All checks come before the first copy, so that a failure leaves the model unchanged.
    for names, where in ((own.keys() - saved.keys(), "the model"), (saved.keys() - own.keys(), f"'{path}'")):
        if names:
            raise InputError(f"'{min(names)}' is only in {where}: '{path}' has the weights of another model", hint=hint)
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            raise InputError(
                f"'{name}' has the shape {tuple(saved[name].shape)} in '{path}' and {tuple(tensor.shape)} in the model",
                hint=hint,
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
