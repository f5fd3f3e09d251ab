"""What one worker writes of a checkpoint: a part for each of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from planner.executor.checkpoint.index import StagePart, TensorFile
from planner.executor.checkpoint.json_values import to_json
from planner.executor.checkpoint.optimizer_state import take_state
from planner.executor.checkpoint.tensor_file import write_tensors


class Stateful(Protocol):
    """Anything that goes on where it was, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, and lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take what `state_dict` gave."""
        ...


@dataclass
class Restorable:
    """What of one stage replica is saved and restored."""

    stage: int
    replica: int
    module: nn.Module
    optimizer: Optimizer | None
    learning_rate_factor: float = 1.0  # of the user's rates
    extras: Mapping[str, Stateful] = field(default_factory=dict)


def has_part(own: Restorable) -> bool:
    """A further replica has the parameters of the first, but buffers of its own."""
    return own.replica == 0 or bool(_buffers(own.module))


def write_part(folder: Path, own: Restorable) -> StagePart:
    """Write the files of one stage replica to `folder`, and say what is in them.

    Raises:
        InputError: when the model or optimizer keeps what no checkpoint can hold.
        OSError: when the disk is full or the folder cannot be written.
    """
    state = own.module.state_dict() if own.replica == 0 else _buffers(own.module)
    tensors, aliases = _distinct(state)
    stem = f"stage-{own.stage}" + (f"-replica-{own.replica}" if own.replica else "")
    part = StagePart(
        stage=own.stage,
        replica=own.replica,
        weights=_write_file(folder, f"{stem}.weights.safetensors", tensors),
        aliases=aliases,
        extras={},
    )
    if own.replica == 0:
        extras = {
            name: to_json(stateful.state_dict(), f"the state of the {name}") for name, stateful in own.extras.items()
        }
        part = part.model_copy(update={"extras": extras})
        if own.optimizer is not None:
            optimizer, kept = take_state(own.optimizer, own.module, own.learning_rate_factor)
            file = _write_file(folder, f"{stem}.optimizer.safetensors", kept)
            part = part.model_copy(update={"optimizer": optimizer, "optimizer_file": file})
    return part


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and the other names of tied ones."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor
    return tensors, aliases


def _write_file(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> TensorFile:
    written = write_tensors(folder / name, tensors)
    return TensorFile(name=name, size_bytes=written.size_bytes, sha256=written.sha256, tensors=tuple(tensors))
