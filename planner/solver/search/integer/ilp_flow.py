"""The flow formulation: a pipeline is a path through the cuts, and every candidate stage is an arc.

    minimise    Σ cost(a) · x(a)                        x(a) ∈ {0, 1}: whether the plan has arc a
    subject to  Σ x(a) = 1                              over the arcs that leave the first cut
                Σ x(a) - Σ x(b) = 0                     arcs a that leave a node, b that enter it
                Σ replicas(a) · x(a) ≤ GPUs of kinds    over the arcs on kinds, for each set of them

A plan takes a sum over its stages plus a maximum over them. The maximum is bounded by leaving
stages out, because a relaxed variable for it would be too weak. All coefficients are 0 or 1, and a
plan's times are summed over its stages, so rounding inside the solver does not matter.

What a stage holds depends on the GPUs after it. Where that matters, nodes are pairs of a cut and
the GPUs after it. docs/explanation/solver.md has more about the rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from planner.cost.candidate import Candidate
from planner.errors import InputError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import IlpAnswer
from planner.solver.search.integer.cbc import run
from planner.solver.search.integer.columns import Column, Columns, gpus_of, sets_of
from planner.solver.search.trade import trade_offs
from planner.units import SLACK

SCALE = 1000.0  # what the time of a balanced plan is scaled to

Node = tuple[int, int]  # state, GPUs after it; -1 where they do not matter


@dataclass(frozen=True)
class _Arc:
    """A stage between two nodes."""

    column: Column
    tail: Node
    head: Node


_Term = tuple[pulp.LpVariable, float]  # a variable, and its coefficient
_Choices = Sequence[tuple[pulp.LpVariable, _Arc]]  # whether the plan has each arc


@dataclass(frozen=True)
class _Chosen:
    """The stages of a plan, in their order."""

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
        self.problem = problem
        self.columns = columns
        self.gpus = problem.cluster.gpus
        self.arcs = _arcs(problem, columns)
        self._scale = SCALE * self.gpus / float(columns.space.compute_s[-1])

    def solve(self) -> IlpAnswer | None:
        """Return the fastest plan; None if there is none.

        Raises:
            TimeoutError: when time runs out before any plan is there.
        """
        if self.problem.schedule.asynchronous:
            return self._least_maximum()
        return self._least_total()

    def _least_maximum(self) -> IlpAnswer | None:
        """Return the plan of an asynchronous pipeline, whose time is the maximum.

        It is the time of one of the stages, and a bisection over these times finds it.
        """
        best = self._with_fewest_gpus(self.arcs)
        if best is None:
            return None

        times = np.unique([arc.column.max_s for arc in self.arcs])
        first = 0
        last = int(np.searchsorted(times, best.seconds))  # the answer is among times[first .. last]
        try:
            while first < last:
                middle = (first + last) // 2
                arcs = [arc for arc in self.arcs if arc.column.max_s <= times[middle]]
                faster = self._with_fewest_gpus(arcs)
                if faster is None:
                    first = middle + 1
                else:
                    best = faster
                    last = int(np.searchsorted(times, best.seconds))
        except TimeoutError:
            return self._answer(best, float(times[first]), optimal=False)

        return self._answer(best, best.seconds, optimal=True)

    def _least_total(self) -> IlpAnswer | None:
        """Return the plan of a synchronous pipeline, with the least sum plus maximum."""
        best = None
        bound_s = 0.0
        optimal = True
        try:
            for chosen in trade_offs(self._least_sum, step=0.0):
                bound_s = chosen.sum_s
                if best is None or chosen.seconds < best.seconds:
                    best = chosen
        except TimeoutError:
            if best is None:
                raise
            optimal = False

        if best is None:
            return None

        best = self._leanest(best)
        if optimal:
            bound_s = best.seconds
        else:
            bound_s = min(bound_s, best.seconds)

        return self._answer(best, bound_s, optimal=optimal)

    def _least_sum(self, limit_s: float) -> _Chosen | None:
        """Return the plan of least sum whose maximum is below the limit."""
        arcs = [arc for arc in self.arcs if arc.column.max_s < limit_s]
        return self._cheapest(arcs, [arc.column.sum_s * self._scale for arc in arcs])

    def _leanest(self, chosen: _Chosen) -> _Chosen:
        """Return the plan as fast as this that has fewest GPUs, stages, and recomputing stages."""
        slack = 1 + SLACK
        arcs = [arc for arc in self.arcs if arc.column.max_s <= chosen.max_s * slack]
        try:
            lean = self._with_fewest_gpus(arcs, chosen.sum_s)
        except TimeoutError:
            return chosen

        if lean is None or lean.seconds > chosen.seconds * slack:
            return chosen
        return lean

    def _with_fewest_gpus(self, arcs: Sequence[_Arc], most_sum_s: float = 0.0) -> _Chosen | None:
        """Return the leanest plan of these arcs, whose sum is at most the given one if not 0."""
        weight = len(self.columns.states) + 1
        costs = []
        for arc in arcs:
            # One number that orders by GPUs, then stages, then recomputing stages.
            stages = arc.column.replicas * weight + 1
            costs.append(stages * weight + arc.column.options.recomputes)

        return self._cheapest(arcs, costs, most_sum_s)

    def _cheapest(
        self,
        arcs: Sequence[_Arc],
        costs: Sequence[float],
        most_sum_s: float = 0.0,
    ) -> _Chosen | None:
        """Return the plan of these arcs whose costs are least; None without one.

        Raises:
            TimeoutError: when time runs out.
        """
        clock = self.problem.clock
        if clock.passed:
            raise TimeoutError
        if not arcs:
            return None

        program = pulp.LpProblem("pipeline", pulp.LpMinimize)
        chosen = self._path(program, arcs)
        program.setObjective(_weighted(zip(chosen, costs, strict=True)))
        if most_sum_s > 0:
            sums = [arc.column.sum_s * self._scale for arc in arcs]
            most = most_sum_s * self._scale * (1 + SLACK)
            program += _weighted(zip(chosen, sums, strict=True)) <= most

        status = run(program, clock.left_s, clock.stop, self.problem.tuning.integer)
        if status == "infeasible":
            return None
        if status != "optimal":
            raise TimeoutError

        columns = [arc.column for arc, x in zip(arcs, chosen, strict=True) if x.value() > 0.5]
        return _Chosen(tuple(sorted(columns, key=lambda column: column.start)))

    def _path(self, program: pulp.LpProblem, arcs: Sequence[_Arc]) -> list[pulp.LpVariable]:
        """Return the variables of the arcs, with rows that make them one path on the GPUs."""
        names = [f"x{number}" for number in range(len(arcs))]
        variables = [program.add_variable(name, cat=pulp.LpBinary) for name in names]
        chosen = list(zip(variables, arcs, strict=True))

        self._add_balance(program, chosen)
        self._add_gpus(program, chosen)
        most_stages = self.problem.rules.max_stages
        if most_stages is not None:
            program += _weighted((x, 1.0) for x in variables) <= most_stages
        return variables

    def _add_balance(self, program: pulp.LpProblem, chosen: _Choices) -> None:
        """Let one arc leave the first cut, and as many leave each other node as enter it."""
        balance: dict[Node, list[_Term]] = defaultdict(list)
        starts: list[_Term] = []
        for x, arc in chosen:
            balance[arc.tail].append((x, 1.0))
            balance[arc.head].append((x, -1.0))
            if arc.column.start == 0:
                starts.append((x, 1.0))

        program += _weighted(starts) == 1
        for (state, _), terms in balance.items():
            if state not in (0, self.columns.last):
                program += _weighted(terms) == 0

    def _add_gpus(self, program: pulp.LpProblem, chosen: _Choices) -> None:
        """Let every stage have its GPUs, which may be of several kinds.

        All get theirs if those that must be of some kinds are no more than there are of these, for
        every set of kinds (Hall 1935).
        """
        for kinds in sets_of(len(self.problem.kinds)):
            used = ((x, arc.column.replicas) for x, arc in chosen if arc.column.kinds <= kinds)
            program += _weighted(used) <= gpus_of(self.problem, kinds)

    def _answer(self, best: _Chosen, bound_s: float, *, optimal: bool) -> IlpAnswer:
        stages = []
        for column in best.columns:
            before = self.columns.sets[column.start]
            stages.append(Candidate(before, self.columns.layers(column), column.options))

        kinds = tuple(column.kinds for column in best.columns)
        return IlpAnswer(tuple(stages), best.seconds, bound_s, optimal, kinds)


def _arcs(problem: Problem, columns: Columns) -> list[_Arc]:
    """Return each candidate stage between the nodes where it may be."""
    gpus = problem.cluster.gpus
    most = problem.tuning.integer.most_arcs

    # 1. Nodes with GPUs multiply the arcs, so they are only made where a stage limits those after
    #    it.
    if all(column.most_after >= gpus - column.replicas for column in columns.all):
        arcs = [_Arc(column, (column.start, -1), (column.end, -1)) for column in columns.all]
        _refuse_many(arcs, most)
        return arcs

    # 2. No GPUs come after the last stage, and some after all others.
    arcs = []
    for column in columns.all:
        is_last = column.end == columns.last
        most_after = min(column.most_after, gpus - column.replicas)
        for after in range(most_after + 1):
            if is_last == (after == 0):
                tail = column.start, after + column.replicas
                head = column.end, after
                arcs.append(_Arc(column, tail, head))

        _refuse_many(arcs, most)

    return arcs


def _refuse_many(arcs: Sequence[_Arc], most: int) -> None:
    if len(arcs) > most:
        raise InputError(
            f"more than {most} places for stages are too many for an integer program",
            hint="use `solver=search`, or fewer GPUs",
        )


def _weighted(terms: Iterable[_Term]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(terms))
