"""Compare predictions with real runs of two stages that compress what they send over shaped links.
See README.md.

python -m benchmarks.testbed.real_runs.compressed --seed 1 --save
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tabulate import tabulate

from benchmarks.drawn_cases import compare
from benchmarks.testbed.bed import Testbed, testbed
from benchmarks.testbed.real_runs.__main__ import Case, Row, run, summary
from benchmarks.testbed.real_runs.__main__ import draw as draw_plans
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.names import CODECS, CodecName
from planner.profiler.this_machine import keep_freed_pages
from planner.units import parse_bandwidth
from planner.workers.job import Job, TrainResult

RATES = ("80Mbps", "100Mbps", "200Mbps", "300Mbps", "1Gbps")
CODED = [name for name in CODECS if name != "none"]
HEADERS = (
    "model",
    "plan",
    "predicted, s",
    "measured, s",
    "error",
    "codecs not counted",
    "error of computing",
)
FORMATS = ("", "", ".3f", ".3f", "+.1%", "+.1%", "+.1%")
TIMEOUT_S = 300.0

Drawn = tuple[str, Case, str, CodecName]  # model, plan, rate of the links, codec


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare(
        __doc__,
        "testbed.real_runs.compressed",
        Row,
        draw=draw,
        words=lambda case: case,
        run=measured,
        table=table,
        cases=12,
        seconds=10.0,
    )


def measured(
    cases: Sequence[Drawn], chosen: Sequence[int], seconds: float
) -> Iterator[tuple[int, Row]]:
    """Run the cases of these numbers."""
    keep_freed_pages()  # as the workers do
    with testbed(2, computing=True) as bed:
        for number in chosen:
            _, case, rate, codec = cases[number]
            links = bed.links(flat_cluster(2, parse_bandwidth(rate))).model_copy(
                update={"compress": codec}
            )
            row = run(case, links, seconds, trained(bed, links))
            yield number, replace(row, plan=f"{row.plan}, {codec} over {rate}")


def draw(seed: int, count: int) -> list[Drawn]:
    """Return so many of the drawn plans with two stages, each with a rate of the links and
    a codec.
    """
    cases = [case for case in draw_plans(seed, 4 * count) if case.cut][:count]
    rng = random.Random(seed)
    return [(case.model, case, rng.choice(RATES), rng.choice(CODED)) for case in cases]


def trained(bed: Testbed, links: Cluster) -> Callable[[Job], TrainResult]:
    """Return what trains a job over the links that were shaped last."""
    return lambda job: bed.train(job, links, 1.0, TIMEOUT_S)


def table(rows: Sequence[Row], about: str) -> str:
    """Return the rows, and how large their errors are with and without the codecs' time."""
    ran = [row for row in rows if not row.failure]
    uncounted = [row.uncounted_s / row.measured_s - 1 for row in ran]
    cells = [
        [row.model, row.plan, row.predicted_s, row.measured_s, row.error, less, row.computing_error]
        for row, less in zip(ran, uncounted, strict=True)
    ]
    failures = "".join(f"\n- {row.model}, {row.plan}: {row.failure}" for row in rows if row.failure)
    return (
        f"{about}\n\n{tabulate(cells, HEADERS, floatfmt=FORMATS, tablefmt='github')}\n\n"
        f"{summary([row.error for row in ran])}; codecs not counted: "
        f"{summary(uncounted)}\n{failures}"
    )


if __name__ == "__main__":
    main()
