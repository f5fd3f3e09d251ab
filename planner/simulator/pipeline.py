"""How long a pipeline takes per unit of work: the simulation that decides between depths, quick and without record.

Every worker has a processor and a full-duplex link. A send takes its turn on the sender's outgoing and on the
receiver's incoming link; computation goes on meanwhile. An all-reduce takes the time that it is said to take, whatever
the links carry meanwhile: what a link has to carry in all is the cost model's to count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planner.schedule.instructions import Send, SendActivation, SendShared
from planner.schedule.streams import PipelineShape
from planner.simulator.engine import Engine, StageTimes
from planner.steady import steady_range

__all__ = ["Outcome", "StageTimes", "TransferTimes", "simulate"]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one message from stage to stage, there and, when gradients return, back."""

    activation_s: float
    gradient_s: float | None


@dataclass(frozen=True)
class Outcome:
    """When the last stage finished its backwards, in order; empty when the streams deadlock."""

    completions_s: tuple[float, ...]

    @property
    def deadlocked(self) -> bool:
        """Whether the workers came to wait for each other."""
        return not self.completions_s

    def seconds_per_unit(self, period: int = 1) -> float:
        """Mean distance between completions in the middle of the run; infinite for a deadlock.

        Args:
            period: completions come in bursts of this many; whole periods are measured.
        """
        if self.deadlocked:
            return math.inf
        first, last = steady_range(len(self.completions_s), period)
        if first == last:
            return self.completions_s[-1] / len(self.completions_s)
        return (self.completions_s[last] - self.completions_s[first]) / (last - first)


def simulate(
    shape: PipelineShape,
    stages: tuple[StageTimes, ...],
    transfers: Mapping[tuple[int, int], TransferTimes],
    minibatches: int,
) -> Outcome:
    """Run `minibatches` minibatches.

    Args:
        shape: of the plan.
        stages: costs per stage.
        transfers: costs per (source, target) stage.
        minibatches: how many.
    """
    engine = Engine(shape, stages, _PairLinks(shape, stages, transfers), minibatches)
    return Outcome(tuple(sorted(engine.completions)) if engine.run() else ())


class _PairLinks:
    """A link per worker and direction; a message's time is that of its pair of stages."""

    def __init__(
        self,
        shape: PipelineShape,
        stages: tuple[StageTimes, ...],
        transfers: Mapping[tuple[int, int], TransferTimes],
    ) -> None:
        self.stages, self.transfers = stages, transfers
        self.outgoing = dict.fromkeys(shape.first_stages, 0.0)  # when each is free again
        self.incoming = dict.fromkeys(shape.first_stages, 0.0)

    def send(self, send: Send, rank: int, now_s: float) -> tuple[float, float]:
        """As soon as both ends are free."""
        assert not isinstance(send, SendShared), "only whole plans know of shared weights"
        source, target = sorted((send.stage, send.peer_stage))
        times = self.transfers[source, target]
        seconds = times.activation_s if isinstance(send, SendActivation) else times.gradient_s
        assert seconds is not None
        start = max(now_s, self.outgoing[rank], self.incoming[send.peer_rank])
        self.outgoing[rank] = self.incoming[send.peer_rank] = start + seconds
        return start, start + seconds

    def buckets_s(self, stage: int) -> tuple[float]:
        """One, done in the time that is said; not before the backward is."""
        times = self.stages[stage]
        return (max(times.all_reduce_s, times.backward_s),)

    def reduce(self, stage: int, now_s: float) -> tuple[float, float]:
        """Never in the way of messages."""
        return now_s, now_s
