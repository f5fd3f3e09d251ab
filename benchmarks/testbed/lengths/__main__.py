"""Train GNMT-8 on emulated devices in buckets of similar length, and padded to the longest. See
README.md.

python -m benchmarks.testbed.lengths --save
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from tabulate import tabulate

from benchmarks.drawn_cases import Compared
from benchmarks.kept import Results, marks, write_between
from benchmarks.testbed.bed import Testbed, TestbedError, testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import fitting_scale
from benchmarks.testbed.lengths.emulate import emulate
from benchmarks.testbed.lengths.sentences import DISTRIBUTIONS, pairs
from benchmarks.testbed.predict import given_plan
from planner.errors import first_line
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.formats.timeline import Timeline
from planner.options.training import RunOptions
from planner.reporting.trace import load_run
from planner.solver import search_plan as solve
from planner.units import parse_bandwidth
from planner.workers.job import Job

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
PROFILE = FOLDER / "gnmt8-v100.json"
BANDWIDTH = "25Gbps"
MICROBATCHES = 128  # per epoch: about as many as a plan is made for
DATA_PARALLELISM = "data parallelism"
SCHEDULES = ("1f1b", "1f1b-flush", DATA_PARALLELISM)


@dataclass(frozen=True)
class Case:
    """What runs on how many devices."""

    devices: int
    schedule: str  # or data parallelism
    order: str  # of the sentences: see `layers.Run`
    made_for: str = ""  # the order that the plan's stages were chosen for, if it is another one
    distribution: str = "wmt"
    bandwidth: str = BANDWIDTH
    times: int = 2  # as many microbatches as devices, where minibatches are divided

    @property
    def name(self) -> str:
        """Name in results and on the command line."""
        made_for = f" for {self.made_for}" if self.made_for else ""
        return (
            f"{self.devices} {self.schedule} {self.order}{made_for} {self.distribution} "
            f"{self.bandwidth} {self.times}"
        )

    @property
    def microbatches(self) -> int:
        """Microbatches of a minibatch."""
        return 1 if self.schedule == "1f1b" else self.times * self.devices


@dataclass(frozen=True)
class Row(Compared):
    """A run beside its prediction, per minibatch of so many samples."""

    devices: int
    schedule: str
    order: str
    made_for: str
    distribution: str
    bandwidth: str
    times: int
    config: str
    samples: int

    @property
    def samples_per_s(self) -> float:
        """Measured."""
        return self.samples / self.measured_s


def cases() -> Iterator[Case]:
    """List the cases of the table."""
    for devices in (4, 8):
        for schedule in SCHEDULES:
            for order in ("padded", "buckets"):
                yield Case(devices, schedule, order)
            if schedule != DATA_PARALLELISM:
                yield Case(devices, schedule, "buckets", "padded")


def drawn(seed: int, count: int) -> list[Case]:
    """Draw cases that nobody chose, the same for the same seed."""
    draw = random.Random(seed)
    return [
        Case(
            devices=draw.choice((2, 4, 6, 8)),
            schedule=draw.choice((*SCHEDULES, "gpipe", "2bw")),
            order=draw.choice(("buckets", "random")),
            distribution=draw.choice(tuple(DISTRIBUTIONS)),
            bandwidth=draw.choice(("5Gbps", "10Gbps", "25Gbps", "50Gbps")),
            times=draw.choice((1, 2, 4)),
        )
        for _ in range(count)
    ]


def main() -> None:
    """Run the cases, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", action="store_true", help="keep each run, and write the table in README.md"
    )
    parser.add_argument("--only", help="those cases whose name has this text")
    parser.add_argument(
        "--seed", type=int, help="instead of the table's cases, draw some with this seed"
    )
    parser.add_argument(
        "--cases", type=int, default=8, help="how many are drawn (default: %(default)s)"
    )
    arguments = parser.parse_args()
    results = Results(FOLDER, save=arguments.save)
    part = "runs" if arguments.seed is None else f"drawn {arguments.seed}"
    asked = list(cases()) if arguments.seed is None else drawn(arguments.seed, arguments.cases)
    chosen = [case for case in asked if arguments.only is None or arguments.only in case.name]
    rows = results.measured(part, Row, measured(chosen))
    print(table([rows[case.name] for case in asked if case.name in rows]))
    if arguments.save:
        for name in results.parts(""):
            text = table(list(results.records(name, Row).values()))
            around = marks("lengths" if name == "runs" else "drawn lengths", "lengths")
            write_between(README, around, f"{results.about(name)}\n\n{text}")


def measured(cases: Sequence[Case]) -> Iterator[tuple[str, Row]]:
    """Run cases, those of as many devices on one set of hosts."""
    for devices in sorted({case.devices for case in cases}):
        with testbed(devices) as bed, tempfile.TemporaryDirectory(prefix="lengths-") as folder:
            for case in cases:
                if case.devices == devices:
                    yield case.name, run(bed, case, Path(folder))


