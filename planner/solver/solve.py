"""The one way from a question to its answer: ask for candidates in this order, and return the best.

    1. the fastest plan under the schedule that was asked for, or under all of them
    2. the best synchronous plan beside an asynchronous one, or in its place
    3. the usual ways that people choose by hand, and the best of them where it is faster
    4. interleaved pipelines, where 1f1b-flush was nobody's wish
    5. the plans for fewer hosts

Plans are compared at equal samples per update. Where they cannot have these, a note has both
numbers.
"""

from planner.errors import InputError, PlannerError, StoppedError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import AUTO
from planner.solver.alternatives.fewer_hosts import with_fewer_hosts
from planner.solver.alternatives.interleaved import or_interleaved
from planner.solver.alternatives.schedules import (
    holding_minibatch,
    under_every_schedule,
    with_synchronous,
)
from planner.solver.alternatives.table import fastest_usual, no_slower_than_usual
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.problem.infeasible import explained
from planner.solver.tuning.record import STANDARD, Tuning


def solve(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock | None = None,
    tuning: Tuning = STANDARD,
) -> Plan:
    """Find the fastest plan, and what stands beside it, before the clock or else the options' time
    limit ends.

    The question carries `tuning`: how far searches look, how long, and how near counts as equal.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for options that make no sense under the schedule.
    """
    try:
        return solve_unexplained(profile, cluster, options, clock, tuning)
    except PlannerError as error:
        raise explained(error) from None


def solve_unexplained(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock | None = None,
    tuning: Tuning = STANDARD,
) -> Plan:
    """Do the same, and raise `UnexplainedError` if no plan fits the memory: an explanation takes
    searches.
    """
    _check_formula(options)
    clock = clock or Clock.of(options.time_limit_s, options.progress, tuning.clock)
    cluster = cluster_for(profile, cluster)

    options, note = holding_minibatch(profile, options)
    search_share = tuning.answer.search_share
    searching = clock.part(search_share / (1 + options.survive))
    plan = _searched(profile, cluster, options, searching, tuning)
    plan = plan.noting(note) if note else plan

    if options.schedule != AUTO and not options.alone:
        left = clock.part(tuning.answer.synchronous_share)
        plan = with_synchronous(profile, plan, options, left, tuning)

    plan = no_slower_than_usual(profile, plan, options, clock, tuning)

    # 1f1b-flush was nobody's wish where it is a default, or what holds the global batch.
    chosen_here = bool(note) or not options.asked
    if plan.schedule is FLUSH and options.schedule is FLUSH and chosen_here:
        plan = or_interleaved(profile, plan, options, clock, tuning)

    if options.survive:
        plan = with_fewer_hosts(profile, plan, options, clock.part(search_share), tuning)
    return plan


def _check_formula(options: SolveOptions) -> None:
    """Raise InputError for a user's schedule without a cost formula, which bounds all searches."""
    if options.schedule == AUTO or options.order.formula is not None:
        return
    raise InputError(
        f"the schedule {options.schedule} has no cost `formula`, by which plans are sought",
        hint="choose the stages yourself: `plan price` simulates them under it; or give its class "
        "a `formula`",
    )


def _searched(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return the fastest plan of a search; where that ends without any, the fastest usual way that
    fits.
    """
    if options.schedule == AUTO:
        return under_every_schedule(profile, cluster, options, clock, tuning)
    try:
        return find_plan(profile, cluster, options, clock, tuning)
    except (InputError, StoppedError):
        raise
    except PlannerError:  # nothing fits that the search knows, or there was too little time
        plan = fastest_usual(profile, cluster, options, clock, tuning)
        if plan is None:
            raise
        return plan
