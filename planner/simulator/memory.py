"""What each worker holds over time, from what the plan says of its stages' peaks.

Weights, their gradients, optimizer state, buffers and message buffers are there all the time. Activations come with a
unit's forward and go with the end of its backward. Under weight stashing a version of the weights lives as long as it
is the newest or a unit in flight uses it. The plan states activations for all units in flight together, so each
counts for an equal part, what only the unit at work needs included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from planner.cost.plan_price import versions_of
from planner.formats.plan import Plan, ScheduleName, Stage
from planner.formats.timeline import Event, MemoryCurve

STASHING: tuple[ScheduleName, ...] = ("1f1b",)  # a version of the weights per unit in flight, at most
Change = tuple[float, int]  # seconds, bytes


def memory_curves(plan: Plan, events: Iterable[Event]) -> tuple[MemoryCurve, ...]:
    """A curve for each worker; `events` by their start."""
    computed: dict[tuple[int, int], list[Event]] = {
        (rank, number): [] for number, stage in enumerate(plan.stages) for rank in stage.ranks
    }
    for event in events:
        if event.kind in ("forward", "backward", "backward_weight", "update"):
            computed[event.rank, event.stage].append(event)
    held: dict[int, int] = {}
    changes: dict[int, list[Change]] = {}
    for (rank, number), own in computed.items():
        stage = plan.stages[number]
        held[rank] = held.get(rank, 0) + _at_rest(plan, stage)
        changes.setdefault(rank, []).extend(_changes(plan, stage, own))
    return tuple(_curve(plan, rank, held[rank], changes[rank]) for rank in sorted(held))


def _version_bytes(plan: Plan, stage: Stage) -> int:
    return stage.memory.weights_bytes // versions_of(plan.schedule, stage.in_flight)


def _stashing(plan: Plan) -> bool:
    """Vertical sync holds as many versions all the time."""
    return plan.schedule in STASHING and not plan.vertical_sync


def _at_rest(plan: Plan, stage: Stage) -> int:
    """With nothing in flight."""
    memory = stage.memory
    stashed = memory.weights_bytes - _version_bytes(plan, stage) if _stashing(plan) else 0
    return memory.total_bytes - memory.activations_bytes - stashed


def _changes(plan: Plan, stage: Stage, events: Iterable[Event]) -> Iterable[Change]:
    """What one stage of a worker adds and frees, by its computations in order."""
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
                if stashing and used[newest]:  # which stays beside the version that this makes
                    yield event.end_s, version_bytes
                newest += 1
            case _:
                raise AssertionError(event.kind)


def _curve(plan: Plan, rank: int, held: int, changes: list[Change]) -> MemoryCurve:
    """Steps in order; what is freed at a moment goes before what is added."""
    after = {0.0: held}
    for time_s, change in sorted(changes):
        held += change
        after[time_s] = held
    times = list(after)
    steps = {0.0: after[0.0]} | {now: after[now] for before, now in pairwise(times) if after[now] != after[before]}
    cluster = plan.cluster
    limit = cluster.memory_of(cluster.kind_of(rank)) if cluster.kinds else cluster.memory_bytes
    return MemoryCurve(rank=rank, time_s=tuple(steps), held_bytes=tuple(steps.values()), limit_bytes=limit)
