"""Which weights a group of ranks divides, and where a stage's code makes values DTensors, and whole
again.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from planner.errors import PlanError
from planner.formats.files import replace
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.capture.operations import is_random
from planner.model.options import gradient_hooks, parameter_like
from planner.model.tensor.dimensions import (
    PARTS,
    PRODUCTS,
    RESHAPES,
    VIEWS,
    Cut,
    Packing,
    dimension_of,
    is_tensor,
    packet_of,
    packing,
    shape_of,
    start_of,
    sums,
    weight_of,
)
from planner.model.tensor.experts import EXPERTS, Experts, find_experts, offsets_of
from planner.model.tensor.parallel_plan import (
    COLUMNS,
    GATHERED,
    ROWS,
    Plan,
    divides_samples,
    style_of,
)
from planner.model.tensor.tokens import divided_by_tokens
from planner.model.torch_private import OpOverload

if TYPE_CHECKING:  # importing DTensor takes a second, which only plans with groups are worth
    from planner.model.tensor.group import TensorGroup

_aten = torch.ops.aten


class Regions:
    """The operations of a piece of code whose results are DTensors; there are none without a group.

    They begin with products whose weights are divided, and end with those whose results the ranks
    sum up; what leaves the piece is whole, too. Operations that DTensor cannot divide run whole on
    every rank.

    Values that ranks divide by tokens are DTensors from a sum on, also between the pieces of a
    stage. At the `borders` of the stage they are ordinary tensors: whole, or this rank's part.

    Rows of a rank's experts, and what is summed up behind them, are ordinary tensors within the
    piece.
    """

    def __init__(self, graph: LayerGraph, division: "DividedWeights", code: fx.Graph) -> None:
        self._graph, self._code, self._division = graph, code, division
        self._tokens, self._experts = division.tokens, division.routed
        # values of which this piece has the rows of a rank's experts; offsets
        self._rows = dict[fx.Node, fx.Node]()
        self._weights: dict[fx.Node, Cut] = {}
        self._packed: dict[fx.Node, Cut] = {}
        self._opened: dict[fx.Node, Packing] = {}
        self._replaced: dict[Any, Callable[..., Tensor]] = {}
        self._inside = set(self._tokens)
        self._calls: dict[tuple[str, fx.Node], fx.Node] = {}
        self._gathered: dict[fx.Node, fx.Node] = {}
        if division.group is not None:
            self._group = group = division.group
            # How rows get to the ranks of their experts, there, and back.
            self._moves: tuple[Callable[..., object], ...] = (group.rows, group.take, group.summand)
            if division.by_samples:
                self._moves = group.exchange, group.give, group.back
            self._weights = division.weights(graph)
            for node in graph.module.graph.nodes:
                cut = self._weights.get(weight_of(node)) if node.target in PRODUCTS else None
                packed = packing(node) if cut is not None and cut.blocks else None
                if packed is not None:
                    self._packed |= {
                        value: Cut(each, packed.blocks) for value, each in packed.packed.items()
                    }
                    self._opened |= dict.fromkeys(packed.opened, packed)
            self._replaced = {
                _aten.dropout.default: division.group.dropout,
                _aten.scaled_dot_product_attention.default: division.group.attention,
            }

    def taken(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return a value that enters the piece."""
        if node not in self._tokens or node not in self._division.borders:
            return copy
        enter = self._group.part if self._division.sends_parts else self._group.scatter
        return self._code.call_function(enter, (copy, self._tokens[node]))

    def made(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value as it leaves the piece."""
        if node not in self._tokens or (
            node in self._division.borders and not self._division.sends_parts
        ):
            return self.whole(node, copies)
        return (
            self._code.call_method("to_local", (copies[node],))
            if node in self._division.borders
            else copies[node]
        )

    def reader(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
        """Return what an operation reads in place of the values that it read in the graph."""
        reads_rows = offsets_of(node) is not None or not self._rows.keys().isdisjoint(
            node.all_input_nodes
        )
        if reads_rows and node in self._experts.rows:
            self._rows[node] = self._experts.rows[node]
            return lambda source: self._by_experts(node, source, copies)
        if not self._divided(node):
            return lambda source: self._added(source, copies)
        if self._runs_whole(node):
            return lambda source: self.whole(source, copies)
        tokens = self._tokens if node in self._tokens else {}
        return lambda source: copies[source] if source in tokens else self._within(source, copies)

    def result(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the result of an operation, given its copy that `reader` has served."""
        if node in self._rows:
            return copy
        cut = self._weights.get(weight_of(node))
        if within := bool(self._divided(node)) and not self._runs_whole(node):
            copy.target = self._replaced.get(node.target, copy.target)
            if node in self._opened:
                self._take_apart(node, copy)
            given: list[Any] = [
                self._gathered[source]
                for source in node.all_input_nodes
                if source in self._gathered
            ]
            if given and cut is not None:
                compute: Any = node.target
                copy.target, copy.args = self._group.product, (given[0], compute, *copy.args)
            elif given and node not in self._tokens and packet_of(node) in RESHAPES:
                # to be recognised by the product that multiplies the view
                self._gathered[node] = given[0]
        if node in self._tokens:
            scattered = (copy, self._tokens[node])
            return (
                self._code.call_function(self._group.scatter, scattered)
                if is_tensor(node)
                else copy
            )
        # The result is the sum of what the ranks compute with their parts of a weight, or is
        # gathered. It stays a sum where it is scattered next.
        ends = (
            cut is not None
            and (cut.gathered or sums(node, cut))
            and not self._tokens.keys() & node.users.keys()
        )
        if within and ends:
            return self._code.call_function(self._group.leave, (copy,))
        if within and (is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list))):
            self._inside.add(node)
        return copy

    def whole(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value as it is on every rank."""
        if node not in self._weights and not (node in self._inside and is_tensor(node)):
            return self._added(node, copies)
        copy = copies[node] if node in self._tokens else self._within(node, copies)
        cut = self._packed.get(node, self._weights.get(node, Cut(0)))
        return self._once(self._group.leave, node, copy, cut.dimension, cut.blocks)

    def _take_apart(self, node: fx.Node, copy: fx.Node) -> None:
        """Change an operation on a packed value so that it takes apart what each rank has of it."""
        packing, (value, *given) = self._opened[node], copy.args
        source = node.all_input_nodes[0]
        dimension, blocks = self._packed[source].dimension, packing.blocks
        if packet_of(node) in VIEWS:
            with self._code.inserting_before(copy):
                value = self._code.call_function(self._group.stack, (value, len(blocks), dimension))
            if packet_of(node) is _aten.unflatten:
                given = [dimension + 1, given[1][1:]]  # type: ignore[index]
            copy.args = (value, *given)
        elif packet_of(node) in PARTS:
            copy.target, copy.args, copy.kwargs = self._group.split, (value, blocks, dimension), {}
        else:
            start, length = start_of(node) % shape_of(source)[dimension], shape_of(node)[dimension]
            copy.target, copy.args, copy.kwargs = (
                self._group.narrow,
                (value, start, length, dimension),
                {},
            )

    def _divided(self, node: fx.Node) -> list[fx.Node]:
        """Return what an operation reads of divided weights and values."""
        return [
            source
            for source in node.all_input_nodes
            if source in self._weights or source in self._inside
        ]

    def _runs_whole(self, node: fx.Node) -> bool:
        """Return whether each rank runs an operation on whole values: nested graphs, and random
        numbers.

        So does what takes nothing divided but tokens, and does not work on each token alone.
        """
        if node in self._tokens:
            return False
        if self._tokens.keys() >= set(self._divided(node)):
            return not self._views_for_products(node)
        if node.target in self._replaced or node.target is getitem:
            return False
        return not isinstance(node.target, OpOverload) or is_random(node, self._graph.module)

    def _views_for_products(self, node: fx.Node) -> bool:
        return packet_of(node) in RESHAPES and all(
            weight_of(user) in self._weights or self._views_for_products(user)
            for user in node.users
        )

    def _within(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value as operations on divided ones take it: with all tokens."""
        if is_tensor(node) and node in self._tokens:
            self._gathered[node] = self._once(self._group.gather, node, copies[node])
            return self._gathered[node]
        if node in self._inside or not is_tensor(node):
            return copies[node]
        if (cut := self._weights.get(node)) is not None:
            return self._once(self._group.part, node, copies[node], cut.dimension)
        return self._once(self._group.enter, node, self._added(node, copies))

    def _by_experts(
        self, node: fx.Node, source: fx.Node, copies: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """Return what an operation on the rows of a rank's experts reads in place of a value."""
        offsets, is_product = self._rows[node], offsets_of(node) is not None
        if source in self._rows:
            return copies[source]
        if is_product and source is node.args[1]:
            return self._once(self._group.matrices, source, self._within(source, copies))
        routes, take, _ = self._moves
        if is_product and source is offsets:
            return self._code.call_function(getitem, (self._calls[routes.__name__, source], 0))
        whole = self.whole(source, copies)
        if not self._division.by_samples:
            whole = self._once(self._group.alone, source, whole)
        if not is_product:
            return whole  # the same for every row
        rows = self._once(routes, offsets, copies[offsets], whole)
        return self._once(take, source, whole, rows)

    def _added(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value with all of its rows, or with what all ranks add to its gradient."""
        by_samples, copy = self._division.by_samples, copies[node]
        if (offsets := self._rows.get(node)) is not None:
            routes, _, back = self._moves
            copy = self._once(back, node, copy, self._calls[routes.__name__, offsets])
            return copy if by_samples else self._once(self._group.sum, node, copy)
        if by_samples and self._graph.names.parameter(node) is not None:
            return self._once(self._group.alone, node, copy)
        return copy

    def _once(self, function: Callable[..., object], node: fx.Node, *given: Any) -> fx.Node:
        """Return the result of a call that is about a value, where all that need it take
        the same.
        """
        if (function.__name__, node) not in self._calls:
            self._calls[function.__name__, node] = self._code.call_function(function, given)
        return self._calls[function.__name__, node]


@dataclass(frozen=True)
class DividedWeights:
    """The weights of a stage that its ranks divide."""

    group: "TensorGroup | None" = None  # the ranks; None for a single one
    # by weight, under all of its names, how it is divided
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    # by weight that they divide by experts, how many it has
    experts: Mapping[str, int] = field(default_factory=dict)
    by_samples: bool = False  # whether each has samples of its own, and divides no other weights
    by_tokens: bool = False  # whether they divide values by tokens, too
    sends_parts: bool = False  # whether stages exchange a rank's part of these
    # those of a stage's graph, with the tokens' dimension
    tokens: Mapping[fx.Node, int] = field(default_factory=dict)
    # values of a stage's graph that belong to experts
    routed: Experts = field(default_factory=Experts)
    borders: Collection[fx.Node] = ()  # the values that the stage exchanges

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank saves and counts what all ranks of the group have alike."""
        return self.group is None or self.group.place == 0

    def samples_of(self, size: int) -> int:
        """Return how many samples of a microbatch a rank has."""
        return size // self.group.degree if self.group is not None and self.by_samples else size

    def weights(self, graph: LayerGraph) -> dict[fx.Node, Cut]:
        """Return how the weights are divided that a graph reads."""
        names = {node: graph.names.parameter(node) or "" for node in graph.module.graph.nodes}
        return {node: self.cuts[name] for node, name in names.items() if name in self.cuts}

    def within(self, graph: LayerGraph, borders: Collection[fx.Node]) -> "DividedWeights":
        """Return the same for a stage that exchanges these values with others."""
        if self.group is None:
            return self
        routed, tokens = find_experts(graph, self.cuts), dict[fx.Node, int]()
        if self.by_tokens and not self.by_samples:
            tokens = divided_by_tokens(graph, self.weights(graph), self.group.degree)
        return replace(self, routed=routed, tokens=tokens, borders=borders)

    def exchanged(self, node: fx.Node, spec: ValueSpec) -> ValueSpec:
        """Return the spec of what stages exchange of a value."""
        each = self.group.degree if self.group is not None and self.sends_parts else 1
        sizes = (
            size // each if self.tokens.get(node) == place else size
            for place, size in enumerate(spec.sizes)
        )
        return replace(spec, sizes=tuple(sizes))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight, or of a tensor of its shape."""
        cut = self.cuts.get(name)
        return (
            whole
            if cut is None or self.group is None
            else cut.part(whole, self.group.place, self.group.degree)
        )

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a weight, or of a tensor of its shape; all ranks call it."""
        cut = self.cuts.get(name)
        if cut is None or self.group is None:
            return part
        return self.group.leave(self.group.part(part, cut.dimension), cut.dimension, cut.blocks)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the shape of a weight of which a part has this one."""
        cut = self.cuts.get(name)
        if cut is None or self.group is None:
            return shape
        return torch.Size(
            size * self.group.degree if d == cut.dimension else size for d, size in enumerate(shape)
        )


UNDIVIDED = DividedWeights()


def divided_weights(module: nn.Module) -> DividedWeights:
    """Return which weights of a stage are divided; none of any other module's."""
    found = getattr(module, "division", UNDIVIDED)
    return found if isinstance(found, DividedWeights) else UNDIVIDED


def keep_parts(module: nn.Module) -> None:
    """Replace the weights of a stage that are divided by this rank's parts."""
    division = divided_weights(module)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole in list(module.named_parameters(remove_duplicate=False)):
        if name in division.cuts:
            if whole not in parts:
                refuse_divided_hooks(name, whole)
                parts[whole] = parameter_like(whole, division.part(name, whole.detach()).clone())
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._parameters[last] = parts[whole]


def refuse_divided_hooks(name: str, parameter: Tensor) -> None:
    """Raise PlanError for a parameter that ranks divide and that has a hook on its gradient."""
    if gradient_hooks(parameter):
        raise PlanError(
            f"parameter '{name}' has a hook on its gradient, which would see a part of it where "
            f"ranks divide the "
            "parameter",
            hint="solve with `tensor=1` and `shard_optimizer=never`",
        )


def own_rows(weight: Tensor) -> slice:
    """Return which rows of a weight this replica has, where `fully_shard` has divided it."""
    mesh, rows = weight.device_mesh, weight.shape[0]  # type: ignore[attr-defined]
    last = mesh.ndim - 1  # in the others replicas have the same rows
    each, place = -(-rows // mesh.size(last)), mesh.get_local_rank(last)
    return slice(min(place * each, rows), min((place + 1) * each, rows))


def is_divided(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")  # to ask for the type imports DTensor


def own_memory(weight: Tensor) -> Tensor:
    """Return what of a weight is in this replica's memory."""
    return weight.to_local() if is_divided(weight) else weight  # type: ignore[attr-defined]


def whole_state(
    module: nn.Module, *, kept: bool = True, masters: bool = False
) -> dict[str, Tensor]:
    """Return the state of a module with its weights whole; all ranks that divide them call it.

    Weights that replicas divide are on the CPU, or empty where they are not to be `kept`, and
    rounded as they are used, where replicas have nothing but `masters` of them, and those are not
    asked for.
    """
    division, wholes = divided_weights(module), dict[int, Tensor]()
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in wholes:  # tied weights stay one tensor
            whole = division.whole(name, tensor.detach())
            if is_divided(whole):
                if not masters:
                    whole = whole.to(module.used_dtypes[name])  # type: ignore[index]
                whole = whole.full_tensor()  # type: ignore[attr-defined]
                whole = whole.cpu() if kept else whole[:0].clone()
            wholes[id(tensor)] = whole
    return {name: wholes[id(tensor)] for name, tensor in state.items()}


def division_of(
    graph: LayerGraph, plan: Plan, group: "TensorGroup", samples: int = 0
) -> DividedWeights:
    """Return how the ranks divide the weights of a captured model; raise PlanError where they
    cannot.

    Where they divide nothing but experts, each has a part of a microbatch's `samples`.
    """
    if graph.blocks is not None:
        raise PlanError(
            "ranks divide the products of a captured graph, and the model file names blocks, "
            "which run as they are",
            hint="leave out blocks(), or solve with `tensor=1`",
        )
    weights = {
        node: name
        for node in graph.module.graph.nodes
        if (name := graph.names.parameter(node)) is not None
    }
    products: dict[str, list[fx.Node]] = {}  # by the module that has the weight
    for node in graph.module.graph.nodes:
        if node.target in PRODUCTS and (name := weights.get(weight_of(node))) is not None:
            products.setdefault(name.rpartition(".")[0], []).append(node)
    whole = {
        module
        for module, own in products.items()
        if any(_splits_heads(each, group.degree) for each in own)
    }
    experts, found = find_experts(graph).counts, {}
    for name, parameter in graph.model.named_parameters():
        aliases = graph.names_of([name])
        modules = {alias.rpartition(".")[0] for alias in aliases}
        styles = {style_of(plan, module) for module in modules - whole}
        style = next((each for each in (*COLUMNS, *GATHERED, *ROWS) if each in styles), None)
        if name in experts:
            style = EXPERTS if style_of(plan, name) == EXPERTS else None
        # the bias of a sum is added once
        if style is None or (parameter.dim() == 1 and style in ROWS):
            continue
        users = [node for module in modules for node in products.get(module, ())]
        dimension = 0
        for node in users:
            if weights[weight_of(node)] in aliases:
                product = PRODUCTS[node.target]
                dimension = product.inputs if style in ROWS else product.outputs
        packed = packing(users[0]) if style in COLUMNS and len(users) == 1 else None
        cut = Cut(dimension, packed.blocks if packed is not None else (), style in GATHERED)
        if cut.gathered and not cut.divides(parameter.shape[dimension], group.degree):
            continue
        if not cut.divides(parameter.shape[dimension], group.degree):
            size = " + ".join(map(str, cut.blocks or (parameter.shape[dimension],)))
            raise PlanError(
                f"{group.degree} ranks cannot divide the {size} elements of '{name}' along "
                f"dimension {dimension} "
                "evenly",
                hint="solve with smaller degrees in `tensor`",
            )
        found.update(dict.fromkeys(aliases, cut))
    by_samples = divides_samples(graph, group.degree, samples) and set(plan.values()) == {EXPERTS}
    return DividedWeights(
        group, found, {name: n for name, n in experts.items() if name in found}, by_samples
    )


def _splits_heads(product: fx.Node, degree: int) -> bool:
    """Return whether a product's outputs are heads that the ranks do not divide: its module stays
    whole then.
    """
    packed = packing(product)
    opened = {product: len(shape_of(product)) - 1} if packed is None else packed.opened
    for node, dimension in opened.items():
        if packet_of(node) in VIEWS:
            counts = [shape_of(node)[dimension]]
        else:
            values = [user for user in node.users if user.target is getitem] or [node]
            counts = [_heads(user, value) for value in values for user in value.users]
        if any(count % degree for count in counts):
            return True
    return False


def _heads(view: fx.Node, value: fx.Node) -> int:
    """Return the outermost of the sizes that a view divides a value's last dimension into; 0 if it
    keeps it.
    """
    last = len(shape_of(value)) - 1
    place = dimension_of(view, {value: last}) if packet_of(view) in VIEWS else None
    return 0 if place is None or place == len(shape_of(view)) - 1 else int(shape_of(view)[place])
