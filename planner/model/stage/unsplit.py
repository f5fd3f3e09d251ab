"""The loss of the user's model as it is, neither captured nor cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.loss import loss_of
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec


def unsplit_loss(model: Callable[..., Any], spec: TrainingSpec, batch: Batch, options: ModuleOptions) -> Tensor:
    """Return the loss of a batch, with the precision and the memory format of `options`.

    Args:
        model: built from `spec`, or something that calls it.
        spec: with the loss function, unless the model's output has the loss.
        batch: on the model's device.
        options: without `compiled`, which is up to the caller.
    """
    batch = batch.channels_last() if options.channels_last else batch
    with autocasting(batch.device_type, options.autocast):
        return loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
