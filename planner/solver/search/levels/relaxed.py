"""Relax the search on clusters of several levels: a dynamic programme over cuts and ranks, on bounds of stages.

What a stage costs depends on its place and on those of the stages that it exchanges messages with. `stage_bounds`
bounds it from below by its own place. Over those bounds a programme from the last layer to the first,

    best(J, p) = min over K, r of  max( bound(J, K, p, r), best(K, p + r) ),

gives for every cut J and every rank p the least that the rest of a plan can cost. For synchronous schedules, the sum
and the maximum have a programme each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import Floats, Integers
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import WaysOf
from planner.solver.search.levels.stage_bounds import Places, StageBounds, bounds_of, objective_of

MOST_TRADES = 16  # answers that trade the sum against the maximum

# The seconds of a path at its true price; infinite if it does not fit the memory.
Seconds = Callable[[CutPath], float]


@dataclass(frozen=True)
class Rest:
    """The least that the layers after each state can cost from each rank on, with axes (state, rank)."""

    gpus: int  # of the whole plan: exactly where memory is limited, at most otherwise
    sum_s: Floats
    max_s: Floats


class Relaxed:
    """The bounds of all stages in all places, and the bounds of whole plans that follow.

    Raises:
        OutOfTimeError: if the deadline passes before the bounds of all stages are known, as do its methods.
    """

    def __init__(self, problem: Problem, space: StateSpace) -> None:
        self.space, self.objective, limits = space, objective_of(problem), problem.limits
        self.gpus, self.counts_gpus, self._deadline = limits.gpus, limits.counts_gpus, limits.deadline
        # More replicas than microbatches would idle, but may let the next stage begin at a server.
        self.places = Places(problem.topology, problem.cluster.gpus)
        ways = WaysOf(space, limits, prices_shards=problem.simulates)
        self.bounds = [self._bounds(ways, state) for state in range(len(space) - 1)]

    def _bounds(self, ways: WaysOf, state: int) -> StageBounds:
        self._deadline.check()
        others = self.space.among_later(state, np.arange(state + 1, len(self.space)))
        plainest = bounds_of(ways.all(state, others), self.places, self.objective)
        choosing = ways.choosing(plainest.ways, (plainest.most < self.gpus + 1).any(axis=0), len(others))
        return bounds_of(ways.all(state, others, choosing), self.places, self.objective) if choosing.any() else plainest

    def rest(self, gpus: int) -> Rest:
        """Run the dynamic programme over (state, rank), for the sum and for the maximum."""
        last, synchronous = len(self.space) - 1, isinstance(self.objective, SynchronousModel)
        sum_s, max_s = np.full((2, last + 1, self.gpus + 1), np.inf)
        sum_s[last, self._ends(gpus)] = max_s[last, self._ends(gpus)] = 0.0
        for state, rank, fits, phase, ranks in self._starts(gpus):
            bounds, after = self.bounds[state], (self.bounds[state].others[None, :], ranks[:, None])
            peaks = np.maximum(bounds.max_s[phase, : len(ranks)], max_s[after])
            max_s[state, rank] = np.min(peaks, where=fits, initial=np.inf)
            sum_s[state, rank] = 0.0
            if synchronous:
                sums = bounds.sum_s[phase, : len(ranks)] + sum_s[after]
                sum_s[state, rank] = np.min(sums, where=fits, initial=np.inf)
        return Rest(gpus, sum_s, max_s)

    def _ends(self, gpus: int) -> slice:
        """Return the ranks at which a plan may end.

        Where what is in flight is limited, a plan must use exactly so many GPUs: the stages before rely on it.
        """
        return slice(gpus, gpus + 1) if self.counts_gpus else slice(0, gpus + 1)

    def _starts(self, gpus: int) -> Iterator[tuple[int, int, NDArray[np.bool_], int, Integers]]:
        """Yield states from the last, with every rank: which (replicas, way) fit, its phase, and the ranks after."""
        for state in range(len(self.space) - 2, -1, -1):
            self._deadline.check()
            for rank in range(gpus):
                replicas = self.places.replicas[: gpus - rank]
                fits = self.fits(self.bounds[state], gpus, rank, len(replicas))
                yield state, rank, fits, rank % self.places.phases, rank + replicas

    def fits(self, bounds: StageBounds, gpus: int, rank: int, counts: int) -> NDArray[np.bool_]:
        """Return which (replicas, way) are allowed and fit the memory if the plan has so many GPUs in all."""
        most = bounds.most[:counts]
        if not self.counts_gpus:
            return np.asarray(most > 0)
        r = self.places.replicas[:counts, None]
        after = np.maximum(gpus - rank - r, 0)
        if isinstance(self.objective, SynchronousModel):
            return np.asarray(self.objective.in_flight(r, after) <= most)
        return np.asarray(warm_up_depth(r, after) <= most)

    def paths(self, rest: Rest) -> Iterator[CutPath]:
        """Yield paths that are best by the bounds; for synchronous schedules, those that trade sum against maximum.

        The maximum of each is the limit for the next, as in the search for a flat cluster.
        """
        synchronous = isinstance(self.objective, SynchronousModel)
        limit_s = np.inf if synchronous else float(rest.max_s[0, 0])
        for _ in range(MOST_TRADES if synchronous else 1):
            answer = self._least_sum(rest.gpus, limit_s) if np.isfinite(rest.max_s[0, 0]) else None
            if answer is None:
                return
            yield answer[0]
            limit_s = answer[1] * (1 - RESOLUTION)

    def _least_sum(self, gpus: int, limit_s: float) -> tuple[CutPath, float] | None:
        """Return the path of least sum whose stages are within the limit, by the bounds, and its maximum."""
        last = len(self.space) - 1
        sums = np.full((last + 1, self.gpus + 1), np.inf)
        sums[last, self._ends(gpus)] = 0.0
        choice = np.zeros((last, self.gpus + 1), dtype=np.int64)  # of replicas - 1 and way, as one number
        for state, rank, fits, phase, ranks in self._starts(gpus):
            bounds = self.bounds[state]
            usable = fits & (bounds.max_s[phase, : len(ranks)] <= limit_s)
            totals = bounds.sum_s[phase, : len(ranks)] + sums[bounds.others[None, :], ranks[:, None]]
            totals = np.where(usable, totals, np.inf)
            choice[state, rank] = np.argmin(totals)
            sums[state, rank] = totals.flat[choice[state, rank]]
        if not np.isfinite(sums[0, 0]):
            return None
        states, options, rank, peak_s = [0], list[StageOptions](), 0, 0.0
        while (state := states[-1]) < last:
            bounds = self.bounds[state]
            row, way = divmod(int(choice[state, rank]), len(bounds.ways))
            peak_s = max(peak_s, float(bounds.max_s[rank % self.places.phases, row, way]))
            states.append(int(bounds.others[way]))
            options.append(bounds.ways.options(way, row + 1))
            rank += row + 1
        return CutPath(tuple(states), tuple(options), float(sums[0, 0])), peak_s
