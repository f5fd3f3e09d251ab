"""Bytes that a forward keeps for its backward, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.model.batch import Batch
from planner.model.stage.stage import LayerObserver, StageModule


def saved_bytes(stage: StageModule, batch: Batch) -> list[int]:
    """Bytes of the distinct storages that autograd keeps, by the layer that was first to keep them.

    Weights and buffers are left out: they are there anyway. What of the batch is kept counts.

    Args:
        stage: the whole model, built with an observer; it is run once.
        batch: on the stage's device.
    """

    def forward(observer: LayerObserver) -> object:
        stage.set_observer(observer)
        return stage(batch, {})

    return saved_by([stage], forward, len(stage.layer_names))


def saved_by(
    modules: Sequence[nn.Module], forward: Callable[[LayerObserver], object], pieces: int | None = None
) -> list[int]:
    """The same of a forward that tells an observer of the end of each of its `pieces`, one per module unless given.

    Args:
        modules: that hold the weights.
        forward: runs them; its result holds all that autograd keeps.
        pieces: how many.
    """
    recorder = _Recorder(modules, len(modules) if pieces is None else pieces)
    with saved_tensors_hooks(recorder.pack, recorder.unpack):
        results = forward(recorder)
    # Until here the graph held everything, so that no two storages had the same address.
    del results
    return recorder.bytes


class _Recorder:
    def __init__(self, modules: Sequence[nn.Module], pieces: int) -> None:
        self.bytes = [0] * pieces
        self._piece = 0
        self._seen = {_address(tensor) for m in modules for tensor in (*m.parameters(), *m.buffers())}

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._piece = index + 1

    def pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._seen:
            self._seen.add(address)
            self.bytes[self._piece] += tensor.untyped_storage().nbytes()
        # An output kept by its own operation would be a cycle that keeps the memory.
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
