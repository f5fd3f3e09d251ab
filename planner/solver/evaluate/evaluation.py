"""Evaluate candidate plans: price them, choose their depths, and simulate them.

Only the simulation of the schedule knows what workers wait for messages and for each other. A simulated time is never
less than the cost model's. So candidates are simulated in the order of their cost-model times, and once the next one
would be no faster even without waiting, none of the rest can be.

A plan's workers may take a cluster's ranks in several orders: stage by stage, pipeline by pipeline, or in any number of
columns between (`planner.cost.network.topology.column_ranks`) that divides the replicas of all stages.

Depths are how many units each stage has in flight. The published ones, d_s = ceil(sum_{t>=s} r_t / r_s) (NOAM,
SOSP'19), keep all workers busy when messages take no time and replicas never wait for each other. Simulated with equal
work per worker and free links, 2-1-1 takes 1.5 times and 4-3-1 2.2 times as long as its busiest worker. A few more
minibatches in flight at the first stages cure that, at the price of as many weight versions and updates of delay. In a
steady state without idle workers, the r_s * d_s minibatches that a stage has outstanding are those of the next stage,
one per replica, those that wait for the round to end, and those on the wire:

    r_s * d_s  >=  r_{s+1} * d_{s+1}  +  r_s  +  (r_s - 1)  +  transfers / T

Simulating the streams decides among the depths that this inequality gives, those one deeper, and the published ones.
Then, under 1f1b, each update that gradients are later has to make the pipeline `LATER` times as fast. 1f1b-flush has
the same published depths, and waits for every message of every microbatch: there, depth costs memory alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.communicators import reserves_of, with_overheads
from planner.cost.kinds import with_kinds
from planner.cost.network.link import backward_and_reduce_s, ring_all_reduce_s
from planner.cost.network.topology import Topology, column_ranks, places_matter
from planner.cost.overheads import stage_memory
from planner.formats.cluster import Level
from planner.options.solving import UNLIMITED
from planner.schedule.schedule import warm_up_depths
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.evaluate.pipelines import pipeline_for, too_large
from planner.solver.problem.budget import LATER, Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath, Evaluation, stages_along
from planner.solver.problem.states import Chain
from planner.units import SLACK

Depths = tuple[int, ...]

TOLERANCE = 0.01  # a plan this close to the bound counts as optimal: timings are no better
HOPELESS = 1.25  # ratio of times that deepening beyond the inequality above does not gain
FAR = 1.5  # likewise under synchronous schedules
NEAR = 1.1  # ratio of times that less depth does not gain
RESERVED = 0.5  # share of the budget that is kept for other pipelines than the one that is being deepened


@dataclass(frozen=True)
class PipelineTimes:
    """What the choice of depths depends on."""

    pipeline: PipelineCosts  # at any depths
    busiest_s: float  # busy seconds per unit of the busiest resource: no depth is faster
    deepest: Depths  # per stage, the most units in flight that memory and schedule allow
    budget: Budget = field(default_factory=Budget.unlimited)


@dataclass(frozen=True)
class DepthChoice:
    """Depths per stage, and the simulated seconds per unit."""

    depths: Depths
    seconds_per_unit: float


def hiding_depths(pipeline: PipelineCosts, published: Depths, unit_s: float, *, whole: bool = True) -> Depths:
    """Return depths at which the stages before a boundary compute while a microbatch's messages cross it, both ways.

    The forwards and backwards of a replica take turns, so each boundary of a synchronous pipeline needs `whole`
    microbatches more of each replica; fewer hide a part. The busiest resource takes `unit_s` per microbatch.
    """
    if unit_s <= 0:
        return published
    crossing_s, more, depths = _crossing_s(pipeline), 0, list(published)
    replicas = [len(ranks) for ranks in pipeline.shape.ranks]
    for stage in reversed(range(len(depths) - 1)):
        both = max(replicas[stage : stage + 2]) if whole else 1
        more += math.ceil(crossing_s[stage] / unit_s / both) * both
        depths[stage] += math.ceil(more / replicas[stage])
    return tuple(depths)


def _crossing_s(pipeline: PipelineCosts) -> list[float]:
    """Return the mean seconds of a unit's messages, both ways, over the boundary behind each stage."""
    topology, found = Topology(pipeline.cluster), [0.0] * len(pipeline.shape.ranks)
    for (source, target), sizes in pipeline.transfer_bytes.items():
        ranks, others = pipeline.shape.ranks[source], pipeline.shape.ranks[target]
        many = math.lcm(len(ranks), len(others))  # minibatch b is on replica b mod r of each stage
        levels = topology.level(np.resize(ranks, many), np.resize(others, many))
        # A message takes its latency even if it is small, but no message is sent for no bytes.
        seconds = sum(size / topology.path_bytes_per_s[levels] + topology.latency_s[levels] for size in sizes if size)
        for stage in range(source, target):
            found[stage] += float(np.mean(seconds))
    return found


