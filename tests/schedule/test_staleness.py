"""How many updates late gradients are: counted in the schedules' own streams, and by their
formula.
"""

from __future__ import annotations

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.reporting.tables.plan import plan_report, staleness_warning
from planner.schedule.instructions import Backward, BackwardWeight, Forward, Unit, Update
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Channel, PipelineShape, Schedule
from planner.solver import search_plan as solve
from tests.samples import layer, profile


def deep(stages: int) -> Plan:
    """Return a plan of so many equal stages under 1f1b: their weights take long to all-reduce."""
    layers = [layer(f"{n}", 1, 2, output_bytes=1, weight_bytes=10**9) for n in range(stages)]
    return solve(profile(*layers), flat_cluster(stages, 1e9), depth="published")


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_the_first_of_n_stages_is_n_less_one_updates_late(stages: int) -> None:
    assert deep(stages).staleness == stages - 1


def test_a_late_plan_says_so_loudly() -> None:
    assert staleness_warning(deep(5)) is None
    assert (
        "gradients  up to 4 updates stale, at the first stage; train with little momentum"
        in plan_report(deep(5))
    )
    message, hint = staleness_warning(deep(6)) or ("", "")
    assert "up to 5 updates stale" in message
    assert "`max_staleness=4`" in hint
    assert "MAY NOT CONVERGE" in plan_report(deep(6))
    assert "of the current weights" in plan_report(deep(1))


def counted(schedule: Schedule, stages: int) -> int:
    """Count over a stream of the first stage how many updates lie between a gradient's weights and
    its own update.
    """
    chunks = 1 if schedule.fixed_chunks == 1 else 2
    ranks = tuple((schedule.worker_of(stage, stages),) for stage in range(stages * chunks))
    channels = tuple(Channel(stage, stage + 1) for stage in range(len(ranks) - 1))
    shape = PipelineShape(ranks, channels, schedule, microbatches=stages if schedule.divides else 1)
    updates, pending, latest = 0, list[Unit](), 0
    version: dict[Unit, int] = {}
    for step in schedule.stream(shape, 0, 0, 12):
        match step:
            case Forward(stage=0):
                version[step.unit] = updates if step.version is None else step.version
            case (Backward(stage=0) | BackwardWeight(stage=0)) as backward:
                pending.append(backward.unit)
            case Update(stage=0):
                latest = max([latest, *(updates - version[unit] for unit in pending)])
                updates, pending = updates + 1, []
    return latest


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_streams_are_as_late_as_the_schedule_says(schedule: Schedule) -> None:
    depth = 4 if schedule.stashes else 1  # of the first of four stages
    assert counted(schedule, 4) == schedule.staleness(depth)
