"""Layers that cost nothing wherever they are, which a search for the smallest load may leave out.

A layer without time and bytes that touches only one other layer is best placed with that layer. One
whose values cost nothing and which needs no values itself can go into the first stage. Graphs are
full of such layers (shapes, masks, hidden states that nobody uses), and each may double the number
of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published.dnn_partitioning.objective import compute_s, held_bytes
from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.formats.profile import Profile


class Reduced:
    """A profile without its free layers; `layer_costs` is of what is left, `expand` puts the others
    back.

    Args:
        layer_costs: of the whole profile.
        memory_matters: whether some device cannot hold all layers: if not, bytes cost nothing.
    """

    def __init__(self, layer_costs: LayerCosts, *, memory_matters: bool) -> None:
        self._whole, self._memory_matters = layer_costs, memory_matters
        profile = layer_costs.profile
        # free layer to the layer it goes with; None for the first stage
        self._with: dict[str, str | None] = {}
        if not profile.no_cut_after:  # which speaks of neighbours in the order
            while (found := self._free_layer()) is not None:
                self._with[found[0]] = found[1]
        self.layer_costs = LayerCosts(_without(profile, self._with)) if self._with else layer_costs

    def expand(self, stages: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return stages of the whole profile from stages of the reduced one."""
        names = [layer.name for layer in self.layer_costs.profile.layers]
        home = {
            names[index]: number for number, stage in enumerate(stages) for index in stage.layers
        }
        for free in reversed(self._with):
            other = self._with[free]
            home[free] = 0 if other is None else home[other]
        before: frozenset[int] = frozenset()
        expanded = []
        for number, stage in enumerate(stages):
            layers = frozenset(
                self._whole.position[name] for name, its in home.items() if its == number
            )
            expanded.append(replace(stage, before=before, layers=layers))
            before |= layers
        return tuple(expanded)

    def _free_layer(self) -> tuple[str, str | None] | None:
        profile = self._whole.profile
        edges = [
            edge
            for edge in profile.edges
            if edge.source not in self._with and edge.target not in self._with
        ]
        left = [layer for layer in profile.layers if layer.name not in self._with]
        for layer in left:
            if (
                compute_s(layer) > 0
                or (self._memory_matters and held_bytes(layer))
                or len(left) == 1
            ):
                continue
            needs = {edge.source for edge in edges if edge.target == layer.name}
            feeds = {edge.target for edge in edges if edge.source == layer.name}
            if len(needs | feeds) == 1:
                return layer.name, next(iter(needs | feeds))
            if not needs and not any(
                value.output_bytes + value.gradient_bytes for value in layer.outputs
            ):
                return layer.name, None
        return None


def _without(profile: Profile, names: dict[str, str | None]) -> Profile:
    return profile.model_copy(
        update={
            "layers": tuple(layer for layer in profile.layers if layer.name not in names),
            "edges": tuple(
                edge
                for edge in profile.edges
                if edge.source not in names and edge.target not in names
            ),
        }
    )
