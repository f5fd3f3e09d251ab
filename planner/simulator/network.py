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

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy: list[Busy] = []
        self.users: dict[_Transfer, None] = {}  # in the order in which they began
        self._since_s = 0.0
        self._bytes = 0.0

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

    __slots__ = ("bytes_per_s", "done", "left_bytes", "path", "since_s", "version")

    def __init__(self, path: Path, size_bytes: float, done: Callable[[float], None], now_s: float) -> None:
        self.path, self.left_bytes, self.done = path, size_bytes, done
        self.bytes_per_s = 0.0  # since `since_s`, when `left_bytes` were left
        self.since_s = now_s
        self.version = 0  # of the rate


class FairNetwork:
    """Transfers in progress, and their rates."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int, _Transfer]] = []  # by time; of old versions, too
        self._number = count()

    @property
    def next_s(self) -> float:
        """When the next transfer ends, if none begins before; infinite without any."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        return ends[0][0] if ends else math.inf

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

    def finish(self) -> None:
        """Go on to `next_s`, and end the transfer that ends then."""
        now_s = self.next_s
        _, _, _, transfer = heapq.heappop(self._ends)
        transfer.version += 1
        neighbours: dict[_Transfer, None] = {}
        for link in transfer.path.links:
            link.leave(transfer, now_s)
            neighbours.update(link.users)
        if neighbours:
            self._share(neighbours, now_s)
        transfer.done(now_s)

    def _set_rate(self, transfer: _Transfer, bytes_per_s: float, now_s: float) -> None:
        if bytes_per_s == transfer.bytes_per_s:
            return
        moved = transfer.bytes_per_s * (now_s - transfer.since_s)
        transfer.left_bytes = max(0.0, transfer.left_bytes - moved)
        transfer.since_s, transfer.bytes_per_s = now_s, bytes_per_s
        transfer.version += 1
        end_s = now_s + transfer.left_bytes / bytes_per_s
        heapq.heappush(self._ends, (end_s, next(self._number), transfer.version, transfer))

    def _share(self, some: Iterable[_Transfer], now_s: float) -> None:
        """New rates for these, and for those that share links with them, near and far."""
        near, crowded = _connected(some)
        room, waiting = {}, {}
        for link in crowded:
            inside = {transfer: None for transfer in link.users if transfer in near}
            outside = (transfer.bytes_per_s for transfer in link.users if transfer not in near)
            equal = link.bytes_per_s * len(inside) / len(link.users)  # which those that keep their rates must leave
            room[link], waiting[link] = max(link.bytes_per_s - sum(outside), equal), inside
        left = dict(near)
        while left:
            tightest = min(waiting, key=lambda link: room[link] / len(waiting[link]), default=None)
            part = math.inf if tightest is None else room[tightest] / len(waiting[tightest])
            slowest = min(left, key=lambda transfer: transfer.path.bytes_per_s)
            if tightest is None or slowest.path.bytes_per_s <= part:
                part, settled = slowest.path.bytes_per_s, [slowest]
            else:
                settled = list(waiting[tightest])
            for transfer in settled:
                del left[transfer]
                self._set_rate(transfer, part, now_s)
                for link in transfer.path.links:
                    if link in waiting and transfer in waiting[link]:
                        room[link] = max(room[link] - part, 0.0)
                        del waiting[link][transfer]
                        if not waiting[link]:
                            del waiting[link]


def _connected(some: Iterable[_Transfer]) -> tuple[dict[_Transfer, None], list[Direction]]:
    """The nearest transfers that these share links with, and the links that several of them are on."""
    near = dict.fromkeys(some)
    crowded: dict[Direction, None] = {}
    queue = list(near)
    for transfer in queue:  # which grows
        for link in transfer.path.links:
            if len(link.users) > 1 and link not in crowded:
                crowded[link] = None
                for other in link.users:
                    if other not in near and len(near) < NEAREST:
                        near[other] = None
                        queue.append(other)
    return near, list(crowded)
