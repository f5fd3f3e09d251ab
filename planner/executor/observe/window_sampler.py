"""Record some minibatches of every window of a run, at a cost that nobody notices.

    minibatch     0   1   2   3   4   5  ...  13  14  15  ...
    recorded                      x               x

Recorded are blocks of as many minibatches as replicas take turns by: one in ten, or more often
where a window has few. The rest of a run pays one comparison per instruction.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from planner.executor.observe.clock import Clock
from planner.formats.timeline import Event, EventKind
from planner.runtime import Event as Mark
from planner.schedule import instructions as do
from planner.schedule.instructions import Instruction, Message

WINDOW = 50  # minibatches
_SPARSE = 10  # at most one block in so many is recorded
_BLOCKS = 3  # that a window has, if it is long enough
_MICROBATCHES = 32  # of a minibatch that are recorded: more say nothing new
_KINDS: dict[type, EventKind] = {
    do.Forward: "forward",
    do.Backward: "backward",
    do.BackwardInput: "backward_input",
    do.BackwardWeight: "backward_weight",
    do.SendActivation: "send_activation",
    do.SendGradient: "send_gradient",
    do.ReceiveActivation: "receive_activation",
    do.ReceiveGradient: "receive_gradient",
}


class WindowNotes(NamedTuple):
    """What one worker recorded of a window."""

    number: int  # of the window
    first: int  # minibatch
    end: int
    events: list[Event]  # on this worker's clock
    seconds: float  # of the whole window, on this worker


class WindowSampler:
    """Records instructions of some minibatches, and hands each window over when it has passed.

    Args:
        rank: of this worker.
        block: minibatches in which every replica of every stage has its turn.
        hand_over: is given each window; called between two instructions, so it must not wait.
        window: minibatches; made a multiple of what is recorded together.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        block: int,
        hand_over: Callable[[WindowNotes], None],
        window: int = WINDOW,
    ) -> None:
        self._rank = rank
        self._block = block
        self._hand_over = hand_over
        self._sparse = max(1, min(_SPARSE, window // (_BLOCKS * block)))
        # Not the last, so that it ends before its window does.
        self._recorded = (self._sparse - 1) // 2
        round_ = block * self._sparse
        self.window = max(1, round(window / round_)) * round_
        self._clock = Clock(device)
        self._notes: deque[tuple[Instruction, Mark, Mark]] = deque()
        self._end: int | None = None  # of the window; None before the first minibatch
        self._first = 0
        self._began_s = 0.0

    @property
    def number(self) -> int:
        """Number of the window that is being recorded; -1 before the first minibatch."""
        return -1 if self._end is None else self._end // self.window - 1

    def records(self, instruction: Instruction) -> bool:
        """Return whether to record an instruction; hand over what was recorded where a window
        ends.
        """
        if type(instruction) not in _KINDS:
            return False
        # All of `_KINDS` have a unit.
        minibatch = instruction.unit.minibatch  # type: ignore[union-attr]
        if self._end is None or minibatch >= self._end:
            self._turn_to(minibatch)
        if minibatch // self._block % self._sparse != self._recorded:
            return False
        return instruction.unit.microbatch < _MICROBATCHES  # type: ignore[union-attr]

    def record(self, instruction: Instruction, start: Mark, end: Mark) -> None:
        """Keep when an instruction began and ended."""
        if isinstance(instruction, Message) and instruction.peer_rank == self._rank:
            return  # within one worker nothing is sent
        self._notes.append((instruction, start, end))

    def forget(self) -> None:
        """Begin a window anew: what this worker does now is no training."""
        self._notes.clear()
        self._end = None

    def _turn_to(self, minibatch: int) -> None:
        now_s = time.perf_counter()
        if self._end is not None:
            notes = WindowNotes(
                number=self.number,
                first=self._first,
                end=self._end,
                events=self._passed(),
                seconds=now_s - self._began_s,
            )
            self._hand_over(notes)

        self._first = minibatch
        self._end = (minibatch // self.window + 1) * self.window
        self._began_s = now_s

    def _passed(self) -> list[Event]:
        """Return what the device has done of what was recorded; the rest comes with the next
        window.
        """
        events: list[Event] = []
        while self._notes and self._notes[0][2].query():
            instruction, start, end = self._notes.popleft()
            if not events:
                self._clock.move_to(start)
            events.append(self._event(instruction, start, end))
        return events

    def _event(self, instruction: Instruction, start: Mark, end: Mark) -> Event:
        unit = instruction.unit  # type: ignore[union-attr]
        peer: tuple[int | None, int | None] = (None, None)
        if isinstance(instruction, Message):
            peer = instruction.peer_rank, instruction.peer_stage
        return Event(
            self._rank,
            _KINDS[type(instruction)],
            instruction.stage,
            unit.minibatch,
            unit.microbatch,
            self._clock.seconds(start),
            self._clock.seconds(end),
            *peer,
        )
