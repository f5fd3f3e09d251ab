"""HTML elements that several sections of the report share. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.report.tables.table import Table

Part = tuple[str, float, str]  # what a piece of a bar stands for, its share of the bar's length, its colour
_NUMBER, _CHOSEN = ' class="number"', ' class="chosen"'


def paragraph(text: str, css: str = "") -> str:
    """Write a paragraph, with a class if there is one."""
    attribute = f' class="{css}"' if css else ""
    return f"<p{attribute}>{escape(text)}</p>"


def swatch(text: str, colour: str = "", css: str = "") -> str:
    """Write a legend's item, with its colour or the class that has it."""
    look = f'class="{css}"' if css else f'style="background:{colour}"'
    return f"<li><i {look}></i>{escape(text)}</li>"


def bar(parts: Iterable[Part]) -> str:
    """Draw a bar of parts, grey without a colour; their names show when they are pointed at."""
    pieces = "".join(
        f'<i title="{escape(name)}" style="width:{share:.2%}{colour and f";background:{colour}"}"></i>'
        for name, share, colour in parts
    )
    return f'<div class="bar">{pieces}</div>'


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Put content behind its title, which opens it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def table_html(label: str, table: Table, chosen: int | None = None) -> str:
    """Draw a table, which scrolls sideways if it is too wide; the row `chosen` stands out."""

    def cells(row: Sequence[object], tag: str, attributes: str = "") -> str:
        return "".join(
            f"<{tag}{attributes}{_NUMBER if align == 'r' else ''}>{escape(str(cell))}</{tag}>"
            for cell, align in zip(row, table.align or "l" * len(table.headers), strict=True)
        )

    body = "".join(
        f"<tr{_CHOSEN if number == chosen else ''}>{cells(row, 'td')}</tr>" for number, row in enumerate(table.rows)
    )
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    head = cells(table.headers, "th", ' scope="col"')
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
