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

    @property
    def is_any(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.weights) or self.optimizer is not None


def content_of(own: Restorable) -> Content:
    """Return what is saved of one stage replica; all ranks that divide its weights call it.

    The first of these ranks has what they gather, and what they have alike; of an optimizer that replicas divide, too,
    each has its own part.

    Raises:
        InputError: when the model or optimizer has state that no checkpoint can hold.
    """
    first, division = own.replica == 0, divided_weights(own.module)
    weights = whole_state(own.module) if first else _buffers(own.module)
    weights = weights if division.speaks else {}
    if own.optimizer is None or not (first or own.sharding is not None):
        return Content(weights, None, {})
    optimizer, kept = take_state(own.optimizer, own.module, own.learning_rate_factor, own.sharding)
    shapes = {name: parameter.shape for name, parameter in own.module.named_parameters()}
    states = {}
    for name, state in optimizer.states.items():
        names = state.stored(name).values()
        if state.part is None:
            whole = {each: division.whole(name, kept[each]) for each in names if kept[each].shape == shapes[name]}
            kept |= whole
        if division.speaks or (state.part is not None and state.part.slice is not None):
            states[name] = state
    if not (states or division.speaks):
        return Content({}, None, {})
    kept = {each: kept[each] for name, state in states.items() for each in state.stored(name).values()}
    return Content(weights, optimizer.model_copy(update={"states": states}), kept)


def write_part(folder: Path, own: Restorable, content: Content | None = None) -> StagePart:
    """Write the files of one stage replica to `folder`, and return what is in them.

    Args:
        content: if that is known already.

    Raises:
        InputError: when the model or optimizer has state that no checkpoint can hold.
        OSError: when the disk is full or the folder cannot be written.
    """
    content = content or content_of(own)
    division = divided_weights(own.module)
    first = own.replica == 0 and division.speaks
    rank = "" if division.group is None or division.speaks else f"-rank-{division.group.place}"
    stem = f"stage-{own.stage}" + ("" if own.replica == 0 else f"-replica-{own.replica}") + rank
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
