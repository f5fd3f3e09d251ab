"""Run the checks one after the other, and report a row per case."""

from __future__ import annotations

import math
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from planner.errors import InputError, PlannerError, reason_of
from planner.formats.files import Record
from planner.formats.shown import Shown
from planner.options.option import keywords_of
from planner.options.verbs import SelftestOptions
from planner.profiler.this_machine import check_positive, parse_device
from planner.reporting.tables.table import Table
from planner.selfcheck import cuts, machine, training
from planner.selfcheck.lab import Case, Lab, Outcome, Result
from planner.version import __version__
from planner.workers.launch import environment
from planner.workers.meeting import worker_variables
from planner.workers.place import kind_here

FOUND_WIDTH = 96  # columns
CHECKS: Mapping[str, Callable[[Lab], Iterator[Case]]] = {
    "environment": machine.environment_cases,
    "links": machine.link_cases,
    "cuts": cuts.cases,
    "training": training.training_cases,
    "memory": training.memory_cases,
    "failures": training.failure_cases,
}
# A GPU would multiply in TF32 in some kernels, which hides differences. The libraries read this when they are loaded.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


class Row(Record):
    """One case of a check, and what came of it."""

    check: str
    name: str
    result: Result
    found: str  # what was measured; why the case was skipped, or how it failed
    value: float | None = None  # the number that was judged
    limit: float | None = None  # the most that it may be
    seconds: float


class SelftestReport(Shown, Record):
    """The rows of a self-test on one machine."""

    version: str  # of planner
    date: str
    device: str
    workers: int
    rows: tuple[Row, ...]
    seconds: float

    def __str__(self) -> str:
        return selftest_report(self)

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return not self.count("failed")

    def count(self, result: Result) -> int:
        """Count the rows with this result."""
        return sum(row.result == result for row in self.rows)


@keywords_of(SelftestOptions, arguments=0)
def selftest(options: SelftestOptions) -> SelftestReport:
    """Check on this host that planning and training work; all files are temporary, and no process is left.

    Raises:
        InputError: when there is no such device or check, or under torchrun.
    """
    for argument, names in (("only", options.only), ("skip", options.skip)):
        if unknown := [name for name in names if name not in CHECKS]:
            raise InputError(f"`{argument}={unknown[0]}` is no check", hint=f"the checks are {', '.join(CHECKS)}")
    if int({**os.environ, **worker_variables(os.environ)}.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the self-test is for one host and starts its own workers, and this is one of several processes",
            hint="run it once on each host, without torchrun; plan profile under torchrun measures the links between "
            "hosts",
        )
    check_positive("workers", options.workers)
    kind = options.device or kind_here()
    started, date = time.monotonic(), datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="plan-selftest-") as folder, environment(EXACT):
        lab = Lab(parse_device(kind), options.workers, Path(folder), tuple(options.model))
        for check, cases in CHECKS.items():
            if check in (options.only or CHECKS) and check not in options.skip:
                for case in cases(lab):
                    rows.append(run_case(check, case))
                    if options.on_row is not None:
                        options.on_row(rows[-1])
    return SelftestReport(
        version=__version__,
        date=date,
        device=kind,
        workers=options.workers,
        rows=tuple(rows),
        seconds=time.monotonic() - started,
    )


def run_case(check: str, case: Case) -> Row:
    """Run one case; whatever it raises is how it failed."""
    (name, find), started = case, time.monotonic()
    try:
        outcome = find()
    except Exception as error:
        outcome = Outcome("failed", error.message if isinstance(error, PlannerError) else reason_of(error))
    if outcome.value is not None and not math.isfinite(outcome.value):
        outcome = outcome._replace(value=None)  # JSON has no NaN
    return Row(check=check, name=name, seconds=time.monotonic() - started, **outcome._asdict())


def selftest_report(report: SelftestReport) -> str:
    """Return the rows as a table, and their number by result."""
    rows = [
        [row.check, row.name, row.result, textwrap.fill(row.found, FOUND_WIDTH), f"{row.seconds:.1f}"]
        for row in report.rows
    ]
    table = Table(["check", "case", "result", "found", "seconds"], rows, "llllr").text()
    counts = ", ".join(f"{report.count(result)} {result}" for result in ("passed", "failed", "skipped"))
    where = f"planner {report.version} on {report.device} with {report.workers} workers, {report.date}"
    return f"{table}\n\n{counts} in {report.seconds:.0f} s: {where}"
