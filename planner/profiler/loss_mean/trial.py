"""One trial: the loss of a batch and of its parts, and the gradients, with weights that tell
samples apart.

Small models run in float64, where what rounding leaves of gradients that cancel is far below an
auxiliary loss's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

from planner.model.batch import Batch, part_of
from planner.model.loss import loss_of, unsplit_loss
from planner.model.options import ModuleOptions, gradient_dtype
from planner.model.randomness import keep_state
from planner.model.spec import TrainingSpec
from planner.model.torch_private import tree_leaves, tree_map_only
from planner.profiler.loss_mean.same_noise import NoiseOfWhole, Quiet
from planner.profiler.loss_mean.variations import NotedNumbers, Variation

# weights: above, copies in float64 would take more memory than training does
MOST_IN_FLOAT64 = 50_000_000
_SKETCH = 1 << 13  # elements of a gradient that are compared
_NOISE = 0.3  # of weights, relative to the root mean square of each tensor's
_OF_ZEROS = 0.1  # of weights that are all zero, and no matrix


@dataclass(frozen=True)
class Tolerance:
    """What rounding allows: relative to the loss, to a weight's gradient, and to the largest
    weight's.
    """

    loss: float
    gradient: float
    floor: float

    @staticmethod
    def of(dtype: torch.dtype) -> "Tolerance":
        """Return that of computing in `dtype`; in float64 parts of a model may yet compute in
        float32.
        """
        if dtype == torch.float64:
            # So the floor is some 40 roundings of float32: gradients of a head that begins at zero
            # may be no more.
            return Tolerance(loss=3e-6, gradient=1e-3, floor=5e-3)
        return Tolerance(loss=3e-5, gradient=5e-3, floor=1e-2)


@dataclass(frozen=True)
class Outcome:
    """Of one batch, or a part of one."""

    loss: float
    # of each weight, in few elements; none where the trial is of losses alone
    gradients: tuple[Tensor, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers, and not infinite."""
        return math.isfinite(self.loss) and all(
            bool(each.isfinite().all()) for each in self.gradients
        )


@dataclass(frozen=True)
class Trial:
    """What a batch and its parts came to."""

    parts: tuple[Batch, ...]
    whole: Outcome
    of_parts: tuple[Outcome, ...]
    tolerance: Tolerance
    variation: Variation | None = None  # None for a batch of the model file's own

    def explained_by(self, shares: Sequence[float]) -> bool:
        """Return whether the parts, weighted by these shares, add up to the whole."""
        return self.error_of(shares) <= 1.0

    def error_of(self, shares: Sequence[float]) -> float:
        """Return how far the weighted sum of the parts is from the whole, relative to what rounding
        allows.
        """
        counted = [
            (share, each) for share, each in zip(shares, self.of_parts, strict=True) if share
        ]
        error = self._loss_error(counted)
        if not math.isfinite(error):
            return math.inf

        most = max((float(each.norm()) for each in self.whole.gradients), default=0.0)
        for number, expected in enumerate(self.whole.gradients):
            found = torch.zeros_like(expected)
            for share, each in counted:
                found += share * each.gradients[number]
            scale = max(float(expected.norm()), self.tolerance.floor * most, _TINY)
            error = max(error, float((found - expected).norm()) / scale / self.tolerance.gradient)

        if math.isfinite(error):
            return error
        return math.inf

    def _loss_error(self, counted: Sequence[tuple[float, Outcome]]) -> float:
        """Return the same of the losses alone, of parts with their shares."""
        total = sum(share * each.loss for share, each in counted)
        magnitude = sum(share * abs(each.loss) for share, each in counted)
        scale = max(abs(self.whole.loss), magnitude, _TINY)
        return abs(total - self.whole.loss) / scale / self.tolerance.loss

    @property
    def tells(self) -> bool:
        """Whether the parts differ, so that it matters how they count."""
        first, *others = self.of_parts
        scale = max(abs(self.whole.loss), _TINY)
        if any(abs(each.loss - first.loss) > 10 * self.tolerance.loss * scale for each in others):
            return True
        pairs = (
            (one, two)
            for each in others
            for one, two in zip(first.gradients, each.gradients, strict=True)
        )
        return any(
            float((one - two).norm()) > 10 * self.tolerance.gradient * float(one.norm())
            for one, two in pairs
        )


_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Attempt:
    """A way to run trials."""

    dtype: torch.dtype
    # where the model itself says so: then rounding hides what the loss is a mean over
    autocasts: bool = False
    # in evaluation mode, for models that draw in training what no part of a batch can repeat
    evaluates: bool = False
    # run the whole batch alone, and divide its outputs: tells of the loss function
    divides_outputs: bool = False


TargetTrials: TypeAlias = Callable[[Batch, Variation | None], Trial]


