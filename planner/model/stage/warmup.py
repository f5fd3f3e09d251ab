"""Warm up a stage: one forward and backward without effect, so that compilation at the first call is not timed."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.model.batch import Batch
from planner.model.capture.graph import ValueSpec
from planner.model.stage.stage import StageModule
from planner.model.state.kept_state import keep_state


def warm_up(stage: StageModule, batch: Batch) -> None:
    """Run `stage` on zeros instead of what earlier stages send, then restore buffers and random state.

    Args:
        stage: on its device, without gradients.
        batch: any of the size to come, on the same device.
    """
    with keep_state(stage) as device:
        received = {spec.name: _zeros(spec, batch.size, device) for spec in stage.received}
        results = stage(batch if stage.needs_batch else None, received)
        roots = [value for value in results.values() if value.requires_grad and value.grad_fn is not None]
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for parameter in stage.parameters():
        parameter.grad = None


def _zeros(spec: ValueSpec, batch_size: int, device: torch.device) -> Tensor:
    # Through the wire, because compiled code depends on the strides that a received value has.
    wire = torch.zeros(spec.wire_shape(batch_size), dtype=spec.dtype, device=device)
    return spec.from_wire(wire, batch_size).requires_grad_(spec.requires_grad)
