"""Draw loss curves as an SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from planner.reporting.svg import CURVES, polyline, round_ticks

WIDTH, HEIGHT = 860, 480
LEFT, TOP, BOTTOM = 70, 56, 64
LEAST_RIGHT = 200
_CHARACTER = 7.5  # width
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


def curves_svg(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a line per curve of (minibatches, loss); the axis begins at 0 unless that would hide
    the differences.
    """
    points = [point for curve in curves.values() for point in curve]
    right, top, least = (
        max(x for x, _ in points),
        max(y for _, y in points),
        min(y for _, y in points),
    )
    low = 0.0 if least < top / 3 else least - (top - least) / 10
    top += (top - low) / 20
    # the names of the curves are beside it
    end = WIDTH - max(LEAST_RIGHT, 44 + _CHARACTER * max(map(len, curves)))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        along, up = x / right, (y - low) / (top - low)
        return LEFT + (end - LEFT) * along, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 '
        f'{WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 28, title, 17),
        _text(LEFT, HEIGHT - 20, "minibatches", 13),
    ]
    for loss in round_ticks(low, top, (top - low) / 8):
        _, y = place((0.0, loss))
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(24, y + 4, f"{loss:.2f}", 12))
    for minibatch in round_ticks(0.0, right, right / 8):
        x, _ = place((minibatch, low))
        parts.append(_text(x - 12, HEIGHT - BOTTOM + 20, f"{minibatch:.0f}", 12))
    for number, (name, curve) in enumerate(curves.items()):
        colour = CURVES[number % len(CURVES)]
        parts.append(polyline(map(place, curve), colour, "6 4" if number == 0 else ""))
        parts.append(
            f'<rect x="{end + 16}" y="{TOP + 22 * number}" width="14" height="4" fill="{colour}"/>'
        )
        parts.append(_text(end + 38, TOP + 22 * number + 7, name, 13))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, content: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {_FONT}>{escape(content)}</text>'
