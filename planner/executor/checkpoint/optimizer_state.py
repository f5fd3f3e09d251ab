"""Optimizer state by parameter name, so that it does not depend on which parameters share an optimizer.

A stage's optimizer numbers its parameters, and another plan gives it other parameters. Its state for a parameter
(momentum, step counts) belongs to that parameter alone, and so do the hyperparameters of the parameter's group.
Replicas that divide the optimizer write their parts of it, and read whatever parts there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.checkpoint.json_values import from_json, to_json
from planner.executor.checkpoint.state_parts import ParameterState, Slice, joined, part_of
from planner.executor.communication.sharding import Shard, Sharding, divided
from planner.formats.files import Record
from planner.model.tensor.division import divided_weights

SAME_OPTIMIZER = "give the model file the optimizer() that the run began with"


class ParameterGroup(Record):
    """Parameters with the same hyperparameters."""

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any]  # see planner.executor.checkpoint.json_values


class OptimizerState(Record):
    """State of one stage's optimizer, without its tensors."""

    kind: str  # the optimizer's class
    learning_rate_factor: float = 1.0  # learning rates here relative to the user's
    groups: tuple[ParameterGroup, ...]
    states: dict[str, ParameterState]


def take_state(
    optimizer: Optimizer, module: nn.Module, learning_rate_factor: float = 1.0, sharding: Sharding | None = None
) -> tuple[OptimizerState, dict[str, Tensor]]:
    """Return the state of `module`'s optimizer, and its tensors by `ParameterState.stored`; they are not copied.

    Args:
        optimizer: of `module`'s parameters.
        learning_rate_factor: learning rate relative to the user's.
        sharding: how replicas divide the optimizer; None where this one has all of it.

    Raises:
        InputError: when the optimizer has state that no checkpoint can hold.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    packed, division = optimizer.state_dict(), divided_weights(module)
    numbered: dict[int, _Stepped] = {}
    groups = []
    for group in _groups(optimizer, packed, sharding):
        numbered.update(group.stepped)
        own = tuple(names[id(parameter)] for parameter in group.parameters)
        groups.append(ParameterGroup(parameters=own, hyperparameters=_hyperparameters(group.packed)))
    tensors: dict[str, Tensor] = {}
    states: dict[str, ParameterState] = {}
    for number, state in packed["state"].items():
        name, shard = names[id(numbered[number].parameter)], numbered[number].shard
        kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values = {k: to_json(v, f"the optimizer's '{k}' of '{name}'") for k, v in state.items() if k not in kept}
        part = None if shard is None or shard.whole else part_of(state, shard)
        if part is not None and division.group is not None and (cut := division.cuts.get(name)) is not None:
            sliced = Slice(place=division.group.place, of=division.group.degree, **asdict(cut))
            part = part.model_copy(update={"slice": sliced})
        states[name] = ParameterState(tensors=tuple(kept), values=values, part=part)
        tensors.update({stored: kept[key] for key, stored in states[name].stored(name).items()})
    kind = type(optimizer).__name__
    state = OptimizerState(kind=kind, learning_rate_factor=learning_rate_factor, groups=tuple(groups), states=states)
    return state, tensors


def give_state(
    optimizer: Optimizer,
    module: nn.Module,
    saved: Iterable[OptimizerState],
    tensors: Mapping[str, Tensor],
    learning_rate_factor: float = 1.0,
    sharding: Sharding | None = None,
) -> None:
    """Restore `module`'s optimizer from `saved`, the states of one or more stages.

    Args:
        optimizer: of `module`'s parameters.
        saved: states that together have all of the optimizer's parameters, under names in `module`.
        tensors: by `ParameterState.stored`; the optimizer may keep them without a copy.
        learning_rate_factor: learning rate relative to the user's.
        sharding: how replicas divide the optimizer; None where this one has all of it.

    Raises:
        InputError: when the optimizer is another than the one saved, or a part of its state is missing.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    # A tied parameter may have been saved under another of its names.
    first = {name: names[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
    hyperparameters: dict[str, dict[str, Any]] = {}
    states: dict[str, list[tuple[str, ParameterState]]] = {}
    for part in saved:
        if part.kind != type(optimizer).__name__:
            raise InputError(
                f"the checkpoint has the state of {part.kind}, but the model file's optimizer is "
                f"{type(optimizer).__name__}",
                hint=SAME_OPTIMIZER,
            )
        for group in part.groups:
            values = {key: from_json(value) for key, value in group.hyperparameters.items()}
            values = rescale_rates(values, learning_rate_factor / part.learning_rate_factor)
            hyperparameters |= {first.get(name, name): values for name in group.parameters}
        for name, state in part.states.items():
            before = states.setdefault(first.get(name, name), [])
            if state.part is None or (before and before[-1][1].part is None):
                before.clear()
            before.append((name, state))
    packed, division = optimizer.state_dict(), divided_weights(module)
    packed["state"] = {}
    for own in _groups(optimizer, packed, sharding):
        own.packed.update(_common([names[id(parameter)] for parameter in own.parameters], hyperparameters))
        for number, stepped in own.stepped.items():
            if parts := states.get(names[id(stepped.parameter)]):
                name, parameter = names[id(stepped.parameter)], stepped.parameter
                whole = torch.empty(division.whole_shape(name, parameter.shape), device="meta")
                if name not in division.cuts:
                    packed["state"][number] = joined(parts, tensors, whole, stepped.shard)
                    continue
                found = joined(parts, tensors, whole, None)
                for key, value in found.items():
                    if isinstance(value, Tensor) and value.shape == whole.shape:
                        found[key] = division.part(name, value)
                packed["state"][number] = found if stepped.shard is None else divided(found, stepped.shard)
    optimizer.load_state_dict(packed)


class _Stepped(NamedTuple):
    """A parameter, and the shard of it that the optimizer steps; None where it steps the parameter."""

    parameter: nn.Parameter
    shard: Shard | None


class _Group(NamedTuple):
    parameters: Sequence[nn.Parameter]  # on all replicas
    stepped: dict[int, _Stepped]  # here, by their numbers in the packed state
    packed: dict[str, Any]


def _groups(optimizer: Optimizer, packed: Mapping[str, Any], sharding: Sharding | None) -> Iterator[_Group]:
    shards = {} if sharding is None else {shard.stepped: shard for shard in sharding.shards.values()}
    for index, (group, packed_group) in enumerate(zip(optimizer.param_groups, packed["param_groups"], strict=True)):
        stepped = {
            number: _Stepped(shards[own].parameter, shards[own]) if own in shards else _Stepped(own, None)
            for number, own in zip(packed_group["params"], group["params"], strict=True)
        }
        yield _Group(group["params"] if sharding is None else sharding.groups[index], stepped, packed_group)


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


def _hyperparameters(packed_group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: to_json(value, f"the optimizer's '{key}'")
        for key, value in packed_group.items()
        if key not in ("params", "param_names")
    }


def _common(names: list[str], hyperparameters: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters that all of `names`, one group's parameters, were trained with."""
    for name in names:
        if name not in hyperparameters:
            raise InputError(
                f"the checkpoint's optimizer did not train '{name}', but the model file's does",
                hint=SAME_OPTIMIZER,
            )
        for key, value in hyperparameters[names[0]].items():
            if hyperparameters[name].get(key) != value:
                raise InputError(
                    f"'{name}' was trained with {key} = {hyperparameters[name].get(key)}, '{names[0]}' with {value}, "
                    "and now they share a group of the optimizer",
                    hint="resume with a plan that cuts the model as the checkpoint's did, or with other groups",
                )
    return hyperparameters[names[0]] if names else {}
