"""Choose the depths of a pipeline that drains after every minibatch.

1f1b-flush has the published depths of `planner.solver.evaluate.depths`, and waits there for every
message of every microbatch. A few microbatches more in flight let the stages before a boundary
compute while messages cross it, and cost memory alone. Over the boundary behind stage s, with the
fewest whole microbatches k_s of each replica that take as long as the crossing,

    k_s = ceil(w_s / (T * b_s)) * b_s          d_s = published_s + ceil(sum_{t>=s} k_t / r_s)

    w_s   seconds of a microbatch's messages over the boundary, both ways
    T     seconds per microbatch of the busiest resource
    b_s   max(r_s, r_{s+1}), as a replica's forwards and backwards take turns; 1 to hide a part
"""

import math
from dataclasses import dataclass

from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.evaluate.depth_limits import Depths, crossing_s, deepest_allowed
from planner.solver.evaluate.pipelines import pipeline_for
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.units import SLACK


@dataclass(frozen=True)
class SimulatedDepths:
    """Depths per stage, and the simulated seconds per minibatch."""

    depths: Depths | None  # None where the schedule fixes them
    minibatch_s: float


def choose_draining_depths(
    problem: Problem,
    candidate: Evaluation,
    below_s: float,
) -> SimulatedDepths | None:
    """Simulate the published depths and those that hide messages, and return the faster.

    Args:
        problem: synchronous; its budget is spent.
        candidate: priced at the published depths.
        below_s: seconds per minibatch to reach; where infinite, a time is needed.

    Returns:
        None if the budget does not allow the simulation.
    """
    budget = problem.budget
    pipeline = pipeline_for(problem, candidate)
    published = candidate.price.in_flight
    needed = math.isinf(below_s)

    # 1. One stage has no boundary, and some schedules fix their depths.
    if not problem.schedule.deepens or len(published) == 1:
        return _simulated(None, budget.steady_s(pipeline, needed=needed))

    # 2. Where messages can be hidden, the published depths wait for each, and one simulation is
    # enough.
    deeper = published
    hides = False
    if problem.depth == "auto":
        deeper, hides = _deeper_depths(problem, candidate, pipeline)
    if hides and not needed:
        return _simulated(deeper, budget.steady_s(pipeline.with_depths(deeper)))

    # 3. Else the published ones are the first, and the deeper ones must be faster.
    published_s = budget.steady_s(pipeline, needed=needed)
    if published_s is None:
        return None

    hopeless_s = below_s * problem.tuning.depths.max_gain_of_draining
    if deeper != published and published_s <= hopeless_s:
        deeper_s = budget.steady_s(pipeline.with_depths(deeper))
        if deeper_s is not None and deeper_s < published_s * (1 - SLACK):
            return SimulatedDepths(deeper, deeper_s)

    return SimulatedDepths(published, published_s)


def _simulated(depths: Depths | None, minibatch_s: float | None) -> SimulatedDepths | None:
    if minibatch_s is None:
        return None
    return SimulatedDepths(depths, minibatch_s)


def _deeper_depths(
    problem: Problem,
    candidate: Evaluation,
    pipeline: PipelineCosts,
) -> tuple[Depths, bool]:
    """Return the deepest allowed depths, and whether some that hide messages are allowed whole."""
    published = candidate.price.in_flight
    deepest = deepest_allowed(problem, candidate)
    unit_s = candidate.price.bottleneck.busy_s / problem.microbatches
    deeper = published
    hides = False

    for whole in (False, True):
        hiding = hiding_depths(pipeline, published, unit_s, whole=whole)
        allowed = tuple(map(min, hiding, deepest))
        if allowed == hiding != published:
            hides = True
        if allowed == hiding or len(published) <= problem.tuning.depths.most_uneven_stages:
            deeper = allowed

    return deeper, hides


def hiding_depths(
    pipeline: PipelineCosts,
    published: Depths,
    unit_s: float,
    *,
    whole: bool = True,
) -> Depths:
    """Return depths at which stages compute while messages cross the boundaries behind them.

    Args:
        pipeline: at any depths.
        published: its published depths.
        unit_s: seconds per microbatch of the busiest resource.
        whole: whether to hide all of a crossing, with a microbatch more of every replica.
    """
    if unit_s <= 0:
        return published

    replicas = pipeline.shape.replicas
    wire_s = crossing_s(pipeline)
    depths = list(published)
    more = 0
    for stage in reversed(range(len(depths) - 1)):
        turns = max(replicas[stage : stage + 2]) if whole else 1
        more += math.ceil(wire_s[stage] / unit_s / turns) * turns
        depths[stage] += math.ceil(more / replicas[stage])

    return tuple(depths)
