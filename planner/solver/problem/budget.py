"""How long searches may take, and what they know so far."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING

from planner.cost.candidate import Candidate
from planner.errors import PlannerError, StoppedError
from planner.options.solving import Progress
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.steady_time import steady_s

if TYPE_CHECKING:
    from planner.solver.problem.result import Evaluation


SEARCHING = 0.8  # share of the time for searches; the rest is for simulating what they find
BUSY = 3.0  # times as long as it computes may a part of a search take, because the machine does other work
LATER = 1.05  # how many times as fast a pipeline must be whose gradients are an update later
MOST_INSTRUCTIONS = 2**19  # of all workers in all simulations of one search: some seconds


def computed_s() -> float:
    """Return the processor time of this thread, and of the programs that the process ran and waited for."""
    return time.thread_time() + sum(os.times()[2:4])


@dataclass(frozen=True)
class Deadline:
    """When a search must answer; both are None without a time limit. Once `stop` is set, no time is left.

    The whole ends on the wall clock, and its parts in processor time, so that beside other work on the machine a
    search looks at what it would look at alone. A thread never computes for longer than what passes.
    """

    at_s: float | None
    stop: Event = field(default_factory=Event, compare=False, repr=False)
    computed_at_s: float | None = None  # the same on the clock of `computed_s`, perhaps sooner

    @classmethod
    def after(cls, seconds: float | None, stop: Event | None = None) -> Deadline:
        """Return the deadline so many seconds from now."""
        if seconds is None or math.isinf(seconds):
            return cls(None, stop or Event())
        return cls(time.monotonic() + seconds, stop or Event(), computed_s() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, never negative."""
        if self.stop.is_set():
            return 0.0
        if self.at_s is None or self.computed_at_s is None:
            return None
        return max(min(self.at_s - time.monotonic(), self.computed_at_s - computed_s()), 0.0)

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0

    def at_least(self, seconds: float) -> Deadline:
        """Return this deadline, but no sooner than so many seconds from now, even if it was stopped."""
        left_s = self.left_s
        if left_s is None or left_s > seconds:
            return self
        soon = Deadline.after(seconds)
        return soon if self.stop.is_set() else replace(soon, at_s=max(self.at_s or 0.0, soon.at_s or 0.0))

    def at_most(self, seconds: float) -> Deadline:
        """Return the deadline after so many seconds of processor time, or `BUSY` times as many on the wall clock."""
        soon = Deadline.after(seconds, self.stop)
        if self.at_s is None or self.computed_at_s is None or soon.computed_at_s is None:
            return soon
        at_s = min(self.at_s, time.monotonic() + BUSY * seconds)
        return replace(soon, at_s=at_s, computed_at_s=min(self.computed_at_s, soon.computed_at_s))

    def check(self) -> None:
        """Raise `OutOfTimeError` if no time is left: for searches that have no answer yet."""
        if self.passed:
            raise OutOfTimeError

    def earlier(self, share: float) -> Deadline:
        """Return the deadline after this share of the processor time that is left.

        On the wall clock a part may take longer, if what comes after it keeps a `BUSY`th of its own share.
        """
        if self.at_s is None or self.computed_at_s is None:
            return self
        left_s, compute_s = self.at_s - time.monotonic(), self.computed_at_s - computed_s()
        wall = self.at_s - (1 - share) / BUSY * max(left_s, 0.0)
        return replace(self, at_s=wall, computed_at_s=self.computed_at_s - (1 - share) * max(compute_s, 0.0))


class OutOfTimeError(Exception):
    """The deadline has passed before a search had any answer."""


def no_plan_yet(deadline: Deadline) -> PlannerError:
    """Return the error for a search that ended before it had any plan: because time passed, or because of Ctrl-C."""
    if deadline.stop.is_set():
        return StoppedError("interrupted before any plan was found")
    return PlannerError(
        "the time limit passed before any plan was found", hint="give a longer `time_limit_s`, or leave it out"
    )


NO_HURRY = Deadline(None)


@dataclass(frozen=True)
class Patience:
    """When all that one question needs must be answered, counted from when this is made, and what is told meanwhile."""

    deadline: Deadline = NO_HURRY
    progress: Progress | None = None

    @classmethod
    def of(cls, time_limit_s: float | None, progress: Progress | None = None) -> Patience:
        """Return the patience for so many seconds from now; None is for as long as it takes."""
        return cls(Deadline.after(time_limit_s, None if progress is None else progress.stop), progress)

    def part(self, share: float) -> Patience:
        """Return the patience for this share of the time that is left: see `Deadline.earlier`."""
        return replace(self, deadline=self.deadline.earlier(share))

    def at_most(self, seconds: float) -> Patience:
        """Return the patience for so many seconds of processor time, if they are left."""
        return replace(self, deadline=self.deadline.at_most(seconds))


@dataclass
class Budget:
    """What one search may spend, and what it has spent.

    Instructions are counted rather than seconds, so that the same problem has the same answer on any machine.
    """

    deadline: Deadline = NO_HURRY  # when it passes, the simulation in progress ends without an answer
    left: float = field(default_factory=lambda: MOST_INSTRUCTIONS)  # instructions that may still be simulated
    count: int = 0  # candidate plans that were simulated, at one depth or several
    exhausted: bool = True  # whether every candidate was looked at; False if instructions or time ran out
    seen: dict[tuple[Candidate, ...], Evaluation] = field(default_factory=dict)  # what came of those simulated
    known: dict[Hashable, float] = field(default_factory=dict)  # seconds of those simulated, by `PipelineCosts.key`
    progress: Progress = field(default_factory=Progress)
    searching: Deadline = field(init=False)  # when searches end, so that some time is left to simulate what they found

    def __post_init__(self) -> None:
        self.searching = self.deadline.earlier(SEARCHING)

    @classmethod
    def unlimited(cls, deadline: Deadline = NO_HURRY) -> Budget:
        """Return a budget for pricing single plans, each of which takes what it takes until the deadline."""
        return cls(deadline, left=math.inf)

    def apart(self, most: float = MOST_INSTRUCTIONS) -> Budget:
        """Return a budget of its own for the same question, with so many instructions; it knows what this one does."""
        return Budget(self.deadline, most, known=self.known, progress=self.progress)

    @property
    def over(self) -> bool:
        """Whether the instructions or the time are used up."""
        return self.left <= 0 or self.deadline.passed

    def steady_s(self, pipeline: PipelineCosts, *, needed: bool = False, hopeless_s: float = math.inf) -> float | None:
        """Simulate a pipeline, and return its seconds per minibatch in the steady state; infinity for a deadlock.

        Where a time is `needed`, only the deadline ends the simulation. Above `hopeless_s` a rough time does. Return
        None if the budget ends before the simulation does.
        """
        if (known_s := self.known.get(key := pipeline.key)) is not None:
            return known_s
        if self.deadline.passed or (self.left <= 0 and not needed):
            self.exhausted = False
            return None
        room, executed = math.inf if needed else self.left, 0

        def stop(instructions: int) -> bool:
            nonlocal executed
            executed = instructions
            return instructions > room or self.deadline.passed

        seconds = steady_s(pipeline, stop, hopeless_s)
        self.left -= executed
        if seconds is None:
            self.exhausted = False
        elif seconds <= hopeless_s:
            self.known[key] = seconds
        return seconds
