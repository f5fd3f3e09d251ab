"""Compare predictions with emulated runs of groups of two ranks within hosts, on two or three
hosts. See README.md.

python -m benchmarks.testbed.tensor_parallel.levels --seed 1 --save
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.drawn_cases import Compared, compare
from benchmarks.kept import ROOT
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.drawn import on_hosts
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import described, train_s
from benchmarks.testbed.predict import balanced_stages
from planner.analysis.given_plan import price
from planner.api.running import estimate
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan_parts import config_of
from planner.formats.profile import Profile
from planner.schedule.registry import SCHEDULES, find
from planner.units import parse_bandwidth

RANKS = 2  # of a group, and GPUs of a host
MODELS = {
    "profiles/gpt2/model.py": "gpt2",
    "benchmarks/testbed/tensor_parallel/model.py:wide": "wide",
}
DEVICES, SAMPLES = ("t4", "v100", "a100"), (4, 8, 16)
RATES, FASTER = ("10Gbps", "25Gbps", "50Gbps"), (2, 4)
MESSAGE_BYTES = 1_000_000  # of messages that links are measured with
HEADERS = (
    "model",
    "samples",
    "device",
    "hosts, links",
    "plan",
    "predicted, s",
    "emulated, s",
    "error",
)


@dataclass(frozen=True)
class Case(Compared):
    """A drawn plan, and what became of it."""

    model: str
    samples: int
    device: str
    hosts: int
    rates: tuple[str, ...]  # within a host and between hosts
    replicas: tuple[int, ...]  # of each stage
    schedule: str
    microbatches: int
    faster: int
    links: str = ""

    @property
    def tensor(self) -> tuple[int, ...]:
        """Ranks of a group of each stage."""
        return (RANKS,) * len(self.replicas)

    @property
    def there(self) -> Cluster:
        """The cluster."""
        rates = [parse_bandwidth(rate) for rate in self.rates]
        return hierarchical_cluster((RANKS, self.hosts), rates)

    @property
    def plan(self) -> str:
        """The plan in words."""
        config = config_of(tuple(self.replicas), degrees=self.tensor)
        return f"{config} {self.schedule}" + (
            f" x{self.microbatches}" if self.microbatches > 1 else ""
        )

    @property
    def cells(self) -> list[object]:
        """The row of the table."""
        where = f"{self.hosts}, {', '.join(self.rates)}" + (
            f" ({self.links})" if self.links else ""
        )
        row: list[object] = [MODELS[self.model], self.samples, self.device, where, self.plan]
        if self.failure or not self.measured_s:
            return [*row, self.failure]
        return [*row, self.predicted_s, self.measured_s, self.error]


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare(
        __doc__,
        "testbed.tensor_parallel.levels",
        Case,
        draw=draw,
        words=lambda case: case.cells[:5],
        run=_measured,
        table=_table,
        cases=8,
        seconds=8.0,
    )


def draw(seed: int, count: int) -> list[Case]:
    """Return random cases: the same ones for the same seed, and the first ones of a longer list."""
    rng = random.Random(seed)
    return [_draw(rng) for _ in range(count)]


def _draw(rng: random.Random) -> Case:
    hosts, outer, faster = rng.choice((2, 3)), rng.choice(RATES), rng.choice(FASTER)
    inner = f"{float(outer.removesuffix('Gbps')) * faster:g}Gbps"
    ends = [0, *sorted(rng.sample(range(1, hosts), rng.randrange(hosts))), hosts]
    schedule = rng.choice([each for each in SCHEDULES if not each.chunked])
    return Case(
        model=rng.choice(list(MODELS)),
        samples=rng.choice(SAMPLES),
        device=rng.choice(DEVICES),
        hosts=hosts,
        rates=(inner, outer),
        replicas=tuple(end - start for start, end in pairwise(ends)),
        schedule=schedule.name,
        microbatches=rng.choice((4, 8)) if schedule.divides else 1,
        faster=faster,
    )


def _profile(case: Case) -> Profile:
    return _estimated(case.model, case.samples, case.device, max(case.tensor))


@cache
def _estimated(model: str, samples: int, device: str, degree: int) -> Profile:
    return estimate(ROOT / model, device=device, batch_size=samples, tensor=(degree,))


def _measured(
    cases: Sequence[Case], chosen: Sequence[int], seconds: float
) -> Iterator[tuple[int, Case]]:
    for number in chosen:
        _profile(cases[number])  # before there are hosts
    return on_hosts(RANKS * 3, cases, chosen, partial(run, seconds=seconds), lambda case: case)


def run(bed: Testbed, case: Case, folder: Path, seconds: float) -> Case:
    """Emulate the case's model in `folder`, and train its plan for about `seconds` after the
    start-up.
    """
    profile = _profile(case)
    scale = fitting_scale(profile, case.there, 2 * LINK_BYTES_PER_S / case.faster)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(case.there), MESSAGE_BYTES, scale.byte_factor)
    names = [layer.name for layer in emulated.profile.layers]
    ends = [0, *accumulate(balanced_stages(emulated.profile, len(case.replicas)))]
    stages = tuple(
        OwnStage(layers=tuple(names[start:end]), replicas=replicas, tensor=degree)
        for (start, end), replicas, degree in zip(
            pairwise(ends), case.replicas, case.tensor, strict=True
        )
    )
    schedule = find(case.schedule)
    own = OwnPlan(
        stages=stages,
        schedule=schedule,
        microbatches=case.microbatches if schedule.divides else None,
    )
    with scaled_buckets(scale.byte_factor):
        plan = price(emulated.profile, links, own)
    measured_s = train_s(bed, emulated, plan, seconds)
    said = described(links).partition(", ")[2]
    return replace(
        case, predicted_s=plan.predicted.seconds_per_minibatch, measured_s=measured_s, links=said
    )


def _table(rows: Sequence[Case], about: str) -> str:
    ran = [row for row in rows if not row.failure]
    formats = ("", "", "", "", "", ".4f", ".4f", "+.1%")
    table = tabulate([row.cells for row in ran], HEADERS, tablefmt="github", floatfmt=formats)
    lines = [f"On emulated devices, {about}:\n", table]
    if ran:
        errors = [abs(row.error) for row in ran]
        lines.append(
            f"\nmedian error {median(errors):.1%}, worst {max(errors):.1%} over {len(ran)} runs"
        )
    return "\n".join(
        [*lines, *(f"- {row.cells[:5]}: {row.failure}" for row in rows if row.failure)]
    )


if __name__ == "__main__":
    main()
