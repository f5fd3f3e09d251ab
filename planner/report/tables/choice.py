"""The schedules that were compared, for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.errors import InputError
from planner.solver.choose import Choice, Option
from planner.units import format_bytes, format_seconds


def choice_report(choice: Choice) -> str:
    """A row per schedule and microbatch size: what its best plan gives, or why there is none."""
    several = len({option.profile.digest for option in choice.options}) > 1
    known = choice.best.profile.microbatch_size is not None
    headers = [
        "schedule",
        *(["batch size"] if several else []),
        "plan",
        f"time per {'sample' if known else 'microbatch'}",
        f"{'samples' if known else 'microbatches'} per update",
        "memory per GPU",
        "idle",
        "",
    ]
    rows = [
        [option.schedule, *([option.profile.microbatch_size] if several else []), *_answer(option, choice)]
        for option in choice.options
    ]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _answer(option: Option, choice: Choice) -> list[str]:
    if option.plan is None:
        return ["-", "-", "-", "-", "-", _why(option)]
    return [
        option.plan.config,
        format_seconds(option.seconds_per_sample),
        str(option.samples_per_update),
        format_bytes(option.memory_bytes),
        f"{option.idle_share:.0%}",
        "chosen" if option is choice.best else _why(option),
    ]


def _why(option: Option) -> str:
    """A few words; the whole sentence comes when the schedule is asked for by itself."""
    if option.obstacle is None:
        return ""
    return "too little to divide" if isinstance(option.obstacle, InputError) else "does not fit the memory"
