"""A worker's heartbeat: what the worker is doing, which the main thread notes before each
instruction.

Another thread reads it. A host that is ahead of its device may wait for it in any call, and the
device for a message: so whoever reads also asks what the device is at, which is known from events.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from planner.formats.files import Record, replace
from planner.schedule import instructions as do
from planner.schedule.instructions import Instruction, Message, Receive

State = Literal["preparing", "computing", "waiting", "elsewhere"]


class Beat(Record):
    """What a worker, or its device, was doing."""

    beats: int  # grows with every instruction and phase
    # Outside of the schedule it prepares, and processor time counts as progress. Elsewhere is a
    # script's own code.
    state: State
    doing: str  # in a sentence: "in the forward of minibatch 17"
    stage: int | None = None  # of an instruction
    # The first stage that the worker has. None: that of the plan that it was started with.
    holds: int | None = None
    left_out: bool = False  # of the plan: the worker has no stage
    slowest_s: float = 0.0  # the longest instruction so far
    device: "Beat | None" = None  # what the device is at, where the host is ahead of it


@dataclass(frozen=True)
class _Phase:
    """What is outside of the schedule."""

    activity: str
    state: State


class Heartbeat:
    """Notes what this worker does."""

    def __init__(self) -> None:
        self._beats = 0
        self._slowest_s = 0.0
        self._began_s: float | None = None
        self._last_backward = 0  # minibatch
        self._holds: int | None = None
        self._left_out = False
        # Set at once, for threads that read: an instruction, and whether it is of an evaluation; or
        # a phase.
        self._now: tuple[int, Instruction | _Phase, bool] = (
            0,
            _Phase("starting", "preparing"),
            False,
        )
        self._device: Callable[[], tuple[int, Instruction | None]] | None = None

    def begin(self, instruction: Instruction, *, evaluating: bool = False) -> None:
        """Record that the worker starts `instruction`; those of an evaluation count its
        minibatches, not training's.
        """
        now_s = time.perf_counter()
        if self._began_s is not None and now_s - self._began_s > self._slowest_s:
            self._slowest_s = now_s - self._began_s
        self._began_s = now_s
        if isinstance(instruction, (do.Backward, do.BackwardInput)):
            self._last_backward = instruction.unit[0]
        # Counted, so that an instruction that is repeated is told from one that does not end.
        self._beats += 1
        self._now = self._beats, instruction, evaluating

    def enter(self, activity: str, *, meeting: bool = False) -> None:
        """Record a phase outside of the schedule, as "writing a checkpoint"; in a `meeting` all
        wait for the last.
        """
        self._enter(_Phase(activity, "waiting" if meeting else "preparing"))

    def hold(self, stage: int | None) -> None:
        """Record the worker's first stage, where the run has moved to another plan; None where that
        leaves the worker out.
        """
        self._holds = stage
        self._left_out = stage is None

    def leave_to_script(self) -> None:
        """Record that the user's script goes on, for as long as it likes while no other worker
        waits for it.
        """
        self._enter(_Phase("running the script's own code", "elsewhere"))

    def _enter(self, phase: _Phase) -> None:
        if self._began_s is not None:
            self._slowest_s = max(self._slowest_s, time.perf_counter() - self._began_s)
            self._began_s = None
        self._beats += 1
        self._now = self._beats, phase, False

    def follow(self, device: Callable[[], tuple[int, Instruction | None]]) -> None:
        """Tell whoever reads what `device` says: how many computations it has passed, and what it
        is at.
        """
        self._device = device

    def read(self, *, device: bool = False) -> Beat:
        """Return what the worker is at; with `device`, what its device is at if that is known."""
        beats, what, evaluating = self._now
        if isinstance(what, _Phase):
            beat = Beat(
                beats=beats,
                state=what.state,
                doing=f"while {what.activity}",
                holds=self._holds,
                left_out=self._left_out,
                slowest_s=self._slowest_s,
            )
        else:
            beat = self._beat(beats, what, self._slowest_s, evaluating=evaluating)

        if device and self._device is not None:
            with suppress(RuntimeError):  # of a device that failed; the main thread tells
                passed, instruction = self._device()
                if instruction is not None:
                    return replace(beat, device=self._beat(passed, instruction))

        return beat

    def _beat(
        self,
        beats: int,
        instruction: Instruction,
        slowest_s: float = 0.0,
        *,
        evaluating: bool = False,
    ) -> Beat:
        return Beat(
            beats=beats,
            state="waiting" if isinstance(instruction, Message | do.AllReduce) else "computing",
            doing=_words(instruction, self._last_backward, evaluating=evaluating),
            stage=instruction.stage,
            holds=self._holds,
            slowest_s=slowest_s,
        )


def _words(instruction: Instruction, last_backward: int, *, evaluating: bool) -> str:
    match instruction:
        case do.AllReduce():
            return f"in the all-reduce of round {instruction.round}"
        case do.AddShared():
            return f"adding up the shared weights' gradients of round {instruction.round}"
        case do.Update():
            # A round has a minibatch for each replica: the worker's own last one tells more than
            # the round's number.
            return f"in the update after minibatch {last_backward}"

    minibatch, microbatch = instruction.unit
    unit = f"minibatch {minibatch}" + (" of the evaluation" if evaluating else "")
    unit += f", microbatch {microbatch}" if microbatch else ""
    if not isinstance(instruction, Message):
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in type(instruction).__name__)
        return f"in the{words} of {unit}"

    what = None
    if isinstance(instruction, do.ReceiveActivation | do.SendActivation):
        what = f"activations of {unit}"
    if isinstance(instruction, do.ReceiveShared | do.SendShared):
        what = f"shared weights' gradients of round {minibatch}"
    what = what or f"gradients of {unit}"
    if isinstance(instruction, Receive):
        return f"waiting for the {what} from worker {instruction.peer_rank}"
    return f"sending the {what} to worker {instruction.peer_rank}"
