"""Solve the rows of PipeDream at SOSP 2019 (Narayanan et al.), and run them on emulated devices.
See README.md here.

python -m benchmarks.published.pipedream_sosp19 --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Results
from benchmarks.published.configs.__main__ import answer, implied_bandwidth, implied_by_ratio
from benchmarks.published.configs.rows import Row
from benchmarks.published.emulated_rows import emulated_row, published_plan, run_row
from benchmarks.published.pipedream_sosp19.records import PARTS, Scheduled, Solved, rows_of, tables
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.measure import recomputing, train_s
from benchmarks.testbed.predict import given_plan, simulated_s
from planner.formats.plan import Plan

HERE = Path(__file__).parent


def main() -> None:
    """Run the parts asked for, print the tables, and save them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="these only, or none; the rest stays as kept",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", help="of each part only these, counted from 0"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each run, after its start-up"
    )
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the page in docs/"
    )
    arguments = parser.parse_args()
    results = Results(HERE, save=arguments.save)
    for part in arguments.parts:
        rows = rows_of(part)
        chosen = rows if arguments.rows is None else [rows[index] for index in arguments.rows]
        if part == "solved":
            for row in chosen:
                _say(part, row)
                results.add(part, row.name, solve_row(row))
        else:
            run_part(part, chosen, arguments.seconds, results)
    results.show(tables(results))


def solve_row(row: Row) -> Solved:
    """Solve a row at the nominal bandwidth, within the GPU's memory."""
    said = answer(row, scan=False)
    assert said.ours is not None, f"{row.name} does not fit"
    return Solved(
        config=said.ours.config,
        over_data_parallel=said.ours.predicted.speedup_over_data_parallel,
        communication_cut=said.ours.predicted.communication_cut,
        theirs_over_data_parallel=said.theirs_over_data_parallel,
        data_parallel_over_one=said.data_parallel_over_one,
        implied_bytes_per_s=implied_by_ratio(row),
    )


def run_part(part: str, rows: Sequence[Row], seconds: float, results: Results) -> None:
    """Run the rows of a part on one set of hosts."""
    bandwidths = {row.name: _bandwidth(part, row, results) for row in rows}
    if part == "implied":  # rows that have one
        rows = [row for row in rows if bandwidths[row.name] is not None]
    most = max((row.gpus for row in rows), default=1)
    with tempfile.TemporaryDirectory(prefix="sosp19-") as folder, testbed(most) as bed:
        for count, row in enumerate(rows):
            _say(part, row)
            place, bandwidth = Path(folder) / str(count), bandwidths[row.name]
            if part == "gpipe":
                for name, scheduled in run_schedules(bed, row, seconds, place).items():
                    results.add(part, f"{row.name}: {name}", scheduled)
            else:
                results.add(
                    part, row.name, run_row(bed, row, bandwidth, seconds, place, theirs=True)
                )


def _bandwidth(part: str, row: Row, results: Results) -> float | None:
    if part == "implied":
        solved = results.records("solved", Solved)
        return solved[row.name].implied_bytes_per_s if row.name in solved else implied_by_ratio(row)
    return implied_bandwidth(row) if part == "straight" else None


def run_schedules(bed: Testbed, row: Row, seconds: float, folder: Path) -> dict[str, Scheduled]:
    """Run the straight pipeline under 1F1B at PipeDream's depth, and under synchronous schedules.

    GPipe divides a minibatch into as many microbatches as 1F1B has minibatches in flight, and
    recomputes each forward.
    """
    emulated, links = emulated_row(bed, row, None, folder)
    straight = published_plan(emulated.profile, links, row)
    assert straight is not None
    count = len(straight.stages)
    layers = [len(stage.layers) for stage in straight.stages]
    flush, gpipe = (
        given_plan(emulated.profile, links, layers, row.replicas, schedule, count)
        for schedule in ("1f1b-flush", "gpipe")
    )
    runs: dict[str, tuple[Plan, int]] = {
        "1f1b": (at_published_depth(straight), count),
        "1f1b-flush": (flush, 1),
        "gpipe": (gpipe, 1),
        "gpipe, recomputing": (recomputing(gpipe), 1),
    }
    return {
        name: Scheduled(times * simulated_s(plan), times * train_s(bed, emulated, plan, seconds))
        for name, (plan, times) in runs.items()
    }


def at_published_depth(plan: Plan) -> Plan:
    """Return a straight pipeline; each stage has as many minibatches in flight as there are stages
    from it on.
    """
    count = len(plan.stages)
    stages = (
        stage.model_copy(update={"in_flight": count - index})
        for index, stage in enumerate(plan.stages)
    )
    return plan.model_copy(update={"stages": tuple(stages)})


def _say(part: str, row: Row) -> None:
    print(f"{part}: {row.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
