"""List the candidate stages of the flow formulation: every pair of cuts, replica count and kind of GPU that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np

from planner.cost.candidate import Candidate, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Footprint, Integers, Work
from planner.errors import InputError
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain, StateSpace
from planner.solver.search.chain.ways import WaysOf, most_after, taken
from planner.solver.search.graph.downsets import Downsets, enumerate_downsets

MOST_STATES = 2_000
MOST_COLUMNS = 200_000


@dataclass(frozen=True)
class Column:
    """A stage from one state to another, on GPUs of these kinds, by their numbers.

    `sum_s` and `max_s` are its parts of the sum over the stages and of the maximum over them. Its memory allows at most
    `most_after` GPUs after it.
    """

    start: int
    end: int
    options: StageOptions
    kinds: frozenset[int]
    sum_s: float
    max_s: float
    most_after: int
    recomputes: bool = False

    @property
    def replicas(self) -> int:
        """Workers that run the stage."""
        return self.options.replicas


class Columns:
    """The states of a problem and all its candidate stages.

    Args:
        all_cuts: every cut of the graph, not only those along the profile's order.

    Raises:
        InputError: if they are too many.
    """

    def __init__(self, problem: Problem, *, all_cuts: bool) -> None:
        self.problem = problem
        # The same cuts for every kind of device, with its own times.
        spaces = [_space(problem.layer_costs.on_kind(kind), all_cuts) for kind in problem.kinds]
        self.space = spaces[0]
        self._of_kinds = [(each, _states_in(each, self.space)) for each in spaces]
        sets = [frozenset(self.space.layers(0, state)) for state in range(len(self.space))]
        # States that separate no group; the empty one and the whole model never do.
        groups = problem.groups
        self.states = np.array(
            [number for number, done in enumerate(sets) if all(group <= done or not group & done for group in groups)]
        )
        self.sets = sets
        self.last = len(self.space) - 1

    @cached_property
    def all(self) -> list[Column]:
        """Every column that is not dominated by another one with the same ends."""
        found: list[Column] = []
        for number, state in enumerate(self.states[:-1]):
            others = self.space.among_later(int(state), self.states[number + 1 :])
            if len(others):
                found.extend(self.columns_from(int(state), others))
            if len(found) > MOST_COLUMNS:
                raise InputError(
                    f"more than {MOST_COLUMNS} candidate stages are too many for an integer program",
                    hint="use `solver=search`, or forbid cuts",
                )
        return found

    def layers(self, column: Column) -> frozenset[int]:
        """Return the positions of a column's layers."""
        return self.sets[column.end] - self.sets[column.start]

    def candidate(self, column: Column) -> Candidate:
        """Return a column as a stage."""
        layers = self.layers(column)
        options = replace(column.options, recompute=whole_stage(layers, column.recomputes))
        return Candidate(self.sets[column.start], layers, options)

    def columns_from(self, state: int, others: Integers) -> Iterator[Column]:
        """Yield the candidate stages from the state to each of the others."""
        works = [each.work(int(same[state]), same[others]) for each, same in self._of_kinds]
        paces = np.stack([np.broadcast_to(work.compute_s, len(others)) for work in works])
        for kinds in sets_of(len(works)):
            slowest = np.array(sorted(kinds))[paces[sorted(kinds)].argmax(axis=0)]
            for number in sorted(kinds):
                rows = np.flatnonzero(slowest == number)
                if len(rows):
                    yield from self._paced(state, others[rows], kinds, number, taken(works[number], rows))

    def _paced(self, state: int, others: Integers, kinds: frozenset[int], number: int, work: Work) -> Iterator[Column]:
        """Yield the stages on GPUs of these kinds, of which one is the slowest, on every number of replicas of use.

        A number is of no use if a smaller one is as fast and lets as many GPUs follow.
        """
        problem, (space, same) = self.problem, self._of_kinds[number]
        rules = {"auto": (False, True), "never": (False,), "always": (True,), "blocks": ()}[problem.recompute]
        footprint = space.footprint(int(same[state]), same[others], work).divided(problem.microbatches)
        known = WaysOf(self.space, problem.limits, prices_shards=problem.simulates)
        pace = problem.kinds[number]
        limit = problem.cluster.memory_of(pace)
        if pace is not None:
            limits = [problem.cluster.memory_of(problem.kinds[each]) for each in kinds]
            limit = min((each for each in limits if each is not None), default=None)
            pace = pace.model_copy(update={"memory_bytes": limit})
        for again, sharded in product(rules, (False, True) if known.shards else (False,)):
            if again and limit is None and problem.recompute == "auto":
                continue  # without a limit, recomputing gains nothing
            held, working = (footprint.recomputed(), work.recomputed()) if again else (footprint, work)
            working = working.shared_out(sharded)
            smaller: list[tuple[Floats, Integers]] = []  # times and followers of smaller replica counts
            for r in range(len(kinds), self._most_replicas(kinds) + 1):
                if (sharded and r == 1) or (known.always_shards and not sharded and r > 1):
                    continue
                sum_s, max_s = (np.broadcast_to(part, len(others)) for part in problem.parts_s(working, r))
                replicated = problem.layer_costs.replicated(held, r)
                after = self._most_after(replicated.shared_out(r) if sharded else replicated, r, limit)
                after = np.broadcast_to(after, len(others))
                useful = after >= 0
                if not problem.constraints.gpu_of:  # pins may need more replicas than are fastest
                    for seconds, room in smaller:
                        useful &= (sum_s + max_s < seconds) | (after > room)
                smaller.append((sum_s + max_s, after))
                for n in np.flatnonzero(useful):
                    options, parts = StageOptions(r, sharded, kind=pace), (float(sum_s[n]), float(max_s[n]))
                    yield Column(state, int(others[n]), options, kinds, *parts, int(after[n]), again)

    def _most_replicas(self, kinds: frozenset[int]) -> int:
        problem = self.problem
        if not problem.schedule.pipelined:
            return 1
        count = sum(problem.count(problem.kinds[number]) for number in kinds)
        return min(count, problem.microbatches) if problem.schedule.divides else count

    def _most_after(self, footprint: Footprint, replicas: int, limit: int | None) -> Integers:
        """Return how many GPUs may follow stages at most; -1 if not even a last stage fits."""
        problem, schedule = self.problem, self.problem.schedule
        most: Integers = np.asarray(problem.limits.deepest)
        if limit is not None:
            fit = footprint.most_in_flight(limit, schedule.stashes, schedule.weight_versions)
            most = np.minimum(most, fit)
        gpus = problem.cluster.gpus
        after = most_after(schedule, problem.microbatches, np.array(replicas), most, gpus)
        return np.minimum(after, gpus - replicas)


def _space(layer_costs: LayerCosts, all_cuts: bool) -> StateSpace:
    chain = Chain(layer_costs)
    if chain.complete or not all_cuts:
        return chain
    words = enumerate_downsets(layer_costs, MOST_STATES)
    return chain if words is None else Downsets(layer_costs, words, complete=True)


def sets_of(count: int) -> list[frozenset[int]]:
    """Return all sets of so many kinds but the empty one, by their numbers."""
    return [frozenset(each) for size in range(1, count + 1) for each in combinations(range(count), size)]


def _states_in(space: StateSpace, known: StateSpace) -> Integers:
    """Return the number in a space of each state of another: downsets are in the order of their own times."""
    if space is known or isinstance(known, Chain):
        return np.arange(len(known))
    numbers = {space.layers(0, state): state for state in range(len(space))}
    return np.array([numbers[known.layers(0, state)] for state in range(len(known))])
