"""The formulas of 1f1b, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.network.link import Link
from tests.cost.works import EXAMPLE


def test_resource_model() -> None:
    one = AsynchronousModel(Link(10.0, 0.5)).resources_s(EXAMPLE, 1)
    assert {name: float(value[0]) for name, value in one.items()} == {
        "compute": 7,
        "receive": 3 + 1,
        "send": 2 + 0.5,
    }
    three = AsynchronousModel(Link(10.0, 0.5)).resources_s(EXAMPLE, 3)
    # behind which all of the backward hides
    assert three["compute"][0] == pytest.approx((2 + 1 + 10) / 3)
    assert three["receive"][0] == pytest.approx((3 + 1) / 3 + 2 * 2 / 9 * 6)
    assert three["send"][0] == pytest.approx((2 + 0.5) / 3 + 2 * 2 / 9 * 6)
