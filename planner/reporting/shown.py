"""What records show of themselves; importing this module, and no table yet, is what makes them do
so.
"""

from html import escape
from importlib import import_module
from typing import Any

from planner.formats.shown import VIEWS

# By the record's type: the function in `planner.reporting` that writes it as text.
TEXTS = {
    "Cluster": "tables.plan.cluster_line",
    "Comparison": "tables.answers.comparison_report",
    "Explanation": "tables.answers.explanation_report",
    "Fit": "tables.answers.fit_report",
    "Plan": "tables.plan.plan_report",
    "Profile": "tables.profile.profile_report",
    "ScheduleComparison": "tables.schedules.schedules_report",
    "Summary": "tables.runs.run_report",
    "Timeline": "tables.runs.timeline_report",
    "TrainResult": "tables.runs.training_report",
}
PARTS = {  # of the report, as HTML for notebooks
    "Comparison": "page.page.comparison_section",
    "Plan": "page.page.plan_frame",
}


def text(answer: Any) -> str:
    """Write the tables of a record, or its fields where it has none."""
    name = type(answer).__name__
    if name in TEXTS:
        return _called(TEXTS[name], answer)
    return repr(answer)


def html(answer: Any) -> str:
    """Write a plan as its report, an answer as its part of the report, and others as their text."""
    name = type(answer).__name__
    if name in PARTS:
        return _called(PARTS[name], answer)
    return f"<pre>{escape(str(answer))}</pre>"


def _called(path: str, answer: Any) -> str:
    """Call a function of `planner.reporting` by its path."""
    module, _, name = path.rpartition(".")
    return str(getattr(import_module(f"planner.reporting.{module}"), name)(answer))


VIEWS.update(text=text, html=html)
