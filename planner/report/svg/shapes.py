"""Elements of SVG documents as text, written by hand so that drawing needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
# The first are from Okabe & Ito 2008, for the colour-blind. For curves of any kind.
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
COLOURS = (*OKABE_ITO, "#882255", "#999933", "#332288", "#aa4499", "#44aa99", "#661100", "#6699cc", "#888888")


@dataclass(frozen=True)
class Font:
    """How a text is set."""

    size: int = 13
    anchor: str = "start"
    fill: str = "#222222"
    weight: str = "normal"


PLAIN = Font()


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2): 0 for black, 1 for white."""
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(ground: str) -> str:
    """Return white or black, whichever is easier to read on a colour."""
    return "#ffffff" if luminance(ground) + 0.05 < math.sqrt(1.05 * 0.05) else "#000000"


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Write a complete document on white ground."""
    size = f"{width:.0f} {height:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {size}">',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, content: str, font: Font = PLAIN) -> str:
    """Write a text at its baseline."""
    style = (
        f'font-family="Helvetica, Arial, sans-serif" font-size="{font.size}" font-weight="{font.weight}" '
        f'text-anchor="{font.anchor}" fill="{font.fill}"'
    )
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def line(start: Point, end: Point, stroke: str, dash: str = "") -> str:
    """Draw a line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'


def box(corner: Point, size: Point, fill: str, title: str = "") -> str:
    """Draw a rectangle from its upper left corner; browsers show the title when it is pointed at."""
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    (x, y), (width, height) = corner, size
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{inner}'


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    scale = 10.0 ** math.floor(math.log10(least))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= least * (1 - 1e-9))
