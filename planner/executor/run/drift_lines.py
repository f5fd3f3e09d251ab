"""Which of a run's differences from its plan are worth a line.

What another plan would mend is said at once. All else comes and goes on a busy machine, so it must
last, and each line of that kind must have lasted twice as long as the one before.
"""

from planner.formats.drift import Drift

_LASTS = 2  # more windows, for the first line
_MOST_LASTS = 64


class DriftLines:
    """Is told of each difference and of each look at the run, of which a window has so many, and
    returns what to say.
    """

    def __init__(self, looks: int = 1) -> None:
        self._looks = looks
        self._unsaid: Drift | None = None
        self._passed = 0  # looks since then
        self._lasts = _LASTS
        self._said = False  # that something is not as planned

    def found(self, drift: Drift) -> Drift | None:
        """Return a difference that is to be said now; None where it is to last first."""
        self._unsaid = None
        if drift.better_config is not None or drift.why_not:
            return self._say(drift)
        # Nobody needs to know that what was never said is over.
        if self._said or not drift.is_as_planned:
            self._unsaid = drift
            self._passed = 0
        return None

    def passed(self) -> Drift | None:
        """Return what is to be said after a look that changed nothing."""
        if self._unsaid is None:
            return None
        self._passed += 1
        if self._passed < self._looks * self._lasts:
            return None
        drift = self._unsaid
        self._unsaid = None
        self._lasts = min(2 * self._lasts, _MOST_LASTS)
        return self._say(drift)

    def _say(self, drift: Drift) -> Drift:
        self._said = not drift.is_as_planned
        return drift
