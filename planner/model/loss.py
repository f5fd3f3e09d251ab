"""The loss of a model's output, and how much each microbatch counts in its minibatch's loss.

A loss that ignores padded labels is a mean over the other labels, of which microbatches have
different numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from planner.errors import CaptureError, ModelFileError, PlanError
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.options import LossFunction, ModuleOptions, autocasting
from planner.model.spec import TrainingSpec
from planner.model.torch_private import tree_leaves

WeightFunction: TypeAlias = Callable[[Batch], float]
Shares: TypeAlias = Callable[[Sequence[Batch]], list[float]]


def loss_of(output: Any, target: Any, loss: LossFunction | None) -> Tensor:
    """Return the loss of a model's output; without a loss function, the output's `.loss` or
    ["loss"].
    """
    value: Any
    if loss is not None:
        value = loss(output, target)
    else:
        if isinstance(output, dict):
            value = output.get("loss")
        else:
            value = getattr(output, "loss", None)
        if value is None:
            raise CaptureError(
                f"the model file defines no loss(output, target), and the model's output, a "
                f"{type(output).__name__}, "
                "has no 'loss'",
                hint="define loss(output, target) in the model file",
            )

    if not isinstance(value, Tensor):
        raise CaptureError(
            f"loss(output, target) returned a {type(value).__name__}, not a tensor",
            hint="return the mean loss",
        )

    return value


def unsplit_loss(
    model: Callable[..., Any], spec: TrainingSpec, batch: Batch, options: ModuleOptions
) -> Tensor:
    """Return the loss of a batch, which is on the model's device, with the precision and memory
    format of `options`.
    """
    batch = batch.prepared(options)
    with autocasting(batch.device_type, options.autocast):
        return loss_of(model(*batch.args, **batch.kwargs), batch.target, options.loss(spec.loss))


def labels_of(batch: Batch, leaf: int | None = None) -> Tensor | None:
    """Return the labels, by their number among the batch's leaves.

    Without a number they are several per sample: the target's only tensor of integers, or the
    model's argument `labels`.
    """
    if leaf is not None:
        leaves, _ = batch.flatten()
        labels = leaves[leaf] if leaf < len(leaves) else None
        if isinstance(labels, Tensor):
            return labels
        return None

    def labels_in(tree: Any) -> list[Tensor]:
        """Return the integers of more than one dimension."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        return [
            leaf for leaf in tensors if leaf.dtype in (torch.int64, torch.int32) and leaf.dim() > 1
        ]

    found = labels_in(batch.target) or labels_in([batch.kwargs.get("labels")])
    return found[0] if len(found) == 1 else None


def check_labels(batch: Batch, mean: LossMean | None, origin: str) -> None:
    """Raise ModelFileError for labels, or values of masks, with which the loss is not the mean that
    it is taken for.
    """
    if mean is None or not mean.forbidden:
        return
    leaves, _ = batch.flatten()
    for each in mean.forbidden:
        leaf = leaves[each.leaf] if each.leaf < len(leaves) else None
        if isinstance(leaf, Tensor) and bool((leaf == each.value).any()):
            raise ModelFileError(
                f"{_place_of(batch, each.leaf)} has the value {each.value}, with which the loss "
                f"of '{origin}' is no "
                f"{mean.words}, as its plan says",
                hint="give example_batch() such a value too, profile the model and solve again; "
                "or define "
                "loss_weight(target) in the model file",
            )


def looks_at_batches(mean: LossMean | None) -> bool:
    """Return whether what a loss is a mean over is in its batches, or whether these may have what
    is refused.
    """
    return mean is not None and (mean.over in ("labels", "loss_weight") or bool(mean.forbidden))


def _place_of(batch: Batch, leaf: int) -> str:
    """Return where a tensor of the batch is, in words."""
    arguments = len(tree_leaves((batch.args, batch.kwargs)))
    if leaf >= arguments:
        return "the target"
    return f"argument {leaf + 1} of the model"


def weight_function(mean: LossMean, spec: TrainingSpec) -> WeightFunction:
    """Return what counts, in a batch, what its loss is a mean over."""

    def counted_labels(batch: Batch) -> float:
        """Return how many labels of a batch its loss does not ignore."""
        labels = labels_of(batch, mean.leaf)
        if labels is None or mean.ignored is None:
            raise PlanError(
                f"the plan takes the loss of '{spec.origin}' for a mean over labels that its "
                f"batches do not have",
                hint="profile the model and solve again: plan profile, plan solve",
            )

        return float(
            torch.count_nonzero((labels[:, 1:] if mean.shifted else labels).ne(mean.ignored))
        )

    match mean.over:
        case "loss_weight":
            return lambda batch: spec.loss_weight(batch.target)
        case "labels":
            return counted_labels
        case _:
            return lambda batch: float(batch.size)


def shares_function(mean: LossMean | None, spec: TrainingSpec) -> Shares | None:
    """Return what gives each microbatch's share of its minibatch's loss; None where it is that of
    its samples.
    """
    if mean is None or mean.over in ("samples", "batch", "unchecked"):
        return None
    if mean.over == "sum":
        return lambda parts: [1.0] * len(parts)
    weight = weight_function(mean, spec)
    return lambda parts: _shares_by(weight, parts)


def shares_by_samples(parts: Sequence[Batch]) -> list[float]:
    """Divide 1 in proportion to the parts' samples."""
    return _shares_by(lambda batch: batch.size, parts)


def _shares_by(weight: WeightFunction, parts: Sequence[Batch]) -> list[float]:
    """Divide 1 in proportion to the parts' weights; where nothing counts, to their samples."""
    weights = [weight(part) for part in parts]
    # A loss over nothing has a backward, too, after which one process takes a step.
    if not any(weights):
        weights = [part.size for part in parts]
    total = sum(weights)
    return [each / total for each in weights]
