"""Buffers that a forward writes: a second forward must read what the first one read, and must not undo later ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Where code looks a buffer up; modules replace the entries of their registries, but never a registry itself."""

    registry: dict[str, Tensor | None]
    name: str


Buffers = Sequence[tuple[Place, Tensor]]


class ChangingBuffers:
    """The buffers of some layers that their forwards write, such as BatchNorm's statistics."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._learned = not self._places  # whether `_places` are those of buffers that change

    @contextmanager
    def recorded(self, *, learn: bool) -> Iterator[Buffers]:
        """Yield the changing buffers as they were before the first forward of a unit, which runs inside.

        Args:
            learn: whether this forward shows which buffers change at all. Samples must pass through it: zeros, which a
                stage is warmed up with, may leave a buffer as it is.
        """
        before = _copies(self._places)
        yield before
        if learn and not self._learned:
            changed = {id(place.registry) for place, value in before if not torch.equal(value, _read(place))}
            # Take all buffers of a module that changed one: another may have been written with the value it had.
            self._places = [place for place in self._places if id(place.registry) in changed]
            self._learned = True
            before[:] = [(place, value) for place, value in before if id(place.registry) in changed]

    @contextmanager
    def replaced(self, before: Buffers) -> Iterator[None]:
        """Let a second forward read and write `before` in place of the buffers."""
        now = [(place, _read(place)) for place, _ in before]
        _point(before)
        try:
            yield
        finally:
            _point(now)


def places_of(weights: nn.Module, names: Set[str]) -> list[Place]:
    """Return where the tree at `weights` has the buffers called `names`, and those of the modules called so.

    Each buffer counts under all its names.
    """
    found = [
        (f"{path}.{name}" if path else name, Place(module._buffers, name), buffer)
        for path, module in weights.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    wanted = {id(buffer) for name, _, buffer in found if any(owner in names for owner in _with_owners(name))}
    return [place for _, place, buffer in found if id(buffer) in wanted]


def _with_owners(name: str) -> Iterator[str]:
    """Yield a buffer's name, and the paths of the modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _read(place: Place) -> Tensor:
    value = place.registry[place.name]
    assert value is not None
    return value


def _copies(places: Sequence[Place]) -> list[tuple[Place, Tensor]]:
    """Return copies of the buffers; one for a buffer that has several names."""
    made: dict[int, Tensor] = {}
    copies = []
    for place in places:
        value = _read(place)
        copy = made.get(id(value))
        if copy is None:
            copy = made[id(value)] = value.detach().clone()
        copies.append((place, copy))
    return copies


def _point(values: Buffers) -> None:
    for (registry, name), value in values:
        registry[name] = value
