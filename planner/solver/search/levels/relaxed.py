"""Relax the search on clusters of several levels: a dynamic programme over cuts and ranks.

Stages are priced by their bounds (`stage_bounds`), which depend on a stage's layers, its replicas
and its first rank, but not on what the other stages do. From the last layer to the first,

    M(J, p) = min over K, r, way of  max( max_s(J, K, way, p, r), M(K, p + r) )
    S(J, p) = min over K, r, way of       sum_s(J, K, way, p, r) + S(K, p + r)     where max_s ≤ X

    J, K    cuts: the stage runs the layers between them
    p, r    first rank, and replicas
    X       limit on the maximum: see `trade`

are the least maximum and the least sum that the rest of a plan can have after cut J, from rank p
on. Each takes O(states² · ways · GPUs²). An asynchronous plan takes its maximum, so that none on
consecutive ranks is below M(0, 0). A synchronous one takes both, and the least total is a bound.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.work import Floats, Integers
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.variants import StageVariants
from planner.solver.search.levels.stage_bounds import Places, StageBounds, bounds_of, phases_of
from planner.solver.search.trade import trade_offs

# The seconds of a path at its true price; infinite if it does not fit the memory.
Seconds = Callable[[CutPath], float]


@dataclass(frozen=True)
class _Start:
    """The stages that begin at a cut and a rank, by replicas - 1 and way."""

    at: tuple[int, int]  # J, p
    fits: NDArray[np.bool_]
    sum_s: Floats
    max_s: Floats
    rest: tuple[Integers, Integers]  # K, p + r


class Relaxed:
    """The bounds of all stages in all places, and plans that are best by them.

    Raises:
        OutOfTimeError: when the deadline passes meanwhile.
    """

    def __init__(self, problem: Problem, space: CutSpace) -> None:
        self._problem = problem
        self._limits = problem.limits
        self._tuning = problem.tuning.levels

        # More replicas than microbatches would idle, but may let the next stage begin at a server.
        self._places = Places(problem.topology, problem.cluster.gpus)
        self._last = len(space) - 1
        variants = StageVariants(space, self._limits)
        self._bounds = [self._stage_bounds(variants, state) for state in range(self._last)]

    @staticmethod
    def states_that_fit(problem: Problem) -> int:
        """Return how many states a space may have so that its tables have a reasonable size."""
        places = phases_of(problem.topology) * problem.cluster.gpus
        return int((2 * problem.tuning.levels.most_entries / places) ** 0.5)

    def best(self, price: Seconds, start: CutPath | None) -> BoundedPath:
        """Return the best path by its true price, and a bound on all.

        The paths are `start` and those that are best by their bounds.
        """
        best = start
        bound_s = np.inf
        counts = self._counts()
        for gpus in counts:
            least_s, paths = self._trade_offs(gpus)
            bound_s = min(bound_s, least_s)
            for path in paths:
                best = better(best, path, price)

        tried_all = len(counts) == self._limits.gpus
        if self._limits.counts_gpus and not tried_all:
            bound_s = 0.0
        if best is not None:
            bound_s = min(bound_s, best.seconds)
        return BoundedPath(best, bound_s)

    def _counts(self) -> list[int]:
        """Return numbers of GPUs to try.

        Where memory is limited, a stage must know how many GPUs come after it, hence how many there
        are in all.
        """
        gpus = self._limits.gpus
        if not self._limits.counts_gpus:
            return [gpus]

        most = self._tuning.most_gpu_counts
        if gpus <= most:
            return list(range(1, gpus + 1))
        return sorted({gpus, *np.geomspace(1, gpus, most).astype(int).tolist()})

    def _stage_bounds(self, variants: StageVariants, state: int) -> StageBounds:
        """Bound the stages from a state."""
        self._limits.clock.check()
        bounds = partial(bounds_of, self._problem, self._places)
        return variants.table(state, variants.space.after(state), bounds, self._limits.gpus)

    def _trade_offs(self, gpus: int) -> tuple[float, list[CutPath]]:
        """Return seconds that no plan on so many GPUs is below, and the best by the bounds."""
        least_s = self._least_maximum_s(gpus)
        if not np.isfinite(least_s):
            return np.inf, []

        least_sum = partial(self._least_sum, gpus)
        most = self._tuning.most_trades
        if self._problem.schedule.asynchronous:  # all sums are zero
            paths = list(islice(trade_offs(least_sum, least_s), 1))
        else:
            paths = list(islice(trade_offs(least_sum, every=True), most))

        bounds = [path.seconds for path in paths]
        if len(paths) == most:
            bounds.append(paths[-1].sum_s + least_s)
        return min(bounds, default=np.inf), paths

    def _least_maximum_s(self, gpus: int) -> float:
        """Return M(0, 0)."""
        least = self._table(gpus)
        for start in self._starts(gpus):
            peaks = np.maximum(start.max_s, least[start.rest])
            least[start.at] = np.min(peaks, where=start.fits, initial=np.inf)

        return float(least[0, 0])

    def _least_sum(self, gpus: int, limit_s: float) -> CutPath | None:
        """Return the path of S(0, 0), whose stages are within the limit."""
        least = self._table(gpus)
        choices = np.zeros(least.shape, dtype=np.int64)  # of replicas - 1 and way, as one number
        for start in self._starts(gpus):
            within = start.fits & (start.max_s <= limit_s)
            sums = start.sum_s + least[start.rest]
            totals = np.where(within, sums, np.inf)
            choice = totals.argmin()
            choices[start.at] = choice
            least[start.at] = totals.flat[choice]

        total_s = float(least[0, 0])
        if not np.isfinite(total_s):
            return None
        return self._trace(choices, total_s)

    def _table(self, gpus: int) -> Floats:
        """Return M or S by cut and rank, with what it is after the last layer."""
        least = np.full((self._last + 1, self._limits.gpus + 1), np.inf)
        # Where what is in flight is limited, a plan must use all the GPUs: its stages rely on it.
        fewest = gpus if self._limits.counts_gpus else 0
        least[self._last, fewest : gpus + 1] = 0.0
        return least

    def _starts(self, gpus: int) -> Iterator[_Start]:
        """Yield the stages of each cut and each rank, from the last cut to the first."""
        places = self._places
        in_flight = [self._in_flight(gpus - rank) for rank in range(gpus)]

        for state in reversed(range(self._last)):
            self._limits.clock.check()
            bounds = self._bounds[state]
            for rank in range(gpus):
                left = gpus - rank
                phase = rank % places.phases
                after = rank + places.replicas[:left, None]
                yield _Start(
                    at=(state, rank),
                    fits=in_flight[rank] <= bounds.most[:left],
                    sum_s=bounds.sum_s[phase, :left],
                    max_s=bounds.max_s[phase, :left],
                    rest=(bounds.ends, after),
                )

    def _in_flight(self, gpus: int) -> Integers | int:
        """Return what is in flight in a stage on the first of these GPUs, by replicas - 1."""
        if not self._limits.counts_gpus:
            return 1

        replicas = self._places.replicas[:gpus, None]
        problem = self._problem
        return problem.schedule.in_flight(replicas, gpus - replicas, problem.microbatches)

    def _trace(self, choices: Integers, sum_s: float) -> CutPath:
        """Follow the choices from the first layer and the first rank."""
        states = [0]
        options: list[StageOptions] = []
        rank = 0
        max_s = 0.0
        while states[-1] < self._last:
            state = states[-1]
            bounds = self._bounds[state]
            choice = int(choices[state, rank])
            row, variant = divmod(choice, len(bounds.variants))
            replicas = row + 1

            phase = rank % self._places.phases
            max_s = max(max_s, float(bounds.max_s[phase, row, variant]))
            options.append(bounds.variants.options(variant, replicas))
            states.append(int(bounds.ends[variant]))
            rank += replicas

        return CutPath(tuple(states), tuple(options), max_s, sum_s)


def better(best: CutPath | None, path: CutPath, price: Seconds) -> CutPath | None:
    """Return the faster of the two, or of equals the one with fewer GPUs, then fewer stages."""
    seconds = price(path)
    if not np.isfinite(seconds):
        return best

    priced = path.that_takes(seconds)
    if best is None or seconds < best.seconds * (1 - RESOLUTION):
        return priced
    if seconds > best.seconds * (1 + RESOLUTION):
        return best

    size = path.gpus, len(path.replicas)
    best_size = best.gpus, len(best.replicas)
    return priced if size < best_size else best
