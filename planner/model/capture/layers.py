"""Operations of the flat graph -> layers.

A layer is what one call of a leaf module does. Operations that a larger module does itself start a layer of their own
when they are heavy (a matrix product, attention, a pooling); light ones (activations, additions, reshapes) join the
layer before them, behind which a cut is rarely worse. What must not be cut apart is joined afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from planner.model.capture.fake_run import Observed
from planner.model.capture.graph import GraphLayer
from planner.model.capture.names import MODEL, Names

_LOSS = None  # the scope of what the loss function does

# Light as well, though neither element-wise nor a view by their declaration.
_LIGHT = (
    "cat stack lift_fresh_copy dropout feature_dropout alpha_dropout hardswish mean sum masked_fill where type_as tril "
    "triu rsub empty_like zeros_like ones_like full_like new_full new_zeros new_ones repeat_interleave"
)


@dataclass
class _Run:
    """Consecutive operations on their way to a layer."""

    scope: str | None
    call: str  # a module that is called twice makes two layers
    name: str
    op: str
    nodes: list[fx.Node]


def group_layers(
    module: fx.GraphModule,
    model: nn.Module,
    names: Names,
    observed: Observed,
    operations: Sequence[fx.Node],
    can_cross: Callable[[fx.Node], bool],
    loss: fx.Node,
    *,
    adopt_unused: bool = True,
) -> tuple[GraphLayer, ...]:
    """Layers in execution order; each operation is in one.

    Args:
        module: the flat graph.
        model: the user's.
        names: of its parameters and buffers.
        observed: which operations share memory.
        operations: those that must be in a layer; the others are numbers that each stage computes itself.
        can_cross: whether the result of an operation can be sent to another stage.
        loss: no cut is possible after it.
        adopt_unused: whether weights that no operation reads belong to some layer as well.
    """
    runs = _runs(operations, model)
    owner = {node: index for index, run in enumerate(runs) for node in run.nodes}
    spans = [
        *_spans_of_uncrossable(owner, can_cross),
        *_spans_of_writes(module, owner, observed),
        (owner[loss], len(runs) - 1),
    ]
    merged = _merge(runs, spans)
    layers = [_layer(run, names) for run in _unique_names(merged)]
    return _adopt_unused(layers, names) if adopt_unused else tuple(layers)


def _runs(operations: Sequence[fx.Node], model: nn.Module) -> list[_Run]:
    scopes = {node: _scope(node) for node in operations}
    last_of_model = max((i for i, node in enumerate(operations) if scopes[node] is not _LOSS), default=-1)
    inner = {scope for scope in scopes.values() if scope}
    leaves = {scope for scope in inner if not any(other.startswith(scope + ".") for other in inner)}
    runs: list[_Run] = []
    pending: list[fx.Node] = []  # light operations that open a module: they go with what follows

    def start(scope: str | None, name: str, op: str, node: fx.Node) -> None:
        runs.append(_Run(scope, _call(node), name, op, [*pending, node]))
        pending.clear()

    for index, node in enumerate(operations):
        scope = scopes[node]
        if scope is _LOSS and index > last_of_model:
            if runs and runs[-1].scope is _LOSS:
                runs[-1].nodes.append(node)
            else:
                start(_LOSS, "loss", "loss", node)
        elif scope in leaves and scope:
            if runs and runs[-1].call == _call(node) and not pending:
                runs[-1].nodes.append(node)
            else:
                start(scope, scope, type(model.get_submodule(scope)).__name__, node)
        elif not _is_light(node):
            start(scope or "", _join(scope or "", _op_name(node)), "aten." + _op_name(node), node)
        elif runs and not pending and _encloses(scope or "", runs[-1].scope):
            runs[-1].nodes.append(node)
        else:
            pending.append(node)
    if pending and runs:
        runs[-1].nodes += pending
    elif pending:
        start("", "forward", "forward", pending.pop())
    return runs


def _scope(node: fx.Node) -> str | None:
    """Path of the innermost module that ran `node`; None for the loss function."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    inside = [path for path in paths if path == MODEL or path.startswith(MODEL + ".")]
    return inside[-1].removeprefix(MODEL).removeprefix(".").split("@")[0] if inside else _LOSS


