"""Group the operations of a flat graph into layers.

A layer is what one call of a leaf module computes. An operation that a larger module calls itself
starts a layer when it is heavy (a matrix product, attention, a pooling); a light one joins the
layer before it. Layers are then joined around values that cannot be sent, around in-place writes,
and behind the loss.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import fx, nn

from planner.formats.files import replace
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
    """Operations in a row that become a layer, or a part of one."""

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
    runs = _Grouping(operations, model).runs()
    owner = {node: index for index, run in enumerate(runs) for node in run.nodes}
    spans = [
        *_spans_of_writes(module, names, owner, facts),
        Span(owner[loss], len(runs) - 1),
        *_spans_of_unsent(owner, specs),
    ]
    causes = causes_of_joins([len(run.nodes) for run in runs], spans)

    merged = _merge(runs, spans)
    unique = _unique_names([run.name for _, run in merged])
    layers = []
    for (first, run), name in zip(merged, unique, strict=True):
        reads = [source for node in run.nodes for source in node.all_input_nodes]
        nodes = tuple(run.nodes)
        layer = GraphLayer(
            name=name,
            op=run.op,
            nodes=nodes,
            parameters=_known(map(names.parameter, reads)),
            buffers=_known(map(names.buffer, reads)),
            cause=causes.get(first) or cause_of_nesting(module, nodes, operations),
        )
        layers.append(layer)

    # In evaluation the stages have the weights that training gave them, whether an operation reads
    # them or not.
    if is_training(model):
        return adopt_unused(layers, names)
    return tuple(layers)


def _spans_of_unsent(
    owner: Mapping[fx.Node, int], specs: Mapping[fx.Node, ValueSpec]
) -> Iterator[Span]:
    """Yield the span from each operation whose result cannot be sent to the last that uses it."""
    for node, index in owner.items():
        if node not in specs:
            users = [owner[user] for user in node.users if user in owner]
            yield Span(index, max(users, default=index), unsent(node))


def _known(names: Iterable[str | None]) -> tuple[str, ...]:
    """Return the names that there are, each once."""
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return names that are all different: further ones of a name get a number, from 2."""
    taken = set(names)
    seen = set[str]()
    unique = []
    for name in names:
        if name in seen:
            numbered = (f"{name}_{number}" for number in count(2))
            name = next(other for other in numbered if other not in taken)
            taken.add(name)
        seen.add(name)
        unique.append(name)

    return unique


class _Grouping:
    """Puts operations into runs, one after the other."""

    def __init__(self, operations: Sequence[fx.Node], model: nn.Module) -> None:
        self._operations = operations
        self._model = model
        self._scopes = {node: scope_of(node) for node in operations}
        inner = {scope for scope in self._scopes.values() if scope}
        # Leaves are modules within which no other module ran: what they do belongs together.
        self._leaves = {
            scope for scope in inner if not any(other.startswith(f"{scope}.") for other in inner)
        }
        self._runs: list[_Run] = []
        # light operations at the start of a module: they join the layer after them
        self._pending: list[fx.Node] = []

    def runs(self) -> list[_Run]:
        """Return the runs, in execution order."""
        scopes = list(self._scopes.values())
        after_model = len(scopes)
        while after_model and scopes[after_model - 1] is _LOSS:
            after_model -= 1

        for node in self._operations[:after_model]:
            if self._scopes[node] in self._leaves:
                self._add_to_leaf(node)
            else:
                self._add_to_larger_module(node)

        for node in self._operations[after_model:]:
            self._add_to_loss(node)
        self._end()
        return self._runs

    @property
    def _last(self) -> _Run | None:
        """The run that an operation can join: none while others wait for the next one."""
        if self._runs and not self._pending:
            return self._runs[-1]
        return None

    def _add_to_leaf(self, node: fx.Node) -> None:
        scope = self._scopes[node]
        assert scope is not None
        call = _call(node)
        last = self._last
        if last is not None and last.call == call:
            last.nodes.append(node)
            return

        kind = type(self._model.get_submodule(scope)).__name__
        self._begin(_Run(scope, call, scope, kind, [node]))

    def _add_to_larger_module(self, node: fx.Node) -> None:
        scope = self._scopes[node] or ""
        last = self._last
        if _is_light(node):
            if last is not None and last.scope is not None and _is_inside(last.scope, scope):
                last.nodes.append(node)
            else:
                self._pending.append(node)
            return

        name = _op_name(node)
        run = _Run(scope, _call(node), f"{scope}.{name}".removeprefix("."), f"aten.{name}", [node])
        self._begin(run)

    def _add_to_loss(self, node: fx.Node) -> None:
        if self._runs and self._runs[-1].scope is _LOSS:
            self._runs[-1].nodes.append(node)
        else:
            self._begin(_Run(_LOSS, _call(node), "loss", "loss", [node]))

    def _begin(self, run: _Run) -> None:
        run.nodes[:0] = self._pending
        self._pending.clear()
        self._runs.append(run)

    def _end(self) -> None:
        """Put operations that wait for a layer after them into the last one."""
        if self._pending and not self._runs:
            self._runs.append(_Run("", _call(self._pending[0]), "forward", "forward", []))
        if self._pending:
            self._runs[-1].nodes += self._pending


