"""Weight stashing: a backward sees the weights its forward saw (PipeDream, SOSP'19, section 3.3).

Each version is storage of its own. A forward notes the version it used; its backward points the parameters'
`data` at that version for as long as it runs. An update writes in place when nobody else needs the current version,
otherwise into fresh storage, recycled from versions that have had their day. So at most as many versions
exist as there are distinct ones among the units in flight, plus the newest.

Autograd guards saved tensors with version counters, which in-place writes to *other* storage must not trip:
the update runs inside `_unsafe_preserve_version_counter`. What that guard would have caught cannot happen
here, because storage with a forward in flight is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


@dataclass
class _Version:
    data: list[Tensor]
    users: int = 0  # units between forward and backward


class WeightVersions:
    """The versions of `parameters` that units in flight still need.

    Args:
        parameters: distinct parameters of a stage.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._current = _Version([parameter.data for parameter in self._parameters])
        self._used: dict[object, _Version] = {}
        self._free: list[list[Tensor]] = []
        self.most_versions = 1  # the most that ever existed at once

    def stash(self, unit: object) -> None:
        """Note that the forward of `unit` uses the current version."""
        self._current.users += 1
        self._used[unit] = self._current

    @contextmanager
    def restored(self, unit: object) -> Iterator[None]:
        """For the backward of `unit`: the parameters hold what its forward saw; afterwards it is forgotten."""
        version = self._used.pop(unit)
        if version is not self._current:
            self._point_at(version.data)
        try:
            yield
        finally:
            version.users -= 1
            if version is not self._current:
                self._point_at(self._current.data)
                if version.users == 0:
                    self._free.append(version.data)

    def update(self, step: Callable[[], object]) -> None:
        """Run `step`, which writes the parameters in place, on storage that no forward in flight needs."""
        if self._current.users:
            fresh = self._free.pop() if self._free else [torch.empty_like(data) for data in self._current.data]
            torch._foreach_copy_(fresh, self._current.data)
            self._current = _Version(fresh)
            self._point_at(fresh)
            self.most_versions = max(self.most_versions, self._alive())
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            step()

    def _alive(self) -> int:
        return len({id(version) for version in self._used.values()} | {id(self._current)}) + len(self._free)

    def _point_at(self, data: list[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, data, strict=True):
            parameter.data = tensor
