"""Plans near a plan: a cut moves, a stage splits, replicas move, or two stages join."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from planner.solver.problem.result import CutPath
from planner.solver.problem.states import Chain

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # states, replicas


class Neighbours:
    """The neighbours of plans over one space on so many GPUs, as their states and replicas.

    Stages are split at `split_shares` of their compute.
    """

    def __init__(self, space: Chain, gpus: int, split_shares: Sequence[float]) -> None:
        self._compute_s = space.compute_s
        self._gpus = gpus
        self._split_shares = np.array(split_shares)

    @property
    def kinds(self) -> tuple[Callable[[CutPath], Iterator[Shape]], ...]:
        """Each kind of neighbours, of a path."""
        return cuts_moved, self.stages_split, self.replicas_moved, stages_joined

    def stages_split(self, path: CutPath) -> Iterator[Shape]:
        """Yield plans with a stage split in two, on its replicas or, if a GPU is left, one more."""
        for stage, replicas in enumerate(path.replicas):
            cuts = self._cuts_inside(*path.states[stage : stage + 2])
            most = replicas + 1 if path.gpus < self._gpus else replicas
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

    def _cuts_inside(self, start: int, end: int) -> list[int]:
        """Return the cuts at some shares of the compute between two states."""
        start_s = self._compute_s[start]
        targets_s = start_s + self._split_shares * (self._compute_s[end] - start_s)
        cuts = np.unique(np.searchsorted(self._compute_s, targets_s))
        return [cut for cut in cuts.tolist() if start < cut < end]

    def _changed(self, path: CutPath, changes: Mapping[int, int]) -> Iterator[Shape]:
        """Yield the path with other replicas of some stages, at its cuts and at cuts to match."""
        replicas = list(path.replicas)
        for stage, count in changes.items():
            replicas[stage] = count
        yield path.states, tuple(replicas)

        # The stages' shares of the compute change as their replicas do.
        compute_s = self._compute_s
        stages_s = np.diff(compute_s[list(path.states)])
        shares = np.cumsum(stages_s * replicas / path.replicas)
        targets_s = compute_s[-1] * shares / shares[-1]
        middles_s = (compute_s[1:] + compute_s[:-1]) / 2
        cuts = np.searchsorted(middles_s, targets_s[:-1]).tolist()
        states = (0, *cuts, path.states[-1])
        if all(start < end for start, end in pairwise(states)):
            yield states, tuple(replicas)


def cuts_moved(path: CutPath) -> Iterator[Shape]:
    """Yield plans with a cut moved by 1, 2, 4, ... states, later and earlier."""
    for stage in range(len(path.replicas) - 1):
        start, cut, end = path.states[stage : stage + 3]
        distances = [2**power for power in range((end - start).bit_length())]
        for direction, distance in product((1, -1), distances):
            moved = cut + direction * distance
            if start < moved < end:
                replicas = path.replicas[stage : stage + 2]
                yield _with(path, stage, stage + 2, (moved,), replicas)


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
