"""Proof by execution that the streams of a plan fit together: no deadlock, no unmatched message, no missing data.

Sends never wait, so the streams form a deterministic dataflow network (Kahn 1974): whatever the timing of the
workers, every run reaches the same end. One abstract run that completes therefore proves that all do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Unit,
    Update,
    matching_receive,
)
from planner.schedule.streams import PipelineShape, stream


class ScheduleError(AssertionError):
    """The streams of a schedule contradict each other: a defect of the generator, never of the user."""


def check_streams(shape: PipelineShape, minibatches: int) -> None:
    """Run the streams of `shape` abstractly.

    Raises:
        ScheduleError: on a deadlock (naming what each worker waits for), a message that nobody takes, a backward
            without its forward, a forward with a version of the weights that is not there, or more units in flight or
            versions than stated.
    """
    _Run(shape, minibatches).complete()


class _Run:
    def __init__(self, shape: PipelineShape, minibatches: int) -> None:
        self.shape = shape
        self.stage_of = shape.first_stages
        self.streams: Mapping[int, Iterator[Instruction]] = {
            rank: stream(shape, stage, rank, minibatches) for rank, stage in self.stage_of.items()
        }
        self.blocked: dict[int, Instruction | None] = {
            rank: next(instructions, None) for rank, instructions in self.streams.items()
        }
        self.mail: dict[tuple[int, int, type, int, int], deque[Instruction]] = {}
        self.arrived: dict[AllReduce, set[int]] = {}
        self.replicas = {(rank, stage): _Replica() for stage, ranks in enumerate(shape.ranks) for rank in ranks}

    def complete(self) -> None:
        while any(self.blocked.values()):
            moved = [rank for rank in self.streams if self._advance(rank)]
            if not moved:
                raise ScheduleError(f"deadlock: {self.blocked}")
        left = [message for box in self.mail.values() for message in box]
        if left:
            raise ScheduleError(f"nobody takes {left[0]}")

    def _advance(self, rank: int) -> bool:
        """Run `rank` until it waits; whether it got anywhere."""
        moved = False
        while (instruction := self.blocked[rank]) is not None and self._execute(rank, instruction):
            self.blocked[rank] = next(self.streams[rank], None)
            moved = True
        return moved

    def _execute(self, rank: int, instruction: Instruction) -> bool:
        match instruction:
            case SendActivation() | SendGradient():
                receive = matching_receive(instruction, rank)
                self.mail.setdefault(_link(rank, instruction.peer_rank, receive), deque()).append(receive)
            case ReceiveActivation() | ReceiveGradient():
                box = self.mail.get(_link(instruction.peer_rank, rank, instruction))
                if not box:
                    return False
                # Messages between two stages' workers arrive in order: the first one must be the one awaited.
                if (first := box.popleft()) != instruction:
                    raise ScheduleError(f"rank {rank} awaits {instruction} but {first} comes first")
            case AllReduce():
                here = self.arrived.setdefault(instruction, set())
                here.add(rank)
                return here == set(self.shape.ranks[instruction.stage])
            case Forward():
                self._forward(rank, instruction)
            case Backward():
                used = self.replicas[rank, instruction.stage].used
                if used.pop(instruction.unit, None) is None:
                    raise ScheduleError(f"rank {rank} runs {instruction} without its forward")
            case Update():
                self._update(rank, instruction)
        return True

    def _forward(self, rank: int, forward: Forward) -> None:
        replica = self.replicas[rank, forward.stage]
        version = replica.updates if forward.version is None else forward.version
        if version != replica.updates and version not in replica.kept:
            raise ScheduleError(f"rank {rank} runs {forward} after {replica.updates} updates, with {replica.kept} kept")
        replica.used[forward.unit] = version
        if len(replica.used) > self.shape.in_flight(forward.stage):
            raise ScheduleError(f"rank {rank} holds {list(replica.used)}")

    def _update(self, rank: int, update: Update) -> None:
        replica = self.replicas[rank, update.stage]
        older = {replica.updates, *replica.kept, *replica.used.values()}
        if update.round != replica.updates or not older.issuperset(update.kept):
            raise ScheduleError(f"rank {rank} runs {update} after {replica.updates} updates, with {older} left")
        replica.updates += 1
        replica.kept = update.kept
        held = {replica.updates, *replica.kept, *replica.used.values()}
        if len(held) > self.shape.versions(update.stage):
            raise ScheduleError(f"rank {rank} holds the weights of {sorted(held)}")


@dataclass
class _Replica:
    """One replica of a stage: updates done, older versions kept for forwards to come, and of units in flight."""

    updates: int = 0
    kept: tuple[int, ...] = ()
    used: dict[Unit, int] = field(default_factory=dict)


def _link(sender: int, receiver: int, receive: Receive) -> tuple[int, int, type, int, int]:
    """What keeps messages in order: one direction between two stages, from one worker to another."""
    return sender, receiver, type(receive), receive.stage, receive.peer_stage
