"""Trained weights out of a run: from a checkpoint, or what --save-weights wrote, into the user's own, unsplit model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.index import find, load_index
from planner.executor.checkpoint.read_parts import read_weights
from planner.executor.checkpoint.tensor_file import read_tensors, write_tensors
from planner.formats.files import replacing

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Exported:
    """What `export_weights` wrote.

    Attributes:
        checkpoint: that it read.
        path: that it wrote.
        tensors: parameters and buffers, tied ones under each of their names.
        size_bytes: of the file.
        minibatch: after which the checkpoint was written.
    """

    checkpoint: Path
    path: Path
    tensors: int
    size_bytes: int
    minibatch: int


def export_weights(checkpoint: str | Path, path: str | Path) -> Exported:
    """Write a checkpoint's parameters and buffers to one safetensors file, under the names in the model.

    Tied parameters are in it under every name, so that `model.load_state_dict` takes it whole.

    Args:
        checkpoint: a checkpoint, or a folder of them, of which the newest is taken.
        path: of the file, which is replaced.

    Raises:
        InputError: when there is no checkpoint, or a file of it is damaged.
        PlannerError: when the file cannot be written; an older one is left as it was.
    """
    found, path = find(Path(checkpoint)), Path(path)
    index = load_index(found)
    weights = read_weights(found, [part for part in index.parts if part.replica == 0], None)
    try:
        with replacing(path) as temporary:
            written = write_tensors(temporary, weights)
    except OSError as cause:
        raise PlannerError(
            f"the weights cannot be written to '{path}': {cause.strerror or cause}", hint="choose another place with -o"
        ) from None
    return Exported(found, path, len(weights), written.size_bytes, index.minibatch)


def read_trained(path: str | Path) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the model; a state dict for `model.load_state_dict`.

    Args:
        path: a checkpoint or a folder of them, a .safetensors file, or a file of `plan train --save-weights`.

    Raises:
        InputError: when there is no such thing, or it is damaged. Nothing that is read is ever executed.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        found = find(path)
        return read_weights(found, [part for part in load_index(found).parts if part.replica == 0], None)
    if path.suffix == SUFFIX:
        return read_tensors(path)
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError):
        raise InputError(
            f"'{path}' is no complete file of tensors",
            hint="give a checkpoint, a .safetensors file, or what plan train --save-weights wrote",
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"'{path}' holds no state dict of tensors", hint="give what plan train --save-weights wrote")
    return state


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Overwrite all parameters and buffers of `model`, the user's own and unsplit, with trained ones.

    Args:
        model: as the model file builds it.
        path: see `read_trained`.

    Raises:
        InputError: when there are no weights at `path`, they are damaged, or they are another model's; the model is
            then as it was.
    """
    saved, own = read_trained(path), model.state_dict(keep_vars=True)
    for names, where in ((own.keys() - saved.keys(), "the model"), (saved.keys() - own.keys(), f"'{path}'")):
        if names:
            raise InputError(
                f"'{min(names)}' is only in {where}: '{path}' has the weights of another model",
                hint="build the model as the model file did when it was trained",
            )
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            raise InputError(
                f"'{name}' has the shape {tuple(saved[name].shape)} in '{path}' and {tuple(tensor.shape)} in the model",
                hint="build the model as the model file did when it was trained",
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
