"""Plans near a plan: a cut moves, a stage splits, replicas move, or two stages join."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from planner.solver.problem.result import CutPath
from planner.solver.problem.states import CutSpace

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # states, replicas


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
            cuts = self._cuts_inside(*path.states[stage : stage + 2])
            most = replicas
            if path.gpus < self._gpus:
                most = replicas + 1
            for both in range(replicas, most + 1):
                for first, cut in product(range(1, both), cuts):
                    yield _with(path, stage, stage + 1, (cut,), (first, both - first))

    def replicas_moved(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a replica moved, removed or added, or with two stages' replicas swapped.

        The path itself is the first, because there may be other ways to run its stages. Stages
        whose replicas divide those of the next stage wait less for it, so neighbours also share
        their replicas in all ways that do.
        """
        replicas = path.replicas
        yield path.states, replicas

        # 1. From each stage to each: swapped, added, and moved (removed if they are the same).
        for giver, taker in product(range(len(replicas)), repeat=2):
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
        for stage, both in enumerate(map(sum, pairwise(replicas))):
            for fewer in _divisors(both):
                more = both - fewer
                yield from self._changed(path, {stage: fewer, stage + 1: more})
                yield from self._changed(path, {stage: more, stage + 1: fewer})

    def cuts_moved(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a cut moved by 1, 2, 4, ... states, later and earlier."""
        for stage in range(len(path.replicas) - 1):
            start, cut, end = path.states[stage : stage + 3]
            between = self._space.between(start, end)
            place = int(np.searchsorted(between, cut))
            distances = [2**power for power in range((len(between) + 1).bit_length())]
            for direction, distance in product((1, -1), distances):
                moved = place + direction * distance
                if 0 <= moved < len(between):
                    replicas = path.replicas[stage : stage + 2]
                    yield _with(path, stage, stage + 2, (int(between[moved]),), replicas)

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
        replicas = tuple(changes.get(stage, r) for stage, r in enumerate(path.replicas))
        yield path.states, replicas

        # The stages' shares of the compute change as their replicas do.
        stages_s = np.diff(self._compute_s[list(path.states)])
        ends_s = np.cumsum(stages_s * replicas / path.replicas)
        targets_s = self._compute_s[-1] * ends_s / ends_s[-1]
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
