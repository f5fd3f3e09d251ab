"""The instructions that the minibatches handed in so far allow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from planner.executor.custom_loop.fed_batches import ENDLESS
from planner.executor.run.context import PipelineContext
from planner.schedule.instructions import AddShared, AllReduce, Instruction, ReceiveShared, SendShared, Update


class AllowedInstructions:
    """A worker's stream of instructions, as far as it is known: nobody knows whether a minibatch will follow."""

    def __init__(self, context: PipelineContext) -> None:
        self._context = context
        self.begin_at(0)

    def begin_at(self, minibatch: int) -> None:
        """Begin the stream anew, with an empty pipeline."""
        self.base = minibatch  # minibatches before the stream
        self._executed = 0  # instructions since then
        self._next: Instruction | None = None
        self._endless = self._stream(ENDLESS)

    def allowed(self, count: int) -> Iterator[Instruction]:
        """Return the next instructions, in order, that `count` minibatches in all allow."""
        allowed: list[Instruction] = []
        while True:
            if self._next is None:
                self._next = next(self._endless)
            if not self._allows(self._next, count):
                break
            allowed.append(self._next)
            self._next = None
        self._executed += len(allowed)
        return iter(allowed)

    def rest(self, count: int) -> Iterator[Instruction]:
        """Return the instructions that finish all `count` minibatches; begin anew afterwards."""
        # A stream that ends there begins with what was executed of the endless one: they differ at the end only.
        return islice(self._stream(count - self.base), self._executed, None)

    def _stream(self, minibatches: int) -> Iterator[Instruction]:
        return self._context.stream(self.base, self.base + minibatches)

    def _allows(self, instruction: Instruction, count: int) -> bool:
        match instruction:
            case AllReduce(round=round_) | AddShared(round=round_) | Update(round=round_):
                pass
            case SendShared(unit=unit) | ReceiveShared(unit=unit):
                round_ = unit.minibatch
            case _:
                return instruction.unit.minibatch < count
        per_round = self._context.shape.minibatches_per_update(instruction.stage)
        return self.base + (round_ - self.base + 1) * per_round <= count
