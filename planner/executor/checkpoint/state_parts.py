"""An optimizer's state of one parameter in parts: each replica that divides the optimizer writes its own.

A part is of consecutive elements in the order of the parameter's memory. Which order that was, the part says: another
plan may lay the parameter out in another way, or divide it at other elements, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.executor.checkpoint.json_values import from_json
from planner.executor.communication.shards import Shard, divided
from planner.formats.files import GrownRecord, Record


class StatePart(Record):
    """Which elements of a parameter a replica's state is of."""

    start: int
    stop: int
    order: tuple[int, ...]  # the parameter's dimensions from the outermost in memory to the innermost
    tensors: tuple[str, ...]  # keys of those that are of these elements; all others are of the whole parameter


class ParameterState(GrownRecord):
    """Optimizer state of one parameter: the keys of its tensors, and all other values."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"part"})

    tensors: tuple[str, ...]
    values: dict[str, Any]
    part: StatePart | None = None  # None: of all of its elements

    def stored(self, parameter: str) -> dict[str, str]:
        """Return, by key, the names in the file of the tensors that the optimizer keeps for `parameter`."""
        part = self.part
        ending = {} if part is None else dict.fromkeys(part.tensors, f"[{part.start}:{part.stop}]")
        return {key: f"{parameter}.{key}{ending.get(key, '')}" for key in self.tensors}


def part_of(state: Mapping[str, Any], shard: Shard) -> StatePart:
    """Return which part of the whole state a shard's `state` is."""
    own = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shard.stepped.shape]
    return StatePart(start=shard.start, stop=shard.stop, order=shard.order, tensors=tuple(own))


def needs(state: ParameterState, parameter: nn.Parameter, shards: Mapping[nn.Parameter, Shard] | None) -> bool:
    """Return whether this replica reads a state of `parameter`: it has elements that the replica steps.

    Args:
        shards: what this replica steps, by parameter; None where it steps all of every parameter.
    """
    if shards is None:
        return True
    shard, part = shards.get(parameter), state.part
    if shard is None or part is None or part.order != shard.order:
        return shard is not None
    return part.start < shard.stop and shard.start < part.stop


def joined(
    parts: Sequence[tuple[str, ParameterState]],
    tensors: Mapping[str, Tensor],
    parameter: Tensor,
    shard: Shard | None,
) -> dict[str, Any]:
    """Return the state of a parameter, or of a shard of it, from one that is whole or from several parts.

    Args:
        parts: each with the parameter's name when it was saved; of elements that several have, the last one's count.
        tensors: by the names of `ParameterState.stored`.
        parameter: whose shape counts.
        shard: of it; None to step all of it.

    Raises:
        InputError: when elements are missing.
    """
    name, last = parts[-1]
    stored = last.stored(name)
    divided_keys = () if last.part is None else last.part.tensors
    found = {key: tensors[stored[key]] for key in last.tensors if key not in divided_keys}
    if last.part is not None:
        alike = [(n, state) for n, state in parts if state.part is not None and state.part.order == last.part.order]
        needed = range(parameter.numel())
        if shard is not None and shard.order == last.part.order:
            needed = range(shard.start, shard.stop)
        _check_complete(name, [state.part for _, state in alike if state.part is not None], needed)
        for key in divided_keys:
            found[key] = _whole([(state.part, tensors[state.stored(n)[key]]) for n, state in alike], parameter)
    found |= {key: from_json(value) for key, value in last.values.items()}
    return found if shard is None else divided(found, shard)


def _check_complete(name: str, parts: Sequence[StatePart], needed: range) -> None:
    end = needed.start
    for part in sorted(parts, key=lambda part: part.start):
        if part.start <= end:
            end = max(end, part.stop)
    if end < needed.stop:
        raise InputError(
            f"the checkpoint has the optimizer's state of only some elements of '{name}': element {end} is missing",
            hint="resume from another checkpoint",
        )


def _whole(parts: Sequence[tuple[StatePart | None, Tensor]], parameter: Tensor) -> Tensor:
    """Return a tensor of the parameter's shape; where no part has elements, it has no values."""
    flat = torch.empty(parameter.numel(), dtype=parts[0][1].dtype)
    order: tuple[int, ...] = ()
    for part, elements in parts:
        assert part is not None
        order = part.order
        flat[part.start : part.stop] = elements
    laid_out = flat.view([parameter.shape[dimension] for dimension in order])
    return laid_out.permute([order.index(dimension) for dimension in range(len(order))])
