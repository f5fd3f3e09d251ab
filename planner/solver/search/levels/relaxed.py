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
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import StateSpace
from planner.solver.search.levels.stage_bounds import StageBounder, StageBounds

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
    """The bounds of all stages in all places, and the bounds of whole plans that follow."""

    def __init__(self, problem: Problem, space: StateSpace) -> None:
        bounder = StageBounder(problem, space)
        self.space, self.objective, self.places = space, bounder.objective, bounder.places
        self.gpus, self.counts_gpus = bounder.limits.gpus, bounder.limits.counts_gpus
        self._deadline = problem.deadline
        self.bounds = [bounder.bounds(state) for state in range(len(space) - 1)]

    def rest(self, gpus: int) -> Rest:
        """Run the dynamic programme over (state, rank), for the sum and for the maximum."""
        last = len(self.space) - 1
        sum_s, max_s = np.full((2, last + 1, self.gpus + 1), np.inf)
        # Where what is in flight is limited, the plan must use exactly this many GPUs: the stages before rely on it.
        ends = slice(gpus, gpus + 1) if self.counts_gpus else slice(0, gpus + 1)
        sum_s[last, ends] = max_s[last, ends] = 0.0
        for state in range(last - 1, -1, -1):
            self._deadline.check()
            bounds = self.bounds[state]
            for rank, fits, phase, ranks in self._starts(bounds, gpus):
                others = bounds.others[None, :]
                after = ranks[:, None]
                peaks = np.maximum(bounds.max_s[phase, : len(ranks)], max_s[others, after])
                max_s[state, rank] = np.min(peaks, where=fits, initial=np.inf)
                if isinstance(self.objective, SynchronousModel):
                    sums = bounds.sum_s[phase, : len(ranks)] + sum_s[others, after]
                    sum_s[state, rank] = np.min(sums, where=fits, initial=np.inf)
                else:
                    sum_s[state, rank] = 0.0
        return Rest(gpus, sum_s, max_s)

    def _starts(
        self, bounds: StageBounds, gpus: int
    ) -> Iterator[tuple[int, NDArray[np.bool_], int, NDArray[np.int64]]]:
        """Yield every first rank, which (replicas, stage) fit, its phase, and the ranks after each replica count."""
        for rank in range(gpus):
            replicas = self.places.replicas[: gpus - rank]
            yield rank, self.fits(bounds, gpus, rank, len(replicas)), rank % self.places.phases, rank + replicas

    def fits(self, bounds: StageBounds, gpus: int, rank: int, counts: int) -> NDArray[np.bool_]:
        """Return which (replicas, way) are allowed and fit the memory if the plan has so many GPUs in all."""
        most = bounds.most[:counts]
        if not self.counts_gpus:
            return np.asarray(most > 0)
        r = self.places.replicas[:counts, None]
        after = np.maximum(gpus - rank - r, 0)
        if isinstance(self.objective, SynchronousModel):
            return np.asarray(self.objective.in_flight(r, after) <= most)
        return np.asarray(1 + -(-after // r) <= most)

    def paths(self, rest: Rest) -> Iterator[CutPath]:
        """Yield paths that are best by the bounds; for synchronous schedules, those that trade sum against maximum.

        The maximum of each is the limit for the next, as in the search for a flat cluster.
        """
        if not np.isfinite(rest.max_s[0, 0]):
            return
        if not isinstance(self.objective, SynchronousModel):
            yield self._within(rest, float(rest.max_s[0, 0]))
            return
        limit_s = np.inf
        for _ in range(MOST_TRADES):
            answer = self._least_sum(rest.gpus, limit_s)
            if answer is None:
                return
            path, peak_s = answer
            yield path
            limit_s = peak_s * (1 - RESOLUTION)

    def _within(self, rest: Rest, limit_s: float) -> CutPath:
        """Return a path whose maximum is within the limit, by the bounds, with few GPUs."""

        def pick(state: int, rank: int) -> Integers:
            bounds, counts = self.bounds[state], self.places.replicas[: rest.gpus - rank]
            peaks = np.maximum(
                bounds.max_s[rank % self.places.phases, : len(counts)],
                rest.max_s[bounds.others[None, :], (rank + counts)[:, None]],
            )
            fits = self.fits(bounds, rest.gpus, rank, len(counts))
            return np.asarray(np.argwhere(fits & (peaks <= limit_s))[0])

        return self._path(pick, limit_s)[0]

    def _least_sum(self, gpus: int, limit_s: float) -> tuple[CutPath, float] | None:
        """Return the path of least sum whose stages are within the limit, by the bounds, and its maximum."""
        last = len(self.space) - 1
        sums = np.full((last + 1, self.gpus + 1), np.inf)
        sums[last, slice(gpus, gpus + 1) if self.counts_gpus else slice(0, gpus + 1)] = 0.0
        choice = np.zeros((last, self.gpus + 1, 2), dtype=np.int64)
        for state in range(last - 1, -1, -1):
            self._deadline.check()
            bounds = self.bounds[state]
            for rank, fits, phase, ranks in self._starts(bounds, gpus):
                usable = fits & (bounds.max_s[phase, : len(ranks)] <= limit_s)
                totals = bounds.sum_s[phase, : len(ranks)] + sums[bounds.others[None, :], ranks[:, None]]
                totals = np.where(usable, totals, np.inf)
                best = int(np.argmin(totals))
                sums[state, rank] = totals.flat[best]
                choice[state, rank] = np.unravel_index(best, totals.shape)
        if not np.isfinite(sums[0, 0]):
            return None
        return self._path(lambda state, rank: choice[state, rank], float(sums[0, 0]))

    def _path(self, pick: Callable[[int, int], Integers], seconds: float) -> tuple[CutPath, float]:
        """Return the path of the picked replicas - 1 and ways, by state and first rank, and its maximum."""
        states, options, rank, peak_s = [0], list[StageOptions](), 0, 0.0
        while (state := states[-1]) < len(self.space) - 1:
            bounds, (row, column) = self.bounds[state], pick(state, rank).tolist()
            peak_s = max(peak_s, float(bounds.max_s[rank % self.places.phases, row, column]))
            states.append(int(bounds.others[column]))
            options.append(bounds.ways.options(column, row + 1))
            rank += row + 1
        return CutPath(tuple(states), tuple(options), seconds), peak_s
