"""Messages over gloo: receives are posted ahead, so that a message travels while the worker computes.

A posted receive costs nothing but its buffer here. Where it is a kernel on the device, see `posted_in_runs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from planner.devices.place import Place
from planner.executor.communication.groups import LinkGroups
from planner.executor.communication.links import LayoutOf, Links, Posted, Segments, SendLimits
from planner.executor.communication.messages import pack
from planner.executor.communication.routes import Route, route_of
from planner.schedule.instructions import POSTED, Receive, Send


class _Inbox:
    """The messages received on one route, in the order of the stream."""

    def __init__(self, upcoming: Iterator[Receive], ahead: int, post: Callable[[Receive], Posted]) -> None:
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
        receive = next(self._upcoming, None)
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
        self._instructions = instructions
        self._inboxes: dict[Route, _Inbox] = {}

    def settle(self) -> None:
        pass  # each message is checked as it is taken

    def _take(self, receive: Receive) -> Posted:
        route = route_of(receive)
        if route not in self._inboxes:
            stream = chain.from_iterable(self._instructions())
            upcoming = (i for i in stream if isinstance(i, Receive) and route_of(i) == route)
            # Gradients of shared weights are as large as the weights: a second buffer is not worth its memory.
            self._inboxes[route] = _Inbox(upcoming, 1 if route.shared else POSTED, self._post)
        posted = self._inboxes[route].take(receive)
        posted.check()
        return posted

    def _start(self, send: Send, route: Route, values: dict[str, Tensor]) -> None:
        self._post_send(route, pack(self._layout_of(send), send.unit, values, self._place.wire))

    def _post(self, receive: Receive) -> Posted:
        layout = self._layout_of(receive)
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._place.wire)
        return self._post_receive(receive, layout, buffer)
