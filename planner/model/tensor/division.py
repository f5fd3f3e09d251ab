"""Which weights a group of ranks divides, and along which dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from planner.errors import PlanError
from planner.model.capture.graph import LayerGraph
from planner.model.tensor.plan import COLUMNS, ROWS, Plan, style_of

if TYPE_CHECKING:  # importing DTensor takes a second, which only plans with groups are worth
    from planner.model.tensor.group import TensorGroup

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.unflatten.int)
# Products, by the place of the weight among their arguments and its dimension of outputs; the other one is of inputs.
_PRODUCTS = {
    _aten.linear.default: (1, 0),
    _aten.addmm.default: (2, 1),
    _aten.mm.default: (1, 1),
    _aten.matmul.default: (1, 1),
}


@dataclass(frozen=True)
class DividedWeights:
    """The weights of a stage that its ranks divide.

    Attributes:
        group: the ranks; None for a single one.
        dimensions: by weight, under all of its names, the dimension that is divided.
    """

    group: TensorGroup | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)

    @property
    def speaks(self) -> bool:
        """Whether this rank saves and counts what all ranks of the group have alike."""
        return self.group is None or self.group.place == 0

    def slice_of(self, name: str) -> tuple[int, int, int] | None:
        """Return which part of a weight this rank has, of how many, along which dimension; None where it is whole."""
        if self.group is None or name not in self.dimensions:
            return None
        return self.group.place, self.group.degree, self.dimensions[name]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight, or of a tensor of its shape."""
        dimension = self.dimensions.get(name)
        if dimension is None or self.group is None:
            return whole
        return whole.chunk(self.group.degree, dimension)[self.group.place].contiguous()

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a weight, or of a tensor of its shape; all ranks call it."""
        dimension = self.dimensions.get(name)
        if dimension is None or self.group is None:
            return part
        return self.group.leave(self.group.part(part, dimension))

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the shape of a weight of which a part has this one."""
        dimension = self.dimensions.get(name)
        if dimension is None or self.group is None:
            return shape
        return torch.Size(size * self.group.degree if d == dimension else size for d, size in enumerate(shape))


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
        if name in division.dimensions:
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
    whole = {name.rpartition(".")[0] for name, reads in readers.items() if _splits_heads(reads, group.degree)}
    for name, parameter in graph.model.named_parameters():
        aliases = graph.names_of([name])
        modules = {alias.rpartition(".")[0] for alias in aliases}
        styles = {style_of(plan, module) for module in modules - whole}
        style = next((each for each in (*COLUMNS, *ROWS) if each in styles), None)
        dimension = None if style is None else _dimension(readers.get(name, ()), parameter, style)
        if dimension is None:
            continue
        if parameter.shape[dimension] % group.degree:
            raise PlanError(
                f"{group.degree} ranks cannot divide the {parameter.shape[dimension]} elements of '{name}' along "
                f"dimension {dimension} evenly",
                hint="solve with smaller degrees in `tensor`",
            )
        found.update(dict.fromkeys(aliases, dimension))
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


def _dimension(reads: _Reads, parameter: Tensor, style: str) -> int | None:
    """Return the dimension along which a weight is divided; None where each rank has the whole of it."""
    rows = style in ROWS
    if parameter.dim() == 1:
        return None if rows else 0  # the bias of a sum is added once
    for node, place in reads:
        if node.target in _PRODUCTS and _PRODUCTS[node.target][0] == place:
            return abs(_PRODUCTS[node.target][1] - rows)
    return 0


def _splits_heads(reads: _Reads, degree: int) -> bool:
    """Return whether a product's outputs are heads that the ranks do not divide: its module stays whole then."""
    products = (node for node, _ in reads if node.target in _PRODUCTS)
    return any(_heads(user) % degree for product in products for user in product.users if user.target in _VIEWS)


def _heads(view: fx.Node) -> int:
    """Return the outermost of the sizes that a view divides the last dimension of its input into; 0 if it keeps it."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    last, sizes = source.meta["val"].shape[-1], view.meta["val"].shape
    for place in range(len(sizes) - 1, 0, -1):
        if math.prod(size for size in sizes[place:]) == last:
            return int(sizes[place]) if place < len(sizes) - 1 else 0
    return 0


def sums_up(node: fx.Node, dimensions: Mapping[fx.Node, int]) -> bool:
    """Return whether an operation's result is the sum of what the ranks compute with their parts of a weight.

    Args:
        dimensions: those along which weights are divided, by the nodes that read them.
    """
    if node.target is _aten.embedding.default:
        return dimensions.get(node.all_input_nodes[0]) == 0
    if node.target not in _PRODUCTS:
        return False
    place, outputs = _PRODUCTS[node.target]
    weight = node.args[place]
    return isinstance(weight, fx.Node) and dimensions.get(weight) == 1 - outputs
