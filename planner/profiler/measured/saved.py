"""Count the bytes that a forward saves for its backward, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from planner.model.batch import Batch
from planner.model.stage.parts import LayerObserver
from planner.model.stage.stage import StageModule


def saved_bytes(stage: StageModule, batch: Batch) -> list[int]:
    """Return the bytes of the distinct storages that autograd saves, by the layer that saves them first.

    Weights and buffers do not count, because they exist anyway. Tensors of the batch that are saved do.

    Args:
        stage: the whole model, built with an observer; it runs once.
        batch: on the stage's device.
    """

    def forward(observer: LayerObserver) -> object:
        stage.set_observer(observer)
        return stage(batch, {})

    return saved_by([stage], forward, len(stage.layer_names))


def saved_by(
    modules: Sequence[nn.Module],
    forward: Callable[[LayerObserver], object],
    pieces: int | None = None,
    known: set[int] | None = None,
) -> list[int]:
    """Return the same for any forward that tells an observer where each of its pieces ends.

    Args:
        forward: runs them; its result holds all that autograd saves.
        pieces: how many; None for one per module.
        known: addresses of storages that do not count; those that are saved are added.
    """
    storages = _SavedStorages(modules, len(modules) if pieces is None else pieces, set() if known is None else known)
    with saved_tensors_hooks(storages.pack, storages.unpack):
        results = forward(storages)
    # Until here the graph held every storage, so that no two had the same address.
    del results
    return storages.bytes


class _SavedStorages:
    def __init__(self, modules: Sequence[nn.Module], pieces: int, known: set[int]) -> None:
        self.bytes = [0] * pieces
        self._piece = 0
        self._weights = {address_of(tensor) for m in modules for tensor in (*m.parameters(), *m.buffers())}
        self._seen = known

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._piece = index + 1

    def pack(self, tensor: Tensor) -> Tensor:
        own: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
        address = address_of(own)
        if address not in self._seen and address not in self._weights:
            self._seen.add(address)
            self.bytes[self._piece] += own.untyped_storage().nbytes()
        # Detached, because an output saved by its own operation would be a cycle that is never freed.
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def tensors_of_batch(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch."""
    return [leaf for leaf in tree_leaves((batch.args, batch.kwargs, batch.target)) if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    """Return what tells the tensor's storage from all others that exist."""
    return int(tensor.untyped_storage()._cdata)
