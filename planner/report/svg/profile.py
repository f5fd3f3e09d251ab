"""A profile as a picture: a bar per layer, in execution order, for its time, its weights and what a cut would send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from planner.formats.profile import Layer, Profile
from planner.report.tables.profile import output_bytes, time_s
from planner.units import format_bytes, format_seconds

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 960, 130, 90, 40, 46
_PARTS = (("forward", "#4c78a8"), ("backward", "#f58518"), ("update", "#54a24b"))
_WEIGHTS, _OUTPUT = "#9d755d", "#b279a2"


def profile_svg(profile: Profile) -> str:
    """A complete SVG document; every bar has its layer's name and numbers as a title, which browsers show on hover."""
    times = [[layer.forward_s, layer.backward_s, layer.update_s] for layer in profile.layers]
    rows = [
        _row(0, "time", profile.layers, times, [colour for _, colour in _PARTS], format_seconds),
        _row(1, "weights", profile.layers, [[layer.weight_bytes] for layer in profile.layers], [_WEIGHTS], _bytes),
        _row(2, "output", profile.layers, [[output_bytes(layer)] for layer in profile.layers], [_OUTPUT], _bytes),
    ]
    height = _TOP + 3 * (_HEIGHT + _GAP)
    width = _LEFT + _WIDTH + 20
    samples = f", {profile.microbatch_size} samples" if profile.microbatch_size is not None else ""
    title = f"{profile.model} on {profile.device.name}{samples}, {profile.provenance.source}"
    legend = "".join(
        f'<text x="{_LEFT + 120 * index}" y="34" fill="{colour}">■ {name}</text>'
        for index, (name, colour) in enumerate(_PARTS)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        f'<text x="{_LEFT}" y="16" font-size="14">{escape(title)}</text>\n{legend}\n' + "\n".join(rows) + "\n</svg>"
    )


def _bytes(size: float) -> str:
    return format_bytes(int(size))


def _row(
    index: int,
    name: str,
    layers: Sequence[Layer],
    values: Sequence[Sequence[float]],
    colours: Sequence[str],
    text: Callable[[float], str],
) -> str:
    top = _TOP + index * (_HEIGHT + _GAP) + 10
    bottom = top + _HEIGHT
    most = max(map(sum, values)) or 1.0
    step = _WIDTH / len(layers)
    parts = [
        f'<text x="{_LEFT - 8}" y="{top + 10}" text-anchor="end">{text(most)}</text>',
        f'<text x="{_LEFT - 8}" y="{bottom}" text-anchor="end">{name}</text>',
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _WIDTH}" y2="{bottom}" stroke="black"/>',
    ]
    for number, (layer, bars) in enumerate(zip(layers, values, strict=True)):
        if not sum(bars):
            continue
        base = float(bottom)
        parts.append(f"<g><title>{escape(_title(layer))}</title>")
        for value, colour in zip(bars, colours, strict=True):
            height = _HEIGHT * value / most
            base -= height
            parts.append(
                f'<rect x="{_LEFT + number * step:.2f}" y="{base:.2f}" width="{max(0.5, step * 0.9):.2f}" '
                f'height="{height:.2f}" fill="{colour}"/>'
            )
        parts.append("</g>")
    return "".join(parts)


def _title(layer: Layer) -> str:
    return (
        f"{layer.name} ({layer.op}): {format_seconds(time_s(layer))}, weights {format_bytes(layer.weight_bytes)}, "
        f"output {format_bytes(output_bytes(layer))}"
    )
