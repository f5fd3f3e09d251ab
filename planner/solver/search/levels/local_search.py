"""Local search: from a plan to a faster neighbour, until no neighbour is faster.

Where the GPUs of a server share a link, what a plan costs depends on all stages of a server
together. Good plans are then found near other plans: a cut moves, a stage splits, replicas move, or
two stages join.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise, product

import numpy as np

from planner.cost.candidate import StageOptions
from planner.solver.clock import NO_LIMIT, Clock
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.levels.relaxed import Seconds

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # states, replicas
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


class Neighbours:
    """The neighbours of plans over one space on so many GPUs, as their states and replicas.

    Stages are split at `split_shares` of their compute.
    """

    def __init__(self, space: CutSpace, gpus: int, split_shares: Sequence[float]) -> None:
        self._space = space
        self._compute_s = space.compute_s
        self._gpus = gpus
        self._split_shares = np.array(split_shares)

    @property
    def kinds(self) -> tuple[Callable[[CutPath], Iterator[Shape]], ...]:
        """Each kind of neighbours, of a path."""
        return self.cuts_moved, self.stages_split, self.replicas_moved, stages_joined

    def stages_split(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a stage split in two, on its replicas or, if a GPU is left, one more."""
        for stage, replicas in enumerate(path.replicas):
            start, end = path.states[stage : stage + 2]
            cuts = self._cuts_inside(start, end)
            most = replicas
            if path.gpus < self._gpus:
                most = replicas + 1

            for both in range(replicas, most + 1):
                for first, cut in product(range(1, both), cuts):
                    halves = first, both - first
                    yield _with(path, stage, stage + 1, (cut,), halves)

    def replicas_moved(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a replica moved, removed or added, or with two stages' replicas swapped.

        The path itself is the first, because there may be other ways to run its stages. Stages
        whose replicas divide those of the next stage wait less for it, so neighbours also share
        their replicas in all ways that do.
        """
        replicas = path.replicas
        yield path.states, replicas

        # 1. From each stage to each: swapped, added, and moved (removed if they are the same).
        stages = range(len(replicas))
        for giver, taker in product(stages, repeat=2):
            fewer = replicas[giver] - 1
            more = replicas[taker] + 1
            if giver < taker and replicas[giver] != replicas[taker]:
                swapped = {giver: replicas[taker], taker: replicas[giver]}
                yield from self._changed(path, swapped)

            if giver == taker and path.gpus < self._gpus:
                yield from self._changed(path, {taker: more})
            if fewer > 0:
                yield from self._changed(path, {taker: more, giver: fewer})

        # 2. Of two stages, the one's replicas divide the other's.
        sums = map(sum, pairwise(replicas))
        for stage, both in enumerate(sums):
            for fewer in _divisors(both):
                more = both - fewer
                yield from self._changed(path, {stage: fewer, stage + 1: more})
                yield from self._changed(path, {stage: more, stage + 1: fewer})

    def cuts_moved(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a cut moved by 1, 2, 4, ... states, later and earlier."""
        for stage in range(len(path.replicas) - 1):
            start, cut, end = path.states[stage : stage + 3]
            replicas = path.replicas[stage : stage + 2]
            between = self._space.between(start, end)
            place = int(np.searchsorted(between, cut))

            doublings = (len(between) + 1).bit_length()
            distances = [2**power for power in range(doublings)]
            for direction, distance in product((1, -1), distances):
                moved = place + direction * distance
                if 0 <= moved < len(between):
                    cuts = (int(between[moved]),)
                    yield _with(path, stage, stage + 2, cuts, replicas)

    def _cuts_inside(self, start: int, end: int) -> list[int]:
        """Return the cuts at some shares of the compute between two states."""
        between = self._space.between(start, end)
        if not len(between):
            return []

        start_s = self._compute_s[start]
        targets_s = start_s + self._split_shares * (self._compute_s[end] - start_s)
        places = np.unique(np.searchsorted(self._compute_s[between], targets_s))
        return [int(between[place]) for place in places if place < len(between)]

    def _changed(self, path: CutPath, changes: Mapping[int, int]) -> Iterator[Shape]:
        """Yield the path with other replicas of some stages, at its cuts and at cuts to match."""
        replicas = tuple(changes.get(stage, count) for stage, count in enumerate(path.replicas))
        yield path.states, replicas

        # The stages' shares of the compute change as their replicas do.
        ends_s = self._compute_s[list(path.states)]
        stages_s = np.diff(ends_s) * replicas / path.replicas
        changed_s = np.cumsum(stages_s)
        targets_s = self._compute_s[-1] * changed_s / changed_s[-1]
        cuts = self._space.cuts_at(targets_s[:-1])
        if cuts is not None:
            yield (0, *cuts, path.states[-1]), replicas


def stages_joined(path: CutPath) -> Iterator[Shape]:
    """Yield plans with two stages joined, on the replicas of both."""
    for stage, both in enumerate(map(sum, pairwise(path.replicas))):
        yield _with(path, stage, stage + 2, (), (both,))


def _divisors(count: int) -> list[int]:
    """Return the divisors up to the half."""
    return [each for each in range(1, count // 2 + 1) if count % each == 0]


def _with(
    path: CutPath,
    first: int,
    last: int,
    cuts: Sequence[int],
    replicas: Sequence[int],
) -> Shape:
    """Return the path with stages between these cuts in place of those from `first` to `last`."""
    return (
        (*path.states[: first + 1], *cuts, *path.states[last:]),
        (*path.replicas[:first], *replicas, *path.replicas[last:]),
    )
