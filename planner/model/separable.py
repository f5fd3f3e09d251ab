"""Try whether an optimizer updates each parameter by itself, so that stages and replicas may each
step their part.

A norm of all gradients (LAMB's, or that of a hook), or an estimate from all of them (Prodigy's,
D-Adaptation's), is another one where each stage has an optimizer of its own: another training,
without a word. No list of names could say which optimizers do so. So the user's optimizer steps
stand-ins for the model's parameters, with made-up gradients: all together, and part by part as the
plan cuts them. It is separable if the updates are the same.

The updates of each step are compared by themselves: beside a step of much larger gradients, a
difference in another one would go unnoticed. A scheduler that looks at parameters or gradients is
found in the same way, by the hyperparameters that it gives to the groups.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from planner.errors import PlannerError
from planner.formats.files import replace
from planner.model.hyperparameters import first_difference, shown
from planner.model.optimizer_part import TrainedParameter
from planner.model.optimizer_trial import OptimizerTrial, Schedule, Steps, Values
from planner.model.spec import TrainingSpec
from planner.units import counted

_ROUNDING = 1e-4  # relative to an update: some optimizers stack matrices of one shape
_ROUNDED = 16.0  # roundings of a value: in one step, a difference smaller than that says nothing


@dataclass(frozen=True)
class Separability:
    """What stepping the parts of a model by themselves has shown.

    Attributes:
        kind: the optimizer's class.
        problem: why the parts may not be stepped by themselves, as the end of a sentence; None
            where they may.
        claimed: whether the optimizer says of itself that they may, by `separable` or
            `elementwise`.
        combines: whether it was seen to combine what the parts have, whatever it says of itself.
        draws: whether it draws random numbers, or repeats no update for another reason: replicas
            would not stay equal.
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
        ways: to cut it; each has the names of the parameters of each part. A tied one may be in
            several.
        device: where the optimizer is to run.
        by_elements: whether replicas or ranks have parts of single parameters.

    Raises:
        ModelFileError: when the optimizer communicates, or fails on all parameters together.
    """
    trial = OptimizerTrial(spec, whole, device)
    together = _steps_together(trial)
    if isinstance(together, str):
        return _verdict(trial, together)

    if _difference(together, trial.run(seed=1), trial.first) is not None:
        return replace(
            _verdict(trial, "draws random numbers in step(), or repeats no update"), draws=True
        )

    try:
        for parts in ways:
            differing = _difference(together, trial.run(parts), trial.first)
            if differing is not None:
                return replace(_verdict(trial, f"combines parameters: {differing}"), combines=True)
        differing = None
        if by_elements:
            differing = _difference(together, trial.run_pieces(), trial.first)
    except PlannerError as error:
        if trial.communicates:
            raise
        return _verdict(trial, f"fails on a part of the parameters: {error.message}")

    if differing is None:
        return _verdict(trial, None)
    return replace(_verdict(trial, f"combines elements of parameters: {differing}"), combines=True)


def _steps_together(trial: OptimizerTrial) -> Steps | str:
    """Return the steps of all parameters together, or why the optimizer fails where these are
    smaller than the model's; raise ModelFileError where it fails on the model's own.
    """
    try:
        return trial.run()
    except PlannerError as error:
        if trial.communicates or not trial.is_smaller:
            raise
        return (
            f"fails on smaller parameters of the same names, on which it was tried: {error.message}"
        )


def masters_problem(
    spec: TrainingSpec, whole: Sequence[TrainedParameter], device: torch.device
) -> str | None:
    """Step the user's optimizer on stand-ins, and on copies that take their place when optimizer()
    has returned, as masters do.

    Args:
        whole, device: as for `separability`.

    Returns:
        As the end of a sentence, which update differs; None if none does, or if the optimizer
        repeats no update.

    Raises:
        ModelFileError: when the optimizer communicates, or fails.
    """
    trial = OptimizerTrial(spec, whole, device)
    together = _steps_together(trial)
    if isinstance(together, str):
        return None if trial.claimed else together

    if _difference(together, trial.run(), trial.first) is not None:
        return None
    what = "a copy is stepped in its place"
    try:
        differing = _difference(together, trial.run_copies(), trial.first, what)
    except PlannerError as error:
        if trial.communicates:
            raise
        differing = f"with copies in their place {error.message}"
    if differing is None:
        return None
    return f"remembers the parameters that optimizer() is given: {differing}"


def schedule_problem(
    spec: TrainingSpec,
    whole: Sequence[TrainedParameter],
    ways: Sequence[Sequence[Collection[str]]],
    device: torch.device,
    *,
    by_elements: bool = False,
) -> str | None:
    """Step the user's scheduler together with the optimizer, on all parameters and on parts.

    Args:
        whole, ways, device, by_elements: as for `separability`.

    Returns:
        As the end of a sentence, which hyperparameter it gives another value where it sees a part;
        None if it gives none, or there is no scheduler.

    Raises:
        ModelFileError: when one of them communicates, or fails.
    """
    if not spec.defines("scheduler"):
        return None
    trial = OptimizerTrial(spec, whole, device)
    together = trial.schedule()[0]
    every = [apart for parts in ways for apart in trial.schedule(parts)]
    if by_elements:
        every += trial.schedule_pieces()
    problems = (_schedule_difference(together, apart) for apart in every)
    return next((problem for problem in problems if problem is not None), None)


def _schedule_difference(together: Schedule, apart: Schedule) -> str | None:
    if len(together) != len(apart):
        steps = counted(min(len(together), len(apart)), "step")
        return (
            f"fails after {steps} where it sees a part of the parameters alone, or where it "
            f"sees all of them"
        )

    for number, (expected, seen) in enumerate(zip(together, apart, strict=True), 1):
        for parameter, hyperparameters in seen.items():
            name = first_difference(expected[parameter], hyperparameters)
            if name is None:
                continue
            usual = shown(expected[parameter].get(name))
            return (
                f"gives '{parameter}' another `{name}` where it sees a part of the parameters "
                f"alone: "
                f"{shown(hyperparameters.get(name))} instead of {usual} after "
                f"{counted(number, 'step')}"
            )

    return None


def _verdict(trial: OptimizerTrial, problem: str | None) -> Separability:
    return Separability(trial.kind, problem, trial.claimed)


def _difference(
    together: Steps,
    apart: Steps,
    first: Values,
    what: str = "its part is stepped by itself",
) -> str | None:
    """Return in words which update differs most, and by how much of it, where `what` is done; None
    if all are equal but for rounding.
    """
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
    return f"the update of '{worst}' differs by {differences[worst]:.1%} where {what}"


def _differences(
    before_together: Values,
    after_together: Values,
    before_apart: Values,
    after_apart: Values,
    *,
    rounded: float = 0.0,
) -> dict[str, float]:
    """Return by how much of each parameter's update together the update apart differs; infinity if
    it is no number.

    Args:
        rounded: the difference that counts as none, in roundings of the parameter's largest value.
    """
    differences = {}
    for name, value in after_apart.items():
        update_together = after_together[name] - before_together[name]
        update_apart = value - before_apart[name]
        if not value.numel() or torch.equal(
            update_together.nan_to_num(), update_apart.nan_to_num()
        ):
            differences[name] = 0.0
            continue

        difference = float((update_apart - update_together).abs().max())
        precision = torch.finfo(value.dtype).eps
        if difference <= rounded * precision * float(value.abs().max()):
            differences[name] = 0.0
            continue

        relative = difference / max(
            float(update_together.abs().max()), torch.finfo(torch.float32).tiny
        )
        differences[name] = math.inf if math.isnan(relative) else relative

    return differences
