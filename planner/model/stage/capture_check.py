"""Check that captured layers compute what the model does: its loss, and the gradients of its
parameters.

A capture records one call, without autograd. What the model takes from elsewhere (a count of its
calls, random numbers of Python or NumPy) became a constant there, and what changes gradients but no
value (hooks, tensors saved with fewer digits) is not there at all. Training would go on with it in
silence. So one step of each is compared, on several batches: a constant may fit the batch that it
was captured with.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import CaptureError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.capture.parameters import refuse_changed_parameters
from planner.model.capture.regions import regions_of
from planner.model.generators import seed_generators
from planner.model.loss import unsplit_loss
from planner.model.options import ModuleOptions
from planner.model.python_state import PythonState
from planner.model.randomness import generators_kept, keep_state
from planner.model.spec import TrainingSpec
from planner.model.stage.stage import build_stage
from planner.model.torch_private import TorchDispatchMode

# Relative differences that are none: some kernels of GPUs add in another order each time.
_SAME = 1e-4
_EPSILONS = 4
# Gradients that should be zero, as of a bias in front of BatchNorm, are the rounding of much larger
# numbers. So a difference counts from this part of all parameters' gradients on.
_LEAST_SHARE = 1e-2
_DRAWN_STD = 0.02  # of the numbers that stand for weights that are zero
_FEW = 2  # samples, of another batch size

_VALUE_HINT = (
    "draw random numbers with torch alone, and keep counts of calls in buffers: all other numbers "
    "stay as they were "
    "when the model was captured"
)
_COUNT_HINT = (
    "let forward() count in a buffer, return it with the output where loss() needs it, "
    "and train with one microbatch"
)
_GRADIENT_HINT = (
    "hooks on gradients and on saved tensors are not captured: write them with operations, as in "
    "x * s + x.detach() * "
    "(1 - s) for x with its gradient multiplied by s, and torch.no_grad for torch.inference_mode; "
    "or name parts that "
    "run as they are in blocks(model)"
)
_TWO_CALLS = "two calls of the model with the same batch and the same random numbers of torch"
_BOTH = "the model and its captured layers"


def can_be_checked(graph: LayerGraph, device_type: str) -> bool:
    """Return whether all weights of the model have values on a kind of device, without which it
    cannot run.
    """
    return all(parameter.device.type == device_type for parameter in graph.model.parameters())


def check_captured(
    spec: TrainingSpec, graph: LayerGraph, batches: Sequence[Batch], options: ModuleOptions
) -> None:
    """Raise CaptureError where the model and its captured layers differ in a step on one of
    `batches`.

    So it does where a step of the model changes which parameters there are, or are trained.

    The model runs twice on the first one. Weights, buffers, gradients and random numbers are left
    as they were. All weights must be where the batches are.
    """
    runs = _Runs(spec, graph, replace(options, compiled=False))
    with generators_kept(), _gradients_kept(graph.model), _no_weight_zero(graph.model):
        state = PythonState(spec, graph.model)
        one = runs.model(batches[0], seed=0)
        state.note()
        again = runs.model(batches[0], seed=0)
        runs.raise_difference(_TWO_CALLS, one, again)
        _refuse_counting(state)
        if graph.blocks is not None:
            _refuse_exchange(runs, spec, batches)
        runs.compare(batches[0], one, runs.captured(batches[0]))

        for batch in batches[1:]:
            try:
                steps = runs.model(batch, seed=0), runs.captured(batch)
            # whatever either raises that takes one number of samples: so would training
            except Exception:
                if batch.size == batches[0].size:
                    raise
                continue
            runs.compare(batch, *steps)


def _refuse_counting(state: PythonState) -> None:
    """Raise CaptureError where a call of the model has left another value than the call
    before it.
    """
    change = state.change()
    if change is None:
        return
    raise CaptureError(
        f"each call of the model and of loss() changes {change.words}, and they may read it: "
        f"trials and other workers "
        "call them more often, or never",
        hint=_COUNT_HINT,
    )


def _refuse_exchange(runs: "_Runs", spec: TrainingSpec, batches: Sequence[Batch]) -> None:
    """Raise CaptureError where blocks leave what follows from a batch in globals: other workers
    would not see it.
    """
    state = PythonState(spec, runs.graph.model, attributes=False)
    for batch in batches[1:]:
        if batch.size != batches[0].size:
            continue
        runs.model(batch, seed=0)
        change = state.change()
        if change is not None:
            raise CaptureError(
                f"blocks(model) leave a number that depends on the batch in '{change.name}', and "
                f"blocks on other "
                "workers would not see it",
                hint="let the block return it, for the next one to pass on",
            )


def further_batches(spec: TrainingSpec, graph: LayerGraph, batch: Batch) -> list[Batch]:
    """Return example batches beside `batch`: one of as many samples, and one of fewer, or of more
    if it has two.

    A graph that is valid for one number of samples has no second size, nor has a model that takes
    no other.
    """
    with generators_kept():
        drawn = [spec.example_batch(batch.size)]
        if graph.batch_size is None:
            size = _FEW if batch.size != _FEW else _FEW + 1
            drawn += [spec.example_batch(size)]
    return [each.to(batch.device_type) for each in drawn]


@dataclass(frozen=True)
class _Step:
    """The loss of a step, and the gradients of parameters by name; None where a parameter
    got none.
    """

    loss: Tensor
    gradients: dict[str, Tensor | None]  # on the host


class _Runs:
    """Steps of a model and of its captured layers."""

    def __init__(self, spec: TrainingSpec, graph: LayerGraph, options: ModuleOptions) -> None:
        self._spec = spec
        self.graph = graph
        self._options = options
        self._calls = 0
        self._stage = build_stage(graph, [layer.name for layer in graph.layers])
        regions = {region for node in graph.module.graph.nodes for region in regions_of(node)}
        self._dtypes_of_regions = {
            each.dtype for each in regions if each.enabled and each.dtype is not None
        }

    def compare(self, batch: Batch, one: _Step, captured: _Step) -> None:
        """Raise CaptureError where steps of the model and of its captured layers on a batch
        differ.
        """
        if self._difference(one, captured) is None:
            return

        # Captured layers may draw random numbers in another order than the model does.
        if self._difference(one, self.model(batch, seed=1)) is not None:
            with _DrawsByShape():  # type: ignore[no-untyped-call]
                one = self.model(batch, seed=0)
                captured = self.captured(batch)

        self.raise_difference(_BOTH, one, captured)

    def model(self, batch: Batch, seed: int) -> _Step:
        """Run a step of the model as the user wrote it."""
        model = self.graph.model
        with refuse_changed_parameters(model):
            return self._step(
                seed, lambda: unsplit_loss(model, self._spec, batch.copied(), self._options)
            )

    def captured(self, batch: Batch) -> _Step:
        """Run the same step of the captured layers."""
        return self._step(0, lambda: self._stage(batch, {})[LOSS])

    def raise_difference(self, what: str, one: _Step, other: _Step) -> None:
        """Raise CaptureError where steps differ; `what` are they."""
        difference = self._difference(one, other)
        if difference is None:
            return
        hint = _GRADIENT_HINT
        if difference.startswith("losses") or what == _TWO_CALLS:
            hint = _VALUE_HINT
        raise CaptureError(f"{what} give {difference}", hint=hint)

    def _step(self, seed: int, run: Callable[[], Tensor]) -> _Step:
        parameters = dict(self.graph.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        self._calls += 1
        with keep_state(self.graph.model):
            # Python's and NumPy's go on from call to call: what a model draws from them is a
            # constant in its graph.
            seed_generators(self._calls)
            torch.manual_seed(seed)
            loss = run()
            torch.autograd.backward(loss)

        gradients = {name: _on_host(parameter.grad) for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        return _Step(loss.detach(), gradients)

    def _difference(self, one: _Step, other: _Step) -> str | None:
        """Return what is different in two steps: the losses, or the gradient of the first such
        parameter.
        """
        tolerance = self._tolerance(one.loss.dtype)
        if not torch.allclose(one.loss, other.loss, rtol=tolerance, atol=0.0, equal_nan=True):
            return f"losses of {float(one.loss):.6g} and {float(other.loss):.6g}"

        norms = [_norm(gradient) for gradient in one.gradients.values() if gradient is not None]
        least = _LEAST_SHARE * math.hypot(*(norm for norm in norms if math.isfinite(norm)))
        for name, gradient in one.gradients.items():
            difference = _gradient_difference(gradient, other.gradients[name], tolerance, least)
            if difference is not None:
                return f"equal losses, but other gradients of parameter '{name}': {difference}"

        return None

    def _tolerance(self, dtype: torch.dtype) -> float:
        computed_in = {
            self._options.autocast or self._options.half or dtype,
            *self._dtypes_of_regions,
        }
        return max(_SAME, *(_EPSILONS * torch.finfo(each).eps for each in computed_in))


def _gradient_difference(
    one: Tensor | None, other: Tensor | None, tolerance: float, least: float
) -> str | None:
    """Return how two gradients differ; `least` is the least norm that rounding is compared with."""
    if one is None and other is None:
        return None
    if one is None or other is None:
        # Optimizers leave a weight without a gradient alone, and decay one whose gradient is zero.
        return f"{_shown_norm(one)} and {_shown_norm(other)}"

    alike = (one == other) | (one.isnan() & other.isnan())
    error = _norm((one - other).masked_fill(alike, 0.0))
    if not error or error <= tolerance * max(_norm(one), least):
        return None
    return f"norms of {_shown_norm(one)} and {_shown_norm(other)}, which are {error:.3g} apart"


def _shown_norm(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    return f"{_norm(gradient):.6g}"


def _norm(gradient: Tensor) -> float:
    """Return the norm of a gradient, which may be complex, or have fewer digits than a norm
    needs.
    """
    return float((gradient if gradient.is_complex() else gradient.float()).norm())


def _on_host(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().cpu()


class _DrawsByShape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which random numbers depend on their operation and its shapes alone, whatever was
    drawn before.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in args]
            torch.manual_seed(zlib.crc32(f"{func} {shapes}".encode()))
        return func(*args, **(kwargs or {}))


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _no_weight_zero(model: nn.Module) -> Iterator[None]:
    """Draw the weights that are zero, behind which all gradients would be zero and equal; make them
    zero afterwards.
    """
    with torch.no_grad():
        zeros = [each for each in model.parameters() if each.is_floating_point() and not each.any()]
        for parameter in zeros:
            parameter.normal_(std=_DRAWN_STD)

    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()
