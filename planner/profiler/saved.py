"""Bytes that a forward keeps for its backward, layer by layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.model.batch import Batch
from planner.model.stage import StageModule


def saved_bytes(stage: StageModule, batch: Batch) -> list[int]:
    """Bytes of the distinct storages that autograd keeps, by the layer that was first to keep them.

    Weights and buffers are left out: they are there anyway. What of the batch is kept counts.

    Args:
        stage: the whole model, built with an observer; it is run once.
        batch: on the stage's device.
    """
    recorder = _Recorder(stage, len(stage.layer_names))
    stage.set_observer(recorder)
    with saved_tensors_hooks(recorder.pack, recorder.unpack):
        outputs = stage(batch, {})
    # Until here the graph held everything, so that no two storages had the same address.
    outputs.clear()
    return recorder.bytes


class _Recorder:
    def __init__(self, stage: nn.Module, layers: int) -> None:
        self.bytes = [0] * layers
        self._layer = 0
        self._seen = {_address(tensor) for tensor in (*stage.parameters(), *stage.buffers())}

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._layer = index + 1

    def pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._seen:
            self._seen.add(address)
            self.bytes[self._layer] += tensor.untyped_storage().nbytes()
        # An output kept by its own operation would be a cycle that keeps the memory.
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
