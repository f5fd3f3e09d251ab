"""All schedules: those of this package, and those that users register from files of their own.

A new one of this package is a file beside this one, and a line here.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.errors import InputError
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.controllable_memory import V_HALF, V_MIN
from planner.schedule.one_stage import FLUSH, GPIPE, ONE_F_ONE_B, TWO_BW, ZB_H1
from planner.schedule.schedule import Schedule
from planner.schedule.zb_v import ZB_V

# In the order in which help and tables list them.
SCHEDULES: tuple[Schedule, ...] = (
    ONE_F_ONE_B,
    TWO_BW,
    FLUSH,
    ZB_H1,
    ZB_V,
    V_HALF,
    V_MIN,
    GPIPE,
    INTERLEAVED,
)
# The names of all that can be asked for: `register_schedule` adds to it.
NAMES: list[str] = [schedule.name for schedule in SCHEDULES]
DEFAULT = ONE_F_ONE_B
# Names that papers and other programs have.
ALIASES: Mapping[str, str] = {"pipedream": ONE_F_ONE_B.name}
AUTO = "auto"  # in place of a schedule, where plans are sought under all of this package

_registered: dict[str, Schedule] = {}  # of users, by name
_DESCRIBED = ("name", "title", "summary", "known_as")  # what messages and tables say of one


def register_schedule(schedule: Schedule) -> Schedule:
    """Let plans be made, simulated and trained under a schedule of a file of your own.

    Args:
        schedule: an object of a subclass of `planner.Schedule`. One of the same name from the same
            file takes the place of the earlier one.

    Returns:
        The schedule. Keep it as a variable of the file: processes find it there.

    Raises:
        InputError: for a name that another schedule has, or a description that is missing.

    Example:
        >>> from planner.schedule.one_stage import GPipe
        >>> class Copy(GPipe):
        ...     name = "gpipe-copy"
        >>> planner.register_schedule(Copy()).name
        'gpipe-copy'
    """
    missing = [name for name in _DESCRIBED if not isinstance(getattr(schedule, name, None), str)]
    if missing:
        raise InputError(
            f"the schedule {type(schedule).__name__} has no {missing[0]}",
            hint=f"give its class {', '.join(_DESCRIBED)}, as those of planner.schedule have",
        )

    name = schedule.name
    earlier = _registered.get(name)
    replaces = earlier is not None and file_of(earlier) == file_of(schedule)
    if name in (AUTO, *ALIASES, *NAMES) and not replaces:
        raise InputError(f"there is a schedule '{name}' already", hint="give yours another name")
    if not replaces:
        NAMES.append(name)
    _registered[name] = schedule
    return schedule


def file_of(schedule: Schedule) -> Path | None:
    """Return the file that registers a schedule of a user; None for those of this package, and for
    what was typed into a session.
    """
    if schedule in SCHEDULES:
        return None
    path = getattr(sys.modules.get(type(schedule).__module__), "__file__", None)
    if path is None:
        return None
    return Path(path).resolve()


def summaries(schedules: Iterable[Schedule]) -> str:
    """Say what each of these schedules is, a line each, as the help of an option does."""
    return "\n".join(f"{schedule}: {schedule.summary}" for schedule in schedules)


def own_name(name: str) -> str:
    """Return the name that a schedule has here: "1f1b" for "pipedream"."""
    return ALIASES.get(name, name)


def find(schedule: Schedule | str) -> Schedule:
    """Return the schedule of that name or alias; raise InputError when there is none."""
    if schedule in SCHEDULES:
        assert isinstance(schedule, Schedule)
        return schedule

    name = str(schedule)
    for each in (*SCHEDULES, *_registered.values()):
        if each.name in (name, own_name(name.lower())):  # "1F1B", too
            return each

    raise InputError(
        f"unknown schedule '{schedule}'",
        hint=f"`schedule` is one of {', '.join(NAMES)}; one of your own comes from the file that "
        f"`schedule_from` names, or from planner.register_schedule",
    )
