"""The table of a walk from the last state to the first: the least sum of the stages after each.

With X a limit on the maximum over the stages,

    least(J, g) = min over stages from J to K on r replicas, with max_s ≤ X, of
                  sum_s + least(K, h)        where h ≤ g - r GPUs are for the stages after it

Where a plan may have at most n stages, there is a table for each number of the first stage. A stage
of number i is followed by suffixes of number i + 1, and after the n-th stage nothing is left.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from planner.cost.work import Floats, Integers


class LeastSums:
    """The least sums by number of the first stage, its state, and the GPUs that may be used.

    Attributes:
        sums: of the suffixes; infinite where there is none.
        first: what is known of the first stage of each, by name.
    """

    def __init__(self, last: int, gpus: int, most_stages: int | None, *names: str) -> None:
        """Begin with the suffix that has no layers, after the last state."""
        self._numbers = 1 if most_stages is None else most_stages
        self._step = 0 if most_stages is None else 1
        shape = self._numbers + 1, last + 1, gpus + 1
        self.sums: Floats = np.full(shape, np.inf)
        self.sums[:, last] = 0.0
        self.first = {name: np.zeros(shape, dtype=np.int64) for name in names}

    def tables(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each table, and that of the suffixes that come after its stages."""
        for number in range(self._numbers):
            yield number, number + self._step

    def put(
        self, number: int, state: int, totals: Floats, **first: Integers
    ) -> tuple[Integers, Integers]:
        """Let suffixes begin with one of some stages where that is less; return the numbers of GPUs
        for which it is, and with which stage.

        Args:
            number: of the table.
            state: where the stages begin.
            totals: the sum of each stage, a row, with the suffix after it, by GPUs.
            first: what is known of the stages, by name: a value for each, or by GPUs, too.
        """
        gpus = np.arange(totals.shape[1])
        stage = totals.argmin(axis=0)
        least = totals[stage, gpus]

        better = np.flatnonzero(least < self.sums[number, state, gpus])
        stage = stage[better]
        self.sums[number, state, better] = least[better]
        for name, values in first.items():
            if values.ndim == 1:
                chosen = values[stage]
            else:
                chosen = values[stage, better]
            self.first[name][number, state, better] = chosen

        return better, stage

    def reached(self, state: int) -> Integers:
        """Return the numbers of GPUs with which there is a suffix from the state, ascending."""
        reached = np.isfinite(self.sums[: self._numbers, state]).any(axis=0)
        return np.flatnonzero(reached)

    def first_stage(self, before: int, state: int, gpus: int) -> Mapping[str, int]:
        """Return what is known of the first stage of a suffix, after so many stages before it."""
        place = before * self._step, state, gpus
        return {name: int(values[place]) for name, values in self.first.items()}
