"""The table of verified stages: measured, beside the sums of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.formats.plan import Plan
from planner.report.tables.repeats import layer_range
from planner.report.tables.table import Table
from planner.units import format_seconds


class StageTime(Protocol):
    """What `planner.profiler.measured.verify` returns; a protocol, because this module must not import PyTorch."""

    @property
    def summed_s(self) -> float: ...

    @property
    def measured_s(self) -> float: ...

    @property
    def error(self) -> float: ...


def verify_report(plan: Plan, times: Sequence[StageTime]) -> str:
    """Compare the forward, backward and update of each stage for one microbatch."""
    rows = [
        [
            index,
            layer_range(stage.layers),
            format_seconds(time.summed_s),
            format_seconds(time.measured_s),
            f"{time.error:+.1%}",
        ]
        for index, (stage, time) in enumerate(zip(plan.stages, times, strict=True))
    ]
    table = Table(["stage", "layers", "sum of layers", "measured", "sum is off by"], rows).text()
    worst = max(times, key=lambda time: abs(time.error))
    return f"{table}\n\nworst stage: the sum of its layers is off by {worst.error:+.1%}"