def price_depths(
    times: PipelineTimes, depths: Depths, *, needed: bool = False, hopeless_s: float = math.inf
) -> DepthChoice | None:
    """Simulate given depths, or return None if the budget does not allow it.

    `needed`, `hopeless_s`, here per unit: see `Budget.steady_s`.
    """
    shape = replace(times.pipeline.shape, depths=depths)
    hopeless_s *= shape.microbatches
    minibatch_s = times.budget.steady_s(replace(times.pipeline, shape=shape), needed=needed, hopeless_s=hopeless_s)
    if minibatch_s is None:
        return None
    # A pipeline that does not repeat itself within the run can seem a little faster than its busiest resource allows.
    return DepthChoice(depths, max(times.busiest_s, minibatch_s / shape.microbatches))


def choose_depths(times: PipelineTimes, below_s: float = math.inf) -> DepthChoice | None:
    """Choose the published depths, or deeper ones: those of least time, as far as each update of lateness earns it.

    Of a pipeline that is `HOPELESS` from the seconds per unit that it has to reach, no other depths are tried. Return
    None if the budget does not even allow to simulate the published depths.
    """
    published, counted = warm_up_depths(times.pipeline.shape.replicas), _counted_depths(times)
    # The inequality is usually enough, and what is far from `below_s` with it needs no other simulation.
    begin = published if math.isinf(below_s) else counted
    best = price_depths(times, begin, needed=math.isinf(below_s), hopeless_s=below_s * HOPELESS)
    if best is None or best.seconds_per_unit > below_s * HOPELESS:
        return best
    tried = {begin}
    # One pipeline with many depths to try must not use up what other candidates need.
    reserved = times.budget.left * RESERVED
    deeper = [tuple(map(min, (*(depth + more for depth in counted[:-1]), 1), times.deepest)) for more in (1, 2)]
    for depths in (counted, _counted_depths(times, more=1), *deeper, published):
        if best.seconds_per_unit <= times.busiest_s * (1 + SLACK):
            break  # no depth is faster
        if depths in tried or (depths == published and best.seconds_per_unit > below_s * NEAR):
            continue
        if times.budget.left < reserved:
            times.budget.exhausted = False
            break
        tried.add(depths)
        if (choice := price_depths(times, depths)) is None:
            continue
        # Equals within rounding go to the one with fewer units in flight.
        alike = abs(choice.seconds_per_unit - best.seconds_per_unit) <= SLACK * best.seconds_per_unit
        if sum(depths) < sum(best.depths) if alike else choice.seconds_per_unit < best.seconds_per_unit:
            best = choice
    return best if best.seconds_per_unit > below_s else _earned(times, published, best)


def _earned(times: PipelineTimes, published: Depths, fastest: DepthChoice) -> DepthChoice:
    """Return the depths between the published and the fastest ones whose lateness is earned by their speed."""

    def counted_s(seconds: float, depths: Depths) -> float:
        return seconds * float(LATER ** times.pipeline.shape.schedule.staleness(max(depths)))

    best, least_s = fastest, counted_s(fastest.seconds_per_unit, fastest.depths)
    for most in range(max(published), max(fastest.depths)):
        depths = tuple(max(least, min(depth, most)) for least, depth in zip(published, fastest.depths, strict=True))
        if best is not fastest and least_s <= counted_s(fastest.seconds_per_unit, depths) * (1 + SLACK):
            break  # these and all that are deeper count more even if they are the fastest
        # Of those that count alike the first is the shallowest.
        enough_s = least_s * (1 + SLACK if best is fastest else 1 - SLACK)
        choice = price_depths(times, depths)
        if choice is not None and (seconds := counted_s(choice.seconds_per_unit, depths)) <= enough_s:
            best, least_s = choice, seconds
    return best


def _counted_depths(times: PipelineTimes, more: int = 0) -> Depths:
    """Solve the inequality at the top of this file from the last stage to the first; `more` for all but the last."""
    replicas, crossing_s = times.pipeline.shape.replicas, _crossing_s(times.pipeline)
    published, depths = warm_up_depths(replicas), [1]
    outstanding = 2.0 * replicas[-1] - 1
    for stage in reversed(range(len(replicas) - 1)):
        own_s, wire_s = times.pipeline.stages[stage].compute_s, crossing_s[stage]
        outstanding += min(own_s / times.busiest_s, replicas[stage]) + replicas[stage] - 1 + wire_s / times.busiest_s
        depth = math.ceil(outstanding / replicas[stage] * (1 - TOLERANCE))
        depths.append(max(depth, published[stage]) + more)
        outstanding = float(depths[-1] * replicas[stage])
    return tuple(map(min, reversed(depths), times.deepest))


