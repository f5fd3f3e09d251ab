"""Propose plans that may wait less than the best one by the cost model, which knows no waiting.

Under synchronous schedules these are the plans that the search meets on its way to the best, for
the links as they are and for slower ones: then messages weigh more, and it meets plans with fewer
of them.

Under asynchronous schedules they are simpler plans. For each kind of plans, and on ever fewer GPUs,
the best one by the cost model is found for links that are all alike:

    kinds       data parallel; without replicas; with replicas of the first stage, or of the first
                and the last; all
    links       the slowest of the cluster; slower ones, where messages weigh more, so that plans
                have fewer of them; and on several levels faster ones, which some messages cross
    memory      as it is; and with stages that recompute all of their layers or none, and divide
                nothing: they fill the memory less, and leave room for the deeper pipelines that
                wait less

Each kind has the exact search along the chain, with fewer replicas allowed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.cost.network.link import Link
from planner.cost.weight_copies import counted_with_copies
from planner.cost.work import Integers
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.pool import Batch, Pool
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import ReplicaModel
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import Chain, CutSpace
from planner.solver.propose.regular import counts_to_try
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.levels.levels import PathPrices, local_search_for
from planner.solver.search.pipeline_search import PipelineSearch
from planner.units import SLACK


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


SEARCHES: tuple[type[Search], ...] = (
    DataParallelSearch,
    StraightSearch,
    FrontSearch,
    EndsSearch,
    Search,
)

# Changes a path that is not below some seconds to a better one near it.
Adapt = Callable[[CutPath, float], CutPath]


@dataclass(frozen=True)
class _Kind:
    """A kind of plans: the search for it, over which cuts, for which link, within which limits."""

    search_type: type[Search]
    space: CutSpace
    link: Link
    limits: Limits


def plans_that_wait_less(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield alternatives to the best plan, as long as the pool has a simulated plan that is not
    proven to be best.
    """
    if pool.best is None or not pool.best.simulated:
        return

    if search.problem.schedule.asynchronous:
        yield from _propose_straight(search, pool)
        yield from _propose_simpler(search, pool)
    elif len(search.space) <= search.problem.tuning.synchronous.most_states:
        yield from _for_slower_links(search, pool, known)


