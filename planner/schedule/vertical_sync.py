"""Vertical sync (PipeDream, SOSP 2019, section 3.3): all stages run a minibatch at the first stage's weight version.

A version is what some first minibatches have left, so with replicas "the same version" means: of the same minibatches.
Minibatch t enters the first stage, of r_0 replicas and depth d_0, after v = max(0, floor(t / r_0) - d_0 + 1) of its
rounds, hence after the minibatches before v·r_0. A stage of r replicas then uses what floor(v·r_0 / r) of its own
rounds have left: all of those minibatches, but for a round that is not whole, and none after them. These rounds are
over when minibatch t comes: their backwards have passed the stage before they passed the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm


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
        found: list[int] = []
        for minibatch in minibatches:
            version = self.version(minibatch, replicas)
            if version >= newest:
                break
            if version not in found:
                found.append(version)
        return tuple(found)


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
