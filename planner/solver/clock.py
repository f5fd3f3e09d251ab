"""How long a request may take, who is told meanwhile, and who may end it."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from threading import Event

from planner.errors import PlannerError, StoppedError
from planner.formats.files import replace
from planner.options.solving import Progress
from planner.solver.tuning.answers import ClockTuning
from planner.solver.tuning.record import STANDARD


def computed_s() -> float:
    """Return the processor time of this thread, and of the programs that the process ran and waited
    for.
    """
    return time.thread_time() + sum(os.times()[2:4])


class OutOfTimeError(Exception):
    """Time is over before a search had any answer."""


@dataclass
class _Look:
    """The last look at the processor time, which some systems take a third of a millisecond for.

    Attributes:
        again_s: on the monotonic clock, before which the processor time cannot be over.
    """

    again_s: float = -math.inf


@dataclass(frozen=True)
class Clock:
    """When a request must be answered; at no time where both times are None. Once it is stopped,
    no time is left.

    The whole ends on the wall clock, and its parts in processor time, so that beside other work on
    the machine a search looks at what it would look at alone. A thread never computes for longer
    than what passes.

    Attributes:
        at_s: when time is over, on the monotonic clock.
        computed_at_s: the same on the clock of `computed_s`, perhaps sooner.
        progress: is told the best plan and bound so far, and stops the clock.
        tuning: how much longer than its share a part may take.
    """

    at_s: float | None = None
    computed_at_s: float | None = None
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    tuning: ClockTuning = field(default=STANDARD.clock, repr=False)
    _look: _Look = field(default_factory=_Look, init=False, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        time_limit_s: float | None,
        progress: Progress | None = None,
        tuning: ClockTuning = STANDARD.clock,
        computing_share: float = 1.0,
    ) -> Clock:
        """Return the clock for so many seconds from now, of which a share may be computed; None or
        infinity is for as long as it takes.
        """
        progress = progress or Progress()
        if time_limit_s is None or math.isinf(time_limit_s):
            return cls(progress=progress, tuning=tuning)
        return cls(
            time.monotonic() + time_limit_s,
            computed_s() + computing_share * time_limit_s,
            progress,
            tuning,
        )

    @property
    def stop(self) -> Event:
        """Set, it ends the time."""
        return self.progress.stop

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, never negative; None without a limit."""
        if self.stop.is_set():
            return 0.0
        if self.at_s is None or self.computed_at_s is None:
            return None

        wall_s = self.at_s - time.monotonic()
        return max(min(wall_s, self.computed_at_s - computed_s()), 0.0)

    @property
    def passed(self) -> bool:
        """Whether no time is left: cheap enough to ask at every state of a search."""
        if self.stop.is_set():
            return True
        if self.at_s is None or self.computed_at_s is None:
            return False

        now_s = time.monotonic()
        if now_s >= self.at_s:
            return True
        if now_s < self._look.again_s:
            return False

        left_s = self.computed_at_s - computed_s()
        self._look.again_s = now_s + left_s
        return left_s <= 0

    def check(self) -> None:
        """Raise `OutOfTimeError` if no time is left: for searches that have no answer yet."""
        if self.passed:
            raise OutOfTimeError

    def part(self, share: float) -> Clock:
        """Return the clock for this share of the processor time that is left.

        On the wall clock a part may take longer, if what comes after it keeps a part of its own
        share.
        """
        if self.at_s is None or self.computed_at_s is None:
            return self

        rest = 1 - share
        wall_s = max(self.at_s - time.monotonic(), 0.0)
        compute_s = max(self.computed_at_s - computed_s(), 0.0)
        return replace(
            self,
            at_s=self.at_s - rest / self.tuning.max_wall_per_cpu_second * wall_s,
            computed_at_s=self.computed_at_s - rest * compute_s,
        )

    def at_most(self, seconds: float) -> Clock:
        """Return the clock for so many seconds of processor time, and a few times as many on the
        wall clock.
        """
        soon = Clock.of(seconds, self.progress, self.tuning)
        if self.at_s is None or self.computed_at_s is None or soon.computed_at_s is None:
            return soon
        return replace(
            soon,
            at_s=min(
                self.at_s,
                time.monotonic() + self.tuning.max_wall_per_cpu_second * seconds,
            ),
            computed_at_s=min(self.computed_at_s, soon.computed_at_s),
        )

    def at_least(self, seconds: float) -> Clock:
        """Return this clock, but with so many seconds left, even if it was stopped."""
        left_s = self.left_s
        if left_s is None or left_s > seconds:
            return self
        if self.stop.is_set():
            return Clock.of(seconds, replace(self.progress, stop=Event()), self.tuning)

        soon = Clock.of(seconds, self.progress, self.tuning)
        return replace(soon, at_s=max(self.at_s or 0.0, soon.at_s or 0.0))


NO_LIMIT = Clock()


def no_plan_yet(clock: Clock) -> PlannerError:
    """Return the error for a search that ended before it had any plan: because time passed, or
    because of Ctrl-C.
    """
    if clock.stop.is_set():
        return StoppedError("interrupted before any plan was found")
    return PlannerError(
        "the time limit passed before any plan was found",
        hint="give a longer `time_limit_s`, or leave it out",
    )
