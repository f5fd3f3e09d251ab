"""The fewest replicas of stages by trying numbers of them.

Each number is tried by the cost model itself, for a stage in the quickest way that fits
(`planner.solver.search.chain.fitting`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import IMPOSSIBLE, Integers, Work
from planner.formats.files import replace
from planner.solver.search.chain.fitting import FittingVariants
from planner.solver.search.chain.variants import numbered, taken

# How a stage meets a target.
MISSED = 0
RECOMPUTING = 1
PLAIN = 2

# Tries stages, by their numbers, on so many replicas each, and returns how they meet the target.
Attempt = Callable[[Integers, Integers], Integers]


def fewest_that_meet(
    attempt: Attempt, low: Integers, high: Integers, one_by_one: int
) -> tuple[Integers, Integers]:
    """Return the fewest replicas of each stage, from `low` to `high`, that meet the target, and
    how; `IMPOSSIBLE` where none do.

    The first ones are tried one by one. From there on, more replicas are taken to be faster.
    """
    fewest = np.full(len(low), IMPOSSIBLE, dtype=np.int64)
    manner = np.full(len(low), MISSED, dtype=np.int64)

    def meets(stage: Integers, replicas: Integers) -> NDArray[np.bool_]:
        how = attempt(stage, replicas)
        rows = np.flatnonzero(how)
        settled, first = np.unique(stage[rows], return_index=True)
        fewest[settled] = replicas[rows[first]]
        manner[settled] = how[rows[first]]
        return how > MISSED

    # 1. The first few, one by one.
    stage, number = numbered(np.minimum(high - low + 1, one_by_one))
    meets(stage, low[stage] + number)

    # 2. Where none of them does, the most may.
    below = low + one_by_one - 1
    enough = high.copy()
    stage = np.flatnonzero((fewest >= IMPOSSIBLE) & (below < high))
    stage = stage[meets(stage, high[stage])]

    # 3. Then halve what is between.
    while True:
        stage = stage[enough[stage] - below[stage] > 1]
        if not len(stage):
            return fewest, manner

        middle = (below[stage] + enough[stage]) // 2
        met = meets(stage, middle)
        enough[stage[met]] = middle[met]
        below[stage[~met]] = middle[~met]


@dataclass(frozen=True)
class Trial:
    """Tries stages that begin at one state.

    Attributes:
        fitting: the ways that fit.
        state: where the stages begin.
        others: where each of them ends.
        tight: which of them may recompute.
        after: GPUs after each.
        target_s: seconds per minibatch.
        work: of the stages in their plainest way.
    """

    fitting: FittingVariants
    state: int
    ends: Integers
    tight: NDArray[np.bool_]
    after: Integers
    target_s: float
    work: Work

    def __call__(self, stage: Integers, replicas: Integers) -> Integers:
        how = self._how(stage, replicas, sharded=False)
        if self.fitting.variants.shards:
            how = np.maximum(how, self._how(stage, replicas, sharded=True))
        return how

    def _how(self, stage: Integers, replicas: Integers, *, sharded: bool) -> Integers:
        model = self.fitting.model
        variants = self.fitting.variants

        # 1. A stage that misses the target without recomputing misses it in every way, so most
        # stages need no choice.
        work = taken(self.work, stage).shared_out(sharded)
        meets, in_flight = self.fitting.allowed(
            np.full(len(stage), sharded), replicas, self.after[stage]
        )
        meets &= model.stage_s(work, replicas) <= self.target_s
        how = np.where(meets, RECOMPUTING if variants.recomputes else PLAIN, MISSED)
        if variants.limits.memory_bytes is None:
            return how

        # 2. For the others it is the quickest that fits.
        rows = np.flatnonzero(meets)
        choice, recompute_s = self.fitting.quickest(
            self.state,
            self.ends[stage[rows]],
            self.tight[stage[rows]],
            sharded,
            replicas[rows],
            in_flight[rows],
        )
        work = replace(taken(work, rows), recompute_s=recompute_s)
        still = (choice >= 0) & (model.stage_s(work, replicas[rows]) <= self.target_s)
        how[rows] = np.where(still, np.where(choice == 0, how[rows], RECOMPUTING), MISSED)
        return how
