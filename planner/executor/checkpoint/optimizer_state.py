"""Optimizer state by parameter name, so that it does not depend on which parameters share an
optimizer.

Replicas that divide the optimizer each write their part: consecutive elements in the order of the
parameter's memory, which the part names. Another plan may lay the parameter out or divide it in
another way: it reads whatever parts there are.

What optimizers and schedulers keep beside tensors goes through JSON without loss. Tuples,
infinities and keys that are no strings become objects with one key that names the type. All other
types are refused: reading never makes an object of a class that a file names.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.communication.sharding import Shard, Sharding, divided
from planner.formats.files import GrownRecord, Record, replace
from planner.model.tensor.dimensions import Cut
from planner.model.tensor.division import (
    DividedWeights,
    divided_weights,
    is_divided,
    own_memory,
    own_rows,
)


def to_json(value: Any, place: str) -> Any:
    """Return `value` in JSON's types; raise InputError for one of another type, which `place`
    names.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isfinite(value):
                return value
            return {"float": str(value)}
        case tuple():
            return {"tuple": [to_json(item, place) for item in value]}
        case list():
            return [to_json(item, place) for item in value]
        case dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {
                kind: [[to_json(key, place), to_json(item, place)] for key, item in value.items()]
            }
        case Tensor() if value.numel() == 1:
            # Exact for every floating-point dtype: a Python float is a float64, and JSON keeps all
            # its digits.
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [dtype, list(value.shape), to_json(value.item(), place)]}

    problem = f"{place} is a {type(value).__name__}, which a checkpoint cannot hold"
    raise InputError(problem, hint="it holds numbers, strings, tuples, lists, dicts and tensors")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given; raise ValueError when `to_json` cannot have
    returned `value`.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [from_json(item) for item in value]
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(from_json(item) for item in items)
        case {"dict": list(pairs)}:
            return {from_json(key): from_json(item) for key, item in pairs}
        case {"counter": list(pairs)}:
            return Counter({from_json(key): from_json(item) for key, item in pairs})
        case {"tensor": [str(dtype), list(shape), item]} if isinstance(
            getattr(torch, dtype, None), torch.dtype
        ):
            return torch.tensor(from_json(item), dtype=getattr(torch, dtype)).reshape(shape)

    raise ValueError(f"{value!r} is not a value of a checkpoint")


_MASTER = "master"  # the key of a weight in float32, beside what the optimizer keeps
SAME_OPTIMIZER = "give the model file the optimizer() that the run began with"


class Slice(GrownRecord):
    """Which of several equal slices of a parameter a rank has; see
    `planner.model.tensor.dimensions.Cut`.
    """

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
    # the parameter's dimensions from the outermost in memory to the innermost
    order: tuple[int, ...]
    # keys of those that are of these elements; all others are of the whole parameter
    tensors: tuple[str, ...]
    slice: Slice | None = None  # None where the elements are of the whole parameter

    @property
    def ending(self) -> str:
        """The end of the names of its tensors in the file: "[0:8]", "[0:8, 1 of 2]" of a slice."""
        if self.slice is None:
            return f"[{self.start}:{self.stop}]"
        return f"[{self.start}:{self.stop}, {self.slice.place} of {self.slice.of}]"


class ParameterState(GrownRecord):
    """Optimizer state of one parameter: the keys of its tensors, and all other values."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"part"})

    tensors: tuple[str, ...]
    values: dict[str, Any]
    part: StatePart | None = None  # None: of all of its elements

    def stored(self, parameter: str) -> dict[str, str]:
        """Return, by key, the names in the file of the tensors that the optimizer keeps for
        `parameter`.
        """
        names = {key: f"{parameter}.{key}" for key in self.tensors}
        if self.part is None:
            return names

        of_part = names.keys() & set(self.part.tensors)
        return names | {key: names[key] + self.part.ending for key in of_part}


class ParameterGroup(Record):
    """A group of parameters, by their names, with its hyperparameters."""

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any]  # see `to_json`


class OptimizerState(Record):
    """The state of an optimizer in a checkpoint's index; its tensors are in a file beside."""

    kind: str  # the optimizer's class
    learning_rate_factor: float = 1.0  # learning rates here relative to the user's
    groups: tuple[ParameterGroup, ...]
    states: dict[str, ParameterState]


