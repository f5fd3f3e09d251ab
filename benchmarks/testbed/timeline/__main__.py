"""Compare the events of real runs with simulated ones. See README.md in this folder.

python -m benchmarks.testbed.timeline --save
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.kept import ROOT
from benchmarks.testbed.timeline import real
from benchmarks.testbed.timeline.errors import timing_error, with_stage_times
from benchmarks.testbed.timeline.real import Case
from planner.analysis.compare_runs import compare_runs, mean_stage_times
from planner.formats.plan import Plan
from planner.formats.timeline import Timeline
from planner.reporting.svg import timeline_svg
from planner.reporting.tables.runs import run_comparison_report
from planner.simulator.excerpt import only_minibatches
from planner.simulator.simulate_plan import simulate_recorded
from planner.simulator.summary import summarize

TABLE, RESULTS = (Path(__file__).with_name(name) for name in ("results.md", "results.json"))
PICTURE = ROOT / "docs" / "images" / "timeline-measured.svg"
AIM = 0.05
DRAWN = 12  # first minibatches of the run, in the picture
CASES = (
    Case("vgg16", 32, "1f1b"),
    Case("vgg16", 8, "1f1b-flush", 4),
    Case("vgg16", 8, "gpipe", 4),
    Case("resnet50", 16, "1f1b"),
)
PICTURED = CASES[1]
HEADERS = (
    "run",
    "minibatches",
    "events",
    "pace",
    "median",
    "95%",
    "at most",
    "own times: median",
    "own times: 95%",
    "own times: at most",
    "first minibatch late by",
)


def main() -> None:
    """Run the cases asked for, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=[""], help="runs whose names have one of these in them"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument(
        "--whole", action="store_true", help="print all of plan simulate --against on stderr"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"put the rows into {RESULTS.name}, all it has into {TABLE.name}, and a picture into "
        f"docs/",
    )
    arguments = parser.parse_args()
    rows: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if arguments.save and RESULTS.exists() else {}
    )
    for case, plan, measured in _runs(arguments.cases, arguments.seconds):
        simulated = simulate_recorded(plan, measured)
        rows[case.name] = row(case, plan, simulated, measured)
        print(rows[case.name], file=sys.stderr, flush=True)
        if arguments.whole:
            print(
                run_comparison_report(compare_runs(simulated, measured), plan),
                file=sys.stderr,
                flush=True,
            )
        if arguments.save:
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if case == PICTURED:
                PICTURE.write_text(picture(simulated, measured), encoding="utf-8")
    text = report([rows[case.name] for case in CASES if case.name in rows])
    print(text)
    if arguments.save:
        TABLE.write_text(text + "\n", encoding="utf-8")


def _runs(parts: Sequence[str], seconds: float) -> Iterator[tuple[Case, Plan, Timeline]]:
    """Yield the run of each case that has one of `parts` in its name."""
    with tempfile.TemporaryDirectory(prefix="timeline-") as name:
        folder = Path(name)
        cluster = real.measure_links(folder)
        for case in CASES:
            if any(part in case.name for part in parts):
                yield case, *real.run_case(case, cluster, seconds, folder)


def row(case: Case, plan: Plan, simulated: Timeline, measured: Timeline) -> list[Any]:
    """Return a row of the table."""
    as_run = simulate_recorded(with_stage_times(plan, mean_stage_times(measured)), measured)
    planned, own = timing_error(simulated, measured), timing_error(as_run, measured)
    there, run = summarize(simulated), summarize(measured)
    return [
        case.name,
        run.minibatches,
        planned.events,
        there.seconds_per_minibatch / run.seconds_per_minibatch - 1,
        *(planned.median_share, planned.p95_share, planned.worst_share),
        *(own.median_share, own.p95_share, own.worst_share),
        (run.start_up_s - there.start_up_s) / run.seconds,
    ]


def report(rows: Sequence[Sequence[Any]]) -> str:
    """Return the table and its summary in Markdown."""
    table = tabulate(
        rows, HEADERS, tablefmt="github", floatfmt=("", "", "", "+.1%", *[".2%"] * 6, "+.2%")
    )
    within = [sum(each[column] <= AIM for each in rows) for column in (6, 9)]
    return (
        f"{table}\n\nEvery start and end within {AIM:.0%} of the run's length: {within[0]} of "
        f"{len(rows)} runs at the "
        f"plan's times, {within[1]} at the run's own."
    )


def picture(simulated: Timeline, measured: Timeline) -> str:
    """Return a picture of the simulated and the measured timeline, from the start."""
    return timeline_svg([only_minibatches(run, range(DRAWN)) for run in (simulated, measured)])


if __name__ == "__main__":
    main()