def _for_slower_links(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield what searches for a synchronous schedule meet."""
    problem = search.problem
    least_s = min(pool.priced(stages).seconds for stages in known)
    settled_s = least_s * (1 + problem.tuning.evaluate.settled_share)
    precision = max(problem.precision, RESOLUTION)

    for factor in problem.tuning.waiting.synchronous_link_ratios:
        settled = pool.best is not None and pool.best.seconds <= settled_s
        if settled or pool.spent:
            return

        slower = problem.link.slowed(factor)
        other = SynchronousSearch(search.space, problem.synchronous(slower), problem.limits)
        try:
            other.best(precision=precision)
        except OutOfTimeError:
            return

        met = [search.priced(path).stages for path in other.found]
        yield [*known, *met]


def _propose_straight(search: PipelineSearch, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan without replicas, whose gradients may be less late.

    What is nearly as fast as the best plan counts: see
    `planner.solver.improve.improvement.least_late`.
    """
    problem = search.problem
    if not problem.schedule.stashes:
        return

    tuning = problem.tuning.evaluate
    limits = _on_at_most(problem.limits, tuning.most_workers)
    straight = StraightSearch(search.space, problem.asynchronous(), limits)
    path = straight.best(pool.best_s * tuning.min_speedup_per_stale_update)
    if path is not None:
        yield [search.priced(path).stages]


def _propose_simpler(search: PipelineSearch, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan of each kind on ever fewer GPUs, until its busiest resource alone is too
    slow.

    On several levels local search adapts it to the cluster's links.
    """
    adapt = _adapting(search)
    for kind in _kinds(search):
        for path in _on_fewer_gpus(search.problem, kind, pool):
            yield [search.priced(adapt(path, pool.best_s)).stages]
        if pool.settled or pool.spent:
            return


def _on_fewer_gpus(problem: Problem, kind: _Kind, pool: Pool) -> Iterator[CutPath]:
    """Yield the best path of a kind for each number of GPUs, as long as it may be faster than the
    best plan.
    """
    model = problem.asynchronous(kind.link)

    # On a slower link a plan looks slower than it is, so its limit is more generous.
    is_slower = kind.link.bandwidth_bytes_per_s < problem.link.bandwidth_bytes_per_s
    generous = 1.0
    if is_slower:
        generous = problem.tuning.waiting.slower_link_seconds_ratio

    used = kind.limits.gpus + 1
    for count in counts_to_try(kind.limits.gpus, problem.tuning.restricted):
        if pool.settled:
            return
        if count >= used:
            continue  # the best plan on more GPUs left some unused
        if pool.spent:
            return

        search = kind.search_type(kind.space, model, replace(kind.limits, gpus=count))
        path = search.best(pool.best_s * generous)
        if path is None:
            return

        used = path.gpus
        yield path


def _adapting(search: PipelineSearch) -> Adapt:
    """Return what adapts paths to the links of a cluster of several levels; on others they stay as
    they are.
    """
    problem = search.problem
    if not problem.placed or problem.cluster.gpus > problem.tuning.levels.most_placed_gpus:
        return lambda path, _: path

    nearby = local_search_for(problem, search.space, PathPrices(problem, search.space).strain)

    def adapted(path: CutPath, below_s: float) -> CutPath:
        if search.priced(path).seconds < below_s:
            return path
        return nearby.from_(path) or path

    return adapted


def _kinds(search: PipelineSearch) -> Iterator[_Kind]:
    """Yield the kinds of plans, each with the most GPUs to propose it for."""
    problem = search.problem

    # Paths over the copies' cuts are priced over the search's: both must be along the order.
    copies = None
    if isinstance(search.space, Chain):
        copies = _counting_copies(problem)
    for limits in _families(problem, search.space):
        most = _on_at_most(limits, problem.tuning.evaluate.most_workers)
        if copies is not None:
            for search_type in SEARCHES:
                yield _Kind(search_type, copies, problem.link, most)

        for search_type in SEARCHES:
            yield _Kind(search_type, search.space, problem.link, most)

        few = _on_at_most(limits, problem.tuning.restricted.slower_link_gpus)
        for link in _slower_links(problem, search.space):
            yield _Kind(Search, search.space, link, few)
        for link in _faster_links(problem, search.space):
            yield _Kind(Search, search.space, link, most)


def _on_at_most(limits: Limits, gpus: int) -> Limits:
    return replace(limits, gpus=min(limits.gpus, gpus))


def _families(problem: Problem, space: CutSpace) -> list[Limits]:
    """Return the limits within which to look for every kind: those for simpler stages first.

    Over many states all searches choose between the whole of a stage and nothing, so that both are
    alike.
    """
    limits = problem.limits
    rules = limits.rules
    if limits.memory_bytes is None or rules.recompute != "auto":
        return [limits]
    if len(space) > problem.tuning.chain.most_choosing_states:
        return [limits]

    if rules.shard_optimizer == "auto":
        rules = replace(rules, shard_optimizer="never")
    return [replace(limits, rules=rules, whole_stages=True), limits]


def _slower_links(problem: Problem, space: CutSpace) -> list[Link]:
    own = problem.link.bandwidth_bytes_per_s
    tuning = problem.tuning.restricted
    unit = _model_bytes_per_s(problem, space)
    slower = _steps_below(own, unit, tuning.slower_link_ratio, tuning.slower_links)
    return [problem.link.slowed(own / bandwidth) for bandwidth in slower]


def _faster_links(problem: Problem, space: CutSpace) -> list[Link]:
    """Return faster links than the slowest of several levels, which some messages cross."""
    if not problem.placed:
        return []

    own = problem.link.bandwidth_bytes_per_s
    ratio = problem.tuning.waiting.faster_link_ratio
    count = problem.tuning.waiting.faster_links
    faster = _steps_below(own * ratio**count, _model_bytes_per_s(problem, space), ratio, count)
    return [problem.link.slowed(own / bandwidth) for bandwidth in faster]


def _steps_below(value: float, unit: float, step: float, count: int) -> list[float]:
    """Return the highest `count` of the numbers unit·step^k that are below the value."""
    # A value that is one of the numbers, up to rounding, is not below itself.
    highest = math.ceil(math.log(value / unit, step) - SLACK) - 1
    return [unit * step**power for power in range(highest, highest - count, -1)]


def _model_bytes_per_s(problem: Problem, space: CutSpace) -> float:
    """Return a rate that belongs to the model alone: similar clusters get the same proposals."""
    everything = problem.layer_costs.footprint(problem.layer_costs.single_stage)
    model_bytes = int(everything.weight_bytes + everything.saved_bytes) or 1
    return model_bytes / float(space.compute_s[-1])


def _counting_copies(problem: Problem) -> CutSpace | None:
    """Return cuts along the order at which every copy of a tied weight costs what it does in a
    simulation.
    """
    profile = counted_with_copies(problem.layer_costs.profile)
    if profile is None:
        return None
    return Chain(problem.with_profile(profile).layer_costs)
