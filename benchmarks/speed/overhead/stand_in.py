"""One worker of a pipeline in a process of its own: the others are stand-ins whose messages are
made beforehand.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.executor.communication.links import Ahead, End, LinkGroups, lane_of
from planner.executor.communication.messages import Layouts, Outgoing
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.context import PipelineContext
from planner.executor.run.loop import Groups, make_worker
from planner.executor.run.worker import Observers, PipelineWorker
from planner.formats.plan import Plan
from planner.model.spec import TrainingSpec
from planner.runtime import runtime_of
from planner.schedule.instructions import Instruction, Receive
from planner.workers.job import Job
from planner.workers.place import CPU, Place

FAKE = "fake"  # the backend of torch.distributed that does nothing
_Lane = tuple[int, int, dist.ProcessGroup]  # peer's rank, tag, group


@dataclass
class Neighbours:
    """The other workers' messages, in the order of this worker's receives, handed over when a
    receive is posted.
    """

    groups: LinkGroups
    wire: torch.device
    waiting: defaultdict[_Lane, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    spent_s: float = 0.0  # on handing over, which is the network's work and not the worker's

    def expect(self, instructions: Iterable[Instruction], layouts: Layouts) -> None:
        """Make the messages of all receives among `instructions`."""
        for receive in instructions:
            if isinstance(receive, Receive):
                layout, lane = layouts.layout(receive), lane_of(receive, dist.get_rank())
                values = {
                    slot.spec.name: torch.randn(slot.shape, device=self.wire) * 1e-3
                    for slot in layout.slots
                }
                message = Outgoing(layout, self.wire)
                message.fill(receive.unit, values)
                self.waiting[receive.peer_rank, lane.tag, self.groups.of(lane)].append(
                    message.buffer
                )

    def hand_over(self, lane: _Lane, buffer: Tensor) -> None:
        """Fill `buffer` with the next message."""
        began_s = time.thread_time()
        buffer.copy_(self.waiting[lane].popleft())
        self.spent_s += time.thread_time() - began_s

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Let receives take these messages; the call itself goes to a backend that does nothing."""
        post = End.receive

        def receive(end: End, buffer: Tensor) -> Any:
            self.hand_over((end.peer, end.tag, end.group), buffer)
            work = post(end, buffer)
            return _Filled(work, buffer) if buffer.device.type != "cpu" else work

        with patch.object(End, "receive", receive):
            yield


class _Filled:
    """The work of a receive on a device: what waits for it waits for the stream that fills the
    buffer.
    """

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer, self._runtime = work, buffer, runtime_of(buffer.device)
        self._filled = self._runtime.event()
        self._filled.record()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> bool:
        stream = self._runtime.current_stream(self._buffer.device)
        stream.wait_event(self._filled)
        self._runtime.keep(self._buffer, stream)
        return True


@contextmanager
def lone_rank(rank: int, world: int) -> Iterator[None]:
    """Be worker `rank` of `world`, in groups whose operations end at once."""
    new_group = dist.new_group

    def fake_group(*ranks: Any, **options: Any) -> dist.ProcessGroup:
        options.pop("pg_options", None)  # of NCCL
        group: dist.ProcessGroup = new_group(*ranks, **{**options, "backend": FAKE})
        return group

    environment = patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    with environment, patch.object(dist, "new_group", fake_group):
        dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def build(
    plan: Plan, spec: TrainingSpec, minibatches: int, place: Place = CPU
) -> tuple[PipelineContext, PipelineWorker, Neighbours, Ahead]:
    """Build the worker of this rank and its stream, with all messages of `minibatches` waiting for
    it at `place`.
    """
    context = pipeline_context(Job(model=spec.origin, plan=plan, steps=minibatches), spec, place)
    groups = Groups.create(context)
    neighbours = Neighbours(groups.links, place.wire)
    shared = {number: stage.shared for number, stage in context.stages.items()}
    neighbours.expect(
        context.stream(0, minibatches),
        Layouts(context.transfers, shared, context.data.size, with_scale=False),
    )
    worker, stream = (
        make_worker(context, groups, Observers(context.heartbeat)),
        Ahead(context.stream(0, minibatches)),
    )
    worker.links.follow(stream)
    return context, worker, neighbours, stream
