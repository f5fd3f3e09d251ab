"""Pipelines with given seconds: whatever is exchanged takes that long on links where nothing else
is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.formats.cluster import flat_cluster
from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_state import steady_state

BYTES_PER_S = 10**12


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one message from stage to stage, there and, when gradients return, back."""

    activation_s: float
    gradient_s: float


FREE = TransferTimes(0.0, 0.0)


def pipeline(
    shape: PipelineShape,
    stages: Sequence[StageCosts],
    transfers: Mapping[tuple[int, int], TransferTimes] | TransferTimes = FREE,
    reduce_s: Sequence[float] = (),
) -> PipelineCosts:
    """The pipeline with these times; `reduce_s` are of each stage's all-reduce."""
    if isinstance(transfers, TransferTimes):
        transfers = {(channel.source, channel.target): transfers for channel in shape.channels}
    replicas = [len(ranks) for ranks in shape.ranks]
    gradient_bytes = (
        round(seconds * BYTES_PER_S * r / (2 * (r - 1))) if r > 1 else 0
        for seconds, r in zip(reduce_s or [0.0] * len(stages), replicas, strict=True)
    )
    return PipelineCosts(
        shape=shape,
        cluster=flat_cluster(max(max(ranks) for ranks in shape.ranks) + 1, BYTES_PER_S),
        stages=tuple(
            replace(s, gradient_bytes=size) for s, size in zip(stages, gradient_bytes, strict=True)
        ),
        transfer_bytes={
            ends: (round(t.activation_s * BYTES_PER_S), round(t.gradient_s * BYTES_PER_S))
            for ends, t in transfers.items()
        },
    )


@dataclass(frozen=True)
class Outcome:
    """A run: whether it deadlocked, when the last stage finished its backwards, and seconds per
    minibatch.
    """

    deadlocked: bool
    ends_s: tuple[float, ...]
    seconds_per_minibatch: float


def simulate_costs(costs: PipelineCosts, minibatches: int) -> Outcome:
    """Run so many minibatches; the pace is that of the steady state if there is one."""
    simulation = Simulation(costs, minibatches)
    finished = simulation.run() == "done"
    ends_s = tuple(sorted(simulation.completed.ends_s[-1]))
    if not finished:
        return Outcome(True, ends_s, math.inf)
    steady = steady_state(simulation.completed, minibatches)
    pace_s = simulation.latest_s / minibatches if steady is None else steady.seconds_per_minibatch
    return Outcome(False, ends_s, pace_s)


def run(
    shape: PipelineShape,
    stages: Sequence[StageCosts],
    transfers: Mapping[tuple[int, int], TransferTimes] | TransferTimes,
    minibatches: int,
    reduce_s: Sequence[float] = (),
) -> Outcome:
    """So many minibatches of it."""
    return simulate_costs(pipeline(shape, stages, transfers, reduce_s), minibatches)
