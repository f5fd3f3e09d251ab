"""Compare predictions with real runs of two stages that compress what they send over shaped links. See README.md.

python -m benchmarks.real_runs.compressed --seed 1 --save
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from tabulate import tabulate

from benchmarks.drawn_cases import asked
from benchmarks.kept import Results, between_marks
from benchmarks.real_runs.__main__ import FOLDER, README, Case, Row, run, summary
from benchmarks.real_runs.__main__ import draw as draw_plans
from benchmarks.testbed.bed import Testbed, testbed
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.names import CODECS, CodecName
from planner.profiler.this_machine import keep_freed_pages
from planner.units import parse_bandwidth
from planner.workers.job import Job, TrainResult

PART = "compressed"
MARKS = "<!-- compressed: written by benchmarks.real_runs.compressed -->", "<!-- end of compressed -->"
RATES = ("80Mbps", "100Mbps", "200Mbps", "300Mbps", "1Gbps")
CODED = [name for name in CODECS if name != "none"]
HEADERS = ("model", "plan", "predicted, s", "measured, s", "error", "codecs not counted", "error of computing")
FORMATS = ("", "", ".3f", ".3f", "+.1%", "+.1%", "+.1%")
TIMEOUT_S = 300.0


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    found = asked(__doc__, draw, cases=12, seconds=10.0)
    if found is None:
        return
    arguments, chosen = found
    cases = draw(arguments.seed, arguments.cases)
    keep_freed_pages()  # as the workers do
    results = Results(FOLDER, save=arguments.save)
    rows = []
    with testbed(2, computing=True) as bed:
        for number in chosen:
            _, case, rate, codec = cases[number]
            links = bed.links(flat_cluster(2, parse_bandwidth(rate))).model_copy(update={"compress": codec})
            row = run(case, links, arguments.seconds, trained(bed, links))
            rows.append(replace(row, plan=f"{row.plan}, {codec} over {rate}"))
            print(rows[-1], file=sys.stderr, flush=True)
            results.add(PART, f"{arguments.seed}:{number}", rows[-1])
    kept = list(results.records(PART, Row).values()) if arguments.save else rows
    print(table(kept))
    if arguments.save:
        page = README.read_text(encoding="utf-8")
        README.write_text(between_marks(page, MARKS, f"{results.about(PART)}\n\n{table(kept)}"), encoding="utf-8")


def draw(seed: int, count: int) -> list[tuple[str, Case, str, CodecName]]:
    """Return so many of the drawn plans with two stages, each with a rate of the links and a codec."""
    cases = [case for case in draw_plans(seed, 4 * count) if case.cut][:count]
    rng = random.Random(seed)
    return [(case.model, case, rng.choice(RATES), rng.choice(CODED)) for case in cases]


def trained(bed: Testbed, links: Cluster) -> Callable[[Job], TrainResult]:
    """Return what trains a job over the links that were shaped last."""
    return lambda job: bed.train(job, links, 1.0, TIMEOUT_S)


def table(rows: Sequence[Row]) -> str:
    """Return the rows, and how large their errors are with and without the codecs' time."""
    ran = [row for row in rows if not row.failure]
    uncounted = [row.uncounted_s / row.measured_s - 1 for row in ran]
    cells = [
        [row.model, row.plan, row.predicted_s, row.measured_s, row.error, less, row.computing_error]
        for row, less in zip(ran, uncounted, strict=True)
    ]
    failures = "".join(f"\n- {row.model}, {row.plan}: {row.failure}" for row in rows if row.failure)
    return (
        f"{tabulate(cells, HEADERS, floatfmt=FORMATS, tablefmt='github')}\n\n"
        f"{summary([row.error for row in ran])}; codecs not counted: {summary(uncounted)}\n{failures}"
    )


if __name__ == "__main__":
    main()
