"""Stand-ins for the whole of the weights that ranks divide: optimizer() groups by shapes, and has
rates by them, as in one process.

They have the shape and the user's attributes, and no memory: their elements are one number.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import PlanError
from planner.model.options import parameter_like
from planner.model.tensor.division import DividedWeights, refuse_divided_hooks


def with_whole_stand_ins(
    division: DividedWeights,
    part: Mapping[str, nn.Parameter],
    device: torch.device | None = None,
) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by name, with stand-ins in place of this rank's parts.

    Args:
        device: of the stand-ins; that of the parts by default.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in part.items():
        if name in division.cuts and parameter not in made:
            shape = division.whole_shape(name, parameter.shape)
            value = parameter.detach().new_zeros((), device=device or parameter.device)
            made[parameter] = parameter_like(parameter, value.expand(shape))

    return {name: made.get(parameter, parameter) for name, parameter in part.items()}


def step_parts(
    optimizer: Optimizer,
    division: DividedWeights,
    part: Mapping[str, nn.Parameter],
    given: Mapping[str, nn.Parameter],
) -> None:
    """Let `optimizer`, which has not stepped yet, step this rank's parts in place of the stand-ins
    that it was `given`; raise PlanError where optimizer() has put hooks on these.
    """
    parts = {
        given[name]: (name, parameter)
        for name, parameter in part.items()
        if given[name] is not parameter
    }
    for stand_in, (name, _) in parts.items():
        refuse_divided_hooks(name, stand_in)
        _refuse_later_hooks(name, stand_in)

    for group in optimizer.param_groups:
        group["params"] = [parts[each][1] if each in parts else each for each in group["params"]]

    # Adagrad has state before its first step
    for stand_in, (name, parameter) in parts.items():
        state: Mapping[str, Any] | None = optimizer.state.pop(stand_in, None)
        if state:
            optimizer.state[parameter] = {
                key: _part(value, stand_in, name, division) for key, value in state.items()
            }


def _part(value: Any, whole: nn.Parameter, name: str, division: DividedWeights) -> Any:
    """Return this rank's part of what an optimizer keeps for a whole weight."""
    if not isinstance(value, Tensor) or value.shape != whole.shape:
        return value
    return division.part(name, value).clone(memory_format=torch.contiguous_format)


def _refuse_later_hooks(name: str, stand_in: Tensor) -> None:
    if stand_in._post_accumulate_grad_hooks:
        raise PlanError(
            f"optimizer() puts a hook on parameter '{name}', which would see a part of it where "
            f"ranks shard the parameter",
            hint="solve with `tensor=1`",
        )
