"""What records show of themselves; importing this module is what makes them do so.

Tables, pandas and matplotlib are imported when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

from planner.errors import InputError
from planner.formats.shown import VIEWS

# By the record's type: the module in `planner.reporting` whose function writes it as text.
TEXTS = {
    "Choice": "tables.compare.choice_report",
    "Cluster": "tables.plan.cluster_report",
    "Comparison": "tables.compare.comparison_report",
    "Explanation": "tables.explain.explanation_report",
    "Fit": "tables.fit.fit_report",
    "Plan": "tables.plan.plan_report",
    "Profile": "tables.profile.profile_report",
    "Summary": "tables.runs.run_report",
    "Sweep": "tables.compare.sweep_report",
    "Timeline": "tables.runs.timeline_report",
    "TrainResult": "tables.runs.training_report",
}
SECTIONS = {"Comparison": "comparison_section", "Sweep": "sweep_section"}  # of the report's page
# The field that holds the rows of a data frame.
ROWS = {
    "Cluster": "levels",
    "Comparison": "rows",
    "Explanation": "uses",
    "Profile": "layers",
    "SelftestReport": "rows",
    "Summary": "workers",
    "Sweep": "points",
    "TrainResult": "losses",
}
PAGE_HEIGHT = 640  # pixels of a plan's page in a notebook


def text(answer: Any) -> str:
    """Write the tables of a record, or its fields where it has none."""
    name = type(answer).__name__
    return str(_function(TEXTS[name])(answer)) if name in TEXTS else repr(answer)


def html(answer: Any) -> str:
    """Write a plan as its report, an answer as its part of the report, and others as their text."""
    name = type(answer).__name__
    if name in SECTIONS:
        return str(_function(f"page.sections.{SECTIONS[name]}")(answer))
    if name != "Plan":
        return f"<pre>{escape(str(answer))}</pre>"
    from planner.reporting.page.page import report_page
    from planner.simulator.simulate_plan import simulate

    page = escape(report_page(answer, simulate(answer)))
    return f'<iframe srcdoc="{page}" style="width: 100%; height: {PAGE_HEIGHT}px; border: 0"></iframe>'


def frame(answer: Any) -> Any:
    """Return the rows of a record as a pandas DataFrame; fields of fields have names with dots."""
    name = type(answer).__name__
    if name == "Fit":
        rows = [_fit_row(row) for row in sorted((answer.asked, *answer.others), key=lambda row: row.gpus)]
    elif name == "Plan":
        rows = [{"replicas": stage.replicas} | stage.model_dump(mode="json") for stage in answer.stages]
    elif name == "Timeline":
        rows = [event._asdict() for event in answer.events.rows()]
    elif name == "QuickstartResult":
        rows = [run.model_dump(mode="json") for run in (answer.pipeline, answer.data_parallel)]
    else:
        rows = [row.model_dump(mode="json") for row in getattr(answer, ROWS[name])]
    return _library("pandas").json_normalize(rows)


def _fit_row(row: Any) -> dict[str, object]:
    if row.plan is None:
        return {"gpus": row.gpus, "why_not": row.why_not}
    predicted = row.plan.predicted
    return {"gpus": row.gpus, "config": row.plan.config, "samples_per_s": predicted.samples_per_s}


def plot(answer: Any) -> Any:
    """Draw a record on new axes of matplotlib."""
    name = type(answer).__name__
    if name not in _PLOTS:
        raise InputError(f"there is no plot of a {name}", hint=f"there are plots of {', '.join(_PLOTS)}")
    _, axes = _library("matplotlib.pyplot").subplots()
    _PLOTS[name](answer, axes)
    return axes


def _plot_plan(plan: Any, axes: Any) -> None:
    from planner.simulator.simulate_plan import simulate

    _plot_timeline(simulate(plan), axes)
    axes.set_title(f"{plan.model}: {plan.config}, {plan.schedule}")


def _plot_timeline(timeline: Any, axes: Any) -> None:
    from planner.reporting.timeline import COLOURS, opening
    from planner.simulator.summary import summarize

    for event in timeline.events.rows():
        if event.peer_rank is None:  # messages are not on a worker's row
            bar = [(event.start_s, event.end_s - event.start_s)]
            axes.broken_barh(bar, (event.rank - 0.4, 0.8), facecolors=COLOURS[event.kind])
    axes.set(xlabel="seconds", ylabel="worker", xlim=opening(summarize(timeline), timeline, timeline.span_s))
    axes.invert_yaxis()


def _plot_profile(profile: Any, axes: Any) -> None:
    places = range(len(profile.layers))
    forward = [layer.forward_s for layer in profile.layers]
    axes.bar(places, forward, label="forward")
    axes.bar(places, [layer.backward_s for layer in profile.layers], bottom=forward, label="backward")
    axes.set(xlabel="layer", ylabel="seconds", title=profile.model)
    axes.legend()


def _plot_comparison(comparison: Any, axes: Any) -> None:
    rows = [row for row in comparison.rows if not row.over_memory_bytes]
    axes.barh([row.name for row in rows], [1 / row.seconds_per_microbatch for row in rows])
    axes.set(xlabel="microbatches per second", title=comparison.model)
    axes.invert_yaxis()


def _plot_sweep(sweep: Any, axes: Any) -> None:
    points = [point for point in sweep.points if point.rate_per_s]
    axes.plot([point.value for point in points], [point.rate_per_s for point in points], marker="o")
    axes.set(xlabel=sweep.quantity, ylabel="samples per second", xscale="log", title=sweep.model)


def _plot_losses(result: Any, axes: Any) -> None:
    axes.plot([loss.minibatch for loss in result.losses], [loss.loss for loss in result.losses])
    axes.set(xlabel="minibatch", ylabel="loss")


_PLOTS: dict[str, Callable[[Any, Any], None]] = {
    "Plan": _plot_plan,
    "Timeline": _plot_timeline,
    "Profile": _plot_profile,
    "Comparison": _plot_comparison,
    "Sweep": _plot_sweep,
    "TrainResult": _plot_losses,
}


def _function(path: str) -> Callable[[Any], Any]:
    """Return a function of `planner.reporting` by its path."""
    module, _, name = path.rpartition(".")
    function: Callable[[Any], Any] = getattr(import_module(f"planner.reporting.{module}"), name)
    return function


def _library(name: str) -> Any:
    """Import a library that planner does not need; raise InputError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as cause:
        package = name.partition(".")[0]
        raise InputError(f"{package} is not installed", hint=f"pip install {package}") from cause


VIEWS.update(text=text, html=html, frame=frame, plot=plot)
