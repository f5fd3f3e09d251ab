"""Messages over gloo: receives are posted ahead, so that a message travels while the worker computes.

A posted receive costs nothing but its buffer here. Where it is a kernel on the device, see `posted_in_runs`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from planner.devices.place import Place
from planner.executor.communication.groups import LinkGroups
from planner.executor.communication.links import LayoutOf, Links, Posted, Segments, SendLimits
from planner.executor.communication.routes import Route, route_of
from planner.schedule.instructions import POSTED, Instruction, Receive, Send


class _LookAhead:
    """The receives of a worker's stream, by route: all routes share one iteration over the stream.

    Args:
        rank: of the worker; what it sends to itself travels nowhere.
    """

    def __init__(self, stream: Iterator[Instruction], rank: int) -> None:
        self._receives = (each for each in stream if isinstance(each, Receive) and each.peer_rank != rank)
        self._passed: defaultdict[Route, deque[Receive]] = defaultdict(deque)

    def next_on(self, route: Route) -> Receive | None:
        """Return the next receive on `route`; None at the end."""
        passed = self._passed[route]
        while not passed:
            receive = next(self._receives, None)
            if receive is None:
                return None
            self._passed[route_of(receive)].append(receive)
        return passed.popleft()


class _Inbox:
    """The messages received on one route, in the order of the stream."""

    def __init__(self, upcoming: Callable[[], Receive | None], ahead: int, post: Callable[[Receive], Posted]) -> None:
        self._upcoming = upcoming
        self._ahead = ahead
        self._post = post
        self._posted: deque[Posted] = deque()
        for _ in range(ahead):
            self._post_next()

    def take(self, receive: Receive) -> Posted:
        """Wait for `receive`."""
        if not self._posted:
            self._posted.append(self._post(receive))  # the stream was not known in advance
        posted = self._posted.popleft()
        assert posted.receive == receive, (posted.receive, receive)
        # Posting takes time. Before the wait, it is hidden by it; after the wait, it would delay the computation.
        if self._ahead > 1:
            self._post_next()
        posted.wait()
        if self._ahead == 1:
            self._post_next()
        return posted

    def _post_next(self) -> None:
        receive = self._upcoming()
        if receive is not None:
            self._posted.append(self._post(receive))


class PostedAhead(Links):
    """Posts `POSTED` receives per route ahead, of the worker's stream as far as it is known.

    Args:
        groups, layout_of, limits, place: as of `Links`.
        instructions: returns a new iterator over the worker's stream.
    """

    def __init__(
        self,
        groups: LinkGroups,
        layout_of: LayoutOf,
        limits: SendLimits,
        place: Place,
        instructions: Callable[[], Segments],
    ) -> None:
        super().__init__(groups, layout_of, limits, place)
        self._ahead = _LookAhead(chain.from_iterable(instructions()), self._rank)
        self._inboxes: dict[Route, _Inbox] = {}

    def expect(self, under_way: Callable[[], Iterable[Receive]]) -> None:
        pass  # a send holds up nothing but itself

    def settle(self) -> None:
        pass  # each message is checked as it is taken

    def _take(self, receive: Receive) -> Posted:
        route = route_of(receive)
        inbox = self._inboxes.get(route)
        if inbox is None:
            # Gradients of shared weights are as large as the weights: a second buffer is not worth its memory.
            ahead = 1 if route.shared else POSTED
            inbox = self._inboxes[route] = _Inbox(partial(self._ahead.next_on, route), ahead, self._post)
        posted = inbox.take(receive)
        posted.check()
        return posted

    def _start(self, send: Send, route: Route, values: dict[str, Tensor]) -> None:
        self._post_send(route, self._packed(send, route, values))

    def _post(self, receive: Receive) -> Posted:
        layout = self._layout_of(receive)
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._place.wire)
        return self._post_receive(receive, layout, buffer)
