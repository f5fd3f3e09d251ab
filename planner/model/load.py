"""Model file -> LayerGraph: by capture, or of the blocks that the file names."""

from __future__ import annotations

from torch import nn

from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.blocks.blocks import capture_blocks
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.memory_format import lay_out
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import TrainingSpec
from planner.model.stage.deferred_weights import is_deferred, without_storage


def capture_file(
    spec: TrainingSpec,
    batch: Batch,
    model: nn.Module | None = None,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    """The graph of the file's model.

    Args:
        spec: whose loss, and blocks where it names them, are used.
        batch: example.
        model: from the file, perhaps deferred; None builds a new one.
        training: whether the model is in training or evaluation mode.
        options: of the stages.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
    """
    model = spec.build_model() if model is None else model
    loss = spec.loss
    if is_deferred(model):
        if spec.defines("blocks"):
            raise ModelFileError(
                f"'{spec.origin}' names blocks, which are run to be captured, and so need their weights",
                hint="train without --defer-weights",
            )
        if options.channels_last:
            lay_out(model)  # now, because without storage nothing can be copied
        with without_storage(model):
            return capture(model, batch, loss, training=training, options=options)
    if spec.defines("blocks"):
        return capture_blocks(model, spec.blocks(model), batch, loss, training=training, options=options)
    return capture(model, batch, loss, training=training, options=options)
