"""The published cost models, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from planner.cost.models.published import PaperModel, PipedreamModel
from planner.cost.network.link import Link
from tests.cost.works import EXAMPLE, work


def test_published_models() -> None:
    published = PipedreamModel(Link(10.0)).resources_s(EXAMPLE, 2)
    assert published["compute"][0] == pytest.approx((7 + 4 * 60 / (10 * 2)) / 2)
    assert published["cut_before"][0] == pytest.approx(2 * 40 / (10 * 2))
    assert published["cut_after"][0] == pytest.approx(2 * 50 / (10 * 2))
    first = work(cut_after_bytes=50, is_first=True)
    assert PipedreamModel(Link(10.0)).resources_s(first, 2)["cut_after"][0] == 0
    paper = PaperModel(Link(10.0)).resources_s(EXAMPLE, 2)
    assert paper["compute"][0] == pytest.approx(max(7, 2 * 60 / 10) / 2)
    assert paper["cut_before"][0] == pytest.approx(2 * 40 / 10)
