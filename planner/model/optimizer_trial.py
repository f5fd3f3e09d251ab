"""Steps of the user's optimizer on stand-ins for the model's parameters: all together, or part by
part.

Gradients change their size from step to step, since Adam's update does not depend on a constant
factor of them, and keep their direction by and large, since estimates of a learning rate grow only
then.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import ModelFileError, PlannerError, first_line
from planner.formats.files import replace
from planner.model.elementwise import kept_whole
from planner.model.generators import seeded
from planner.model.hyperparameters import Hyperparameters, group_numbers, hyperparameters_of
from planner.model.optimizer_part import TrainedParameter, optimizer_of_part, step_part
from planner.model.silent_step import NoCommunication
from planner.model.spec import TrainingSpec

_SCALES = (1.0, 30.0, 0.03, 1e3, 1.0)  # of the gradients, step by step
_NOISE = 0.3  # of a gradient, relative to its lasting part
_MOST_ELEMENTS = 2**18  # of all stand-ins: those of small models have the parameters' own shapes
_SIZES = (256, 64, 16, 8, 4, 2)  # at most, of each dimension of a stand-in

Values = dict[str, Tensor]  # by the parameters' names
Steps = list[Values]  # the values after each step
Schedule = list[dict[str, Hyperparameters]]  # those of each parameter, by its name, after each step
# what is stepped, and how it is cut from a whole value
Piece = tuple[nn.Parameter, Callable[[Tensor], Tensor]]


class OptimizerTrial:
    """Runs of the user's optimizer on stand-ins with the same values and the same gradients.

    Attributes:
        first: the values that all runs begin with.
        is_smaller: whether the stand-ins are smaller than the parameters.
        communicates: whether the last run failed because the optimizer communicates.
        kind: the optimizer's class.
        claimed: whether the optimizer says of itself that parts may be stepped, by `separable` or
            `elementwise`.
    """

    def __init__(
        self, spec: TrainingSpec, whole: Sequence[TrainedParameter], device: torch.device
    ) -> None:
        self._spec = spec
        self._device = device
        self._whole = _small(whole)
        self._marks = {each.name: each for each in whole}
        generator = torch.Generator().manual_seed(0)

        def drawn(parameter: TrainedParameter) -> Tensor:
            return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

        self.first = {each.name: drawn(each) for each in self._whole}
        # Some parameters have larger gradients than others.
        sizes = {
            each.name: 10 ** float(torch.rand((), generator=generator) * 2 - 1)
            for each in self._whole
        }
        lasting = {each.name: drawn(each) * sizes[each.name] for each in self._whole}

        def gradients(scale: float) -> Values:
            noise = {each.name: drawn(each) * sizes[each.name] for each in self._whole}
            return {name: scale * (value + _NOISE * noise[name]) for name, value in lasting.items()}

        self._gradients = [gradients(scale) for scale in _SCALES]
        self._optimizer: Optimizer  # of the last run
        self.kind = "the optimizer"
        self.claimed = False
        self.is_smaller = [each.shape for each in self._whole] != [each.shape for each in whole]
        self.communicates = False

    def run(self, parts: Sequence[Collection[str]] = (), seed: int = 0) -> Steps:
        """Step the parts one after the other, or all parameters together; return the values after
        each step.
        """
        steps: Steps = [{} for _ in self._gradients]
        for names in self._parts(parts):
            with seeded(seed, self._device):
                optimizer, pieces = self._of_part(names)
                stepped = list(self._steps(optimizer, pieces))

            for values, new in zip(steps, stepped, strict=True):
                values.update(new)

        return steps

    def run_pieces(self) -> Steps:
        """Step one half of the elements of each parameter, then the other; return the values after
        each step.

        Return nothing where the optimizer does not say that it may be divided so: it will not be.
        """
        if kept_whole(self._optimizer) is None:
            return []
        steps = [
            {name: value.clone().flatten() for name, value in self.first.items()}
            for _ in self._gradients
        ]
        for half in range(2):
            with seeded(0, self._device):
                optimizer, pieces = self._of_half(half)
                stepped = list(self._steps(optimizer, pieces))

            for values, new in zip(steps, stepped, strict=True):
                for name, (_, cut) in pieces.items():
                    cut(values[name]).copy_(new[name].flatten())

        return [
            {name: value.view_as(self.first[name]) for name, value in values.items()}
            for values in steps
        ]

    def run_copies(self) -> Steps:
        """Step copies of all parameters, which take their place when optimizer() has returned;
        return the values after each step.
        """
        with seeded(0, self._device):
            own = {name: self._parameter(name) for name in self.first}
            optimizer = self._make(own)
            return list(self._steps(optimizer, _copies(optimizer, own)))

    def schedule(self, parts: Sequence[Collection[str]] = ()) -> list[Schedule]:
        """Step the parts one after the other, or all parameters together, each with the user's
        scheduler.

        Return the hyperparameters after each step, of each part.
        """
        schedules = []
        for names in self._parts(parts):
            with seeded(0, self._device):
                schedules.append(self._schedule_of(*self._of_part(names)))
        return schedules

    def schedule_pieces(self) -> list[Schedule]:
        """Do the same for one half of the elements of each parameter, then the other; not where
        nobody divides them.
        """
        schedules: list[Schedule] = []
        if kept_whole(self._optimizer) is None:
            return schedules
        for half in range(2):
            with seeded(0, self._device):
                schedules.append(self._schedule_of(*self._of_half(half)))
        return schedules

    def _parts(self, parts: Sequence[Collection[str]]) -> list[Collection[str]]:
        return [names for names in parts if names] or [[each.name for each in self._whole]]

    def _of_part(self, names: Collection[str]) -> tuple[Optimizer, Mapping[str, Piece]]:
        """Return an optimizer for a part of the parameters."""
        own = {name: self._parameter(name) for name in names}
        return self._make(own), {name: (own[name], lambda gradient: gradient) for name in own}

    def _of_half(self, half: int) -> tuple[Optimizer, Mapping[str, Piece]]:
        """Return an optimizer for a half of the elements of each parameter."""
        own = {name: self._parameter(name) for name in self.first}
        optimizer = self._make(own)
        return optimizer, _pieces(optimizer, own, half)

    def _schedule_of(self, optimizer: Optimizer, pieces: Mapping[str, Piece]) -> Schedule:
        with self._watched("scheduler()"):
            scheduler = self._spec.scheduler(optimizer)
        assert scheduler is not None
        groups = group_numbers(optimizer, {name: piece for name, (piece, _) in pieces.items()})
        schedule: Schedule = []
        self.communicates = False
        for _ in self._steps(optimizer, pieces):
            try:
                with self._watched(f"step() of {type(scheduler).__name__}"):
                    scheduler.step()
            except ModelFileError:
                if self.communicates or not schedule:
                    raise
                break  # as one for a run of two steps does in the third: training fails there, too
            now = [hyperparameters_of(group) for group in optimizer.param_groups]
            schedule.append({name: now[number] for name, number in groups.items()})

        return schedule

    def _parameter(self, name: str) -> nn.Parameter:
        values = self.first[name].to(self._device, copy=True)
        return self._marks[name].marked(nn.Parameter(values))

    def _make(self, own: Mapping[str, nn.Parameter]) -> Optimizer:
        with self._watched("optimizer()"):
            optimizer = optimizer_of_part(self._spec, self._whole, own)
        self._optimizer = optimizer
        self.kind = type(optimizer).__name__
        self.claimed = bool(
            getattr(optimizer, "separable", False) or getattr(optimizer, "elementwise", False)
        )
        return optimizer

    def _steps(self, optimizer: Optimizer, pieces: Mapping[str, Piece]) -> Iterator[Values]:
        """Step with all gradients, one after the other; yield the values after each step."""
        for gradients in self._gradients:
            for name, (piece, cut) in pieces.items():
                piece.grad = cut(gradients[name]).to(self._device).view_as(piece).clone()
            with self._watched(f"step() of {self.kind}"):
                step_part(self._spec, optimizer)
            yield {name: piece.detach().to("cpu", copy=True) for name, (piece, _) in pieces.items()}

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


def _small(whole: Sequence[TrainedParameter]) -> list[TrainedParameter]:
    """Return the parameters as stand-ins have them: in single precision, and smaller where all
    together are large.
    """
    half = (torch.float16, torch.bfloat16)
    found = [
        replace(each, dtype=torch.float32 if each.dtype in half else each.dtype) for each in whole
    ]
    for size in _SIZES:
        if sum(math.prod(each.shape) for each in found) <= _MOST_ELEMENTS:
            break
        found = [
            replace(each, shape=torch.Size(min(length, size) for length in each.shape))
            for each in found
        ]

    return found


def _pieces(optimizer: Optimizer, own: Mapping[str, nn.Parameter], half: int) -> dict[str, Piece]:
    """Let the optimizer step a half of the elements of each parameter, as replicas do, or all where
    it must.
    """
    undivided = set(map(id, kept_whole(optimizer) or ()))
    found: dict[str, Piece] = {}
    new: dict[int, nn.Parameter] = {}
    for number, (name, parameter) in enumerate(own.items()):
        middle = parameter.numel() // 2
        bounds = slice(0, middle) if half else slice(middle, None)
        if id(parameter) in undivided:
            if number % 2 == half:
                bounds = slice(None)
            else:
                bounds = slice(0, 0)
        if not parameter.numel() or not len(range(*bounds.indices(parameter.numel()))):
            continue

        def cut(value: Tensor, bounds: slice = bounds) -> Tensor:
            return value.flatten()[bounds]

        piece = nn.Parameter(parameter.detach().clone())
        if id(parameter) not in undivided:
            piece = nn.Parameter(cut(parameter.detach()).clone())
        new[id(parameter)] = piece
        found[name] = piece, cut
        _move_state(optimizer, parameter, piece, cut)

    for group in optimizer.param_groups:
        group["params"] = [new[id(each)] for each in group["params"] if id(each) in new]
        group.pop("param_names", None)

    return found


def _copies(optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> dict[str, Piece]:
    """Let the optimizer step copies of the parameters, as of weights that have masters."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in own.values():
        new[parameter] = nn.Parameter(parameter.detach().clone())
        _move_state(optimizer, parameter, new[parameter], lambda value: value)
    for group in optimizer.param_groups:
        group["params"] = [new[each] for each in group["params"]]

    return {name: (new[parameter], lambda gradient: gradient) for name, parameter in own.items()}


def _move_state(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    piece: nn.Parameter,
    cut: Callable[[Tensor], Tensor],
) -> None:
    if not (state := optimizer.state.pop(parameter, None)):
        return
    alike = {
        key: isinstance(value, Tensor) and value.shape == parameter.shape
        for key, value in state.items()
    }
    optimizer.state[piece] = {
        key: cut(value).clone() if alike[key] else value for key, value in state.items()
    }


def _step_hint(error: Exception) -> str:
    """Return what to do about an optimizer that fails on gradients for all its parameters."""
    if "dense gradients" in str(error):
        return (
            "stages have dense gradients: take torch.optim.Adam, say, and nn.Embedding "
            "without sparse=True"
        )
    return (
        "try it in plain PyTorch: make it of all parameters, give each a gradient, and call step()"
    )
