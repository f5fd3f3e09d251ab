"""The plan whose largest load is smallest: by the search over cuts, and by integer programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.published.dnn_partitioning.cuts import LoadSearch
from benchmarks.published.dnn_partitioning.downsets import (
    Words,
    enumerate_downsets,
    to_bits,
    to_words,
)
from benchmarks.published.dnn_partitioning.free_layers import Reduced
from benchmarks.published.dnn_partitioning.objective import LoadProblem
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Integers
from planner.solver.clock import Clock
from planner.solver.problem.budget import Budget
from planner.solver.problem.result import IlpAnswer
from planner.solver.problem.states import uncut_groups
from planner.solver.search.integer.columns import Column, Columns
from planner.solver.search.integer.ilp_flow import Flow

MOST_STATES = 60_000
MOST_STATES_OF_PROGRAM = 2_000


def solve_loads(request: LoadProblem, clock: Clock) -> IlpAnswer | None:
    """Search over the cuts of the graph.

    Returns:
        The plan with the smallest largest load, or None when nothing fits.

    Raises:
        TimeoutError: when the deadline passes before there is any plan.
    """
    reduced = Reduced(request.layer_costs, memory_matters=request.memory_matters)
    # The cuts along the profile's order are few, and their best plan bounds the search over all of
    # them.
    best = LoadSearch(reduced.layer_costs, _prefixes(reduced.layer_costs), request.cluster).best(
        np.inf, clock
    )
    every, bound_s = enumerate_downsets(reduced.layer_costs, MOST_STATES), request.relaxed_s
    if every is not None:
        over = LoadSearch(reduced.layer_costs, every, request.cluster)
        best = over.best(np.inf if best is None else best.seconds, clock) or best
        if not over.interrupted and best is not None:
            bound_s = best.seconds
    if best is None:
        if clock.passed:
            raise TimeoutError
        return None
    bound_s = min(bound_s, best.seconds)
    return IlpAnswer(
        reduced.expand(best.stages), best.seconds, bound_s, optimal=bound_s == best.seconds
    )


def solve_ilp(request: LoadProblem, clock: Clock) -> IlpAnswer | None:
    """Solve the integer program, the product's flow between cuts.

    Returns:
        The plan with the smallest largest load or None when there is none.

    Raises:
        InputError: for graphs that are too large.
        TimeoutError: when the deadline passes before there is any plan.
    """
    reduced = Reduced(request.layer_costs, memory_matters=request.memory_matters)
    request = replace(request, layer_costs=reduced.layer_costs)
    columns = LoadColumns(request)
    answer = Flow(replace(request, budget=Budget(clock)), columns).solve()
    if answer is None:
        return None
    # too many cuts to list: those along the order prove nothing about the others
    if not columns.complete:
        bound_s = min(answer.bound_s, request.relaxed_s)
        answer = replace(
            answer, bound_s=bound_s, optimal=answer.optimal and bound_s >= answer.seconds
        )
    return replace(answer, stages=reduced.expand(answer.stages))


class LoadColumns(Columns):
    """Candidate stages of the flow formulation: one device each, whatever follows them."""

    def __init__(self, request: LoadProblem) -> None:
        self.complete = True
        super().__init__(request)
        self._loads = request

    def cuts(self) -> list[frozenset[int]]:
        """Return the layers before each cut of the graph, or along the profile's order where cuts
        are too many.
        """
        words = enumerate_downsets(self.problem.layer_costs, MOST_STATES_OF_PROGRAM)
        if words is None:
            self.complete = False
            return super().cuts()
        bits = to_bits(words, len(self.problem.layer_costs.profile.layers))
        return [frozenset(np.flatnonzero(row).tolist()) for row in bits]

    def columns_from(self, state: int, others: Integers) -> Iterator[Column]:
        """Yield the stages from the state to each of the others that fit a device of some kind."""
        request = self._loads
        for other in map(int, others):
            if not self.sets[state] < self.sets[other]:
                continue
            for number, kind in enumerate(request.kinds):
                stage = Candidate(
                    self.sets[state],
                    self.sets[other] - self.sets[state],
                    StageOptions(1, kind=kind),
                )
                (busy_s, held), limit = request.load(stage), request.cluster.memory_of(kind)
                if limit is None or held <= limit:
                    kinds = frozenset({number})
                    yield Column(
                        state, other, stage.options, kinds, 0.0, busy_s, request.cluster.gpus - 1
                    )


def _prefixes(layer_costs: LayerCosts) -> Words:
    """Return the cuts along the profile's order."""
    ends = [0, *(group[-1] + 1 for group in uncut_groups(layer_costs))]
    return to_words([range(end) for end in ends], len(layer_costs.profile.layers))
