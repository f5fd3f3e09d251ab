"""Which minibatches are looked at more closely: the first ones of a run, a few later ones, and the
last.
"""

from planner.executor.run.comparison import EVERY, FIRST


class SomeMinibatches:
    """The minibatches that are compared, counted from the first one that this worker sees.

    Args:
        last: the number of the run's last one.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._first: int | None = None

    def __contains__(self, minibatch: int) -> bool:
        if self._first is None:
            self._first = minibatch
        return minibatch < self._first + FIRST or minibatch % EVERY == 0 or minibatch == self._last
