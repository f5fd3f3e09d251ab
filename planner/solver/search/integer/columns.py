"""The candidate stages of the integer program: its columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.recomputation import exact_everywhere
from planner.cost.work import Integers
from planner.errors import InputError
from planner.formats.files import replace
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.chain.variants import Stages, stages_on


@dataclass(frozen=True)
class Column:
    """A stage between two states, and its parts of the sum and of the maximum over the stages."""

    start: int
    end: int
    options: StageOptions
    kinds: frozenset[int]  # of its GPUs, by their numbers
    sum_s: float
    max_s: float
    most_after: int  # GPUs that its memory allows after it

    @property
    def replicas(self) -> int:
        """Workers that run the stage."""
        return self.options.replicas


class Columns:
    """The states of a problem and all candidate stages, if not too many."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

        # The same cuts for every kind of device, with its own times.
        self._spaces = [Chain(problem.layer_costs.on_kind(kind)) for kind in problem.kinds]
        self.space = self._spaces[0]
        self.sets = self.cuts()
        self.last = len(self.sets) - 1
        self.states = np.arange(len(self.sets))
        self._tables: dict[tuple[frozenset[int], int], list[Stages]] = {}

    def cuts(self) -> list[frozenset[int]]:
        """Return the layers before each cut, all of an earlier one before a later one."""
        return [self.space.members(0, state) for state in range(len(self.space))]

    @cached_property
    def all(self) -> list[Column]:
        """Every column that is not dominated by another one with the same ends."""
        most = self.problem.tuning.integer.most_columns
        columns: list[Column] = []
        for state in range(self.last):
            columns.extend(self.columns_from(state, self.states[state + 1 :]))
            if len(columns) > most:
                raise InputError(
                    f"more than {most} stages are too many for an integer program",
                    hint="use `solver=search`",
                )

        return columns

    @property
    def exact(self) -> bool:
        """Whether no stage of use is missing but those that divide gradients and weights."""
        if self.problem.recompute != "auto" or not self.problem.cluster.has_memory_limit:
            return True
        return all(exact_everywhere(space.layer_costs) for space in self._spaces)

    def layers(self, column: Column) -> frozenset[int]:
        """Return the positions of a stage's layers."""
        return self.sets[column.end] - self.sets[column.start]

    def columns_from(self, state: int, ends: Integers) -> Iterator[Column]:
        """Yield the candidate stages from the state to each of the ends."""
        works = [space.work(state, ends) for space in self._spaces]
        compute_s = np.stack([np.broadcast_to(work.compute_s, len(ends)) for work in works])
        for kinds in sets_of(len(works)):
            numbers = np.array(sorted(kinds))
            slowest = numbers[compute_s[numbers].argmax(axis=0)]
            for number in numbers.tolist():
                own = ends[slowest == number]
                if len(own):
                    yield from self._paced(state, own, kinds, number)

    def _paced(
        self,
        state: int,
        ends: Integers,
        kinds: frozenset[int],
        slowest: int,
    ) -> Iterator[Column]:
        """Yield the stages on GPUs of these kinds, on every number of replicas of use.

        A number is of no use if a smaller one is as fast and lets as many GPUs follow.
        """
        problem = self.problem
        memory_bytes = self._memory_bytes(kinds)
        kind = problem.kinds[slowest]
        if kind is not None:
            kind = replace(kind, memory_bytes=memory_bytes)

        stages = self._table(kinds, slowest)[state]
        for variant in np.flatnonzero(np.isin(stages.variants.ends, ends)).tolist():
            smaller: list[Column] = []
            for replicas in range(len(kinds), len(stages.after) + 1):
                row = replicas - 1, variant
                max_s = float(stages.max_s[row])
                most_after = min(int(stages.after[row]), problem.cluster.gpus - replicas)
                as_fast = [other for other in smaller if other.max_s <= max_s]
                if most_after < 0 or any(other.most_after >= most_after for other in as_fast):
                    continue

                column = Column(
                    start=state,
                    end=int(stages.variants.ends[variant]),
                    options=replace(stages.variants.options(variant, replicas), kind=kind),
                    kinds=kinds,
                    sum_s=float(stages.sum_s[variant]),
                    max_s=max_s,
                    most_after=most_after,
                )

                yield column
                smaller.append(column)

    def _memory_bytes(self, kinds: frozenset[int]) -> int | None:
        """Return the least memory of some kinds of GPUs; None without a limit."""
        limits = [self.problem.cluster.memory_of(self.problem.kinds[kind]) for kind in kinds]
        return min((limit for limit in limits if limit is not None), default=None)

    def _table(self, kinds: frozenset[int], slowest: int) -> list[Stages]:
        """Return all stages on GPUs of some kinds, by their first state."""
        key = kinds, slowest
        if key not in self._tables:
            self._tables[key] = stages_on(
                self.problem,
                self._spaces[slowest],
                self._memory_bytes(kinds),
                gpus_of(self.problem, kinds),
            )

        return self._tables[key]


def gpus_of(problem: Problem, kinds: frozenset[int]) -> int:
    """Return the number of GPUs of these kinds."""
    return sum(problem.count(problem.kinds[kind]) for kind in kinds)


def sets_of(count: int) -> list[frozenset[int]]:
    """Return all sets of so many kinds but the empty one, by their numbers."""
    sizes = range(1, count + 1)
    return [frozenset(numbers) for size in sizes for numbers in combinations(range(count), size)]
