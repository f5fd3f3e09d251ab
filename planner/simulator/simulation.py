"""Simulate the instruction streams that the executor runs, event by event.

The worker that is furthest behind always moves next, so everything happens in the order of its
time. Sends never make a worker wait; receives and all-reduces do. The parts of an all-reduce start
while the backward that completes the gradients still runs. Where the optimizer of a stage is
sharded, a worker waits after its update until all replicas have theirs and the weights are
gathered.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, get_args

from typing_extensions import assert_never

from planner.formats.timeline import Event, EventKind
from planner.schedule import instructions as do
from planner.schedule.instructions import Instruction, Receive, Send, Unit
from planner.schedule.schedule import PipelineShape, stream
from planner.simulator.communication import Collective, Communication, Round
from planner.simulator.pipeline_costs import PipelineCosts
from planner.units import SLACK

# A message at its receiver: rank, kind, stage, minibatch, microbatch, and the sender's rank and
# stage.
_Message = tuple[int, int, int, int, int, int, int]
Computation = do.Forward | do.Backward | do.BackwardInput | do.BackwardWeight
# The bytes that ranks exchange within a computation, and the number of exchanges that stand for all
# of it.
_EXCHANGED = {"forward": "forward_bytes", "recompute": "forward_bytes"}
_EXCHANGED |= {"backward": "backward_bytes", "backward_input": "backward_bytes"}
EXCHANGES = 4
TURNS = 4096  # of a simulation, a tenth of a second, between two looks at the time
_MESSAGE_KIND = {
    kind: number for ends in (Send, Receive) for number, kind in enumerate(get_args(ends))
}


@dataclass(frozen=True)
class Completions:
    """When the stages of a run finished their units: microbatches, or minibatches that are not
    divided.
    """

    shape: PipelineShape
    ends_s: list[list[float]]  # per stage, the ends of its backwards
    # per stage, the ends of its forwards: after the last one an asynchronous run drains
    forwards_s: list[list[float]]

    @cached_property
    def period(self) -> int:
        """Units after which every stage is at the same replica of the same round again."""
        microbatches = self.shape.microbatches
        if microbatches > 1:
            return microbatches
        return math.lcm(*self.shape.replicas)


class Simulation:
    """One run of a pipeline.

    Args:
        costs: of the pipeline.
        minibatches: to run.
        events: filled if it is a list.
        late: ends the run early once it says so.
        workers: ranks to run, where each of the others does the same as one of these at the same
            time; all if None.
    """

    def __init__(
        self,
        costs: PipelineCosts,
        minibatches: int,
        events: list[Event] | None = None,
        late: Callable[[], bool] | None = None,
        workers: Collection[int] | None = None,
    ) -> None:
        self._late = late
        self.shape = costs.shape
        self.stages = costs.stages
        self.events = events
        self._overlap = costs.cluster.overlap
        self._costs_of = costs.stage
        self.communication = Communication(costs, self._arrive, self._finish_round, workers)
        self.completed = Completions(
            self.shape, [[] for _ in costs.stages], [[] for _ in costs.stages]
        )
        self.executed = 0  # number of instructions so far
        self._streams: dict[int, Iterator[Instruction]] = {
            rank: stream(self.shape, stage, rank, minibatches)
            for rank, stage in self.shape.first_stages.items()
            if workers is None or rank in workers
        }
        self._next: dict[int, Instruction | None] = {
            rank: next(s, None) for rank, s in self._streams.items()
        }
        # What moves next, by time: a worker, by its rank, or part n of all-reduces so far, as -n.
        # At equal times parts come before workers, so that a worker never waits for a part that
        # could have started.
        self._ready: list[tuple[float, int]] = [(0.0, rank) for rank in sorted(self._streams)]
        self._parts: list[tuple[Collective, Round, float]] = []  # with the size of each
        self._clock = dict.fromkeys(self._streams, 0.0)
        self._begun: dict[int, float] = {}  # when each worker had first work to do
        # replicas between their update and the next instruction
        self._gathering: set[tuple[int, int]] = set()
        # replicas with a backward since their last update
        self._has_gradients: set[tuple[int, int]] = set()
        self._working: dict[int, Iterator[bool]] = {}  # what workers compute that wait within it
        self._arrived: dict[_Message, float] = {}
        self._awaited: set[_Message] = set()

    def run(
        self, enough: Callable[[], bool] | None = None
    ) -> Literal["done", "ended", "late", "deadlock"]:
        """Run to the end, or until `enough` says so after a backward of the first stage, or all
        wait for ever.
        """
        network = self.communication.network
        ready = self._ready
        backwards = 0
        turns = 0
        while True:
            turns += 1
            if self._late is not None and turns % TURNS == 0 and self._late():
                return "late"
            network_s = network.next_s
            # At equal times the network goes first: a message that ends now is there for a worker
            # that looks now.
            if ready and ready[0][0] < network_s:
                now_s, rank = heapq.heappop(ready)
                if rank < 0:
                    self.communication.start_part(*self._parts[-rank - 1], now_s)
                elif (instruction := self._next[rank]) is not None and self._execute(
                    rank, instruction
                ):
                    self.executed += 1
                    self._next[rank] = next(self._streams[rank], None)
                    heapq.heappush(ready, (self._clock[rank], rank))
                if enough is not None and len(self.completed.ends_s[0]) > backwards:
                    backwards = len(self.completed.ends_s[0])
                    if enough():
                        return "ended"
            elif math.isinf(network_s):
                if any(self._next.values()):
                    return "deadlock"
                return "done"
            else:
                network.finish_next()

    @property
    def latest_s(self) -> float:
        return max(self._clock.values())

    @property
    def again_s(self) -> float | None:
        """When a run that ended could begin anew just as it began; None if what is left of it would
        be in the way.
        """
        # All workers that begin without waiting begin at once, no link is in use any more, and
        # every other worker is done before its first work comes.
        ends = {self._clock[rank] for rank, begun_s in self._begun.items() if begun_s == 0}
        end_s = max(ends)
        idle = self.communication.network.last_s <= end_s
        done = all(self._clock[rank] <= end_s + begun_s for rank, begun_s in self._begun.items())
        if len(ends) == 1 and idle and done and not any(self._next.values()):
            return end_s
        return None

    def _wake(self, rank: int, at_s: float) -> None:
        self._clock[rank] = at_s = max(self._clock[rank], at_s)
        heapq.heappush(self._ready, (at_s, rank))

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        match instruction:  # the most frequent first
            case do.ReceiveActivation() | do.ReceiveGradient() | do.ReceiveShared():
                return self._receive(rank, instruction)
            case do.SendActivation() | do.SendGradient() | do.SendShared():
                if instruction.peer_rank == rank:  # to another stage of the same worker
                    self._deliver(rank, instruction, self._clock[rank])
                else:
                    self.communication.send(rank, instruction, self._clock[rank])
            case do.Forward() | do.Backward() | do.BackwardInput() | do.BackwardWeight():
                work = self._working.pop(rank, None) or self._work(rank, instruction)
                if next(work, False):
                    self._working[rank] = work
                    return False
            case do.AllReduce(stage=stage, round=number):
                reduce = self.communication.collective(stage)
                now_s = self._clock[rank]
                self._begun.setdefault(rank, now_s)
                if reduce.joined[rank] <= number:  # it had no backward in this round
                    self._join(rank, stage, 0.0, 0.0, now_s)
                return self._wait_for(rank, reduce, number)
            case do.Update():
                return self._update(rank, instruction)
            case do.AddShared():
                pass  # its time is part of the update's
            case _:
                assert_never(instruction)

        return True

    def _work(self, rank: int, instruction: Computation) -> Iterator[bool]:
        """Compute, and yield true where the worker has to wait within it."""
        stage = instruction.stage
        unit = instruction.unit
        costs = self._costs_of(stage, unit)
        match instruction:
            case do.Forward():
                yield from self._compute(rank, "forward", stage, unit, costs.forward_s)
                self.completed.forwards_s[stage].append(self._clock[rank])
            case do.BackwardInput():
                yield from self._recompute(rank, instruction)
                input_s = costs.backward_s - costs.backward_weight_s
                yield from self._compute(rank, "backward_input", stage, unit, input_s)
            case _:
                yield from self._backward(rank, instruction)

    def _compute(
        self, rank: int, kind: EventKind, stage: int, unit: Unit, seconds: float
    ) -> Iterator[bool]:
        """Compute, with exchanges between the ranks of the worker, which other traffic on their
        links may slow down.
        """
        start = self._clock[rank]
        self._begun.setdefault(rank, start)
        costs = self.stages[stage]
        exchanged = costs.exchanged
        if exchanged is not None and kind in _EXCHANGED:
            size_bytes = getattr(exchanged, _EXCHANGED[kind])
            if kind == "recompute":
                size_bytes *= seconds / costs.forward_s
            part_bytes = size_bytes / EXCHANGES
            seconds = max(0.0, seconds - size_bytes / exchanged.bytes_per_s) / (EXCHANGES + 1)

            wake = partial(self._wake, rank)
            for _ in range(EXCHANGES):
                self._wake(rank, self._clock[rank] + seconds)
                yield True
                self.communication.exchange(
                    rank, part_bytes, exchanged.bytes_per_s, self._clock[rank], wake
                )
                yield True

        self._clock[rank] += seconds
        if self.events is not None:
            self.events.append(
                Event(rank, kind, stage, unit.minibatch, unit.microbatch, start, self._clock[rank])
            )

    def _backward(self, rank: int, backward: do.Backward | do.BackwardWeight) -> Iterator[bool]:
        stage = backward.stage
        unit = backward.unit
        costs = self._costs_of(stage, unit)
        joins = backward.last_of_round and len(self.shape.ranks[stage]) > 1

        # The first backward after an update does not accumulate.
        accumulate_s = 0.0
        if (rank, stage) in self._has_gradients:
            accumulate_s = costs.accumulate_s
        self._has_gradients.add((rank, stage))

        kind: EventKind
        late_s = 0.0
        if isinstance(backward, do.Backward):
            kind = "backward"
            if joins:
                # What recomputes between the backwards of other layers matters for the all-reduce
                # alone.
                late_s = costs.late_s
            yield from self._recompute(rank, backward, late_s)
            start_s = self._clock[rank]
            seconds = costs.backward_s + late_s
        else:
            kind = "backward_weight"
            seconds = costs.backward_weight_s
            # Parts are ready at times of a whole backward: count them as if one had run that ends
            # with this part.
            start_s = self._clock[rank] + seconds - costs.backward_s

        if joins:
            self._join(rank, stage, start_s, costs.backward_s + late_s + accumulate_s)
        yield from self._compute(rank, kind, stage, unit, seconds + accumulate_s)
        self.completed.ends_s[stage].append(self._clock[rank])

    def _recompute(
        self, rank: int, backward: do.Backward | do.BackwardInput, late_s: float = 0.0
    ) -> Iterator[bool]:
        whole_s = self._costs_of(backward.stage, backward.unit).recompute_s
        seconds = whole_s - late_s
        if seconds > SLACK * whole_s:
            yield from self._compute(rank, "recompute", backward.stage, backward.unit, seconds)

    def _arrive(self, rank: int, send: Send, start_s: float, end_s: float) -> None:
        # Gradients of shared weights belong to a round, not to a unit, so timelines do not draw
        # them.
        if self.events is not None and not isinstance(send, do.SendShared):
            sends: EventKind = "send_gradient"
            receives: EventKind = "receive_gradient"
            if isinstance(send, do.SendActivation):
                sends = "send_activation"
                receives = "receive_activation"
            when = (*send.unit, start_s, end_s)
            self.events += [
                Event(rank, sends, send.stage, *when, send.peer_rank, send.peer_stage),
                Event(send.peer_rank, receives, send.peer_stage, *when, rank, send.stage),
            ]

        self._deliver(rank, send, end_s)

    def _deliver(self, sender: int, send: Send, end_s: float) -> None:
        unit = send.unit
        kind = _MESSAGE_KIND[type(send)]
        message = (
            send.peer_rank,
            kind,
            send.peer_stage,
            unit.minibatch,
            unit.microbatch,
            sender,
            send.stage,
        )
        self._arrived[message] = end_s
        if message in self._awaited:
            self._awaited.remove(message)
            self._wake(send.peer_rank, end_s)

    def _receive(self, rank: int, receive: Receive) -> bool:
        unit = receive.unit
        kind = _MESSAGE_KIND[type(receive)]
        peer = receive.peer_rank
        message = (
            rank,
            kind,
            receive.stage,
            unit.minibatch,
            unit.microbatch,
            peer,
            receive.peer_stage,
        )
        arrival_s = self._arrived.get(message)
        if arrival_s is None:
            self._awaited.add(message)
            if peer != rank:
                self.communication.open(rank, receive, self._clock[rank])
            return False

        if arrival_s > self._clock[rank]:  # off the links, but its latency has not passed
            self._wake(rank, arrival_s)
            return False

        del self._arrived[message]
        if peer != rank:
            self.communication.take(rank, receive, self._clock[rank])
        return True

    def _join(
        self, rank: int, stage: int, start_s: float, backward_s: float, arrived_s: float = 0.0
    ) -> None:
        reduce = self.communication.collective(stage)
        joined = reduce.join(rank, start_s, backward_s, arrived_s)
        if joined is None:
            return

        parts = [(joined.backward_s, 1.0)]  # without overlap all of it waits for the backward's end
        if self._overlap:
            parts = list(zip(*self.stages[stage].buckets(joined.backward_s), strict=True))
        joined.parts_left = len(parts)
        for after_s, share in parts:
            # Not before now, though the backward that ends last may have started earlier: time does
            # not run back.
            ready_s = max(joined.backward_start_s + after_s, joined.arrived_s, self._clock[rank])
            self._start_part_at(ready_s, reduce, joined, share)

    def _start_part_at(
        self, ready_s: float, collective: Collective, round_: Round, share: float
    ) -> None:
        self._parts.append((collective, round_, share))
        heapq.heappush(self._ready, (ready_s, -len(self._parts)))

    def _finish_round(self, collective: Collective, ended: Round) -> None:
        start_s = ended.start_s or 0.0
        end_s = ended.end_s or 0.0
        if self.events is not None and ended.carried:
            kind: EventKind = "all_reduce"
            if collective.gathers:
                kind = "all_gather"
            stage = collective.stage
            for rank in self.shape.ranks[stage]:
                self.events.append(Event(rank, kind, stage, ended.number, 0, start_s, end_s))

        for rank in ended.waiting:
            self._wake(rank, end_s)

    def _update(self, rank: int, update: do.Update) -> bool:
        stage = update.stage
        costs = self.stages[stage]
        gathering = (rank, stage) in self._gathering
        if not gathering:
            next(self._compute(rank, "update", stage, Unit(update.round), costs.update_s), None)
            self._has_gradients.discard((rank, stage))
            if not costs.sharded:
                return True

        gather = self.communication.collective(stage, gathers=True)
        if not gathering:
            self._gathering.add((rank, stage))
            joined = gather.join(rank, 0.0, 0.0, self._clock[rank])
            if joined is not None:
                joined.parts_left = 1
                self._start_part_at(joined.arrived_s, gather, joined, 1.0)

        if not self._wait_for(rank, gather, gather.joined[rank] - 1):
            return False
        self._gathering.discard((rank, stage))
        return True

    def _wait_for(self, rank: int, collective: Collective, number: int) -> bool:
        end_s = collective.rounds[number].end_s
        if end_s is None:
            collective.rounds[number].waiting.append(rank)
            return False
        if end_s > self._clock[rank]:
            self._wake(rank, end_s)
            return False

        collective.leave(number)
        return True
