"""Activation recomputation: keep what the second forward of a unit needs to compute exactly the same as its first.

The caller restores weights and random numbers. This module restores buffers: the second forward must read those that
the first one read, and must not undo what later forwards wrote. The first forward shows which buffers change at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Buffers = dict[str, Tensor]


class ChangingBuffers:
    """The buffers of a stage that its forwards write, such as BatchNorm's statistics.

    Args:
        stage: the layers, on their device.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._all = dict(stage.named_buffers())
        self._changing: list[str] | None = None  # unknown before the first forward

    @contextmanager
    def recorded(self) -> Iterator[Buffers]:
        """Yield the changing buffers as they were before the first forward of a unit, which runs inside."""
        before = self._copies(self._all if self._changing is None else self._changing)
        yield before
        if self._changing is None:
            changed = {_owner(name) for name, value in before.items() if not torch.equal(value, self._all[name])}
            # Take all buffers of a module that changed one: another may have been written with the value it had.
            self._changing = [name for name in before if _owner(name) in changed]
            for name in before.keys() - set(self._changing):
                del before[name]

    @contextmanager
    def restored(self, before: Buffers) -> Iterator[None]:
        """Set the buffers to `before` for a second forward and its backward, then back to what they are now."""
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
    """Return the path of the buffer's module."""
    return buffer.rpartition(".")[0]
