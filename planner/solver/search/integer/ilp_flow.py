"""The flow formulation: a pipeline is a path through the cuts, and every candidate stage an arc with a binary variable.

docs/explanation/solver.md has the rows. A plan takes a sum over its stages plus a maximum over them, which is bounded
by leaving stages out, because a relaxed variable for it would be too weak. All coefficients are 0 or 1, and
a plan's times are summed over its stages, so rounding inside the solver does not matter.

What a stage holds depends on the GPUs after it. Where that matters, nodes are pairs of a cut and the GPUs after it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import pulp

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.recomputation import exact_everywhere
from planner.cost.work import Integers
from planner.errors import InputError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import IlpAnswer
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import Stages, stages_on
from planner.solver.search.integer.cbc import run
from planner.units import SLACK

MOST_COLUMNS = 200_000


@dataclass(frozen=True)
class Column:
    """A stage from one state to another, and its parts of the sum over the stages and of the maximum over them."""

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
        self._stages_of: dict[tuple[frozenset[int], int], list[Stages]] = {}

    def cuts(self) -> list[frozenset[int]]:
        """Return the layers before each cut, all of an earlier one before a later one."""
        return [frozenset(self.space.layers(0, state)) for state in range(len(self.space))]

    @cached_property
    def all(self) -> list[Column]:
        """Every column that is not dominated by another one with the same ends."""
        found: list[Column] = []
        for number, state in enumerate(self.states[:-1]):
            found.extend(self.columns_from(int(state), self.states[number + 1 :]))
            if len(found) > MOST_COLUMNS:
                raise InputError(
                    f"more than {MOST_COLUMNS} candidate stages are too many for an integer program",
                    hint="use `solver=search`",
                )
        return found

    @property
    def exact(self) -> bool:
        """Whether no stage of use is missing but those that divide gradients and weights."""
        chooses = self.problem.recompute == "auto" and self.problem.cluster.has_memory_limit
        return not chooses or all(exact_everywhere(space.layer_costs) for space in self._spaces)

    def layers(self, column: Column) -> frozenset[int]:
        return self.sets[column.end] - self.sets[column.start]

    def columns_from(self, state: int, others: Integers) -> Iterator[Column]:
        """Yield the candidate stages from the state to each of the others."""
        works = [space.work(state, others) for space in self._spaces]
        paces = np.stack([np.broadcast_to(work.compute_s, len(others)) for work in works])
        for kinds in sets_of(len(works)):
            slowest = np.array(sorted(kinds))[paces[sorted(kinds)].argmax(axis=0)]
            for number in sorted(kinds):
                if len(own := others[slowest == number]):
                    yield from self._paced(state, own, kinds, number)

    def _paced(self, state: int, others: Integers, kinds: frozenset[int], number: int) -> Iterator[Column]:
        """Yield the stages on GPUs of these kinds, of which one is the slowest, on every number of replicas of use.

        A number is of no use if a smaller one is as fast and lets as many GPUs follow.
        """
        problem, pace = self.problem, self.problem.kinds[number]
        limits = [problem.cluster.memory_of(problem.kinds[each]) for each in kinds]
        limit = min((each for each in limits if each is not None), default=None)
        if (kinds, number) not in self._stages_of:
            count = sum(problem.count(problem.kinds[each]) for each in kinds)
            self._stages_of[kinds, number] = stages_on(problem, self._spaces[number], limit, count)
        stages = self._stages_of[kinds, number][state]
        pace = pace and pace.model_copy(update={"memory_bytes": limit})
        for way in np.flatnonzero(np.isin(stages.ways.others, others)):
            smaller: list[tuple[float, int]] = []  # times and followers of smaller replica counts
            sum_s, end = float(stages.sum_s[way]), int(stages.ways.others[way])
            for r in range(len(kinds), len(stages.after) + 1):
                max_s = float(stages.max_s[r - 1, way])
                after = min(int(stages.after[r - 1, way]), problem.cluster.gpus - r)
                useless = any(max_s >= s and after <= room for s, room in smaller)
                if after >= 0 and not useless:
                    options = replace(stages.ways.options(int(way), r), kind=pace)
                    yield Column(state, end, options, kinds, sum_s, max_s, after)
                    smaller.append((max_s, after))


def sets_of(count: int) -> list[frozenset[int]]:
    """Return all sets of so many kinds but the empty one, by their numbers."""
    return [frozenset(each) for size in range(1, count + 1) for each in combinations(range(count), size)]


MOST_ARCS = 300_000
_SCALE = 1000.0  # what the time of a balanced plan is scaled to


Node = tuple[int, int]  # state, GPUs after it; -1 where they do not matter


@dataclass(frozen=True)
class _Arc:
    column: Column
    tail: Node
    head: Node


@dataclass(frozen=True)
class _Chosen:
    columns: tuple[Column, ...]

    @property
    def sum_s(self) -> float:
        return sum(column.sum_s for column in self.columns)

    @property
    def max_s(self) -> float:
        return max(column.max_s for column in self.columns)

    @property
    def seconds(self) -> float:
        return self.sum_s + self.max_s


class Flow:
    """The integer program of a problem over its columns."""

    def __init__(self, problem: Problem, columns: Columns) -> None:
        self.problem, self.columns = problem, columns
        self.gpus = problem.cluster.gpus
        self.arcs = _arcs(problem, columns)
        self._scale = _SCALE * self.gpus / float(columns.space.compute_s[-1])

    def solve(self) -> IlpAnswer | None:
        """Return the fastest plan; None if there is none. Raise `TimeoutError` if time runs out before any is found."""
        return self._bisected() if self.problem.schedule.asynchronous else self._traded()

    def _bisected(self) -> IlpAnswer | None:
        best, optimal = self._with_fewest_gpus(self.arcs), True
        if best is None:
            return None
        # The time of a plan is the time of one of its stages, so only these can be the answer.
        times = np.unique([arc.column.max_s for arc in self.arcs])
        first, last = 0, int(np.searchsorted(times, best.seconds))  # the answer is among times[first .. last]
        try:
            while first < last:
                middle = (first + last) // 2
                better = self._with_fewest_gpus([arc for arc in self.arcs if arc.column.max_s <= times[middle]])
                if better is None:
                    first = middle + 1
                else:
                    best, last = better, int(np.searchsorted(times, better.seconds))
        except TimeoutError:
            optimal = False
        return self._answer(best, best.seconds if optimal else float(times[first]), optimal=optimal)

    def _traded(self) -> IlpAnswer | None:
        best, arcs, bound_s, optimal = None, self.arcs, 0.0, True
        try:
            while found := self._cheapest(arcs, [arc.column.sum_s * self._scale for arc in arcs]):
                best = found if best is None or found.seconds < best.seconds else best
                bound_s = found.sum_s
                # A better plan needs a smaller maximum, and a total below the best.
                limit_s = min(found.max_s, best.seconds - found.sum_s)
                arcs = [arc for arc in arcs if arc.column.max_s < limit_s]
        except TimeoutError:
            if best is None:
                raise
            optimal = False
        if best is None:
            return None
        best = self._leanest(best)
        return self._answer(best, best.seconds if optimal else min(bound_s, best.seconds), optimal=optimal)

    def _leanest(self, found: _Chosen) -> _Chosen:
        """Return the plan with the same sum and maximum that has fewest GPUs, stages, and recomputing stages."""
        limit_s = found.seconds * (1 + SLACK)
        arcs = [arc for arc in self.arcs if arc.column.max_s <= found.max_s * (1 + SLACK)]
        try:
            lean = self._with_fewest_gpus(arcs, found.sum_s)
        except TimeoutError:
            return found
        return lean if lean is not None and lean.seconds <= limit_s else found

    def _with_fewest_gpus(self, arcs: Sequence[_Arc], most_sum_s: float = 0.0) -> _Chosen | None:
        """Return the leanest plan of these arcs whose sum is at most the given one, if that is not 0."""
        weight = len(self.columns.states) + 1
        # One number that orders by GPUs, then stages, then recomputing stages.
        costs = [(arc.column.replicas * weight + 1) * weight + bool(arc.column.options.recompute) for arc in arcs]
        return self._cheapest(arcs, costs, most_sum_s)

    def _cheapest(self, arcs: Sequence[_Arc], costs: Sequence[float], most_sum_s: float = 0.0) -> _Chosen | None:
        deadline = self.problem.deadline
        if deadline.passed:
            raise TimeoutError
        if not arcs:
            return None
        program = pulp.LpProblem("pipeline", pulp.LpMinimize)
        chosen = self._path(program, arcs)
        program.setObjective(_weighted(zip(chosen, costs, strict=True)))
        if most_sum_s > 0:
            sums = _weighted((x, arc.column.sum_s * self._scale) for x, arc in zip(chosen, arcs, strict=True))
            program += sums <= most_sum_s * self._scale * (1 + SLACK)
        status = run(program, deadline.left_s, deadline.stop)
        if status == "infeasible":
            return None
        if status != "optimal":
            raise TimeoutError
        picked = [arc.column for arc, x in zip(arcs, chosen, strict=True) if x.value() > 0.5]
        return _Chosen(tuple(sorted(picked, key=lambda column: column.start)))

    def _path(self, program: pulp.LpProblem, arcs: Sequence[_Arc]) -> list[pulp.LpVariable]:
        """Return the variables of the arcs, with rows that make them one path on no more GPUs than there are."""
        chosen = [program.add_variable(f"x{n}", cat=pulp.LpBinary) for n in range(len(arcs))]
        balance: dict[Node, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
        for variable, arc in zip(chosen, arcs, strict=True):
            balance[arc.tail].append((variable, 1.0))
            balance[arc.head].append((variable, -1.0))
        begins = [(x, 1.0) for x, arc in zip(chosen, arcs, strict=True) if arc.column.start == 0]
        program += _weighted(begins) == 1
        for (state, _), terms in balance.items():
            if state not in (0, self.columns.last):
                program += _weighted(terms) == 0
        # A stage may have GPUs of several kinds. All get theirs if those that must be of some kinds are no more than
        # there are of these, for every set of kinds (Hall 1935).
        for kinds in sets_of(len(self.problem.kinds)):
            used = ((x, arc.column.replicas) for x, arc in zip(chosen, arcs, strict=True) if arc.column.kinds <= kinds)
            program += _weighted(used) <= sum(self.problem.count(self.problem.kinds[kind]) for kind in kinds)
        if (most := self.problem.rules.max_stages) is not None:
            program += _weighted((x, 1.0) for x in chosen) <= most
        return chosen

    def _answer(self, best: _Chosen, bound_s: float, *, optimal: bool) -> IlpAnswer:
        sets, layers = self.columns.sets, self.columns.layers
        stages = tuple(Candidate(sets[column.start], layers(column), column.options) for column in best.columns)
        return IlpAnswer(stages, best.seconds, bound_s, optimal, tuple(column.kinds for column in best.columns))


def _arcs(problem: Problem, columns: Columns) -> list[_Arc]:
    gpus = problem.cluster.gpus
    # Nodes with GPUs multiply the arcs, so they are only made where some stage limits the GPUs after it.
    count_gpus = any(column.most_after < gpus - column.replicas for column in columns.all)
    arcs: list[_Arc] = []
    for column in columns.all:
        afters: Sequence[int] = range(min(column.most_after, gpus - column.replicas) + 1) if count_gpus else (-1,)
        for after in afters:
            if (column.end == columns.last) != (after <= 0) and count_gpus:
                continue
            before = after + column.replicas if count_gpus else -1
            arcs.append(_Arc(column, (column.start, before), (column.end, after)))
        if len(arcs) > MOST_ARCS:
            raise InputError(
                f"more than {MOST_ARCS} places for stages are too many for an integer program",
                hint="use `solver=search`, or fewer GPUs",
            )
    return arcs


def _weighted(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(terms))