class ModelOnTrial:
    """The model while its weights are others: made by `on_trial`."""

    def __init__(
        self, spec: TrainingSpec, model: nn.Module, options: ModuleOptions, attempt: Attempt
    ) -> None:
        self._spec = spec
        self._model = model
        self._options = options
        self._attempt = attempt
        self.tolerance = Tolerance.of(attempt.dtype)
        self.noted = NotedNumbers()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def perturb(self) -> None:
        """Change every weight by noise of its own scale; weights that are zero get that of usual
        first weights.
        """
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self._model.parameters():
                if not weight.is_floating_point():
                    continue
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.data += _scale_of(weight) * noise.to(weight.device)

    def repeats(self, batch: Batch, trial: Trial) -> bool:
        """Return whether the batch of a trial has the same loss again, with the same random
        numbers.
        """
        batch = self._cast(batch)
        noise = NoiseOfWhole()
        again = self._outcome(batch, noise.of_whole(batch.size), gradients=False)
        return math.isclose(trial.whole.loss, again.loss, rel_tol=self.tolerance.loss)

    def run_in_turn(
        self, batch: Batch, samples: Sequence[range]
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Run parts of a batch one after the other; return their losses, and the buffers that they
        leave.
        """
        batch = self._cast(batch)
        noise = NoiseOfWhole()
        if len(samples) > 1 or samples[0] != range(batch.size):
            # for its random numbers
            self._outcome(batch, noise.of_whole(batch.size), gradients=False)

        losses = []
        with self._running(noise), torch.no_grad():
            for each in samples:
                part = part_of(batch, each)
                if len(each) == batch.size:
                    noise.of_whole(batch.size)
                else:
                    noise.of_part(each)
                losses.append(
                    float(unsplit_loss(self._model, self._spec, part.copied(), self._options))
                )
            named = self._model.named_buffers(remove_duplicate=False)
            buffers = {name: buffer.detach().clone() for name, buffer in named}

        return losses, buffers

    def try_whole(
        self,
        batch: Batch,
        variation: Variation | None = None,
        *,
        gradients: bool = True,
        parts: tuple[Batch, ...] | None = None,
    ) -> Trial:
        """Run a batch and two parts of it, which have unequal numbers of samples.

        Args:
            parts: of `ranges`, where they are not just its samples.
        """
        if self._attempt.divides_outputs:
            return self._try_outputs(batch, variation)
        batch = self._cast(batch)
        noise = NoiseOfWhole()
        whole = self._outcome(batch, noise.of_whole(batch.size), gradients=gradients)
        samples = ranges(batch.size)
        chosen = parts or [part_of(batch, each) for each in samples]
        parts = tuple(map(self._cast, chosen))
        of_parts = tuple(
            self._outcome(each, noise.of_part(own), gradients=gradients)
            for each, own in zip(parts, samples, strict=True)
        )
        return Trial(parts, whole, of_parts, self.tolerance, variation)

    def target_trials(self, batch: Batch) -> TargetTrials:
        """Return what runs the loss on other targets, with the outputs of this batch."""
        batch = self._cast(batch)
        noise = NoiseOfWhole()
        samples = ranges(batch.size)
        output = self._output(batch, noise.of_whole(batch.size))
        if self._attempt.divides_outputs:
            outputs = [rows_of(output, own, batch.size) for own in samples]
        else:
            outputs = [self._output(part_of(batch, own), noise.of_part(own)) for own in samples]

        def run(changed: Batch, variation: Variation | None) -> Trial:
            changed = self._cast(changed)
            noise = NoiseOfWhole()
            whole = self._loss_of_output(output, changed, noise.of_whole(batch.size))
            parts = tuple(part_of(changed, own) for own in samples)
            of_parts = tuple(
                self._loss_of_output(of_part, part, noise.of_part(own))
                for of_part, part, own in zip(outputs, parts, samples, strict=True)
            )
            return Trial(parts, whole, of_parts, self.tolerance, variation)

        return run

    def _try_outputs(self, batch: Batch, variation: Variation | None) -> Trial:
        """Run the loss on the outputs of a batch and on parts of them; gradients are those of the
        outputs.
        """
        batch = self._cast(batch)
        noise = NoiseOfWhole()
        outputs = self._output(batch, noise.of_whole(batch.size))
        trained = [
            leaf
            for leaf in tree_leaves(outputs)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]

        def outcome(samples: range) -> Outcome:
            for leaf in trained:
                leaf.grad = None
                leaf.requires_grad_()

            own = rows_of(outputs, samples, batch.size)
            target = part_of(batch, samples).target
            with self._running(noise):
                loss = loss_of(own, target, self._options.loss(self._spec.loss))
                loss.sum().backward()  # type: ignore[no-untyped-call]

            return Outcome(float(loss.detach()), tuple(_sketch(leaf) for leaf in trained))

        samples = ranges(batch.size)
        noise.of_whole(batch.size)
        whole = outcome(range(batch.size))
        parts = tuple(part_of(batch, each) for each in samples)
        of_parts = []
        for each in samples:
            noise.of_part(each)
            of_parts.append(outcome(each))

        return Trial(parts, whole, tuple(of_parts), self.tolerance, variation)

    def _outcome(self, batch: Batch, noise: NoiseOfWhole, *, gradients: bool) -> Outcome:
        for weight in self._trained:
            weight.grad = None
        with self._running(noise), torch.set_grad_enabled(gradients):
            loss = unsplit_loss(self._model, self._spec, batch.copied(), self._options)
            if gradients and loss.requires_grad:
                loss.sum().backward()  # type: ignore[no-untyped-call]
        found = tuple(_sketch(weight) for weight in self._trained) if gradients else ()
        return Outcome(float(loss.detach()), found)

    def _output(self, batch: Batch, noise: NoiseOfWhole) -> Any:
        batch = batch.copied().prepared(self._options)
        with self._running(noise), torch.no_grad():
            return self._model(*batch.args, **batch.kwargs)

    def _loss_of_output(self, output: Any, batch: Batch, noise: NoiseOfWhole) -> Outcome:
        output = tree_map_only(Tensor, torch.clone, output)  # a loss may write to it
        with self._running(noise), torch.no_grad():
            return Outcome(
                float(loss_of(output, batch.target, self._options.loss(self._spec.loss)))
            )

    @contextmanager
    def _running(self, noise: NoiseOfWhole) -> Iterator[None]:
        with ExitStack() as modes:
            modes.enter_context(keep_state(self._model))
            torch.manual_seed(0)
            modes.enter_context(noise)
            modes.enter_context(self.noted)
            modes.enter_context(Quiet())
            if not self._attempt.autocasts:
                modes.enter_context(_without_autocast())
            yield

    def _cast(self, batch: Batch) -> Batch:
        def cast(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.to(self._attempt.dtype)

        leaves, spec = batch.flatten()
        return Batch(
            *spec.unflatten([cast(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        )


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let the model's own `with torch.autocast(...)` change nothing."""
    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        enabled = region._enabled
        region._enabled = False
        try:
            return enter(region)  # type: ignore[no-untyped-call]
        finally:
            region._enabled = enabled

    with mock.patch.object(torch.autocast, "__enter__", entered):
        yield


@contextmanager
def on_trial(
    spec: TrainingSpec, model: nn.Module, options: ModuleOptions, attempt: Attempt
) -> Iterator[ModelOnTrial]:
    """Give a model copies of its weights as an attempt says, and its own ones afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    kept = [(tensor, tensor.data, tensor.grad) for tensor in tensors.values()]
    summed = [
        (each, gradient_dtype(each))
        for each in model.parameters()
        if gradient_dtype(each) != each.dtype
    ]
    default = torch.get_default_dtype()
    try:
        if attempt.evaluates:
            model.eval()
        for weight, _ in summed:
            weight.grad_dtype = None
        for tensor, data, _ in kept:
            tensor.grad = None
            if tensor.is_floating_point():
                tensor.data = data.to(attempt.dtype, copy=True)
            else:
                tensor.data = data.clone()
        torch.set_default_dtype(attempt.dtype)
        yield ModelOnTrial(spec, model, options, attempt)
    finally:
        torch.set_default_dtype(default)
        for tensor, data, gradient in kept:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
        for weight, gradient_type in summed:
            weight.grad_dtype = gradient_type
        for module, training in modes:
            module.training = training


def ranges(size: int) -> tuple[range, range]:
    """Divide samples into two parts, the first of which is larger."""
    first = min(size // 2 + 1, size - 1)
    return range(first), range(first, size)


def rows_of(output: Any, samples: range, size: int) -> Any:
    """Return what a model's output has of some samples: of every tensor that has a row for each of
    them.
    """
    rows = slice(samples.start, samples.stop)

    def rows_in(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == size:
            return tensor[rows]
        return tensor

    return tree_map_only(Tensor, rows_in, output)


def _scale_of(weight: Tensor) -> float:
    size = 0.0
    if weight.numel():
        size = float(weight.detach().square().mean().sqrt())
    if size:
        return _NOISE * size
    if weight.dim() < 2:
        return _OF_ZEROS
    return 1 / math.sqrt(weight[0].numel())


def _sketch(weight: Tensor) -> Tensor:
    """Return the weight's gradient, or evenly many elements of a large one."""
    step = -(-weight.numel() // _SKETCH) or 1
    gradient = weight.grad
    if gradient is None:
        return torch.zeros(
            len(range(0, weight.numel(), step)), dtype=torch.float64, device=weight.device
        )

    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.detach().flatten()[::step].double()
