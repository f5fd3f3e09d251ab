"""Choose the fastest plan by simulation, among the best plan by the cost model and alternatives that may wait less.

Under asynchronous schedules the alternatives are the kinds of plans of `planner.solver.search.restricted`. On clusters
of several levels each is found for links that are all alike, and local search adapts it to the cluster's links. Under
synchronous schedules the alternatives are the plans that the search meets on its way to the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.weight_copies import counted_with_copies
from planner.schedule.schedule import warm_up_depths
from planner.solver.evaluate.evaluation import SETTLED, fastest, in_every_order, simulated
from planner.solver.evaluate.pipelines import MOST_WORKERS, too_large
from planner.solver.problem.budget import LATER, OutOfTimeError
from planner.solver.problem.result import RESOLUTION, Evaluation
from planner.solver.problem.states import Chain, StateSpace
from planner.solver.search.chain.fewest import FEW_STATES
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.levels.levels import MOST_PLACED, PathPrices, local_search_for, search_levels
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.search.pipeline_search import MOST_SYNCHRONOUS_STATES, PipelineSearch
from planner.solver.search.restricted import (
    KINDS,
    DataParallelSearch,
    Kind,
    StraightSearch,
    counts_to_try,
    families,
    kinds_of_plans,
    slowed,
    steps_below,
)
from planner.units import SLACK

SLOWER_LINKS = (1.0, 2.0)  # factors by which links are slower in the alternatives of synchronous schedules
# Alternatives for faster links, on clusters of several levels: the factor between them, and how many.
FASTER, FASTER_STEPS = 2.0, 4
SLOWED = 1.15  # how much worse than the best a plan's bound may be on a slower link, to be proposed
LENIENT = 2  # a first plan this many times slower than a single stage is not deepened

# The best plan of one kind on so many GPUs, if it may be faster than the seconds.
BestOn = Callable[[int, float], Evaluation | None]


def fastest_simulated(search: PipelineSearch, plans: Sequence[Evaluation], bound_s: float) -> Evaluation:
    """Return the fastest plan by simulation: one of `plans`, the best by the cost model, or an alternative.

    No plan takes less than `bound_s`: what is as fast needs no alternative.
    """
    problem, budget = search.problem, search.problem.budget
    first, *others = in_every_order(problem, plans)
    if problem.schedule.asynchronous:
        return _Alternatives(search).fastest(first, others, bound_s)
    best = fastest(problem, [first, *others])
    if not best.simulated or len(search.space) > MOST_SYNCHRONOUS_STATES:
        return best
    for slower in SLOWER_LINKS:
        if best.seconds <= first.seconds * (1 + SETTLED):
            break
        if budget.over:
            budget.exhausted = False
            break
        best = fastest(problem, [first, *others, *_met(search, slower)], best)
    return best


def _met(search: PipelineSearch, slower: float) -> list[Evaluation]:
    """Return the plans met on the way to the best one under a synchronous schedule, for so many times slower links."""
    problem = search.problem
    # Slower links make the search weigh messages more, so it meets plans with fewer of them.
    try:
        again = SynchronousSearch(search.space, problem.synchronous(slowed(problem.link, slower)), problem.limits)
        again.best(max(problem.precision, RESOLUTION))
    except OutOfTimeError:
        return []
    return [search.priced(path) for path in again.found]


class _Alternatives:
    """Alternatives to the best plan of an asynchronous pipeline."""

    def __init__(self, search: PipelineSearch) -> None:
        self._search, self._problem, self._budget = search, search.problem, search.problem.budget
        # The search over the profile itself does not know what the copies of a shared weight cost a stage, as the
        # simulation does: here is the search in which every copy costs that, if there are any.
        chain = isinstance(search.space, Chain)
        counted = counted_with_copies(search.problem.layer_costs.profile) if chain else None
        self._copies = None if counted is None else PipelineSearch(search.problem.with_profile(counted))
        self._local_search: LocalSearch | None = None
        # Where the copies of shared weights count, local search must see their cost, too.
        if self._problem.placed and self._problem.cluster.gpus <= MOST_PLACED:
            prices = PathPrices((self._copies or search).problem, (self._copies or search).space)
            self._local_search = local_search_for(self._problem, search.space, prices.strain)

    def fastest(self, first: Evaluation, others: Sequence[Evaluation], bound_s: float) -> Evaluation:
        """Return the fastest plan by simulation: one of these, or an alternative that could be faster without waiting.

        Args:
            first: the best plan by the cost model.
            others: next best ones.
            bound_s: no plan takes less.
        """
        problem, best = self._problem, self._first_or_single_stage(first)
        if not best.simulated:
            return best
        for other in others:
            best = self._faster(other, best)
        if problem.schedule.later(best.price.in_flight, warm_up_depths([stage.replicas for stage in best.stages])):
            best = self._or_straight(best)
        # From many GPUs to few: plans on fewer GPUs wait less, until their busiest resource alone is too slow.
        for best_on, gpus in self._kinds():
            used = gpus + 1
            for count in counts_to_try(gpus):
                if best.seconds <= bound_s * (1 + SETTLED):
                    return best
                if count >= used:
                    continue  # the best plan on more GPUs left some unused
                if self._budget.over:
                    self._budget.exhausted = False
                    return best
                proposal = best_on(count, best.seconds)
                if proposal is None:
                    break
                used = proposal.gpus
                for order in in_every_order(self._problem, [proposal]):
                    best = self._faster(order, best)
        return best

    def _faster(self, plan: Evaluation, best: Evaluation) -> Evaluation:
        """Return the faster of the two by simulation; a plan that is slower even without waiting is not simulated."""
        if plan.stages in self._budget.seen or plan.seconds >= best.seconds * (1 - SLACK):
            return best
        evaluation = simulated(self._problem, plan, best.seconds)
        return evaluation if evaluation.simulated and evaluation.seconds < best.seconds * (1 - SLACK) else best

    def _or_straight(self, best: Evaluation) -> Evaluation:
        """Simulate the best plan without replicas, whose gradients may be less late, and return the faster of the two.

        What is nearly as fast counts among the plans that were simulated.
        """
        below_s = best.seconds * LATER
        kind = (StraightSearch, self._problem.link, self._problem.limits)
        straight = self._best_of(self._search.space, kind)(min(self._problem.limits.gpus, MOST_WORKERS), below_s)
        straight = straight and simulated(self._problem, straight, below_s)
        return straight if straight is not None and straight.simulated and straight.saves(best) else best

    def _first_or_single_stage(self, first: Evaluation) -> Evaluation:
        """Simulate `first` and the best single stage, and return the faster; `first` as it is without a simulation.

        A single stage is quick to simulate, and what is far slower need not be deepened.
        """
        problem, limits, single = self._problem, self._problem.limits, None
        if len(first.stages) > 1 and not too_large(problem, first.stages):
            kind = (DataParallelSearch, problem.link, limits)
            single = self._best_of(self._search.space, kind)(min(limits.gpus, MOST_WORKERS), np.inf)
        if single is None or not (single := simulated(problem, single)).simulated:
            return simulated(problem, first)
        best = simulated(problem, first, LENIENT * single.seconds)
        return best if best.simulated and single.seconds >= best.seconds * (1 - SLACK) else single

    def _kinds(self) -> list[tuple[BestOn, int]]:
        """Return how to find the best plan of each kind, and for how many GPUs at most."""
        search, problem, copies = self._search, self._problem, self._copies
        layer_costs = search.problem.layer_costs
        everything = layer_costs.footprint(layer_costs.single_stage)
        link_unit = (int(everything.weight_bytes + everything.saved_bytes) or 1) / float(search.space.compute_s[-1])
        found: list[tuple[BestOn, int]] = []
        # The kinds below are found for flat clusters; this one knows levels and copies at once.
        if copies is not None and problem.placed and problem.cluster.gpus <= MOST_WORKERS:
            found.append((self._on_levels(copies), problem.cluster.gpus))
        # Over many states all searches choose between the whole of a stage and nothing, so the families are alike.
        for limits in families(problem.limits)[-1 if len(search.space) > FEW_STATES else 0 :]:
            kinds = [*kinds_of_plans(problem.link, limits, link_unit)]
            if problem.placed:  # some messages cross faster links than the slowest
                most = replace(limits, gpus=min(limits.gpus, MOST_WORKERS))
                own = problem.link.bandwidth_bytes_per_s
                faster = steps_below(own * FASTER**FASTER_STEPS, link_unit, FASTER, FASTER_STEPS)
                kinds += [(Search, slowed(problem.link, own / bandwidth), most) for bandwidth in faster]
            if copies is not None:
                found += [(self._best_of(copies.space, kind), kind[2].gpus) for kind in kinds[: len(KINDS)]]
            found += [(self._best_of(search.space, kind), kind[2].gpus) for kind in kinds]
        return found

    def _best_of(self, space: StateSpace, kind: Kind) -> BestOn:
        search_type, link, limits = kind
        model = self._problem.asynchronous(link)
        slower = link.bandwidth_bytes_per_s < self._problem.link.bandwidth_bytes_per_s

        def best_on(gpus: int, below_s: float) -> Evaluation | None:
            if self._budget.deadline.passed:
                return None
            # On a slower link a plan looks slower than it is, so its limit is more generous.
            limit_s = below_s * (SLOWED if slower else 1)
            path = search_type(space, model, replace(limits, gpus=gpus)).best(limit_s)
            if path is None:
                return None
            proposal = self._search.priced(path)
            if self._local_search is None or proposal.seconds < below_s:
                return proposal
            # It was found for links that are all alike, and the cluster's are not.
            nearby = self._local_search.from_(path)
            return proposal if nearby is None else self._search.priced(nearby)

        return best_on

    def _on_levels(self, copies: PipelineSearch) -> BestOn:
        """Return how to find the best plan for all GPUs of a cluster of several levels if copies of weights count."""

        def best_on(gpus: int, below_s: float) -> Evaluation | None:
            path = None if gpus < copies.problem.cluster.gpus else copies.best()
            if path is None or copies.interrupted:
                return None
            found = search_levels(copies.problem, copies.space, path).path
            return None if found is None else self._search.priced(found)

        return best_on
