"""Tables as data, which the terminal and the HTML report both draw."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tabulate import tabulate

T = TypeVar("T")
UNLIMITED = 10_000  # characters: where there is no terminal
GAP = 2  # characters between columns, and beside headers
LEGIBLE = 24  # characters that a shortened cell keeps


@dataclass(frozen=True)
class Table:
    """Headers, rows of cells, and per column "l" or "r" to align it; all left without `align`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    align: str = ""

    def text(self, width: int | None = None) -> str:
        """Draw the table for a terminal of this width: the longest cells of the widest column may
        lose their middle.
        """
        if width is None:
            width = shutil.get_terminal_size((UNLIMITED, 0)).columns
        rows = [[str(cell) for cell in row] for row in self.rows]
        self._shorten(rows, width)

        sides = [{"l": "left", "r": "right"}[letter] for letter in self.align]
        return tabulate(rows, headers=self.headers, disable_numparse=True, colalign=sides or None)

    def _shorten(self, rows: Sequence[list[str]], width: int) -> None:
        """Shorten the widest column's cells, as far as they stay legible, until the table fits."""
        widths = [
            max([len(header) + GAP, *map(len, column)])
            for header, *column in zip(self.headers, *rows, strict=True)
        ]
        over = sum(widths) + GAP * (len(widths) - 1) - width
        if over <= 0 or not rows:
            return

        widest = widths.index(max(widths))
        most = max(widths[widest] - over, LEGIBLE, len(self.headers[widest]))
        for row in rows:
            row[widest] = _shortened(row[widest], most)


def optional_text(value: T | None, write: Callable[[T], str]) -> str | None:
    """Write a value; None, which lines and columns are left out for, where there is none."""
    if value is None:
        return None
    return write(value)


def table_of(records: Sequence[Mapping[str, object]], align: str = "") -> Table:
    """Return a table with a row per record and a column per key, without columns that are None in
    all records.

    Args:
        records: of the same keys in the same order.
        align: "l" or "r" for each key; all left without.
    """
    if not records:
        return Table([], [])

    names = list(records[0])
    sides = align or "l" * len(names)
    headers = []
    shown = ""
    for name, side in zip(names, sides, strict=True):
        if any(record[name] is not None for record in records):
            headers.append(name)
            shown += side

    rows = [[_blank_if_none(record[name]) for name in headers] for record in records]
    return Table(headers, rows, shown)


def _blank_if_none(value: object) -> object:
    if value is None:
        return ""
    return value


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def named_values(lines: Iterable[tuple[str, str | None]]) -> str:
    """Draw names and values as two columns without headers; leave out values that are None."""
    return tabulate(
        [line for line in lines if line[1] is not None], tablefmt="plain", disable_numparse=True
    )
