"""Search for plans whose workers stand in columns (`planner.cost.network.topology.column_ranks`) on several levels.

In d columns all stages have multiples of d replicas, messages stay in a column, and all-reduces cross the columns. The
plans that differ from those on consecutive ranks have more GPUs than a server, S, and from 2·S GPUs on, every
all-reduce leaves its server. For each d, a search for flat clusters with near messages and far all-reduces therefore
bounds the plans on all GPUs, and one with near links those on fewer than 2·S. The paths of both are candidates.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.cost.network.topology import Resource, Topology
from planner.cost.work import IMPOSSIBLE, Floats, Integers, Work
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate import evaluation
from planner.solver.evaluate.evaluation import priced, priced_path
from planner.solver.problem.bounds import Bounds, BoundsLike, bounds_for
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.result import RESOLUTION, CutPath, Evaluation
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.ways import BestWays, taken
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.search.levels.relaxed import objective_of
from planner.units import SLACK


class NearestModel(BoundsLike):
    """A cost model whose stages span as few groups as their replicas need, next to the stages they talk to."""

    def __init__(self, topology: Topology) -> None:
        near = topology.link(0)
        self._groups = [*(int(size) for size in topology.groups[:-1]), IMPOSSIBLE]  # the last group holds all ranks
        rings = map(float, topology.ring_bytes_per_s)
        self._levels = [bounds_for(replace(near, all_reduce_bandwidth_bytes_per_s=ring)) for ring in rings]
        super().__init__(self._levels[0])
        self.link = near

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas)
        busy = self.like.resources_s(work, r)
        for smaller, model in zip(self._groups, self._levels[1:], strict=False):
            farther = model.resources_s(work, r)
            for resource in busy:
                busy[resource] = np.where(r > smaller, farther[resource], busy[resource])
        return busy

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest that stay within a group and meet the target with its links, otherwise a larger group."""
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), np.shape(after))
        floor, behind = np.broadcast_to(at_least, shape), np.broadcast_to(after, shape)
        least = np.broadcast_to(self.least_s(work), shape) / target_s * (1 - SLACK)
        # Innermost level first: a stage that meets the target within a group need not cross its link.
        answer = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        smaller = 0
        for larger, model in zip(self._groups, self._levels, strict=True):
            open_ = (answer >= IMPOSSIBLE) & (least <= larger)
            if open_.any():
                part = work if open_.ndim == 1 and open_.all() else taken(work, open_)
                from_ = np.maximum(floor[open_], smaller + 1)
                r = np.maximum(model.fewest_replicas(part, target_s, from_, behind[open_]), from_)
                answer[open_] = np.where(r <= larger, r, IMPOSSIBLE)
            smaller = larger
        return answer


MOST_COLUMNED = 64  # GPUs up to which columns are searched; beyond, those of good plans are priced
MOST_STATES = 600  # likewise: with more cuts, the bound for consecutive ranks is the nearest flat cluster's, too
DENSE = 16  # GPUs up to which every number of columns is tried
MOST_MOVED = 300  # plans to price while cuts move
MOST_PLANS = 4  # to propose
PRECISION = 1e-3  # of the flat searches: their plans are candidates, and their times bounds


