"""Process groups for the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from planner.devices.groups import DataGroups
from planner.executor.communication.routes import Lane, Route, lanes_of
from planner.schedule.instructions import Instruction

Streams = Mapping[int, Iterable[Instruction]]  # of all workers, by rank


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
            streams: of all workers, long enough that every pair that ever exchanges messages does.
        """
        if groups.tagged:
            return cls(groups.of(None), groups.of(None))
        return cls(by_lane={lane: groups.between(lane.sender, lane.receiver) for lane in lanes_of(streams())})

    def of(self, route: Route) -> dist.ProcessGroup:
        """Return the group of a route's messages."""
        group = self.activations if route.forward else self.gradients
        return group or self.by_lane[route.lane(dist.get_rank())]
