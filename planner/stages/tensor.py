"""Ranks that divide every layer of a stage between them: each replica of the stage is a group of so
many.

With one rank per replica nothing is divided. Nobody else compares the number of ranks with 1: all
others ask a stage, or the stages of a plan, the questions below. What an option costs is in
`planner.cost.tensor`, which groups of ranks a plan and its cluster have in
`planner.plan.rank_groups`, how a module is divided in `planner.model.tensor`, and how it is
exported in `planner.exports`.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

Ranks = tuple[int, ...]


class DividedLayers:
    """The questions that others ask a stage about the ranks of its replicas."""

    if TYPE_CHECKING:  # pydantic would take this for a field

        @property
        def tensor(self) -> int: ...

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor

    @property
    def divides_layers(self) -> bool:
        """Whether several ranks divide every layer between them."""
        return self.tensor > 1


class RankGroups(DividedLayers):
    """The same of a stage whose ranks are known; those of a replica follow one another."""

    if TYPE_CHECKING:

        @property
        def ranks(self) -> Ranks: ...

    @property
    def leaders(self) -> Ranks:
        """The first rank of each replica."""
        return self.ranks_at(0)

    def ranks_at(self, place: int) -> Ranks:
        """Return the ranks at a place of their groups; where groups have fewer places, these
        repeat.
        """
        return self.ranks[place % self.tensor :: self.tensor]

    def place_of(self, rank: int) -> int:
        """Return the place of a rank in its group."""
        return self.ranks.index(rank) % self.tensor

    def group_of(self, rank: int) -> Ranks:
        """Return the ranks of the replica that a rank belongs to."""
        first = self.ranks.index(rank) // self.tensor * self.tensor
        return self.ranks[first : first + self.tensor]

    @property
    def rank_groups(self) -> Iterator[Ranks]:
        """The ranks of each replica."""
        for first in range(0, len(self.ranks), self.tensor):
            yield self.ranks[first : first + self.tensor]


def degrees_of(stages: Iterable[DividedLayers]) -> tuple[int, ...]:
    """Return the ranks of a replica, per stage."""
    return tuple(stage.tensor for stage in stages)


def most_ranks(stages: Iterable[DividedLayers]) -> int:
    """Return the ranks of the largest groups; 1 where no stage divides its layers."""
    return max(stage.tensor for stage in stages)


def any_divided(stages: Iterable[DividedLayers]) -> bool:
    return any(stage.divides_layers for stage in stages)


def one_degree(stages: Iterable[DividedLayers]) -> int | None:
    """Return the ranks that all replicas of all stages have; None where they differ."""
    degrees = {stage.tensor for stage in stages}
    if len(degrees) != 1:
        return None
    return degrees.pop()