def _is_inside(scope: str, outer: str) -> bool:
    """Return whether a module is another one, or a part of it; all are parts of the model, ""."""
    return outer in ("", scope) or scope.startswith(f"{outer}.")


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
    # By storage, in one pass: the operations that write it, and those that use it.
    writers: dict[int, list[int]] = {}
    touching: dict[int, list[int]] = {}
    for node, index in owner.items():
        for storage in facts.writes[node]:
            writers.setdefault(storage, []).append(index)
        for each in {node, *node.all_input_nodes}:
            for storage in facts.storages[each]:
                touching.setdefault(storage, []).append(index)

    for storage, places in writers.items():
        touched = touching[storage]
        last = max(touched if storage in held else places)
        yield Span(min(touched), last, written(names, held.get(storage)))


def _merge(runs: list[_Run], spans: Iterable[Span]) -> list[tuple[int, _Run]]:
    """Return the runs that are left after those of each span became one, each with its former
    number.
    """
    joined = {index for span in spans for index in range(span.first + 1, span.last + 1)}
    groups: list[tuple[int, list[_Run]]] = []
    for index, run in enumerate(runs):
        if index in joined:
            groups[-1][1].append(run)
        else:
            groups.append((index, [run]))
    return [(index, _one_of(group)) for index, group in groups]


def _one_of(group: Sequence[_Run]) -> _Run:
    """Return one run of the operations of several; it names three of these at most."""
    kinds = [run.op for run in group[:3]]
    if len(group) > 3:
        kinds.append("...")
    nodes = [node for run in group for node in run.nodes]
    return replace(group[0], op="+".join(kinds), nodes=nodes)


def adopt_unused(layers: Sequence[GraphLayer], names: Names) -> tuple[GraphLayer, ...]:
    """Give each weight that no operation reads to the layer of the closest name: all stages have
    the model's state.
    """
    used = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    parameters, buffers = names.all()
    adopted = list(layers)
    for name in parameters:
        if name not in used:
            index = _closest(layers, name)
            layer = adopted[index]
            adopted[index] = replace(layer, parameters=(*layer.parameters, name))

    for name in buffers:
        if name not in used:
            index = _closest(layers, name)
            layer = adopted[index]
            adopted[index] = replace(layer, buffers=(*layer.buffers, name))

    return tuple(adopted)


def _closest(layers: Sequence[GraphLayer], name: str) -> int:
    """Return the first of the layers whose paths have most parts in common with a name."""
    parts = name.split(".")
    shared = [_common_parts(layer.name.split("."), parts) for layer in layers]
    return shared.index(max(shared))


def _common_parts(path: Sequence[str], other: Sequence[str]) -> int:
    same = (one == two for one, two in zip(path, other, strict=False))
    return sum(takewhile(bool, same))
