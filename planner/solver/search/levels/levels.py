"""Search for plans on clusters of several levels, on consecutive ranks, and bound them.

    1. start      the best path on the nearest flat cluster, and those for clusters whose links are
                  all alike: slower than the nearest, faster than the farthest
    2. relax      a dynamic programme over cuts and ranks (`relaxed`): over all cuts where these are
                  few; else over some, spread over the model and near the best path so far
    3. improve    local search by true prices, where nothing is proven to be optimal

The time of the best path on the nearest flat cluster is a bound, and so is that of 2 over all cuts.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.network.link import Link
from planner.cost.network.topology import Topology
from planner.cost.pricing import busy_resources
from planner.cost.setting import Setting
from planner.cost.work import Integers
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced_path
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import (
    RESOLUTION,
    BoundedPath,
    CutPath,
    stages_along,
    with_replicas,
)
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.variants import QuickestVariants
from planner.solver.search.levels.flat import flat_search, precision_of
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.search.levels.relaxed import Relaxed, Seconds, better


def search_levels(problem: Problem, space: CutSpace, nearest: CutPath) -> BoundedPath:
    """Find a fast plan by its true price, and bound all plans over the space.

    Args:
        problem: on a cluster of several levels.
        space: cuts.
        nearest: the best path on the nearest flat cluster, whose time is a bound.
    """
    prices = PathPrices(problem, space)
    starts = [nearest, *_alike(problem, space, nearest)]
    best: CutPath | None = None
    for path in starts:
        best = better(best, path, prices.seconds)

    few_places = (
        problem.cluster.gpus <= problem.tuning.levels.most_placed_gpus and not problem.clock.passed
    )
    answer = _bounded(best, nearest.seconds)

    # The bounds of every stage in every place take long to tabulate.
    if few_places and problem.precision == 0:
        with contextlib.suppress(OutOfTimeError):  # then the answer is what was found before
            answer = _relaxed(prices, answer)

    proven = answer.path is not None and (answer.bound_s >= answer.path.seconds * (1 - RESOLUTION))
    if few_places and not proven:
        answer = _bounded(_improved(prices, answer.path, starts), answer.bound_s)
    return answer


def _bounded(path: CutPath | None, bound_s: float) -> BoundedPath:
    """Return a path with a bound, which no path that was found is below."""
    return BoundedPath(path, bound_s if path is None else min(bound_s, path.seconds))


def _relaxed(prices: "PathPrices", answer: BoundedPath) -> BoundedPath:
    """Return the best path of the relaxed programme over all cuts with its bound, or over some."""
    problem = prices.problem
    space = prices.space
    if len(space) <= Relaxed.states_that_fit(problem):
        relaxed = Relaxed(problem, space).best(prices.seconds, answer.path)
        return replace(relaxed, bound_s=max(relaxed.bound_s, answer.bound_s))

    refined = _refined(prices, answer.path)
    if refined is None:
        return answer
    return _bounded(refined, answer.bound_s)


def _refined(prices: "PathPrices", best: CutPath | None) -> CutPath | None:
    """Return the best path of relaxed programmes over some of the cuts, in a few rounds."""
    problem = prices.problem
    most = Relaxed.states_that_fit(problem)
    for _ in range(problem.tuning.levels.rounds):
        if problem.clock.passed:
            break

        states = _sample(prices.space, most, best)
        path = _best_over(prices, states)
        improved = best
        if path is not None:
            improved = better(best, path, prices.seconds)
        if improved == best:
            break

        best = improved

    return best


def _best_over(prices: "PathPrices", states: Integers) -> CutPath | None:
    """Return the best path of the relaxed programme over some states, as a path of the space."""

    def seconds(path: CutPath) -> float:
        return prices.seconds(path.over(states))

    some = prices.space.only(states)
    path = Relaxed(prices.problem, some).best(seconds, None).path
    if path is None:
        return None
    return path.over(states)


def _sample(space: CutSpace, most: int, best: CutPath | None) -> Integers:
    """Return both ends, cuts at equal distances in compute time, and as many near the best
    path's.
    """
    last = len(space) - 1
    cuts = () if best is None else best.states[1:-1]

    # 1. Half of them are from everywhere, in case the best plan so far is far from the optimum.
    spread = most // 2 if cuts else most
    targets_s = np.linspace(0, float(space.compute_s[-1]), spread)
    everywhere = np.searchsorted(space.compute_s, targets_s)
    chosen = {0, last, *np.minimum(everywhere, last).tolist()}

    # 2. The others are ever farther from the cuts of the best path.
    distance = 0
    while cuts and len(chosen) < min(most, last + 1):
        for cut in cuts:
            chosen.add(max(cut - distance, 0))
            chosen.add(min(cut + distance, last))
        distance += 1

    return np.array(sorted(chosen))


def _improved(
    prices: "PathPrices",
    best: CutPath | None,
    starts: Sequence[CutPath],
) -> CutPath | None:
    """Return the best path that local search reaches from the best one and the starts."""
    local_search = local_search_for(prices.problem, prices.space, prices.strain)
    if best is not None:
        starts = [best, *starts]
    for start in starts:
        path = local_search.from_(start)
        if path is not None:
            best = better(best, path, prices.seconds)

    return best


def local_search_for(problem: Problem, space: CutSpace, price: Seconds) -> LocalSearch:
    """Return a local search that prices so many paths as the question is worth."""
    tuning = problem.tuning.levels
    gpus = problem.cluster.gpus
    if problem.precision == 0:
        most = tuning.most_priced
    else:
        most = tuning.most_priced_roughly

    most = most * tuning.few_gpus // max(tuning.few_gpus, gpus)
    variants = [QuickestVariants(problem, space).options]
    return LocalSearch(space, gpus, price, variants, most, tuning.split_shares, problem.clock)


def _alike(problem: Problem, space: CutSpace, nearest: CutPath) -> Iterator[CutPath]:
    """Yield paths that are best where all links are like one of the cluster's, and by servers."""
    # 1. These are only candidates, so some of many cuts will do.
    states = np.arange(len(space))
    some = space
    most_states = problem.tuning.levels.most_alike_states
    if len(space) > 2 * most_states:
        states = space.spread(most_states)
        some = space.only(states)

    # 2. The best path on the nearest flat cluster is the best one for the innermost links.
    is_known = some is space and not problem.schedule.asynchronous
    for number, link in enumerate(_links(problem.topology)):
        if problem.clock.passed:
            return

        try:
            path = nearest if is_known and number == 0 else _best_on(problem, some, link)
        except OutOfTimeError:
            return

        if path is None:
            continue

        path = path.over(states)
        yield path
        for _, size, _, _ in problem.topology.shared:
            whole = [_whole_servers(replicas, size) for replicas in path.replicas]
            yield with_replicas(path, whole)


