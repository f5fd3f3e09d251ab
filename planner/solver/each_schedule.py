"""One model on one cluster under several schedules and numbers of microbatches, side by side.

Each row is the best plan of its kind, by `solve`. Rows are compared where they update after equally
many samples: another global batch is another training.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from planner.errors import InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.files import Record, replace, write_text
from planner.formats.plan import Plan
from planner.formats.plan_parts import ScheduleField
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions, StageRules
from planner.options.verbs import ScheduleOptions
from planner.schedule.registry import SCHEDULES, find
from planner.schedule.schedule import Schedule
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver.clock import Clock
from planner.solver.request import Request
from planner.solver.solve import solve


class ScheduleRow(Record):
    """The best plan under one schedule; all numbers are None where there is none."""

    schedule: ScheduleField
    microbatches: int  # of a global batch; 1 for schedules that do not divide it
    microbatch_size: int | None  # samples; None where the profile does not know
    global_batch: int | None = None  # samples of an update, at the stage that takes the most
    config: str | None = None
    seconds_per_microbatch: float | None = None
    samples_per_s: float | None = None
    # over the first row with as many samples per update that has a plan
    speedup: float | None = None
    bubble_share: float | None = None  # of the workers' time in the steady state
    memory_bytes: int | None = None  # of the GPU that needs most
    staleness: int | None = None  # updates that the gradients are late
    obstacle: str | None = None  # why there is no plan


class ScheduleComparison(Shown, Record):
    """Rows with the same global batch stand together, from the smallest on."""

    model: str
    cluster: Cluster
    rows: tuple[ScheduleRow, ...]

    def to_csv(self, path: Path | str | None = None) -> str:
        """Return the rows as comma-separated values, and write them to a file where one is
        named.
        """
        text = io.StringIO()
        names = list(ScheduleRow.model_fields)
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow(row.model_dump())
        if path is not None:
            write_text(Path(path), text.getvalue())
        return text.getvalue()

    def plot(self) -> Any:
        """Draw samples per second over the global batch, with a curve for each schedule.

        Returns:
            A picture that a notebook shows, whose `save("schedules.svg")` writes it.

        Raises:
            InputError: where no schedule has a plan.
        """
        return import_module("planner.reporting.schedules_chart").plot(self)

    def to_frame(self) -> Any:
        """Return the rows as a data frame of pandas.

        Raises:
            InputError: where pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as cause:
            raise InputError(
                "a data frame needs pandas, which is not installed",
                hint="pip install pandas, or use to_csv()",
            ) from cause
        return pandas.DataFrame([row.model_dump() for row in self.rows])


def compare_each(
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: ScheduleOptions,
    clock: Clock,
) -> ScheduleComparison:
    """Solve under each of the schedules: `planner.compare_schedules` says how."""
    asked = [
        (profile, schedule, microbatches)
        for profile in profiles
        for schedule in map(find, options.schedules or SCHEDULES)
        for microbatches in _numbers(schedule, options)
    ]

    rows = []
    for number, (profile, schedule, microbatches) in enumerate(asked):
        part = clock.part(1 / (len(asked) - number))
        rows.append(_row(profile, cluster, options, schedule, microbatches, part))

    rows.sort(key=lambda row: (row.global_batch is None, row.global_batch or 0))
    return ScheduleComparison(
        model=profiles[0].model, cluster=cluster, rows=tuple(_with_speedups(rows))
    )


def _numbers(schedule: Schedule, options: ScheduleOptions) -> Sequence[int | None]:
    """Return the numbers of microbatches to try; None for what a schedule has by itself."""
    if not schedule.divides or not options.microbatches:
        return [None]
    return options.microbatches


def _row(
    profile: Profile,
    cluster: Cluster,
    options: ScheduleOptions,
    schedule: Schedule,
    microbatches: int | None,
    clock: Clock,
) -> ScheduleRow:
    rules = {each.name: getattr(options, each.name) for each in fields(StageRules)}
    asked = SolveOptions(schedule=schedule.name, microbatches=microbatches, **rules)
    row = ScheduleRow(
        schedule=schedule,
        microbatches=asked.microbatches_on(cluster, profile),
        microbatch_size=profile.microbatch_size,
    )

    try:
        plan = solve(Request(profile, cluster_for(profile, cluster), asked, clock))
    except PlannerError as error:
        return replace(row, obstacle=error.message)

    return replace(row, **_numbers_of(plan))


def _numbers_of(plan: Plan) -> dict[str, Any]:
    seconds = plan.predicted.seconds_per_minibatch / plan.microbatches
    size = plan.microbatch_size
    return {
        "microbatches": plan.microbatches,
        "global_batch": None if size is None else max(plan.samples_per_update),
        "config": plan.config,
        "seconds_per_microbatch": seconds,
        "samples_per_s": None if size is None else size / seconds,
        "bubble_share": summarize(simulate(plan)).bubble_share,
        "memory_bytes": max(map(plan.memory_bytes, range(len(plan.stages)))),
        "staleness": plan.staleness,
    }


def _with_speedups(rows: Sequence[ScheduleRow]) -> list[ScheduleRow]:
    first: dict[int | None, float] = {}
    related = []
    for row in rows:
        if row.seconds_per_microbatch is not None:
            per_sample = row.seconds_per_microbatch / (row.microbatch_size or 1)
            reference = first.setdefault(row.global_batch, per_sample)
            row = replace(row, speedup=reference / per_sample)
        related.append(row)

    return related
