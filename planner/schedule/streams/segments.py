"""Divide a run into segments between which the pipeline drains, so that all stages are at one version there.

A schedule's stream starts anew in each segment. So a run that was stopped at the end of a segment and goes on from
there later does, to the bit, what it had done without the stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.schedule.instructions import AddShared, AllReduce, Instruction, Message, Unit, Update
from planner.schedule.schedule import PipelineShape, stream


def segments(first: int, last: int, *periods: int | None) -> Iterator[tuple[int, int]]:
    """Yield the segments of the minibatches `first` to `last` (exclusive), cut at every multiple of each period.

    A period of None never cuts.

    Multiples count from the run's beginning, not from `first`: a run that goes on is cut where the whole one was.
    """
    wanted = [period for period in periods if period is not None]
    while first < last:
        end = min([last, *((first // period + 1) * period for period in wanted)])
        yield first, end
        first = end


def segment_stream(shape: PipelineShape, stage: int, rank: int, first: int, last: int) -> Iterator[Instruction]:
    """Yield the worker's stream for minibatches `first` to `last` (exclusive), starting with an empty pipeline.

    As `stream`, with minibatch and round numbers `first` higher. Who runs a minibatch is counted from `first`, and so
    are versions of the weights.
    """
    for instruction in stream(shape, stage, rank, last - first):
        yield _later(instruction, first) if first else instruction


def _later(instruction: Instruction, minibatches: int) -> Instruction:
    if isinstance(instruction, (AllReduce, AddShared, Update)):
        return replace(instruction, round=instruction.round + minibatches)
    unit = Unit(instruction.unit.minibatch + minibatches, instruction.unit.microbatch)
    if isinstance(instruction, Message):  # most of a stream, in a third of the time that `replace` takes
        return type(instruction)(instruction.stage, unit, instruction.peer_stage, instruction.peer_rank)
    return replace(instruction, unit=unit)
