"""Writing one worker's parts of a checkpoint: one part for each of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from planner.executor.checkpoint.index import StagePart, TensorFile
from planner.executor.checkpoint.json_values import to_json
from planner.executor.checkpoint.optimizer_state import OptimizerState, take_state
from planner.executor.checkpoint.tensor_file import write_tensors
from planner.executor.communication.sharding import Sharding
from planner.model.tensor.division import divided_weights, whole_state


class Stateful(Protocol):
    """Anything that continues from a saved state, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings, and lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Continue from what `state_dict` returned."""
        ...


@dataclass
class Restorable:
    """What is saved and restored of one stage replica."""

    stage: int
    replica: int
    module: nn.Module
    optimizer: Optimizer | None
    learning_rate_factor: float = 1.0  # learning rate relative to the user's
    sharding: Sharding | None = None  # how replicas divide the optimizer
    extras: Mapping[str, Stateful] = field(default_factory=dict)


def has_part(own: Restorable) -> bool:
    """Return whether a stage replica has anything to write.

    Replicas have equal parameters, which the first one writes, but each has buffers of its own, and may have its part
    of the optimizer's state.
    """
    return own.replica == 0 or own.sharding is not None or bool(_buffers(own.module))


class Content(NamedTuple):
    """What is saved of one stage replica, with weights whole."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState | None
    optimizer_tensors: Mapping[str, Tensor]


def content_of(own: Restorable) -> Content:
    """Return what is saved of one stage replica; all ranks that divide its weights call it.

    Raises:
        InputError: when the model or optimizer has state that no checkpoint can hold.
    """
    first = own.replica == 0
    weights = whole_state(own.module) if first else _buffers(own.module)
    if own.optimizer is None or not (first or own.sharding is not None):
        return Content(weights, None, {})
    optimizer, kept = take_state(own.optimizer, own.module, own.learning_rate_factor, own.sharding)
    shapes = {name: parameter.shape for name, parameter in own.module.named_parameters()}
    division = divided_weights(own.module)
    for name, state in optimizer.states.items():
        for stored in state.stored(name).values():
            if kept[stored].shape == shapes[name]:
                kept[stored] = division.whole(name, kept[stored])
    return Content(weights, optimizer, kept)


def write_part(folder: Path, own: Restorable, content: Content | None = None) -> StagePart:
    """Write the files of one stage replica to `folder`, and return what is in them.

    Args:
        content: if that is known already.

    Raises:
        InputError: when the model or optimizer has state that no checkpoint can hold.
        OSError: when the disk is full or the folder cannot be written.
    """
    content = content or content_of(own)
    first = own.replica == 0
    stem = f"stage-{own.stage}" + ("" if first else f"-replica-{own.replica}")
    tensors, aliases = distinct(content.weights)
    weights = _write_file(folder, f"{stem}.weights.safetensors", tensors)
    file = None
    extras: dict[str, Any] = {}
    if first:
        extras = {name: to_json(each.state_dict(), f"the state of the {name}") for name, each in own.extras.items()}
    if content.optimizer is not None:
        file = _write_file(folder, f"{stem}.optimizer.safetensors", content.optimizer_tensors)
    return StagePart(
        stage=own.stage,
        replica=own.replica,
        weights=weights,
        aliases=aliases,
        optimizer=content.optimizer,
        optimizer_file=file,
        extras=extras,
    )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and by further name of a tied tensor its first one."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        # Not by identity: state_dict() detaches, so tied parameters come as several tensors over one memory.
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
