"""Evaluate candidate plans: price them by the cost model, and simulate them at the best depths.

Only the simulation of the schedule knows what workers wait for messages and for each other. A
simulated time is never less than the cost model's. So candidates are simulated in the order of
their cost-model times, and once the next one would be no faster even without waiting, none of the
rest can be.

    price  ->  orders of workers  ->  depths, by simulation  ->  the fastest
               (orders.py)            (depths.py, draining_depths.py)
"""

import math
from collections.abc import Sequence

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.kinds import with_kinds
from planner.cost.overheads import Price, stage_memory
from planner.formats.cluster import Cluster, Level
from planner.formats.files import replace
from planner.solver.evaluate.depth_limits import Depths, busiest_s, deepest_allowed
from planner.solver.evaluate.depths import PipelineTimes, choose_depths, price_depths
from planner.solver.evaluate.draining_depths import SimulatedDepths, choose_draining_depths
from planner.solver.evaluate.pipelines import pipeline_for, too_large
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, Evaluation, stages_along
from planner.solver.problem.states import CutSpace


def priced(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate by the cost model, on the devices of its ranks."""
    placed = with_kinds(problem.layer_costs, stages, problem.setting)
    return Evaluation(placed, problem.price(placed))


def priced_path(problem: Problem, space: CutSpace, path: CutPath) -> Evaluation:
    """Price a path over a space by the cost model, also one for more GPUs than there are."""
    if path.gpus > problem.cluster.gpus:
        problem = problem.with_cluster(_of_size(problem, path.gpus))
    return priced(problem, stages_along(space, path))


def _of_size(problem: Problem, gpus: int) -> Cluster:
    """Return a flat cluster of so many GPUs on the slowest link, without a limit of memory."""
    link = problem.link
    level = Level(
        size=gpus,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        all_reduce_bandwidth_bytes_per_s=link.all_reduce_bandwidth_bytes_per_s,
    )
    return replace(problem.cluster, levels=(level,), kinds=(), memory_bytes=None)


def evaluate(problem: Problem, stages: Sequence[Candidate]) -> Evaluation:
    """Price a candidate, choose its depths and simulate it."""
    within, groups, degree = problem.in_groups(stages)
    if degree > 1:
        return evaluate(within, groups).divided(degree)
    return simulated(problem, priced(problem, stages))


def simulated(
    problem: Problem,
    candidate: Evaluation,
    below_s: float = math.inf,
) -> Evaluation:
    """Simulate a priced candidate, at deeper depths than the published ones where they help.

    Args:
        problem: whose budget is spent.
        candidate: at the published depths; returned as it is if it is too large, or if the budget
            is spent before the simulation ends.
        below_s: seconds per minibatch to reach: a plan that is far from them is not deepened. Where
            infinite, a time is needed, and only the deadline ends the simulation.
    """
    if too_large(problem, candidate.stages):
        return candidate

    if problem.schedule.asynchronous:
        choice = _choose_late_depths(problem, candidate, below_s)
    else:
        choice = choose_draining_depths(problem, candidate, below_s)

    if choice is None:
        return candidate

    price = candidate.price.simulated(choice.minibatch_s)
    if choice.depths is not None:
        price = _at_depths(problem, candidate.stages, price, choice.depths)
    evaluation = replace(candidate, price=price)

    problem.budget.keep(evaluation)
    return evaluation


def _choose_late_depths(
    problem: Problem,
    candidate: Evaluation,
    below_s: float,
) -> SimulatedDepths | None:
    """Choose the depths of an asynchronous pipeline: the deeper, the later its gradients."""
    microbatches = problem.microbatches
    pipeline = pipeline_for(problem, candidate)
    times = PipelineTimes(
        pipeline,
        busiest_s(problem, candidate, pipeline) / microbatches,
        deepest_allowed(problem, candidate),
        problem.budget,
        problem.tuning,
    )

    if problem.depth == "auto":
        choice = choose_depths(times, below_s / microbatches)
    else:
        choice = price_depths(times, candidate.price.in_flight, needed=math.isinf(below_s))

    if choice is None:
        return None
    return SimulatedDepths(choice.depths, choice.seconds_per_unit * microbatches)


def _at_depths(
    problem: Problem,
    stages: Sequence[Candidate],
    price: Price,
    depths: Depths,
) -> Price:
    """Return the price with these depths, and the memory that they take."""
    layer_costs = problem.layer_costs
    memory = [
        stage_memory(
            layer_costs.footprint(stage).divided(problem.microbatches),
            depth,
            problem.schedule.versions(depth),
        )
        for stage, depth in zip(stages, depths, strict=True)
    ]
    return replace(
        price,
        in_flight=depths,
        memory=with_overheads(layer_costs, stages, memory, price.workers),
    )
