"""Derive streams from a schedule: forward-only ones for evaluation, and segments between which the
pipeline drains.

In an evaluation, batch b runs on replica b mod r of every stage, in groups of batches that pass one
stage after the other. All workers go through groups, stages and batches in one order, so no two of
them can wait for each other.

At the end of a segment all stages are at one version, and a schedule's stream starts anew there. So
a run that was stopped at the end of a segment and goes on later does, to the bit, what it had done
without the stop.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.schedule.instructions import AddShared, AllReduce, Instruction, Message, Unit, Update
from planner.schedule.pieces import forward
from planner.schedule.schedule import PipelineShape, stream


def segments(first: int, last: int, *periods: int | None) -> Iterator[tuple[int, int]]:
    """Yield the segments of minibatches `first` to `last` (exclusive), cut at the run's multiples
    of each period.
    """
    wanted = [period for period in periods if period is not None]
    while first < last:
        end = min([last, *((first // period + 1) * period for period in wanted)])
        yield first, end
        first = end


def segment_stream(
    shape: PipelineShape, stage: int, rank: int, first: int, last: int
) -> Iterator[Instruction]:
    """Yield the worker's stream for minibatches `first` to `last` (exclusive), starting with an
    empty pipeline.

    As `stream`, with minibatch and round numbers `first` higher. Who runs a minibatch is counted
    from `first`, and so are versions of the weights.
    """
    for instruction in stream(shape, stage, rank, last - first):
        yield _later(instruction, first) if first else instruction


def _later(instruction: Instruction, minibatches: int) -> Instruction:
    if isinstance(instruction, (AllReduce, AddShared, Update)):
        return replace(instruction, round=instruction.round + minibatches)
    unit = Unit(instruction.unit.minibatch + minibatches, instruction.unit.microbatch)
    # most of a stream, in a third of the time that `replace` takes
    if isinstance(instruction, Message):
        return type(instruction)(
            instruction.stage, unit, instruction.peer_stage, instruction.peer_rank
        )

    return replace(instruction, unit=unit)


def evaluation_stream(shape: PipelineShape, rank: int, batches: int) -> Iterator[Instruction]:
    """Yield the instructions of worker `rank` for `batches` batches; `shape` has the channels of
    evaluation.
    """
    # replicas take turns by batches
    whole = replace(shape, microbatches=1)
    size = group_size(shape)
    for first in range(0, batches, size):
        for stage in shape.stages_of(rank):
            for batch in range(first, min(first + size, batches)):
                if whole.rank_of(stage, Unit(batch)) == rank:
                    yield from forward(whole, stage, Unit(batch))


def group_size(shape: PipelineShape) -> int:
    """Return how many workers a pipeline has."""
    return sum(len(ranks) for ranks in set(shape.ranks))
