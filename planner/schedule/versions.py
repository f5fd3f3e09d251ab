"""Weight versions across stages: vertical sync, and weights that several stages share.

Vertical sync (PipeDream, SOSP 2019, section 3.3): all stages run a minibatch at the first stage's weight version.
Minibatch t enters the first stage, of r_0 replicas and depth d_0, after v = max(0, floor(t / r_0) - d_0 + 1) of its
rounds, hence after the minibatches before v·r_0. A stage of r replicas then uses what floor(v·r_0 / r) of its own
rounds have left: all of those minibatches, but for a round that is not whole, and none after them.

Shared weights: once per round, each stage that holds a copy sends its gradient to the others, and sums all gradients in
the order of the stages, so that all copies take the same steps to the bit. Under 1f1b a stage does not wait for that.
The stage with most minibatches in flight finishes round t last; by then another stage is ahead by as many rounds as it
has fewer in flight, its lag. That stage applies the sum of round t with the update of its round t + lag. So every
minibatch sees a shared weight at one version in all stages: w(t+1) = w(t) - lr * grad f(w(t-d+1)), d the largest depth.
Sums that are left at the end of a run get updates of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import lcm


def sharers(pairs: Sequence[tuple[int, int]], stage: int) -> tuple[int, ...]:
    return tuple(sorted({other for pair in pairs if stage in pair for other in pair if other != stage}))


def lag(pairs: Sequence[tuple[int, int]], depths: Sequence[int], accumulate: int, stage: int) -> int:
    """Return by how many rounds `stage` is ahead of the slowest of its sharers, their sharers included."""
    family, size = {stage}, 0
    while len(family) > size:
        size = len(family)
        family.update(other for pair in pairs if family.intersection(pair) for other in pair)
    return -(-(max(depths[other] for other in family) - depths[stage]) // accumulate)


@dataclass(frozen=True)
class Entry:
    """The first stage, where minibatches enter: its replicas and its depth."""

    replicas: int
    depth: int

    def version(self, minibatch: int, replicas: int) -> int:
        """Return after how many rounds of a stage of `replicas` its weights are those that `minibatch` uses there."""
        rounds = max(0, minibatch // self.replicas - self.depth + 1)
        return rounds * self.replicas // replicas

    def to_come(self, minibatches: range, replicas: int, newest: int) -> tuple[int, ...]:
        """Return the versions older than `newest` that a replica's coming `minibatches` use."""
        versions = (self.version(minibatch, replicas) for minibatch in minibatches)
        return tuple(dict.fromkeys(takewhile(lambda version: version < newest, versions)))


@lru_cache(maxsize=4096)
def versions_held(entry: Entry, replicas: int) -> int:
    """Most versions of its weights that a stage of `replicas` holds: d_0 in a pipeline without replicas.

    Counted over one period of the round-robin: after each update those of the minibatches whose backward is still to
    come, if they exist yet, and the newest.
    """
    most = 1
    first = entry.depth * entry.replicas // replicas + 1  # from where on no version is that of the start
    for round_ in range(first, first + lcm(entry.replicas, replicas) // replicas):
        for own in range(replicas):
            left = range((round_ + 1) * replicas + own, (round_ + 2 + first) * replicas + entry.replicas, replicas)
            most = max(most, 1 + len(entry.to_come(left, replicas, round_ + 1)))
    return most
