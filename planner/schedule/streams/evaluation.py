"""Make forward-only streams for evaluation: batches pass through the stages, and nothing returns.

Batch b runs on replica b mod r of every stage. A worker with several stages takes groups of batches through one stage
after the other, as under interleaved; all workers go through groups, stages and batches in the same order, and a stage
waits for earlier ones only, so no two of them can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.instructions import Forward, Instruction, ReceiveActivation, SendActivation, Unit
from planner.schedule.schedule import PipelineShape


def evaluation_stream(shape: PipelineShape, rank: int, batches: int) -> Iterator[Instruction]:
    """Yield the instructions of worker `rank` for `batches` batches.

    Args:
        shape: of the pipeline, with the channels of evaluation.
    """
    own = [stage for stage, ranks in enumerate(shape.ranks) if rank in ranks]
    for first in range(0, batches, group_size(shape)):
        for stage in own:
            for batch in range(first, min(first + group_size(shape), batches)):
                if _rank_of(shape, stage, batch) == rank:
                    yield from _forward(shape, stage, batch)


def group_size(shape: PipelineShape) -> int:
    """Return the batches in a group: enough to give every worker something to do."""
    return sum(len(ranks) for ranks in set(shape.ranks))


def _rank_of(shape: PipelineShape, stage: int, batch: int) -> int:
    return shape.ranks[stage][batch % len(shape.ranks[stage])]


def _forward(shape: PipelineShape, stage: int, batch: int) -> Iterator[Instruction]:
    unit = Unit(batch)
    for channel in shape.arriving(stage):
        yield ReceiveActivation(stage, unit, channel.source, _rank_of(shape, channel.source, batch))
    yield Forward(stage, unit)
    for channel in shape.leaving(stage):
        yield SendActivation(stage, unit, channel.target, _rank_of(shape, channel.target, batch))
