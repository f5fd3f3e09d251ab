"""Solve PipeDream's Table 1 (Harlap et al., arXiv 1806.03377), and run it on emulated devices. See
README.md here.

python -m benchmarks.published.pipedream_table1 --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import Results, number, share
from benchmarks.published.configs.__main__ import implied_bandwidth
from benchmarks.published.configs.rows import ROWS, Row
from benchmarks.published.emulated_rows import Ran, run_row
from benchmarks.testbed.bed import testbed

HERE = Path(__file__).parent
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


def table1() -> list[Row]:
    """Return the seven rows of the table, without the straight pipelines from the paper's text."""
    return [row for row in ROWS if row.table == "arXiv" and row.config != "straight"]


def main() -> None:
    """Run the rows, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", help="these only, counted from 0; the others stay as kept"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each run, after its start-up"
    )
    parser.add_argument(
        "--nominal",
        action="store_true",
        help="links at their nominal rate, instead of what the published BSP got",
    )
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the page in docs/"
    )
    arguments = parser.parse_args()
    part = "nominal" if arguments.nominal else "implied"
    results = Results(HERE, save=arguments.save)
    rows = table1() if arguments.rows is None else [table1()[index] for index in arguments.rows]
    with (
        tempfile.TemporaryDirectory(prefix="table1-") as folder,
        testbed(max(row.gpus for row in rows)) as bed,
    ):
        for count, row in enumerate(rows):
            bandwidth = None if arguments.nominal else implied_bandwidth(row)
            ran = run_row(
                bed, row, bandwidth, arguments.seconds, Path(folder) / str(count), theirs=False
            )
            results.add(part, row.name, ran)
            print(f"{count + 1}/{len(rows)}: {row.name}: {ran}", file=sys.stderr, flush=True)
    results.show(tables(results))


def tables(results: Results) -> str:
    """Return the saved results in Markdown."""
    titles = {
        "implied": "At the bandwidth that the published BSP had",
        "nominal": "At the nominal bandwidth",
    }
    parts = []
    for part, title in titles.items():
        if kept := results.records(part, Ran):
            parts.append(f"{title}; emulated devices, {results.about(part)}:\n\n{report(kept)}")
    return "\n\n".join(parts)


def report(results: Mapping[str, Ran]) -> str:
    """Return the table in Markdown, published numbers first."""
    ran = {row: results[row.name] for row in table1() if row.name in results}
    cells = [
        [
            row.name,
            f"{8e-9 * our.bandwidth_bytes_per_s:.2f}",
            row.config,
            number(row.over_one),
            number(row.over_data_parallel),
            share(row.communication_cut),
            our.config,
            number(our.over_one),
            number(our.over_data_parallel),
            share(our.communication_cut),
            number(our.predicted_over_measured),
            number(row.data_parallel_over_one),
            number(our.data_parallel_over_one),
        ]
        for row, our in ran.items()
    ]
    reached = sum(our.over_data_parallel >= row.over_data_parallel for row, our in ran.items())
    table = tabulate(cells, HEADERS, tablefmt="github", disable_numparse=True)
    return f"{table}\n\nAt least the published speed-up over BSP in {reached} of {len(ran)} rows."


if __name__ == "__main__":
    main()
