"""`plan`, without weight stashing: there is one version of the weights, updated in place, whatever is in flight.

Backwards then see other weights than their forwards did, which is no training to recommend. It is the same work but for
the versions, so what these cost is the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from planner.cli.main import main
from planner.executor.run import replica
from planner.executor.run.versions import WeightVersions


class OneVersion(WeightVersions):
    """The interface of `WeightVersions`, and nothing behind it."""

    def stash(self, unit: object, number: int | None = None) -> None:
        """Nothing to note."""

    @contextmanager
    def at(self, unit: object) -> Iterator[None]:
        """The weights that are there."""
        yield

    @contextmanager
    def restored(self, unit: object) -> Iterator[None]:
        """The weights that are there."""
        yield

    def update(self, step: Callable[[], object], kept: Collection[int] = ()) -> None:
        """In place."""
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            step()


if __name__ == "__main__":
    vars(replica)["WeightVersions"] = OneVersion  # what every stage of this process makes its versions of
    sys.exit(main())
