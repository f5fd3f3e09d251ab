"""Messages that are under way while the pipeline evaluates.

Under asynchronous schedules a stage is ahead of the next one when both evaluate: it has sent what the other takes only
after the evaluation. Over NCCL such a send may stay on the sender's device until the receiver posts. If the sender's
host then waits for its device, which it may at the first kernels of an evaluation, it sends no evaluation data, and the
receiver waits for these. So the receiver posts what is under way before it evaluates.
"""

from __future__ import annotations

from planner.executor.run.evaluator import until_updated
from planner.schedule.instructions import Receive, Send, matching_receive
from planner.schedule.schedule import PipelineShape
from planner.schedule.streams.segments import segment_stream


class UnderWay:
    """Follows the streams of all workers from one evaluation to the next.

    Args:
        first: minibatch that the segment begins with.
        last: minibatch that it ends before.
    """

    def __init__(self, shape: PipelineShape, rank: int, first: int, last: int) -> None:
        self._shape = shape
        self._rank = rank
        self._first = first
        self._streams = {r: segment_stream(shape, stage, r, first, last) for r, stage in shape.first_stages.items()}
        self._sent: dict[Receive, None] = {}  # in the order of sending, and not yet taken
        self._point = first

    def at(self, point: int) -> list[Receive]:
        """Return what the worker has yet to take of what is sent before the evaluation after minibatch `point`."""
        taken = []
        for rank, stream in self._streams.items():
            stages = self._shape.stages_of(rank)
            updates = {stage: self._rounds(stage, point) - self._rounds(stage, self._point) for stage in stages}
            for instruction in until_updated(stream, updates):
                if isinstance(instruction, Send) and instruction.peer_rank == self._rank != rank:
                    self._sent[matching_receive(instruction, rank)] = None
                elif isinstance(instruction, Receive) and rank == self._rank:
                    taken.append(instruction)
        for receive in taken:
            self._sent.pop(receive, None)
        self._point = point
        return list(self._sent)

    def _rounds(self, stage: int, point: int) -> int:
        """Return the updates of a stage up to minibatch `point`."""
        return -(-(point - self._first) // self._shape.minibatches_per_update(stage))
