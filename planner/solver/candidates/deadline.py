"""When an answer is wanted."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """A moment to have an answer by; None for no hurry."""

    at_s: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds to go, from zero up."""
        return None if self.at_s is None else max(self.at_s - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        """Whether it is too late."""
        return self.left_s == 0.0


NO_HURRY = Deadline(None)