def run(bed: Testbed, case: Case, folder: Path) -> Row:
    """Plan for the case's sentences, and train an epoch of them."""
    profile = load_profile(PROFILE)
    there = flat_cluster(case.devices, parse_bandwidth(case.bandwidth))
    scale = fitting_scale(profile, there)
    links = bed.links(scale.cluster(there), byte_factor=scale.byte_factor)
    size = profile.microbatch_size or 1
    samples = pairs(DISTRIBUTIONS[case.distribution], MICROBATCHES * size)
    with scaled_buckets(scale.byte_factor):
        emulated = emulate(profile, scale, samples, case.order, folder / "model")
        if case.made_for:
            other = emulate(profile, scale, samples, case.made_for, folder / "other")
            plan = with_stages_of(plan_of(case, other.profile, links), emulated.profile, links)
        else:
            plan = plan_of(case, emulated.profile, links)
        row = Row(**asdict(case), config=plan.config, samples=size * plan.microbatches)
        try:
            epoch = MICROBATCHES // plan.microbatches
            # Without lengths all minibatches are alike.
            counted = epoch // 2 if case.order == "padded" else epoch
            measured_s = train_s(
                bed, emulated.path, plan, links, scale.byte_factor, folder, counted
            )
        except TestbedError as error:
            return replace(row, failure=first_line(error))
    return replace(row, predicted_s=plan.predicted.seconds_per_minibatch, measured_s=measured_s)


def plan_of(case: Case, profile: Profile, links: Cluster) -> Plan:
    """Return the best plan of the case's schedule, or data parallelism."""
    if case.schedule == DATA_PARALLELISM:
        return given_plan(
            profile, links, [len(profile.layers)], (case.devices,), "1f1b-flush", case.microbatches
        )
    return solve(profile, links, schedule=case.schedule, microbatches=case.microbatches)


def with_stages_of(plan: Plan, profile: Profile, links: Cluster) -> Plan:
    """Return a plan with the same stages and replicas, priced for another profile."""
    stages = [len(stage.layers) for stage in plan.stages]
    return given_plan(profile, links, stages, plan.replicas, plan.schedule.name, plan.microbatches)


def train_s(
    bed: Testbed,
    path: Path,
    plan: Plan,
    links: Cluster,
    byte_factor: float,
    folder: Path,
    counted: int,
) -> float:
    """Train, and return the seconds per minibatch over so many, which begin when the pipeline is
    full.
    """
    filling = math.ceil(2 * plan.stages[0].in_flight * plan.stages[0].replicas / plan.microbatches)
    steps = counted + 2 * filling
    trace = folder / "trace.json"
    options = RunOptions(trace=str(trace), trace_minibatches=steps)
    job = Job(model=str(path), plan=plan, steps=steps, run_options=options)
    bed.train(job, links, byte_factor, 120 + 4 * steps * plan.predicted.seconds_per_minibatch)
    ends_s = completions_s(load_run(trace))
    return (ends_s[filling + counted - 1] - ends_s[filling - 1]) / counted


def completions_s(timeline: Timeline) -> Sequence[float]:
    """Return when the first stage had done each minibatch and all before it."""
    found: dict[int, float] = {}
    for event in timeline.events.rows():
        if event.kind == "backward" and event.stage == 0:
            found[event.minibatch] = max(found.get(event.minibatch, 0.0), event.end_s)
    return list(accumulate((found[minibatch] for minibatch in sorted(found)), max))


def table(rows: list[Row]) -> str:
    """Return the runs with their speed-up over padding."""
    padded = {_like(row): row for row in rows if row.order == "padded" and not row.failure}
    cells = []
    for row in rows:
        if row.failure:
            continue
        order = f"{row.order}, plan for {row.made_for}" if row.made_for else row.order
        before = padded.get(_like(row))
        cells.append(
            [
                row.devices,
                row.bandwidth,
                row.distribution,
                row.schedule,
                order,
                row.config,
                row.samples / row.predicted_s,
                row.samples_per_s,
                row.error,
                None if before is None else row.samples_per_s / before.samples_per_s,
            ]
        )
    headers = (
        "devices",
        "links",
        "lengths",
        "schedule",
        "batches",
        "plan",
        "predicted, samples/s",
        "measured",
    )
    formats = ("", "", "", "", "", "", ".1f", ".1f", "+.1%", ".2f")
    failed = [
        f"\n- {row.devices} {row.schedule} {row.order}: {row.failure}"
        for row in rows
        if row.failure
    ]
    return tabulate(
        cells, (*headers, "error", "over padded"), floatfmt=formats, tablefmt="github"
    ) + "".join(failed)


def _like(row: Row) -> tuple[object, ...]:
    return row.devices, row.schedule, row.distribution, row.bandwidth, row.times


if __name__ == "__main__":
    main()
