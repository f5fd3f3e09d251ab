"""Import a file of a user that registers schedules, in this process and in workers."""

import importlib.util
import sys
from pathlib import Path

from planner.errors import InputError, reason_of
from planner.schedule.registry import NAMES


def load_schedules(path: str | Path) -> None:
    """Import the Python file at `path`, which calls `planner.register_schedule`.

    Importing a file runs it: nothing names one but the user.

    Raises:
        InputError: when there is no such file, it fails, or it registers no schedule.
    """
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(
            f"`schedule_from={path}` is no Python file",
            hint="give the file that calls planner.register_schedule",
        )

    known = len(NAMES)
    module = importlib.util.module_from_spec(spec)
    again = spec.name in sys.modules
    sys.modules[spec.name] = module  # where pickle looks schedules up
    try:
        spec.loader.exec_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as cause:  # whatever the user's code raises
        raise InputError(
            f"`schedule_from={path}` fails: {reason_of(cause)}",
            hint=f"python {path} shows the whole traceback",
        ) from cause

    if len(NAMES) == known and not again:
        raise InputError(
            f"`schedule_from={path}` registers no schedule",
            hint="call planner.register_schedule in it: docs/guides/own-schedule.md",
        )


def _module_name(file: Path) -> str:
    """Return a name that other files have not: two of them may both be called schedule.py."""
    return "planner_schedule_file_" + "".join(c if c.isalnum() else "_" for c in str(file))
