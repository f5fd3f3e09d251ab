"""Tables as data, which the terminal and the HTML report both draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """Headers, rows of text, and per column "l" or "r" to align it; all left without `align`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    align: str = ""

    def text(self) -> str:
        """Draw the table for a terminal."""
        colalign = [{"l": "left", "r": "right"}[letter] for letter in self.align] or None
        return tabulate(self.rows, headers=self.headers, disable_numparse=True, colalign=colalign)

    def without(self, header: str) -> Table:
        """Drop a column."""
        at = list(self.headers).index(header)

        def dropped(cells: Sequence[object]) -> list[object]:
            return [*cells[:at], *cells[at + 1 :]]

        headers = [str(each) for each in dropped(self.headers)]
        align = self.align[:at] + self.align[at + 1 :]
        return replace(self, headers=headers, rows=[dropped(row) for row in self.rows], align=align)


def named_values(lines: Iterable[tuple[str, str]]) -> str:
    """Draw names and values as two columns without headers."""
    return tabulate(lines, tablefmt="plain", disable_numparse=True)
