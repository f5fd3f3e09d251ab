"""How a plan was found, and how far from the fastest it may be."""

from planner.formats.plan_parts import AskedRules, SolverReport
from planner.options.solving import StageRules
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer
from planner.units import SLACK


def report_of(problem: Problem, found: Answer, seconds: float) -> SolverReport:
    """Return what is known of a search's answer after so many seconds."""
    plan = found.best
    bound_s = min(found.bound_s, plan.seconds)
    if plan.simulated:
        optimal = plan.seconds <= bound_s * (1 + problem.tuning.evaluate.timing_share)
    else:
        optimal = plan.seconds <= bound_s * (1 + SLACK)
        bound_s = plan.seconds if optimal else bound_s

    return SolverReport(
        name=found.name,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        bound_of=found.bound_of,
        cuts=found.cuts,
        gap=(plan.seconds - bound_s) / plan.seconds,
        seconds=seconds,
        cost_model_s=plan.price_s,
        simulated=problem.budget.count,
        exhausted=problem.budget.exhausted,
        rules=_asked(problem.rules),
    )


def _asked(rules: StageRules) -> AskedRules | None:
    asked = AskedRules(
        recompute=rules.recompute,
        shard_optimizer=rules.shard_optimizer,
        max_stages=rules.max_stages,
        max_staleness=rules.max_staleness,
        granularity=rules.granularity,
    )
    if asked == AskedRules():
        return None
    return asked
