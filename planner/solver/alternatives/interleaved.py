"""The fastest regular interleaved plan, beside one under 1F1B with a flush."""

from contextlib import suppress
from dataclasses import replace

from planner.cost.tensor import layer_costs_on
from planner.errors import InfeasibleError
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.plan.rank_groups import usual_degrees
from planner.solver.alternatives.simpler_ways import indistinct_share
from planner.solver.assemble import complete
from planner.solver.clock import Clock
from planner.solver.problem.budget import Budget
from planner.solver.problem.result import Answer
from planner.solver.propose.regular_interleaved import interleaved
from planner.solver.question import problem_of, with_one_optimizer
from planner.solver.report import accepting_divided_loss, report_of, timed
from planner.solver.tuning.record import Tuning

REGULAR = "chunks of equally many blocks"  # where a bound is of interleaved plans, too


def or_interleaved(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return the fastest regular interleaved plan where it is 2% faster than a plan under
    1f1b-flush, and by more than estimates tell plans apart, or the plan.

    So much must several times as many messages earn, for what waits for them is not all known. Both
    have the same minibatch, and the same table of other ways.
    """
    cluster = plan.cluster
    if options.alone or cluster.kinds:
        return plan
    asked = replace(
        options,
        schedule=plan.schedule,
        tensor=options.tensor or usual_degrees(profile, cluster),
        minibatch=None,
        microbatches=plan.microbatches,
    )
    budget = Budget.unlimited(clock, tuning.budget)
    asked = with_one_optimizer(asked, profile)
    problem = problem_of(asked, layer_costs_on(profile, cluster), cluster, budget, tuning)

    waiting = plan.predicted.by == "simulation"  # is part of its seconds
    seconds = plan.predicted.seconds_per_minibatch
    if not waiting:
        seconds *= 1 + tuning.evaluate.assumed_waiting_share
    saving = max(tuning.answer.min_saving_share, indistinct_share(plan, tuning))
    found = interleaved(problem, seconds * (1 - saving))
    if found.best is None or (waiting and not found.best.simulated):
        return plan

    answer = Answer(
        found.best,
        min(plan.solver.lower_bound_s, found.bound_s),
        bound_of=", ".join(filter(None, (plan.solver.bound_of, REGULAR))),
    )
    with suppress(InfeasibleError):  # copies of weights that several stages use do not fit
        faster = complete(found.problem, found.best, report_of(found.problem, answer))
        faster = accepting_divided_loss(faster, accepted=options.accept_divided_loss)
        context = {"baselines": plan.baselines, "notes": plan.notes}
        return timed(faster, plan.solver.seconds).model_copy(update=context)
    return plan
