"""Which weights a group of ranks divides, and along which dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from planner.errors import PlanError
from planner.model.capture.graph import LayerGraph
from planner.model.tensor.dimensions import PRODUCTS, VIEWS, Cut, Packing, packet_of, packing, shape_of
from planner.model.tensor.parallel_plan import COLUMNS, ROWS, Plan, style_of

if TYPE_CHECKING:  # importing DTensor takes a second, which only plans with groups are worth
    from planner.model.tensor.group import TensorGroup

_aten = torch.ops.aten


@dataclass(frozen=True)
class DividedWeights:
    """The weights of a stage that its ranks divide.

    Attributes:
        group: the ranks; None for a single one.
        cuts: by weight, under all of its names, how it is divided.
    """

    group: TensorGroup | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank saves and counts what all ranks of the group have alike."""
        return self.group is None or self.group.place == 0

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight, or of a tensor of its shape."""
        cut = self.cuts.get(name)
        return whole if cut is None or self.group is None else cut.part(whole, self.group.place, self.group.degree)

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
        return torch.Size(size * self.group.degree if d == cut.dimension else size for d, size in enumerate(shape))


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
                parts[whole] = nn.Parameter(division.part(name, whole.detach()).clone(), whole.requires_grad)
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._parameters[last] = parts[whole]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module with its weights whole; all ranks that divide them call it."""
    division, wholes = divided_weights(module), dict[int, Tensor]()
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in wholes:  # tied weights stay one tensor
            wholes[id(tensor)] = division.whole(name, tensor.detach())
    return {name: wholes[id(tensor)] for name, tensor in state.items()}


def division_of(graph: LayerGraph, plan: Plan, group: TensorGroup) -> DividedWeights:
    """Return how the ranks divide the weights of a captured model.

    Raises:
        PlanError: where they cannot divide what the plan says they do.
    """
    if graph.blocks is not None:
        raise PlanError(
            "ranks divide the products of a captured graph, and the model file names blocks, which run as they are",
            hint="leave out blocks(), or solve with `tensor=1`",
        )
    found, readers = {}, _readers(graph)
    products: dict[str, list[fx.Node]] = {}
    for name, reads in readers.items():
        products.setdefault(name.rpartition(".")[0], []).extend(_products(reads))
    whole = {module for module, own in products.items() if any(_splits_heads(each, group.degree) for each in own)}
    for name, parameter in graph.model.named_parameters():
        aliases = graph.names_of([name])
        modules = {alias.rpartition(".")[0] for alias in aliases}
        styles = {style_of(plan, module) for module in modules - whole}
        style = next((each for each in (*COLUMNS, *ROWS) if each in styles), None)
        dimension = None if style is None else _dimension(readers.get(name, ()), parameter, style)
        if dimension is None:
            continue
        packed = [packing(product) for module in modules for product in products.get(module, ())]
        columns = style in COLUMNS and len(packed) == 1
        cut = Cut(dimension, packed[0].blocks if columns and packed[0] is not None else ())
        if not cut.divides(parameter.shape[dimension], group.degree):
            size = " + ".join(map(str, cut.blocks or (parameter.shape[dimension],)))
            raise PlanError(
                f"{group.degree} ranks cannot divide the {size} elements of '{name}' along dimension {dimension} "
                "evenly",
                hint="solve with smaller degrees in `tensor`",
            )
        found.update(dict.fromkeys(aliases, cut))
    return DividedWeights(group, found)


_Reads = Sequence[tuple[fx.Node, int]]  # operations, each with the place among its arguments


def _readers(graph: LayerGraph) -> Mapping[str, _Reads]:
    """Return the operations that read each parameter."""
    found: dict[str, list[tuple[fx.Node, int]]] = {}
    for source in graph.module.graph.nodes:
        if (name := graph.names.parameter(source)) is not None:
            reads = found.setdefault(name, [])
            for user in source.users:
                reads += [(user, place) for place, argument in enumerate(user.args) if argument is source]
    return found


def _products(reads: _Reads) -> list[fx.Node]:
    """Return the products of which this is the weight."""
    return [node for node, place in reads if node.target in PRODUCTS and PRODUCTS[node.target].weight == place]


def _dimension(reads: _Reads, parameter: Tensor, style: str) -> int | None:
    """Return the dimension along which a weight is divided; None where each rank has the whole of it."""
    rows = style in ROWS
    if parameter.dim() == 1:
        return None if rows else 0  # the bias of a sum is added once
    for product in _products(reads):
        return PRODUCTS[product.target].inputs if rows else PRODUCTS[product.target].outputs
    return 0


def _splits_heads(product: fx.Node, degree: int) -> bool:
    """Return whether a product's outputs are heads that the ranks do not divide: its module stays whole then."""
    packed = packing(product)
    if packed is None:
        return any(_heads(user) % degree for user in product.users)
    for opened, dimension in packed.opened.items():
        if packet_of(opened) in VIEWS:
            heads = [shape_of(opened)[dimension]]
        else:
            values = [user for user in opened.users if user.target is getitem] or [opened]
            heads = [_heads(user) for value in values for user in value.users]
        if any(count % degree for count in heads):
            return True
    return False


def _heads(view: fx.Node) -> int:
    """Return the outermost of the sizes that a view divides the last dimension of its input into; 0 if it keeps it."""
    if packet_of(view) not in VIEWS:
        return 0
    last, sizes = shape_of(view.all_input_nodes[0])[-1], shape_of(view)
    for place in range(len(sizes) - 1, 0, -1):
        if math.prod(size for size in sizes[place:]) == last:
            return int(sizes[place]) if place < len(sizes) - 1 else 0
    return 0


def sums_up(node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> bool:
    """Return whether an operation's result is the sum of what the ranks compute with their parts of a weight.

    Args:
        cuts: how weights are divided, by the nodes that read them.
    """
    if node.target is _aten.embedding.default:
        cut, dimension = cuts.get(node.all_input_nodes[0]), 0
    elif node.target in PRODUCTS:
        weight = node.args[PRODUCTS[node.target].weight]
        cut = cuts.get(weight) if isinstance(weight, fx.Node) else None
        dimension = PRODUCTS[node.target].inputs
    else:
        return False
    return cut is not None and cut.dimension == dimension


def packings(graph: LayerGraph, cuts: Mapping[fx.Node, Cut]) -> list[Packing]:
    """Return what the graph packs in products whose weights are divided by blocks.

    Args:
        cuts: how weights are divided, by the nodes that read them.
    """
    found = []
    for node in graph.module.graph.nodes:
        if node.target in PRODUCTS and (cut := cuts.get(node.args[PRODUCTS[node.target].weight])) is not None:
            packed = packing(node) if cut.blocks else None
            found += [] if packed is None else [packed]
    return found
