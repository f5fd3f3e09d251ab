"""zb-h1: 1f1b-flush with backwards in two parts, of which the second fills the bubble."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from planner.schedule.flush import FLUSH, Flush, share
from planner.schedule.instructions import BackwardWeight, Instruction, Unit
from planner.schedule.pieces import backward, finish_minibatch, forward, one_forward_one_backward
from planner.schedule.schedule import PipelineShape, Schedule, warm_up_depths


class ZeroBubble(Flush):
    """Gradients of weights come some backwards after those of activations, which other stages wait for.

    A unit is in flight until its second part is done: the later a stage, the longer that waits, so that all stages
    hold what the first one does. The delay matters where the pipeline fills and where it drains. In between all
    workers are busy, and a backward in one part computes less: it finds what it needs in the cache.
    """

    name = "zb-h1"
    title = "zb-h1, backwards in two parts, {microbatches} microbatches per minibatch"
    summary = "synchronous, as 1f1b-flush, but the gradients of weights fill the bubble"
    updates = "after all microbatches of a minibatch"
    holds = "what the first stage has, some of which wait for their gradients of weights"
    source = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2"
    splits_backward = True
    deepens = False
    torch_name = "Schedule1F1B"

    @property
    def solved_as(self) -> Schedule:
        return FLUSH

    def depths_of(self, shape: PipelineShape) -> tuple[int, ...]:
        """Return the warm-up depth of the first stage for every stage that splits its backwards."""
        depths = warm_up_depths(shape.replicas)
        wanted = (max(depths[0], depth) if shape.splits(stage) else depth for stage, depth in enumerate(depths))
        return tuple(min(share(shape.microbatches, r), depth) for r, depth in zip(shape.replicas, wanted, strict=True))

    def minibatch(self, shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
        if not shape.splits(stage):
            yield from super().minibatch(shape, stage, rank, minibatch)
            return
        mine = shape.units_of(stage, rank, minibatch)
        ahead = min(shape.in_flight(stage), warm_up_depths(shape.replicas)[stage])
        behind = shape.in_flight(stage) - ahead
        draining = max(1, shape.in_flight(stage) - 1)
        waiting: deque[Unit] = deque()
        for is_forward, index in one_forward_one_backward(len(mine), ahead):
            if is_forward:
                yield from forward(shape, stage, mine[index])
            elif behind <= index < len(mine) - draining:
                yield from backward(shape, stage, mine[index], last_of_round=False)
            else:
                yield from backward(shape, stage, mine[index], last_of_round=False, split=True)
                waiting.append(mine[index])
                if len(waiting) > behind:
                    last = index == len(mine) - 1 and len(waiting) == 1
                    yield BackwardWeight(stage, waiting.popleft(), last_of_round=last)
        while waiting:
            yield BackwardWeight(stage, waiting.popleft(), last_of_round=not waiting)
        yield from finish_minibatch(shape, [stage], rank, minibatch)


ZB_H1 = ZeroBubble()
