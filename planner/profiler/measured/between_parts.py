"""The values that cross from part to part of a model that is measured part by part: copied to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.profiler.measured.saved import address_of, tensors_of_batch


@dataclass
class StoredMemory:
    """A storage that values between parts lie in, copied to the host."""

    content: Tensor  # bytes
    saved: bool  # for a backward, by a layer of an earlier part

    @property
    def size_bytes(self) -> int:
        return self.content.nbytes


@dataclass(frozen=True)
class StoredValue:
    """A value that crosses from part to part: where it lies in its memory."""

    memory: StoredMemory
    like: Tensor  # on the meta device: dtype, shape, strides
    offset: int

    def at(self, content: Tensor) -> Tensor:
        """Return the value, given its memory's bytes on a device."""
        empty = torch.empty(0, dtype=self.like.dtype, device=content.device)
        return empty.set_(content.untyped_storage(), self.offset, self.like.shape, self.like.stride())


@dataclass(frozen=True)
class PartResults:
    """What a part has made, and what it has saved of what it was given."""

    values: dict[str, StoredValue]
    saved: tuple[StoredMemory, ...]
    batch_saved: set[int]


class Between:
    """The values that cross from part to part, on the host.

    Args:
        batch: on the device, where it stays.
    """

    def __init__(self, graph: LayerGraph, batch: Batch) -> None:
        self.batch_bytes = {address_of(t): t.nbytes for t in tensors_of_batch(batch)}
        self.batch_saved: set[int] = set()  # addresses
        self._values: dict[str, StoredValue] = {}
        self._specs = [
            (graph.owner[node], graph.last_use(node), graph.specs[node], node.name) for node in graph.crossing
        ]
        self._samples = batch.size
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(graph.layers):
            for name in layer.parameters:
                users.setdefault(name, []).append(index)
        trained = {name: p.nbytes for name, p in graph.model.named_parameters() if p.requires_grad}
        self._weights = [(users[name], size) for name, size in trained.items() if name in users]

    def commit(self, results: PartResults) -> None:
        """Take what a part has made."""
        self._values |= results.values
        for memory in results.saved:
            memory.saved = True
        self.batch_saved |= results.batch_saved

    def value(self, name: str) -> StoredValue:
        """Return a value that an earlier part has made."""
        return self._values[name]

    def unsaved_bytes(self, first: int) -> int:
        """Return the bytes that layers before `first` have made for it and later ones, and nobody has saved."""
        alive = {name for owner, last, _, name in self._specs if owner < first <= last}
        memories = {id(each.memory): each.memory for name, each in self._values.items() if name in alive}
        return sum(memory.size_bytes for memory in memories.values() if not memory.saved)

    def gradient_bytes(self, first: int, end: int) -> int:
        """Return the bytes of gradients that layers from `end` on have made.

        They are of values from before `first`, and of weights that layers before `end` use, too.
        """
        values = (
            spec.of_gradient.size_bytes(self._samples)
            for owner, last, spec, _ in self._specs
            if spec.requires_grad and owner < first and last >= end
        )
        weights = (size for users, size in self._weights if users[0] < end <= users[-1])
        return sum(values) + sum(weights)
