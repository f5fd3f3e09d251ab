"""Summarize a timeline: pace, bubble, busy shares of workers and links, and peaks of memory."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.arguments import checked
from planner.formats.files import Record
from planner.formats.plan_parts import ScheduleField
from planner.formats.shown import Shown
from planner.formats.timeline import LANES, Event, EventKind, LinkUse, Timeline
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
    columns = _Columns(timeline)
    span = timeline.span_s
    recorded = columns.recorded_minibatches()
    count = recorded or timeline.minibatches  # a recording may have only some minibatches of a run

    # 1. The steady state, or else the whole run.
    completed = columns.completions()
    last_forward_s = max(completed.forwards_s[0])
    steady = _steady(timeline, completed, recorded)
    start = 0.0
    end = span
    pace_s = span / count
    if steady is not None:
        start = steady.start_s
        end = steady.end_s
        pace_s = steady.seconds_per_minibatch

    # 2. How busy workers and links are.
    busy = columns.busy_s(start, end)
    own_links, shared_links = _links(timeline, start, end)
    workers = _workers(timeline, busy, end - start, own_links)
    busiest, busiest_share = _busiest(workers, shared_links)

    samples = None
    if timeline.microbatch_size is not None:
        samples = timeline.microbatch_size * timeline.microbatches
    return Summary(
        source=timeline.source,
        model=timeline.model,
        config=timeline.config,
        schedule=timeline.schedule,
        minibatches=count,
        seconds=span,
        start_up_s=min(completed.ends_s[0], default=0.0),
        drain_s=span - last_forward_s,
        steady=steady is not None,
        steady_from_s=start,
        steady_to_s=end,
        seconds_per_minibatch=pace_s,
        samples_per_s=None if samples is None or pace_s <= 0 else samples / pace_s,
        samples_per_s_of_run=None if samples is None or span <= 0 else samples / (span / count),
        bubble_share=1 - _share(float(busy[0].mean()), end - start),
        bubble_share_of_run=1 - _share(float(columns.busy_s(0.0, span)[0].mean()), span),
        bubble_causes=_bubble_causes(timeline, start, end),
        busiest=busiest,
        busiest_share=busiest_share,
        workers=workers,
        shared_links=shared_links,
    )


class _Columns:
    """The events of a timeline as arrays, (events,)."""

    def __init__(self, timeline: Timeline) -> None:
        events = timeline.events
        self._timeline = timeline
        self._kinds = np.array(events.kind, dtype=str)
        self._stages = np.array(events.stage, dtype=np.int64)
        self._minibatches = np.array(events.minibatch)
        self._starts_s = np.array(events.start_s, dtype=np.float64)
        self._ends_s = np.array(events.end_s, dtype=np.float64)
        # of each event's worker and lane, in `busy_s`
        worker = np.searchsorted(timeline.workers, np.array(events.rank, dtype=np.int64))
        lanes = [LANE_NAMES.index(LANES[kind]) for kind in events.kind]
        self._row = np.array(lanes, dtype=np.int64) * len(timeline.workers) + worker

    def recorded_minibatches(self) -> int:
        return len(set(self._minibatches[self._kinds == "forward"].tolist()))

    def completions(self) -> Completions:
        """Return when forwards and backwards of each stage ended; 0 where there was no forward."""
        timeline = self._timeline
        shape = PipelineShape(timeline.ranks, (), timeline.schedule, timeline.microbatches)

        backwards_s = []
        forwards_s = []
        for stage in range(len(timeline.ranks)):
            backwards_s.append(self._ends_of(stage, "backward", "backward_weight"))
            forwards_s.append(self._ends_of(stage, "forward") or [0.0])

        return Completions(shape, backwards_s, forwards_s)

    def _ends_of(self, stage: int, *wanted: EventKind) -> list[float]:
        chosen = np.isin(self._kinds, wanted) & (self._stages == stage)
        ends_s: list[float] = self._ends_s[chosen].tolist()
        return ends_s

    def busy_s(self, start: float, end: float) -> Floats:
        """Sum the busy seconds between two times, (lanes, workers); overlapping events both
        count.
        """
        until_s = np.minimum(self._ends_s, end)
        since_s = np.maximum(self._starts_s, start)
        inside_s = np.clip(until_s - since_s, 0.0, None)

        lanes = len(LANE_NAMES)
        workers = len(self._timeline.workers)
        sums = np.bincount(self._row, inside_s, lanes * workers)
        return np.asarray(sums.reshape(lanes, workers))


def _steady(timeline: Timeline, completed: Completions, recorded: int) -> Steady | None:
    """Return the steady state of a run; None for one that is too short.

    Where lengths vary no minibatch is like another: all count but those at the ends of the run.
    """
    steady = steady_state(completed, recorded)
    if steady is None or not timeline.lengths:
        return steady

    done_s = sorted(completed.ends_s[0])
    first = timeline.microbatches - 1
    last = -1
    if timeline.schedule.asynchronous:
        last = bisect_right(done_s, max(completed.forwards_s[0])) - len(done_s) - 1
    length_s = done_s[last] - done_s[first]
    pace_s = length_s / (len(done_s) + last - first) * timeline.microbatches
    return Steady(done_s[first], done_s[last], pace_s)


def _workers(
    timeline: Timeline, busy: Floats, length: float, own_links: dict[tuple[int, bool], float]
) -> tuple[WorkerUse, ...]:
    """Return each worker's use. `busy` are seconds, (lanes, workers)."""
    curves = {curve.rank: curve for curve in timeline.memory}
    workers = []
    for number, rank in enumerate(timeline.workers):
        curve = curves.get(rank)
        compute_s, send_s, receive_s, _ = busy[:, number]
        use = WorkerUse(
            rank=rank,
            stages=stages_of(timeline, rank),
            compute_share=_share(compute_s, length),
            send_share=own_links.get((rank, True), _share(send_s, length)),
            receive_share=own_links.get((rank, False), _share(receive_s, length)),
            peak_bytes=None if curve is None else max(curve.held_bytes, default=0),
            limit_bytes=None if curve is None else curve.limit_bytes,
        )
        workers.append(use)

    return tuple(workers)


