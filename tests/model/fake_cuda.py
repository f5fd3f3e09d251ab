"""Running the stages of a graph on fake tensors for CUDA, and comparing every value that crosses
with what the graph says.

On a machine without CUDA the meta device stands for it, which shows whether operations keep the
device of the capture, and under autocast the CPU with CUDA's rules, which shows dtypes. What the
backward would return is known without it: autograd casts a gradient to the dtype that the forward
noted for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.model.batch import Batch
from planner.model.capture.fake import device_rules, fake_batch, make_fake
from planner.model.capture.graph import (
    LOSS,
    LayerGraph,
    ValueSpec,
    expanded_dimensions,
    memory_order,
)
from planner.model.stage.stage import StageModule, build_stage


def mismatches(graph: LayerGraph, batch: Batch) -> list[str]:
    """Run each layer as a stage of its own, so that every value that any cut sends is sent, and
    return what differs.
    """
    found: list[str] = []
    with (
        # for its end: an error inside a no_grad region of a graph leaves gradients switched off
        torch.enable_grad(),
        _for_cuda(graph.options.autocast) as device,
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True),
    ):
        there = fake_batch(batch, device)
        known: dict[str, Tensor] = {}
        for layer in graph.layers:
            stage = build_stage(graph, [layer.name])
            make_fake(stage, device)
            received = {
                spec.name: _message(spec, known[spec.name], batch.size) for spec in stage.received
            }
            found += [
                f"{layer.name} gets {each}" for each in _differing(stage.received, received, there)
            ]
            try:
                results = stage(there if stage.needs_batch else None, received)
            except Exception as cause:  # whatever a wrong device or dtype raises
                return [*found, f"{layer.name} fails: {cause}"]
            found += [
                f"{layer.name} makes {each}" for each in _differing(stage.sent, results, there)
            ]
            found += [f"{layer.name} returns {each}" for each in _gradients(stage, results)]
            known.update(results)
        if known[LOSS].device != device:
            found.append(f"the loss is on {known[LOSS].device}")
    return found


@contextmanager
def _for_cuda(autocast: torch.dtype | None) -> Iterator[torch.device]:
    if autocast is None and not torch.cuda.is_available():
        yield torch.device("meta")
        return
    with device_rules("cuda") as device:
        yield device


def _message(spec: ValueSpec, value: Tensor, batch_size: int) -> Tensor:
    copy = spec.to_wire(value.detach()).clone(memory_format=torch.contiguous_format)
    return spec.from_wire(copy, batch_size).requires_grad_(spec.requires_grad)


def _differing(
    specs: Sequence[ValueSpec], values: dict[str, Tensor], batch: Batch
) -> Iterator[str]:
    device = batch.device_type
    for spec in specs:
        value = values[spec.name]
        wanted = (
            spec.dtype,
            spec.requires_grad,
            spec.shape(batch.size),
            spec.order,
            spec.expanded,
            device,
        )
        place = memory_order(value), expanded_dimensions(value), value.device.type
        found = value.dtype, value.requires_grad, tuple(value.shape), *place
        if found != wanted:
            yield f"'{spec.name}' as {found}, captured {wanted}"


def _gradients(stage: StageModule, results: dict[str, Tensor]) -> Iterator[str]:
    """Yield the values whose gradients have another dtype than the value, which the wire's layout
    supposes.
    """
    for spec in stage.sent:
        value = results[spec.name]
        if value.grad_fn is not None:
            noted = value.grad_fn._input_metadata[value.output_nr]
            if (noted.dtype, noted.device) != (spec.dtype, value.device):
                yield f"a gradient of '{spec.name}' of {noted.dtype} on {noted.device}"
