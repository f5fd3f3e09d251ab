"""Make the user's optimizer for a part of the model's parameters, with the groups that it has for
all of them.

A user's optimizer() may group parameters by name or by place in the list, and a scheduler may have
a rate for each group. Both mean the whole model. So optimizer() is always called with all trained
parameters, of which those of other stages are stand-ins on the meta device, without memory. Then
the stand-ins leave: groups may be empty, and none is missing.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from planner.errors import ModelFileError, first_line
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec


@dataclass(frozen=True, eq=False)
class TrainedParameter:
    """What is known of a trained parameter of the model on every worker, whoever holds its
    values.
    """

    name: str  # the first one in the model
    aliases: tuple[str, ...]  # all of its names, if it is tied
    shape: torch.Size
    dtype: torch.dtype
    # the user's, by which optimizer() may group
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def stand_in(self) -> nn.Parameter:
        """Return a parameter of this shape, without memory."""
        return self.marked(nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta")))

    def marked(self, parameter: nn.Parameter) -> nn.Parameter:
        """Give another parameter the attributes of this one, such as `_no_weight_decay`, and return
        it.
        """
        vars(parameter).update(self.attributes)
        return parameter


def trained_parameters(model: nn.Module) -> list[TrainedParameter]:
    """Return the trained parameters of a model in its order, each once."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)

    return [
        TrainedParameter(
            name=aliases[0],
            aliases=tuple(aliases),
            shape=parameter.shape,
            dtype=parameter.dtype,
            attributes=dict(vars(parameter)),
        )
        for parameter, aliases in names.items()
    ]


def optimizer_of_part(
    spec: TrainingSpec,
    whole: Iterable[TrainedParameter],
    part: Mapping[str, nn.Parameter],
) -> Optimizer:
    """Return the user's optimizer of the `whole` model, which steps those of `part` alone.

    Args:
        part: parameters by name; a tied one may have any of its names.

    Raises:
        ModelFileError: when optimizer() fails, or returns something else.
    """
    named, absent = named_parameters(whole, part)
    optimizer = spec.optimizer(named)
    leave_out(optimizer, absent)
    return optimizer


def named_parameters(
    whole: Iterable[TrainedParameter],
    part: Mapping[str, nn.Parameter],
) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the `whole` model by name, and which of them are stand-ins.

    Args:
        part: the others by name; a tied one may have any of its names.
    """
    named: dict[str, nn.Parameter] = {}
    absent: list[nn.Parameter] = []
    for trained in whole:
        own = [part[name] for name in trained.aliases if name in part]
        if own:
            named[trained.name] = own[0]
        else:
            named[trained.name] = trained.stand_in()
            absent.append(named[trained.name])

    return named, absent


def leave_out(optimizer: Optimizer, absent: Collection[nn.Parameter]) -> None:
    """Let `optimizer`, which has not stepped yet, forget the parameters that are `absent`, and keep
    all groups.
    """
    identities = set(map(id, absent))
    for group in optimizer.param_groups:
        kept = [index for index, each in enumerate(group["params"]) if id(each) not in identities]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]
        group["params"] = [group["params"][index] for index in kept]

    for parameter in absent:  # Adagrad has state before its first step
        optimizer.state.pop(parameter, None)


def step_part(spec: TrainingSpec, optimizer: Optimizer) -> None:
    """Step an optimizer without its empty groups, which the user's step() may not expect; do
    nothing if all are.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        if optimizer.param_groups:
            spec.step(optimizer)
    finally:
        optimizer.param_groups = groups


def check_scheduler(spec: TrainingSpec, whole: Iterable[TrainedParameter]) -> None:
    """Make the user's scheduler for the optimizer of the whole model, and step both once.

    Raises:
        ModelFileError: when scheduler() fails, when stages cannot follow what it returns, or when
            that fails.
    """
    with generators_kept():
        optimizer = optimizer_of_part(spec, whole, {})
        scheduler = spec.scheduler(optimizer)

    if scheduler is None:
        return

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has stepped nothing
            scheduler.step()
    except Exception as error:  # whatever the user's scheduler raises
        raise ModelFileError(
            f"scheduler() returned {type(scheduler).__name__}, whose step() raises "
            f"{type(error).__name__}: "
            f"{first_line(error)}",
            hint="take a scheduler whose step() needs no arguments, such as those of "
            "torch.optim.lr_scheduler",
        ) from error
