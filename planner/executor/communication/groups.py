"""Process groups for data: made by all workers in one order, and used once in that order before training.

NCCL makes the communicator of a group at the group's first use, in a call that returns only when every member makes
its own first call. Two workers whose first calls are on different groups would wait for each other for ever: stages
that share a weight both begin with a send. So every group is used once, with nothing to say, before any worker posts
what it has to say. The order is one list that all workers go through, each taking part where it is a member: the first
entry that is not done yet always has all its members at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.devices.place import Place
from planner.executor.communication.control import GLOO
from planner.executor.communication.place import TIMEOUT
from planner.executor.communication.routes import Lane, Route, lanes_of
from planner.schedule.instructions import Instruction

Streams = Mapping[int, Iterable[Instruction]]  # of all workers, by rank


def wait_for_device(device: torch.device) -> None:
    """Let the host wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DataGroups:
    """Makes a worker's process groups for data. All workers make the same, in the same order, members or not.

    Args:
        place: where the worker computes, and with which backend it sends.
        timeout: for one message or all-reduce.
    """

    def __init__(self, place: Place, timeout: timedelta = TIMEOUT) -> None:
        self._place = place
        self._timeout = timeout
        self._unused: list[Callable[[torch.Tensor], dist.Work | None]] = []

    @property
    def tagged(self) -> bool:
        """Whether messages of one group are told apart by tags, so that one group does for many."""
        return self._place.backend == GLOO

    def of(self, ranks: Iterable[int] | None) -> dist.ProcessGroup:
        """Make a group of `ranks`, or of all workers, for all-reduces and broadcasts."""
        members = list(range(dist.get_world_size()) if ranks is None else ranks)
        group = self._make(members)
        if dist.get_rank() in members:
            self._unused.append(lambda token: dist.all_reduce(token, group=group, async_op=True))
        return group

    def between(self, sender: int, receiver: int) -> dist.ProcessGroup:
        """Make a group for messages from one worker to another."""
        group = self._make([sender, receiver])
        if dist.get_rank() == sender:
            self._unused.append(lambda token: dist.isend(token, receiver, group))
        elif dist.get_rank() == receiver:
            self._unused.append(lambda token: dist.irecv(token, sender, group))
        return group

    def use_once(self) -> None:
        """Use each group that was not used yet, in the order of their making; all workers call it.

        Before it the stages must have run once on the device, and nothing may be pending: to make a communicator NCCL
        allocates memory, which may wait for the whole device.
        """
        unused, self._unused = self._unused, []
        if self.tagged:
            return  # gloo has connected all members when a group is made
        for use in unused:
            work = use(torch.zeros(1, device=self._place.wire))
            assert work is not None
            work.wait()
            wait_for_device(self._place.wire)

    def _make(self, members: list[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(members, timeout=self._timeout, backend=self._place.backend)
        return group


@dataclass(frozen=True)
class LinkGroups:
    """Process groups for messages.

    gloo matches messages by their tags, so two groups of all workers do: one per direction, because activations and
    gradients must not queue behind each other.

    NCCL has no tags. Operations on one communicator run in the order of their calls, and match by that order alone;
    two workers agree on it for one lane only. So each lane has a group of its own, of two workers. That also keeps one
    worker's messages from queueing behind another's.
    """

    activations: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    by_lane: Mapping[Lane, dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def create(cls, groups: DataGroups, streams: Callable[[], Streams]) -> LinkGroups:
        """Make the groups.

        Args:
            groups: makes them.
            streams: of all workers, long enough that every pair that ever exchanges messages does.
        """
        if groups.tagged:
            return cls(groups.of(None), groups.of(None))
        return cls(by_lane={lane: groups.between(lane.sender, lane.receiver) for lane in lanes_of(streams())})

    def of(self, route: Route) -> dist.ProcessGroup:
        """Return the group of a route's messages."""
        group = self.activations if route.forward else self.gradients
        return group or self.by_lane[route.lane(dist.get_rank())]
