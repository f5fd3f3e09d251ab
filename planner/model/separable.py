"""Try whether an optimizer updates each parameter by itself, so that stages and replicas may each step their part.

A norm of all gradients (LAMB's, or that of a hook), or an estimate from all of them (Prodigy's, D-Adaptation's), is
another one where each stage has an optimizer of its own: another training, without a word. No list of names could say
which optimizers do so. So the user's optimizer steps stand-ins for the model's parameters, with made-up gradients: all
together, and part by part as the plan cuts them. It is separable if the updates are the same.

Gradients change their size from step to step, since Adam's update does not depend on a constant factor of them, and
keep their direction by and large, since estimates of a learning rate grow only then. The updates of each step are
compared by themselves: beside a step of much larger gradients, a difference in another one would go unnoticed.
"""

import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import ModelFileError, PlannerError, first_line
from planner.model.elementwise import kept_whole
from planner.model.optimizer_part import TrainedParameter, optimizer_of_part, step_part
from planner.model.randomness import generators_kept
from planner.model.silent_step import NoCommunication
from planner.model.spec import TrainingSpec
from planner.runtime import runtime_of

_SCALES = (1.0, 30.0, 0.03, 1e3, 1.0)  # of the gradients, step by step
_NOISE = 0.3  # of a gradient, relative to its lasting part
_MOST_ELEMENTS = 2**18  # of all stand-ins: those of small models have the parameters' own shapes
_SIZES = (256, 64, 16, 8, 4, 2)  # at most, of each dimension of a stand-in
_ROUNDING = 1e-4  # relative to an update: some optimizers stack matrices of one shape
_ROUNDED = 16.0  # roundings of a value: in one step, a difference smaller than that says nothing

Values = dict[str, Tensor]  # by the parameters' names
Steps = list[Values]  # the values after each step
Piece = tuple[nn.Parameter, Callable[[Tensor], Tensor]]  # what is stepped, and how it is cut from a whole value


@dataclass(frozen=True)
class Separability:
    """What stepping the parts of a model by themselves has shown.

    Attributes:
        kind: the optimizer's class.
        problem: why the parts may not be stepped by themselves, as the end of a sentence; None where they may.
        claimed: whether the optimizer says of itself that they may, by `separable` or `elementwise`.
        combines: whether it was seen to combine what the parts have, whatever it says of itself.
        draws: whether it draws random numbers, or repeats no update for another reason: replicas would not stay equal.
    """

    kind: str
    problem: str | None = None
    claimed: bool = False
    combines: bool = False
    draws: bool = False


def halves(names: Sequence[str]) -> list[list[Collection[str]]]:
    """Return two ways to cut a model's parameters in two: in the middle, and every other one."""
    middle = len(names) // 2
    return [[names[:middle], names[middle:]], [names[::2], names[1::2]]]


def separability(
    spec: TrainingSpec,
    whole: Sequence[TrainedParameter],
    ways: Sequence[Sequence[Collection[str]]],
    device: torch.device,
    *,
    by_elements: bool = False,
) -> Separability:
    """Step the user's optimizer on stand-ins, together and in parts, and return what differs.

    Args:
        whole: all trained parameters of the model.
        ways: to cut it; each has the names of the parameters of each part. A tied one may be in several.
        device: where the optimizer is to run.
        by_elements: whether replicas or ranks have parts of single parameters.

    Raises:
        ModelFileError: when the optimizer communicates, or fails on all parameters together.
    """
    trial = _Trial(spec, whole, device)
    try:
        together = trial.run()
    except PlannerError as error:
        if trial.communicates or not trial.is_smaller:
            raise
        return trial.verdict(f"fails on smaller parameters of the same names, on which it was tried: {error.message}")

    if _difference(together, trial.run(seed=1), trial.first) is not None:
        return replace(trial.verdict("draws random numbers in step(), or repeats no update"), draws=True)

    try:
        for parts in ways:
            differing = _difference(together, trial.run(parts), trial.first)
            if differing is not None:
                return replace(trial.verdict(f"combines parameters: {differing}"), combines=True)
        differing = _difference(together, trial.run_pieces(), trial.first) if by_elements else None
    except PlannerError as error:
        if trial.communicates:
            raise
        return trial.verdict(f"fails on a part of the parameters: {error.message}")
    if differing is None:
        return trial.verdict(None)
    return replace(trial.verdict(f"combines elements of parameters: {differing}"), combines=True)


