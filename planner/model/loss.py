"""The loss of a model's output: from the user's loss function, or made by the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from planner.errors import CaptureError

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean loss of the batch, a 0-dimensional tensor."""


def loss_of(output: Any, target: Any, loss: LossFunction | None) -> Tensor:
    """Return the loss of a model's output; without a loss function, the output's `.loss` or ["loss"].

    Raises:
        CaptureError: when there is no loss, or it is no tensor.
    """
    value = loss(output, target) if loss is not None else _own_loss(output)
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"loss(output, target) returned a {type(value).__name__}, not a tensor", hint="return the mean loss"
        )
    return value


def _own_loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(
            f"the model file defines no loss(output, target), and the model's output, a {type(output).__name__}, has "
            "no 'loss'",
            hint="define loss(output, target) in the model file",
        )
    return loss
