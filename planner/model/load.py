"""Capture the model of a TrainingSpec: as a traced graph, or as the blocks that the user names."""

from __future__ import annotations

from torch import nn

from planner.model.batch import Batch
from planner.model.blocks.blocks import capture_blocks
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.memory_format import lay_out
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import TrainingSpec
from planner.model.weights.deferred_weights import allocate_buffers, is_deferred, without_storage


def capture_file(
    spec: TrainingSpec,
    batch: Batch,
    model: nn.Module | None = None,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    """Return the graph of a model with its loss.

    Args:
        spec: with the loss, and the blocks if the user names them.
        batch: example.
        model: built from `spec`, its weights perhaps without memory; None builds a new one.
        training: whether the model is captured in training mode or in evaluation mode; it is left in that mode.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
    """
    model = (spec.build_model() if model is None else model).train(training)
    deferred = is_deferred(model)
    if deferred:
        allocate_buffers(model)
    if spec.defines("blocks"):
        return capture_blocks(model, spec.blocks(model), batch, spec.loss, options=options, values=not deferred)
    if not deferred:
        return capture(model, batch, spec.loss, options=options)
    if options.channels_last:
        lay_out(model)  # now, because without storage nothing can be copied
    with without_storage(model):
        return capture(model, batch, spec.loss, options=options)
