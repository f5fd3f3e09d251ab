"""How the records that people look at show themselves: `print(plan)`, a notebook's cell, a data frame, a plot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By "text", "html", "frame" and "plot". `planner.reporting.shown` fills it; until then records look as pydantic's do.
VIEWS: dict[str, Callable[[Any], Any]] = {}


class Shown:
    """Base of records that have tables of their own."""

    def __str__(self) -> str:
        return str(VIEWS["text"](self)) if VIEWS else repr(self)

    def _repr_html_(self) -> str | None:
        return VIEWS["html"](self) if VIEWS else None

    def to_frame(self) -> Any:
        """Return a pandas DataFrame: of a plan its stages, of a profile its layers, of other answers their rows.

        Raises:
            InputError: where pandas is not installed.
        """
        return VIEWS["frame"](self)

    def plot(self) -> Any:
        """Draw with matplotlib, and return the axes: a plan's timeline, a profile's layers, a training's losses ...

        Raises:
            InputError: where matplotlib is not installed.
        """
        return VIEWS["plot"](self)
