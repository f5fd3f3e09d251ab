"""Run `plan` without weight stashing: one version of the weights is updated in place, whatever is
in flight.

Backwards then use other weights than their forwards, so do not train like this. But the work is the
same apart from the versions, so the difference is their cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from planner.cli.main import main
from planner.executor.run import replica
from planner.executor.stage.versions import WeightVersions


class OneVersion(WeightVersions):
    """The interface of `WeightVersions` with a single version."""

    def stash(self, unit: object, number: int | None = None) -> None:
        """Do nothing."""

    @contextmanager
    def stashed(self, unit: object) -> Iterator[None]:
        """Leave the weights as they are."""
        yield

    @contextmanager
    def restored(self, unit: object) -> Iterator[None]:
        """Leave the weights as they are."""
        yield

    def update(self, step: Callable[[], object], kept: Collection[int] = ()) -> None:
        """Update in place."""
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            step()


if __name__ == "__main__":
    vars(replica)["WeightVersions"] = OneVersion  # the class that every stage of this process uses
    sys.exit(main())
