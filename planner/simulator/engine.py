"""Discrete-event simulation of the very instruction streams that the executor runs.

Always the worker that is furthest behind moves, so that everything happens in the order of its time. A worker computes
one thing at a time; sends never make it wait, receives and all-reduces do. What a message or an all-reduce takes is
the `Links`' to say: see `planner.simulator.links`.

An all-reduce goes on bucket by bucket while the backward that completes the gradients still runs, and is waited for
after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import assert_never

from planner.cost import WEIGHT_SHARE
from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    ReceiveShared,
    Send,
    SendActivation,
    SendGradient,
    SendShared,
    Unit,
    Update,
    matching_receive,
)
from planner.schedule.streams import PipelineShape, stream
from planner.timeline import Event, Kind


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on one replica.

    `recompute_s` comes before each backward: the forward once more. `all_reduce_s` is per round, from the start of the
    backward on, for links that take it from here.
    """

    forward_s: float
    backward_s: float
    update_s: float
    all_reduce_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def weight_s(self) -> float:
        """The part of the backward that is for the weights, where it is in two parts."""
        return WEIGHT_SHARE * self.backward_s

    @property
    def compute_s(self) -> float:
        """All that the processor does."""
        return self.forward_s + self.recompute_s + self.backward_s + self.update_s


class Links(Protocol):
    """What carries messages and all-reduces, and keeps account of what is busy."""

    def send(self, send: Send, rank: int, now_s: float) -> tuple[float, float]:
        """When a message that is ready now starts, and when it has arrived; asked in the order of the times."""

    def buckets_s(self, stage: int) -> Sequence[float]:
        """When the parts of an all-reduce are ready, from the start of the last replica's backward."""

    def reduce(self, stage: int, now_s: float) -> tuple[float, float]:
        """When a part that is ready now starts, and when it is summed; asked in the order of the times."""


@dataclass
class _Ring:
    """An all-reduce on its way: replicas join it with their backwards, or when they come to it without one."""

    joined: int = 0
    passed: int = 0
    began_s: float = 0.0  # the latest backward
    arrived_s: float = 0.0  # the latest replica without one
    left: int = 0  # buckets
    carried: bool = False  # anything: a stage may have no gradients
    start_s: float | None = None
    done_s: float | None = None
    waiting: list[int] = field(default_factory=list)


