"""The sentences of a run's report."""

from __future__ import annotations

import pytest

from planner.reporting.tables.runs import percent_error


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [(99.98, 100.0, "0.0%"), (99.9, 100.0, "-0.1%"), (150.0, 100.0, "+50.0%"), (1.0, 0.0, "-")],
)
def test_an_error_of_nothing_has_no_sign(predicted: float, measured: float, text: str) -> None:
    assert percent_error(predicted, measured) == text
