"""What a search knows so far, for those who wait for its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Progress:
    """The best plan and the best bound so far. Searches write it; any thread may read it.

    Attributes:
        config: of the best plan so far; empty without one.
        best_s: its seconds per minibatch.
        bound_s: seconds per minibatch that no plan is below, as far as is known.
        ends_at_s: when the search must answer, on the monotonic clock; None without a limit.
    """

    config: str = ""
    best_s: float = math.inf
    bound_s: float = 0.0
    ends_at_s: float | None = None

    def begin(self, ends_at_s: float | None, bound_s: float) -> None:
        """Begin a search that knows nothing but a bound yet."""
        self.config, self.best_s, self.bound_s, self.ends_at_s = "", math.inf, bound_s, ends_at_s

    def meet(self, config: str, seconds: float) -> None:
        """Take note of a plan."""
        if seconds < self.best_s:
            self.config, self.best_s = config, seconds