class Engine:
    """One run. `events` is filled where it is a list."""

    def __init__(
        self,
        shape: PipelineShape,
        stages: Sequence[StageTimes],
        links: Links,
        minibatches: int,
        events: list[Event] | None = None,
    ) -> None:
        self.shape, self.stages, self.links, self.events = shape, stages, links, events
        self.streams: dict[int, Iterator[Instruction]] = {
            rank: stream(shape, stage, rank, minibatches) for rank, stage in shape.first_stages.items()
        }
        self.next: dict[int, Instruction | None] = {rank: next(s, None) for rank, s in self.streams.items()}
        # What moves next: workers by their ranks, buckets by negative numbers.
        self.ready: list[tuple[float, int]] = [(0.0, rank) for rank in sorted(self.streams)]
        self.clock = dict.fromkeys(self.streams, 0.0)
        self.replicated = [len(ranks) > 1 for ranks in shape.ranks]
        self.arrived: dict[tuple[int, Receive], float] = {}
        self.awaited: set[tuple[int, Receive]] = set()
        self.rings: dict[tuple[int, int], _Ring] = {}
        self.rounds = {(rank, stage): 0 for stage, ranks in enumerate(shape.ranks) for rank in ranks}  # joined
        self.buckets: list[tuple[int, int]] = []  # stage and round of each that was ever ready
        self.completions: list[float] = []  # of the last stage's backwards

    def run(self) -> bool:
        """To the end of all streams; False when the workers came to wait for each other."""
        while self.ready:
            now_s, rank = heapq.heappop(self.ready)
            if rank < 0:
                self._reduce(*self.buckets[-rank - 1], now_s)
                continue
            instruction = self.next[rank]
            if instruction is not None and self._execute(rank, instruction):
                self._proceed(rank)
        return not any(self.next.values())

    def _proceed(self, rank: int) -> None:
        self.next[rank] = next(self.streams[rank], None)
        heapq.heappush(self.ready, (self.clock[rank], rank))

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        """Advance the worker's clock over `instruction`; False when it must wait for another worker."""
        match instruction:
            case Forward(stage=stage, unit=unit):
                self._compute(rank, "forward", stage, unit, self.stages[stage].forward_s)
            case Backward():
                self._backward(rank, instruction)
            case BackwardInput():
                self._backward_input(rank, instruction)
            case BackwardWeight():
                self._backward_weight(rank, instruction)
            case Update(stage=stage, round=round_):
                self._compute(rank, "update", stage, Unit(round_), self.stages[stage].update_s)
            case SendActivation() | SendGradient() | SendShared():
                self._send(rank, instruction)
            case ReceiveActivation() | ReceiveGradient() | ReceiveShared():
                return self._receive(rank, instruction)
            case AllReduce():
                return self._wait_for_ring(rank, instruction)
            case AddShared():
                pass  # as quick as the rest of the update
            case _:
                assert_never(instruction)
        return True

    def _compute(self, rank: int, kind: Kind, stage: int, unit: Unit, seconds: float) -> None:
        start = self.clock[rank]
        self.clock[rank] = end = start + seconds
        if self.events is not None:
            self.events.append(Event(rank, kind, stage, unit.minibatch, unit.microbatch, start, end))

    def _backward(self, rank: int, backward: Backward) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        if times.recompute_s:
            self._compute(rank, "recompute", stage, unit, times.recompute_s)
        if backward.last_of_round and self.replicated[stage]:
            self._join(rank, stage, began_s=self.clock[rank])
        self._compute(rank, "backward", stage, unit, times.backward_s)
        if stage == len(self.stages) - 1:
            self.completions.append(self.clock[rank])

    def _backward_input(self, rank: int, backward: BackwardInput) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        if times.recompute_s:
            self._compute(rank, "recompute", stage, unit, times.recompute_s)
        self._compute(rank, "backward_input", stage, unit, times.backward_s - times.weight_s)

    def _backward_weight(self, rank: int, backward: BackwardWeight) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        if backward.last_of_round and self.replicated[stage]:
            # Its gradients are complete when it ends, as if the whole backward had just run.
            self._join(rank, stage, began_s=self.clock[rank] + times.weight_s - times.backward_s)
        self._compute(rank, "backward_weight", stage, unit, times.weight_s)
        if stage == len(self.stages) - 1:
            self.completions.append(self.clock[rank])

    def _send(self, rank: int, send: Send) -> None:
        receive, peer = matching_receive(send, rank), send.peer_rank
        if peer == rank:
            end = self.clock[rank]  # to another stage of the same worker
        else:
            start, end = self.links.send(send, rank, self.clock[rank])
            if self.events is not None and not isinstance(send, SendShared):  # of no unit that could be drawn
                self._record_message(rank, send, start, end)
        self.arrived[peer, receive] = end
        if (peer, receive) in self.awaited:
            self.awaited.remove((peer, receive))
            heapq.heappush(self.ready, (self.clock[peer], peer))

    def _record_message(self, rank: int, send: Send, start: float, end: float) -> None:
        assert self.events is not None
        unit, here, there = send.unit, (send.stage, rank), (send.peer_stage, send.peer_rank)
        which = unit.minibatch, unit.microbatch, start, end
        if isinstance(send, SendActivation):
            self.events.append(Event(here[1], "send_activation", here[0], *which, there[1], there[0]))
            self.events.append(Event(there[1], "receive_activation", there[0], *which, here[1], here[0]))
        else:
            self.events.append(Event(here[1], "send_gradient", here[0], *which, there[1], there[0]))
            self.events.append(Event(there[1], "receive_gradient", there[0], *which, here[1], here[0]))

    def _receive(self, rank: int, receive: Receive) -> bool:
        arrival = self.arrived.pop((rank, receive), None)
        if arrival is None:
            self.awaited.add((rank, receive))
            return False
        self.clock[rank] = max(self.clock[rank], arrival)
        return True

    def _join(self, rank: int, stage: int, began_s: float = 0.0, arrived_s: float = 0.0) -> None:
        """One more replica in its next all-reduce; with the last of them the buckets have their times."""
        round_ = self.rounds[rank, stage]
        self.rounds[rank, stage] += 1
        ring = self.rings.setdefault((stage, round_), _Ring())
        ring.joined += 1
        ring.began_s, ring.arrived_s = max(ring.began_s, began_s), max(ring.arrived_s, arrived_s)
        if ring.joined == len(self.shape.ranks[stage]):
            buckets = self.links.buckets_s(stage)
            ring.left = len(buckets)
            for after_s in buckets:
                self.buckets.append((stage, round_))
                heapq.heappush(self.ready, (max(ring.began_s + after_s, ring.arrived_s), -len(self.buckets)))

    def _reduce(self, stage: int, round_: int, now_s: float) -> None:
        """A bucket is ready: carry it."""
        ring = self.rings[stage, round_]
        start, end = self.links.reduce(stage, now_s)
        ring.start_s = start if ring.start_s is None else ring.start_s
        ring.carried = ring.carried or end > start
        ring.left -= 1
        if ring.left == 0:
            ring.done_s = end
            if self.events is not None and ring.carried:
                self.events += [
                    Event(rank, "all_reduce", stage, round_, 0, ring.start_s, end) for rank in self.shape.ranks[stage]
                ]
            for rank in ring.waiting:
                heapq.heappush(self.ready, (self.clock[rank], rank))

    def _wait_for_ring(self, rank: int, reduce: AllReduce) -> bool:
        if self.rounds[rank, reduce.stage] <= reduce.round:  # no backward of its own in this round
            self._join(rank, reduce.stage, arrived_s=self.clock[rank])
        ring = self.rings[reduce.stage, reduce.round]
        if ring.done_s is None:
            ring.waiting.append(rank)
            return False
        self.clock[rank] = max(self.clock[rank], ring.done_s)
        ring.passed += 1
        if ring.passed == len(self.shape.ranks[reduce.stage]):
            del self.rings[reduce.stage, reduce.round]
        return True
