"""The predictions of an evaluation, for `compute_metrics` of a Trainer.

The replicas of the last stage take turns by batches: the replica number r of R has the outputs of
batches r, r + R, r + 2R, ... Its first worker gathers them, in the order of the batches.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from planner.errors import InputError
from planner.executor.communication.control import gather_bytes

Preprocess = Callable[[Tensor, Tensor], Tensor]


def predictions_of(
    outputs: Sequence[Mapping[str, Any]],
    labels: Sequence[Tensor],
    others: Sequence[str],
    preprocess: Preprocess | None = None,
) -> list[Tensor]:
    """Return what a model predicted for each batch, on the CPU.

    Args:
        outputs: of the model, by batch.
        labels: of the same batches.
        others: names of outputs that are no predictions.
        preprocess: `preprocess_logits_for_metrics` of the Trainer.

    Raises:
        InputError: for a model with several outputs apart from `others`.
    """
    predictions = []
    for output, target in zip(outputs, labels, strict=True):
        value = _only_prediction(output, others).detach().cpu()
        if value.dtype is torch.bfloat16:  # which NumPy does not have
            value = value.float()
        if preprocess is not None:
            value = preprocess(value, target)
        predictions.append(value)

    return predictions


def gather_predictions(predictions: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Return the predictions of all replicas on the first of `ranks`; an empty list elsewhere.

    Args:
        predictions: of this replica, by batch.
        ranks: one per replica of the last stage; all of them call it.
    """
    buffer = io.BytesIO()
    torch.save(list(predictions), buffer)
    parts = [
        torch.load(io.BytesIO(part), weights_only=True)
        for part in gather_bytes(buffer.getvalue(), ranks=ranks)
    ]
    return in_turns(parts)


def in_turns(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return one list of what replicas have that take turns: [a0, a2], [a1] is [a0, a1, a2]."""
    count = sum(map(len, parts))
    return [parts[batch % len(parts)][batch // len(parts)] for batch in range(count)]


def _only_prediction(output: Mapping[str, Any], others: Sequence[str]) -> Tensor:
    """Return what a model's output has beside its loss; raise InputError where that is several."""
    values = {name: value for name, value in output.items() if name not in others}
    if len(values) != 1:
        raise InputError(
            f"compute_metrics needs one array of predictions, and the model returns "
            f"{', '.join(values)}",
            hint="give evaluate() the others as ignore_keys",
        )

    (value,) = values.values()
    return cast("Tensor", value)
