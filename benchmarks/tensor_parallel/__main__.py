"""Compare predictions with real runs of two workers that divide every layer. See README.md.

python -m benchmarks.tensor_parallel --save
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.drawn_cases import Compared
from benchmarks.kept import Results, marks, write_between
from planner.analysis.given_plan import price
from planner.api.running import profile as measure
from planner.errors import PlannerError, first_line
from planner.executor.worker import launch
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.profiler.links.measure_cluster import measure_host
from planner.profiler.this_machine import keep_freed_pages
from planner.reporting.tables.profile import disturbance_words
from planner.schedule.registry import DEFAULT
from planner.workers.job import Job

FOLDER = Path(__file__).parent
README, PART = FOLDER / "README.md", "runs"
CASES = [
    *((builder, size) for builder in ("narrow", "wide") for size in (4, 16)),
    ("middle", 8),
    ("narrow", 8),
]
CONFIGS = {"1x2": OwnStage(layers=("",), tensor=2), "2": OwnStage(layers=("",), replicas=2)}
PROFILE_S = 5.0


@dataclass(frozen=True)
class Row(Compared):
    """A run beside its prediction."""

    model: str
    samples: int
    config: str
    disturbed: str = ""  # what the profile says of the machine


def main() -> None:
    """Run all cases, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the table in README.md"
    )
    parser.add_argument(
        "--only", help="these cases alone, as in narrow/4,wide/16; the table keeps the others' rows"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of each run (default: %(default)g)"
    )
    arguments = parser.parse_args()
    keep_freed_pages()  # as the workers do
    results = Results(FOLDER, save=arguments.save)
    cluster = measure_host(2, "cpu")
    only = (
        arguments.only.split(",")
        if arguments.only
        else [f"{builder}/{samples}" for builder, samples in CASES]
    )
    rows = (
        (f"{row.model} {row.samples} {row.config}", row)
        for builder, samples in CASES
        if f"{builder}/{samples}" in only
        for row in run(builder, samples, cluster, arguments.seconds)
    )
    table = _table(list(results.measured(PART, Row, rows).values()))
    print(table)
    if arguments.save:
        write_between(README, marks("tensor_parallel"), f"{results.about(PART)}\n\n{table}")


def run(builder: str, samples: int, cluster: Cluster, seconds: float) -> list[Row]:
    """Profile the model beside a second process, then train it with groups of two and with two
    replicas.
    """
    model = f"{FOLDER / 'model.py'}:{builder}"
    rows = []
    profile = measure(
        model, batch_size=samples, device="cpu", seconds=PROFILE_S, processes=2, tensor=(2,)
    )
    layers = tuple(layer.name for layer in profile.layers)
    for config, stage in CONFIGS.items():
        own = OwnPlan(stages=(stage.model_copy(update={"layers": layers}),), schedule=DEFAULT)
        plan = price(profile, cluster, own)
        predicted_s = plan.predicted.seconds_per_minibatch
        try:
            result = launch(Job(model=model, plan=plan, steps=6 + round(seconds / predicted_s)))
        except PlannerError as error:
            rows.append(Row(builder, samples, config, failure=first_line(error)))
            continue
        measured_s = result.minibatch_size / result.samples_per_s
        disturbed = disturbance_words(profile) or ""
        rows.append(
            Row(builder, samples, config, disturbed, predicted_s=predicted_s, measured_s=measured_s)
        )
    return rows


def _table(rows: list[Row]) -> str:
    cells = [
        [
            row.model,
            row.samples,
            row.config,
            row.predicted_s,
            row.measured_s,
            row.error,
            row.disturbed,
        ]
        for row in rows
        if not row.failure
    ]
    headers = ("model", "samples", "plan", "predicted, s", "measured, s", "error", "machine")
    table = tabulate(
        cells, headers=headers, floatfmt=("", "", "", ".4f", ".4f", "+.1%", ""), tablefmt="github"
    )
    return table + "".join(
        f"\n- {row.model}, {row.config}: {row.failure}" for row in rows if row.failure
    )


if __name__ == "__main__":
    main()