class MultiplesModel(BoundsLike):
    """A cost model in which all replica counts are multiples of a number."""

    def __init__(self, model: Bounds, multiple: int) -> None:
        super().__init__(model)
        self.multiple = multiple

    def may_have(self, replicas: Integers) -> NDArray[np.bool_]:
        return np.asarray(replicas % self.multiple == 0)

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        return self.like.resources_s(work, replicas)

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest that meet the target and are a multiple; else `IMPOSSIBLE`."""
        fewest = np.asarray(self.like.fewest_replicas(work, target_s, at_least, after), dtype=np.int64)
        while True:
            # Rounding up may cross into another server, where more replicas are needed.
            rounded = np.where(fewest < IMPOSSIBLE, -(-fewest // self.multiple) * self.multiple, IMPOSSIBLE)
            again = self.like.fewest_replicas(work, target_s, rounded, after)
            if np.array_equal(again, rounded):
                return rounded
            fewest = np.asarray(again, dtype=np.int64)


class _Multiples(Search):
    """Finds asynchronous plans whose replicas are multiples of the columns."""

    model: MultiplesModel

    def _data_parallel(self, replicas: Integers) -> CutPath | None:
        return super()._data_parallel(np.arange(self.model.multiple, self.gpus + 1, self.model.multiple))


@dataclass(frozen=True)
class Columned:
    """Plans in columns, fastest by the cost model first, and seconds that none is below."""

    plans: tuple[Evaluation, ...]
    bound_s: float


def search_columns(problem: Problem, space: CutSpace, nearest: CutPath, best: Evaluation) -> Columned:
    """Find plans in columns that may be faster than the `best` plan on consecutive ranks, by the cost model.

    The time of `nearest`, the best path on a flat cluster that is never worse, is a bound.
    """
    gpus = problem.cluster.gpus
    if gpus > MOST_COLUMNED or len(space) > MOST_STATES:
        return Columned((), nearest.seconds)
    bound_s, paths, hopeless = np.inf, [nearest], set[int]()
    for multiple in _multiples(gpus, precise=problem.precision == 0):
        if any(multiple % each == 0 for each in hopeless):
            continue
        if problem.clock.passed:
            return Columned(_plans(problem, space, paths), nearest.seconds)
        found = [path for path in _flat(problem, space, multiple, best.seconds) if path.seconds < best.seconds]
        if not found:
            hopeless.add(multiple)
        bound_s = min([bound_s, *(path.seconds * (1 - PRECISION) for path in found)])
        paths += found
    bound_s = nearest.seconds if problem.precision > 0 else max(bound_s, nearest.seconds)
    return Columned(_plans(problem, space, paths), bound_s)


def _multiples(gpus: int, *, precise: bool) -> list[int]:
    """Return numbers of columns to try: divisors; and all primes, so that the bound holds, and up to `DENSE` all."""
    return [n for n in range(2, gpus // 2 + 1) if gpus % n == 0 or (precise and (gpus <= DENSE or _is_prime(n)))]


def _is_prime(number: int) -> bool:
    return all(number % each for each in range(2, number))


def _flat(problem: Problem, space: CutSpace, multiple: int, below_s: float) -> Iterator[CutPath]:
    """Yield the best paths with multiples of so many replicas that take less than `below_s`: see `_links`."""
    if not isinstance(objective_of(problem), SynchronousModel):
        searches = (_Multiples(space, model, limits) for model, limits in _models(problem, multiple))
        yield from filter(None, (search.best(below_s, PRECISION) for search in searches))
        return
    for link, limits in _links(problem):
        with contextlib.suppress(OutOfTimeError):
            search = SynchronousSearch(space, problem.synchronous(link), limits, multiple)
            path = search.best(max(problem.precision, RESOLUTION), below_s)
            if path is not None:
                yield path


def _models(problem: Problem, multiple: int) -> Iterator[tuple[MultiplesModel, Limits]]:
    """Yield cost models that no asynchronous plan in columns is below, each for so many GPUs."""
    (far, all_gpus), (_, few) = _links(problem)
    yield MultiplesModel(bounds_for(far), multiple), all_gpus
    yield MultiplesModel(NearestModel(problem.topology), multiple), few


def _links(problem: Problem) -> tuple[tuple[Link, Limits], tuple[Link, Limits]]:
    """Return links that are near for messages and far for all-reduces, and near for both on fewer GPUs."""
    topology, limits = problem.topology, problem.limits
    near = topology.link(0)
    far = replace(near, all_reduce_bandwidth_bytes_per_s=float(topology.ring_bytes_per_s[1]))
    return (far, limits), (near, replace(limits, gpus=min(limits.gpus, 2 * int(topology.groups[0]) - 1)))


def _plans(problem: Problem, space: CutSpace, paths: Sequence[CutPath]) -> tuple[Evaluation, ...]:
    """Return the plans of the paths in their best numbers of columns, after moving the cuts of the best."""

    def in_best_columns(path: CutPath) -> Evaluation | None:
        if path.gpus > problem.cluster.gpus:
            return None
        plan = priced_path(problem, space, path)
        laid = (
            priced(problem, evaluation.in_columns(plan, columns)) for columns in evaluation.columns_of(problem, plan)
        )
        return min(laid, key=lambda each: each.seconds, default=None) if problem.allows(plan) else None

    def seconds(path: CutPath) -> float:
        plan = in_best_columns(path)
        return np.inf if plan is None else plan.seconds

    distinct = {(path.states, path.options): path for path in paths}
    ordered = sorted(distinct.values(), key=seconds)
    most = MOST_MOVED * DENSE // max(DENSE, problem.cluster.gpus)
    ways = [BestWays(problem, space).options]
    moved = LocalSearch(space, problem.cluster.gpus, seconds, ways, most, problem.clock).from_(ordered[0])
    plans = [in_best_columns(path) for path in [*([moved] if moved else []), *ordered[:MOST_PLANS]]]
    return tuple(sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds))
