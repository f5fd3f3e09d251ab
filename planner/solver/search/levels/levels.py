"""Search for plans on clusters of several levels: which search suits which size, and what its answer is worth."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.cost.pricing import busy_resources
from planner.cost.setting import Setting
from planner.cost.work import Integers
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced_path
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath, stages_along, with_replicas
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.ways import BestWays
from planner.solver.search.levels.columns import NearestModel
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.search.levels.relaxed import Relaxed, Seconds, better, objective_of

MOST_PLACED = 256  # GPUs up to which every place is tried
MOST_PRICED, PRICED_GPUS = 3_000, 16  # plans that local search prices for so many GPUs; for more GPUs, fewer plans
FEW_PRICED = 1_000  # the same where a search need not be precise
MOST_ALIKE = 300  # states, about, over which plans for links that are all alike are sought
PRECISION = 4e-3  # of the bound for clusters of several levels over more states than that
ROUNDS = 3


@dataclass(frozen=True)
class PathPrices:
    """The prices of paths over one space."""

    problem: Problem
    space: CutSpace

    def seconds(self, path: CutPath) -> float:
        """Return the seconds of a path by the cost model; infinite if it does not fit the memory."""
        plan = priced_path(self.problem, self.space, path)
        return plan.seconds if self.problem.allows(plan) else np.inf

    def strain(self, path: CutPath) -> float:
        """Return the seconds plus a thousandth for how uneven the stages are.

        Where several resources are equally busy, no single step of local search lowers the seconds; evening out does.
        """
        problem, cluster, limits = self.problem, self.problem.cluster, self.problem.limits
        limited = limits.counts_gpus or limits.rules.max_stages is not None
        if not problem.schedule.stashes or (limited and not np.isfinite(self.seconds(path))):
            return self.seconds(path)
        setting = Setting(cluster)
        resources = busy_resources(self.space.layer_costs, stages_along(self.space, path), setting)
        busy_s = [max(map(float, each.values())) for each in resources]
        seconds = max(busy_s)
        uneven = sum(r * each**2 for r, each in zip(path.replicas, busy_s, strict=True)) / cluster.gpus
        return seconds + 1e-3 * uneven / seconds if seconds > 0 else seconds


def search_levels(problem: Problem, space: CutSpace, nearest: CutPath) -> BoundedPath:
    """Find a fast plan by its true price, and bound all plans over the space.

    If there are few cuts and few places, the relaxed programme over both gives plans and the bound. With more cuts, it
    has cuts spread over the model and those near the best plan so far. With more GPUs, the plans for clusters whose
    links are all alike are priced. Local search improves what is not proven to be optimal then. The time of `nearest`,
    the best path on a flat cluster that is never worse, is a bound.
    """
    prices = PathPrices(problem, space)
    starts = [nearest, *_alike(problem, space, nearest)]
    best = None
    for path in starts:
        best = better(best, path, prices.seconds)
    few = problem.cluster.gpus <= MOST_PLACED and not problem.clock.passed
    precise = few and problem.precision == 0  # the bounds of every stage in every place take long to tabulate
    found = BoundedPath(best, nearest.seconds if best is None else min(nearest.seconds, best.seconds))
    with contextlib.suppress(OutOfTimeError):  # then it is what was found before
        if precise and len(space) <= Relaxed.states_that_fit(problem):
            found = Relaxed(problem, space).best(prices.seconds, best)
            found = replace(found, bound_s=max(found.bound_s, nearest.seconds))
        elif precise and (refined := _refined(prices, best)) is not None:
            found = replace(found, path=refined, bound_s=min(found.bound_s, refined.seconds))
    if few and (found.path is None or found.bound_s < found.path.seconds * (1 - RESOLUTION)):
        found = _improved(prices, found, starts)
    return found


def _improved(prices: PathPrices, found: BoundedPath, starts: Sequence[CutPath]) -> BoundedPath:
    local_search = local_search_for(prices.problem, prices.space, prices.strain)
    best = found.path
    for start in starts if best is None else [best, *starts]:
        path = local_search.from_(start)
        best = best if path is None else better(best, path, prices.seconds)
    return found if best is None else replace(found, path=best, bound_s=min(found.bound_s, best.seconds))


def local_search_for(problem: Problem, space: CutSpace, strain: Seconds) -> LocalSearch:
    gpus = problem.cluster.gpus
    most = MOST_PRICED if problem.precision == 0 else FEW_PRICED
    most = most * PRICED_GPUS // max(PRICED_GPUS, gpus)
    return LocalSearch(space, gpus, strain, [BestWays(problem, space).options], most, problem.clock)


def nearest_path(problem: Problem, space: CutSpace) -> tuple[CutPath | None, bool]:
    """Return the best path on a flat cluster that is never worse, and whether the deadline ended the search early."""
    search = nearest_search(problem, space, problem.limits)
    # A bound needs no more precision than timings have, and precise searches over many cuts take long.
    if isinstance(search, SynchronousSearch) or len(space) <= 2 * MOST_ALIKE:
        return best_of(problem, search), search.interrupted
    path = search.best(precision=PRECISION)
    return path and replace(path, seconds=path.seconds * (1 - PRECISION)), search.interrupted


def nearest_search(problem: Problem, space: CutSpace, limits: Limits) -> Search | SynchronousSearch:
    """Return the search for a flat cluster that is never worse."""
    if isinstance(objective_of(problem), SynchronousModel):
        return flat_search(problem, space, limits, problem.topology.link(0))
    return Search(space, NearestModel(problem.topology), limits)


def _refined(prices: PathPrices, best: CutPath | None) -> CutPath | None:
    problem, space = prices.problem, prices.space
    for _ in range(ROUNDS):
        if problem.clock.passed:
            break
        states = _sample(space, Relaxed.states_that_fit(problem), best)

        def price(path: CutPath, states: Integers = states) -> float:
            return prices.seconds(_on(path, states))

        found = Relaxed(problem, space.only(states)).best(price, None).path
        improved = best if found is None else better(best, _on(found, states), prices.seconds)
        if improved == best:
            break
        best = improved
    return best


def _sample(space: CutSpace, most: int, best: CutPath | None) -> Integers:
    """Return both ends, cuts at equal distances in compute time, and as many near the cuts of the best path."""
    last = len(space) - 1
    # Half of the cuts from everywhere, in case the best plan so far is far from the optimum.
    spread = most if best is None or len(best.states) <= 2 else most // 2
    targets_s = np.linspace(0, float(space.compute_s[-1]), spread)
    chosen = set(np.minimum(np.searchsorted(space.compute_s, targets_s), last).tolist()) | {0, last}
    if best is not None and len(best.states) > 2:
        distance = 0
        while len(chosen) < min(most, last + 1):
            for cut in best.states[1:-1]:
                chosen.update({max(cut - distance, 0), min(cut + distance, last)})
            distance += 1
    return np.array(sorted(chosen))


def _on(path: CutPath, states: Integers) -> CutPath:
    return replace(path, states=tuple(int(states[state]) for state in path.states))


def _alike(problem: Problem, space: CutSpace, nearest: CutPath) -> Iterator[CutPath]:
    """Yield paths that are best if all links are like one of the cluster's or a GPU's share of it; and by servers."""
    topology, whole = problem.topology, space
    states = np.arange(len(space))
    if len(space) > 2 * MOST_ALIKE:  # these are only candidates, so some of the cuts will do
        states = space.spread(MOST_ALIKE)
        whole = space.only(states)
    links = [topology.link(level) for level in range(len(topology))]
    links += [
        replace(topology.link(level), bandwidth_bytes_per_s=bandwidth / size)
        for level, size, bandwidth, _ in topology.shared
    ]
    for link in links:
        if problem.clock.passed:
            return
        if link == links[0] and whole is space and isinstance(objective_of(problem), SynchronousModel):
            coarse: CutPath | None = nearest  # which is the best for these links
        else:
            try:
                coarse = best_of(problem, flat_search(problem, whole, problem.limits, link))
            except OutOfTimeError:
                return
        if coarse is not None:
            yield (path := _on(coarse, states))
            for _, size, _, _ in topology.shared:
                yield with_replicas(path, [r // size * size or r for r in path.replicas])


def best_of(problem: Problem, search: Search | SynchronousSearch) -> CutPath | None:
    """Return the best plan, as precisely as the problem asks."""
    return search.best() if isinstance(search, Search) else search.best(max(problem.precision, RESOLUTION))


def flat_search(
    problem: Problem, space: CutSpace, limits: Limits, link: Link | None = None
) -> Search | SynchronousSearch:
    """Return the search for a flat cluster: of the slowest links of the problem's, or of other ones."""
    if problem.schedule.asynchronous:
        return Search(space, problem.asynchronous(link), limits)
    return SynchronousSearch(space, problem.synchronous(link), limits)
