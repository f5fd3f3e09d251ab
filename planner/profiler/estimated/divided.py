"""Estimate layers that groups of ranks divide between them: the model of one rank is built, and traced like any other.

Its modules have the parts of their weights that one rank has: see `planner.model.tensor.plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from planner.errors import CaptureError, InputError, ModelFileError
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Layer, Profile
from planner.model.spec import TrainingSpec
from planner.model.tensor.plan import COLUMNS, ROWS, Plan, style_of


def of_one_rank(training_spec: TrainingSpec, plan: Plan, degree: int) -> TrainingSpec:
    """Return what one of so many ranks trains."""
    build = training_spec.functions["build_model"]

    def build_model() -> nn.Module:
        model: nn.Module = build()
        for name, module in model.named_modules():
            if (style := style_of(plan, name)) in COLUMNS + ROWS:
                _shrink(name, module, 1 if style in ROWS and isinstance(module, nn.Linear) else 0, degree)
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
    rows, columns = ([_has(layer, plan, styles) for layer in whole.layers] for styles in (ROWS, COLUMNS))
    sizes = (sum(value.output_bytes for value in layer.outputs) for layer in part.layers)
    forward = [size * flag for size, flag in zip(sizes, rows, strict=True)]
    backward = _summed_gradients(whole, part, columns)
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


def _summed_gradients(whole: Profile, part: Profile, divided: Sequence[bool]) -> list[int]:
    """Return the gradients of each layer's inputs that the ranks sum up: once each, at the first layer that divides.

    Values of which a rank has a part are no such inputs.
    """
    sizes, of_whole = (
        {(layer.name, value.name): value.gradient_bytes for layer in profile.layers for value in layer.outputs}
        for profile in (part, whole)
    )
    seen, found = set[tuple[str, str]](), list[int]()
    for layer, flag in zip(part.layers, divided, strict=True):
        entering = {(edge.source, edge.value) for edge in part.edges if edge.target == layer.name} if flag else set()
        found.append(sum(sizes[value] for value in entering - seen if sizes[value] == of_whole[value]))
        seen |= entering
    return found


def _has(layer: Layer, plan: Plan, styles: Collection[str]) -> bool:
    modules = {name.rpartition(".")[0] for name in layer.parameters}
    return any(style_of(plan, module) in styles for module in modules)


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
