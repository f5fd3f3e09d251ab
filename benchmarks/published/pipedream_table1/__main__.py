"""Solve PipeDream's Table 1 (Harlap et al., arXiv 1806.03377), and run it on emulated devices. See
README.md here.

python -m benchmarks.published.pipedream_table1 --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import Results, number, share
from benchmarks.published.configs.__main__ import implied_bandwidth, profile_of_row
from benchmarks.published.configs.rows import ROWS, Row
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import data_parallel_run, described, run_plan
from planner.solver import search_plan as solve

HERE = Path(__file__).parent
PART = "implied"
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
class Ran:
    """Results of one row; speed-ups are measured.

    Attributes:
        bandwidth_bytes_per_s: of the links of the emulated cluster.
        config: of our plan.
        over_one: speed-up of our plan over one device.
        data_parallel_over_one: of DistributedDataParallel.
        communication_cut: share of data parallelism's bytes that our plan does not send, as
            counted.
        predicted_over_measured: ratio of seconds per minibatch of our plan.
    """

    bandwidth_bytes_per_s: float
    config: str
    over_one: float
    data_parallel_over_one: float
    communication_cut: float | None
    predicted_over_measured: float

    @property
    def over_data_parallel(self) -> float:
        """Speed-up of our plan over data parallelism."""
        return self.over_one / self.data_parallel_over_one


def table1() -> list[Row]:
    """Return the seven rows of the table, without the straight pipelines from the paper's text."""
    return [row for row in ROWS if row.table == "arXiv" and row.config != "straight"]


def main() -> None:
    """Run the rows, print the table, and save it if asked."""
    arguments = _arguments()
    results = Results(HERE, save=arguments.save)
    rows = table1()
    if arguments.rows is not None:
        rows = [rows[index] for index in arguments.rows]

    with (
        tempfile.TemporaryDirectory(prefix="table1-") as folder,
        testbed(max(row.gpus for row in rows)) as bed,
    ):
        for count, row in enumerate(rows):
            ran = run_row(bed, row, arguments.seconds, Path(folder) / str(count))
            results.add(PART, row.name, ran)
            print(f"{count + 1}/{len(rows)}: {row.name}: {ran}", file=sys.stderr, flush=True)

    about = f"At the bandwidth that the published BSP had; emulated devices, {results.about(PART)}:"
    results.show(f"{about}\n\n{report(results.records(PART, Ran))}")


def _arguments() -> argparse.Namespace:
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
        "--save", action="store_true", help="write results.json and the page in docs/"
    )
    return parser.parse_args()


def run_row(bed: Testbed, row: Row, seconds: float, folder: Path) -> Ran:
    """Emulate the row's model and cluster, solve it for the measured links, and run our plan and
    data parallelism.
    """
    nominal = row.site.cluster(row.servers, None)
    bandwidth = implied_bandwidth(row) or nominal.slowest_bandwidth_bytes_per_s
    factor = bandwidth / nominal.slowest_bandwidth_bytes_per_s
    target = row.site.cluster(row.servers, None, factor)

    profile = profile_of_row(row)
    scale = fitting_scale(profile, target, LINK_BYTES_PER_S)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(target), byte_factor=scale.byte_factor)
    with scaled_buckets(scale.byte_factor):
        plan = solve(emulated.profile, links)

    ours = run_plan(bed, emulated, plan, described(links), seconds)
    data_parallel = data_parallel_run(bed, emulated, links, seconds)
    one_s = sum(
        layer.forward_s + layer.backward_s + layer.update_s for layer in emulated.profile.layers
    )
    return Ran(
        bandwidth_bytes_per_s=bandwidth,
        config=plan.config,
        over_one=one_s / ours.measured_s,
        data_parallel_over_one=one_s / data_parallel.measured_s,
        communication_cut=plan.predicted.communication_cut,
        predicted_over_measured=ours.predicted_s / ours.measured_s,
    )


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
