"""How a plan was found, and how far from the fastest it may be."""

from planner.formats.plan import Plan
from planner.formats.plan_parts import AskedRules, SolverReport
from planner.options.solving import StageRules
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.units import SLACK


def report_of(problem: Problem, found: Answer) -> SolverReport:
    """Return what is known of a search's answer; its seconds are left to who kept the time."""
    plan = found.best
    seconds = plan.seconds
    bound_s = min(found.bound_s, seconds)
    if plan.simulated:
        optimal = seconds <= bound_s * (1 + problem.tuning.evaluate.timing_share)
    else:
        optimal = seconds <= bound_s * (1 + SLACK)
        bound_s = seconds if optimal else bound_s

    return SolverReport(
        name=found.name,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        bound_of=found.bound_of,
        gap=(seconds - bound_s) / seconds,
        seconds=0.0,
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
    return None if asked == AskedRules() else asked


def report_of_way(report: SolverReport, way: Evaluation) -> SolverReport:
    """Return a search's report for another plan, which is faster than what the search found."""
    bound_s = min(report.lower_bound_s, way.seconds)
    changes = {
        "lower_bound_s": bound_s,
        "gap": 1 - bound_s / way.seconds,
        "cost_model_s": way.price_s,
    }
    return report.model_copy(update=changes)


def timed(plan: Plan, seconds: float) -> Plan:
    """Return the plan with how long the search for it took."""
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"seconds": seconds})})


def accepting_divided_loss(plan: Plan, *, accepted: bool) -> Plan:
    """Return the plan with the mark that its user accepts the mean of the microbatches' losses."""
    if not accepted or plan.loss is None:
        return plan
    return plan.model_copy(update={"loss": plan.loss.model_copy(update={"accepted": True})})
