"""The targets of a binary search for the least time."""

from planner.solver.tuning.searches import ChainTuning


class Targets:
    """Proposes targets between a bound and the time of the best plan, until they are as near as
    asked for.

    Halving finds good plans, and asking for anything better ends the search. Close to the end they
    take turns.
    """

    def __init__(
        self,
        low_s: float,
        best_s: float,
        precision: float,
        tuning: ChainTuning,
        *,
        near: bool,
    ) -> None:
        """Take bounds of the least time, which is probably near the upper one if `near`."""
        self._low_s = low_s
        self._best_s = best_s
        self._precision = precision
        self._tuning = tuning

        self._strict = False  # whether to ask for anything better
        self._halvings = 0  # since the last such question
        self._patience = tuning.most_halvings if near else 1

        # If the time is near the upper bound, the lower one should come near first.
        self._least_s = 0.0
        if near:
            self._least_s = best_s * (1 - tuning.start_gap_share)

    @property
    def gap_s(self) -> float:
        """Distance of the bounds."""
        return self._best_s - self._low_s

    @property
    def is_open(self) -> bool:
        """Whether a plan may be faster than the best by more than the precision."""
        return self._low_s < self._better_s

    @property
    def _better_s(self) -> float:
        return self._best_s * (1 - self._precision)

    def next(self) -> float:
        """Return the next target."""
        if self._strict:
            return self._better_s

        middle_s = max((self._low_s + self._best_s) / 2, self._least_s)
        self._least_s = 0.0
        return min(middle_s, self._better_s)

    def met(self, best_s: float) -> None:
        """Note that a plan met the target: it takes `best_s`."""
        self._best_s = best_s
        self._take_turns()

    def missed(self, target_s: float) -> None:
        """Note that no plan meets the target."""
        self._low_s = target_s
        self._take_turns()

    def _take_turns(self) -> None:
        if self._strict:
            # There may be more that is better, so halve more often before the next such question.
            self._strict = False
            self._halvings = 0
            self._patience = min(2 * self._patience, self._tuning.most_halvings)
        elif self.gap_s < self._tuning.close_share * self._best_s:
            self._halvings += 1
            self._strict = self._halvings >= self._patience
