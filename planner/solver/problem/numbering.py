"""What a plan may be beyond its stages by themselves: how many there are, and which number has the stage of a layer.

A walk along the cuts does not know how many stages came before. Where a limit binds, the number of a stage becomes part
of the walk's states: K numbers make it K times as long. Where the best plan without the limit keeps it, as it usually
does, that plan is the answer, and nothing takes longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Integers
from planner.solver.problem.states import StateSpace


@dataclass(frozen=True)
class Numbering:
    """The numbers that stages may have, from 0.

    Attributes:
        most_stages: of a plan; None without a limit.
        pins: layers, by position, and the number of the stage that must have them.
    """

    most_stages: int | None = None
    pins: tuple[tuple[int, int], ...] = ()

    def allows(self, stages: Iterable[Collection[int]]) -> bool:
        """Return whether a plan of these stages, each given by its layers, keeps the limits."""
        numbered = list(stages)
        if self.most_stages is not None and len(numbered) > self.most_stages:
            return False
        return all(number < len(numbered) and layer in numbered[number] for layer, number in self.pins)

    def allows_path(self, space: StateSpace, states: Sequence[int]) -> bool:
        """Return whether a path over a space keeps the limits."""
        return self == Numbering() or all(
            self.allows_stage(space, number, *ends) for number, ends in enumerate(pairwise(states))
        )

    def allows_stage(self, space: StateSpace, number: int, state: int, other: int) -> bool:
        """Return whether the stage between two states of a space may have the number."""
        last = other == len(space) - 1
        if self.most_stages is not None and number + 1 + (not last) > self.most_stages:
            return False
        inside = [pin for layer, pin in self.pins if space.holds(layer)[other] and not space.holds(layer)[state]]
        return all(pin == number for pin in inside)

    def most(self, space: StateSpace, gpus: int) -> int:
        """Return how many stages a plan over the space has at most."""
        most = min(gpus, len(space) - 1)
        return most if self.most_stages is None else min(most, self.most_stages)

    def numbers(self, space: StateSpace, state: int, others: Integers, count: int) -> NDArray[np.bool_]:
        """Return which of `count` numbers each stage from the state may have: (number, stage)."""
        inside = np.zeros((count, len(others)), dtype=np.int64)
        total = np.zeros(len(others), dtype=np.int64)
        for layer, number in self.pins:
            holds = space.holds(layer)
            within = holds[others] & ~holds[state]
            total += within
            if number < count:
                inside[number] += within
        return np.asarray(inside == total)
