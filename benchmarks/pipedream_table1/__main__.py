"""PipeDream's Table 1 (Harlap et al., arXiv 1806.03377), solved and run on emulated devices. See README.md here.

python -m benchmarks.pipedream_table1 --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.published_configs.__main__ import implied_bandwidth, profile_of_row
from benchmarks.published_configs.rows import ROWS, Row
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.emulate import emulate, fitting_scale
from benchmarks.testbed.measure import data_parallel_run, described, run_plan
from planner.solver import solve

TABLE = Path(__file__).with_name("results.md")
HEADERS = (
    "row",
    "link, Gbps",
    "published",
    "over 1",
    "over BSP",
    "less sent",
    "ours",
    "over 1",
    "over BSP",
    "less sent",
    "predicted / measured",
    "BSP over 1, published",
    "BSP over 1",
)


@dataclass(frozen=True)
class Result:
    """One row as it ran; speed-ups are measured."""

    row: Row
    bandwidth_bytes_per_s: float
    config: str
    over_one: float
    over_data_parallel: float
    communication_cut: float | None
    predicted_over_measured: float
    data_parallel_over_one: float


def table1() -> list[Row]:
    """The seven rows of the table; the text's straight pipelines are no part of it."""
    return [row for row in ROWS if row.table == "arXiv" and row.config != "straight"]


def main() -> None:
    """Run the rows, print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", help="these only, counted from 0")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run, after its start-up")
    parser.add_argument(
        "--nominal", action="store_true", help="links at their nominal rate, instead of what the published BSP got"
    )
    parser.add_argument("--save", action="store_true", help=f"write {TABLE.name}")
    arguments = parser.parse_args()
    rows = table1() if arguments.rows is None else [table1()[index] for index in arguments.rows]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="table1-") as folder, testbed(max(row.gpus for row in rows)) as bed:
        for number, row in enumerate(rows):
            results.append(run_row(bed, row, arguments.seconds, Path(folder) / str(number), arguments.nominal))
            print(f"{number + 1}/{len(rows)}: {results[-1]}", file=sys.stderr, flush=True)
    text = report(results)
    print(text)
    if arguments.save:
        TABLE.write_text(text + "\n", encoding="utf-8")


def run_row(bed: Testbed, row: Row, seconds: float, folder: Path, nominal: bool) -> Result:
    """Estimate the profile, emulate it, solve for the measured links, and run the plan and BSP."""
    profile = profile_of_row(row)
    there = row.site.cluster(row.servers, None)
    implied = None if nominal else implied_bandwidth(row)
    if implied is not None:
        there = row.site.cluster(row.servers, None, implied / there.slowest_bandwidth_bytes_per_s)
    scale = fitting_scale(profile, there)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(there))
    plan = solve(emulated.profile, links)
    one_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in emulated.profile.layers)
    run = run_plan(bed, emulated, plan, described(links), seconds)
    bsp = data_parallel_run(bed, emulated, links, seconds)
    return Result(
        row=row,
        bandwidth_bytes_per_s=there.slowest_bandwidth_bytes_per_s,
        config=plan.config,
        over_one=one_s / run.measured_s,
        over_data_parallel=bsp.measured_s / run.measured_s,
        communication_cut=plan.predicted.communication_cut,
        predicted_over_measured=run.predicted_s / run.measured_s,
        data_parallel_over_one=one_s / bsp.measured_s,
    )


def report(results: Sequence[Result]) -> str:
    """The table in Markdown, published numbers first."""
    rows = [
        [
            f"{result.row.model}, {result.row.gpus} x {result.row.site.name}",
            f"{8e-9 * result.bandwidth_bytes_per_s:.2f}",
            result.row.config,
            _number(result.row.over_one),
            _number(result.row.over_data_parallel),
            _share(result.row.communication_cut),
            result.config,
            _number(result.over_one),
            _number(result.over_data_parallel),
            _share(result.communication_cut),
            _number(result.predicted_over_measured),
            _number(result.row.data_parallel_over_one),
            _number(result.data_parallel_over_one),
        ]
        for result in results
    ]
    reached = sum(result.over_data_parallel >= result.row.over_data_parallel for result in results)
    table = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    return f"{table}\n\nAt least the published speed-up over BSP in {reached} of {len(results)} rows."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    main()
