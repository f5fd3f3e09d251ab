"""Memory of each worker over time, which follows from the events of a run and the plan's peaks.

An equal part of the activations is held for each unit from the start of its forward to the end of
its backward, and under weight stashing a version of the weights while it is the newest or a unit in
flight uses it; the rest all the time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.timeline import Event, MemoryCurve

_Change = tuple[float, int]  # when, and bytes
_CHANGING = ("forward", "backward", "backward_weight", "update")


def memory_curves(plan: Plan, events: Iterable[Event]) -> tuple[MemoryCurve, ...]:
    """Return the memory of each worker of a plan, by rank."""
    computed: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in _CHANGING:
            computed[event.rank, event.stage].append(event)

    held: Counter[int] = Counter()
    changes: defaultdict[int, list[_Change]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        version_bytes = _version_bytes(plan, stage)
        idle_bytes = stage.memory.total_bytes - stage.memory.activations_bytes
        if plan.schedule.stashes:
            idle_bytes -= stage.memory.weights_bytes - version_bytes

        for rank in stage.ranks:
            held[rank] += idle_bytes
            changes[rank] += _changes(stage, version_bytes, computed[rank, number])

    return tuple(_curve(plan, rank, held[rank], changes[rank]) for rank in sorted(held))


def _version_bytes(plan: Plan, stage: Stage) -> int:
    """Return the bytes of each version of stashed weights; 0 where there is but one."""
    if not plan.schedule.stashes:
        return 0
    return stage.memory.weights_bytes // plan.schedule.versions(stage.in_flight)


def _changes(stage: Stage, version_bytes: int, events: Iterable[Event]) -> Iterator[_Change]:
    """Yield what a worker takes and frees for a stage."""
    saved_bytes = stage.memory.activations_bytes // stage.in_flight
    newest = 0
    users: Counter[int] = Counter()  # of each version, in flight
    version_of: dict[tuple[int, int], int] = {}
    for event in events:
        unit = (event.minibatch, event.microbatch)
        match event.kind:
            case "forward":
                version_of[unit] = newest
                users[newest] += 1
                yield event.start_s, saved_bytes
            case "backward" | "backward_weight":
                version = version_of.pop(unit)
                users[version] -= 1
                yield event.end_s, -saved_bytes
                if version != newest and not users[version]:
                    yield event.end_s, -version_bytes
            case _:
                if users[newest]:  # units in flight keep the old version beside the new one
                    yield event.end_s, version_bytes
                newest += 1


def _curve(plan: Plan, rank: int, held_bytes: int, changes: list[_Change]) -> MemoryCurve:
    """Sum up the changes of a worker that begins with `held_bytes`."""
    held_at = {0.0: held_bytes}
    # Sorting puts what is freed at a moment before what is added, so they do not add up to a peak.
    for time_s, change in sorted(changes):
        held_bytes += change
        held_at[time_s] = held_bytes

    steps: dict[float, int] = {}
    latest = None
    for time_s, now in held_at.items():
        if now != latest:
            steps[time_s] = now
        latest = now

    return MemoryCurve(
        rank=rank,
        time_s=tuple(steps),
        held_bytes=tuple(steps.values()),
        limit_bytes=plan.cluster.memory_on([rank]),
    )
