"""Propose plans that may wait less than the best one by the cost model, which knows no waiting.

Under asynchronous schedules these are the best of simpler kinds, on fewer GPUs, and for slower links
(`planner.solver.search.restricted`), found for links that are all alike. Under synchronous schedules they are the plans
that the search meets on its way to the best, for the links as they are and for slower ones: then messages weigh more,
and it meets plans with fewer of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.cost.weight_copies import counted_with_copies
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import SETTLED
from planner.solver.evaluate.pipelines import MOST_WORKERS
from planner.solver.pool import Batch, Pool
from planner.solver.problem.budget import LATER
from planner.solver.problem.cut_space import searched_cuts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.fewest import FEW_STATES
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.levels.levels import MOST_PLACED, PathPrices, local_search_for
from planner.solver.search.pipeline_search import MOST_SYNCHRONOUS_STATES, PipelineSearch
from planner.solver.search.restricted import (
    KINDS,
    Kind,
    StraightSearch,
    counts_to_try,
    families,
    kinds_of_plans,
    slowed,
    steps_below,
)

SLOWER_LINKS = (1.0, 2.0)  # factors by which links are slower in the alternatives of synchronous schedules
# Alternatives for faster links, on clusters of several levels: the factor between them, and how many.
FASTER, FASTER_STEPS = 2.0, 4
SLOWED = 1.15  # how much worse than the best a plan's bound may be on a slower link, to be proposed


def plans_that_wait_less(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield alternatives to the best plan, as long as the pool has a simulated plan that is not proven to be best."""
    if pool.best is None or not pool.best.simulated:
        return
    if search.problem.schedule.asynchronous:
        yield from _without_replicas(search, pool)
        yield from _simpler(search, pool)
    elif len(search.space) <= MOST_SYNCHRONOUS_STATES:
        yield from _for_slower_links(search, pool, known)


def _for_slower_links(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield what searches for a synchronous schedule meet."""
    question = search.problem
    least_s = min(pool.priced(stages).seconds for stages in known)

    for factor in SLOWER_LINKS:
        if pool.best is not None and pool.best.seconds <= least_s * (1 + SETTLED):
            return
        if pool.spent:
            return
        model = question.synchronous(slowed(question.link, factor))
        other = SynchronousSearch(search.space, model, question.limits)
        try:
            other.best(max(question.precision, RESOLUTION))
        except OutOfTimeError:
            return
        yield [*known, *(search.priced(path).stages for path in other.found)]


def _without_replicas(search: PipelineSearch, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan without replicas, whose gradients may be less late.

    What is nearly as fast as the best plan counts: see `planner.solver.choose.lateness`.
    """
    question = search.problem
    if not question.schedule.stashes:
        return
    limits = replace(question.limits, gpus=min(question.limits.gpus, MOST_WORKERS))
    path = StraightSearch(search.space, question.asynchronous(), limits).best(pool.best_s * LATER)
    if path is not None:
        yield [search.priced(path).stages]


def _simpler(search: PipelineSearch, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan of each kind on ever fewer GPUs, until its busiest resource alone is too slow.

    On several levels a plan is found for links that are all alike, and local search adapts it to the cluster's.
    """
    question = search.problem
    adapted = _adapting(search)

    for space, (search_type, link, limits) in _kinds(search):
        model = question.asynchronous(link)
        used = limits.gpus + 1
        # On a slower link a plan looks slower than it is, so its limit is more generous.
        generous = SLOWED if link.bandwidth_bytes_per_s < question.link.bandwidth_bytes_per_s else 1.0

        for count in counts_to_try(limits.gpus):
            if pool.settled:
                return
            if count >= used:
                continue  # the best plan on more GPUs left some unused
            if pool.spent:
                return
            path = search_type(space, model, replace(limits, gpus=count)).best(pool.best_s * generous)
            if path is None:
                break
            used = path.gpus
            yield [search.priced(adapted(path, pool.best_s)).stages]


def _adapting(search: PipelineSearch) -> Callable[[CutPath, float], CutPath]:
    """Return what changes a path that is not below some seconds to a better one near it, on clusters of levels."""
    question = search.problem
    if not question.placed or question.cluster.gpus > MOST_PLACED:
        return lambda path, _: path
    nearby = local_search_for(question, search.space, PathPrices(question, search.space).strain)

    def adapted(path: CutPath, below_s: float) -> CutPath:
        if search.priced(path).seconds < below_s:
            return path
        return nearby.from_(path) or path

    return adapted


def _kinds(search: PipelineSearch) -> Iterator[tuple[CutSpace, Kind]]:
    """Yield kinds of plans, each with the space of cuts in which the best one is sought."""
    question = search.problem
    copies = _counting_copies(question)
    link_unit = _model_bytes_per_s(question, search.space)

    # Over many states all searches choose between the whole of a stage and nothing, so the families are alike.
    limits_of_families = families(question.limits)
    if len(search.space) > FEW_STATES:
        limits_of_families = limits_of_families[-1:]

    for limits in limits_of_families:
        kinds = [*kinds_of_plans(question.link, limits, link_unit)]
        if question.placed:  # some messages cross faster links than the slowest
            own = question.link.bandwidth_bytes_per_s
            most = replace(limits, gpus=min(limits.gpus, MOST_WORKERS))
            faster = steps_below(own * FASTER**FASTER_STEPS, link_unit, FASTER, FASTER_STEPS)
            kinds += [(Search, slowed(question.link, own / bandwidth), most) for bandwidth in faster]
        if copies is not None:
            yield from ((copies, kind) for kind in kinds[: len(KINDS)])
        yield from ((search.space, kind) for kind in kinds)


def _counting_copies(question: Problem) -> CutSpace | None:
    """Return the cuts at which every copy of a tied weight costs a stage what it does in a simulation."""
    profile = counted_with_copies(question.layer_costs.profile)
    return None if profile is None else searched_cuts(question.with_profile(profile)).space


def _model_bytes_per_s(question: Problem, space: CutSpace) -> float:
    """Return a rate that belongs to the model alone: similar clusters get the same proposals."""
    everything = question.layer_costs.footprint(question.layer_costs.single_stage)
    model_bytes = int(everything.weight_bytes + everything.saved_bytes) or 1
    return model_bytes / float(space.compute_s[-1])
