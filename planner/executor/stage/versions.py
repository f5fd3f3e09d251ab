"""Weight stashing: a backward sees the weights that its forward saw (PipeDream, SOSP'19, section
3.3).

Each version has its own storage. An update writes in place if nothing else needs the newest
version, otherwise into other storage, recycled from a version that nothing needs any more.

Autograd checks at a backward, by a counter per tensor, that no tensor saved by its forward has been
written since. An update bumps the parameters' counters whichever storage they point at, so it runs
inside `_unsafe_preserve_version_counter`: storage that a unit in flight uses is never written.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from planner.model.torch_private import copy_all

Arrange = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]


@dataclass
class _Version:
    data: list[Tensor]
    users: int = 0  # units between forward and backward


class WeightVersions:
    """The versions of a stage's weights that units in flight, or forwards yet to come, still need.

    A version's number is the number of updates it has had. `arrange` lays out a new version's
    tensors.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        arrange: Arrange = lambda parameters, tensors: None,
    ) -> None:
        self._parameters = list(parameters)
        self._arrange = arrange
        self._newest = 0
        self._versions = {0: _Version([parameter.data for parameter in self._parameters])}
        self._used: dict[object, int] = {}
        self._kept: frozenset[int] = frozenset()
        self._free: list[list[Tensor]] = []
        self.most_versions = 1  # that ever existed at once

    def restart(self) -> None:
        """Number the versions from 0 again; no unit may be in flight."""
        assert not self._used, self._used
        self._drop_unneeded()
        self._versions = {0: self._versions[self._newest]}
        self._newest = 0

    def stash(self, unit: object, number: int | None = None) -> None:
        """Note that the forward of `unit` uses version `number`; None for the newest."""
        number = self._newest if number is None else number
        self._versions[number].users += 1
        self._used[unit] = number

    def stashed(self, unit: object) -> AbstractContextManager[None]:
        """Let the parameters hold the version stashed for `unit` within."""
        return _Pointed(self, self._used[unit])

    def restored(self, unit: object) -> AbstractContextManager[None]:
        """Let the parameters hold what the forward of `unit` saw, while its backward runs; then
        forget the unit.
        """
        return _Pointed(self, self._used.pop(unit), last_use=True)

    def update(self, step: Callable[[], object], kept: Collection[int] = ()) -> None:
        """Run `step`, which writes the parameters in place, on storage that no unit and no forward
        to come needs.
        """
        self._drop_unneeded(frozenset(kept))
        current = self._versions[self._newest]
        self._newest += 1
        # Copy only if someone still needs the weights from before the step: the copy costs a pass
        # over all weights.
        if current.users or self._newest - 1 in self._kept:
            if self._free:
                fresh = self._free.pop()
            else:
                fresh = [torch.empty_like(data) for data in current.data]
                self._arrange(self._parameters, fresh)
            copy_all(fresh, current.data)
            self._versions[self._newest] = _Version(fresh)
            self._point_at(self._newest)
        else:
            self._versions[self._newest] = self._versions.pop(self._newest - 1)

        self.most_versions = max(self.most_versions, len(self._versions) + len(self._free))
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            step()

    def _drop_unneeded(self, kept: frozenset[int] = frozenset()) -> None:
        self._kept = kept
        for number in list(self._versions):
            self._drop_if_unneeded(number)

    def _drop_if_unneeded(self, number: int) -> None:
        if number != self._newest and number not in self._kept and not self._versions[number].users:
            self._free.append(self._versions.pop(number).data)

    def _point_at(self, number: int) -> None:
        for parameter, tensor in zip(self._parameters, self._versions[number].data, strict=True):
            parameter.data = tensor


class _Pointed:
    """Points the parameters at a version within; a generator would take longer for every unit."""

    def __init__(self, versions: WeightVersions, number: int, *, last_use: bool = False) -> None:
        self._versions = versions
        self._number = number
        self._last_use = last_use

    def __enter__(self) -> None:
        if self._number != self._versions._newest:
            self._versions._point_at(self._number)

    def __exit__(self, *_: object) -> None:
        versions = self._versions
        if self._number != versions._newest:
            versions._point_at(versions._newest)
        if self._last_use:
            versions._versions[self._number].users -= 1
            versions._drop_if_unneeded(self._number)
