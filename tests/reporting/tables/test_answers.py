"""Cells of the tables that answer questions about plans."""

from __future__ import annotations

import planner
from planner.formats.files import replace
from planner.reporting.tables.answers import comparison_report, comparison_table
from planner.reporting.tables.plan import practice_words
from tests.samples import layer, profile

MODEL = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10**8) for n in range(4)))


def cells(cut: float, idle: float) -> dict[str, object]:
    """The first row of a comparison with these shares."""
    plan = planner.solve(MODEL, planner.flat_cluster(4, 1e7))
    comparison = planner.compare(MODEL, plan)
    first = replace(comparison.rows[0], communication_cut=cut, idle_share=idle)
    table = comparison_table(replace(comparison, rows=(first, *comparison.rows[1:])))
    return dict(zip(table.headers, table.rows[0], strict=True))


def test_a_change_is_a_percentage_until_it_is_a_multiple() -> None:
    for cut, shown in (
        (0.96, "-96%"),
        (-1.5, "+150%"),
        (-9436.54, "9,438x"),
        (0.001, "0%"),
        (-0.001, "0%"),
    ):
        assert cells(cut, 0.5)["sent vs DP"] == shown


def test_no_share_is_below_nothing() -> None:
    assert cells(0.5, -1e-9)["idle"] == "0%"
    assert cells(0.5, -0.0)["idle"] == "0%"


def test_reports_have_no_empty_sign() -> None:
    plan = planner.solve(MODEL, planner.flat_cluster(4, 1e7))
    assert "-0%" not in comparison_report(planner.compare(MODEL, plan))


def test_what_runs_reached_is_one_sentence() -> None:
    plan = planner.solve(MODEL, planner.flat_cluster(4, 1e7))
    assert practice_words(plan.predicted) is None
    predicted = replace(plan.predicted, speed_interval=(0.682, 0.811), tokens_per_s=21_335.0)
    assert practice_words(predicted) == (
        "runs like this reached 68 to 81% of the estimate: 14,550 to 17,303 tokens/s"
    )