def _links(topology: Topology) -> Iterator[Link]:
    """Yield the links of each level, and a GPU's share of those that servers share."""
    for level in range(len(topology)):
        yield topology.link(level)
    for level, size, bandwidth, _ in topology.shared:
        yield replace(topology.link(level), bandwidth_bytes_per_s=bandwidth / size)


def _best_on(problem: Problem, space: CutSpace, link: Link) -> CutPath | None:
    return flat_search(problem, space, problem.limits, link).best(precision=precision_of(problem))


def _whole_servers(replicas: int, size: int) -> int:
    """Return as many replicas as fill servers; as they are where they fill none."""
    return replicas // size * size or replicas


@dataclass(frozen=True)
class PathPrices:
    """The prices of paths over one space."""

    problem: Problem
    space: CutSpace

    def seconds(self, path: CutPath) -> float:
        """Return seconds per minibatch by the cost model; infinite where memory is lacking."""
        plan = priced_path(self.problem, self.space, path)
        if self.problem.allows(plan):
            return plan.seconds
        return np.inf

    def strain(self, path: CutPath) -> float:
        """Return the seconds and a thousandth for how uneven the stages are.

        Where several resources are equally busy, no single step of local search lowers the seconds;
        evening out does. With b_s the seconds of the busiest resource of each of the r_s replicas
        of stage s, and b the most of these, that is

            b + 1/1000 · Σ r_s · b_s² / (GPUs · b)
        """
        if not self.problem.schedule.stashes:
            return self.seconds(path)
        if self._may_be_forbidden and not np.isfinite(self.seconds(path)):
            return np.inf

        busy_s = self._busiest_s(path)
        most_s = max(busy_s)
        if most_s <= 0:
            return most_s

        squares = sum(
            replicas * stage_s**2 for replicas, stage_s in zip(path.replicas, busy_s, strict=True)
        )
        uneven_share = self.problem.tuning.levels.uneven_share
        return most_s + uneven_share * squares / self.problem.cluster.gpus / most_s

    @property
    def _may_be_forbidden(self) -> bool:
        """Whether a path may be one that the problem does not allow, so that each must be
        priced.
        """
        limits = self.problem.limits
        return limits.counts_gpus or limits.rules.max_stages is not None

    def _busiest_s(self, path: CutPath) -> list[float]:
        """Return the seconds of the busiest resource of each stage."""
        stages = stages_along(self.space, path)
        setting = Setting(self.problem.cluster)
        resources = busy_resources(self.space.layer_costs, stages, setting)
        return [max(float(seconds) for seconds in each.values()) for each in resources]
