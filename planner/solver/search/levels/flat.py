"""Flat clusters that stand for one of several levels: the searches that they have, and what these
are worth.

The nearest flat cluster has the innermost links for messages, and for the all-reduce of r replicas
the links that r GPUs cross at least. No plan on the levels is faster than on it, so that the best
time there is a bound.
"""

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.network.link import Link
from planner.cost.network.topology import Resource, Topology
from planner.cost.work import IMPOSSIBLE, Floats, Integers, Work
from planner.formats.files import replace
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import ReplicaModelLike, replica_model
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.variants import taken
from planner.units import SLACK


class NearestModel(ReplicaModelLike):
    """An asynchronous model of stages that span as few groups as their replicas need.

    A stage is next to those that it exchanges messages with.
    """

    def __init__(self, topology: Topology) -> None:
        near = topology.link(0)
        self._levels = [
            replica_model(replace(near, all_reduce_bandwidth_bytes_per_s=float(ring)))
            for ring in topology.ring_bytes_per_s
        ]
        super().__init__(self._levels[0])
        self.link = near

        # The last group holds all ranks.
        self._group_sizes = [int(size) for size in topology.groups[:-1]]
        self._group_sizes.append(IMPOSSIBLE)

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        """Return the busy seconds of each resource, on links of the level that so many replicas
        reach.
        """
        replicas = np.asarray(replicas)
        busy_s = self.like.resources_s(work, replicas)
        for size, model in zip(self._group_sizes, self._levels[1:], strict=False):
            farther_s = model.resources_s(work, replicas)
            for resource, seconds in busy_s.items():
                busy_s[resource] = np.where(replicas > size, farther_s[resource], seconds)

        return busy_s

    def fewest_replicas(
        self,
        work: Work,
        target_s: float,
        at_least: ArrayLike = 1,
        after: ArrayLike = 0,
    ) -> Integers:
        """Return the fewest replicas that meet the target, the innermost level first.

        A stage that meets the target within a group need not cross its link.
        """
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), np.shape(after))
        at_least = np.broadcast_to(at_least, shape)
        after = np.broadcast_to(after, shape)
        least_s = np.broadcast_to(self.least_s(work), shape)
        least = least_s / target_s * (1 - SLACK)

        fewest = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        smaller = 0
        for size, model in zip(self._group_sizes, self._levels, strict=True):
            undecided = (fewest >= IMPOSSIBLE) & (least <= size)
            if undecided.any():
                everything = undecided.ndim == 1 and undecided.all()
                part = work if everything else taken(work, undecided)
                floor = np.maximum(at_least[undecided], smaller + 1)
                replicas = model.fewest_replicas(part, target_s, floor, after[undecided])
                replicas = np.maximum(replicas, floor)
                fewest[undecided] = np.where(replicas <= size, replicas, IMPOSSIBLE)

            smaller = size

        return fewest


def flat_search(
    problem: Problem,
    space: CutSpace,
    limits: Limits,
    link: Link | None = None,
) -> Search | SynchronousSearch:
    """Return the search for a flat cluster: of the slowest links of the problem's, or of others."""
    if problem.schedule.asynchronous:
        return Search(space, problem.asynchronous(link), limits)
    return SynchronousSearch(space, problem.synchronous(link), limits)


def nearest_search(problem: Problem, space: CutSpace, limits: Limits) -> Search | SynchronousSearch:
    """Return the search for the nearest flat cluster, where no plan takes longer."""
    if problem.schedule.asynchronous:
        return Search(space, NearestModel(problem.topology), limits)
    return flat_search(problem, space, limits, problem.topology.link(0))


def nearest_path(problem: Problem, space: CutSpace) -> tuple[CutPath | None, bool]:
    """Return the best path on the nearest flat cluster, and whether the clock ended the search."""
    tuning = problem.tuning.levels
    search = nearest_search(problem, space, problem.limits)
    many = len(space) > 2 * tuning.most_alike_states
    if not (many and problem.schedule.asynchronous):
        return search.best(precision=precision_of(problem)), search.interrupted

    # A bound needs no more precision than timings have, and precise searches over many cuts take
    # long.
    path = search.best(precision=tuning.bound_precision)
    if path is not None:
        path = path.that_takes(path.seconds * (1 - tuning.bound_precision))
    return path, search.interrupted


def precision_of(problem: Problem) -> float:
    """Return the precision of a search on one flat cluster. Asynchronous ones are quick enough to
    be exact.
    """
    if problem.schedule.asynchronous:
        return RESOLUTION
    return max(problem.precision, RESOLUTION)
