"""What has been computed about an object, kept by that object: it goes when the object goes."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Table = TypeVar("Table")


class Memo:
    """Tables that are made once, by their keys."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, Any] = {}

    def table(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """Return the table of this key, which `make` makes when it is first asked for."""
        if key not in self._tables:
            self._tables[key] = make()

        table: Table = self._tables[key]
        return table
