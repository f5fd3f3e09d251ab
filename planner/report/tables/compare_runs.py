"""A run laid over its simulation, for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.analysis.compare_runs import Against
from planner.analysis.deviation import Deviation
from planner.formats.plan import Plan
from planner.report.tables.run import pace, percent
from planner.units import format_seconds

APART_HEADERS = ["", "median", "95%", "at most", "furthest apart"]
STAGE_HEADERS = ["stage", "forward", "measured", "backward", "measured", "update", "measured"]


def against_report(against: Against, plan: Plan) -> str:
    """The numbers of both, how far apart their events are, and the stages' times."""
    headers, rows = pace_cells(against, plan)
    parts = [tabulate(rows, headers=headers, disable_numparse=True)]
    about = (
        f"Starts and ends of {against.as_planned.events:,} forwards and backwards, apart by shares of the run's length:"
    )
    parts.append(f"{about}\n\n{tabulate(apart_cells(against), headers=APART_HEADERS, disable_numparse=True)}")
    parts.append(tabulate(stage_cells(against), headers=STAGE_HEADERS, disable_numparse=True))
    return "\n\n".join(parts)


def pace_cells(against: Against, plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: pace, bubble and lengths as planned, simulated and measured."""
    predicted, simulated, measured = plan.predicted, against.simulated, against.measured
    seconds = predicted.seconds_per_minibatch, simulated.seconds_per_minibatch
    rows = [
        ["pace", pace(predicted.samples_per_s, seconds[0])]
        + [pace(run.samples_per_s, run.seconds_per_minibatch) for run in (simulated, measured)],
        ["against measured", *(f"{each / measured.seconds_per_minibatch - 1:+.1%}" for each in seconds), ""],
        ["bubble", "", percent(simulated.bubble_share), percent(measured.bubble_share)],
        ["whole run", "", format_seconds(simulated.seconds), format_seconds(measured.seconds)],
        ["start-up", "", format_seconds(simulated.start_up_s), format_seconds(measured.start_up_s)],
        ["drain", "", format_seconds(simulated.drain_s), format_seconds(measured.drain_s)],
    ]
    return ["", "plan", "simulated", "measured"], rows


def apart_cells(against: Against) -> list[list[str]]:
    """How far apart the events are, at the plan's times and at the run's own."""
    both = (("at the plan's times", against.as_planned), ("at the run's own times", against.as_run))
    return [[name, *_shares(found), _worst(found)] for name, found in both]


def stage_cells(against: Against) -> list[list[str]]:
    """The stages' times, as simulated and measured."""
    return [
        [str(number)]
        + [
            text
            for what in ("forward_s", "backward_s", "update_s")
            for text in _beside(getattr(stage.simulated, what), getattr(stage.measured, what))
        ]
        for number, stage in enumerate(against.stages)
    ]


def _shares(found: Deviation) -> list[str]:
    return [f"{share:.2%}" for share in (found.median_share, found.p95_share, found.worst_share)]


def _worst(found: Deviation) -> str:
    worst = found.worst
    if worst is None:
        return ""
    times = f"{format_seconds(worst.predicted_s)} simulated, {format_seconds(worst.measured_s)} measured"
    return f"{worst.at} of {worst.name} in stage {worst.stage} on worker {worst.rank}: {times}"


def _beside(simulated_s: float, measured_s: float) -> tuple[str, str]:
    error = f" ({simulated_s / measured_s - 1:+.1%})" if measured_s > 0 else ""
    return format_seconds(simulated_s) + error, format_seconds(measured_s)
