"""Which weights a group of ranks divides, and where a stage's code makes values DTensors, and whole
again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx, nn

from planner.errors import PlanError
from planner.formats.files import replace
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.capture.operations import is_random
from planner.model.options import gradient_hooks, parameter_like
from planner.model.tensor.dimensions import (
    COPIES,
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

Copies = dict[fx.Node, fx.Node]  # of a graph's nodes, in the code of a stage


class CodeWriter(Protocol):
    """Protocol of what says how a group of ranks computes the operations of a piece of code."""

    def taken(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return a value that enters the piece."""
        ...

    def made(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as it leaves the piece."""
        ...

    def reader(self, node: fx.Node, copies: Copies) -> Callable[[fx.Node], fx.Node]:
        """Return what an operation reads in place of the values that it read in the graph."""
        ...

    def result(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the result of an operation, given its copy that `reader` has served."""
        ...


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
        self._graph = graph
        self._code = code
        self._division = division
        self._tokens = division.tokens
        self._experts = division.routed

        # What ranks divide: weights, values that a product computes several of as one, what takes
        # these apart, and operations that are another call then.
        self._weights: dict[fx.Node, Cut] = {}
        self._packed: dict[fx.Node, Cut] = {}
        self._opened: dict[fx.Node, Packing] = {}
        self._replaced: dict[Any, Callable[..., Tensor]] = {}

        # What the piece has so far: DTensors; offsets of the rows of a rank's experts; calls about
        # a value; and values with all tokens.
        self._inside = set(self._tokens)
        self._rows: dict[fx.Node, fx.Node] = {}
        self._calls: dict[tuple[str, fx.Node], fx.Node] = {}
        self._gathered: dict[fx.Node, fx.Node] = {}

        if division.group is not None:
            self._divide_over(division.group)

    def _divide_over(self, group: "TensorGroup") -> None:
        """Note which weights the ranks divide, and which of their calls replace operations."""
        self._group = group
        # How rows get to the ranks of their experts, there, and back.
        self._moves: tuple[Callable[..., object], ...] = (group.rows, group.take, group.summand)
        if self._division.by_samples:
            self._moves = (group.exchange, group.give, group.back)
        self._replaced = {
            _aten.dropout.default: group.dropout,
            _aten.scaled_dot_product_attention.default: group.attention,
        }

        self._weights = self._division.weights(self._graph)
        for node in self._graph.module.graph.nodes:
            if node.target in PRODUCTS:
                self._note_packing(node)

    def _note_packing(self, product: fx.Node) -> None:
        """Note the values that a product computes several of as one, and what takes them apart."""
        cut = self._weights.get(weight_of(product))
        packed = None
        if cut is not None and cut.blocks:
            packed = packing(product)
        if packed is not None:
            for value, dimension in packed.packed.items():
                self._packed[value] = Cut(dimension, packed.blocks)
            self._opened |= dict.fromkeys(packed.opened, packed)

    def taken(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return a value that enters the piece."""
        if node not in self._tokens or node not in self._division.borders:
            return copy
        if self._division.sends_parts:
            enter = self._group.part
        else:
            enter = self._group.scatter
        return self._code.call_function(enter, (copy, self._tokens[node]))

    def made(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as it leaves the piece."""
        at_border = node in self._division.borders
        if node not in self._tokens or (at_border and not self._division.sends_parts):
            return self.whole(node, copies)
        if at_border:
            return self._code.call_method("to_local", (copies[node],))
        return copies[node]

    def reader(self, node: fx.Node, copies: Copies) -> Callable[[fx.Node], fx.Node]:
        """Return what an operation reads in place of the values that it read in the graph."""
        if node in self._experts.rows and self._reads_rows(node):
            self._rows[node] = self._experts.rows[node]
            return partial(self._by_experts, node, copies=copies)

        if not self._divided(node):
            return partial(self._added, copies=copies)
        if self._runs_whole(node):
            return partial(self.whole, copies=copies)
        if node in self._tokens:
            return partial(self._of_each_token, copies=copies)
        return partial(self._within, copies=copies)

    def _reads_rows(self, node: fx.Node) -> bool:
        """Return whether an operation works on the rows of a rank's experts."""
        is_product = offsets_of(node) is not None
        return is_product or not self._rows.keys().isdisjoint(node.all_input_nodes)

    def _of_each_token(self, source: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as operations on each token alone take it: the rank's tokens suffice."""
        if source in self._tokens:
            return copies[source]
        return self._within(source, copies)

    def result(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the result of an operation, given its copy that `reader` has served."""
        if node in self._rows:
            return copy

        computes_parts = bool(self._divided(node)) and not self._runs_whole(node)
        if computes_parts:
            self._compute_parts(node, copy)

        if node in self._tokens:
            if not is_tensor(node):
                return copy
            return self._code.call_function(self._group.scatter, (copy, self._tokens[node]))

        if not computes_parts:
            return copy
        if self._ends(node):
            return self._code.call_function(self._group.leave, (copy,))

        if is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list)):
            self._inside.add(node)
        return copy

    def _compute_parts(self, node: fx.Node, copy: fx.Node) -> None:
        """Change an operation so that each rank computes its part of the result."""
        copy.target = self._replaced.get(node.target, copy.target)
        if node in self._opened:
            self._take_apart(node, copy)

        gathered: list[Any] = [
            self._gathered[source] for source in node.all_input_nodes if source in self._gathered
        ]
        if not gathered:
            return
        if weight_of(node) in self._weights:
            compute: Any = node.target
            copy.target = self._group.product
            copy.args = (gathered[0], compute, *copy.args)
        elif node not in self._tokens and packet_of(node) in RESHAPES:
            # to be recognised by the product that multiplies the view
            self._gathered[node] = gathered[0]

    def _ends(self, node: fx.Node) -> bool:
        """Return whether a result becomes whole: it is the sum of what the ranks compute with their
        parts of a weight, or is gathered. It stays a sum where it is scattered next.
        """
        cut = self._weights.get(weight_of(node))
        if cut is None or self._tokens.keys() & node.users.keys():
            return False
        return cut.gathered or sums(node, cut)

    def whole(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as it is on every rank."""
        if node not in self._weights and not (node in self._inside and is_tensor(node)):
            return self._added(node, copies)
        if node in self._tokens:
            copy = copies[node]
        else:
            copy = self._within(node, copies)
        cut = self._packed.get(node, self._weights.get(node, Cut(0)))
        return self._once(self._group.leave, node, copy, cut.dimension, cut.blocks)

    def _take_apart(self, node: fx.Node, copy: fx.Node) -> None:
        """Change an operation on a packed value so that it takes apart what each rank has of it."""
        packed = self._opened[node]
        value, *more = copy.args
        source = node.all_input_nodes[0]
        dimension = self._packed[source].dimension

        operation = packet_of(node)
        if operation in VIEWS:
            with self._code.inserting_before(copy):
                stacked = (value, len(packed.blocks), dimension)
                value = self._code.call_function(self._group.stack, stacked)
            if operation is _aten.unflatten:
                more = [dimension + 1, more[1][1:]]  # type: ignore[index]
            copy.args = (value, *more)
            return

        if operation in PARTS:
            copy.target = self._group.split
            copy.args = (value, packed.blocks, dimension)
        else:
            start = start_of(node) % shape_of(source)[dimension]
            length = shape_of(node)[dimension]
            copy.target = self._group.narrow
            copy.args = (value, start, length, dimension)

        copy.kwargs = {}

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

    def _within(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as operations on divided ones take it: with all tokens."""
        if is_tensor(node) and node in self._tokens:
            self._gathered[node] = self._once(self._group.gather, node, copies[node])
            return self._gathered[node]
        if node in self._inside or not is_tensor(node):
            return copies[node]
        cut = self._weights.get(node)
        if cut is not None:
            return self._once(self._group.part, node, copies[node], cut.dimension)
        return self._once(self._group.enter, node, self._added(node, copies))

    def _by_experts(self, node: fx.Node, source: fx.Node, copies: Copies) -> fx.Node:
        """Return what an operation on the rows of a rank's experts reads in place of a value."""
        if source in self._rows:
            return copies[source]

        offsets = self._rows[node]
        is_product = offsets_of(node) is not None
        routes, take, _ = self._moves
        if is_product and source is node.args[1]:
            return self._once(self._group.matrices, source, self._within(source, copies))
        if is_product and source is offsets:
            routed = self._calls[routes.__name__, source]
            return self._code.call_function(getitem, (routed, 0))

        whole = self.whole(source, copies)
        if not self._division.by_samples:
            whole = self._once(self._group.alone, source, whole)
        if not is_product:
            return whole  # the same for every row
        rows = self._once(routes, offsets, copies[offsets], whole)
        return self._once(take, source, whole, rows)

    def _added(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value with all of its rows, or with what all ranks add to its gradient."""
        by_samples = self._division.by_samples
        offsets = self._rows.get(node)
        if offsets is not None:
            routes, _, back = self._moves
            routed = self._calls[routes.__name__, offsets]
            rows = self._once(back, node, copies[node], routed)
            if by_samples:
                return rows
            return self._once(self._group.sum, node, rows)

        if by_samples and self._graph.names.parameter(node) is not None:
            return self._once(self._group.alone, node, copies[node])
        return copies[node]

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

    def writer(self, graph: LayerGraph, code: fx.Graph) -> "CodeWriter":
        """Return what writes the code of a piece of a stage."""
        return Regions(graph, self, code)

    def samples_of(self, size: int) -> int:
        """Return how many samples of a microbatch a rank has."""
        if self.group is not None and self.by_samples:
            return size // self.group.degree
        return size

    def weights(self, graph: LayerGraph) -> dict[fx.Node, Cut]:
        """Return how the weights are divided that a graph reads."""
        names = {node: graph.names.parameter(node) or "" for node in graph.module.graph.nodes}
        return {node: self.cuts[name] for node, name in names.items() if name in self.cuts}

    def within(self, graph: LayerGraph, borders: Collection[fx.Node]) -> "DividedWeights":
        """Return the same for a stage that exchanges these values with others."""
        if self.group is None:
            return self
        tokens = dict[fx.Node, int]()
        if self.by_tokens and not self.by_samples:
            tokens = divided_by_tokens(graph, self.weights(graph), self.group.degree)
        routed = find_experts(graph, self.cuts)
        return replace(self, routed=routed, tokens=tokens, borders=borders)

    def exchanged(self, node: fx.Node, spec: ValueSpec) -> ValueSpec:
        """Return the spec of what stages exchange of a value."""
        if self.group is None or not self.sends_parts:
            return spec
        sizes = list(spec.sizes)
        if node in self.tokens:
            sizes[self.tokens[node]] //= self.group.degree
        return replace(spec, sizes=tuple(sizes))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight, or of a tensor of its shape."""
        cut = self.cuts.get(name)
        if cut is None or self.group is None:
            return whole
        return cut.part(whole, self.group.place, self.group.degree)

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
        sizes = list(shape)
        sizes[cut.dimension] *= self.group.degree
        return torch.Size(sizes)


UNDIVIDED = DividedWeights()


def divided_weights(module: nn.Module) -> DividedWeights:
    """Return which weights of a stage are divided; none of any other module's."""
    found = getattr(module, "division", UNDIVIDED)
    if isinstance(found, DividedWeights):
        return found
    return UNDIVIDED


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
            f"ranks shard the parameter",
            hint="solve with `tensor=1` and `shard_optimizer=never`",
        )


def own_rows(weight: Tensor) -> slice:
    """Return which rows of a weight this replica has, where `fully_shard` has divided it."""
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    last = mesh.ndim - 1  # in the others replicas have the same rows
    place = mesh.get_local_rank(last)
    rows = weight.shape[0]
    each = -(-rows // mesh.size(last))
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
    division = divided_weights(module)
    wholes = dict[int, Tensor]()
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
            "ranks shard the products of a captured graph, and the model file names blocks, "
            "which run as they are",
            hint="leave out blocks(), or solve with `tensor=1`",
        )

    products = _products(graph)
    undivided = {
        module
        for module, nodes in products.items()
        if any(_splits_heads(node, group.degree) for node in nodes)
    }
    experts = find_experts(graph).counts

    cuts: dict[str, Cut] = {}
    for name, parameter in graph.model.named_parameters():
        aliases = graph.names_of([name])
        modules = {alias.rpartition(".")[0] for alias in aliases}
        style = _style(plan, modules - undivided)
        if name in experts:
            style = None
            if style_of(plan, name) == EXPERTS:
                style = EXPERTS
        # the bias of a sum is added once
        if style is None or (parameter.dim() == 1 and style in ROWS):
            continue

        users = [node for module in modules for node in products.get(module, ())]
        own = [node for node in users if graph.names.parameter(weight_of(node)) in aliases]
        packed = None
        if style in COLUMNS and len(users) == 1:
            packed = packing(users[0])
        blocks = packed.blocks if packed is not None else ()
        cut = Cut(_divided_dimension(own, style), blocks, style in GATHERED)
        if cut.divides(parameter.shape[cut.dimension], group.degree):
            cuts |= dict.fromkeys(aliases, cut)
        elif not cut.gathered:
            raise _uneven(name, parameter.shape[cut.dimension], cut, group.degree)

    by_samples = divides_samples(graph, group.degree, samples) and set(plan.values()) == {EXPERTS}
    divided = {name: count for name, count in experts.items() if name in cuts}
    return DividedWeights(group, cuts, divided, by_samples)


def _products(graph: LayerGraph) -> dict[str, list[fx.Node]]:
    """Return the products of a graph by the module that has their weight."""
    products: dict[str, list[fx.Node]] = {}
    for node in graph.module.graph.nodes:
        if node.target in PRODUCTS:
            name = graph.names.parameter(weight_of(node))
            if name is not None:
                products.setdefault(name.rpartition(".")[0], []).append(node)
    return products


def _style(plan: Plan, modules: Iterable[str]) -> str | None:
    """Return how a weight is divided that so many modules have; None where none says it."""
    styles = {style_of(plan, module) for module in modules}
    return next((style for style in (*COLUMNS, *GATHERED, *ROWS) if style in styles), None)


def _divided_dimension(products: Sequence[fx.Node], style: str) -> int:
    """Return the dimension of a weight, or of a bias of no product, that ranks divide."""
    if not products:
        return 0
    product = PRODUCTS[products[-1].target]
    if style in ROWS:
        return product.inputs
    return product.outputs


def _uneven(name: str, size: int, cut: Cut, degree: int) -> PlanError:
    elements = " + ".join(map(str, cut.blocks or (size,)))
    return PlanError(
        f"{degree} ranks cannot shard the {elements} elements of '{name}' along dimension "
        f"{cut.dimension} evenly",
        hint="solve with smaller degrees in `tensor`",
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
            counts = [count for value in values for count in _heads(value)]
        if any(count % degree for count in counts):
            return True

    return False


def _heads(value: fx.Node) -> Iterator[int]:
    """Yield the outermost of the sizes that views divide a value's last dimension into, those of
    copies and of other views of it as well.
    """
    last = len(shape_of(value)) - 1
    for view in value.users:
        place = None
        if packet_of(view) in (*RESHAPES, *COPIES):
            place = dimension_of(view, {value: last})
        if place is None:
            continue
        if place == len(shape_of(view)) - 1:
            yield from _heads(view)  # it keeps the dimension
        else:
            yield int(shape_of(view)[place])
