"""Stages that are to be priced, and the values that cross from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cost.stage_options import StageOptions
from planner.cost.work import Floats


@dataclass(frozen=True)
class Traffic:
    """A value, with the positions of the layer that makes it and of the layers that use it.

    `sent_bytes`, `returned_bytes`: of the value and its gradient on a link, which codes them.
    """

    name: str
    producer: int
    users: tuple[int, ...]  # ascending
    output_bytes: int
    gradient_bytes: int
    sent_bytes: int
    returned_bytes: int

    @property
    def amounts(self) -> Floats:
        """Bytes and numbers of messages over a cut that it crosses: activations, gradients; activations, gradients.

        Then the bytes of activations and gradients as tensors.
        """
        sizes = self.output_bytes, self.gradient_bytes
        return np.array([self.sent_bytes, self.returned_bytes, 1, sizes[1] > 0, *sizes], dtype=np.float64)


@dataclass(frozen=True)
class Candidate:
    """A stage to be priced: positions of its layers, and of all layers in the stages before it.

    `options`: how it runs. `ranks`: of its devices; consecutive ones when empty.
    """

    before: frozenset[int]
    layers: frozenset[int]
    options: StageOptions = field(default_factory=StageOptions)
    ranks: tuple[int, ...] = ()

    @property
    def replicas(self) -> int:
        """Workers that run the stage."""
        return self.options.replicas


def candidates(groups: Sequence[Sequence[int]], replicas: Sequence[int]) -> list[Candidate]:
    """Return stages by the positions of their layers."""
    before: frozenset[int] = frozenset()
    stages = []
    for layers, r in zip(groups, replicas, strict=True):
        stages.append(Candidate(before, frozenset(layers), StageOptions(r)))
        before |= frozenset(layers)
    return stages
