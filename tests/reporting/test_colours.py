"""Colours of the timeline that stand beside each other are told apart by readers of all kinds."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from planner.formats.timeline import LANES
from planner.reporting.timeline import COLOURS, ink_on

Matrix = tuple[tuple[float, float, float], ...]
# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
READERS: dict[str, Matrix] = {
    "most": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}
# Ottosson 2020: OKLab, in which equal distances look equally different. A just noticeable one is
# about 0.02.
TO_CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB: Matrix = (
    (0.2104542553, 0.793617785, -0.0040720468),
    (1.9779984951, -2.428592205, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.808675766),
)
DISTINCT = 0.08


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb" (WCAG 2): 0 for black, 1 for white."""
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def seen(colour: str, reader: str) -> list[float]:
    """A colour in OKLab, as a reader sees it."""
    # The luminance of one channel alone, over that of the full channel, is its linear value.
    channels = [
        "#" + "".join(colour[1 + 2 * i : 3 + 2 * i] if i == of else "00" for i in range(3))
        for of in range(3)
    ]
    linear = [
        luminance(c) / full for c, full in zip(channels, (0.2126, 0.7152, 0.0722), strict=True)
    ]
    shown = [min(max(value, 0.0), 1.0) for value in times(READERS[reader], linear)]
    return times(TO_LAB, [value ** (1 / 3) for value in times(TO_CONES, shown)])


@pytest.mark.parametrize("reader", READERS)
def test_colours_of_a_lane_are_told_apart(reader: str) -> None:
    lanes: dict[str, set[str]] = {}
    for kind, colour in COLOURS.items():
        lanes.setdefault(
            "message" if LANES[kind] in ("send", "receive") else LANES[kind], set()
        ).add(colour)
    for colours in lanes.values():
        for one, other in combinations(sorted(colours), 2):
            assert math.dist(seen(one, reader), seen(other, reader)) >= DISTINCT, (one, other)


def test_bars_and_their_names_have_contrast() -> None:
    for colour in set(COLOURS.values()):
        ground = luminance(colour) + 0.05
        assert 1.05 / ground >= 3
        assert ground / (luminance("#12161c") + 0.05) >= 3
        ink = luminance(ink_on(colour)) + 0.05
        assert max(ink, ground) / min(ink, ground) >= 4.5
        # the easier one to read
        assert (ink_on(colour) == "#ffffff") == (1.05 / ground > ground / 0.05)


def test_black_and_white_are_far_apart() -> None:
    assert math.dist(seen("#000000", "most"), seen("#ffffff", "most")) == pytest.approx(1, abs=1e-3)
