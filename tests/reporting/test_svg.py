"""Pictures of timelines."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from planner.reporting.svg import round_ticks, timeline_svg
from planner.simulator.simulate_plan import simulate
from tests.reporting.page.test_page import EVIL, evil_plan, slower


def test_the_picture_of_a_timeline() -> None:
    plan = evil_plan()
    timeline = simulate(plan, 3)
    root = ElementTree.fromstring(timeline_svg([timeline, slower(timeline, 1.1)]))
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"{EVIL[0]}: 1-1-1, 1f1b" in texts
    assert {"worker 0", "worker 1", "worker 2", "measured", "F0", "B2"} <= set(texts)
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "F0: forward, 0 s to 1 s" in titles
    assert len(titles) == 2 * len(timeline.events)


def test_ticks_are_round_numbers() -> None:
    # quarters of the greatest value were written as 15, 11, 7, 4
    assert round_ticks(0.0, 14.85, 14.85 / 6) == [0, 5, 10]
    assert round_ticks(1.18, 1.9, 0.09) == pytest.approx([1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9])
    assert round_ticks(-12.5, 21.0, 10.0) == [-10, 0, 10, 20]
