"""How the records that people look at show themselves: `print(plan)`, a notebook's cell."""

from collections.abc import Callable
from typing import Any

# By "text" and "html". `planner.reporting.shown` fills it; until then records look as pydantic's
# do.
VIEWS: dict[str, Callable[[Any], Any]] = {}


class Shown:
    """Base of records that have tables of their own."""

    def __str__(self) -> str:
        return str(VIEWS["text"](self)) if VIEWS else repr(self)

    def _repr_html_(self) -> str | None:
        return VIEWS["html"](self) if VIEWS else None
