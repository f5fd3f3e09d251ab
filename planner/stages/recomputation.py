"""Layers of a stage that keep only what enters them, and run their forward again before their own
backward.

They do so in groups, runs of consecutive layers (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016). All others ask a stage the questions below. Which variants a stage has and what
they cost is in `planner.cost.recomputation`, how a module is built in `planner.model.stage`, and
how it is exported in `planner.exports`. No ranks are needed for it.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

NamedGroups = tuple[tuple[str, ...], ...]


class Recomputes:
    """What others ask of whatever has a `recompute`, which is empty or false where all activations
    are kept.
    """

    if TYPE_CHECKING:  # pydantic would take this for a field

        @property
        def recompute(self) -> object: ...

    @property
    def recomputes(self) -> bool:
        return bool(self.recompute)


class RecomputedLayers(Recomputes):
    """The same of a stage whose layers have names: groups of these, or true for the whole stage as
    one group.
    """

    if TYPE_CHECKING:

        @property
        def layers(self) -> tuple[str, ...]: ...

        @property
        def recompute(self) -> bool | NamedGroups: ...

    @property
    def recomputes_as_a_whole(self) -> bool:
        return self.recompute is True

    @property
    def recompute_groups(self) -> NamedGroups:
        """The groups of layers that recompute: of all layers where `recompute` is True."""
        if isinstance(self.recompute, bool):
            if not self.recompute:
                return ()
            return (self.layers,)
        return self.recompute

    @property
    def recomputed_layers(self) -> list[str]:
        return list(chain.from_iterable(self.recompute_groups))

    @property
    def recomputation_words(self) -> str:
        """Say what recomputes; empty for nothing."""
        if self.recomputes_as_a_whole:
            return "all layers"
        groups = len(self.recompute_groups)
        again = len(self.recomputed_layers)
        if again <= groups:
            if not again:
                return ""
            return f"{again} layer{'s' * (again > 1)}"

        return f"{groups} block{'s' * (groups > 1)}, {again} layers"


def why_no_groups(groups: NamedGroups, layers: Sequence[str]) -> str | None:
    """Return why these are no groups of a stage's layers; None if they are."""
    names = list(chain.from_iterable(groups))
    if not groups or not all(groups) or len(set(names)) < len(names):
        return "recompute lists groups of layers, each layer once at most"
    for group in groups:
        first = layers.index(group[0]) if group[0] in layers else 0
        if group != tuple(layers[first : first + len(group)]):
            return (
                f"the recomputing group of '{group[0]}' is no run of consecutive layers of "
                f"the stage"
            )

    return None
