"""Tables write repeated blocks once, and fit the terminal."""

from __future__ import annotations

import pytest

from planner.formats.plan_parts import LONGEST_CONFIG, short_config
from planner.report.tables.profile import profile_report
from planner.report.tables.repeats import collapsed, layer_range
from planner.report.tables.table import Table
from tests.plan.test_blocks import transformer

MODEL = transformer(6, "h.{block}.part{part}")
NAMES = [layer.name for layer in MODEL.layers]


def test_whole_blocks_are_counted() -> None:
    assert layer_range(NAMES[1:9], NAMES) == "h.0 .. h.1 (2 blocks)"
    assert layer_range(NAMES[:9], NAMES) == "embed .. h.1 (2 blocks, 1 layer)"
    assert layer_range(NAMES[1:11], NAMES) == "h.0 .. h.2.part1 (2 blocks, 2 layers)"
    assert layer_range(NAMES[1:5], NAMES) == "h.0.part0 .. h.0.part3 (4)"


def test_equal_blocks_are_one_row_per_layer() -> None:
    rows = collapsed(MODEL)
    assert [(count, layer.name) for count, layer in rows] == [
        (1, "embed"),
        *((6, f"h.*.part{part}") for part in range(4)),
        (1, "head"),
    ]
    assert sum(count * layer.forward_s for count, layer in rows) == pytest.approx(
        sum(layer.forward_s for layer in MODEL.layers)
    )
    text = profile_report(MODEL)
    assert "6 x h.*.part2" in text
    assert "h.3.part2" not in text
    assert "h.3.part2" in profile_report(MODEL, by="time")


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ("7-1", "7-1"),
        ("-".join("1" * 20), "-".join("1" * 20)),
        ("-".join("1" * 56), "1-1-1-1-1-1-1-1-1-1-1-...-1 (56 stages)"),
        ("-".join(["16"] * 32), "16-16-16-16-16-16-16-...-16 (32 stages)"),
    ],
)
def test_configs_of_many_stages_are_short(config: str, shown: str) -> None:
    assert short_config(config) == shown
    assert len(shown) <= LONGEST_CONFIG


def test_tables_fit_the_terminal() -> None:
    table = Table(["stage", "layers"], [["0", "a.very.long.name.of.a.layer .. another.very.long.name (12)"]])
    assert max(map(len, table.text(50).splitlines())) <= 50
    assert "a.very.lo" in table.text(50)
    assert "(12)" in table.text(50)
    assert table.text(200) == table.text()
