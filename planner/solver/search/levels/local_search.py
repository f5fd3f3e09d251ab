"""Local search: from a plan to a faster neighbour, until no neighbour is faster.

Where the GPUs of a server share a link, what a plan costs depends on all stages of a server together. Good plans are
then found near other plans: by moving a cut, giving a replica to another stage, splitting a stage or joining two.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np

from planner.cost.candidate import StageOptions
from planner.solver.problem.budget import NO_HURRY, Deadline
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.levels.relaxed import Seconds

KINDS = 4  # of neighbours
PARTS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)  # shares of a stage's compute at which it is split

_Stages = tuple[tuple[int, ...], tuple[StageOptions, ...]]  # states, options
_Shape = tuple[tuple[int, ...], tuple[int, ...]]  # states, replicas
# The best ways to run the stages between these states, on these replicas.
OptionsOf = Callable[[tuple[int, ...], tuple[int, ...]], tuple[StageOptions, ...]]


class LocalSearch:
    """Local searches over one space, which price no plan twice, and `most` plans in all.

    `price` is what is minimised, infinite for a path that does not fit the memory; `ways` say how the stages of a plan
    may run. Neighbours are priced by increasing `least`, a quick bound that no price is below.
    """

    def __init__(
        self,
        space: Chain,
        gpus: int,
        price: Seconds,
        ways: Sequence[OptionsOf],
        most: int,
        deadline: Deadline = NO_HURRY,
        least: Seconds = lambda _: 0.0,
    ) -> None:
        self._space, self._gpus, self._price, self._ways = space, gpus, price, ways
        self._most, self._deadline, self._least = most, deadline, least
        self._bounds: dict[_Stages, float] = {}
        self._priced: dict[_Stages, float] = {}

    def from_(self, path: CutPath) -> CutPath | None:
        """Return what the path becomes by always taking the best neighbour of a kind; None if nothing fits."""
        best = replace(path, seconds=self._seconds((path.states, path.options)))
        stale = 0  # kinds since the last one that helped
        # The kinds take turns, so that a step of one kind can open the way for another.
        for neighbours in cycle((_cuts_moved, self._stages_split, self._replicas_moved, _stages_joined)):
            before = best
            for stages in sorted(self._in_their_ways(neighbours(before)), key=self._bound):
                if self._bound(stages) >= best.seconds:
                    break
                if (seconds := self._seconds(stages)) < best.seconds * (1 - RESOLUTION):
                    best = CutPath(*stages, seconds)
            stale = stale + 1 if best is before else 0
            if stale == KINDS or self.over:
                break
        return best if np.isfinite(best.seconds) else None

    def allow(self, more: int) -> None:
        """Let so many plans be priced from now on: what is left of an earlier allowance goes."""
        self._most = len(self._bounds) + more

    @property
    def over(self) -> bool:
        """Whether no more plans may be priced."""
        return len(self._bounds) >= self._most or self._deadline.passed

    def _bound(self, stages: _Stages) -> float:
        if stages not in self._bounds:
            if self.over:
                return np.inf
            self._bounds[stages] = self._least(CutPath(*stages, np.inf))
        return self._bounds[stages]

    def _seconds(self, stages: _Stages) -> float:
        if stages not in self._priced:
            if not np.isfinite(self._bound(stages)) or self._deadline.passed:
                return np.inf
            self._priced[stages] = self._price(CutPath(*stages, np.inf))
        return self._priced[stages]

    def _in_their_ways(self, shapes: Iterator[_Shape]) -> Iterable[_Stages]:
        """Return the stages of these shapes in all ways, each once, and compute their bounds, as long as allowed."""
        found = dict[_Stages, None]()
        for states, replicas in shapes:
            for options in self._ways:
                stages = states, options(states, replicas)
                found[stages] = None
                self._bound(stages)
                # A stage of thousands of replicas has as many neighbours, of which some are priced.
                if self.over:
                    return found
        return found

    def _stages_split(self, path: CutPath) -> Iterator[_Shape]:
        """Yield plans with a stage split in two, which have its replicas, or one more if a GPU is left."""
        compute_s = self._space.compute_s
        for stage, (start, end) in enumerate(pairwise(path.states)):
            targets_s = [compute_s[start] + part * (compute_s[end] - compute_s[start]) for part in PARTS]
            cuts = sorted({int(cut) for cut in np.searchsorted(compute_s, targets_s)})
            own = path.options[stage].replicas
            for replicas in range(own, own + 1 + (path.gpus < self._gpus)):
                for first in range(1, replicas):
                    for cut in cuts:
                        if start < cut < end:
                            yield _with(path, stage, stage + 1, (cut,), (first, replicas - first))

    def _replicas_moved(self, path: CutPath) -> Iterator[_Shape]:
        """Yield plans with a replica moved to another stage, removed or added, or with two stages' replicas swapped.

        The path itself is the first, because there may be other ways to run its stages. Stages whose replicas divide
        those of the next stage wait less for it, so neighbours also share their replicas in all ways that do.
        """
        own = path.replicas
        yield path.states, own
        for giver in range(len(own)):
            for taker in range(len(own)):
                if giver < taker and own[giver] != own[taker]:
                    yield from self._changed(path, {giver: own[taker], taker: own[giver]})
                if giver == taker and path.gpus < self._gpus:
                    yield from self._changed(path, {giver: own[giver] + 1})
                if own[giver] > 1:
                    more = {} if giver == taker else {taker: own[taker] + 1}
                    yield from self._changed(path, {giver: own[giver] - 1, **more})
        for stage, both in enumerate(map(sum, pairwise(own))):
            for fewer in (fewer for fewer in range(1, both // 2 + 1) if both % fewer == 0):
                yield from self._changed(path, {stage: fewer, stage + 1: both - fewer})
                yield from self._changed(path, {stage: both - fewer, stage + 1: fewer})

    def _changed(self, path: CutPath, replicas: dict[int, int]) -> Iterator[_Shape]:
        """Yield the path with other replicas of some stages: at its cuts, and at cuts that move with these."""
        own = tuple(replicas.get(stage, before) for stage, before in enumerate(path.replicas))
        yield path.states, own
        compute_s = self._space.compute_s
        shares = np.cumsum(np.diff(compute_s[list(path.states)]) * own / path.replicas)
        middles_s, targets_s = (compute_s[1:] + compute_s[:-1]) / 2, compute_s[-1] * shares / shares[-1]
        states = (0, *np.searchsorted(middles_s, targets_s[:-1]).tolist(), path.states[-1])
        if all(one < other for one, other in pairwise(states)):
            yield states, own


def _cuts_moved(path: CutPath) -> Iterator[_Shape]:
    states = path.states
    for at in range(1, len(states) - 1):
        for direction in (1, -1):
            distance = 1
            while states[at - 1] < (moved := states[at] + direction * distance) < states[at + 1]:
                yield (*states[:at], moved, *states[at + 1 :]), path.replicas
                distance *= 2


def _stages_joined(path: CutPath) -> Iterator[_Shape]:
    for stage, (one, other) in enumerate(pairwise(path.replicas)):
        yield _with(path, stage, stage + 2, (), (one + other,))


def _with(path: CutPath, first: int, last: int, cuts: tuple[int, ...], replicas: tuple[int, ...]) -> _Shape:
    states, own = path.states, path.replicas
    return (*states[: first + 1], *cuts, *states[last:]), (*own[:first], *replicas, *own[last:])
