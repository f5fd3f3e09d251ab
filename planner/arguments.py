"""Checks what a Python call is given against the types that the function names: a plan is no
cluster.
"""

import builtins
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from planner.errors import InputError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
_WIDER = {"int": Integral, "float": Real, "None": type(None)}  # NumPy's numbers are numbers


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that raises InputError where an argument is of another class than its
    annotation names.
    """
    check = checked_arguments(function)

    @wraps(function)
    def called(*arguments: P.args, **keywords: P.kwargs) -> T:
        check(arguments, keywords)
        return function(*arguments, **keywords)

    return called


def checked_arguments(
    function: Callable[..., Any],
) -> Callable[[Sequence[Any], Mapping[str, Any]], None]:
    """Return a check of arguments: that names are the function's, and of values where annotations
    are classes alone.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    takes_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def check(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        unknown = [name for name in keywords if name not in parameters]
        if unknown and not takes_others:
            raise InputError(
                f"planner.{function.__name__} takes no argument `{unknown[0]}`",
                hint=f"{did_you_mean(unknown[0], names)}help(planner.{function.__name__}) shows "
                "all",
            )

        for name, value in (*zip(names, arguments, strict=False), *keywords.items()):
            _check_class(function, name, value)

    return check


def _check_class(function: Callable[..., Any], name: str, value: object) -> None:
    """Raise InputError for a value of a class that a parameter's annotation does not name."""
    wanted = _classes(function, name)
    if wanted and not isinstance(value, tuple(wanted.values())):
        words = " or ".join(each for each in wanted if each != "None")
        raise InputError(
            f"`{name}` of {function.__name__} takes {words}, not {type(value).__name__}",
            hint=f"help(planner.{function.__name__}) shows what goes where",
        )


@cache
def _classes(function: Callable[..., Any], name: str) -> dict[str, Any]:
    known: Mapping[str, Any] = {
        **vars(builtins),
        **getattr(function, "__globals__", {}),
        **_WIDER,
        "Any": None,
    }
    annotation = getattr(function, "__annotations__", {}).get(name, "?")
    parts = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
    # of classes: "pathlib.Path"
    parts = [part.rpartition(".")[2] if "[" not in part else part for part in parts]
    found = {part: known.get(part) for part in parts}
    if all(isinstance(each, type) for each in found.values()):
        return found
    return {}
