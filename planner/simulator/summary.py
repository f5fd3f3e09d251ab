"""Summarize a timeline: pace, bubble, busy shares of workers and links, and peaks of memory."""

from bisect import bisect_right
from collections import defaultdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planner.arguments import checked
from planner.formats.files import Record
from planner.formats.plan_parts import ScheduleField
from planner.formats.shown import Shown
from planner.formats.timeline import LANES, Event, EventKind, Timeline
from planner.schedule.schedule import PipelineShape
from planner.simulator.simulation import Completions
from planner.simulator.steady_state import Steady, steady_state

Floats = NDArray[np.float64]
LANE_NAMES = ("compute", "send", "receive", "all-reduce")


class WorkerUse(Record):
    """A worker in the steady state, with shares of the time."""

    rank: int
    stages: tuple[int, ...]
    compute_share: float
    send_share: float  # of its outgoing link
    receive_share: float  # of its incoming link
    peak_bytes: int | None  # over the whole run; None if it was not recorded
    limit_bytes: int | None


class LinkShare(Record):
    """One direction of a link that several workers share, in the steady state."""

    name: str
    bandwidth_bytes_per_s: float
    busy_share: float


class Summary(Shown, Record):
    """A run in numbers; one that is too short for a steady state counts as a whole."""

    source: Literal["simulated", "measured"]
    model: str
    config: str
    schedule: ScheduleField
    minibatches: int
    seconds: float  # of the whole run
    start_up_s: float  # until the first backward of stage 0 ends
    drain_s: float  # from the last forward of the first stage on
    steady: bool  # False for a run that is too short
    steady_from_s: float
    steady_to_s: float
    seconds_per_minibatch: float
    samples_per_s: float | None  # None if the batch size is not known
    samples_per_s_of_run: float | None  # with start-up and drain
    bubble_share: float  # of the workers' time in the steady state, without computation
    bubble_share_of_run: float
    bubble_causes: dict[str, float]  # the bubble by what workers waited for
    busiest: str  # the resource with the largest share
    busiest_share: float
    workers: tuple[WorkerUse, ...]
    shared_links: tuple[LinkShare, ...]


@checked
def summarize(timeline: Timeline) -> Summary:
    """Summarize a run, simulated or measured.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> summary = planner.summarize(planner.simulate(plan))
        >>> summary.busiest
        'the computation of worker 2'
    """
    events, ranks, span = timeline.events, timeline.workers, timeline.span_s
    kinds, stage_of = np.array(events.kind, dtype=str), np.array(events.stage, dtype=np.int64)
    starts_s, ends_s = (
        np.array(events.start_s, dtype=np.float64),
        np.array(events.end_s, dtype=np.float64),
    )
    row = np.searchsorted(ranks, np.array(events.rank, dtype=np.int64))
    lane = np.array([LANE_NAMES.index(LANES[kind]) for kind in events.kind], dtype=np.int64)
    recorded = len(set(np.array(events.minibatch)[kinds == "forward"].tolist()))
    count = recorded or timeline.minibatches  # a recording may have only some minibatches of a run

    def ends_of(stage: int, *wanted: EventKind) -> list[float]:
        found: list[float] = ends_s[np.isin(kinds, wanted) & (stage_of == stage)].tolist()
        return found

    def busy_s(start: float, end: float) -> Floats:
        """Sum the busy seconds between two times, by lane and worker; overlapping events both
        count.
        """
        inside = np.clip(np.minimum(ends_s, end) - np.maximum(starts_s, start), 0.0, None)
        counted = np.bincount(lane * len(ranks) + row, inside, len(LANE_NAMES) * len(ranks))
        return np.asarray(counted.reshape(len(LANE_NAMES), len(ranks)))

    stages = range(len(timeline.ranks))
    shape = PipelineShape(timeline.ranks, (), timeline.schedule, timeline.microbatches)
    forwards_s = [ends_of(stage, "forward") or [0.0] for stage in stages]
    completed = Completions(
        shape, [ends_of(stage, "backward", "backward_weight") for stage in stages], forwards_s
    )
    steady = steady_state(completed, recorded)
    # none is like another: all count but those at the ends of the run
    if steady is not None and timeline.lengths:
        done_s, first, last = sorted(completed.ends_s[0]), timeline.microbatches - 1, -1
        if shape.asynchronous:
            last = bisect_right(done_s, max(forwards_s[0])) - len(done_s) - 1
        pace_s = (
            (done_s[last] - done_s[first]) / (len(done_s) + last - first) * timeline.microbatches
        )
        steady = Steady(done_s[first], done_s[last], pace_s)
    start, end, pace_s = 0.0, span, span / count
    if steady is not None:
        start, end, pace_s = steady.start_s, steady.end_s, steady.seconds_per_minibatch
    busy = busy_s(start, end)
    own, shared = _links(timeline, start, end)
    length = end - start
    curves = {curve.rank: curve for curve in timeline.memory}
    workers = tuple(
        WorkerUse(
            rank=rank,
            stages=stages_of(timeline, rank),
            compute_share=_share(busy[0, number], length),
            send_share=own.get((rank, True), _share(busy[1, number], length)),
            receive_share=own.get((rank, False), _share(busy[2, number], length)),
            peak_bytes=max(curves[rank].held_bytes, default=0) if rank in curves else None,
            limit_bytes=curves[rank].limit_bytes if rank in curves else None,
        )
        for number, rank in enumerate(ranks)
    )
    samples = (
        None
        if timeline.microbatch_size is None
        else timeline.microbatch_size * timeline.microbatches
    )
    # A tie goes to the first, and computations come first.
    found = [
        (f"the computation of worker {worker.rank}", worker.compute_share) for worker in workers
    ]
    found += [
        (f"the link of worker {worker.rank}, sending", worker.send_share) for worker in workers
    ]
    found += [
        (f"the link of worker {worker.rank}, receiving", worker.receive_share) for worker in workers
    ]
    found += [(f"the link that {link.name}", link.busy_share) for link in shared]
    busiest, busiest_share = max(found, key=lambda pair: round(pair[1], 6))
    return Summary(
        source=timeline.source,
        model=timeline.model,
        config=timeline.config,
        schedule=timeline.schedule,
        minibatches=count,
        seconds=span,
        start_up_s=min(completed.ends_s[0], default=0.0),
        drain_s=span - max(forwards_s[0]),
        steady=steady is not None,
        steady_from_s=start,
        steady_to_s=end,
        seconds_per_minibatch=pace_s,
        samples_per_s=None if samples is None or pace_s <= 0 else samples / pace_s,
        samples_per_s_of_run=None if samples is None or span <= 0 else samples / (span / count),
        bubble_share=1 - _share(float(busy[0].mean()), length),
        bubble_share_of_run=1 - _share(float(busy_s(0.0, span)[0].mean()), span),
        bubble_causes=_bubble_causes(timeline, start, end),
        busiest=busiest,
        busiest_share=busiest_share,
        workers=workers,
        shared_links=shared,
    )


