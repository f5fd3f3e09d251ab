"""All schedules. A new one is a file beside this one, and a line here."""

from collections.abc import Iterable, Mapping

from planner.errors import InputError
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH, GPIPE, ONE_F_ONE_B, TWO_BW, ZB_H1
from planner.schedule.schedule import Schedule
from planner.schedule.zb_v import ZB_V

# In the order in which help and tables list them.
SCHEDULES: tuple[Schedule, ...] = (ONE_F_ONE_B, TWO_BW, FLUSH, ZB_H1, ZB_V, GPIPE, INTERLEAVED)
NAMES: tuple[str, ...] = tuple(schedule.name for schedule in SCHEDULES)
DEFAULT = ONE_F_ONE_B
# Names that papers and other programs have.
ALIASES: Mapping[str, str] = {"pipedream": ONE_F_ONE_B.name}
AUTO = "auto"  # in place of a schedule, where plans are sought under all of them


def summaries(schedules: Iterable[Schedule]) -> str:
    """Say what each of these schedules is, as the help of an option does."""
    return "; ".join(f"{schedule}: {schedule.summary}" for schedule in schedules)


def own_name(name: str) -> str:
    """Return the name that a schedule has here: "1f1b" for "pipedream"."""
    return ALIASES.get(name, name)


def find(schedule: Schedule | str) -> Schedule:
    """Return the schedule of that name or alias; raise InputError when there is none."""
    wanted = own_name(schedule) if isinstance(schedule, str) else schedule
    for each in SCHEDULES:
        if wanted in (each, each.name):
            return each
    raise InputError(
        f"unknown schedule '{schedule}'", hint=f"`schedule` is one of {', '.join(NAMES)}"
    )