class _Trial:
    """Runs of the user's optimizer on stand-ins with the same values and the same gradients.

    Attributes:
        first: the values that all runs begin with.
        is_smaller: whether the stand-ins are smaller than the parameters.
        communicates: whether the last run failed because the optimizer communicates.
    """

    def __init__(self, spec: TrainingSpec, whole: Sequence[TrainedParameter], device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._whole = _small(whole)
        generator = torch.Generator().manual_seed(0)

        def drawn(parameter: TrainedParameter) -> Tensor:
            return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

        self.first = {each.name: drawn(each) for each in self._whole}
        # Some parameters have larger gradients than others.
        sizes = {each.name: 10 ** float(torch.rand((), generator=generator) * 2 - 1) for each in self._whole}
        lasting = {each.name: drawn(each) * sizes[each.name] for each in self._whole}

        def gradients(scale: float) -> Values:
            noise = {each.name: drawn(each) * sizes[each.name] for each in self._whole}
            return {name: scale * (value + _NOISE * noise[name]) for name, value in lasting.items()}

        self._gradients = [gradients(scale) for scale in _SCALES]
        self._optimizer: Optimizer  # of the last run
        self._kind = "the optimizer"
        self._claimed = False
        self.is_smaller = [each.shape for each in self._whole] != [each.shape for each in whole]
        self.communicates = False

    def verdict(self, problem: str | None) -> Separability:
        return Separability(self._kind, problem, self._claimed)

    def run(self, parts: Sequence[Collection[str]] = (), seed: int = 0) -> Steps:
        """Step the parts one after the other, or all parameters together; return the values after each step."""
        steps: Steps = [{} for _ in self._gradients]
        for names in filter(len, parts or [[each.name for each in self._whole]]):
            own = {name: self._parameter(self.first[name]) for name in names}
            with self._seeded(seed):
                optimizer = self._make(own)
                stepped = self._step(optimizer, {name: (own[name], lambda gradient: gradient) for name in own})

            for values, new in zip(steps, stepped, strict=True):
                values.update(new)
        return steps

    def run_pieces(self) -> Steps:
        """Step one half of the elements of each parameter, then the other; return the values after each step.

        Return nothing where the optimizer does not say that it may be divided so: it will not be.
        """
        if kept_whole(self._optimizer) is None:
            return []
        steps = [{name: value.clone().flatten() for name, value in self.first.items()} for _ in self._gradients]
        for half in range(2):
            own = {name: self._parameter(value) for name, value in self.first.items()}
            with self._seeded(0):
                optimizer = self._make(own)
                pieces = _pieces(optimizer, own, half)
                stepped = self._step(optimizer, pieces)

            for values, new in zip(steps, stepped, strict=True):
                for name, (_, cut) in pieces.items():
                    cut(values[name]).copy_(new[name].flatten())
        return [{name: value.view_as(self.first[name]) for name, value in values.items()} for values in steps]

    def _parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(self._device, copy=True))

    def _make(self, own: Mapping[str, nn.Parameter]) -> Optimizer:
        with self._watched("optimizer()"):
            optimizer = optimizer_of_part(self._spec, self._whole, own)
        self._optimizer = optimizer
        self._kind = type(optimizer).__name__
        self._claimed = bool(getattr(optimizer, "separable", False) or getattr(optimizer, "elementwise", False))
        return optimizer

    def _step(self, optimizer: Optimizer, pieces: Mapping[str, Piece]) -> Steps:
        """Step with all gradients, one after the other; return the values after each step."""
        steps: Steps = []
        for gradients in self._gradients:
            for name, (piece, cut) in pieces.items():
                piece.grad = cut(gradients[name]).to(self._device).view_as(piece).clone()
            with self._watched(f"step() of {self._kind}"):
                step_part(self._spec, optimizer)
            steps.append({name: piece.detach().to("cpu", copy=True) for name, (piece, _) in pieces.items()})
        return steps

    @contextmanager
    def _watched(self, who: str) -> Iterator[None]:
        """Let nothing communicate within, and make what fails an error of the model file."""
        watch = NoCommunication(who)
        try:
            with watch:
                yield
        except PlannerError:
            self.communicates = watch.operation is not None
            raise
        except Exception as error:  # whatever the user's optimizer raises
            raise ModelFileError(
                f"{who} raises {type(error).__name__}: {first_line(error)}",
                hint=_step_hint(error),
            ) from error

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed all generators within."""
        with generators_kept(), runtime_of(self._device).random_state_kept(self._device):
            torch.manual_seed(seed)
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(seed)
            yield


def _small(whole: Sequence[TrainedParameter]) -> list[TrainedParameter]:
    """Return the parameters as stand-ins have them: in single precision, and smaller where all together are large."""
    half = (torch.float16, torch.bfloat16)
    found = [replace(each, dtype=torch.float32 if each.dtype in half else each.dtype) for each in whole]
    for size in _SIZES:
        if sum(math.prod(each.shape) for each in found) <= _MOST_ELEMENTS:
            break
        found = [replace(each, shape=torch.Size(min(length, size) for length in each.shape)) for each in found]
    return found


def _pieces(optimizer: Optimizer, own: Mapping[str, nn.Parameter], half: int) -> dict[str, Piece]:
    """Let the optimizer step a half of the elements of each parameter, as replicas do, or all where it must."""
    undivided = set(map(id, kept_whole(optimizer) or ()))
    found: dict[str, Piece] = {}
    new: dict[int, nn.Parameter] = {}
    for number, (name, parameter) in enumerate(own.items()):
        middle = parameter.numel() // 2
        bounds = slice(0, middle) if half else slice(middle, None)
        if id(parameter) in undivided:
            bounds = slice(None) if number % 2 == half else slice(0, 0)
        if not parameter.numel() or not len(range(*bounds.indices(parameter.numel()))):
            continue

        def cut(value: Tensor, bounds: slice = bounds) -> Tensor:
            return value.flatten()[bounds]

        piece = parameter if id(parameter) in undivided else nn.Parameter(cut(parameter.detach()).clone())
        new[id(parameter)] = piece
        found[name] = piece, cut
        _move_state(optimizer, parameter, piece, cut)

    for group in optimizer.param_groups:
        group["params"] = [new[id(each)] for each in group["params"] if id(each) in new]
        group.pop("param_names", None)
    return found


def _move_state(
    optimizer: Optimizer, parameter: nn.Parameter, piece: nn.Parameter, cut: Callable[[Tensor], Tensor]
) -> None:
    if piece is parameter or not (state := optimizer.state.pop(parameter, None)):
        return
    alike = {key: isinstance(value, Tensor) and value.shape == parameter.shape for key, value in state.items()}
    optimizer.state[piece] = {key: cut(value).clone() if alike[key] else value for key, value in state.items()}


def _difference(together: Steps, apart: Steps, first: Values) -> str | None:
    """Return in words which update differs most, and by how much of it; None if all are equal but for rounding."""
    if not apart:
        return None

    differences = _differences(first, together[-1], first, apart[-1])
    before = first, first
    for after in zip(together, apart, strict=True):
        by_step = _differences(before[0], after[0], before[1], after[1], rounded=_ROUNDED)
        differences = {name: max(by_step[name], differences[name]) for name in differences}
        before = after

    if not differences:
        return None
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] <= _ROUNDING:
        return None
    return f"the update of '{worst}' differs by {differences[worst]:.1%} where its part is stepped by itself"


def _differences(
    before_together: Values,
    after_together: Values,
    before_apart: Values,
    after_apart: Values,
    *,
    rounded: float = 0.0,
) -> dict[str, float]:
    """Return by how much of each parameter's update together the update apart differs; infinity if it is no number.

    Args:
        rounded: the difference that counts as none, in roundings of the parameter's largest value.
    """
    differences = {}
    for name, value in after_apart.items():
        update_together = after_together[name] - before_together[name]
        update_apart = value - before_apart[name]
        if not value.numel() or torch.equal(update_together.nan_to_num(), update_apart.nan_to_num()):
            differences[name] = 0.0
            continue

        difference = float((update_apart - update_together).abs().max())
        precision = torch.finfo(value.dtype).eps
        if difference <= rounded * precision * float(value.abs().max()):
            differences[name] = 0.0
            continue

        relative = difference / max(float(update_together.abs().max()), torch.finfo(torch.float32).tiny)
        differences[name] = math.inf if math.isnan(relative) else relative
    return differences


def _step_hint(error: Exception) -> str:
    """Return what to do about an optimizer that fails on gradients for all its parameters."""
    if "dense gradients" in str(error):
        return "stages have dense gradients: take torch.optim.Adam, say, and nn.Embedding without sparse=True"
    return "try it in plain PyTorch: make it of all parameters, give each a gradient, and call step()"
