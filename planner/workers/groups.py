"""Process groups for data: made by all workers in one order, and used once in that order before
training.

NCCL makes the communicator of a group at the group's first use, in a call that returns only when
every member makes its own first call. Two workers whose first calls are on different groups would
wait for each other for ever.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.runtime import runtime_of
from planner.workers.place import Place

GLOO = "gloo"  # the backend of control traffic, whatever device computes
# NCCL's watchdog calls an operation lost that takes longer, and counts from when it was posted. A
# send whose receiver evaluates first, or writes a checkpoint, may wait for hours. Workers that hang
# are found by their heartbeats.
_POSTED_FOR = timedelta(days=1)


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    runtime_of(device).synchronize(device)


# NCCL gives an operation up to 32 thread blocks, and a receive that waits holds them: on a GPU they
# are taken from the computation. Messages between two workers need few of them to fill a link.
MESSAGE_BLOCKS = 4
# PyTorch has a pool of 32 streams. One is for computation, and two are for receives.
STREAMS = 32 - 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardGroups:
    """The groups of a worker whose replicas divide weights or gradients: see
    `planner.stages.sharding`.
    """

    # of all groups that divide them; those of one place in each have the same part
    ranks: Sequence[Sequence[int]]
    dividing: dist.ProcessGroup  # of this worker and those with which it divides them
    # of those that have the same part, if there are others
    repeating: dist.ProcessGroup | None = None


class DataGroups:
    """Makes a worker's process groups for data. All workers make the same, in the same order,
    members or not.
    """

    def __init__(self, place: Place, timeout: timedelta) -> None:
        self._place = place
        # Whether messages of one group are told apart by tags, so that one group does for many.
        self.tagged = place.backend == GLOO
        self._timeout = timeout
        if not self.tagged:
            self._timeout = max(timeout, _POSTED_FOR)
        self._unused: list[Callable[[torch.Tensor], dist.Work | None]] = []
        self._own = 0  # groups that this worker is in

    def for_collectives(self, ranks: Iterable[int] | None) -> dist.ProcessGroup:
        """Make a group of `ranks`, or of all workers, for all-reduces and broadcasts."""
        members = list(range(dist.get_world_size()) if ranks is None else ranks)
        group = self._make(members)
        if dist.get_rank() in members:
            self._unused.append(lambda token: dist.all_reduce(token, group=group, async_op=True))
        return group

    def for_shards(self, groups: Sequence[Sequence[int]]) -> ShardGroups:
        """Make the groups in which all workers divide what they have, and those of the same places
        in each.
        """
        if len(groups) == 1:
            return ShardGroups(groups, self.for_collectives(None))
        rank = dist.get_rank()
        divide = [(ranks, self.for_collectives(ranks)) for ranks in groups]
        repeat = [(ranks, self.for_collectives(ranks)) for ranks in zip(*groups, strict=True)]
        (dividing,) = (made for ranks, made in divide if rank in ranks)
        (repeating,) = (made for ranks, made in repeat if rank in ranks)
        return ShardGroups(groups, dividing, repeating)

    def for_messages(self, sender: int, receiver: int) -> dist.ProcessGroup:
        """Return a group of two workers for messages from one to the other."""
        more: dict[str, Any] = {}
        # or else NCCL says that it is not there
        if self._place.backend == "nccl" and dist.is_nccl_available():
            # PyTorch's stub has NCCL on some systems only.
            options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined, unused-ignore]
            options.config.max_ctas = MESSAGE_BLOCKS
            # new_group warns where it differs from its own argument
            options._timeout = self._timeout
            more["pg_options"] = options

        group = self._make([sender, receiver], **more)
        if dist.get_rank() == sender:
            self._unused.append(lambda token: dist.isend(token, receiver, group))
        elif dist.get_rank() == receiver:
            self._unused.append(lambda token: dist.irecv(token, sender, group))

        return group

    def use_once(self) -> None:
        """Use each group that was not used yet, in the order of their making; all workers call it.

        Before it the stages must have run once on the device, and nothing may be pending: to make a
        communicator NCCL allocates memory, which may wait for the whole device.
        """
        unused = self._unused
        self._unused = []
        if self.tagged:
            return  # gloo has connected all members when a group is made
        if self._own > STREAMS:
            _log.warning(
                f"rank {dist.get_rank()} has {self._own} groups of {self._place.backend}, and a "
                f"device runs {STREAMS} "
                "streams of them side by side: messages may wait for others, perhaps for "
                "ever. Stages with fewer "
                "replicas need fewer groups."
            )

        for use in unused:
            work = use(torch.zeros(1, device=self._place.wire))
            assert work is not None
            work.wait()
            wait_for_device(self._place.wire)

    def _make(self, members: list[int], **more: Any) -> dist.ProcessGroup:
        self._own += dist.get_rank() in members
        group: dist.ProcessGroup = dist.new_group(
            members, timeout=self._timeout, backend=self._place.backend, **more
        )
        return group
