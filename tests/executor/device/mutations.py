"""Faults to put into the executor: each takes away one wait, or changes one order, that a device
needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.communication import links, nccl_links
from planner.executor.communication.gradients import WholeBucket
from planner.executor.communication.later import MOST, Later, _Slot
from planner.executor.communication.links import End, GlooLinks, LinkGroups, Links, Posted
from planner.executor.communication.nccl_links import NCCLLinks, _Buffer
from planner.executor.communication.sharding import DividedBucket
from planner.executor.run.worker import PipelineWorker
from planner.runtime import runtime_of
from planner.schedule.instructions import Receive
from planner.workers import groups
from planner.workers.groups import DataGroups
from tests.executor.device.simulated import SimulatedRuntime


@contextmanager
def read_before_wait() -> Iterator[None]:
    """A message is used before the stream has waited for it."""
    with patch.object(Posted, "wait", lambda _: None):
        yield


@contextmanager
def no_wait_for_a_free_buffer() -> Iterator[None]:
    """A receive begins while the device still works with what was in its memory."""

    def on_side_stream(own: NCCLLinks, buffer: _Buffer) -> Any:
        return own._runtime.on(own._side)

    with patch.object(NCCLLinks, "_on_side_stream", on_side_stream):
        yield


@contextmanager
def no_record_stream() -> Iterator[None]:
    """Memory of the side stream is given out again while the computation uses it."""
    with patch.object(SimulatedRuntime, "keep", lambda *_: None):
        yield


@contextmanager
def spare_buffer_without_its_event() -> Iterator[None]:
    """The buffer for the next message of a lane forgets when it is free."""

    def allocated(own: NCCLLinks, size_bytes: int) -> _Buffer:
        return _Buffer(torch.empty(size_bytes, dtype=torch.uint8, device=own._place.wire))

    with patch.object(NCCLLinks, "_allocated", allocated):
        yield


@contextmanager
def send_buffer_refilled_before_its_send() -> Iterator[None]:
    """A message is filled again without a wait for the send before."""

    def finish(own: Links, end: End, keep: int) -> None:
        while len(end.sent) > keep:
            end.left = end.sent.popleft()[1]

    with patch.object(Links, "_finish", finish):
        yield


@contextmanager
def send_buffer_refilled_at_once() -> Iterator[None]:
    """A message is filled again as soon as it was posted, whatever number may be on its way."""
    original = Links._post_send

    def post(own: Links, end: End, message: Any) -> None:
        original(own, end, message)
        end.left = message

    with patch.object(Links, "_post_send", post):
        yield


@contextmanager
def all_reduce_not_waited_for() -> Iterator[None]:
    """The optimizer steps with gradients whose sum may not have come."""

    def sums(own: WholeBucket) -> tuple[Tensor, Tensor]:
        count = len(own.parameters)
        found = own._flat[:-count], own._flat[-count:]
        del own._work, own._flat
        return found

    with patch.object(WholeBucket, "_sums", sums):
        yield


@contextmanager
def weights_of_replicas_not_waited_for() -> Iterator[None]:
    """Replicas that divide an optimizer go on before the others' weights have come."""
    original = DividedBucket.post_weights

    def post(own: DividedBucket) -> Any:
        original(own)
        return lambda: None

    with patch.object(DividedBucket, "post_weights", post):
        yield


@contextmanager
def host_reads_before_its_copy() -> Iterator[None]:
    """A loss or a header is read on the host before it has been copied there."""

    def hand_over(own: Later) -> None:
        slot, value, reader = own._coming.popleft()
        reader(value)
        own._free.append(slot)

    with patch.object(Later, "_hand_over", hand_over):
        yield


@contextmanager
def first_uses_in_another_order() -> Iterator[None]:
    """Workers make their communicators in different orders."""

    def other_way_round(own: DataGroups) -> None:
        for use in own._unused[:: -1 if dist.get_rank() % 2 else 1]:
            use(torch.zeros(1))  # type: ignore[call-arg, unused-ignore]

    with patch.object(DataGroups, "use_once", other_way_round):
        yield


@contextmanager
def loss_read_every_microbatch() -> Iterator[None]:
    """The host waits for each loss."""
    original = PipelineWorker._log_loss

    def log(own: PipelineWorker, unit: Any, loss: Tensor | None) -> None:
        if loss is not None:
            float(loss)
        original(own, unit, loss)

    with patch.object(PipelineWorker, "_log_loss", log):
        yield


@contextmanager
def allocation_between_posts() -> Iterator[None]:
    """Memory for a receive is allocated after the sends before it were posted."""

    def post(own: NCCLLinks, first: Any = None) -> None:
        for end, message in own._waiting:
            own._post_send(end, message)
        own._waiting.clear()
        for receive in (first, *own._run):
            if isinstance(receive, Receive) and receive not in own._early:
                own._posted.append(own._post_into(receive, *own._prepared(receive)))

    with patch.object(NCCLLinks, "_post", post):
        yield


@contextmanager
def one_communicator_for_both_directions() -> Iterator[None]:
    """Two workers send to each other over one communicator."""
    original = LinkGroups.__init__

    def make(own: LinkGroups, *arguments: Any) -> None:
        original(own, *arguments)
        first: dict[object, Any] = {}
        for lane in own._by_lane:
            pair = frozenset((lane.sender, lane.receiver))
            own._by_lane[lane] = first.setdefault(pair, own._by_lane[lane])

    with patch.object(LinkGroups, "__init__", make):
        yield


@contextmanager
def receive_waits_for_all_compute() -> Iterator[None]:
    """A receive begins after all that the device was given before, though its memory has long been
    free.
    """
    with patch.object(NCCLLinks, "_on_side_stream", lambda *_: nullcontext()):
        yield


@contextmanager
def no_device_wait_at_first_use() -> Iterator[None]:
    """A communicator is made while another's first message is under way."""
    with patch.object(groups, "wait_for_device", lambda _: None):
        yield


@contextmanager
def header_never_checked() -> Iterator[None]:
    """Nobody looks whether it is the right message that came."""
    with patch.object(links.Posted, "later_check", lambda _: lambda word: None):
        yield


@contextmanager
def memory_taken_when_needed() -> Iterator[None]:
    """Workers take no memory before the first message: only what their first minibatches need."""
    with patch.object(SimulatedRuntime, "reserve", lambda *_: None):
        yield


@contextmanager
def pinned_memory_taken_when_needed() -> Iterator[None]:
    """The host takes pinned memory for a loss or a header when it comes, until there is enough."""
    original = Later.read

    def begin(own: Later, _: torch.device, most: int = MOST) -> None:
        own._asynchronous, own._most, own._coming, own._free = True, most, deque(), []

    def read(own: Later, value: Tensor, reader: Any) -> None:
        own._free = own._free or [_Slot(runtime_of("cpu"))]
        original(own, value, reader)

    with patch.object(Later, "__init__", begin), patch.object(Later, "read", read):
        yield


@contextmanager
def posting_ahead() -> Iterator[None]:
    """Receives are posted before they are needed, as over gloo."""
    with patch.object(nccl_links, "NCCLLinks", GlooLinks):
        yield


@contextmanager
def no_first_uses() -> Iterator[None]:
    """Communicators are made whenever a message comes first."""
    with patch.object(DataGroups, "use_once", lambda _: None):
        yield
