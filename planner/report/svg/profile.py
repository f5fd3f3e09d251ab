"""Draw a profile: a bar per layer, in execution order, for its time, its weights and what a cut would send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from planner.formats.profile import Layer, Profile
from planner.formats.timeline import EventKind
from planner.report.svg.lanes import COLOURS
from planner.report.svg.shapes import Font, box, document, line, text
from planner.report.tables.profile import output_bytes, time_s
from planner.units import format_bytes, format_seconds

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 960, 130, 90, 40, 46
_PARTS: tuple[EventKind, ...] = ("forward", "backward", "update")
_BYTES = "#6b7785"  # no kind of event has this colour
_LABEL = Font(12, "end")


@dataclass(frozen=True)
class _Chart:
    """One quantity of all layers; a bar has a value per colour, one on top of the other."""

    name: str
    bars: Sequence[Sequence[float]]
    colours: Sequence[str]
    written: Callable[[float], str]


def profile_svg(profile: Profile) -> str:
    """Draw three charts below each other; pointing at a bar shows its layer's name and numbers."""
    layers = profile.layers
    times = [[layer.forward_s, layer.backward_s, layer.update_s] for layer in layers]
    charts = (
        _Chart("time", times, [COLOURS[kind] for kind in _PARTS], format_seconds),
        _Chart("weights", [[layer.weight_bytes] for layer in layers], [_BYTES], format_bytes),
        _Chart("output", [[output_bytes(layer)] for layer in layers], [_BYTES], format_bytes),
    )
    samples = f", {profile.microbatch_size} samples" if profile.microbatch_size is not None else ""
    title = f"{profile.model} on {profile.device.name}{samples}, {profile.provenance.source}"
    parts = [text(_LEFT, 16, title, Font(14))]
    parts += [text(_LEFT + 120 * i, 34, f"■ {kind}", Font(12, fill=COLOURS[kind])) for i, kind in enumerate(_PARTS)]
    for number, chart in enumerate(charts):
        parts += _drawn(chart, layers, _TOP + number * (_HEIGHT + _GAP) + 10)
    return document(_LEFT + _WIDTH + 20, _TOP + len(charts) * (_HEIGHT + _GAP), parts)


def _drawn(chart: _Chart, layers: Sequence[Layer], top: float) -> Iterator[str]:
    bottom = top + _HEIGHT
    most = max(map(sum, chart.bars)) or 1.0
    step = _WIDTH / len(layers)
    yield text(_LEFT - 8, top + 10, chart.written(most), _LABEL)
    yield text(_LEFT - 8, bottom, chart.name, _LABEL)
    yield line((_LEFT, bottom), (_LEFT + _WIDTH, bottom), "#000000")
    for number, (layer, values) in enumerate(zip(layers, chart.bars, strict=True)):
        if not sum(values):
            continue
        base = bottom
        yield f"<g><title>{escape(_title(layer))}</title>"
        for value, colour in zip(values, chart.colours, strict=True):
            height = _HEIGHT * value / most
            base -= height
            yield box((_LEFT + number * step, base), (max(0.5, step * 0.9), height), colour)
        yield "</g>"


def _title(layer: Layer) -> str:
    return (
        f"{layer.name} ({layer.op}): {format_seconds(time_s(layer))}, weights {format_bytes(layer.weight_bytes)}, "
        f"output {format_bytes(output_bytes(layer))}"
    )