def _call(node: fx.Node) -> str:
    """Which call of which module ran `node`: the tracer numbers them."""
    return str(next(reversed(node.meta.get("nn_module_stack", {"": None}))))


def _encloses(scope: str, other: str | None) -> bool:
    return other is not None and (scope == "" or other == scope or other.startswith(scope + "."))


def _op_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def _is_light(node: fx.Node) -> bool:
    """Whether an operation is element-wise, a view, made from nothing, listed, or about indices and masks."""
    target = node.target
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)
    schema = target._schema
    return (
        torch.Tag.pointwise in target.tags
        or any(returned.alias_info is not None for returned in schema.returns)
        or not any("Tensor" in str(argument.type) for argument in schema.arguments)
        or _op_name(node).rstrip("_") in _LIGHT.split()
    )


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def _spans_of_uncrossable(owner: dict[fx.Node, int], can_cross: Callable[[fx.Node], bool]) -> Iterable[tuple[int, int]]:
    """From each operation whose result cannot be sent to the last one that uses it."""
    for node, index in owner.items():
        last = max((owner[user] for user in node.users if user in owner), default=index)
        if last > index and not can_cross(node):
            yield index, last


def _spans_of_writes(
    module: fx.GraphModule, owner: dict[fx.Node, int], observed: Observed
) -> Iterable[tuple[int, int]]:
    """From each value to the last operation that writes its memory; for buffers and inputs, all that use it."""
    held = {s for node in module.graph.nodes if node.op in ("get_attr", "placeholder") for s in observed.storages[node]}
    for storage in {storage for node in owner for storage in observed.writes[node]}:
        writers = [index for node, index in owner.items() if storage in observed.writes[node]]
        touching = [
            index
            for node, index in owner.items()
            if storage in observed.storages[node]
            or any(storage in observed.storages[argument] for argument in node.all_input_nodes)
        ]
        yield min(touching), max(touching if storage in held else writers)


def _merge(runs: list[_Run], spans: Iterable[tuple[int, int]]) -> list[_Run]:
    joined = {index for first, last in spans for index in range(first + 1, last + 1)}
    merged: list[_Run] = []
    parts = 1
    for index, run in enumerate(runs):
        if index not in joined:
            merged.append(run)
            parts = 1
            continue
        before = merged[-1]
        before.nodes += run.nodes
        parts += 1
        if parts <= 3:
            before.op += "+" + run.op
        elif parts == 4:
            before.op += "+..."
    return merged


def _unique_names(runs: list[_Run]) -> list[_Run]:
    taken = {run.name for run in runs}
    seen: set[str] = set()
    for run in runs:
        if run.name in seen:
            number = 2
            while f"{run.name}_{number}" in taken:
                number += 1
            run.name = f"{run.name}_{number}"
            taken.add(run.name)
        seen.add(run.name)
    return runs


def _layer(run: _Run, names: Names) -> GraphLayer:
    reads = [argument for node in run.nodes for argument in node.all_input_nodes]
    return GraphLayer(
        name=run.name,
        op=run.op,
        nodes=tuple(run.nodes),
        parameters=tuple(dict.fromkeys(n for node in reads if (n := names.parameter(node)) is not None)),
        buffers=tuple(dict.fromkeys(n for node in reads if (n := names.buffer(node)) is not None)),
    )


def _adopt_unused(layers: list[GraphLayer], names: Names) -> tuple[GraphLayer, ...]:
    """Give what no operation reads to the layer whose name is closest, so that all stages' states are the model's."""
    parameters, buffers = names.all()
    used = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    adopted: dict[int, tuple[list[str], list[str]]] = {}
    for kind, unused in enumerate((parameters, buffers)):
        for name in unused:
            if name not in used:
                closest = max(range(len(layers)), key=lambda i: (_shared_parts(layers[i].name, name), -i))
                adopted.setdefault(closest, ([], []))[kind].append(name)
    return tuple(
        GraphLayer(
            layer.name, layer.op, layer.nodes, (*layer.parameters, *adopted[i][0]), (*layer.buffers, *adopted[i][1])
        )
        if i in adopted
        else layer
        for i, layer in enumerate(layers)
    )


def _shared_parts(one: str, other: str) -> int:
    count = 0
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            break
        count += 1
    return count
