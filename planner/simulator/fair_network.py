"""A network whose links are shared as TCP flows share them: whatever crosses a link at the same
time gets equal parts.

Rates are max-min fair (Bertsekas & Gallager 1992, section 6.5.2): the link with the smallest equal
part fixes the rates of its flows, and the rest of the network is shared among the other flows in
the same way. Rates change whenever a flow starts or ends, and only for flows that share a link with
it, directly or through other flows.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from planner.formats.timeline import LinkUse

# When a flow starts or ends, at most this many flows, the nearest ones, get new rates. Those
# farther away keep theirs, so a part of a link may be left over. Only pipelines with hundreds of
# busy links have more.
NEAREST = 128


class BusyPeriod(NamedTuple):
    """A time in which a link carried something throughout."""

    start_s: float
    end_s: float
    share: float  # of its bandwidth, on average


@dataclass(eq=False, slots=True)
class LinkDirection:
    """One direction of a link, the flows on it, and what it carried."""

    bytes_per_s: float
    busy: list[BusyPeriod] = field(default_factory=list)
    flows: "dict[_Flow, None]" = field(
        default_factory=dict
    )  # in the order in which they started, so that results repeat
    _since_s: float = 0.0
    _bytes: float = 0.0
    # Used by `_fair_rates`: the bandwidth that is left, and how many flows have no rate yet.
    room: float = 0.0
    unsettled: int = 0

    def enter(self, flow: "_Flow", now_s: float) -> bool:
        """Add a flow; return whether it shares the link."""
        if not self.flows:
            self._since_s = now_s
            self._bytes = 0.0
        self._bytes += flow.left_bytes
        self.flows[flow] = None
        return len(self.flows) > 1

    def use(self, name: str, rank: int | None, sends: bool) -> LinkUse:
        """Return when the link was busy."""
        columns = zip(*self.busy, strict=True) if self.busy else ((), (), ())
        busy: dict[str, Any] = dict(zip(BusyPeriod._fields, columns, strict=True))
        return LinkUse(
            name=name, rank=rank, sends=sends, bandwidth_bytes_per_s=self.bytes_per_s, **busy
        )

    def leave(self, flow: "_Flow", now_s: float) -> None:
        """Remove a flow."""
        del self.flows[flow]
        if not self.flows and now_s > self._since_s:
            share = self._bytes / self.bytes_per_s / (now_s - self._since_s)
            self.busy.append(BusyPeriod(self._since_s, now_s, min(share, 1.0)))


class LinkPath(NamedTuple):
    """The links that a flow crosses, all at once."""

    links: tuple[LinkDirection, ...]
    # of a flow that shares none of them: the smallest bandwidth, or a limit of the path's own
    bytes_per_s: float


@dataclass(eq=False, slots=True)
class _Flow:
    links: tuple[LinkDirection, ...]
    limit_bytes_per_s: float
    left_bytes: float
    on_end: Callable[[float], None]
    since_s: float  # when `left_bytes` were left
    bytes_per_s: float = 0.0  # since then
    version: int = 0  # of the rate


class FairNetwork:
    """Flows in progress, and their rates."""

    def __init__(self) -> None:
        # when the next flow ends, if none starts before; infinite without flows
        self.next_s = math.inf
        self.last_s = 0.0  # when the last flow has ended
        # Expected ends, by time. A flow whose rate changes gets a new entry; the old one is
        # recognised by its version. The number in between breaks ties by age, because flows
        # themselves cannot be compared.
        self._ends: list[tuple[float, int, int, _Flow]] = []
        self._number = count()

    def start(
        self, now_s: float, path: LinkPath, size_bytes: float, on_end: Callable[[float], None]
    ) -> None:
        """Send `size_bytes` over the path from `now_s`, no later than `next_s`; call `on_end` with
        when it ends.
        """
        if size_bytes <= 0:
            on_end(now_s)
            return

        flow = _Flow(*path, size_bytes, on_end, now_s)
        if sum(link.enter(flow, now_s) for link in path.links):  # enters all of them
            self._share((flow,), now_s)
        else:
            self._set_rate(flow, path.bytes_per_s, now_s)

        self._look_ahead()

    def finish_next(self) -> None:
        """Advance to `next_s` and end the flow that ends then."""
        now_s, _, _, flow = heapq.heappop(self._ends)
        flow.version += 1
        self.last_s = now_s
        affected: dict[_Flow, None] = {}
        for link in flow.links:
            link.leave(flow, now_s)
            affected.update(link.flows)

        if affected:
            self._share(affected, now_s)
        # `on_end` may start the next flow at once, so the network must be consistent before it is
        # called.
        self._look_ahead()
        flow.on_end(now_s)

    def _look_ahead(self) -> None:
        """Drop old entries, and note when the next flow ends."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)

        self.next_s = math.inf
        if ends:
            self.next_s = ends[0][0]

    def _set_rate(self, flow: _Flow, bytes_per_s: float, now_s: float) -> None:
        moved = flow.bytes_per_s * (now_s - flow.since_s)
        flow.left_bytes = max(0.0, flow.left_bytes - moved)
        flow.since_s = now_s
        flow.bytes_per_s = bytes_per_s
        flow.version += 1
        end_s = now_s + flow.left_bytes / bytes_per_s
        heapq.heappush(self._ends, (end_s, next(self._number), flow.version, flow))

    def _share(self, some: Iterable[_Flow], now_s: float) -> None:
        near, crowded = _connected(some)
        for flow, bytes_per_s in _fair_rates(near, crowded):
            # A flow that keeps its rate keeps its entry, too: most changes reach few of the
            # connected flows.
            if bytes_per_s != flow.bytes_per_s:
                self._set_rate(flow, bytes_per_s, now_s)


