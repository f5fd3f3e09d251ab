"""Count the bytes that a step allocates and frees, on tensors with data or without."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from planner.profiler.measured.saved import address_of


class Allocations:
    """Bytes of the storages that operations have made and that still exist, and the most of them between two marks.

    It reads like the meters of `planner.profiler.measured.workspace`: `mark` ends a span and returns its number, and
    `peaks` are the most bytes in each span. Storages that were there before count nothing.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._now = self._most = 0
        self._peaks: list[int] = []

    def note(self, arguments: Any, results: Any) -> None:
        """Count the new storages among the tensors that an operation returned; what it was given is none."""
        given = {address_of(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor):
                continue
            address = address_of(tensor)
            if address not in given and address not in self._sizes:
                self._made(address, tensor.untyped_storage())

    def _made(self, address: int, storage: UntypedStorage) -> None:
        self._sizes[address] = storage.nbytes()
        self._now += self._sizes[address]
        self._most = max(self._most, self._now)
        # PyTorch keeps the Python object of a storage as long as the storage itself.
        weakref.finalize(storage, self._free, address).atexit = False

    def _free(self, address: int) -> None:
        self._now -= self._sizes.pop(address)

    def mark(self) -> int:
        """End a span, and return its number."""
        self._peaks.append(self._most)
        self._most = self._now
        return len(self._peaks) - 1

    def peaks(self) -> list[int]:
        """Return the most bytes in each span, relative to those at the beginning."""
        return self._peaks
