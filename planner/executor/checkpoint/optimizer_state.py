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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.communication.sharding import Shard, Sharding, divided
from planner.formats.files import GrownRecord, Record, replace
from planner.model.tensor.dimensions import Cut
from planner.model.tensor.division import divided_weights, is_divided, own_memory, own_rows


def to_json(value: Any, place: str) -> Any:
    """Return `value` in JSON's types; raise InputError for one of another type, which `place`
    names.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
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
        part = self.part
        where = (
            "" if part is None or part.slice is None else f", {part.slice.place} of {part.slice.of}"
        )
        ending = (
            {}
            if part is None
            else dict.fromkeys(part.tensors, f"[{part.start}:{part.stop}{where}]")
        )
        return {key: f"{parameter}.{key}{ending.get(key, '')}" for key in self.tensors}


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
    division = divided_weights(module)
    groups: list[ParameterGroup] = []
    states: dict[str, ParameterState] = {}
    tensors: dict[str, Tensor] = {}
    for parameters, stepped, packed_group in _groups(optimizer, packed, sharding):
        hyperparameters = {
            key: to_json(value, f"the optimizer's '{key}'")
            for key, value in packed_group.items()
            if key not in ("params", "param_names")
        }
        own = tuple(names[parameter] for parameter in parameters)
        groups.append(ParameterGroup(parameters=own, hyperparameters=hyperparameters))
        for number, (parameter, shard) in stepped.items():
            name = names[parameter]
            state = packed["state"].get(number, {})
            if shard is not None and shard.is_master:
                state = state | {_MASTER: shard.stepped.data}
            if not state:
                continue
            kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            values = {
                k: to_json(v, f"the optimizer's '{k}' of '{name}'")
                for k, v in state.items()
                if k not in kept
            }
            part = None
            if shard is None or shard.whole:
                kept = {
                    k: division.whole(name, v) if v.shape == parameter.shape else v
                    for k, v in kept.items()
                }
            else:
                sliced = None
                if (group := division.group) is not None and (
                    cut := division.cuts.get(name)
                ) is not None:
                    sliced = Slice(
                        place=group.place,
                        of=group.degree,
                        dimension=cut.dimension,
                        blocks=cut.blocks,
                    )
                of_shard = tuple(
                    key for key, value in kept.items() if value.shape == shard.stepped.shape
                )
                part = StatePart(
                    start=shard.start,
                    stop=shard.stop,
                    order=shard.order,
                    tensors=of_shard,
                    slice=sliced,
                )
            if division.is_first_rank or (part is not None and part.slice is not None):
                states[name] = ParameterState(tensors=tuple(kept), values=values, part=part)
                tensors.update(
                    {stored: kept[key] for key, stored in states[name].stored(name).items()}
                )
    kind = type(optimizer).__name__
    state = OptimizerState(
        kind=kind, learning_rate_factor=learning_rate_factor, groups=tuple(groups), states=states
    )
    return state, tensors


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
    first = {
        name: names[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    hyperparameters: dict[str, dict[str, Any]] = {}
    # of groups of which this part of the model has no parameter
    by_place: dict[int, dict[str, Any]] = {}
    states: dict[str, list[tuple[str, ParameterState]]] = {}
    for part in saved:
        if part.kind != (kind := type(optimizer).__name__):
            problem = (
                f"the checkpoint has the state of {part.kind}, but the model file's "
                f"optimizer is {kind}"
            )
            raise InputError(problem, hint=SAME_OPTIMIZER)
        for index, group in enumerate(part.groups):
            values = {key: from_json(value) for key, value in group.hyperparameters.items()}
            values = rescale_rates(values, learning_rate_factor / part.learning_rate_factor)
            hyperparameters |= {first.get(name, name): values for name in group.parameters}
            if len(part.groups) == len(optimizer.param_groups):
                by_place[index] = values
        for name, state in part.states.items():
            before = states.setdefault(first.get(name, name), [])
            if state.part is None or (before and before[-1][1].part is None):
                before.clear()
            before.append((name, state))
    packed = optimizer.state_dict()
    division = divided_weights(module)
    packed["state"] = {}
    for index, (parameters, stepped, packed_group) in enumerate(
        _groups(optimizer, packed, sharding)
    ):
        common = _common([names[parameter] for parameter in parameters], hyperparameters)
        packed_group.update(common if parameters else by_place.get(index, {}))
        for number, (parameter, shard) in stepped.items():
            name = names[parameter]
            if name not in states:
                continue
            shape = division.whole_shape(name, parameter.shape)
            found = _joined(states[name], read, shape)
            for key, value in found.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    found[key] = division.part(name, value)
            master = found.pop(_MASTER, None)
            if shard is not None and shard.is_master and master is not None:
                shard.stepped.data.copy_(shard.cut_from(master))
            elif master is not None:
                own_memory(parameter).data.copy_(
                    master[own_rows(parameter)] if is_divided(parameter) else master
                )
            if found:
                packed["state"][number] = found if shard is None else divided(found, shard)
    optimizer.load_state_dict(packed)


def _joined(
    parts: Sequence[tuple[str, ParameterState]], read: Callable[[str], Tensor], shape: Sequence[int]
) -> dict[str, Any]:
    """Return the state of a whole parameter from parts, each with the name it was saved under; the
    last one counts.
    """
    name, last = parts[-1]
    of_part = () if last.part is None else last.part.tensors
    found = {key: read(stored) for key, stored in last.stored(name).items() if key not in of_part}
    found |= {key: from_json(value) for key, value in last.values.items()}
    if last.part is None:
        return found
    cut = Cut(0)
    slices = [last.part.slice]
    own_shape = list(shape)
    if (sliced := last.part.slice) is not None:
        cut = Cut(sliced.dimension, sliced.blocks)
        slices = [replace(sliced, place=place) for place in range(sliced.of)]
        own_shape[cut.dimension] //= sliced.of
    for key in of_part:
        wholes = []
        for place in slices:
            like = last.part.order, place
            alike = [
                (n, s, s.part) for n, s in parts if s.part and (s.part.order, s.part.slice) == like
            ]
            elements = [(part, read(state.stored(called)[key])) for called, state, part in alike]
            wholes.append(_whole(name, elements, own_shape))
        found[key] = wholes[0] if sliced is None else cut.whole(wholes)
    return found


def _whole(name: str, parts: Sequence[tuple[StatePart, Tensor]], shape: Sequence[int]) -> Tensor:
    end = 0
    elements = math.prod(shape)
    for part in sorted((part for part, _ in parts), key=lambda part: part.start):
        end = max(end, part.stop) if part.start <= end else end
    if end < elements:
        problem = (
            f"the checkpoint has the optimizer's state of only some elements of '{name}': "
            f"{end} is missing"
        )
        raise InputError(problem, hint="resume from another checkpoint")
    flat = torch.empty(elements, dtype=parts[0][1].dtype)
    for part, own in parts:
        flat[part.start : part.stop] = own
    order = parts[0][0].order
    laid_out = flat.view([shape[dimension] for dimension in order])
    return laid_out.permute([order.index(dimension) for dimension in range(len(order))])


def _groups(
    optimizer: Optimizer, packed: Mapping[str, Any], sharding: Sharding | None
) -> Iterator[
    tuple[Sequence[nn.Parameter], dict[int, tuple[nn.Parameter, Shard | None]], dict[str, Any]]
]:
    shards = (
        {} if sharding is None else {shard.stepped: shard for shard in sharding.shards.values()}
    )
    for index, (group, packed_group) in enumerate(
        zip(optimizer.param_groups, packed["param_groups"], strict=True)
    ):
        stepped = {}
        for number, own in zip(packed_group["params"], group["params"], strict=True):
            shard = shards.get(own)
            stepped[number] = (own if shard is None else shard.parameter, shard)
        yield group["params"] if sharding is None else sharding.groups[index], stepped, packed_group


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


def _common(names: list[str], hyperparameters: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    for name in names:
        if name not in hyperparameters:
            problem = (
                f"the checkpoint's optimizer did not train '{name}', but the model file's does"
            )
            raise InputError(problem, hint=SAME_OPTIMIZER)
        for key, value in hyperparameters[names[0]].items():
            if (other := hyperparameters[name].get(key)) != value:
                problem = (
                    f"'{name}' was trained with {key} = {other}, '{names[0]}' with "
                    f"{value}; now they are a group"
                )
                raise InputError(
                    problem,
                    hint="resume with a plan that cuts the model as before, or with other groups",
                )
    return hyperparameters[names[0]] if names else {}
