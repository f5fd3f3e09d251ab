"""Check that a captured model computes the model's own loss."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.loss import unsplit_loss
from planner.model.options import ModuleOptions
from planner.model.randomness import keep_state
from planner.model.spec import TrainingSpec
from planner.model.stage.stage import build_stage

# Relative differences that are none: some kernels of GPUs add in another order each time.
_SAME, _EPSILONS = 1e-4, 4


def check_captured(spec: TrainingSpec, graph: LayerGraph, batch: Batch, options: ModuleOptions) -> None:
    """Raise CaptureError where losses of the model and of its captured layers differ, on one batch and one seed.

    The capture records one call. What the model takes from elsewhere (a count of its calls, random numbers of Python or
    numpy) became a constant there, and training would go on with it in silence.
    """
    options = replace(options, compiled=False)
    stage = build_stage(graph, [layer.name for layer in graph.layers])

    def model(seed: int) -> Tensor:
        return _loss(graph, seed, lambda: unsplit_loss(graph.model, spec, batch, options))

    one, again = model(0), model(0)
    tolerance = max(_SAME, _EPSILONS * torch.finfo(options.autocast or options.half or one.dtype).eps)

    def equal(first: Tensor, second: Tensor) -> bool:
        return torch.allclose(first, second, rtol=tolerance, atol=0.0, equal_nan=True)

    if not equal(one, again):
        raise _differ("two calls of the model with the same batch and the same random numbers of torch", one, again)
    captured = _loss(graph, 0, lambda: stage(batch, {})[LOSS])
    # Captured layers may draw random numbers in another order than the model does.
    if not equal(one, captured) and equal(one, model(1)):
        raise _differ("the model and its captured layers", one, captured)


def _loss(graph: LayerGraph, seed: int, run: Callable[[], Tensor]) -> Tensor:
    with keep_state(graph.model):
        torch.manual_seed(seed)
        return run().detach()  # with gradients, which a forward may itself ask for


def _differ(what: str, one: Tensor, other: Tensor) -> CaptureError:
    return CaptureError(
        f"{what} give losses of {float(one):.6g} and {float(other):.6g}",
        hint="draw random numbers with torch alone, and keep counts of calls in buffers: all other numbers stay as "
        "they were when the model was captured",
    )
