"""Evaluate candidate plans: price them, choose their depths, and simulate them.

The cost model knows how long each resource is busy, and the search is exact for it. Only the simulation of the schedule
knows what workers wait for messages and for each other, and what links do when several messages cross them at once. A
simulated time is never less than the cost model's. So candidates are simulated in the order of their cost-model times,
and once the next one would be no faster even without waiting, none of the rest can be.

A plan's workers may take a cluster's ranks in several orders. Stage by stage, the replicas of a stage are neighbours:
its gradients cross few slow links, and its activations may cross many. Pipeline by pipeline, what exchanges activations
is together, and gradients cross the slow links. Between the two lies every number of columns
(`planner.cost.network.topology.column_ranks`) that divides the replicas of all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.communicators import reserves_of, with_overheads
from planner.cost.kinds import with_kinds
from planner.cost.network.link import backward_and_reduce_s, ring_all_reduce_s
from planner.cost.network.placement import places_matter
from planner.cost.network.topology import column_ranks
from planner.cost.overheads import stage_memory
from planner.formats.cluster import Level
from planner.options.solving import UNLIMITED
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.evaluate.depth import (
    FAR,
    Depths,
    PipelineTimes,
    choose_depths,
    hiding_depths,
    price_depths,
)
from planner.solver.evaluate.pipelines import pipeline_for, too_large
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath, Evaluation, stages_along
from planner.solver.problem.states import StateSpace
from planner.units import SLACK


def priced(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate by the cost model, on the devices of its ranks."""
    placed = with_kinds(problem.layer_costs, stages, problem.setting)
    return Evaluation(placed, problem.price(placed))


def priced_path(problem: Problem, space: StateSpace, path: CutPath) -> Evaluation:
    """Price a path over a space by the cost model, also one for more GPUs than there are."""
    if path.gpus > problem.cluster.gpus:
        link = problem.link
        level = Level(
            size=path.gpus,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            all_reduce_bandwidth_bytes_per_s=link.all_reduce_bandwidth_bytes_per_s,
        )
        problem = problem.with_cluster(
            problem.cluster.model_copy(update={"levels": (level,), "memory_bytes": None, "kinds": ()})
        )
    return priced(problem, stages_along(space, path))