# and other computations for gradients
_WAITED_FOR = {"forward": "receive_activation", "update": "all_reduce"}
_CAUSES = {"receive": "messages", "all-reduce": "all-reduces"}


def _bubble_causes(timeline: Timeline, start: float, end: float) -> dict[str, float]:
    """Divide the time without computation by what came last before the computation that ended it.

    Until its sender had computed it, a message counts as waiting for that worker, and an all-reduce
    until all had joined. At the end of a run a worker waits for the others.
    """
    computed, made_s, came = (
        defaultdict[int, list[Event]](list),
        dict[Any, float](),
        dict[Any, Event](),
    )
    for event in timeline.events.rows():
        unit = event.stage, event.minibatch, event.microbatch
        if event.lane in _CAUSES:
            came[event.rank, event.kind, unit] = event
        elif event.lane == "compute":
            computed[event.rank].append(event)
            if event.kind in ("forward", "backward", "backward_input"):
                made_s[event.rank, event.kind == "forward", unit] = event.end_s
    waits = dict.fromkeys(("workers", *_CAUSES.values(), "other"), 0.0)
    for rank, events in computed.items():
        free_s, gathered = start, None
        for event in events:
            unit = event.stage, event.minibatch, event.microbatch
            found = (
                gathered,
                came.get((rank, _WAITED_FOR.get(event.kind, "receive_gradient"), unit)),
            )
            gathered = came.get((rank, "all_gather", unit)) if event.kind == "update" else None
            since_s, until_s = max(free_s, start), min(event.start_s, end)
            free_s = max(free_s, event.end_s)
            if until_s <= since_s:
                continue
            cause, left_s = "other", since_s
            last = max(filter(None, found), key=lambda each: each.end_s, default=None)
            if last is not None and last.end_s > since_s:
                sent = (
                    last.peer_rank,
                    last.kind == "receive_activation",
                    (last.peer_stage, *unit[1:]),
                )
                cause, left_s = _CAUSES[last.lane], made_s.get(sent, last.start_s)
            middle_s = min(max(left_s, since_s), until_s)
            waits["workers"] += middle_s - since_s
            waits[cause] += until_s - middle_s
        waits["workers"] += max(0.0, end - max(free_s, start))
    length = (end - start) * len(timeline.workers)
    return {cause: _share(seconds, length) for cause, seconds in waits.items()}


def stages_of(timeline: Timeline, rank: int) -> tuple[int, ...]:
    return tuple(number for number, ranks in enumerate(timeline.ranks) if rank in ranks)


def _links(
    timeline: Timeline, start: float, end: float
) -> tuple[dict[tuple[int, bool], float], tuple[LinkShare, ...]]:
    own: dict[tuple[int, bool], float] = {}
    shared = []
    for link in timeline.links:
        starts, ends = np.array(link.start_s), np.array(link.end_s)
        used = np.array(link.share) if link.share else 1.0
        busy = float(
            (np.clip(np.minimum(ends, end) - np.maximum(starts, start), 0.0, None) * used).sum()
        )
        share = _share(busy, end - start)
        if link.rank is not None:
            own[link.rank, link.sends] = share
        else:
            shared.append(
                LinkShare(
                    name=link.name,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                    busy_share=share,
                )
            )
    return own, tuple(shared)


def _share(busy_s: float, length_s: float) -> float:
    return float(busy_s / length_s) if length_s > 0 else 0.0
