"""What a worker is doing right now, where others can read it: a page of memory, in a file where there is a launcher.

Writing it costs about a microsecond per instruction and sends nothing. `planner.executor.health.hangs` reads it.

    page:  pid, beats, state, stage, peer rank, peer stage, minibatch, microbatch, slowest_s, activity (40 bytes)
    then:  per stage of the worker and direction, the last unit that it sent: stage, direction, minibatch, microbatch
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    Instruction,
    Message,
    Receive,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)

_PAGE = struct.Struct("<qqiiiiqid40s")
_SENT = struct.Struct("<iiqq")
_SENT_START = 128
_NO_STAGE = -1
_EVALUATION = "Evaluation:"
_FIRST = Unit(0)


class State(IntEnum):
    """What kind of thing a worker is at."""

    PREPARING = 0  # a phase of its own work outside of the schedule; processor time counts as progress
    MEETING = 1  # a phase that needs all workers
    COMPUTING = 2
    RECEIVING = 3
    SENDING = 4
    REDUCING = 5


@dataclass(frozen=True)
class Beat:
    """What a worker was doing when its page was read.

    `sent`: by (stage, whether activations), the last unit sent. Units of a stage are sent in the order of its stream.
    """

    pid: int
    beats: int  # grows with every instruction and phase
    state: State
    activity: str  # a class name of `planner.schedule.instructions`, or what a phase is called
    stage: int | None = None
    unit: Unit = _FIRST
    peer_rank: int | None = None
    peer_stage: int | None = None
    slowest_s: float = 0.0  # the longest instruction so far
    sent: Mapping[tuple[int, bool], Unit] = field(default_factory=dict)

    @classmethod
    def read(cls, page: bytes) -> Beat | None:
        """What `Heartbeat` wrote; None before its first beat."""
        pid, beats, state, stage, peer_rank, peer_stage, minibatch, microbatch, slowest_s, activity = _PAGE.unpack_from(
            page
        )
        if not beats:
            return None
        sent = {}
        for start in range(_SENT_START, len(page) - _SENT.size + 1, _SENT.size):
            sender, activation, sent_minibatch, sent_microbatch = _SENT.unpack_from(page, start)
            if sender:  # counted from 1: zeros are an empty place
                sent[sender - 1, bool(activation)] = Unit(sent_minibatch, sent_microbatch)
        return cls(
            pid,
            beats,
            State(state),
            activity.rstrip(b"\0").decode(),
            None if stage == _NO_STAGE else stage,
            Unit(minibatch, microbatch),
            None if peer_rank == _NO_STAGE else peer_rank,
            None if peer_stage == _NO_STAGE else peer_stage,
            slowest_s,
            sent,
        )

    @classmethod
    def none_yet(cls, pid: int) -> Beat:
        """Of a process that has not come to write its page."""
        return cls(pid, 0, State.PREPARING, "starting")

    def describe(self) -> str:
        """For a sentence: "in the forward of minibatch 17", "waiting for ... from worker 0"."""
        of_evaluation = self.activity.startswith(_EVALUATION)
        unit = f"minibatch {self.unit.minibatch}" + (" of the evaluation" if of_evaluation else "")
        if self.unit.microbatch:
            unit += f", microbatch {self.unit.microbatch}"
        kind = "activations" if "Activation" in self.activity else "gradients"
        if "Shared" in self.activity:
            kind, unit = "shared weights' gradients", f"round {self.unit.minibatch}"
        match self.state:
            case State.PREPARING | State.MEETING:
                return f"while {self.activity}"
            case State.RECEIVING:
                return f"waiting for the {kind} of {unit} from worker {self.peer_rank}"
            case State.SENDING:
                return f"sending the {kind} of {unit} to worker {self.peer_rank}"
            case State.REDUCING:
                return f"in the all-reduce of round {self.unit.minibatch}"
            case State.COMPUTING:
                if self.activity == "AddShared":
                    return f"adding up the shared weights' gradients of round {self.unit.minibatch}"
                if self.activity == "Update":
                    return f"in the update after minibatch {self.unit.minibatch}"
                words = "".join(
                    f" {c.lower()}" if c.isupper() else c for c in self.activity.removeprefix(_EVALUATION)
                ).strip()
                return f"in the {words} of {unit}"


class Heartbeat:
    """Writes the page of this worker.

    Args:
        path: of the page's file; None to keep it in memory, for the threads of this process.
        stages: that this worker holds.
    """

    def __init__(self, path: Path | None = None, stages: tuple[int, ...] = ()) -> None:
        size = _SENT_START + 2 * _SENT.size * len(stages)
        if path is None:
            self._page = mmap.mmap(-1, size)
        else:
            with path.open("w+b") as file:
                file.truncate(size)
                self._page = mmap.mmap(file.fileno(), size)
        self._pid = os.getpid()
        self._beats = 0
        self._slowest_s = 0.0
        self._began_s: float | None = None
        self._last_backward = 0  # its minibatch
        self._sent_at = {
            (stage, activation): _SENT_START + _SENT.size * (2 * index + activation)
            for index, stage in enumerate(stages)
            for activation in (False, True)
        }

    def begin(self, instruction: Instruction, *, evaluating: bool = False) -> None:
        """The worker starts `instruction`; `evaluating`: of an evaluation's stream, which has a count of its own."""
        self._end_last()
        peer_rank = peer_stage = _NO_STAGE
        state = State.COMPUTING
        if isinstance(instruction, Message):
            state = State.RECEIVING if isinstance(instruction, Receive) else State.SENDING
            peer_rank, peer_stage = instruction.peer_rank, instruction.peer_stage
        elif isinstance(instruction, AllReduce):
            state = State.REDUCING
        if isinstance(instruction, (AllReduce, AddShared)):
            minibatch, microbatch = instruction.round, 0
        elif isinstance(instruction, Update):
            # A round has a minibatch for each replica; this worker's last one says more than the round's number.
            minibatch, microbatch = self._last_backward, 0
        else:
            minibatch, microbatch = instruction.unit.minibatch, instruction.unit.microbatch
        if isinstance(instruction, (Backward, BackwardInput)):
            self._last_backward = minibatch
        kind = type(instruction)
        activity = _NAMES.get(kind) or _NAMES.setdefault(kind, kind.__name__.encode())
        if evaluating:
            activity = _EVALUATION.encode() + activity
        self._write(state, activity, instruction.stage, minibatch, microbatch, peer_rank, peer_stage)
        self._began_s = time.perf_counter()
        if isinstance(instruction, (SendActivation, SendGradient)) and not evaluating:
            activation = isinstance(instruction, SendActivation)
            place = self._sent_at.get((instruction.stage, activation))
            if place is not None:
                _SENT.pack_into(self._page, place, instruction.stage + 1, activation, minibatch, microbatch)

    def enter(self, activity: str, *, meeting: bool = False) -> None:
        """The worker does something outside of its schedule, until it says otherwise.

        Args:
            activity: for a sentence after "while": "writing a checkpoint".
            meeting: it needs all workers, and each waits for the last one.
        """
        self._end_last()
        self._write(State.MEETING if meeting else State.PREPARING, activity.encode()[:40], _NO_STAGE, 0, 0, -1, -1)

    def read(self) -> Beat:
        """What was written last."""
        beat = Beat.read(self._page[:])
        return beat if beat is not None else Beat.none_yet(self._pid)

    @property
    def page(self) -> bytes:
        """As it is now, for `Beat.read`."""
        return self._page[:]

    def _end_last(self) -> None:
        if self._began_s is not None:
            self._slowest_s = max(self._slowest_s, time.perf_counter() - self._began_s)
            self._began_s = None

    def _write(
        self,
        state: State,
        activity: bytes,
        stage: int,
        minibatch: int,
        microbatch: int,
        peer_rank: int,
        peer_stage: int,
    ) -> None:
        self._beats += 1
        _PAGE.pack_into(
            self._page,
            0,
            self._pid,
            self._beats,
            state,
            stage,
            peer_rank,
            peer_stage,
            minibatch,
            microbatch,
            self._slowest_s,
            activity,
        )


_NAMES: dict[type, bytes] = {}
