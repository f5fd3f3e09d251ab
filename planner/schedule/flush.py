"""1f1b-flush: 1F1B within each minibatch, which drains before its update."""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.instructions import Instruction
from planner.schedule.pieces import backward, finish_minibatch, forward, one_forward_one_backward
from planner.schedule.schedule import Count, PipelineShape, Synchronous, warm_up_depth


class Flush(Synchronous):
    """PipeDream-Flush: as fast as GPipe, with no more units in flight than 1F1B has."""

    name = "1f1b-flush"
    title = "1f1b-flush, {microbatches} microbatches per minibatch"
    summary = "synchronous, as gpipe in less memory"
    updates = "after all microbatches of a minibatch"
    holds = "d microbatches"
    source = "Narayanan et al., PipeDream-2BW, ICML 2021, section 3.2"
    deepens = True
    torch_name = "Schedule1F1B"

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return the warm-up depth, or the replica's share of the microbatches where that is less."""
        most, depth = share(microbatches, replicas), warm_up_depth(replicas, gpus_after)
        return most + (depth - most) * (depth < most)  # the lesser of the two, also for arrays

    def minibatch(self, shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
        mine = shape.units_of(stage, rank, minibatch)
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            if is_forward:
                yield from forward(shape, stage, mine[index])
            else:
                yield from backward(shape, stage, mine[index], last_of_round=index == len(mine) - 1)
        yield from finish_minibatch(shape, [stage], rank, minibatch)


def share(microbatches: int, replicas: Count) -> Count:
    """Return how many of a minibatch's microbatches the busiest replica runs."""
    return -(-microbatches // replicas)


FLUSH = Flush()
