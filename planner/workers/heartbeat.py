"""A worker's heartbeat: a page of memory that says what the worker is doing, in a file if a launcher reads it.

Writing it costs about a microsecond per instruction and sends nothing. It can be trusted when the worker hangs: the
main thread writes it before each instruction, so that it names the one that does not end, and the page is read without
the worker's help. A thread that sent beats would go on while the main thread hangs.

A host that is ahead of its device may wait for it in any call, and the device for a message. So a thread adds what the
device is at, which it knows from events.

    page:  pid, beats, state, stage, peer rank, minibatch, microbatch, slowest_s, activity (40 bytes)
           the same of the device, its beats the computations that it has passed; zeros where it has nothing to do
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
_LOOKS_EVERY_S = 0.5  # at the device
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
    device: Beat | None = None  # what the device is at, where the host is ahead of it

    @classmethod
    def read(cls, page: bytes) -> Beat | None:
        """Decode a page; None if `Heartbeat` has not written to it yet."""
        host = cls._read(page, 0)
        return None if host is None else replace(host, device=cls._read(page, _PAGE.size))

    @classmethod
    def _read(cls, page: bytes, start: int) -> Beat | None:
        pid, beats, state, *places, minibatch, microbatch, slowest_s, activity = _PAGE.unpack_from(page, start)
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
            self._page = mmap.mmap(-1, 2 * _PAGE.size)
        else:
            with path.open("w+b") as file:
                file.truncate(2 * _PAGE.size)
                self._page = mmap.mmap(file.fileno(), 2 * _PAGE.size)
        self._pid = os.getpid()
        self._beats = 0
        self._slowest_s = 0.0
        self._began_s: float | None = None
        self._last_backward = 0  # minibatch
        self._device: Callable[[], tuple[int, Instruction | None]] | None = None

    def begin(self, instruction: Instruction, *, evaluating: bool = False) -> None:
        """Record that the worker starts `instruction`; those of an evaluation count its minibatches, not training's."""
        now_s = time.perf_counter()
        if self._began_s is not None and now_s - self._began_s > self._slowest_s:
            self._slowest_s = now_s - self._began_s
        self._began_s = now_s
        if isinstance(instruction, (Backward, BackwardInput)):
            self._last_backward = instruction.unit[0]
        self._beats += 1
        self._write(self._beats, instruction, evaluating=evaluating)

    def follow(self, device: Callable[[], tuple[int, Instruction | None]]) -> None:
        """Record from now on, in a thread, what the device is at, too.

        Args:
            device: returns how many computations it has passed, and the instruction that it is at; None where it has
                done all that it was given.
        """
        first, self._device = self._device is None, device
        if first:
            threading.Thread(target=self._follow, name="device's heartbeat", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self.look_at_device()
            time.sleep(_LOOKS_EVERY_S)

    def look_at_device(self) -> None:
        """Record what the device is at now."""
        assert self._device is not None
        passed, instruction = self._device()
        if instruction is None:
            self._page[_PAGE.size :] = bytes(_PAGE.size)
        else:
            self._write(passed + 1, instruction, _PAGE.size)

    def enter(self, activity: str, *, meeting: bool = False) -> None:
        """Record that the worker enters a phase outside of its schedule.

        Args:
            activity: what follows "while" in a sentence: "writing a checkpoint".
            meeting: the phase needs all workers, so each waits for the last one.
        """
        if self._began_s is not None:
            self._slowest_s = max(self._slowest_s, time.perf_counter() - self._began_s)
            self._began_s = None
        self._beats += 1
        state = State.MEETING if meeting else State.PREPARING
        _PAGE.pack_into(
            self._page, 0, self._pid, self._beats, state, _NONE, _NONE, *_FIRST, self._slowest_s, activity.encode()
        )

    def read(self) -> Beat:
        """Return what was written last."""
        beat = Beat.read(self._page[:])
        return beat if beat is not None else Beat.none_yet(self._pid)

    @property
    def page(self) -> bytes:
        """A copy of the page, for `Beat.read`."""
        return self._page[:]

    def _write(self, beats: int, instruction: Instruction, start: int = 0, *, evaluating: bool = False) -> None:
        # Counted, so that an instruction that is repeated is told from one that does not end. A reader may see half a
        # write, which does no harm: only a page that has stopped changing is judged.
        if isinstance(instruction, (AllReduce, AddShared)):
            unit = (instruction.round, 0)
        elif isinstance(instruction, Update):
            # A round has a minibatch for each replica: the worker's own last one tells more than the round's number.
            unit = (self._last_backward, 0)
        else:
            unit = instruction.unit
        peer_rank = instruction.peer_rank if isinstance(instruction, Message) else _NONE
        state, name = _DESCRIBED[type(instruction)]
        name = _EVALUATION + name if evaluating else name
        _PAGE.pack_into(
            self._page, start, self._pid, beats, state, instruction.stage, peer_rank, *unit, self._slowest_s, name
        )
