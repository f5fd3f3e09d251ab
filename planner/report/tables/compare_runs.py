"""Tables that compare a measured run with its simulation."""

from __future__ import annotations

from planner.analysis.compare_runs import RunComparison, TimingError
from planner.formats.plan import Plan
from planner.report.tables.plan import pace
from planner.report.tables.run import percent
from planner.report.tables.table import Table
from planner.units import format_seconds


def run_comparison_report(comparison: RunComparison, plan: Plan) -> str:
    """Report the pace of both runs, the timing errors of events, and the stages' times."""
    tables = pace_table(comparison, plan), timing_table(comparison), stage_times_table(comparison)
    pace_text, timing_text, stages_text = (table.text() for table in tables)
    notes = "\n".join(timing_notes(comparison))
    return "\n\n".join((pace_text, notes, timing_text, stages_text))


def pace_table(comparison: RunComparison, plan: Plan) -> Table:
    """Compare pace, bubble and lengths as planned, simulated and measured."""
    predicted, simulated, measured = plan.predicted, comparison.simulated, comparison.measured
    seconds = predicted.seconds_per_minibatch, simulated.seconds_per_minibatch
    rows = [
        ["pace", pace(predicted.samples_per_s, seconds[0])]
        + [pace(run.samples_per_s, run.seconds_per_minibatch) for run in (simulated, measured)],
        ["time, relative to measured", *(f"{each / measured.seconds_per_minibatch - 1:+.1%}" for each in seconds), ""],
        ["bubble", "", percent(simulated.bubble_share), percent(measured.bubble_share)],
        ["whole run", "", format_seconds(simulated.seconds), format_seconds(measured.seconds)],
        ["start-up", "", format_seconds(simulated.start_up_s), format_seconds(measured.start_up_s)],
        ["drain", "", format_seconds(simulated.drain_s), format_seconds(measured.drain_s)],
    ]
    return Table(["", "plan", "simulated", "measured"], rows, "lrrr")


def timing_notes(comparison: RunComparison) -> tuple[str, str]:
    """Say what the timing errors are, and how the two rows differ."""
    events = f"{comparison.as_planned.events:,} forwards and backwards"
    return (
        f"How far simulated starts and ends of {events} are from measured ones, as shares of the run's length.",
        "The first row is the error of the prediction; the second, that of its messages and waits alone.",
    )


def timing_table(comparison: RunComparison) -> Table:
    """List the timing errors at the plan's times and at the run's own."""
    both = (("at the plan's times", comparison.as_planned), ("at the run's own times", comparison.as_run))
    rows = [
        [name, *(f"{share:.2%}" for share in (e.median_share, e.p95_share, e.worst_share)), _worst(e)]
        for name, e in both
    ]
    return Table(["", "median", "95%", "largest", "where the largest is"], rows, "lrrrl")


def stage_times_table(comparison: RunComparison) -> Table:
    """List the mean times of each stage, simulated and measured."""
    rows = [
        [str(number)]
        + [
            text
            for what in ("forward_s", "backward_s", "update_s")
            for text in _pair(getattr(stage.simulated, what), getattr(stage.measured, what))
        ]
        for number, stage in enumerate(comparison.stages)
    ]
    return Table(["stage", "forward", "measured", "backward", "measured", "update", "measured"], rows, "lrrrrrr")


def _worst(error: TimingError) -> str:
    worst = error.worst
    if worst is None:
        return ""
    times = f"{format_seconds(worst.predicted_s)} simulated, {format_seconds(worst.measured_s)} measured"
    return f"{worst.at} of {worst.name} in stage {worst.stage} on worker {worst.rank}: {times}"


def _pair(simulated_s: float, measured_s: float) -> tuple[str, str]:
    error = f" ({simulated_s / measured_s - 1:+.1%})" if measured_s > 0 else ""
    return format_seconds(simulated_s) + error, format_seconds(measured_s)