def priced(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate by the cost model, on the devices of its ranks."""
    placed = with_kinds(problem.layer_costs, stages, problem.setting)
    return Evaluation(placed, problem.price(placed))


def priced_path(problem: Problem, space: Chain, path: CutPath) -> Evaluation:
    """Price a path over a space by the cost model, also one for more GPUs than there are."""
    if path.gpus > problem.cluster.gpus:
        link = problem.link
        level = Level(
            size=path.gpus,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            all_reduce_bandwidth_bytes_per_s=link.all_reduce_bandwidth_bytes_per_s,
        )
        larger = {"levels": (level,), "memory_bytes": None, "kinds": ()}
        problem = problem.with_cluster(problem.cluster.model_copy(update=larger))
    return priced(problem, stages_along(space, path))


def evaluate(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate, choose its depths and simulate it."""
    within, groups, degree = problem.in_groups(stages)
    if degree > 1:
        return evaluate(within, groups).divided(degree)
    return simulated(problem, priced(problem, stages))


def simulated(problem: Problem, candidate: Evaluation, below_s: float = math.inf) -> Evaluation:
    """Simulate a candidate that is priced at the published depths, and choose deeper ones where they help.

    Args:
        problem: whose budget is spent.
        candidate: returned as it is if it is too large, or if the budget is spent before the simulation ends.
        below_s: it only matters whether the plan is this fast: a plan that is far from it is not deepened. Where
            infinite, a time is needed, and only the deadline ends the simulation.
    """
    if too_large(problem, candidate.stages):
        return candidate
    choose = _at_chosen_depths if problem.schedule.asynchronous else _hiding_messages
    if (choice := choose(problem, candidate, below_s)) is None:
        return candidate
    depths, seconds = choice
    price, layer_costs, microbatches = candidate.price.simulated(seconds), problem.layer_costs, problem.microbatches
    if depths is not None:
        memory = tuple(
            stage_memory(layer_costs.footprint(stage).divided(microbatches), depth, problem.schedule.versions(depth))
            for stage, depth in zip(candidate.stages, depths, strict=True)
        )
        memory = with_overheads(layer_costs, candidate.stages, memory, price.workers)
        price = replace(price, in_flight=depths, memory=memory)
    evaluation = replace(candidate, price=price)
    problem.budget.progress.meet(candidate.config, seconds)
    problem.budget.count += 1
    problem.budget.seen[candidate.stages] = evaluation
    return evaluation


def in_every_order(problem: Problem, plans: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the plans, each in the orders of its workers that differ in price, by increasing price.

    Only clusters of several levels tell orders apart.
    """
    found: list[Evaluation] = []
    several = places_matter(problem.cluster)
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


# Stages up to which a pipeline is deepened where memory does not allow all of them what hides their messages: the
# stages that are cut off keep the others waiting, so that many longer ones took twice as long.
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


_Choice = tuple[Depths | None, float]  # None where the schedule fixes the depths; simulated seconds per minibatch


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
    budget, pipeline, published = problem.budget, pipeline_for(problem, candidate), candidate.price.in_flight
    deepens, deeper, hides = problem.schedule.deepens and len(published) > 1, published, False
    if deepens and problem.depth == "auto":
        unit_s, deepest = candidate.price.bottleneck.busy_s / problem.microbatches, _deepest(problem, candidate)
        for whole in (False, True):  # the latter where memory allows it
            wanted = hiding_depths(pipeline, published, unit_s, whole=whole)
            fitting = tuple(map(min, wanted, deepest))
            hides = hides or published != fitting == wanted
            deeper = fitting if fitting == wanted or len(published) <= SHORT else deeper
    at_deeper = replace(pipeline, shape=replace(pipeline.shape, depths=deeper))
    if hides and math.isfinite(below_s):  # the published depths wait for every message
        return None if (hidden_s := budget.steady_s(at_deeper)) is None else (deeper, hidden_s)
    best_s = budget.steady_s(pipeline, needed=math.isinf(below_s))
    if best_s is None:
        return None
    if not deepens:
        return None, best_s
    deeper_s = budget.steady_s(at_deeper) if best_s <= below_s * FAR and deeper != published else None
    if deeper_s is not None and deeper_s < best_s * (1 - SLACK):
        return deeper, deeper_s
    return published, best_s


def _busiest_s(problem: Problem, candidate: Evaluation, pipeline: PipelineCosts) -> float:
    """Return the busy seconds per minibatch of the busiest resource, with the buckets that the cost model ignores."""
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


def _deepest(problem: Problem, candidate: Evaluation) -> Depths:
    """Return the most units in flight of each stage that are allowed; the published ones always are."""
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
