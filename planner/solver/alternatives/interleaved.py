"""The fastest regular interleaved plan, beside one under 1F1B with a flush."""

from contextlib import suppress

from planner.errors import InfeasibleError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.solver.alternatives.simpler_ways import indistinct_share
from planner.solver.assemble import complete
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer
from planner.solver.propose.regular_interleaved import interleaved
from planner.solver.report import report_of
from planner.solver.request import Request

REGULAR = "chunks of equally many blocks"  # where a bound is of interleaved plans, too


def prefer_interleaved_if_faster(plan: Plan, request: Request) -> Plan:
    """Return the fastest regular interleaved plan where it is 2% faster than a plan under
    1f1b-flush, and by more than estimates tell plans apart, or the plan.

    So much must several times as many messages earn, for what waits for them is not all known. Both
    have the same minibatch, and the same table of other ways.
    """
    if request.options.names_solver or plan.cluster.kinds:
        return plan
    same = request.on(plan.cluster).under(plan.schedule, plan.microbatches).settled()
    problem = same.problem(same.unlimited_budget())

    simulated = plan.predicted.by == "simulation"
    found = interleaved(problem, _required_s(plan, problem))
    if found.best is None or (simulated and not found.best.simulated):
        return plan

    known = plan.solver
    bounds_of = [words for words in (known.bound_of, REGULAR) if words]
    answer = Answer(
        found.best,
        min(known.lower_bound_s, found.bound_s),
        bound_of=", ".join(bounds_of),
    )
    report = report_of(found.problem, answer, known.seconds)
    accepts = request.options.accept_divided_loss
    with suppress(InfeasibleError):  # copies of weights that several stages use do not fit
        faster = complete(found.problem, found.best, report, accepts_loss=accepts)
        return replace(faster, baselines=plan.baselines, notes=plan.notes)
    return plan


def _required_s(plan: Plan, problem: Problem) -> float:
    """Return seconds per minibatch that an interleaved plan must be below."""
    tuning = problem.tuning
    seconds = plan.predicted.seconds_per_minibatch
    if plan.predicted.by != "simulation":
        seconds *= 1 + tuning.evaluate.assumed_waiting_share
    saving = max(tuning.answer.min_saving_share, indistinct_share(plan, tuning))
    return seconds * (1 - saving)
