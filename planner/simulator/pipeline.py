"""Discrete-event simulation of the very instruction streams that the executor runs.

Every worker has a processor and a full-duplex link. A send takes its turn on the sender's outgoing and on the
receiver's incoming link; computation goes on meanwhile. An all-reduce starts with the backward whose gradients it
sums, on the slowest replica, and is waited for after it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Send,
    SendActivation,
    SendGradient,
    Update,
    matching_receive,
)
from planner.schedule.streams import PipelineShape, stream


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on one replica; `all_reduce_s` per round, from the start of its backward on."""

    forward_s: float
    backward_s: float
    update_s: float
    all_reduce_s: float = 0.0


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
        count = len(self.completions_s)
        # The first half may still be filling the pipeline, the last eighth draining it.
        first = count // 2
        periods = (count - count // 8 - 1 - first) // period
        if periods < 1:
            return self.completions_s[-1] / count
        last = first + periods * period
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
    return _Simulation(shape, stages, transfers, minibatches).run()


class _Simulation:
    def __init__(
        self,
        shape: PipelineShape,
        stages: tuple[StageTimes, ...],
        transfers: Mapping[tuple[int, int], TransferTimes],
        minibatches: int,
    ) -> None:
        self.shape, self.stages, self.transfers = shape, stages, transfers
        self.streams: dict[int, Iterator[Instruction]] = {
            rank: stream(shape, stage, rank, minibatches) for rank, stage in shape.first_stages.items()
        }
        self.next: dict[int, Instruction | None] = {rank: next(s, None) for rank, s in self.streams.items()}
        # Always the worker that is furthest behind moves, so that links serve messages in the order of their sending.
        self.ready = [(0.0, rank) for rank in sorted(self.streams)]
        self.clock = dict.fromkeys(self.streams, 0.0)
        self.outgoing = dict.fromkeys(self.streams, 0.0)  # when each link is free again
        self.incoming = dict.fromkeys(self.streams, 0.0)
        self.arrived: dict[tuple[int, Receive], float] = {}
        self.awaited: dict[tuple[int, Receive], int] = {}
        self.backward_began = {(rank, stage): 0.0 for stage, ranks in enumerate(shape.ranks) for rank in ranks}
        self.rounds: dict[AllReduce, list[int]] = {}
        self.completions: list[float] = []

    def run(self) -> Outcome:
        while self.ready:
            _, rank = heapq.heappop(self.ready)
            instruction = self.next[rank]
            if instruction is not None and self._execute(rank, instruction):
                self._proceed(rank)
        if any(self.next.values()):
            return Outcome(())
        return Outcome(tuple(sorted(self.completions)))

    def _proceed(self, rank: int) -> None:
        self.next[rank] = next(self.streams[rank], None)
        heapq.heappush(self.ready, (self.clock[rank], rank))

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        """Advance the worker's clock over `instruction`; False when it must wait for another worker."""
        match instruction:
            case Forward(stage=stage):
                self.clock[rank] += self.stages[stage].forward_s
            case Backward(stage=stage):
                self.backward_began[rank, stage] = self.clock[rank]
                self.clock[rank] += self.stages[stage].backward_s
                if stage == len(self.stages) - 1:
                    self.completions.append(self.clock[rank])
            case Update(stage=stage):
                self.clock[rank] += self.stages[stage].update_s
            case SendActivation() | SendGradient():
                self._send(rank, instruction)
            case ReceiveActivation() | ReceiveGradient():
                arrival = self.arrived.pop((rank, instruction), None)
                if arrival is None:
                    self.awaited[rank, instruction] = rank
                    return False
                self.clock[rank] = max(self.clock[rank], arrival)
            case AllReduce():
                return self._all_reduce(rank, instruction)
        return True

    def _send(self, rank: int, send: Send) -> None:
        source, target = sorted((send.stage, send.peer_stage))
        times = self.transfers[source, target]
        seconds = times.activation_s if isinstance(send, SendActivation) else times.gradient_s
        assert seconds is not None
        if send.peer_rank == rank:
            seconds = 0.0  # to another stage of the same worker
        start = max(self.clock[rank], self.outgoing[rank], self.incoming[send.peer_rank])
        self.outgoing[rank] = self.incoming[send.peer_rank] = start + seconds
        receive = matching_receive(send, rank)
        self.arrived[send.peer_rank, receive] = start + seconds
        if self.awaited.pop((send.peer_rank, receive), None) is not None:
            heapq.heappush(self.ready, (self.clock[send.peer_rank], send.peer_rank))

    def _all_reduce(self, rank: int, instruction: AllReduce) -> bool:
        waiting = self.rounds.setdefault(instruction, [])
        waiting.append(rank)
        if len(waiting) < len(self.shape.ranks[instruction.stage]):
            return False
        del self.rounds[instruction]
        # Replicas without a minibatch in this round are ready when they reach the instruction.
        began = max(self.backward_began[r, instruction.stage] for r in waiting)
        summed = began + self.stages[instruction.stage].all_reduce_s
        done = max(summed, *(self.clock[r] for r in waiting))
        for other in waiting:
            self.clock[other] = done
            if other != rank:
                self._proceed(other)
        return True
