"""The loss of a model's output, and how much each microbatch counts in its minibatch's loss.

The weighted sum of the microbatches' losses must be the loss of the whole minibatch. A loss that is a mean over samples
counts the microbatches by their samples. A loss that ignores padded labels is a mean over the other labels, of which
microbatches have different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map

from planner.errors import CaptureError
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.options import ModuleOptions, autocasting
from planner.model.spec import LossFunction, TrainingSpec

WeightFunction: TypeAlias = Callable[[Batch], float]
Shares: TypeAlias = Callable[[Sequence[Batch]], list[float]]


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


_UNCAPTURED = "loss_as_it_is"


def uncaptured_loss(loss: LossFunction, output_spec: TreeSpec, target_spec: TreeSpec) -> Callable[..., Tensor]:
    """Return the operation of a graph that calls the user's loss on the leaves of output and target."""

    def loss_as_it_is(*leaves: Any) -> Tensor:
        end = output_spec.num_leaves
        return loss_of(output_spec.unflatten(leaves[:end]), target_spec.unflatten(leaves[end:]), loss)

    return loss_as_it_is


def is_uncaptured_loss(target: Any) -> bool:
    """Return whether the operation of a graph calls the user's loss as it is."""
    return getattr(target, "__name__", None) == _UNCAPTURED


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


def labels_of(batch: Batch) -> Tensor | None:
    """Return the labels of a batch, where a sample may have several; None without such labels.

    They are the target's only tensor of integers, or the model's argument `labels`.
    """
    integers: list[Tensor] = [leaf for leaf in tree_leaves(batch.target) if _is_labels(leaf)]
    found = integers or [own for own in [batch.kwargs.get("labels")] if _is_labels(own)]
    return found[0] if len(found) == 1 else None


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """Return the batch with other labels. The model's input keeps its values where it is the same tensor."""
    before = labels_of(batch)
    target = tree_map(lambda leaf: labels if leaf is before else leaf, batch.target)
    in_target = any(leaf is before for leaf in tree_leaves(batch.target))
    kwargs = batch.kwargs if in_target else {**batch.kwargs, "labels": labels}
    return Batch(batch.args, kwargs, target)


def weight_function(mean: LossMean, spec: TrainingSpec) -> WeightFunction:
    """Return what counts, in a batch, what its loss is a mean over."""
    if mean.over == "loss_weight":
        return lambda batch: spec.loss_weight(batch.target)
    if mean.over == "labels":
        return lambda batch: _counted(batch, mean)
    return lambda batch: float(batch.size)


def shares_function(mean: LossMean | None, spec: TrainingSpec) -> Shares | None:
    """Return what gives each microbatch's share of its minibatch's loss; None where it is that of its samples."""
    if mean is None or mean.over in ("samples", "batch"):
        return None
    if mean.over == "sum":
        return lambda parts: [1.0] * len(parts)
    weight = weight_function(mean, spec)
    return lambda parts: shares_by(weight, parts)


def shares_by_samples(parts: Sequence[Batch]) -> list[float]:
    """Divide 1 in proportion to the parts' samples."""
    return shares_by(lambda batch: batch.size, parts)


def shares_by(weight: WeightFunction, parts: Sequence[Batch]) -> list[float]:
    """Divide 1 in proportion to the parts' weights; all zeros where nothing counts."""
    weights = [weight(part) for part in parts]
    total = sum(weights)
    return [each / total if total else 0.0 for each in weights]


def _counted(batch: Batch, mean: LossMean) -> float:
    labels = labels_of(batch)
    assert labels is not None  # or the profile had not found labels
    counted = labels[:, 1:] if mean.shifted else labels
    assert mean.ignored is not None
    return float(torch.count_nonzero(counted.ne(mean.ignored)))


def _is_labels(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.dim() > 1
