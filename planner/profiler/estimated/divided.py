"""Estimate layers that groups of ranks divide between them: the model of one rank is built, and traced like any other.

Which modules are divided, the model says: a model file by `tensor_parallel_plan()`, models of transformers by their
`tp_plan`. Both name modules by patterns, as in `{"model.layers.*.mlp.up_proj": "colwise"}`. A "colwise" product has a
part of the outputs on each rank, and its ranks sum up the gradients of its input; a "rowwise" one has a part of the
inputs, and they sum up its outputs, as do those of an embedding, each with a part of the vocabulary (Shoeybi et al.,
"Megatron-LM", 2019, section 3). What gathers its output, and what is not named, is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from planner.errors import CaptureError, InputError, ModelFileError
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Layer, Profile
from planner.model.spec import TrainingSpec

Plan = Mapping[str, str]  # how modules are divided, by patterns of their names
_COLUMNS, _ROWS = ("colwise",), ("rowwise", "embedding_rowwise")


def tensor_parallel_plan(training_spec: TrainingSpec, model: nn.Module) -> Plan:
    """Return how the model's modules are divided.

    Raises:
        InputError: if neither the model file nor the model says so.
    """
    if training_spec.defines("tensor_parallel_plan"):
        return training_spec.tensor_parallel_plan()
    for name, module in model.named_modules():
        if plan := getattr(module, "tp_plan", None):
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    raise InputError(
        f"the model '{training_spec.name}' does not say how its layers are divided",
        hint="write tensor_parallel_plan() into the model file, which returns patterns of module names and how each is "
        'divided, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}; or leave out `tensor`',
    )


def of_one_rank(training_spec: TrainingSpec, plan: Plan, degree: int) -> TrainingSpec:
    """Return what one of so many ranks trains."""
    build = training_spec.functions["build_model"]

    def build_model() -> nn.Module:
        model: nn.Module = build()
        for name, module in model.named_modules():
            if (style := _style(plan, name)) in _COLUMNS + _ROWS:
                _shrink(name, module, 1 if style in _ROWS and isinstance(module, nn.Linear) else 0, degree)
        return model

    return replace(training_spec, functions={**training_spec.functions, "build_model": build_model})


def degree_costs(whole: Profile, part: Profile, plan: Plan, degree: int) -> DegreeCosts:
    """Return the costs of a rank's layers, with what the ranks all-reduce.

    Args:
        whole: the profile of the undivided model.
        part: of one rank's.
        plan: how modules are divided.
        degree: ranks.

    Raises:
        InputError: if the rank's model has other layers.
    """
    if [layer.name for layer in part.layers] != [layer.name for layer in whole.layers]:
        raise InputError(
            f"the layers of '{whole.model}' on one of {degree} ranks are others than on one device",
            hint="leave out `tensor`",
        )
    rows, columns = ([_has(layer, plan, styles) for layer in whole.layers] for styles in (_ROWS, _COLUMNS))
    sizes = (sum(value.output_bytes for value in layer.outputs) for layer in part.layers)
    forward = [size * flag for size, flag in zip(sizes, rows, strict=True)]
    backward = _summed_gradients(part, columns)
    return DegreeCosts(
        degree=degree,
        source="estimated",
        forward_reduced_bytes=tuple(forward),
        backward_reduced_bytes=tuple(backward),
        forward_reduces=tuple(int(size > 0) for size in forward),
        backward_reduces=tuple(int(size > 0) for size in backward),
        **{name: tuple(getattr(layer, name) for layer in part.layers) for name in DEGREE_COLUMNS},
    )


def cannot_divide(name: str, degree: int, cause: CaptureError | ModelFileError) -> InputError:
    """Return the error for a model that does not run with the sizes of one rank."""
    return InputError(
        f"the model '{name}' does not run as one of {degree} ranks: {cause.message}",
        hint="let forward() take numbers of heads from shapes, as in x.view(*x.shape[:-1], -1, head_size); or leave "
        "out `tensor`",
    )


def _summed_gradients(profile: Profile, divided: Sequence[bool]) -> list[int]:
    """Return the gradients of each layer's inputs that the ranks sum up: once each, at the first layer that divides."""
    sizes = {(layer.name, value.name): value.gradient_bytes for layer in profile.layers for value in layer.outputs}
    seen, found = set[tuple[str, str]](), list[int]()
    for layer, flag in zip(profile.layers, divided, strict=True):
        entering = {(edge.source, edge.value) for edge in profile.edges if edge.target == layer.name} if flag else set()
        found.append(sum(sizes[value] for value in entering - seen))
        seen |= entering
    return found


def _has(layer: Layer, plan: Plan, styles: Collection[str]) -> bool:
    modules = {name.rpartition(".")[0] for name in layer.parameters}
    return any(_style(plan, module) in styles for module in modules)


def _style(plan: Plan, name: str) -> str | None:
    """Return how a module is divided; a star in a pattern stands for a number."""
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(name, plan.get(general))


def _shrink(name: str, module: nn.Module, dimension: int, degree: int) -> None:
    """Leave a module the part of its weights that one rank has."""
    for own, parameter in list(module.named_parameters(recurse=False)):
        if dimension and parameter.dim() == 1:
            continue  # the bias of a sum is added once
        whole = parameter.shape[dimension]
        if whole % degree:
            raise InputError(
                f"{degree} ranks cannot divide the {whole} {'inputs' if dimension else 'outputs'} of '{name}' evenly",
                hint="give smaller degrees in `tensor`",
            )
        part = parameter.detach().narrow(dimension, 0, whole // degree)
        setattr(module, own, nn.Parameter(part.clone(), requires_grad=parameter.requires_grad))
