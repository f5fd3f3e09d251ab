"""Hyperparameters of an optimizer's groups of parameters: rates, betas, decay, and what else a
group has.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.model.batch_digest import digest_of
from planner.model.torch_private import tree_flatten

_PARAMETERS = ("params", "param_names")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Hyperparameters = Mapping[str, object]  # of one group, by name


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, object]:
    """Return a copy of the hyperparameters of a group, as which they stay."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in _PARAMETERS}


def group_numbers(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of each parameter's group, by the parameter's name; none for what is in no
    group.
    """
    numbers = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {name: numbers[id(each)] for name, each in named.items() if id(each) in numbers}


def groups_digest(optimizer: Optimizer, numbers: Mapping[str, int]) -> int:
    """Return a digest of the groups' hyperparameters, and of the names of their parameters."""
    leaves: list[object] = [repr(sorted(numbers.items()))]
    for group in optimizer.param_groups:
        for name, value in sorted(hyperparameters_of(group).items()):
            leaves.extend([name, *tree_flatten(value)[0]])
    return digest_of(leaves)


def first_difference(one: Hyperparameters, other: Hyperparameters) -> str | None:
    """Return the name of a hyperparameter of which two groups have other values; None if they have
    the same.
    """
    for name in sorted({*one, *other}):
        if name not in one or name not in other or not _equal(one[name], other[name]):
            return name
    return None


def shown(value: object) -> str:
    """Return a hyperparameter's value for a message."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Tensor):
        return f"{value.tolist()}"
    if isinstance(value, _PLAIN):
        return f"{value!r}"
    return f"a {type(value).__name__}"


def _equal(one: object, other: object) -> bool:
    leaves, structure = tree_flatten(one)
    other_leaves, other_structure = tree_flatten(other)
    return structure == other_structure and all(map(_equal_leaves, leaves, other_leaves))


def _equal_leaves(one: object, other: object) -> bool:
    """Compare leaves by their values; of other objects than numbers, texts and tensors by their
    types.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return repr(one) == repr(other)  # in which not a number equals itself
    return type(one) is type(other)