def take_state(
    optimizer: Optimizer,
    module: nn.Module,
    learning_rate_factor: float = 1.0,
    sharding: Sharding | None = None,
) -> tuple[OptimizerState, dict[str, Tensor]]:
    """Return the state of `module`'s optimizer, and its tensors by `ParameterState.stored`; they
    are not copied.

    Ranks that divide the module's weights all call it. The first of them has what they gather, and
    what they have alike; of an optimizer that replicas divide, too, each has its own part.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    _check_held(optimizer, packed)
    division = divided_weights(module)

    groups: list[ParameterGroup] = []
    states: dict[str, ParameterState] = {}
    tensors: dict[str, Tensor] = {}
    for group in _groups(optimizer, packed, sharding):
        groups.append(_saved_group(group, names))

        for stepped in group.stepped:
            state = packed["state"].get(stepped.number, {})
            if stepped.shard is not None and stepped.shard.is_master:
                state = state | {_MASTER: stepped.shard.stepped.data}
            if not state:
                continue

            name = names[stepped.parameter]
            saved, kept = _saved_state(name, stepped, state, division)
            has_slice = saved.part is not None and saved.part.slice is not None
            if division.is_first_rank or has_slice:
                states[name] = saved
                tensors |= {stored: kept[key] for key, stored in saved.stored(name).items()}

    saved_optimizer = OptimizerState(
        kind=type(optimizer).__name__,
        learning_rate_factor=learning_rate_factor,
        groups=tuple(groups),
        states=states,
    )
    return saved_optimizer, tensors


def _check_held(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Raise InputError for state that belongs to no parameter, which no stage could take."""
    count = sum(len(group["params"]) for group in packed["param_groups"])
    numbers = range(count)
    others = [key for key in packed if key not in ("state", "param_groups")]
    others += [key for key in packed["state"] if key not in numbers]
    if others:
        raise InputError(
            f"{type(optimizer).__name__} has '{others[0]}' beside the state of its parameters, "
            f"which a checkpoint does not hold",
            hint="keep it in the groups of the optimizer, or in the state of each parameter",
        )


def _saved_group(group: "_Group", names: Mapping[nn.Parameter, str]) -> ParameterGroup:
    hyperparameters = {
        key: to_json(value, f"the optimizer's '{key}'")
        for key, value in group.packed.items()
        if key not in ("params", "param_names")
    }
    own = tuple(names[parameter] for parameter in group.parameters)
    return ParameterGroup(parameters=own, hyperparameters=hyperparameters)


