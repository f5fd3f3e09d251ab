"""A network whose links are shared as TCP shares them: whatever crosses a link at the same time gets equal parts of it.

Rates are max-min fair (Bertsekas & Gallager 1992, section 6.5.2): the link with the smallest equal part fixes the rates
of its transfers, and so on with what is left. They change whenever a transfer begins or ends, and then only for
transfers that share a link with it, directly or through others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

# So many transfers, the nearest to one that begins or ends, get new rates; those farther off keep theirs, though a part
# of a link may then be left over. Only pipelines of hundreds of busy links have more.
NEAREST = 128


class Busy(NamedTuple):
    """A time in which a link always carried something, and the part of its bandwidth that was used on average."""

    start_s: float
    end_s: float
    share: float


class Direction:
    """One direction of a link, what is on it, and what it carried."""

    __slots__ = ("_bytes", "_since_s", "busy", "bytes_per_s", "room", "unsettled", "users")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy: list[Busy] = []
        self.users: dict[_Transfer, None] = {}  # in the order in which they began
        self._since_s = 0.0
        self._bytes = 0.0
        # While rates are shared out: what is left of the bandwidth, and how many have no part of it yet.
        self.room, self.unsettled = 0.0, 0

    def enter(self, transfer: _Transfer, now_s: float) -> bool:
        """Put a transfer on the link; whether others are there."""
        if not self.users:
            self._since_s, self._bytes = now_s, 0.0
        self._bytes += transfer.left_bytes
        self.users[transfer] = None
        return len(self.users) > 1

    def leave(self, transfer: _Transfer, now_s: float) -> None:
        """It has ended."""
        del self.users[transfer]
        if not self.users and now_s > self._since_s:
            share = self._bytes / self.bytes_per_s / (now_s - self._since_s)
            self.busy.append(Busy(self._since_s, now_s, min(share, 1.0)))


@dataclass(frozen=True)
class Path:
    """What a transfer crosses, all at once.

    `bytes_per_s`: what it gets alone: the least of the links' bandwidths and of any limit of its own.
    """

    links: tuple[Direction, ...]
    bytes_per_s: float


class _Transfer:
    """Bytes on their way."""

    __slots__ = ("bytes_per_s", "done", "left_bytes", "limit_bytes_per_s", "links", "since_s", "version")

    def __init__(self, path: Path, size_bytes: float, done: Callable[[float], None], now_s: float) -> None:
        self.links, self.limit_bytes_per_s = path.links, path.bytes_per_s
        self.left_bytes, self.done = size_bytes, done
        self.bytes_per_s = 0.0  # since `since_s`, when `left_bytes` were left
        self.since_s = now_s
        self.version = 0  # of the rate


class FairNetwork:
    """Transfers in progress, and their rates.

    Attributes:
        next_s: when the next transfer ends, if none begins before; infinite without any.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._ends: list[tuple[float, int, int, _Transfer]] = []  # by time; of old versions, too
        self._number = count()

    def begin(self, now_s: float, path: Path, size_bytes: float, done: Callable[[float], None]) -> None:
        """Put `size_bytes` on the path; `done` is called with the time at which they are over.

        Args:
            now_s: no earlier than the begin or end before, and no later than `next_s`.
        """
        if size_bytes <= 0:
            done(now_s)
            return
        transfer = _Transfer(path, size_bytes, done, now_s)
        crowded = False
        for link in path.links:
            crowded |= link.enter(transfer, now_s)
        if crowded:
            self._share((transfer,), now_s)
        else:
            self._set_rate(transfer, path.bytes_per_s, now_s)
        self._look_ahead()

    def finish(self) -> None:
        """Go on to `next_s`, and end the transfer that ends then."""
        now_s, _, _, transfer = heapq.heappop(self._ends)
        transfer.version += 1
        neighbours: dict[_Transfer, None] = {}
        for link in transfer.links:
            link.leave(transfer, now_s)
            neighbours.update(link.users)
        if neighbours:
            self._share(neighbours, now_s)
        self._look_ahead()
        transfer.done(now_s)

    def _look_ahead(self) -> None:
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        self.next_s = ends[0][0] if ends else math.inf

    def _set_rate(self, transfer: _Transfer, bytes_per_s: float, now_s: float) -> None:
        moved = transfer.bytes_per_s * (now_s - transfer.since_s)
        transfer.left_bytes = max(0.0, transfer.left_bytes - moved)
        transfer.since_s, transfer.bytes_per_s = now_s, bytes_per_s
        transfer.version += 1
        end_s = now_s + transfer.left_bytes / bytes_per_s
        heapq.heappush(self._ends, (end_s, next(self._number), transfer.version, transfer))

    def _share(self, some: Iterable[_Transfer], now_s: float) -> None:
        """New rates for these, and for those that share links with them, near and far."""
        near, crowded = _connected(some)
        for transfer, bytes_per_s in _fair_rates(near, crowded):
            if bytes_per_s != transfer.bytes_per_s:
                self._set_rate(transfer, bytes_per_s, now_s)


def _fair_rates(near: dict[_Transfer, None], crowded: list[Direction]) -> list[tuple[_Transfer, float]]:
    """The rates of these transfers, which share these links; others on the links keep theirs."""
    if not crowded:
        return [(transfer, transfer.limit_bytes_per_s) for transfer in near]
    for link in crowded:
        link.room, link.unsettled = link.bytes_per_s, len(link.users)
        if len(near) >= NEAREST:
            _leave_to_others(link, near)
    rates: list[tuple[_Transfer, float]] = []
    left, by_limit, first = set(near), sorted(near, key=attrgetter("limit_bytes_per_s")), 0
    while left:
        part, tightest = math.inf, None
        for link in crowded:
            if link.unsettled and (equal := link.room / link.unsettled) < part:
                part, tightest = equal, link
        while by_limit[first] not in left:
            first += 1
        if tightest is None or by_limit[first].limit_bytes_per_s <= part:
            part, settled = by_limit[first].limit_bytes_per_s, by_limit[first : first + 1]
        else:
            settled = [transfer for transfer in tightest.users if transfer in left]
        for transfer in settled:
            left.remove(transfer)
            rates.append((transfer, part))
            for link in transfer.links:
                link.room = max(link.room - part, 0.0)
                link.unsettled -= 1
    return rates


def _leave_to_others(link: Direction, near: dict[_Transfer, None]) -> None:
    """Those on the link who keep their rates keep their part of it, unless that is more than an equal one."""
    others = [transfer.bytes_per_s for transfer in link.users if transfer not in near]
    link.unsettled -= len(others)
    equal = link.bytes_per_s * link.unsettled / len(link.users)
    link.room = max(link.bytes_per_s - sum(others), equal)


def _connected(some: Iterable[_Transfer]) -> tuple[dict[_Transfer, None], list[Direction]]:
    """The nearest transfers that these share links with, and the links that several of them are on."""
    near = dict.fromkeys(some)
    crowded: dict[Direction, None] = {}
    queue = list(near)
    for transfer in queue:  # which grows
        for link in transfer.links:
            if len(link.users) > 1 and link not in crowded:
                crowded[link] = None
                for other in link.users:
                    if other not in near and len(near) < NEAREST:
                        near[other] = None
                        queue.append(other)
    return near, list(crowded)
