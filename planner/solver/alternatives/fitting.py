"""What fits where nothing does under the schedule of a request: plans under other schedules."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from planner.errors import InfeasibleError, PlannerError
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_words
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.request import Request


def first_that_fits(request: Request, find: Callable[[Request], Plan]) -> Plan | None:
    """Return the plan under the first other schedule that has one; None if none has, in time.

    Args:
        request: under whose schedule nothing fits.
        find: finds a plan under one schedule, or raises PlannerError.
    """
    for schedule in _leanest_first(request.options.order):
        # The first schedules are the most promising, and an explanation takes time, too.
        trial = request.under(schedule).within(request.tuning.answer.other_schedule_share)
        request.clock.progress.step = f"nothing fits under {request.options.order}: {schedule}"
        with suppress(PlannerError):
            return find(trial)
    return None


def _leanest_first(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the other schedules, first the one that holds least of all with a stage per worker."""
    for other in dict.fromkeys((FLUSH, *SCHEDULES)):
        if other is not schedule:
            yield other


def naming(plan: Plan | None, obstacle: PlannerError) -> PlannerError:
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
