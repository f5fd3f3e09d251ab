"""Search for plans whose workers stand in columns on several levels.

In d columns (`planner.cost.network.topology.column_ranks`) all stages have multiples of d replicas,
messages stay in a column, and all-reduces cross the columns. Two stages of two replicas each, in
two columns on two servers:

              server 0    server 1
    stage 0   GPU 0       GPU 2
    stage 1   GPU 1       GPU 3

The plans that differ from those on consecutive ranks have more GPUs than a server, S, and from 2·S
GPUs on, every all-reduce leaves its server. For each d, a search for flat clusters with near
messages and far all-reduces therefore bounds the plans on all GPUs, and one with near links those
on fewer than 2·S. The paths of both are candidates.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.network.topology import Resource
from planner.cost.work import IMPOSSIBLE, Floats, Integers, Work
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced, priced_path
from planner.solver.evaluate.orders import columns_of, in_columns
from planner.solver.problem.problem import Problem
from planner.solver.problem.replica_models import ReplicaModel, ReplicaModelLike, replica_model
from planner.solver.problem.result import BoundedPlans, CutPath, Evaluation
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.variants import QuickestVariants
from planner.solver.search.levels.flat import NearestModel, precision_of
from planner.solver.search.levels.local_search import LocalSearch


def search_columns(
    problem: Problem,
    space: CutSpace,
    nearest: CutPath,
    best: Evaluation,
) -> BoundedPlans:
    """Find plans in columns that may be faster than the best one on consecutive ranks, the fastest
    by the cost model first, and seconds that none is below.

    Args:
        problem: on a cluster of several levels.
        space: cuts.
        nearest: the best path on the nearest flat cluster, whose time is a bound.
        best: the best plan on consecutive ranks, by the cost model.
    """
    tuning = problem.tuning.columns
    if problem.cluster.gpus > tuning.most_gpus or len(space) > tuning.most_states:
        return BoundedPlans((), nearest.seconds)

    # 1. The fastest of each number of columns.
    bound_s = np.inf
    paths = [nearest]
    hopeless: list[int] = []  # numbers of columns, of which no multiple is faster either
    for columns in _numbers_of_columns(problem):
        if any(columns % number == 0 for number in hopeless):
            continue

        faster = _faster_paths(problem, space, columns, best.seconds)
        paths += faster
        if problem.clock.passed:
            break

        if not faster:
            hopeless.append(columns)
        for path in faster:
            bound_s = min(bound_s, path.seconds * (1 - tuning.precision))

    # 2. A bound on all. Without precision not all numbers of columns are tried.
    tried_all = problem.precision == 0 and not problem.clock.passed
    if tried_all:
        bound_s = max(bound_s, nearest.seconds)
    else:
        bound_s = nearest.seconds

    plans = _ColumnPlans(problem, space).best(paths)
    return BoundedPlans(plans, bound_s)


def _numbers_of_columns(problem: Problem) -> list[int]:
    """Return numbers of columns to try: divisors; where the bound must hold, all primes, too, and
    on few GPUs all.
    """
    gpus = problem.cluster.gpus
    precise = problem.precision == 0
    few = gpus <= problem.tuning.columns.most_exhaustive_gpus

    numbers = []
    for number in range(2, gpus // 2 + 1):
        bounds_others = precise and (few or _is_prime(number))
        if gpus % number == 0 or bounds_others:
            numbers.append(number)

    return numbers


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, number))


def _faster_paths(
    problem: Problem,
    space: CutSpace,
    columns: int,
    below_s: float,
) -> list[CutPath]:
    """Return the best paths with multiples of so many replicas, on both flat clusters, that take
    less than some seconds.
    """
    precision = problem.tuning.columns.precision
    if not problem.schedule.asynchronous:
        precision = precision_of(problem)
    paths = []
    with contextlib.suppress(OutOfTimeError):
        for search in _flat_searches(problem, space, columns):
            path = search.best(below_s, precision)
            if path is not None and path.seconds < below_s:
                paths.append(path)

    return paths


def _flat_searches(
    problem: Problem, space: CutSpace, columns: int
) -> Iterator[Search | SynchronousSearch]:
    """Yield the search on the cluster with near messages and far all-reduces, and on the smaller
    one with near links.
    """
    topology = problem.topology
    near = topology.link(0)
    far = replace(near, all_reduce_bandwidth_bytes_per_s=float(topology.ring_bytes_per_s[1]))

    limits = problem.limits
    within_two_servers = 2 * int(topology.groups[0]) - 1
    few = replace(limits, gpus=min(limits.gpus, within_two_servers))

    if not problem.schedule.asynchronous:
        yield SynchronousSearch(space, problem.synchronous(far), limits, columns)
        yield SynchronousSearch(space, problem.synchronous(near), few, columns)
        return

    everywhere = MultiplesModel(replica_model(far), columns)
    nearby = MultiplesModel(NearestModel(topology), columns)
    yield MultiplesSearch(space, everywhere, limits)
    yield MultiplesSearch(space, nearby, few)


@dataclass(frozen=True)
class _ColumnPlans:
    """Lays paths out in columns, at their true price."""

    problem: Problem
    space: CutSpace

    def best(self, paths: Sequence[CutPath]) -> tuple[Evaluation, ...]:
        """Return plans of the paths, fastest first, and of the best one with its cuts moved."""
        distinct = {(path.states, path.options): path for path in paths}
        ordered = sorted(distinct.values(), key=self._seconds)

        moved = self._local_search().from_(ordered[0])
        promising = ordered[: self.problem.tuning.columns.most_proposed]
        if moved is not None:
            promising.insert(0, moved)

        plans = [plan for plan in map(self._laid_out, promising) if plan is not None]
        return tuple(sorted(plans, key=lambda plan: plan.seconds))

    def _local_search(self) -> LocalSearch:
        gpus = self.problem.cluster.gpus
        variants = [QuickestVariants(self.problem, self.space).options]
        tuning = self.problem.tuning.columns
        few = tuning.most_exhaustive_gpus
        most = tuning.most_priced * few // max(few, gpus)
        split_shares = self.problem.tuning.levels.split_shares
        return LocalSearch(
            self.space, gpus, self._seconds, variants, most, split_shares, self.problem.clock
        )

    def _seconds(self, path: CutPath) -> float:
        plan = self._laid_out(path)
        if plan is None:
            return np.inf
        return plan.seconds

    def _laid_out(self, path: CutPath) -> Evaluation | None:
        """Return the path's plan in its best number of columns; None where it has none."""
        if path.gpus > self.problem.cluster.gpus:
            return None

        plan = priced_path(self.problem, self.space, path)
        if not self.problem.allows(plan):
            return None

        laid_out = [
            priced(self.problem, in_columns(plan, columns))
            for columns in columns_of(self.problem, plan)
        ]
        return min(laid_out, key=lambda each: each.seconds, default=None)


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
