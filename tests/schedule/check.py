"""Prove by execution that the streams of a plan fit together: no deadlock, no unmatched message, no
missing data.

Sends never wait, so the streams form a deterministic dataflow network (Kahn 1974): whatever the
timing of the workers, every run reaches the same end. One abstract run that completes therefore
proves that all do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from typing_extensions import assert_never

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
from planner.schedule.schedule import PipelineShape, stream

# Data that messages carry, by the instruction that receives or sends them, the unit and the stage
# at the other end.
_Datum = tuple[type[Instruction], Unit, int]


class ScheduleError(AssertionError):
    """Streams that contradict each other: a defect of the schedule, never of the user."""


def check_streams(shape: PipelineShape, minibatches: int) -> None:
    """Run the streams of `shape` abstractly.

    Raises:
        ScheduleError: on a deadlock (naming what each worker waits for), a message that nobody
            takes, a computation without its inputs, a message of something that is not there yet, a
            forward with a version of the weights that is not there, or more units in flight or
            versions than stated.
    """
    _Run(shape, minibatches).complete()


class _Run:
    def __init__(self, shape: PipelineShape, minibatches: int) -> None:
        self.shape, self.minibatches = shape, minibatches
        self.streams = {
            rank: stream(shape, stage, rank, minibatches)
            for rank, stage in shape.first_stages.items()
        }
        self.blocked = {
            rank: next(instructions, None) for rank, instructions in self.streams.items()
        }
        # Messages of one kind between two stages on two workers keep their order.
        self.mail: defaultdict[tuple[int, int, type[Instruction], int, int], deque[Instruction]] = (
            defaultdict(deque)
        )
        self.arrived: defaultdict[AllReduce, set[int]] = defaultdict(set)
        self.replicas = {
            (rank, stage): _Replica() for stage, ranks in enumerate(shape.ranks) for rank in ranks
        }

    def complete(self) -> None:
        while any(self.blocked.values()):
            moved = [rank for rank in self.streams if self._advance(rank)]
            if not moved:
                raise ScheduleError(f"deadlock: {self.blocked}")
        left = [message for box in self.mail.values() for message in box]
        if left:
            raise ScheduleError(f"nobody takes {left[0]}")
        for (rank, stage), replica in self.replicas.items():
            rounds = self._rounds(stage)
            done = replica.updates >= rounds and (
                not self.shape.sharers(stage) or replica.added == rounds - 1
            )
            if replica.here or replica.owed or replica.used or not done:
                raise ScheduleError(f"rank {rank} leaves work of stage {stage} undone: {replica}")

    def _rounds(self, stage: int) -> int:
        return -(-self.minibatches // self.shape.minibatches_per_update(stage))

    def _advance(self, rank: int) -> bool:
        """Run `rank` until it waits; return whether it ran anything."""
        moved = False
        while (instruction := self.blocked[rank]) is not None and self._execute(rank, instruction):
            self.blocked[rank] = next(self.streams[rank], None)
            moved = True
        return moved

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        replica = self.replicas[rank, instruction.stage]
        match instruction:
            case SendActivation() | SendGradient() | SendShared():
                if isinstance(instruction, SendShared):
                    self._finish_round(rank, instruction.stage, instruction.unit.minibatch)
                elif (datum := _datum(instruction)) in replica.owed:
                    replica.owed.remove(datum)
                else:
                    raise ScheduleError(
                        f"rank {rank} runs {instruction} before there is anything to send"
                    )
                receive = matching_receive(instruction, rank)
                peer = instruction.peer_rank
                self.mail[rank, peer, type(receive), receive.stage, receive.peer_stage].append(
                    receive
                )
            case ReceiveActivation() | ReceiveGradient() | ReceiveShared():
                peer, kind = instruction.peer_rank, type(instruction)
                if not (
                    box := self.mail[peer, rank, kind, instruction.stage, instruction.peer_stage]
                ):
                    return False
                if (first := box.popleft()) != instruction:
                    raise ScheduleError(f"rank {rank} awaits {instruction} but {first} comes first")
                replica.here.add(_datum(instruction))
            case AllReduce():
                self.arrived[instruction].add(rank)
                self._finish_round(rank, instruction.stage, instruction.round)
                return self.arrived[instruction] == set(self.shape.ranks[instruction.stage])
            case Forward():
                self._forward(rank, instruction)
            case Backward():
                self._backward(rank, instruction)
                del replica.used[instruction.unit]
            case BackwardInput():
                self._backward(rank, instruction)
                replica.half_done.add(instruction.unit)
            case BackwardWeight(unit=unit):
                if unit not in replica.half_done:
                    raise ScheduleError(f"rank {rank} runs {instruction} without the first part")
                replica.half_done.remove(unit)
                del replica.used[unit]
            case AddShared(round=round_):
                peers = self.shape.sharers(instruction.stage)
                self._take(
                    rank, instruction, {(ReceiveShared, Unit(round_), peer) for peer in peers}
                )
                if replica.added != round_ - 1:
                    raise ScheduleError(
                        f"rank {rank} runs {instruction} after that of round {replica.added}"
                    )
                replica.added = round_
            case Update():
                self._update(rank, instruction)
            case _:
                assert_never(instruction)
        return True

    def _forward(self, rank: int, forward: Forward) -> None:
        stage, unit = forward.stage, forward.unit
        replica = self.replicas[rank, stage]
        self._take(
            rank, forward, {(ReceiveActivation, unit, c.source) for c in self.shape.arriving(stage)}
        )
        replica.owed |= {(SendActivation, unit, c.target) for c in self.shape.leaving(stage)}
        version = replica.updates if forward.version is None else forward.version
        if version != replica.updates and version not in replica.kept:
            raise ScheduleError(
                f"rank {rank} runs {forward} after {replica.updates} updates, with {replica.kept} "
                f"kept"
            )
        replica.used[unit] = version
        if len(replica.used) > self.shape.in_flight(stage):
            raise ScheduleError(f"rank {rank} holds {list(replica.used)}")

    def _backward(self, rank: int, backward: Backward | BackwardInput) -> None:
        stage, unit = backward.stage, backward.unit
        replica = self.replicas[rank, stage]
        if unit not in replica.used or unit in replica.half_done:
            raise ScheduleError(f"rank {rank} runs {backward} without its forward")
        self._take(
            rank,
            backward,
            {(ReceiveGradient, unit, c.target) for c in self.shape.leaving(stage) if c.gradient},
        )
        replica.owed |= {
            (SendGradient, unit, c.source) for c in self.shape.arriving(stage) if c.gradient
        }

    def _finish_round(self, rank: int, stage: int, round_: int) -> None:
        """Check that no unit of the round is in flight, now that its gradients count as
        complete.
        """
        replica, per_round = self.replicas[rank, stage], self.shape.minibatches_per_update(stage)
        if late := [unit for unit in replica.used if unit.minibatch // per_round <= round_]:
            raise ScheduleError(
                f"rank {rank} ends round {round_} of stage {stage} before {late} are done"
            )

    def _take(
        self,
        rank: int,
        instruction: Forward | Backward | BackwardInput | AddShared,
        needed: set[_Datum],
    ) -> None:
        """Use up what a computation needs of what has arrived."""
        replica = self.replicas[rank, instruction.stage]
        if missing := needed - replica.here:
            raise ScheduleError(
                f"rank {rank} runs {instruction} without {sorted(missing, key=str)}"
            )
        replica.here -= needed

    def _update(self, rank: int, update: Update) -> None:
        replica = self.replicas[rank, update.stage]
        older = {replica.updates, *replica.kept, *replica.used.values()}
        if update.round != replica.updates or not older.issuperset(update.kept):
            raise ScheduleError(
                f"rank {rank} runs {update} after {replica.updates} updates, with {older} left"
            )
        rounds, lag = self._rounds(update.stage), self.shape.lag(update.stage)
        due = max(-1, update.round - lag)  # whose gradients of shared weights it steps with
        if update.round < rounds:
            self._finish_round(rank, update.stage, update.round)
        else:
            due = max(0, rounds - lag) + update.round - rounds
        if self.shape.sharers(update.stage) and replica.added != due:
            raise ScheduleError(
                f"rank {rank} runs {update} with shared gradients of round {replica.added}, not "
                f"{due}"
            )
        replica.updates += 1
        replica.kept = update.kept
        held = {replica.updates, *replica.kept, *replica.used.values()}
        if len(held) > self.shape.versions(update.stage):
            raise ScheduleError(f"rank {rank} holds the weights of {sorted(held)}")


@dataclass
class _Replica:
    """State of one replica of a stage: updates done, older versions kept, and units in flight with
    their versions.
    """

    updates: int = 0
    added: int = -1  # the last round whose gradients of shared weights were added up
    kept: tuple[int, ...] = ()
    used: dict[Unit, int] = field(default_factory=dict)
    half_done: set[Unit] = field(default_factory=set)  # the first part of whose backward is done
    here: set[_Datum] = field(default_factory=set)  # received and not used yet
    owed: set[_Datum] = field(default_factory=set)  # made and not sent yet


def _datum(message: Send | Receive) -> _Datum:
    return type(message), message.unit, message.peer_stage
