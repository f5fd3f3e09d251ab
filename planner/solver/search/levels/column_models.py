"""Cost models and searches for plans whose replicas are multiples of a number of columns."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.network.topology import Resource
from planner.cost.work import IMPOSSIBLE, Floats, Integers, Work
from planner.solver.problem.replica_models import ReplicaModel, ReplicaModelLike
from planner.solver.search.chain.search import Search


class MultiplesModel(ReplicaModelLike):
    """A cost model in which all numbers of replicas are multiples of one."""

    def __init__(self, model: ReplicaModel, multiple: int) -> None:
        super().__init__(model)
        self.multiple = multiple

    def may_have(self, replicas: Integers) -> NDArray[np.bool_]:
        return np.asarray(replicas % self.multiple == 0)

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        return self.like.resources_s(work, replicas)

    def fewest_replicas(
        self,
        work: Work,
        target_s: float,
        at_least: ArrayLike = 1,
        after: ArrayLike = 0,
    ) -> Integers:
        """Return the fewest replicas that meet the target and are a multiple, or `IMPOSSIBLE`."""
        fewest = self._meeting(work, target_s, at_least, after)
        while True:
            rounded = self._rounded_up(fewest)
            # Rounding up may cross into another server, where more replicas are needed.
            fewest = self._meeting(work, target_s, rounded, after)
            if np.array_equal(fewest, rounded):
                return rounded

    def _meeting(
        self,
        work: Work,
        target_s: float,
        at_least: ArrayLike,
        after: ArrayLike,
    ) -> Integers:
        replicas = self.like.fewest_replicas(work, target_s, at_least, after)
        return np.asarray(replicas, dtype=np.int64)

    def _rounded_up(self, replicas: Integers) -> Integers:
        rounded = -(-replicas // self.multiple) * self.multiple
        return np.where(replicas < IMPOSSIBLE, rounded, IMPOSSIBLE)


class MultiplesSearch(Search):
    """Finds asynchronous plans whose replicas are multiples of the columns."""

    model: MultiplesModel

    def _counts(self) -> Integers:
        return np.arange(self.model.multiple, self.gpus + 1, self.model.multiple)
