"""Proof by execution that the streams of a plan fit together: no deadlock, no unmatched message, no missing data.

Sends never wait, so the streams form a deterministic dataflow network (Kahn 1974): whatever the timing of the
workers, every run reaches the same end. One abstract run that completes therefore proves that all do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

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
            without its forward, or units in flight beyond the stated depth.
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
        self.updates = dict.fromkeys(self.stage_of, 0)
        self.in_flight: dict[tuple[int, int], list[Unit]] = {
            (rank, stage): [] for stage, ranks in enumerate(shape.ranks) for rank in ranks
        }

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
                self._check_version(rank, instruction)
                flying = self.in_flight[rank, instruction.stage]
                flying.append(instruction.unit)
                if len(flying) > self.shape.in_flight(instruction.stage):
                    raise ScheduleError(f"rank {rank} holds {flying}")
            case Backward():
                flying = self.in_flight[rank, instruction.stage]
                if instruction.unit not in flying:
                    raise ScheduleError(f"rank {rank} runs {instruction} without its forward")
                flying.remove(instruction.unit)
            case Update():
                self.updates[rank] += 1
        return True

    def _check_version(self, rank: int, forward: Forward) -> None:
        """Under 2bw minibatch t runs at the version that t - 2 left, or the two versions would not suffice."""
        if self.shape.schedule == "2bw" and self.updates[rank] < forward.unit.minibatch - 1:
            raise ScheduleError(f"rank {rank} runs {forward} after {self.updates[rank]} updates")


def _link(sender: int, receiver: int, receive: Receive) -> tuple[int, int, type, int, int]:
    """What keeps messages in order: one direction between two stages, from one worker to another."""
    return sender, receiver, type(receive), receive.stage, receive.peer_stage
