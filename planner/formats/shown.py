"""How the records that people look at show themselves: `print(plan)`, a notebook's cell."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# By "text" and "html". `planner.reporting.shown` fills it; until then records look as pydantic's
# do.
VIEWS: dict[str, Callable[[Any], Any]] = {}


def verb(name: str) -> Callable[..., Any]:
    """Return a function of `planner`, for a method of a record that stands for it.

    It is looked up when it is called: files know no verbs.
    """
    function: Callable[..., Any] = getattr(import_module("planner"), name)
    return function


class Shown:
    """Base of records that have tables of their own."""

    def __str__(self) -> str:
        return str(VIEWS["text"](self)) if VIEWS else repr(self)

    def _repr_html_(self) -> str | None:
        return VIEWS["html"](self) if VIEWS else None
