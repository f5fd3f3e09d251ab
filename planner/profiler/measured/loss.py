"""Find what a model's loss is a mean over."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import ModelFileError
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.loss import labels_of, shares_by_samples, shares_function, unsplit_loss, with_labels
from planner.model.modes import evaluating
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec

_LIKELIHOODS = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)  # what cross entropies end in
_IGNORED = 4  # position of their argument
_PARTS = 4  # several, because two may have as many labels by chance
_ROUNDING = 3e-5  # relative difference of losses in float32 whose sums have another order


def find_loss_mean(spec: TrainingSpec, graph: LayerGraph, batch: Batch, options: ModuleOptions) -> LossMean | None:
    """Return what the loss is a mean over; None where the model cannot tell: it draws noise, or takes one batch size.

    The model runs in evaluation mode, so that neither dropout nor BatchNorm's statistics tell a batch from its parts.
    Labels that its cross entropies ignore are put into one half, because an example batch may have none. Raise
    ModelFileError when the model file's loss_weight() does not count what the loss is a mean over.
    """
    if any(parameter.is_meta for parameter in graph.model.parameters()):
        return None  # nothing can be run
    batch = batch if batch.size > 1 else spec.example_batch(2).to(batch.device_type)
    if options.half is not None:  # whose roundings would hide what a loss is a mean over
        graph.model.float()
    try:
        with evaluating(graph.model):
            return _found(spec, graph, batch, options)
    except Exception as cause:  # whatever a model of one batch size raises at a part of a batch
        if graph.batch_size is None or isinstance(cause, ModelFileError):
            raise
        return None
    finally:
        options.prepare(graph.model)


def _found(spec: TrainingSpec, graph: LayerGraph, batch: Batch, options: ModuleOptions) -> LossMean | None:
    losses = _Losses(spec, graph, replace(options, autocast=None, half=None, compiled=False))
    weighted = spec.defines("loss_weight")
    # The same batch twice differs where the loss depends on random numbers, as that of a diffusion model does.
    if not losses.explained(batch, [LossMean(over="samples")], parts=1):
        return LossMean(over="loss_weight") if weighted else None
    return losses.own_weight(batch) if weighted else losses.found(batch)


class _Losses:
    """Losses of batches and of their parts."""

    def __init__(self, spec: TrainingSpec, graph: LayerGraph, options: ModuleOptions, least: int) -> None:
        self._spec, self._graph, self._options = spec, graph, options
        self._least = least  # samples of a part

    def own_weight(self, batch: Batch) -> LossMean:
        """Return that the user's function weighs the parts, if it does."""
        mean = LossMean(over="loss_weight")
        ((error, tolerance),) = self._errors(batch, [mean])
        if error > tolerance:
            raise ModelFileError(
                f"loss_weight() of '{self._spec.origin}' does not count what the loss is a mean over: weighted by it, "
                f"the losses of the parts of a batch differ by {error:.1e} from the loss of the whole, relatively",
                hint="return how many labels of the target the loss is a mean over",
            )
        return mean

    def found(self, batch: Batch) -> LossMean:
        """Return what explains the losses of the batch, and of the batch with ignored labels."""
        simple = [LossMean(over="samples"), LossMean(over="sum")]
        by_labels = list(self._by_labels(batch))
        explaining = self.explained(batch, [*simple, *(mean for _, means in by_labels for mean in means)])
        for ignoring, means in by_labels:
            if (found := self.explained(ignoring, explaining)[:1]) and found[0] in means:
                return found[0]
        return explaining[0] if explaining else LossMean(over="batch")

    def _by_labels(self, batch: Batch) -> Iterator[tuple[Batch, list[LossMean]]]:
        """Yield a batch with ignored labels in one half, and the means over labels that may explain its loss."""
        labels = labels_of(batch)
        if labels is None or labels.shape[1] < 4:
            return
        with torch.no_grad(), _IgnoredLabels() as mode:
            unsplit_loss(self._graph.model, self._spec, batch, self._options)
        for label in sorted(mode.labels):
            changed = labels.clone()
            # Of some samples only the first and the last label stay, so that it matters whether the first one counts.
            changed[: -(-batch.size // 2), 1:-1] = label
            means = [LossMean(over="labels", ignored=label, shifted=shifted) for shifted in (False, True)]
            yield with_labels(batch, changed), means

    def explained(self, batch: Batch, means: list[LossMean], parts: int = _PARTS) -> list[LossMean]:
        """Return the means that explain the batch's loss, the best first; equals keep their order."""
        errors = zip(self._errors(batch, means, parts), means, strict=True)
        found = [(error, mean) for (error, tolerance), mean in errors if error <= tolerance]
        return [mean for _, mean in sorted(found, key=lambda each: each[0])]

    def _errors(self, batch: Batch, means: list[LossMean], parts: int = _PARTS) -> list[tuple[float, float]]:
        """Return, for each mean, how far its weighted sum over the parts is from the loss, and what rounding allows.

        Both are relative to the loss.
        """
        batches = batch.split(min(batch.size // self._least, parts))
        whole, *of_parts = (
            unsplit_loss(self._graph.model, self._spec, each.copied(), self._options).detach()
            for each in (batch, *batches)
        )
        losses = [float(loss) for loss in of_parts]
        tolerance = max(_ROUNDING, 2 * torch.finfo(whole.dtype).eps)
        scale = max(abs(float(whole)), torch.finfo(torch.float32).tiny)
        found = []
        for mean in means:
            shares_of = shares_function(mean, self._spec) or shares_by_samples
            shares = shares_of(batches)
            total = sum(share * loss for share, loss in zip(shares, losses, strict=True) if share)
            error = abs(total - float(whole)) / scale
            found.append((error if math.isfinite(error) else math.inf, tolerance))
        return found


class _IgnoredLabels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes which labels the losses computed within ignore, whoever calls them: a graph may hide them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Always tried, because losses that are masked by hand often pad with it, and it is a label of every model.
        self.labels = {0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _LIKELIHOODS:
            self.labels.add(args[_IGNORED])
        return func(*args, **(kwargs or {}))
