"""Running a stage's forward a second time, for its backward, exactly as the first time.

The weights and the random key are the caller's. This module sees to the buffers: a second forward must see those that
the first one saw, and must leave those that later forwards made. Which buffers change at all shows in the first
forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Buffers = dict[str, Tensor]


class ChangingBuffers:
    """The buffers of a stage that its forwards write, such as BatchNorm's statistics."""

    def __init__(self, stage: nn.Module) -> None:
        self._all = dict(stage.named_buffers())
        self._changing: list[str] | None = None  # not known before the first forward

    @contextmanager
    def recorded(self) -> Iterator[Buffers]:
        """For a first forward: what the buffers were before it, where that matters."""
        before = self._copies(self._all if self._changing is None else self._changing)
        yield before
        if self._changing is None:
            changed = {_owner(name) for name, value in before.items() if not torch.equal(value, self._all[name])}
            # With all others of their modules: one may have been given the value that it had.
            self._changing = [name for name in before if _owner(name) in changed]
            for name in before.keys() - set(self._changing):
                del before[name]

    @contextmanager
    def restored(self, before: Buffers) -> Iterator[None]:
        """For a second forward and its backward: the buffers are as they were `before`, and afterwards as now."""
        if not before:
            yield
            return
        now = self._copies(before)
        self._write(before)
        try:
            yield
        finally:
            self._write(now)

    def _copies(self, names: dict[str, Tensor] | list[str]) -> Buffers:
        return {name: self._all[name].detach().clone() for name in names}

    def _write(self, values: Buffers) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._all[name].copy_(value)


def _owner(buffer: str) -> str:
    """The path of the module that it is of."""
    return buffer.rpartition(".")[0]