def _saved_state(
    name: str, stepped: "_Stepped", state: Mapping[str, Any], division: DividedWeights
) -> tuple[ParameterState, dict[str, Tensor]]:
    """Return what a checkpoint has of a parameter's state, and its tensors by their keys; all ranks
    that divide the parameter call it.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    values = {
        key: to_json(value, f"the optimizer's '{key}' of '{name}'")
        for key, value in state.items()
        if key not in tensors
    }

    part = None
    if stepped.shard is None or stepped.shard.whole:
        for key, value in tensors.items():
            if value.shape == stepped.parameter.shape:
                tensors[key] = division.whole(name, value)
    else:
        part = _part_of(stepped.shard, tensors, _slice_of(name, division))

    return ParameterState(tensors=tuple(tensors), values=values, part=part), tensors


def _part_of(shard: Shard, tensors: Mapping[str, Tensor], sliced: Slice | None) -> StatePart:
    of_shard = tuple(key for key, value in tensors.items() if value.shape == shard.stepped.shape)
    return StatePart(
        start=shard.start, stop=shard.stop, order=shard.order, tensors=of_shard, slice=sliced
    )


def _slice_of(name: str, division: DividedWeights) -> Slice | None:
    """Return which slice of a parameter this rank has; None where it has the whole."""
    cut = division.cuts.get(name)
    if division.group is None or cut is None:
        return None
    return Slice(
        place=division.group.place,
        of=division.group.degree,
        dimension=cut.dimension,
        blocks=cut.blocks,
    )


def give_state(
    optimizer: Optimizer,
    module: nn.Module,
    saved: Iterable[OptimizerState],
    read: Callable[[str], Tensor],
    learning_rate_factor: float = 1.0,
    sharding: Sharding | None = None,
) -> None:
    """Restore `module`'s optimizer from `saved`, the states of one or more stages that have all of
    its parameters.

    `read` returns a tensor by its name of `ParameterState.stored`; one parameter's are in memory at
    a time. Raise InputError when the optimizer is another than the one saved, or a part of its
    state is missing.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    # A tied parameter may have been saved under another of its names.
    names_here = {
        name: names[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    saved_states = _collected(saved, optimizer, names_here, learning_rate_factor)
    division = divided_weights(module)

    packed = optimizer.state_dict()
    packed["state"] = {}
    for index, group in enumerate(_groups(optimizer, packed, sharding)):
        if group.parameters:
            own = [names[parameter] for parameter in group.parameters]
            group.packed.update(_common(own, saved_states.hyperparameters))
        else:
            group.packed.update(saved_states.by_place.get(index, {}))

        for stepped in group.stepped:
            name = names[stepped.parameter]
            if name not in saved_states.of_parameters:
                continue
            shape = division.whole_shape(name, stepped.parameter.shape)
            state = _joined(saved_states.of_parameters[name], read, shape)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    state[key] = division.part(name, value)

            master = state.pop(_MASTER, None)
            if master is not None:
                _restore_master(stepped, master)
            if state:
                shard = stepped.shard
                packed["state"][stepped.number] = state if shard is None else divided(state, shard)

    optimizer.load_state_dict(packed)
    _keep_types(optimizer, packed["state"])


def _keep_types(optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Let state have the types that it was saved with: PyTorch gives it those of the parameters,
    and some optimizers keep it in fewer bits.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, saved in states.items():
        state = optimizer.state[parameters[number]]
        for key, value in saved.items():
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


@dataclass(frozen=True)
class _SavedStates:
    """What the stages of a checkpoint have of an optimizer, by the names of parameters here."""

    hyperparameters: dict[str, dict[str, Any]]
    # of groups, by their places, of which this part of the model may have no parameter
    by_place: dict[int, dict[str, Any]]
    # parts of a parameter's state, each with the name that it was saved under
    of_parameters: dict[str, list[tuple[str, ParameterState]]]


def _collected(
    saved: Iterable[OptimizerState],
    optimizer: Optimizer,
    names_here: Mapping[str, str],
    learning_rate_factor: float,
) -> _SavedStates:
    collected = _SavedStates({}, {}, {})
    for stage in saved:
        _check_kind(stage, optimizer)
        ratio = learning_rate_factor / stage.learning_rate_factor

        for index, group in enumerate(stage.groups):
            values = {key: from_json(value) for key, value in group.hyperparameters.items()}
            values = rescale_rates(values, ratio)
            for name in group.parameters:
                collected.hyperparameters[names_here.get(name, name)] = values
            if len(stage.groups) == len(optimizer.param_groups):
                collected.by_place[index] = values

        for name, state in stage.states.items():
            parts = collected.of_parameters.setdefault(names_here.get(name, name), [])
            # The state of a whole parameter stands alone; the last one counts.
            if state.part is None or (parts and parts[-1][1].part is None):
                parts.clear()
            parts.append((name, state))

    return collected


def _check_kind(saved: OptimizerState, optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if saved.kind != kind:
        raise InputError(
            f"the checkpoint has the state of {saved.kind}, but the model file's optimizer is "
            f"{kind}",
            hint=SAME_OPTIMIZER,
        )


def _restore_master(stepped: "_Stepped", master: Tensor) -> None:
    """Set a parameter, or what a replica steps of it, to the float32 weights of a checkpoint."""
    if stepped.shard is not None and stepped.shard.is_master:
        stepped.shard.stepped.data.copy_(stepped.shard.cut_from(master))
        return

    parameter = stepped.parameter
    rows = master
    if is_divided(parameter):
        rows = master[own_rows(parameter)]
    own_memory(parameter).data.copy_(rows)


def _joined(
    parts: Sequence[tuple[str, ParameterState]], read: Callable[[str], Tensor], shape: Sequence[int]
) -> dict[str, Any]:
    """Return the state of a whole parameter from parts, each with the name it was saved under; the
    last one counts.
    """
    name, last = parts[-1]
    of_part = () if last.part is None else last.part.tensors
    state = {key: read(stored) for key, stored in last.stored(name).items() if key not in of_part}
    state |= {key: from_json(value) for key, value in last.values.items()}
    if last.part is not None:
        state |= {key: _joined_tensor(key, parts, last.part, read, shape) for key in of_part}
    return state


def _joined_tensor(
    key: str,
    parts: Sequence[tuple[str, ParameterState]],
    like: StatePart,
    read: Callable[[str], Tensor],
    shape: Sequence[int],
) -> Tensor:
    """Return a tensor of a parameter's state from the parts that are laid out as `like` is."""

    def elements(place: Slice | None) -> list[tuple[StatePart, Tensor]]:
        return [
            (state.part, read(state.stored(name)[key]))
            for name, state in parts
            if state.part is not None
            and state.part.order == like.order
            and state.part.slice == place
        ]

    name, _ = parts[-1]
    if like.slice is None:
        return _whole(name, elements(None), shape)

    cut = Cut(like.slice.dimension, like.slice.blocks)
    own_shape = list(shape)
    own_shape[cut.dimension] //= like.slice.of
    slices = [replace(like.slice, place=place) for place in range(like.slice.of)]
    return cut.whole([_whole(name, elements(place), own_shape) for place in slices])


def _whole(name: str, parts: Sequence[tuple[StatePart, Tensor]], shape: Sequence[int]) -> Tensor:
    """Return the tensor of this shape whose elements the parts have; raise InputError where they
    lack some.
    """
    elements = math.prod(shape)
    end = 0  # what comes before it is there
    for part in sorted((part for part, _ in parts), key=lambda part: part.start):
        if part.start <= end:
            end = max(end, part.stop)

    if end < elements:
        problem = (
            f"the checkpoint has the optimizer's state of only some elements of '{name}': "
            f"{end} is missing"
        )
        raise InputError(problem, hint="resume from another checkpoint")

    flat = torch.empty(elements, dtype=parts[0][1].dtype)
    for part, own in parts:
        flat[part.start : part.stop] = own

    # `order` names the dimensions as they lie in memory.
    order = parts[0][0].order
    laid_out = flat.view([shape[dimension] for dimension in order])
    return laid_out.permute([order.index(dimension) for dimension in range(len(order))])


@dataclass(frozen=True)
class _Stepped:
    """A parameter whose state an optimizer has, of all of it or of a replica's shard."""

    number: int  # as the optimizer's `state_dict()` numbers it
    parameter: nn.Parameter
    shard: Shard | None


@dataclass(frozen=True)
class _Group:
    """A group of parameters, those of them that this replica steps, and the group's entry in the
    optimizer's `state_dict()`.
    """

    parameters: Sequence[nn.Parameter]
    stepped: list[_Stepped]
    packed: dict[str, Any]


def _groups(
    optimizer: Optimizer, packed: Mapping[str, Any], sharding: Sharding | None
) -> Iterator[_Group]:
    """Yield the groups of an optimizer whose `state_dict()` is `packed`."""
    shards: dict[nn.Parameter, Shard] = {}
    if sharding is not None:
        shards = {shard.stepped: shard for shard in sharding.shards.values()}

    entries = zip(optimizer.param_groups, packed["param_groups"], strict=True)
    for index, (group, packed_group) in enumerate(entries):
        stepped = []
        for number, own in zip(packed_group["params"], group["params"], strict=True):
            shard = shards.get(own)
            parameter = own if shard is None else shard.parameter
            stepped.append(_Stepped(number, parameter, shard))
        if sharding is None:
            parameters = group["params"]
        else:
            parameters = sharding.groups[index]
        yield _Group(parameters, stepped, packed_group)


def rescale_rates(state: dict[str, Any], ratio: float) -> dict[str, Any]:
    """Return the state of a group or a scheduler with its learning rates multiplied by `ratio`."""
    if ratio == 1:
        return state
    scaled = dict(state)
    for key, value in state.items():
        if key in ("lr", "initial_lr"):
            scaled[key] = value * ratio
        elif key in ("base_lrs", "_last_lr"):
            scaled[key] = [rate * ratio for rate in value]
        elif key == "_schedulers":  # SequentialLR and ChainedScheduler hold others
            scaled[key] = [rescale_rates(inner, ratio) for inner in value]

    return scaled


def _common(names: Sequence[str], hyperparameters: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters that parameters of one group were all saved with."""
    first = names[0]
    for name in names:
        if name not in hyperparameters:
            problem = (
                f"the checkpoint's optimizer did not train '{name}', but the model file's does"
            )
            raise InputError(problem, hint=SAME_OPTIMIZER)

        for key, value in hyperparameters[first].items():
            other = hyperparameters[name].get(key)
            if other != value:
                raise InputError(
                    f"'{name}' was trained with {key} = {other}, '{first}' with {value}; now they "
                    f"are a group",
                    hint="resume with a plan that cuts the model as before, or with other groups",
                )

    return hyperparameters[first]
