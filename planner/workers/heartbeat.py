"""A worker's heartbeat: a page of memory that says what the worker is doing, in a file if a launcher reads it.

Writing it costs about a microsecond per instruction and sends nothing. It can be trusted when the worker hangs: the
main thread writes it before each instruction, so that it names the one that does not end, and the page is read without
the worker's help. A thread that sent beats would go on while the main thread hangs.

    page:  pid, beats, state, stage, peer rank, minibatch, microbatch, slowest_s, activity (40 bytes)
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import get_args

from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    Instruction,
    Message,
    Receive,
    Unit,
    Update,
)

_PAGE = struct.Struct("<qqiiiqid40s")
_NONE = -1
_EVALUATION = b"Evaluation:"
_FIRST = Unit(0)


class State(IntEnum):
    """What kind of work a worker is doing."""

    PREPARING = 0  # a phase of its own outside of the schedule; processor time counts as progress
    MEETING = 1  # a phase that waits for all workers
    COMPUTING = 2
    RECEIVING = 3
    SENDING = 4
    REDUCING = 5


def _state_of(kind: type[Instruction]) -> State:
    if issubclass(kind, Message):
        return State.RECEIVING if issubclass(kind, Receive) else State.SENDING
    return State.REDUCING if kind is AllReduce else State.COMPUTING


# By class, so that a beat looks its state and name up: there is one for every instruction.
_DESCRIBED = {kind: (_state_of(kind), kind.__name__.encode()) for kind in get_args(Instruction)}


@dataclass(frozen=True)
class Beat:
    """What a worker was doing when its page was read."""

    pid: int
    beats: int  # grows with every instruction and phase
    state: State
    activity: str  # a class name of `planner.schedule.instructions`, or the name of a phase
    stage: int | None = None
    unit: Unit = _FIRST
    peer_rank: int | None = None
    slowest_s: float = 0.0  # the longest instruction so far

    @classmethod
    def read(cls, page: bytes) -> Beat | None:
        """Decode a page; None if `Heartbeat` has not written to it yet."""
        pid, beats, state, *places, minibatch, microbatch, slowest_s, activity = _PAGE.unpack_from(page)
        if not beats:
            return None
        stage, peer_rank = (None if place == _NONE else place for place in places)
        text, unit = activity.rstrip(b"\0").decode(), Unit(minibatch, microbatch)
        return cls(pid, beats, State(state), text, stage, unit, peer_rank, slowest_s)

    @classmethod
    def none_yet(cls, pid: int) -> Beat:
        """Return the beat of a process that has not written its page yet."""
        return cls(pid, 0, State.PREPARING, "starting")

    def describe(self) -> str:
        """Return it as part of a sentence: "in the forward of minibatch 17", "waiting for ... from worker 0"."""
        name = self.activity.removeprefix(_EVALUATION.decode())
        unit = f"minibatch {self.unit.minibatch}" + (" of the evaluation" if name != self.activity else "")
        if self.unit.microbatch:
            unit += f", microbatch {self.unit.microbatch}"
        kind = "activations" if "Activation" in name else "gradients"
        if "Shared" in name:
            kind, unit = "shared weights' gradients", f"round {self.unit.minibatch}"
        match self.state, name:
            case ((State.PREPARING | State.MEETING), _):
                return f"while {self.activity}"
            case State.RECEIVING, _:
                return f"waiting for the {kind} of {unit} from worker {self.peer_rank}"
            case State.SENDING, _:
                return f"sending the {kind} of {unit} to worker {self.peer_rank}"
            case State.REDUCING, _:
                return f"in the all-reduce of round {self.unit.minibatch}"
            case _, "AddShared":
                return f"adding up the {kind} of {unit}"
            case _, "Update":
                return f"in the update after {unit}"
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in name)
        return f"in the{words} of {unit}"


class Heartbeat:
    """Writes the page of this worker.

    Args:
        path: file of the page; None to keep it in memory, for threads of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._page = mmap.mmap(-1, _PAGE.size)
        else:
            with path.open("w+b") as file:
                file.truncate(_PAGE.size)
                self._page = mmap.mmap(file.fileno(), _PAGE.size)
        self._pid = os.getpid()
        self._beats = 0
        self._slowest_s = 0.0
        self._began_s: float | None = None
        self._last_backward = 0  # minibatch

    def begin(self, instruction: Instruction, *, evaluating: bool = False) -> None:
        """Record that the worker starts `instruction`; those of an evaluation count its minibatches, not training's."""
        now_s = time.perf_counter()
        if self._began_s is not None and now_s - self._began_s > self._slowest_s:
            self._slowest_s = now_s - self._began_s
        self._began_s = now_s
        if isinstance(instruction, (AllReduce, AddShared)):
            unit = (instruction.round, 0)
        elif isinstance(instruction, Update):
            # A round has a minibatch for each replica: the worker's own last one tells more than the round's number.
            unit = (self._last_backward, 0)
        else:
            unit = instruction.unit
            if isinstance(instruction, (Backward, BackwardInput)):
                self._last_backward = unit[0]
        peer_rank = instruction.peer_rank if isinstance(instruction, Message) else _NONE
        state, name = _DESCRIBED[type(instruction)]
        self._write(state, _EVALUATION + name if evaluating else name, instruction.stage, unit, peer_rank)

    def enter(self, activity: str, *, meeting: bool = False) -> None:
        """Record that the worker enters a phase outside of its schedule.

        Args:
            activity: what follows "while" in a sentence: "writing a checkpoint".
            meeting: the phase needs all workers, so each waits for the last one.
        """
        if self._began_s is not None:
            self._slowest_s = max(self._slowest_s, time.perf_counter() - self._began_s)
            self._began_s = None
        self._write(State.MEETING if meeting else State.PREPARING, activity.encode(), _NONE, _FIRST, _NONE)

    def read(self) -> Beat:
        """Return what was written last."""
        beat = Beat.read(self._page[:])
        return beat if beat is not None else Beat.none_yet(self._pid)

    @property
    def page(self) -> bytes:
        """A copy of the page, for `Beat.read`."""
        return self._page[:]

    def _write(self, state: State, activity: bytes, stage: int, unit: tuple[int, int], peer_rank: int) -> None:
        # Counted, so that an instruction that is repeated is told from one that does not end. A reader may see half a
        # write, which does no harm: only a page that has stopped changing is judged.
        self._beats += 1
        _PAGE.pack_into(
            self._page, 0, self._pid, self._beats, state, stage, peer_rank, *unit, self._slowest_s, activity
        )
