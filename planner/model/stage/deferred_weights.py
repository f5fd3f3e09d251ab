"""Deferred weights, for models larger than memory: each stage makes its own weights and no others.

The user's constructor runs twice. In the first run every parameter goes to the meta device as soon as a module
registers it; that model is captured and cut. In the second run the parameters of one stage stay where they are, and so
get the values that the constructor gives them. Buffers are small and always made.

Every operation that draws random numbers is seeded with its number in the construction. All of them run both times,
those on the meta device without effect, so the value of a weight does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import ModelFileError, PlannerError
from planner.model.stage.randomness import seed_of_number

_NUMBER = "_planner_number"  # on a parameter: its number in the order of construction
# On a deep copy, which nn.TransformerEncoder makes of its layer: the numbers of the originals, which it needs as well.
_SOURCE = "_planner_source"
Build = Callable[[], nn.Module]


def build_deferred(build: Build, seed: int) -> nn.Module:
    """Return the model that `build` makes, its parameters without memory.

    Raises:
        ModelFileError: when the constructor reads the weights that it makes.
    """
    with _construction(seed, keep=()):
        return _built(build)


def materialize(model: nn.Module, build: Build, seed: int, names: Collection[str]) -> None:
    """Give the parameters called `names` memory, and the values that the constructor gives them.

    Args:
        model: from `build_deferred` with the same `build` and `seed`.
        build: the constructor, to run once more.
        seed: of all random numbers.
        names: any of the names of a tied parameter.

    Raises:
        ModelFileError: when a parameter cannot be made without others.
    """
    wanted = [p for name, p in model.named_parameters(remove_duplicate=False) if name in names]
    numbers = {_number(parameter) for parameter in wanted}
    with _construction(seed, keep=numbers.union(*(getattr(parameter, _SOURCE, ()) for parameter in wanted))):
        made = dict(_built(build).named_parameters())
    missing = [name for name, parameter in made.items() if _number(parameter) in numbers and parameter.is_meta]
    if missing:
        raise ModelFileError(
            f"parameter '{missing[0]}' is made from other parameters, which may be in another stage",
            hint="give it its values in place, or train without `defer_weights`",
        )
    by_number = {_number(parameter): parameter for parameter in made.values()}
    _replace(model, {number: by_number[number] for number in numbers})


@contextmanager
def without_storage(model: nn.Module) -> Iterator[None]:
    """Let a deferred model be captured: within, its parameters are on the CPU, but hold no bytes.

    Capture needs shapes, strides and the device alone; reading such a parameter would crash the process.
    """
    deferred = {_number(p): p for p in model.parameters() if p.is_meta}
    _replace(model, {number: _hollow(parameter) for number, parameter in deferred.items()})
    try:
        yield
    finally:
        _replace(model, deferred)


def is_deferred(model: nn.Module) -> bool:
    """Return whether some of the model's parameters have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter, device="cpu")  # the system gives no page before it is written
    data.untyped_storage().resize_(0)
    return _numbered(nn.Parameter(data, parameter.requires_grad), _number(parameter))


def _replace(model: nn.Module, by_number: dict[int, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (new := by_number.get(_number(parameter))) is not None:
                setattr(module, name, new)  # in recurrent modules this updates a list of their weights as well


def _number(parameter: nn.Parameter) -> int:
    """Return the parameter's number; -1 if it was registered in another way, and so is always made."""
    number: int = getattr(parameter, _NUMBER, -1)
    return number


def _numbered(parameter: nn.Parameter, number: int) -> nn.Parameter:
    setattr(parameter, _NUMBER, number)
    return parameter


def _built(build: Build) -> nn.Module:
    try:
        return build()
    except (PlannerError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        if "meta tensor" not in str(error) and "Meta" not in str(error):
            raise
        reason = error.message if isinstance(error, PlannerError) else error
        raise ModelFileError(
            f"the model reads its weights while it is built, and cannot be built without them: {reason}",
            hint="train without `defer_weights`",
        ) from error


@contextmanager
def _construction(seed: int, keep: Collection[int]) -> Iterator[None]:
    """Number the parameters as modules register them, and put all but those in `keep` on the meta device."""
    # Patched for this time only: there is no other place that every parameter of a user's constructor passes through.
    register, deep_copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
    count = 0

    def numbered(parameter: nn.Parameter) -> nn.Parameter:
        nonlocal count
        number, count = count, count + 1
        if number not in keep:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return _numbered(parameter, number)

    def register_numbered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, _NUMBER):
            parameter = numbered(parameter)
        register(module, name, parameter)

    def deep_copy_numbered(original: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if id(original) in memo:
            known: nn.Parameter = memo[id(original)]
            return known
        copy = numbered(deep_copy(original, memo))  # type: ignore[no-untyped-call]
        setattr(copy, _SOURCE, {_number(original), *getattr(original, _SOURCE, ())})
        memo[id(original)] = copy
        return copy

    with (
        torch.random.fork_rng(devices=[]),
        mock.patch.object(nn.Module, "register_parameter", register_numbered),
        mock.patch.object(nn.Parameter, "__deepcopy__", deep_copy_numbered),
        _SeededOperations(seed),
    ):
        yield


class _SeededOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which each operation that draws random numbers is first seeded with its number."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(seed_of_number(self._seed, self._count))
            self._count += 1
        result: Tensor = func(*args, **(kwargs or {}))
        return result
