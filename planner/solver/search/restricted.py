"""Exact searches over plans of restricted kinds.

Each is the chain search with fewer replicas allowed. The best plan of a simple kind may take less
time than the best of all by the cost model: the search minimises the seconds of the busiest
resource, and waiting shows only in a simulation.
"""

import numpy as np

from planner.cost.work import Integers
from planner.formats.files import replace
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import ReplicaModel
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search


class DataParallelSearch(Search):
    """Finds plans of one stage, which wait for nothing."""

    def best(self, below_s: float = np.inf, precision: float = RESOLUTION) -> CutPath | None:
        path = self.single_stage()
        if path is None or path.seconds >= below_s:
            return None
        return path

    def _counts(self) -> Integers:
        return np.arange(1, self._most_alone + 1)


class StraightSearch(Search):
    """Finds plans without replicas."""

    def __init__(self, space: CutSpace, model: ReplicaModel, limits: Limits) -> None:
        super().__init__(space, model, replace(limits, most_replicas=1))


class FrontSearch(Search):
    """Finds plans in which only the first stage has replicas."""

    def most_replicas(self, state: int, ends: Integers) -> Integers:
        return np.full(len(ends), self.limits.most_replicas if state == 0 else 1)


class EndsSearch(FrontSearch):
    """Finds plans in which only the first stage and the last have replicas: the last scores a large
    vocabulary.
    """

    def most_replicas(self, state: int, ends: Integers) -> Integers:
        at_an_end = (state == 0) | (ends == len(self.space) - 1)
        return np.where(at_an_end, self.limits.most_replicas, 1)
