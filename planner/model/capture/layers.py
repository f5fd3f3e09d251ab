"""Group the operations of a flat graph into layers.

A layer is what one call of a leaf module computes. An operation that a larger module calls itself
starts a layer when it is heavy (a matrix product, attention, a pooling); a light one joins the
layer before it. Layers are then joined around values that cannot be sent, around in-place writes,
and behind the loss.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import torch
from torch import fx, nn

from planner.model.capture.fake import TensorFacts
from planner.model.capture.graph import GraphLayer, ValueSpec
from planner.model.capture.joins import Span, cause_of_nesting, causes_of_joins, unsent, written
from planner.model.capture.operations import Names, scope_of
from planner.model.modes import is_training
from planner.model.torch_private import HigherOrderOperator, OpOverload

_LOSS = None  # the scope of the loss function's operations

# Light as well, although they are declared neither as element-wise nor as views.
_LIGHT = (
    "cat stack lift_fresh_copy dropout feature_dropout alpha_dropout hardswish mean sum "
    "masked_fill where type_as tril "
    "triu rsub empty_like zeros_like ones_like full_like new_full new_zeros new_ones "
    "repeat_interleave"
)


@dataclass
class _Run:
    scope: str | None
    call: str  # a module that is called twice makes two layers
    name: str
    op: str
    nodes: list[fx.Node]


def group_layers(
    model: nn.Module,
    module: fx.GraphModule,
    names: Names,
    facts: TensorFacts,
    operations: Sequence[fx.Node],
    specs: Mapping[fx.Node, ValueSpec],
    loss: fx.Node,
) -> tuple[GraphLayer, ...]:
    """Return the layers of an exported forward, in execution order; each of `operations` is in one.

    No cut is possible after `loss`. `specs` are of the values that can be sent to another stage.
    """
    runs = _runs(operations, model)
    owner = {node: index for index, run in enumerate(runs) for node in run.nodes}
    spans = [*_spans_of_writes(module, names, owner, facts), Span(owner[loss], len(runs) - 1)]
    # From each operation whose result cannot be sent to the last operation that uses it.
    for node, index in owner.items():
        if node not in specs:
            last = max((owner[user] for user in node.users if user in owner), default=index)
            spans.append(Span(index, last, unsent(node)))
    causes = causes_of_joins([len(run.nodes) for run in runs], spans)
    merged = _merge(runs, spans)
    taken, seen = {run.name for run, _ in merged}, set[str]()
    layers = []
    for run, first in merged:
        name = run.name
        if name in seen:
            name = next(
                other for number in count(2) if (other := f"{run.name}_{number}") not in taken
            )
            taken.add(name)
        seen.add(name)
        reads = [argument for node in run.nodes for argument in node.all_input_nodes]
        parameters = dict.fromkeys(n for node in reads if (n := names.parameter(node)) is not None)
        buffers = dict.fromkeys(n for node in reads if (n := names.buffer(node)) is not None)
        nodes = tuple(run.nodes)
        cause = causes.get(first) or cause_of_nesting(module, nodes, operations)
        layers.append(GraphLayer(name, run.op, nodes, tuple(parameters), tuple(buffers), cause))
    # In evaluation the stages have the weights that training gave them, whether an operation reads
    # them or not.
    return adopt_unused(layers, names) if is_training(model) else tuple(layers)


def _runs(operations: Sequence[fx.Node], model: nn.Module) -> list[_Run]:
    scopes = {node: scope_of(node) for node in operations}
    last_of_model = max(
        (i for i, node in enumerate(operations) if scopes[node] is not _LOSS), default=-1
    )
    # Leaves are modules within which no other module ran: what they do belongs together.
    inner = {scope for scope in scopes.values() if scope}
    leaves = {scope for scope in inner if not any(other.startswith(scope + ".") for other in inner)}
    runs: list[_Run] = []
    # light operations at the start of a module: they join the layer after them
    pending: list[fx.Node] = []
    for index, node in enumerate(operations):
        scope, call, name = scopes[node], _call(node), _op_name(node)
        last = runs[-1] if runs and not pending else None
        if scope is _LOSS and index > last_of_model:
            joins, new = (
                bool(runs) and runs[-1].scope is _LOSS,
                _Run(_LOSS, call, "loss", "loss", []),
            )
            last = runs[-1] if joins else None
        elif scope in leaves and scope:
            joins = last is not None and last.call == call
            new = _Run(scope, call, scope, type(model.get_submodule(scope)).__name__, [])
        else:
            place = scope or ""
            other = None if last is None else last.scope
            inside = other is not None and (place in ("", other) or other.startswith(place + "."))
            joins = _is_light(node) and inside
            new = _Run(place, call, f"{place}.{name}".removeprefix("."), "aten." + name, [])
            if _is_light(node) and not joins:
                pending.append(node)
                continue
        if joins and last is not None:
            last.nodes.append(node)
        else:
            new.nodes += [*pending, node]
            pending.clear()
            runs.append(new)
    if pending and not runs:
        runs.append(_Run("", _call(pending[0]), "forward", "forward", []))
    if pending:
        runs[-1].nodes += pending
    return runs


def _call(node: fx.Node) -> str:
    """Return which call of which module ran `node`: the tracer numbers the calls."""
    return str(next(reversed(node.meta.get("nn_module_stack", {"": None}))))


def _op_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def _is_light(node: fx.Node) -> bool:
    """Return whether an operation is element-wise, a view, a constant, listed, or on indices and
    masks.
    """
    target = node.target
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)
    schema = target._schema
    return (
        torch.Tag.pointwise in target.tags
        or any(returned.alias_info is not None for returned in schema.returns)
        or not any("Tensor" in str(argument.type) for argument in schema.arguments)
        or _op_name(node).rstrip("_") in _LIGHT.split()
    )


def _spans_of_writes(
    module: fx.GraphModule, names: Names, owner: dict[fx.Node, int], facts: TensorFacts
) -> Iterable[Span]:
    """Yield the span from each value to the last operation that writes its memory.

    For buffers and inputs, whose memory outlives the forward, the span covers all operations that
    use it.
    """
    held = {
        storage: node
        for node in module.graph.nodes
        if node.op in ("get_attr", "placeholder")
        for storage in facts.storages[node]
    }
    for storage in {storage for node in owner for storage in facts.writes[node]}:
        writers = [index for node, index in owner.items() if storage in facts.writes[node]]
        touching = [
            index
            for node, index in owner.items()
            if storage in facts.storages[node]
            or any(storage in facts.storages[argument] for argument in node.all_input_nodes)
        ]
        last = max(touching if storage in held else writers)
        yield Span(min(touching), last, written(names, held.get(storage)))


def _merge(runs: list[_Run], spans: Iterable[Span]) -> list[tuple[_Run, int]]:
    """Return the runs that are left, each with its former number."""
    joined = {index for span in spans for index in range(span.first + 1, span.last + 1)}
    groups: list[tuple[int, list[_Run]]] = []
    for index, run in enumerate(runs):
        if index in joined:
            groups[-1][1].append(run)
        else:
            groups.append((index, [run]))
    for _, (first, *others) in groups:
        first.nodes += [node for run in others for node in run.nodes]
        first.op = "+".join(
            [first.op, *(run.op for run in others[:2]), *(["..."] if len(others) > 2 else [])]
        )
    return [(group[0], index) for index, group in groups]


def adopt_unused(layers: Sequence[GraphLayer], names: Names) -> tuple[GraphLayer, ...]:
    """Give each weight that no operation reads to the layer of the closest name: all stages have
    the model's state.
    """
    used = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    paths = [layer.name.split(".") for layer in layers]
    adopted = list(layers)
    for kind, group in zip(("parameters", "buffers"), names.all(), strict=True):
        for name in (each for each in group if each not in used):
            parts = name.split(".")
            pairs = (
                [one == other for one, other in zip(path, parts, strict=False)] for path in paths
            )
            shared = [sum(takewhile(bool, same)) for same in pairs]
            closest = shared.index(max(shared))
            more: dict[str, Any] = {kind: (*getattr(adopted[closest], kind), name)}
            adopted[closest] = replace(adopted[closest], **more)
    return tuple(adopted)
