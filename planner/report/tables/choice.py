"""The table of the schedules that `plan solve` compared."""

from __future__ import annotations

from planner.analysis.choose import Choice, Option
from planner.errors import InputError
from planner.formats.plan_parts import short_config
from planner.options.solving import MinibatchError
from planner.report.tables.table import Table
from planner.units import format_bytes, format_seconds


def choice_report(choice: Choice) -> str:
    """List each schedule and microbatch size with its best plan, or why it has none.

    "late" is how many updates late the plan's gradients are.
    """
    several = len({option.profile.digest for option in choice.options}) > 1
    known = choice.best.profile.microbatch_size is not None
    headers = [
        "schedule",
        *(["batch size"] if several else []),
        "plan",
        f"time per {'sample' if known else 'microbatch'}",
        f"{'samples' if known else 'microbatches'} per update",
        "late",
        "memory per GPU",
        "idle",
        "",
    ]
    rows = [
        [option.schedule, *([option.profile.microbatch_size] if several else []), *_answer(option, choice)]
        for option in choice.options
    ]
    return Table(headers, rows).text()


def _answer(option: Option, choice: Choice) -> list[str]:
    if option.plan is None:
        return ["-", "-", "-", "-", "-", "-", _why(option)]
    return [
        short_config(option.plan.config),
        format_seconds(option.seconds_per_sample),
        str(option.samples_per_update),
        str(option.plan.staleness),
        format_bytes(option.memory_bytes),
        f"{option.idle_share:.0%}",
        "chosen" if option is choice.best else _why(option),
    ]


def _why(option: Option) -> str:
    """Say in a few words why there is no plan; solving for this schedule alone gives the whole message."""
    if option.obstacle is None:
        return ""
    if isinstance(option.obstacle, MinibatchError):
        return "cannot make a minibatch of this size"
    return "not possible: see it alone" if isinstance(option.obstacle, InputError) else "does not fit the memory"
