"""The table of the exact search for asynchronous pipelines: the best suffix of a plan from each
state on.

A suffix is what follows a cut: the stages from there to the last state. Where a plan may have any
number of stages, the table has one row. Otherwise row n is about suffixes of at most n stages, and
a suffix of row n is a stage before one of row n - 1.
"""

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import IMPOSSIBLE, Integers


class Suffixes:
    """The best suffixes that meet one target.

    Attributes:
        gpus: by row and state, the GPUs of the best suffix that begins there; `IMPOSSIBLE` without
            one.
    """

    def __init__(self, states: int, most_stages: int | None = None) -> None:
        """Take so many states, and at most so many stages; None for any number of them."""
        rows = 1 if most_stages is None else most_stages + 1
        self.last = states - 1
        self.gpus = np.full((rows, states), IMPOSSIBLE, dtype=np.int64)
        self.gpus[:, self.last] = 0
        self._numbered = most_stages is not None

        # Of the best suffix: its stages, those of them that recompute, and where its first stage
        # ends, on how many replicas.
        self._stages, self._recomputing, self._end, self._replicas = np.zeros(
            (4, rows, states), dtype=np.int64
        )

        # The states with a suffix, filled from the end.
        self._reached = np.full(states, self.last, dtype=np.int64)
        self._first_reached = self.last

    @property
    def reached(self) -> Integers:
        """The states with a suffix, ascending."""
        return self._reached[self._first_reached :]

    @property
    def following(self) -> Integers:
        """Rows of `gpus` that a stage may be put before."""
        if not self._numbered:
            return self.gpus
        return self.gpus[:-1]

    def ranked(
        self,
        rows: Integers,
        states: Integers,
        gpus: Integers,
        recomputes: Integers | NDArray[np.bool_],
    ) -> Integers:
        """Return numbers that order new suffixes: by their GPUs, then their stages, then those that
        recompute.

        Args:
            rows: of `following`, where the rest of each suffix stands.
            states: at which its first stage ends.
            gpus: of the whole suffix.
            recomputes: whether its first stage does.
        """
        above_all = self.last + 2  # stages
        order = gpus * above_all + self._stages[rows, states]
        return order * above_all + self._recomputing[rows, states] + recomputes

    def put(
        self,
        row: int,
        state: int,
        end: int,
        replicas: int,
        gpus: int,
        recomputes: bool,
    ) -> None:
        """Keep a suffix: a stage from `state` to `end`, and what stands there in this row of
        `following`.
        """
        place = row + self._numbered, state
        self.gpus[place] = gpus
        self._end[place] = end
        self._replicas[place] = replicas
        self._stages[place] = self._stages[row, end] + 1
        self._recomputing[place] = self._recomputing[row, end] + recomputes

        if self.reached[0] != state:
            self._first_reached -= 1
            self._reached[self._first_reached] = state

    def path(self) -> tuple[list[int], list[int]]:
        """Return the states of the best suffix that begins at the first one, and the replicas of
        its stages.
        """
        row = len(self.gpus) - 1
        states = [0]
        replicas = list[int]()
        while states[-1] < self.last:
            replicas.append(int(self._replicas[row, states[-1]]))
            states.append(int(self._end[row, states[-1]]))
            row -= self._numbered

        return states, replicas
