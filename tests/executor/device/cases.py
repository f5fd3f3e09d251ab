"""The shapes of pipelines that are run: every schedule, with all that a plan may add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.schedule.controllable_memory import V_HALF, V_MIN
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from tests.executor.device.runs import Run

LEAN = (V_HALF, V_MIN)
MICROBATCHES = 4
# Replicas of each worker's stages, and ranks of each replica.
GROUPED = (
    ((1,), (2,)),
    ((2,), (2,)),
    ((1, 1), (2, 2)),
    ((1, 1, 1), (2, 2, 2)),
    ((2, 2), (2, 2)),
    ((2, 1), (2, 2)),
    ((1, 1), (1, 2)),
    ((1, 1), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 1)),
    ((1, 1), (4, 2)),
    ((1, 1, 1), (1, 2, 1)),
)


def _in_groups(schedule: Schedule, run: Callable[..., Run]) -> Iterator[Run]:
    """Groups of ranks that divide their layers, of one size and of several."""
    for replicas, degrees in GROUPED:
        if schedule.chunked and (len(replicas) == 1 or len(set(replicas)) > 1):
            continue
        yield run(replicas, degrees=degrees)
        if len(replicas) < 3:
            yield run(
                replicas, degrees=degrees, clipped=True, evaluate_every=2, sharded=max(replicas) > 1
            )
    stages = len(run((1, 1)).replicas)
    yield run((1, 1), degrees=(2, 2), tied=((0, stages - 1),))
    yield run((1, 1), degrees=(2, 2), autocast="float16")
    yield run((1, 1, 1), degrees=(2, 2, 2), skips=((0, stages // 2 * 3 - 1),))
    yield run((1, 1), degrees=(2, 2), traced=True)


def runs() -> tuple[Run, ...]:
    """Return all of them but those of `lean_runs`."""
    return tuple(run for each in SCHEDULES if each not in LEAN for run in _runs(each))


def lean_runs() -> tuple[Run, ...]:
    """Return those of the schedules that are zb-v with less memory: its routes in other orders."""
    return tuple(run for schedule in LEAN for run in _runs(schedule))


def _runs(schedule: Schedule) -> Iterator[Run]:
    name, microbatches = schedule.name, MICROBATCHES if schedule.divides else 1
    chunks = (schedule.fixed_chunks or 2) if schedule.chunked else 1

    def run(replicas: tuple[int, ...], **more: object) -> Run:
        return Run(name, replicas * chunks, microbatches, chunks, **more)  # type: ignore[arg-type]

    even = [(1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2)]
    uneven = [(2, 1), (1, 2), (2, 1, 1), (1, 2, 1), (3, 2), (3, 1)]
    stages = 3 * chunks
    for replicas in even if schedule.chunked else even + uneven:
        yield run(replicas)
    for replicas in [(1, 1, 1)] if schedule.chunked else [(1, 1, 1), (2, 1, 2)]:
        yield run(replicas, skips=((0, stages - 1),))
        yield run(replicas, skips=((0, stages - 1),), evaluate_every=2)
    yield run((1, 1), evaluate_every=2)
    yield run((1, 1, 1), traced=True)
    for replicas in [(1, 1), (1, 1, 1), (2, 2)]:
        last = len(replicas) * chunks - 1
        yield run(replicas, tied=((0, last),))
        yield run(replicas, tied=((0, last),), evaluate_every=3)
    yield run((1, 1, 1), tied=((0, stages - 1), (1, stages - 1)))
    yield run((1, 1, 1), clipped=True)
    yield run((1, 1), autocast="float16")
    for replicas in [(2, 2)] if schedule.chunked else [(2, 2), (2, 1), (1, 3)]:
        yield run(replicas, sharded=True)
    yield run((2, 2), sharded=True, tied=((0, 2 * chunks - 1),))
    yield run((2, 2), sharded=True, clipped=True, evaluate_every=2)
    yield run((2, 2), sharded=True, autocast="float16")
    # what arrives is decoded into new memory
    yield run((1, 1, 1), skips=((0, stages - 1),), compress="bfloat16")
    yield from _in_groups(schedule, run)
