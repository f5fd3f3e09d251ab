"""Check what a plan says of a loss against the model that it is to train, by a few trials.

A plan's file may have been edited, or made for another dataset; one of an estimate says nothing.
These trials are of losses alone, on few samples, because every start of a training waits for them.
"""

import logging
import warnings
from collections.abc import Sequence

import torch

from planner.errors import ModelFileError, PlanError, first_line
from planner.formats.files import replace
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.options import ModuleOptions
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.profiler.loss_mean.buffers import buffer_of_parts
from planner.profiler.loss_mean.find import (
    SAMPLES,
    Evidence,
    against,
    attempts,
    explains,
    is_large,
    small_batch,
    vary,
    with_forbidden,
)
from planner.profiler.loss_mean.trial import Attempt, on_trial

_log = logging.getLogger(__name__)


def check_stated(
    spec: TrainingSpec,
    graph: LayerGraph,
    batches: Sequence[Batch],
    options: ModuleOptions,
    stated: LossMean | None,
) -> LossMean | None:
    """Check what a plan says of a loss; return it with all labels that it does not hold for.

    A plan that says nothing stands for the samples. Nothing is checked of large models, and of
    those that no trial can be made of.

    Args:
        batches: of the training data, which must not differ from what the plan says either.

    Raises:
        PlanError: where the example batch or one of `batches` shows another loss.
    """
    if is_large(graph) or any(parameter.is_meta for parameter in graph.model.parameters()):
        return stated
    _check_buffers(spec, graph, options)
    reason = ""
    for attempt in attempts(spec, graph):
        try:
            with generators_kept():
                evidence = _gather(spec, graph, batches, options, attempt)
        except (ModelFileError, torch.OutOfMemoryError):
            raise
        # whatever a model raises that takes float32 only, or one batch size
        except Exception as cause:
            reason = first_line(cause)
            continue
        if evidence is not None:
            return _checked(spec, stated, evidence)
        reason = "it differs from call to call"

    _log.info("the loss of '%s' is not checked against the plan: %s", spec.origin, reason)
    return stated


def _check_buffers(spec: TrainingSpec, graph: LayerGraph, options: ModuleOptions) -> None:
    """Raise PlanError where forward() changes a buffer once for each microbatch: older profiles do
    not say so.
    """
    with generators_kept():
        batch = small_batch(spec, graph, spec.example_batch(graph.batch_size or 2))
    buffer = buffer_of_parts(spec, graph.model, batch, options, attempts(spec, graph))
    if buffer is not None:
        raise PlanError(
            f"forward() of '{spec.origin}' changes buffer '{buffer}' once for each microbatch, "
            f"and one process does "
            "so once for a minibatch",
            hint="plan one microbatch with `microbatches=1`, or train so with "
            "`accept_divided_loss`",
        )


def _gather(
    spec: TrainingSpec,
    graph: LayerGraph,
    batches: Sequence[Batch],
    options: ModuleOptions,
    attempt: Attempt,
) -> Evidence | None:
    """Run the trials; return None where the model is not the same function twice."""
    options = replace(options, autocast=None, half=None, compiled=False)
    with on_trial(spec, graph.model, options, attempt) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model, about labels that are none of its own
        model.perturb()
        batch = small_batch(spec, graph, spec.example_batch(graph.batch_size or 2))
        first = model.try_whole(batch, gradients=False)
        if not model.repeats(batch, first):
            return None
        own = [model.try_whole(each, gradients=False) for each in batches if each.size > 1]
        natural = tuple(each for each in (first, *own) if each.whole.finite)
        return Evidence(natural, tuple(vary(spec, graph, model, batch, guesses=False)))


def _checked(spec: TrainingSpec, stated: LossMean | None, evidence: Evidence) -> LossMean:
    mean = stated or SAMPLES
    if not explains(spec, mean, evidence.natural):
        says = f"takes the loss of '{spec.origin}' for a {mean.words}, and the model's is another"
        if stated is None:
            says = (
                f"does not say what the loss of '{spec.origin}' is a mean over, and it is "
                f"none over samples"
            )
        raise PlanError(
            f"the plan {says}: the losses of the parts of a batch, weighted so, do not add up to "
            f"the loss of the batch",
            hint="profile the model and solve again: plan profile, plan solve; where only the "
            "data have such labels or "
            "masks, give example_batch() some, or define loss_weight(target)",
        )

    forbidden = with_forbidden(
        mean, against(spec, mean, [mean], evidence.varied), evidence
    ).forbidden
    return replace(mean, forbidden=tuple(dict.fromkeys((*mean.forbidden, *forbidden))))