def _busiest(workers: Sequence[WorkerUse], links: Sequence[LinkShare]) -> tuple[str, float]:
    """Return the resource with the largest share; a tie goes to the first, and computations come
    first.
    """
    uses = [
        *((f"the computation of worker {each.rank}", each.compute_share) for each in workers),
        *((f"the link of worker {each.rank}, sending", each.send_share) for each in workers),
        *((f"the link of worker {each.rank}, receiving", each.receive_share) for each in workers),
        *((f"the link that {link.name}", link.busy_share) for link in links),
    ]
    return max(uses, key=lambda use: round(use[1], 6))


# and other computations for gradients
_WAITED_FOR = {"forward": "receive_activation", "update": "all_reduce"}
_CAUSES = {"receive": "messages", "all-reduce": "all-reduces"}

# a stage, a minibatch and a microbatch
_UnitOfStage = tuple[int | None, int, int]
_Came = tuple[int, EventKind | str, _UnitOfStage]  # at a worker, by kind
_Made = tuple[int | None, bool, _UnitOfStage]  # by a worker, whether by a forward


def _bubble_causes(timeline: Timeline, start: float, end: float) -> dict[str, float]:
    """Divide the time without computation by what came last before the computation that ended it.

    Until its sender had computed it, a message counts as waiting for that worker, and an all-reduce
    until all had joined. At the end of a run a worker waits for the others.
    """
    computed = defaultdict[int, list[Event]](list)
    made_s: dict[_Made, float] = {}  # when what a message carries was there
    came: dict[_Came, Event] = {}
    for event in timeline.events.rows():
        unit = (event.stage, event.minibatch, event.microbatch)
        if event.lane in _CAUSES:
            came[event.rank, event.kind, unit] = event
        elif event.lane == "compute":
            computed[event.rank].append(event)
            if event.kind in ("forward", "backward", "backward_input"):
                made_s[event.rank, event.kind == "forward", unit] = event.end_s

    waits = dict.fromkeys(("workers", *_CAUSES.values(), "other"), 0.0)
    for rank, events in computed.items():
        free_s = start
        gathered = None
        for event in events:
            unit = (event.stage, event.minibatch, event.microbatch)
            wanted = came.get((rank, _WAITED_FOR.get(event.kind, "receive_gradient"), unit))
            last = _later(gathered, wanted)
            gathered = None
            if event.kind == "update":
                gathered = came.get((rank, "all_gather", unit))

            since_s = max(free_s, start)
            until_s = min(event.start_s, end)
            free_s = max(free_s, event.end_s)
            if until_s <= since_s:
                continue

            # For its sender first, then for what brings it.
            cause = "other"
            sent_s = since_s
            if last is not None and last.end_s > since_s:
                cause = _CAUSES[last.lane]
                sender = (last.peer_stage, event.minibatch, event.microbatch)
                made = (last.peer_rank, last.kind == "receive_activation", sender)
                sent_s = made_s.get(made, last.start_s)
            middle_s = min(max(sent_s, since_s), until_s)
            waits["workers"] += middle_s - since_s
            waits[cause] += until_s - middle_s
        waits["workers"] += max(0.0, end - max(free_s, start))

    length = (end - start) * len(timeline.workers)
    return {cause: _share(seconds, length) for cause, seconds in waits.items()}


def _later(one: Event | None, other: Event | None) -> Event | None:
    """Return the event that ends later, the first of two that end at once."""
    if one is None or other is None:
        return one or other
    if other.end_s > one.end_s:
        return other
    return one


def stages_of(timeline: Timeline, rank: int) -> tuple[int, ...]:
    """Return the stages that a worker runs."""
    return tuple(number for number, ranks in enumerate(timeline.ranks) if rank in ranks)


def _links(
    timeline: Timeline, start: float, end: float
) -> tuple[dict[tuple[int, bool], float], tuple[LinkShare, ...]]:
    """Return the busy shares of workers' own links, by rank and whether it sends, and of shared
    ones.
    """
    own: dict[tuple[int, bool], float] = {}
    shared = []
    for link in timeline.links:
        share = _share(_link_s(link, start, end), end - start)
        if link.rank is not None:
            own[link.rank, link.sends] = share
            continue

        use = LinkShare(
            name=link.name,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            busy_share=share,
        )
        shared.append(use)

    return own, tuple(shared)


def _link_s(link: LinkUse, start: float, end: float) -> float:
    """Return the seconds for which a link was busy between two times; where several messages share
    it, by their shares of its rate.
    """
    inside = np.minimum(link.end_s, end) - np.maximum(link.start_s, start)
    busy = np.clip(inside, 0.0, None)
    if link.share:
        busy = busy * np.array(link.share)
    return float(busy.sum())


def _share(busy_s: float, length_s: float) -> float:
    if length_s > 0:
        return float(busy_s / length_s)
    return 0.0
