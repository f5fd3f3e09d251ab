"""Tables as data, which the terminal and the HTML report both draw."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

UNLIMITED = 10_000  # characters: where there is no terminal
GAP = 2  # characters between columns, and beside headers
LEGIBLE = 24  # characters that a shortened cell keeps


@dataclass(frozen=True)
class Table:
    """Headers, rows of text, and per column "l" or "r" to align it; all left without `align`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    align: str = ""

    def text(self, width: int | None = None) -> str:
        """Draw the table for a terminal of this width, by default that of this process; in full elsewhere.

        The longest cells of the widest column lose their middle where the table does not fit.
        """
        wanted = shutil.get_terminal_size((UNLIMITED, 0)).columns if width is None else width
        return self._narrowed(wanted)._drawn()

    def _narrowed(self, width: int) -> Table:
        """Shorten the cells of the widest column until the table fits, as far as they are legible then."""
        cells = [[str(cell) for cell in row] for row in (self.headers, *self.rows)]
        widths = [max([len(header) + GAP, *map(len, column)]) for header, *column in zip(*cells, strict=True)]
        over = sum(widths) + GAP * (len(widths) - 1) - width
        if over <= 0 or not self.rows:
            return self
        widest = max(range(len(widths)), key=widths.__getitem__)
        most = max(widths[widest] - over, LEGIBLE, len(cells[0][widest]))
        rows = [[_shortened(cell, most) if at == widest else cell for at, cell in enumerate(row)] for row in cells[1:]]
        return replace(self, rows=rows)

    def _drawn(self) -> str:
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


def _shortened(text: str, most: int) -> str:
    """Replace the middle of a text that is too long by dots."""
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def named_values(lines: Iterable[tuple[str, str]]) -> str:
    """Draw names and values as two columns without headers."""
    return tabulate(lines, tablefmt="plain", disable_numparse=True)
