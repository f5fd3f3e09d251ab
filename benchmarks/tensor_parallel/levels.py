"""Compare predictions with emulated runs of groups of two ranks within hosts, on two or three hosts. See README.md.

python -m benchmarks.tensor_parallel.levels --seed 1 --save
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.drawn_cases import Compared, asked
from benchmarks.kept import ROOT, Results, between_marks
from benchmarks.testbed.bed import Testbed, TestbedError, testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, emulate, fitting_scale
from benchmarks.testbed.measure import described, train_s
from benchmarks.testbed.predict import balanced_stages
from planner.analysis.given_plan import price
from planner.api.running import estimate
from planner.errors import PlannerError, first_line
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan_parts import config_of
from planner.formats.profile import Profile
from planner.schedule.registry import SCHEDULES, find
from planner.units import parse_bandwidth

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
RANKS = 2  # of a group, and GPUs of a host
MODELS = {"profiles/gpt2/model.py": "gpt2", "benchmarks/tensor_parallel/model.py:wide": "wide"}
NAMES = MODELS | {"benchmarks/tensor_parallel/model.py:experts": "experts"}  # of all that may run
DEVICES, SAMPLES = ("t4", "v100", "a100"), (4, 8, 16)
RATES, FASTER = ("10Gbps", "25Gbps", "50Gbps"), (2, 4)
MESSAGE_BYTES = 1_000_000  # of messages that links are measured with
HEADERS = ("model", "samples", "device", "hosts, links", "plan", "predicted, s", "emulated, s", "error")


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
    degrees: tuple[int, ...] = ()  # of each stage; none where all have groups

    @property
    def tensor(self) -> tuple[int, ...]:
        """Ranks of a group of each stage."""
        return tuple(self.degrees) or (RANKS,) * len(self.replicas)

    @property
    def there(self) -> Cluster:
        """The cluster; with one rate, each GPU is a host of its own, because levels have groups of one size."""
        sizes = (RANKS, self.hosts) if len(self.rates) > 1 else (self.hosts,)
        return hierarchical_cluster(sizes, [parse_bandwidth(rate) for rate in self.rates])

    @property
    def plan(self) -> str:
        """The plan in words."""
        config = config_of(tuple(self.replicas), degrees=self.tensor)
        return f"{config} {self.schedule}" + (f" x{self.microbatches}" if self.microbatches > 1 else "")

    @property
    def cells(self) -> list[object]:
        """The row of the table."""
        where = f"{self.hosts}, {', '.join(self.rates)}" + (f" ({self.links})" if self.links else "")
        row: list[object] = [NAMES[self.model], self.samples, self.device, where, self.plan]
        if self.failure or not self.measured_s:
            return [*row, self.failure]
        return [*row, self.predicted_s, self.measured_s, self.error]


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare(__doc__, "levels", draw, cases=8)


def compare(doc: str | None, name: str, draw: Callable[[int, int], list[Case]], cases: int) -> None:
    """Run the cases of a draw as the command line asks; `name`: of their tables, and of the marks in the README."""
    found = asked(doc, lambda *of: [case.cells[:5] for case in draw(*of)], cases=cases, seconds=8.0)
    if found is None:
        return
    arguments, chosen = found
    drawn = draw(arguments.seed, arguments.cases)
    results, part = Results(FOLDER, save=arguments.save), f"{name}, seed {arguments.seed}"
    for number, case in _measured(drawn, chosen, arguments.seconds):
        results.add(part, str(number), case)
        print(f"{number + 1}/{len(drawn)}: {case.cells}", file=sys.stderr, flush=True)
    tables = []
    for each in results.parts(name) if arguments.save else [part]:
        kept = results.records(each, Case)
        about = f"On emulated devices, {results.about(each)}, {each.partition(', ')[2]}:"
        tables.append(f"{about}\n\n{_table([kept[key] for key in sorted(kept, key=int)])}")
    text = "\n\n".join(tables)
    print(text)
    if arguments.save:
        around = f"<!-- {name}: written by benchmarks.tensor_parallel.{name} -->", f"<!-- end of {name} -->"
        README.write_text(between_marks(README.read_text(encoding="utf-8"), around, text), encoding="utf-8")


def draw(seed: int, count: int) -> list[Case]:
    """Return random cases: the same ones for the same seed, and the first ones of a longer list."""
    return list(islice(endless(random.Random(seed)), count))


def endless(rng: random.Random) -> Iterator[Case]:
    """Yield random cases."""
    while True:
        yield _draw(rng)


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


def _measured(cases: Sequence[Case], chosen: Iterable[int], seconds: float) -> Iterable[tuple[int, Case]]:
    """Run the cases of these numbers on one set of hosts; after a failure on a new one."""
    left = list(chosen)
    for number in left:
        _profile(cases[number])
    while left:
        with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(RANKS * 3) as bed:
            while left:
                number = left.pop(0)
                try:
                    yield number, run(bed, cases[number], seconds, Path(folder) / str(number))
                except PlannerError as error:
                    yield number, replace(cases[number], failure=f"{type(error).__name__}: {first_line(error)}")
                    if isinstance(error, TestbedError):
                        break  # its workers may hang


def run(bed: Testbed, case: Case, seconds: float, folder: Path) -> Case:
    """Emulate the case's model in `folder`, and train its plan for about `seconds` after the start-up."""
    profile = _profile(case)
    scale = fitting_scale(profile, case.there, 2 * LINK_BYTES_PER_S / case.faster)
    emulated = emulate(profile, scale, folder)
    links = bed.links(scale.cluster(case.there), MESSAGE_BYTES, scale.byte_factor)
    names = [layer.name for layer in emulated.profile.layers]
    ends = [0, *accumulate(balanced_stages(emulated.profile, len(case.replicas)))]
    stages = tuple(
        OwnStage(layers=tuple(names[start:end]), replicas=replicas, tensor=degree)
        for (start, end), replicas, degree in zip(pairwise(ends), case.replicas, case.tensor, strict=True)
    )
    schedule = find(case.schedule)
    own = OwnPlan(stages=stages, schedule=schedule, microbatches=case.microbatches if schedule.divides else None)
    with scaled_buckets(scale.byte_factor):
        plan = price(emulated.profile, links, own)
    measured_s = train_s(bed, emulated, plan, seconds)
    said = described(links).partition(", ")[2]
    return replace(case, predicted_s=plan.predicted.seconds_per_minibatch, measured_s=measured_s, links=said)


def _table(rows: Sequence[Case]) -> str:
    ran = [row for row in rows if not row.failure]
    formats = ("", "", "", "", "", ".4f", ".4f", "+.1%")
    lines = [tabulate([row.cells for row in ran], HEADERS, tablefmt="github", floatfmt=formats)]
    if ran:
        errors = [abs(row.error) for row in ran]
        lines.append(f"\nmedian error {median(errors):.1%}, worst {max(errors):.1%} over {len(ran)} runs")
    return "\n".join([*lines, *(f"- {row.cells[:5]}: {row.failure}" for row in rows if row.failure)])


if __name__ == "__main__":
    main()
