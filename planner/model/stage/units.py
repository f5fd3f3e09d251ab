"""The units of a stage whose replicas divide its weights: PyTorch's `fully_shard` gathers the
weights of each apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from planner.errors import PlanError
from planner.formats.files import replace
from planner.model.capture.graph import LayerGraph
from planner.model.stage.parts import Segment
from planner.model.stage.weights import recurrent_modules
from planner.model.tensor.division import refuse_divided_hooks

Run = Callable[..., tuple[Tensor, ...]]


class Unit(nn.Module):
    """Runs the code that it is given; hooks of `fully_shard` gather its weights before, and part
    with them after.
    """

    def forward(self, run: Run, *values: object) -> tuple[Tensor, ...]:
        made = run(*values)
        # What autocast remembers of weights would outlive them.
        torch.clear_autocast_cache()
        # A view that the next unit writes to would lose the hook that gathers the weights for the
        # backward.
        return tuple(
            each.clone() if each._is_view() and each.requires_grad else each for each in made
        )

    def hold(self, module: nn.Module) -> None:
        """Hold the weights and buffers of `module`, but not those of modules within it."""
        holder = nn.Module()
        for registry in ("_parameters", "_buffers"):
            holder.__dict__[registry] = getattr(module, registry)
        self.add_module(str(len(self._modules)), holder)


@dataclass(frozen=True)
class Units:
    """The units of a stage, and what runs them all, in which the weights are that several units
    use.
    """

    layers: tuple[tuple[str, ...], ...]  # of each unit, in order
    weights: tuple[frozenset[str], ...]  # of each unit alone, under all names
    parts: tuple[Unit, ...]
    whole: Unit

    def wrapped(
        self, segments: Sequence[Segment], layers: Sequence[Sequence[str]]
    ) -> list[Segment]:
        """Return segments that the units run, one for each that has `layers`."""
        parts = (part for part, names in zip(self.parts, layers, strict=True) if names)
        return [
            replace(each, run=partial(part, each.run))
            for part, each in zip(parts, segments, strict=True)
        ]


def units_of(graph: LayerGraph, layers: Sequence[Sequence[str]]) -> Units:
    """Return units of these layers, which are all of the graph's; raise PlanError for what
    `fully_shard` cannot cut.
    """
    if graph.blocks is not None and (found := recurrent_modules(graph, graph.layers)):
        raise PlanError(
            f"replicas that shard weights cannot gather those of a recurrent layer, such as "
            f"'{found[0][1][0]}', in a "
            "block, which runs as it is and remembers them",
            hint="leave out blocks(), or solve with `shard_optimizer=never`",
        )

    for name, parameter in graph.model.named_parameters():
        refuse_divided_hooks(name, parameter)
    users = _users_of_weights(graph, layers)
    alone = []
    for number in range(len(layers)):
        names = [name for name, units in users.items() if units == {number}]
        alone.append(frozenset(graph.names_of(names)))

    return Units(tuple(map(tuple, layers)), tuple(alone), tuple(Unit() for _ in layers), Unit())


def _users_of_weights(graph: LayerGraph, layers: Sequence[Sequence[str]]) -> dict[str, set[int]]:
    """Return the numbers of the units that use each weight, themselves or what was computed from
    weights alone, which may be a view of them.
    """
    unit_of = {name: number for number, names in enumerate(layers) for name in names}
    users: dict[str, set[int]] = {}
    computed: dict[fx.Node, set[str]] = {}  # from these weights alone
    for layer in graph.layers:
        unit = unit_of[layer.name]
        for name in layer.parameters:
            users.setdefault(name, set()).add(unit)
        for node in layer.nodes:
            origins = [_weights_behind(source, graph, computed) for source in node.all_input_nodes]
            known = [weights for weights in origins if weights is not None]
            if known and len(known) == len(origins):
                computed[node] = set().union(*known)
            for source in node.all_input_nodes:
                for name in computed.get(source, ()):
                    users.setdefault(name, set()).add(unit)

    return users


def _weights_behind(
    source: fx.Node, graph: LayerGraph, computed: Mapping[fx.Node, set[str]]
) -> set[str] | None:
    """Return the weights that a value is, or was computed from alone; None where it depends on more
    than weights.
    """
    weight = graph.names.parameter(source)
    if weight:
        return {weight}
    return computed.get(source)
