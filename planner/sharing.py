"""Weights that several stages of a plan would share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.plan_file import Plan


@dataclass(frozen=True)
class SharedWeight:
    """A parameter that layers of two stages use."""

    name: str
    layers: tuple[str, str]
    stages: tuple[int, int]

    @property
    def sentence(self) -> str:
        """What is wrong with it."""
        return (
            f"stages {self.stages[0]} and {self.stages[1]} share the weight '{self.name}' of the layers "
            f"'{self.layers[0]}' and '{self.layers[1]}', which `plan train` does not keep equal yet"
        )

    @property
    def hint(self) -> str:
        """What to do."""
        return f"keep them in one stage: plan solve --colocate {self.layers[0]},{self.layers[1]}; or untie the weights"


def shared_weight(plan: Plan, parameters: Mapping[str, Collection[str]]) -> SharedWeight | None:
    """The first weight that several stages use, or None.

    Args:
        plan: whose stages name their layers.
        parameters: of each layer, the first name standing for all of a tied one.
    """
    first: dict[str, tuple[str, int]] = {}
    for number, stage in enumerate(plan.stages):
        for layer in stage.layers:
            for name in sorted(parameters.get(layer, ())):
                other, where = first.setdefault(name, (layer, number))
                if where != number:
                    return SharedWeight(name, (other, layer), (where, number))
    return None
