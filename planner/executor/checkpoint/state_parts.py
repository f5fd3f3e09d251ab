"""An optimizer's state of one parameter in parts: each replica that divides the optimizer writes its own.

A part is of consecutive elements in the order of the parameter's memory. Which order that was, the part says: another
plan may lay the parameter out in another way, or divide it at other elements, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.executor.checkpoint.json_values import from_json
from planner.executor.communication.sharding import Shard, divided
from planner.formats.files import GrownRecord
from planner.model.tensor.dimensions import Cut


class Slice(GrownRecord):
    """Which of several equal slices of a parameter a rank has; see `planner.model.tensor.dimensions.Cut`."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"blocks"})

    place: int
    of: int
    dimension: int
    blocks: tuple[int, ...] = ()


class StatePart(GrownRecord):
    """Which elements of a parameter, or of a rank's slice of it, a replica's state is of."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"slice"})

    start: int
    stop: int
    order: tuple[int, ...]  # the parameter's dimensions from the outermost in memory to the innermost
    tensors: tuple[str, ...]  # keys of those that are of these elements; all others are of the whole parameter
    slice: Slice | None = None  # None where the elements are of the whole parameter


class ParameterState(GrownRecord):
    """Optimizer state of one parameter: the keys of its tensors, and all other values."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"part"})

    tensors: tuple[str, ...]
    values: dict[str, Any]
    part: StatePart | None = None  # None: of all of its elements

    def stored(self, parameter: str) -> dict[str, str]:
        """Return, by key, the names in the file of the tensors that the optimizer keeps for `parameter`."""
        part = self.part
        where = "" if part is None or part.slice is None else f", {part.slice.place} of {part.slice.of}"
        ending = {} if part is None else dict.fromkeys(part.tensors, f"[{part.start}:{part.stop}{where}]")
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
    if shard is None or part is None or part.order != shard.order or part.slice is not None:
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
        cut, of = Cut(0), 1
        if (sliced := last.part.slice) is not None:
            cut, of = Cut(sliced.dimension, sliced.blocks), sliced.of
        shape = [size // of if each == cut.dimension else size for each, size in enumerate(parameter.shape)]
        slices = [_of_slice(parts, last.part, place) for place in range(of)]
        some = of == 1 and shard is not None and shard.order == last.part.order
        needed = range(shard.start, shard.stop) if some and shard is not None else range(math.prod(shape))
        for own in slices:
            _check_complete(name, [part for part, _ in own], needed)
        for key in divided_keys:
            wholes = [_whole([(part, tensors[stored[key]]) for part, stored in own], shape) for own in slices]
            found[key] = wholes[0] if of == 1 else cut.whole(wholes)
    found |= {key: from_json(value) for key, value in last.values.items()}
    return found if shard is None else divided(found, shard)


def _of_slice(
    parts: Sequence[tuple[str, ParameterState]], like: StatePart, place: int
) -> list[tuple[StatePart, dict[str, str]]]:
    """Return the parts in the order of `like` that are of one of its slices, each with the names of its tensors."""
    found = [(state.part, state.stored(name)) for name, state in parts if state.part is not None]
    wanted = None if like.slice is None else like.slice.model_copy(update={"place": place})
    return [(part, stored) for part, stored in found if part.order == like.order and part.slice == wanted]


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


def _whole(parts: Sequence[tuple[StatePart, Tensor]], shape: Sequence[int]) -> Tensor:
    """Return a tensor of the shape; where no part has elements, it has no values."""
    flat = torch.empty(math.prod(shape), dtype=parts[0][1].dtype)
    order: tuple[int, ...] = ()
    for part, elements in parts:
        order = part.order
        flat[part.start : part.stop] = elements
    laid_out = flat.view([shape[dimension] for dimension in order])
    return laid_out.permute([order.index(dimension) for dimension in range(len(order))])
