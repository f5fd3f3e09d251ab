"""Run the checks one after the other, each in a process or several, and report a row per case."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from planner.errors import InputError, PlannerError, reason_of
from planner.formats.files import Record
from planner.formats.names import DeviceType
from planner.profiler.this_machine import check_positive, parse_device
from planner.selftest.lab import Lab
from planner.selftest.registry import CHECKS
from planner.selftest.rows import Case, Check, Outcome, Row, SelftestReport
from planner.version import __version__
from planner.workers.launch import environment
from planner.workers.meeting import worker_variables
from planner.workers.place import kind_here

WORKERS = 2
OWN_PROFILES = Path(__file__).parents[2] / "profiles"  # in a checkout; an installed package has none
# A GPU would multiply in TF32 in some kernels, which hides differences. The libraries read this when they are loaded.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


class SelftestOptions(Record):
    """What to check, and on what.

    `device`: None for a GPU where there is one. `profiles`: a folder of models, each `<name>/model.py` with a
    `build_tiny`, to check beside the built-in ones; None for that of the source, where the package runs from there.
    `only` and `skip`: names of checks.
    """

    device: DeviceType | None = None
    workers: int = WORKERS
    profiles: str | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


def selftest(options: SelftestOptions, on_row: Callable[[Row], None] = lambda row: None) -> SelftestReport:
    """Run the checks on this host; all files are temporary, and no process is left.

    Args:
        options: which checks, on which device, with how many workers.
        on_row: is told each row as it is found.

    Raises:
        InputError: when there is no such device, folder or check, or under torchrun.
    """
    checks = _chosen(options)
    _refuse_several_hosts()
    check_positive("workers", options.workers)
    kind = options.device or kind_here()
    device, profiles = parse_device(kind), _profiles(options)
    started, date = time.monotonic(), datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="plan-selftest-") as folder, environment(EXACT):
        lab = Lab(device, options.workers, Path(folder), profiles)
        for check in checks:
            for case in check.cases(lab):
                rows.append(run_case(check, case))
                on_row(rows[-1])
    return SelftestReport(
        version=__version__,
        date=date,
        device=kind,
        workers=options.workers,
        rows=tuple(rows),
        seconds=time.monotonic() - started,
    )


def run_case(check: Check, case: Case) -> Row:
    """Run one case; whatever it raises is how it failed."""
    started = time.monotonic()
    try:
        outcome = case.run()
    except PlannerError as error:
        outcome = Outcome("failed", error.message)
    except Exception as error:
        outcome = Outcome("failed", reason_of(error))
    return Row(
        check=check.name,
        name=case.name,
        result=outcome.result,
        found=outcome.found,
        value=_finite(outcome.value),
        limit=outcome.limit,
        seconds=time.monotonic() - started,
    )


def _finite(value: float | None) -> float | None:
    """Return the number, or None where JSON cannot say it."""
    return value if value is not None and math.isfinite(value) else None


def _profiles(options: SelftestOptions) -> Path | None:
    if options.profiles is None:
        return OWN_PROFILES if OWN_PROFILES.is_dir() else None
    folder = Path(options.profiles)
    if not any(folder.glob("*/model.py")):
        raise InputError(
            f"`profiles={folder}` has no models", hint="give a folder with a model.py in a folder of each model's name"
        )
    return folder


def _chosen(options: SelftestOptions) -> Sequence[Check]:
    known = {check.name for check in CHECKS}
    for argument, names in (("only", options.only), ("skip", options.skip)):
        for name in names:
            if name not in known:
                raise InputError(
                    f"`{argument}={name}` is no check", hint=f"the checks are {', '.join(c.name for c in CHECKS)}"
                )
    return [c for c in CHECKS if (not options.only or c.name in options.only) and c.name not in options.skip]


def _refuse_several_hosts() -> None:
    started = {**os.environ, **worker_variables(os.environ)}
    if int(started.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the self-test is for one host and starts its own workers, and this is one of several processes",
            hint="run it once on each host, without torchrun; plan profile under torchrun measures the links between "
            "hosts",
        )
