"""Discrete-event simulation of the very instruction streams that the executor runs.

Always the worker that is furthest behind moves, so that everything happens in the order of its time. A worker computes
one thing at a time; sends never make it wait, receives and all-reduces do. What is on its way meanwhile, and how long
that takes, is the `Carrier`'s to say, whose links are shared fairly: see `planner.simulator.network`.

An all-reduce goes on part by part while the backward that completes the gradients still runs, and is waited for
after it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from typing_extensions import assert_never

from planner.formats.timeline import Event, Kind
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
)
from planner.schedule.streams import stream
from planner.simulator.carrier import Carrier
from planner.simulator.times import Pipeline

# A message at its receiver: rank, kind, stage, minibatch, microbatch, and the sender's rank and stage.
_Message = tuple[int, int, int, int, int, int, int]
_KIND: dict[type[Send | Receive], int] = {
    SendActivation: 0,
    ReceiveActivation: 0,
    SendGradient: 1,
    ReceiveGradient: 1,
    SendShared: 2,
    ReceiveShared: 2,
}


@dataclass
class _Round:
    """An all-reduce: replicas join it with their backwards, or when they come to it without one."""

    joined: int = 0
    passed: int = 0
    began_s: float = 0.0  # the latest backward
    backward_s: float = 0.0  # what it takes
    arrived_s: float = 0.0  # the latest replica without one
    left: int = 0  # parts
    carried: bool = False  # anything: a stage may have no gradients
    start_s: float | None = None
    done_s: float | None = None
    waiting: list[int] = field(default_factory=list)


class Engine:
    """One run of `pipeline`. `events` is filled where it is a list.

    Attributes:
        ends_s: of each stage's backwards, as they came.
        admitted_s: when each stage was done with its last forward.
        executed: instructions so far.
        carrier: with the links, and what they carried.
    """

    def __init__(self, pipeline: Pipeline, minibatches: int, events: list[Event] | None = None) -> None:
        self.shape, self.stages, self.events = pipeline.shape, pipeline.stages, events
        self.carrier = Carrier(pipeline, self._arrive, self._summed)
        self.ends_s: list[list[float]] = [[] for _ in pipeline.stages]
        self.admitted_s = [0.0] * len(pipeline.stages)
        self.executed = 0
        self._streams: dict[int, Iterator[Instruction]] = {
            rank: stream(self.shape, stage, rank, minibatches) for rank, stage in self.shape.first_stages.items()
        }
        self._next: dict[int, Instruction | None] = {rank: next(s, None) for rank, s in self._streams.items()}
        # What moves next: workers by their ranks, parts of all-reduces by negative numbers.
        self._ready: list[tuple[float, int]] = [(0.0, rank) for rank in sorted(self._streams)]
        self._clock = dict.fromkeys(self._streams, 0.0)
        self._replicated = [len(ranks) > 1 for ranks in self.shape.ranks]
        self._has_gradients: set[tuple[int, int]] = set()  # replicas that had a backward since their last update
        self._arrived: dict[_Message, float] = {}
        self._awaited: set[_Message] = set()
        self._rounds: dict[tuple[int, int], _Round] = {}
        # How many rounds each replica has joined.
        self._joined = {(rank, stage): 0 for stage, ranks in enumerate(self.shape.ranks) for rank in ranks}
        self._parts: list[tuple[int, int]] = []  # stage and round of each that was ever ready

    def run(self, enough: Callable[[], bool] | None = None) -> bool:
        """To the end of all streams; False when the workers came to wait for each other.

        `enough`: asked whenever the first stage has done a backward, whether the run may end there.
        """
        network, ready = self.carrier.network, self._ready
        done = 0
        while True:
            carried_s = network.next_s
            if ready and ready[0][0] < carried_s:
                self._step()
                if enough is not None and len(self.ends_s[0]) > done:
                    done = len(self.ends_s[0])
                    if enough():
                        return True
            elif math.isinf(carried_s):
                return not any(self._next.values())
            else:
                network.finish()

    @property
    def latest_s(self) -> float:
        """When the last worker was done."""
        return max(self._clock.values())

    def _step(self) -> None:
        now_s, rank = heapq.heappop(self._ready)
        if rank < 0:
            self.carrier.reduce(*self._parts[-rank - 1], now_s)
            return
        instruction = self._next[rank]
        if instruction is not None and self._execute(rank, instruction):
            self._proceed(rank)

    def _proceed(self, rank: int) -> None:
        self.executed += 1
        self._next[rank] = next(self._streams[rank], None)
        heapq.heappush(self._ready, (self._clock[rank], rank))

    def _wake(self, rank: int, at_s: float) -> None:
        """A worker that waits goes on at this time, with the instruction that it is at."""
        self._clock[rank] = at_s = max(self._clock[rank], at_s)
        heapq.heappush(self._ready, (at_s, rank))

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        """Advance the worker's clock over `instruction`; False when it must wait for another worker."""
        match instruction:
            case Forward(stage=stage, unit=unit):
                self._compute(rank, "forward", stage, unit, self.stages[stage].forward_s)
                self.admitted_s[stage] = max(self.admitted_s[stage], self._clock[rank])
            case Backward():
                self._backward(rank, instruction)
            case SendActivation() | SendGradient() | SendShared():
                self._send(rank, instruction)
            case ReceiveActivation() | ReceiveGradient() | ReceiveShared():
                return self._receive(rank, instruction)
            case BackwardInput():
                self._backward_input(rank, instruction)
            case BackwardWeight():
                self._backward_weight(rank, instruction)
            case Update(stage=stage, round=round_):
                self._compute(rank, "update", stage, Unit(round_), self.stages[stage].update_s)
                self._has_gradients.discard((rank, stage))
            case AllReduce():
                return self._wait_for_ring(rank, instruction)
            case AddShared():
                pass  # as quick as the rest of the update
            case _:
                assert_never(instruction)
        return True

    def _compute(self, rank: int, kind: Kind, stage: int, unit: Unit, seconds: float) -> None:
        start = self._clock[rank]
        self._clock[rank] = end = start + seconds
        if self.events is not None:
            self.events.append(Event(rank, kind, stage, unit.minibatch, unit.microbatch, start, end))

    def _backward(self, rank: int, backward: Backward) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        if times.recompute_s:
            self._compute(rank, "recompute", stage, unit, times.recompute_s)
        seconds = times.backward_s + self._adding_s(rank, stage)
        if backward.last_of_round and self._replicated[stage]:
            self._join(rank, stage, self._clock[rank], seconds)
        self._compute(rank, "backward", stage, unit, seconds)
        self.ends_s[stage].append(self._clock[rank])

    def _backward_input(self, rank: int, backward: BackwardInput) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        if times.recompute_s:
            self._compute(rank, "recompute", stage, unit, times.recompute_s)
        self._compute(rank, "backward_input", stage, unit, times.backward_s - times.weight_s)

    def _backward_weight(self, rank: int, backward: BackwardWeight) -> None:
        stage, unit, times = backward.stage, backward.unit, self.stages[backward.stage]
        adding_s = self._adding_s(rank, stage)
        if backward.last_of_round and self._replicated[stage]:
            # Its gradients are complete when it ends, as if the whole backward had just run.
            began_s = self._clock[rank] + times.weight_s - times.backward_s
            self._join(rank, stage, began_s, times.backward_s + adding_s)
        self._compute(rank, "backward_weight", stage, unit, times.weight_s + adding_s)
        self.ends_s[stage].append(self._clock[rank])

    def _adding_s(self, rank: int, stage: int) -> float:
        """Seconds of adding a backward's gradients to those since the last update; none for the first one."""
        if (rank, stage) in self._has_gradients:
            return self.stages[stage].accumulate_s
        self._has_gradients.add((rank, stage))
        return 0.0

    def _send(self, rank: int, send: Send) -> None:
        if send.peer_rank == rank:  # to another stage of the same worker
            self._deliver(rank, send, self._clock[rank])
        else:
            self.carrier.send(rank, send, self._clock[rank])

    def _arrive(self, rank: int, send: Send, start_s: float, end_s: float) -> None:
        """A message has been carried."""
        if self.events is not None and not isinstance(send, SendShared):  # of no unit that could be drawn
            self._record_message(rank, send, start_s, end_s)
        self._deliver(rank, send, end_s)

    def _deliver(self, sender: int, send: Send, end_s: float) -> None:
        unit = send.unit
        key = (send.peer_rank, _KIND[type(send)], send.peer_stage, unit.minibatch, unit.microbatch, sender, send.stage)
        self._arrived[key] = end_s
        if key in self._awaited:
            self._awaited.remove(key)
            self._wake(send.peer_rank, end_s)

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
        unit, peer = receive.unit, receive.peer_rank
        key = (rank, _KIND[type(receive)], receive.stage, unit.minibatch, unit.microbatch, peer, receive.peer_stage)
        carried = peer != rank
        arrival_s = self._arrived.get(key)
        if arrival_s is None:
            self._awaited.add(key)
            if carried:
                self.carrier.await_message(rank, receive, self._clock[rank])
            return False
        if arrival_s > self._clock[rank]:  # has left its links, but latency is left
            self._wake(rank, arrival_s)
            return False
        del self._arrived[key]
        if carried:
            self.carrier.take(rank, receive, self._clock[rank])
        return True

    def _join(
        self, rank: int, stage: int, began_s: float = 0.0, backward_s: float = 0.0, arrived_s: float = 0.0
    ) -> None:
        """One more replica in its next all-reduce; with the last of them its parts have their times."""
        round_ = self._joined[rank, stage]
        self._joined[rank, stage] += 1
        ring = self._rounds.setdefault((stage, round_), _Round())
        ring.joined += 1
        if began_s + backward_s >= ring.began_s + ring.backward_s:
            ring.began_s, ring.backward_s = began_s, backward_s
        ring.arrived_s = max(ring.arrived_s, arrived_s)
        if ring.joined == len(self.shape.ranks[stage]):
            parts_s = self.carrier.parts_s(stage, ring.backward_s)
            ring.left = len(parts_s)
            for after_s in parts_s:
                self._parts.append((stage, round_))
                ready_s = max(ring.began_s + after_s, ring.arrived_s, self._clock[rank])
                heapq.heappush(self._ready, (ready_s, -len(self._parts)))

    def _summed(self, stage: int, round_: int, start_s: float, end_s: float) -> None:
        """A part of an all-reduce has been carried."""
        ring = self._rounds[stage, round_]
        ring.start_s = start_s if ring.start_s is None else ring.start_s
        ring.carried = ring.carried or end_s > start_s
        ring.left -= 1
        if ring.left:
            return
        ring.done_s = end_s
        if self.events is not None and ring.carried:
            self.events += [
                Event(rank, "all_reduce", stage, round_, 0, ring.start_s, end_s) for rank in self.shape.ranks[stage]
            ]
        for rank in ring.waiting:
            self._wake(rank, end_s)

    def _wait_for_ring(self, rank: int, reduce: AllReduce) -> bool:
        if self._joined[rank, reduce.stage] <= reduce.round:  # no backward of its own in this round
            self._join(rank, reduce.stage, arrived_s=self._clock[rank])
        ring = self._rounds[reduce.stage, reduce.round]
        if ring.done_s is None:
            ring.waiting.append(rank)
            return False
        if ring.done_s > self._clock[rank]:
            self._wake(rank, ring.done_s)
            return False
        ring.passed += 1
        if ring.passed == len(self.shape.ranks[reduce.stage]):
            del self._rounds[reduce.stage, reduce.round]
        return True
