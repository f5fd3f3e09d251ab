"""Pipelines with given seconds: whatever is exchanged takes that long on links where nothing else is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.formats.cluster import flat_cluster
from planner.schedule.streams import PipelineShape
from planner.simulator.pipeline import Outcome, Pipeline, simulate
from planner.simulator.times import StageTimes

BYTES_PER_S = 10**12


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one message from stage to stage, there and, when gradients return, back."""

    activation_s: float
    gradient_s: float


FREE = TransferTimes(0.0, 0.0)


def pipeline(
    shape: PipelineShape,
    stages: Sequence[StageTimes],
    transfers: Mapping[tuple[int, int], TransferTimes] | TransferTimes = FREE,
    reduce_s: Sequence[float] = (),
) -> Pipeline:
    """The pipeline with these times; `reduce_s` are of each stage's all-reduce."""
    if isinstance(transfers, TransferTimes):
        transfers = {(channel.source, channel.target): transfers for channel in shape.channels}
    replicas = [len(ranks) for ranks in shape.ranks]
    return Pipeline(
        shape=shape,
        cluster=flat_cluster(max(max(ranks) for ranks in shape.ranks) + 1, BYTES_PER_S),
        stages=tuple(stages),
        transfer_bytes={
            ends: (round(t.activation_s * BYTES_PER_S), round(t.gradient_s * BYTES_PER_S))
            for ends, t in transfers.items()
        },
        gradient_bytes=tuple(
            round(seconds * BYTES_PER_S * r / (2 * (r - 1))) if r > 1 else 0
            for seconds, r in zip(reduce_s or [0.0] * len(stages), replicas, strict=True)
        ),
    )


def run(
    shape: PipelineShape,
    stages: Sequence[StageTimes],
    transfers: Mapping[tuple[int, int], TransferTimes] | TransferTimes,
    minibatches: int,
    reduce_s: Sequence[float] = (),
) -> Outcome:
    """So many minibatches of it."""
    return simulate(pipeline(shape, stages, transfers, reduce_s), minibatches)