def _fair_rates(near: dict[_Flow, None], crowded: list[LinkDirection]) -> list[tuple[_Flow, float]]:
    """Share the links `crowded` among the flows `near`: each step settles those of the tightest
    link, or a limit.
    """
    if not crowded:
        return [(flow, flow.limit_bytes_per_s) for flow in near]
    for link in crowded:
        link.room = link.bytes_per_s
        link.unsettled = len(link.flows)
        if len(near) >= NEAREST:
            # Take what others use out of the link's room, but leave an equal part to each flow of
            # `near`.
            others = [flow.bytes_per_s for flow in link.flows if flow not in near]
            link.unsettled -= len(others)
            equal_part = link.bytes_per_s * link.unsettled / len(link.flows)
            link.room = max(link.bytes_per_s - sum(others), equal_part)

    rates: list[tuple[_Flow, float]] = []
    left = set(near)
    by_limit = sorted(near, key=attrgetter("limit_bytes_per_s"))
    first = 0  # in `by_limit`, of those that are left
    while left:
        part = math.inf
        tightest = None
        for link in crowded:
            if link.unsettled:
                equal = link.room / link.unsettled
                if equal < part:
                    part = equal
                    tightest = link

        while by_limit[first] not in left:
            first += 1
        limited = by_limit[first]
        if tightest is None or limited.limit_bytes_per_s <= part:
            part = limited.limit_bytes_per_s
            settled = [limited]
        else:
            settled = [flow for flow in tightest.flows if flow in left]

        for flow in settled:
            left.remove(flow)
            rates.append((flow, part))
            for link in flow.links:
                link.room = max(link.room - part, 0.0)  # rounding may take it below 0
                link.unsettled -= 1

    return rates


def _connected(some: Iterable[_Flow]) -> tuple[dict[_Flow, None], list[LinkDirection]]:
    near = dict.fromkeys(some)
    crowded: dict[LinkDirection, None] = {}
    queue = list(near)
    for flow in queue:  # breadth first: the queue grows while it is walked
        for link in flow.links:
            if len(link.flows) > 1 and link not in crowded:
                crowded[link] = None
                for other in link.flows:
                    if other not in near and len(near) < NEAREST:
                        near[other] = None
                        queue.append(other)

    return near, list(crowded)