def evaluate(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate, choose its depths and simulate it; the published cost models' prices stand as they are."""
    within, groups, degree = problem.in_groups(stages)
    if degree > 1:
        return evaluate(within, groups).divided(degree)
    candidate = priced(problem, stages)
    return simulated(problem, candidate) if problem.simulates else candidate


def simulated(problem: Problem, candidate: Evaluation, below_s: float = math.inf) -> Evaluation:
    """Simulate a priced candidate, at the depths that this chooses where the schedule allows deeper ones.

    Args:
        problem: whose budget is spent.
        candidate: priced by the cost model, at the published depths.
        below_s: it only matters whether the plan is this fast: a plan that is far from it is not deepened. Where
            infinite, a time is needed, and only the deadline ends the simulation.

    Returns:
        The candidate as it is if it is too large to simulate, or if the budget is spent before the simulation ends.
    """
    if too_large(problem, candidate.stages):
        return candidate
    choose = _at_chosen_depths if problem.schedule.asynchronous else _hiding_messages
    if (choice := choose(problem, candidate, below_s)) is None:
        return candidate
    evaluation = _at(problem, candidate, *choice)
    problem.budget.progress.meet(candidate.config, evaluation.seconds)
    problem.budget.count += 1
    problem.budget.seen[candidate.stages] = evaluation
    return evaluation


def in_every_order(problem: Problem, plans: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the plans, each in the orders of its workers that differ in price, by increasing price.

    Of equal prices, stage by stage comes first, then fewer columns. Only clusters of several levels tell orders apart,
    and the published cost models know no places.
    """
    found: list[Evaluation] = []
    several = places_matter(problem.cluster) and problem.simulates
    for plan in plans:
        orders = [plan]
        for columns in columns_of(problem, plan) if several else ():
            candidate = in_columns(plan, columns)
            order = Evaluation(candidate, problem.price(candidate))
            if all(abs(order.seconds - other.seconds) > RESOLUTION * other.seconds for other in orders):
                orders.append(order)
        found += orders
    return sorted(found, key=lambda plan: plan.seconds)


def columns_of(problem: Problem, plan: Evaluation) -> list[int]:
    """Return the numbers of columns, two or more, in which the plan's workers may stand; none if all are near."""
    nearest = problem.cluster.joined[0].size
    replicas, given = _replicas(plan), any(stage.ranks for stage in plan.stages)
    if given or len(replicas) == 1 or sum(replicas) <= nearest:
        return []
    common = math.gcd(*replicas)
    return [columns for columns in range(2, common + 1) if common % columns == 0]


def in_columns(plan: Evaluation, columns: int) -> tuple[Candidate, ...]:
    """Return the plan's stages on the ranks of so many columns."""
    ranks = column_ranks(_replicas(plan), columns)
    workers = zip(plan.price.workers, plan.stages, strict=True)
    return tuple(replace(stage, ranks=tuple(ranks[worker])) for worker, stage in workers)


def _replicas(plan: Evaluation) -> list[int]:
    """Return the replicas of the pipeline's workers, in its order; a worker may have several stages."""
    replicas = {worker: stage.replicas for worker, stage in zip(plan.price.workers, plan.stages, strict=True)}
    return [replicas[worker] for worker in sorted(replicas)]


# Stages up to which a pipeline is deepened where memory does not allow all of them what hides their messages. Of longer
# ones, none got faster, and many took twice as long, because the stages cut off keep the others waiting.
SHORT = 8
SETTLED = 1e-3  # a plan this close to the lower bound needs no alternative


def fastest(problem: Problem, candidates: Iterable[Evaluation], best: Evaluation | None = None) -> Evaluation:
    """Simulate priced candidates in every order of their workers, the most promising first, and return the fastest.

    Args:
        problem: whose budget is spent.
        candidates: at least one; the first of equally fast ones is preferred.
        best: a candidate that has been simulated already.
    """
    budget = problem.budget
    ordered = in_every_order(problem, candidates)
    least_s = ordered[0].seconds
    for candidate in ordered:
        if best is None:
            best = simulated(problem, candidate)
            continue
        # Simulating only adds waiting, so all candidates from here on are slower than the best.
        if candidate.seconds >= best.seconds * (1 - SLACK) or best.seconds <= least_s * (1 + SETTLED):
            break
        # Different searches propose the same stages; simulating them again would only spend the budget.
        if candidate.stages in budget.seen:
            continue
        if budget.over:
            budget.exhausted = False
            break
        evaluation = simulated(problem, candidate, best.seconds)
        if evaluation.simulated and evaluation.saves(best):
            best = evaluation
    assert best is not None
    return best


# Depths, or None where the schedule fixes them, and simulated seconds per minibatch.
_Choice = tuple[Depths | None, float]


def _at_chosen_depths(problem: Problem, candidate: Evaluation, below_s: float) -> _Choice | None:
    pipeline, microbatches = pipeline_for(problem, candidate), problem.microbatches
    busiest_s = _busiest_s(problem, candidate, pipeline) / microbatches
    times = PipelineTimes(pipeline, busiest_s, _deepest(problem, candidate), problem.budget)
    if problem.depth == "auto":
        choice = choose_depths(times, below_s / microbatches)
    else:
        choice = price_depths(times, candidate.price.in_flight, needed=math.isinf(below_s))
    return None if choice is None else (choice.depths, choice.seconds_per_unit * microbatches)


def _hiding_messages(problem: Problem, candidate: Evaluation, below_s: float) -> _Choice | None:
    """Choose between the published depths of a synchronous pipeline and those that hide its messages."""
    budget, pipeline = problem.budget, pipeline_for(problem, candidate)
    published, best_s = candidate.price.in_flight, budget.steady_s(pipeline, needed=math.isinf(below_s))
    if best_s is None:
        return None
    if not problem.schedule.deepens:
        return None, best_s
    unit_s = candidate.price.bottleneck.busy_s / problem.microbatches
    wanted = hiding_depths(pipeline, published, unit_s)
    if problem.depth == "auto" and best_s <= below_s * FAR and wanted != published:
        deeper = tuple(map(min, wanted, _deepest(problem, candidate)))
        worth = deeper != published and (deeper == wanted or len(deeper) <= SHORT)
        at_deeper = replace(pipeline, shape=replace(pipeline.shape, depths=deeper))
        deeper_s = budget.steady_s(at_deeper) if worth else None
        if deeper_s is not None and deeper_s < best_s * (1 - SLACK):
            return deeper, deeper_s
    return published, best_s


def _busiest_s(problem: Problem, candidate: Evaluation, pipeline: PipelineCosts) -> float:
    """Return the busy seconds per minibatch of the busiest resource.

    The cost model does not know a stage's buckets. It takes a sixth of an all-reduce to follow the backward, and the
    last bucket may be less.
    """
    bottleneck = candidate.price.bottleneck
    costs, replicas = pipeline.stages[bottleneck.stage], candidate.stages[bottleneck.stage].replicas
    if bottleneck.resource != "compute" or not costs.ready_s:
        return bottleneck.busy_s
    link = problem.topology.stage_link(candidate.ranks[bottleneck.stage]) if problem.placed else problem.link
    reduce_s = float(ring_all_reduce_s(costs.reduced_bytes, replicas, link))
    last_s = costs.backward_s + (costs.accumulate_s if problem.microbatches > replicas else 0.0)
    counted_s = float(backward_and_reduce_s(last_s, reduce_s, link))
    less_s = max(0.0, counted_s - costs.buckets(last_s).reduced_s(reduce_s)) if link.overlap else 0.0
    return bottleneck.busy_s - (less_s if problem.schedule.divides else less_s / replicas)


def _at(problem: Problem, candidate: Evaluation, depths: Depths | None, seconds: float) -> Evaluation:
    """Return the candidate with simulated seconds, and with the memory of these depths where they are chosen."""
    price, schedule = candidate.price.simulated(seconds), problem.schedule
    if depths is not None:
        footprint, microbatches = problem.layer_costs.footprint, problem.microbatches
        memory = tuple(
            stage_memory(footprint(stage).divided(microbatches), depth, schedule.versions(depth))
            for stage, depth in zip(candidate.stages, depths, strict=True)
        )
        memory = with_overheads(problem.layer_costs, candidate.stages, memory, price.workers)
        price = replace(price, in_flight=depths, memory=memory)
    return replace(candidate, price=price)


def _deepest(problem: Problem, candidate: Evaluation) -> Depths:
    """Return, for each stage, the most units in flight that memory, weight versions and minibatch allow.

    The published depths are always allowed.
    """
    schedule, microbatches, deepest = problem.schedule, problem.microbatches, []
    reserves = reserves_of(problem.layer_costs, candidate.stages)
    for stage, published, reserve in zip(candidate.stages, candidate.price.in_flight, reserves, strict=True):
        most = min(schedule.deepest(stage.replicas, microbatches) or UNLIMITED, problem.rules.deepest(schedule))
        memory_bytes = problem.cluster.memory_of(stage.options.kind)
        if memory_bytes is not None:
            footprint = problem.layer_costs.footprint(stage).divided(microbatches)
            stashing, versions, room = schedule.stashes, schedule.weight_versions, reserve.room(memory_bytes)
            most = min(most, int(footprint.most_in_flight(room, stashing=stashing, versions=versions)))
        deepest.append(max(published, most))
    return tuple(deepest)
