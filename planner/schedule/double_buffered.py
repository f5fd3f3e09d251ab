"""2bw: 1F1B over the microbatches of all minibatches, with two versions of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.flush import FLUSH
from planner.schedule.instructions import Instruction, Unit
from planner.schedule.pieces import backward, finish_minibatch, forward, one_forward_one_backward
from planner.schedule.schedule import Count, PipelineShape, Schedule, warm_up_depth


class DoubleBuffered(Schedule):
    """PipeDream-2BW: minibatch t runs at the version that minibatch t - 2 left, whatever is there since."""

    name = "2bw"
    title = "2bw, two weight versions, {microbatches} microbatches per minibatch"
    summary = "asynchronous, with two weight versions and one update per minibatch of several microbatches"
    updates = "after all microbatches of a minibatch, while those of the next are under way"
    holds = "d microbatches"
    source = "Narayanan et al., PipeDream-2BW, ICML 2021, section 3.1"
    formula = "double-buffered"
    asynchronous = True
    placed = False
    deepens = True
    weight_versions = 2

    @property
    def drained(self) -> Schedule:
        return FLUSH

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return the warm-up depth; see `versions_suffice` for whether two versions do then."""
        return warm_up_depth(replicas, gpus_after)

    def versions_suffice(self, microbatches: int, replicas: int, in_flight: int) -> bool:
        """Return whether every minibatch finds the one before the last done: r <= m and d - 1 <= floor(m / r)."""
        return replicas <= microbatches and in_flight - 1 <= microbatches // replicas

    def deepest(self, replicas: int, microbatches: int) -> int | None:
        """Return floor(m / r) + 1: minibatch t - 2 must be done when minibatch t begins."""
        return microbatches // replicas + 1

    def turn(self, shape: PipelineShape, unit: Unit) -> int:
        """Return the number of the microbatch over all minibatches, as the depths count them."""
        return unit.minibatch * shape.microbatches + unit.microbatch

    def stream(self, shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
        replicas = shape.ranks[stage]
        assert len(replicas) <= shape.microbatches
        mine = range(replicas.index(rank), shape.microbatches * minibatches, len(replicas))
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            unit = Unit(*divmod(mine[index], shape.microbatches))
            if is_forward:
                yield from forward(shape, stage, unit, max(0, unit.minibatch - 1))
                continue
            last = unit.microbatch + len(replicas) >= shape.microbatches
            yield from backward(shape, stage, unit, last_of_round=last)
            if last:
                # What is left of the next minibatch runs at the version that this update replaces.
                ahead = index + shape.in_flight(stage)
                more = ahead < len(mine) and mine[ahead] // shape.microbatches == unit.minibatch + 1
                kept = (unit.minibatch,) if more else ()
                yield from finish_minibatch(shape, [stage], rank, unit.minibatch, kept)


TWO_BW = DoubleBuffered()
