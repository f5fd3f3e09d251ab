"""The one way from a request to its answer: ask for candidates in this order, and return the best.

    1. the fastest plan under the schedule that was asked for, or under all of them
    2. the best synchronous plan beside an asynchronous one, or in its place
    3. the usual ways that people choose by hand, and the best of them where it is faster
    4. interleaved pipelines, where 1f1b-flush was nobody's wish
    5. the plans for fewer hosts

Plans are compared at equal samples per update. Where they cannot have these, a note has both
numbers. Where nothing fits under the schedule, the same is done under another one.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from planner.errors import InfeasibleError, InputError, PlannerError, StoppedError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_words
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import AUTO, SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.fewer_hosts import with_fewer_hosts
from planner.solver.alternatives.interleaved import prefer_interleaved_if_faster
from planner.solver.alternatives.schedules import (
    holding_minibatch,
    under_every_schedule,
    with_synchronous,
)
from planner.solver.alternatives.table import fastest_usual, no_slower_than_usual
from planner.solver.find_plan import find_plan
from planner.solver.problem.infeasible import explained
from planner.solver.request import Request


def solve(request: Request) -> Plan:
    """Find the fastest plan, and what stands beside it.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for options that make no sense under the schedule.
        PlannerError: if the time ends before there is any plan.
    """
    try:
        return solve_unexplained(request)
    except InfeasibleError as obstacle:
        return _despite(obstacle, request)


def _despite(obstacle: InfeasibleError, request: Request) -> Plan:
    """Return a plan under another schedule, where the user asked for none and nothing fits.

    Raise the obstacle, explained, where there is no such plan, or where the user asked for the
    schedule: then with what fits under another one.
    """
    options = request.options
    if options.schedule == AUTO:
        raise explained(obstacle) from None

    if options.asked:
        plan = _first_that_fits(request, find_plan)
        raise _naming(plan, explained(obstacle)) from None

    plan = _first_that_fits(request, solve_unexplained)
    if plan is None:
        raise explained(obstacle) from None
    return replace(plan, instead_of=options.order)


def _first_that_fits(request: Request, find: Callable[[Request], Plan]) -> Plan | None:
    """Return the plan under the first other schedule that has one; None if none has, in time.

    Args:
        request: under whose schedule nothing fits.
        find: finds a plan under one schedule, or raises PlannerError.
    """
    for schedule in _leanest_first(request.options.order):
        # The first schedules are the most promising, and an explanation takes time, too.
        trial = request.under(schedule).within(request.tuning.answer.other_schedule_share)
        request.clock.progress.step = (
            f"nothing fits under {request.options.order}; trying {schedule}"
        )
        with suppress(PlannerError):
            return find(trial)

    return None


def _leanest_first(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the other schedules, first the one that holds least of all with a stage per worker."""
    for other in dict.fromkeys((FLUSH, *SCHEDULES)):
        if other is not schedule:
            yield other


def _naming(plan: Plan | None, obstacle: PlannerError) -> PlannerError:
    """Return the error with a hint at the plan that fits under another schedule, if there is
    one.
    """
    if plan is None:
        return obstacle

    change = f"`schedule={plan.schedule}`"
    if plan.schedule.divides:
        change += f" `microbatches={plan.microbatches}`"
    hint = f"use {change}, under which {config_words(plan.config)} fits"
    least_bytes = obstacle.least_bytes if isinstance(obstacle, InfeasibleError) else float("inf")
    more = f"; {obstacle.hint}" if obstacle.hint else ""
    return InfeasibleError(obstacle.message, hint=f"{hint}{more}", least_bytes=least_bytes)


def solve_unexplained(request: Request) -> Plan:
    """Find the same under the schedule of the request alone, and raise `UnexplainedError` if no
    plan fits the memory: an explanation takes searches.
    """
    _check_formula(request.options)
    request, note = holding_minibatch(request)
    options = request.options
    tuning = request.tuning.answer

    plan = _searched(request.within(tuning.search_share / (1 + options.survive)))
    if note:
        plan = plan.noting(note)

    if options.schedule != AUTO and not options.names_solver:
        plan = with_synchronous(plan, request.within(tuning.synchronous_share))
    plan = no_slower_than_usual(plan, request)

    if plan.schedule is FLUSH and options.schedule is FLUSH and not options.asked:
        plan = prefer_interleaved_if_faster(plan, request)
    if options.survive:
        plan = with_fewer_hosts(plan, request.within(tuning.search_share))
    return plan


def _check_formula(options: SolveOptions) -> None:
    """Raise InputError for a user's schedule without a cost formula, which bounds all searches."""
    if options.schedule == AUTO or options.order.formula is not None:
        return
    raise InputError(
        f"the schedule {options.schedule} has no cost formula, by which plans are sought",
        hint="choose the stages yourself: `plan price` simulates them under it; or give its class "
        "a formula",
    )


def _searched(request: Request) -> Plan:
    """Return the fastest plan of a search; where that ends without any, the fastest usual way that
    fits.
    """
    if request.options.schedule == AUTO:
        return under_every_schedule(request)

    try:
        return find_plan(request)
    except (InputError, StoppedError):
        raise
    except PlannerError:  # nothing fits that the search knows, or there was too little time
        plan = fastest_usual(request)
        if plan is None:
            raise
        return plan
