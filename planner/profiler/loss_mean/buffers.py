"""Find a buffer that forward() changes otherwise when a batch comes in parts: a count of calls, a
moving average.

In one process a forward sees a whole minibatch. Divided, it runs once for each microbatch: a count
of steps then counts microbatches, the codebook of a VQ-VAE moves by the mean of fewer samples, and
spectral_norm makes more power iterations. A sum over samples comes out the same, and is no such
buffer where the loss does not read it. The statistics of BatchNorm are left out: in training
nothing reads them.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from planner.errors import ModelFileError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.buffers import statistics_of
from planner.model.options import ModuleOptions
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.profiler.loss_mean.trial import Attempt, ModelOnTrial, on_trial, ranges

_log = logging.getLogger(__name__)
# What rounding may change, relative to the largest element of a buffer. In float64 parts of a model
# may yet compute in float32.
_RELATIVE = {torch.float64: 1e-6}
_RELATIVE_IN_FLOAT32 = 1e-4
_RELATIVE_LOSS = 1e-4


def buffer_of_parts(
    spec: TrainingSpec,
    model: nn.Module,
    batch: Batch,
    options: ModuleOptions,
    attempts: Sequence[Attempt],
) -> str | None:
    """Return the name of a buffer that parts of a batch, in turn, leave or read in another state
    than the whole batch.

    None where there is no such buffer, and where the model does not run: other trials say so.
    """
    if not any(_buffers(model)):
        return None
    options = replace(options, autocast=None, half=None, compiled=False)
    for attempt in attempts:
        if attempt.evaluates:  # when forward() changes no buffer
            continue
        try:
            with (
                generators_kept(),
                warnings.catch_warnings(),
                on_trial(spec, model, options, attempt) as trial,
            ):
                warnings.simplefilter("ignore")  # of the model
                return _tried(trial, model, batch)
        except (ModelFileError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # whatever a model raises that takes float32 only
            _log.debug("buffers are not tried in %s: %s", attempt.dtype, cause)

    return None


def _tried(trial: ModelOnTrial, model: nn.Module, batch: Batch) -> str | None:
    before = {name: buffer.clone() for name, buffer in _buffers(model)}
    _, whole = trial.run_in_turn(batch, [range(batch.size)])
    changed = [name for name, buffer in before.items() if not _is_equal(buffer, whole[name])]
    if not changed:
        return None

    first, second = ranges(batch.size)
    try:
        losses, parts = trial.run_in_turn(batch, [first, second])
        (alone,), _ = trial.run_in_turn(batch, [second])
    # a model that takes one batch size, or draws what no part can repeat
    except Exception as cause:
        _log.debug("buffers of parts of a batch are not known: %s", cause)
        return changed[0]

    if not math.isclose(losses[1], alone, rel_tol=_RELATIVE_LOSS):
        return changed[0]
    return next((name for name in changed if _differ(whole[name], parts[name])), None)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    statistics = statistics_of(model)
    for name, buffer in model.named_buffers():
        if name not in statistics:
            yield name, buffer


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | (one != one)).all())
    )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two states of a buffer differ by more than rounding."""
    if one.shape != other.shape or not one.is_floating_point():
        return not _is_equal(one, other)
    largest = float(one.abs().max()) if one.numel() else 0.0
    tolerance = _RELATIVE.get(one.dtype, _RELATIVE_IN_FLOAT32) * largest
    return not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)
