"""Compute what each worker holds over time, from the plan's peaks.

Weights, gradients, optimizer state, buffers and message buffers are held all the time. A unit's activations are held
from the start of its forward to the end of its backward. Under weight stashing, a version of the weights is held while
it is the newest or a unit in flight uses it. The plan states the activations of all units in flight together, so each
unit counts for an equal part, which includes the working memory of the unit that is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.timeline import Event, MemoryCurve

TimedBytes = tuple[float, int]


def memory_curves(plan: Plan, events: Iterable[Event]) -> tuple[MemoryCurve, ...]:
    """Compute a curve for each worker; `events` by their start."""
    computed: dict[tuple[int, int], list[Event]] = {
        (rank, number): [] for number, stage in enumerate(plan.stages) for rank in stage.ranks
    }
    for event in events:
        if event.kind in ("forward", "backward", "backward_weight", "update"):
            computed[event.rank, event.stage].append(event)
    held: dict[int, int] = {}
    changes: dict[int, list[TimedBytes]] = {}
    for (rank, number), own in computed.items():
        stage = plan.stages[number]
        held[rank] = held.get(rank, 0) + _at_rest(plan, stage)
        changes.setdefault(rank, []).extend(_changes(plan, stage, own))
    return tuple(_curve(plan, rank, held[rank], changes[rank]) for rank in sorted(held))


def _version_bytes(plan: Plan, stage: Stage) -> int:
    return stage.memory.weights_bytes // plan.schedule.versions(stage.in_flight)


def _stashing(plan: Plan) -> bool:
    """Return whether versions come and go; vertical sync holds the same number all the time."""
    return plan.schedule.stashes and not plan.vertical_sync


def _at_rest(plan: Plan, stage: Stage) -> int:
    """Return what a stage holds with nothing in flight."""
    memory = stage.memory
    stashed = memory.weights_bytes - _version_bytes(plan, stage) if _stashing(plan) else 0
    return memory.total_bytes - memory.activations_bytes - stashed


def _changes(plan: Plan, stage: Stage, events: Iterable[Event]) -> Iterable[TimedBytes]:
    """Yield what one stage of a worker adds and frees, by its computations in order."""
    saved, version_bytes = stage.memory.activations_bytes // stage.in_flight, _version_bytes(plan, stage)
    stashing = _stashing(plan)
    newest, used = 0, Counter[int]()
    version_of: dict[tuple[int, int], int] = {}
    for event in events:
        unit = event.minibatch, event.microbatch
        match event.kind:
            case "forward":
                version_of[unit] = newest
                used[newest] += 1
                yield event.start_s, saved
            case "backward" | "backward_weight":
                version = version_of.pop(unit)
                used[version] -= 1
                yield event.end_s, -saved
                if stashing and version != newest and not used[version]:
                    yield event.end_s, -version_bytes
            case "update":
                if stashing and used[newest]:  # units in flight keep the old version beside the new one
                    yield event.end_s, version_bytes
                newest += 1
            case _:
                raise AssertionError(event.kind)


def _curve(plan: Plan, rank: int, held: int, changes: list[TimedBytes]) -> MemoryCurve:
    """Sum the changes; sorting puts what is freed at a moment before what is added, so they do not add up to a peak."""
    after = {0.0: held}
    for time_s, change in sorted(changes):
        held += change
        after[time_s] = held
    times = list(after)
    steps = {0.0: after[0.0]} | {now: after[now] for before, now in pairwise(times) if after[now] != after[before]}
    limit = plan.cluster.memory_on([rank])
    return MemoryCurve(rank=rank, time_s=tuple(steps), held_bytes=tuple(steps.values()), limit_bytes=limit)
