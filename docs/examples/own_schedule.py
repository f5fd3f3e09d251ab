"""A schedule of one's own: GPipe whose backwards begin with the newest microbatch.

The last stage has just run the forward of that one, so it need not wait, and its activations are
still in the cache.

    plan solve --schedule-from own_schedule.py --schedule gpipe-newest-first \
        --gpus 2 --bandwidth 1Gbps
    plan simulate --schedule-from own_schedule.py
    plan train model.py --schedule-from own_schedule.py --steps 20
"""

from collections.abc import Iterator

import planner
from planner.schedule.instructions import Instruction
from planner.schedule.pieces import backward, finish_minibatch, forward
from planner.schedule.schedule import Count, PipelineShape, Synchronous


class NewestFirst(Synchronous):
    name = "gpipe-newest-first"
    known_as = "GPipe with its backwards in the reverse order"
    title = "gpipe-newest-first, {microbatches} microbatches per minibatch"
    summary = "synchronous, all forwards of a minibatch, then its backwards from the newest on"
    alternates = False

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """All microbatches of a replica are between forward and backward."""
        return -(-microbatches // replicas)

    def minibatch(
        self, shape: PipelineShape, stage: int, rank: int, minibatch: int
    ) -> Iterator[Instruction]:
        own = list(shape.units_of(stage, rank, minibatch))
        for unit in own:
            yield from forward(shape, stage, unit)
        for unit in reversed(own):
            yield from backward(shape, stage, unit, last_of_round=unit == own[0])
        yield from finish_minibatch(shape, [stage], rank, minibatch)


NEWEST_FIRST = planner.register_schedule(NewestFirst())
