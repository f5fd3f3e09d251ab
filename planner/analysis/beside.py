"""What to read beside a plan: what people do without a planner, and what the best synchronous plan would give."""

from __future__ import annotations

from dataclasses import replace

from planner.analysis.choose import Choice
from planner.analysis.compare import OWN, Comparison
from planner.analysis.given_plan import options_of
from planner.analysis.usual_ways import Way, usual_ways
from planner.cost.tensor import layer_costs_on
from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.flush import FLUSH
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Budget, Patience

SYNCHRONOUS = "best synchronous plan"
LEAST_S = 2.0  # that may be spent beside a search, however quick it was


def with_baselines(profile: Profile, plan: Plan, patience: Patience) -> Plan:
    """Return the plan with the ways that people use without a planner, priced on its cluster under its schedule.

    When the time is over, or after `LEAST_S`, what is left is priced by the cost model alone.
    """
    budget = Budget(patience.at_most(LEAST_S).deadline)
    try:
        ways = tuple(usual_ways(options_of(plan), layer_costs_on(profile, plan.cluster), plan.cluster, budget))
    except PlannerError as error:
        return plan.noting(f"the baselines were not priced: {error.message}")
    return plan.model_copy(update={"baselines": tuple(map(_described, ways))})


def with_rows(plan: Plan, comparison: Comparison) -> Plan:
    """Return a plan without baselines with those of its comparison."""
    if plan.baselines:
        return plan
    ways = tuple(
        OtherWay(**{name: getattr(row, name) for name in OtherWay.model_fields})
        for row in comparison.rows
        if row.name not in OWN
    )
    return plan.model_copy(update={"baselines": ways})


def with_synchronous(profile: Profile, plan: Plan, options: SolveOptions, patience: Patience) -> Plan:
    """Return an asynchronous plan with the best one found under 1F1B with a flush; others as they are.

    Args:
        profile: that the plan was made from.
        plan: from `options`.
        options: of the search for it.
        patience: of the search for the other plan, which takes no longer than that for the plan or `LEAST_S`.
    """
    if not plan.schedule.asynchronous:
        return plan
    drained = replace(options, schedule=FLUSH, microbatches=None, max_staleness=None)
    try:
        found = find_plan(profile, plan.cluster, drained, patience.at_most(max(LEAST_S, plan.solver.seconds)))
    except PlannerError as error:
        return plan.noting(f"there is no synchronous plan to compare it with: {error.message}")
    return plan.model_copy(update={"synchronous": described_plan(SYNCHRONOUS, found)})


def with_best_synchronous(choice: Choice) -> Plan:
    """Return the chosen plan; where it is asynchronous, with the best synchronous one of the same microbatches."""
    plan = choice.plan
    others = [
        option.plan
        for option in choice.options
        if option.plan is not None and option.profile is choice.best.profile and not option.schedule.asynchronous
    ]
    if not plan.schedule.asynchronous or not others:
        return plan
    best = min(others, key=lambda other: other.predicted.seconds_per_minibatch / other.microbatches)
    return plan.model_copy(update={"synchronous": described_plan(SYNCHRONOUS, best)})


def described_plan(name: str, plan: Plan) -> OtherWay:
    """Describe a whole plan as another way to train."""
    stages = range(len(plan.stages))
    return OtherWay(
        name=name,
        config=plan.config,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        seconds_per_microbatch=plan.predicted.seconds_per_minibatch / plan.microbatches,
        memory_bytes=max(map(plan.memory_bytes, stages)),
        over_memory_bytes=max(map(plan.lacking_bytes, stages)),
    )


def _described(way: Way) -> OtherWay:
    return OtherWay(
        name=way.name,
        config=way.plan.config,
        schedule=way.problem.schedule,
        microbatches=way.problem.microbatches,
        seconds_per_microbatch=way.seconds_per_microbatch,
        memory_bytes=max(way.plan.price.gpu_bytes),
        over_memory_bytes=way.over_memory_bytes,
    )
