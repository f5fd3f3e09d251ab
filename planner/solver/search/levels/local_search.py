"""Local search: from a plan to a faster neighbour, until no neighbour is faster.

Where the GPUs of a server share a link, what a plan costs depends on all stages of a server
together. Good plans are then found near other plans (`neighbours`).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle

import numpy as np

from planner.cost.candidate import StageOptions
from planner.solver.clock import NO_LIMIT, Clock
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.levels.neighbours import Neighbours, Shape
from planner.solver.search.levels.relaxed import Seconds

# The best ways to run the stages between these states, on these replicas.
OptionsOf = Callable[[tuple[int, ...], tuple[int, ...]], tuple[StageOptions, ...]]


class LocalSearch:
    """Local searches over one space, which price no plan twice, and `most` plans in all.

    `price` is what is minimised, infinite for a path that does not fit the memory; `variants` say
    how the stages of a plan may run; `split_shares`, of its compute, where a stage is split.
    Neighbours are priced by increasing `least`, a quick bound that no price is below.
    """

    def __init__(
        self,
        space: CutSpace,
        gpus: int,
        price: Seconds,
        variants: Sequence[OptionsOf],
        most: int,
        split_shares: Sequence[float],
        clock: Clock = NO_LIMIT,
        least: Seconds = lambda _: 0.0,
    ) -> None:
        self._kinds = Neighbours(space, gpus, split_shares).kinds
        self._price = price
        self._variants = variants
        self._most = most
        self._clock = clock
        self._least = least
        # By path, whose own seconds are infinite.
        self._bounds: dict[CutPath, float] = {}
        self._priced: dict[CutPath, float] = {}

    def from_(self, path: CutPath) -> CutPath | None:
        """Return what the path becomes by taking the best neighbours; None if nothing fits."""
        unpriced = path.that_takes(np.inf)
        best = path.that_takes(self._seconds(unpriced))
        stale = 0  # kinds since the last one that helped

        # The kinds take turns, so that a step of one kind can open the way for another.
        for neighbours in cycle(self._kinds):
            nearby = self._best(neighbours(best), best)
            stale = stale + 1 if nearby is best else 0
            best = nearby
            if stale == len(self._kinds) or self.over:
                break

        if np.isfinite(best.seconds):
            return best
        return None

    def allow(self, more: int) -> None:
        """Let so many plans be priced from now on: what is left of an earlier allowance goes."""
        self._most = len(self._bounds) + more

    @property
    def over(self) -> bool:
        """Whether no more plans may be priced."""
        return len(self._bounds) >= self._most or self._clock.passed

    def _best(self, shapes: Iterable[Shape], best: CutPath) -> CutPath:
        """Return the fastest of the best path so far and those of some shapes."""
        for path in sorted(self._paths(shapes), key=self._bound):
            if self._bound(path) >= best.seconds:
                break
            seconds = self._seconds(path)
            if seconds < best.seconds * (1 - RESOLUTION):
                best = path.that_takes(seconds)
        return best

    def _paths(self, shapes: Iterable[Shape]) -> Iterable[CutPath]:
        """Return the paths of these shapes in all ways, each once, and bound as many as allowed."""
        paths: dict[CutPath, None] = {}
        for states, replicas in shapes:
            for options in self._variants:
                path = CutPath(states, options(states, replicas), np.inf)
                paths[path] = None
                self._bound(path)
                # A stage of thousands of replicas has as many neighbours, of which some are priced.
                if self.over:
                    return paths
        return paths

    def _bound(self, path: CutPath) -> float:
        if path not in self._bounds:
            if self.over:
                return np.inf
            self._bounds[path] = self._least(path)
        return self._bounds[path]

    def _seconds(self, path: CutPath) -> float:
        if path not in self._priced:
            if not np.isfinite(self._bound(path)) or self._clock.passed:
                return np.inf
            self._priced[path] = self._price(path)
        return self._priced[path]
