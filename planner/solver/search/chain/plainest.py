"""The fewest replicas of stages in their plainest way: nothing is sharded, and what recomputes is
the rule's alone.
"""

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Integers, Work, fewest_to_hold
from planner.options.solving import UNLIMITED
from planner.solver.problem.bounds import Bounds
from planner.solver.search.chain.ways import WaysOf

_ONE = np.ones(1, dtype=np.int64)


class PlainestWay:
    """The closed form under one cost model."""

    def __init__(self, ways: WaysOf, model: Bounds) -> None:
        self._ways = ways
        self._model = model

    def fewest(
        self,
        state: int,
        others: Integers,
        target_s: float,
        after: Integers,
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas that meet the target and fit, and where memory asks for more
        than one.
        """
        # 1. What is in flight is divided between the replicas, so memory and staleness are lower
        # bounds.
        work = self._ways.space.work(state, others)
        alone, several = self._to_hold(state, others, work, after)
        least = np.where(alone > 1, np.maximum(several, 2), 1)
        if self._ways.limits.deepest < UNLIMITED:
            least = np.maximum(least, fewest_to_hold(self._ways.limits.deepest, after))

        # 2. From there on, the cost model has a closed form.
        work = self._ways.plainest_work(work)
        replicas = self._model.fewest_replicas(work, target_s, least, after)

        # 3. A stage that fits alone may need several replicas for its time, which hold a buffer
        # more.
        too_few = (replicas > 1) & (replicas < several)
        if too_few.any():
            least = np.where(replicas > 1, np.maximum(least, several), least)
            replicas = self._model.fewest_replicas(work, target_s, least, after)

        tight = np.broadcast_to(several > 1, replicas.shape)
        return replicas, tight.copy()

    def _to_hold(
        self, state: int, others: Integers, work: Work, after: Integers
    ) -> tuple[Integers, Integers]:
        """Return the fewest replicas that fit the memory, as if each held what one alone does, and
        one of several.
        """
        memory_bytes = self._ways.limits.memory_bytes
        if memory_bytes is None:
            return _ONE, _ONE

        costs = self._ways.layer_costs
        footprint = self._ways.plainest_footprint(state, others, work)

        def to_hold(replicas: int) -> Integers:
            in_flight = self._model.most_in_flight(
                costs.replicated(footprint, replicas), memory_bytes
            )
            return fewest_to_hold(in_flight, after)

        alone = to_hold(1)
        if not costs.counts_replicas:
            return alone, alone
        return alone, to_hold(2)
