"""Compare predictions with measurements of cases that nobody chose. See README.md in this folder.

python -m benchmarks.testbed.drawn --seed 1 --save
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.drawn_cases import CaseT, Compared, RowT, compare
from benchmarks.kept import ROOT
from benchmarks.testbed.bed import Testbed, TestbedError, testbed
from benchmarks.testbed.cases import Case, run_case
from benchmarks.testbed.emulate import LINK_BYTES_PER_S, as_chain
from planner.errors import PlannerError, first_line
from planner.formats.cluster import hierarchical_cluster
from planner.formats.profile import load_profile
from planner.schedule.registry import SCHEDULES, find

PAGE = ROOT / "docs" / "benchmarks.md"
HEADERS = ("model", "devices", "plan", "predicted, s", "measured, s", "error")
FORMATS = ("", "", "", ".4f", ".4f", "+.1%")

FLAT = (2, 3, 4, 4, 5, 6, 8, 8, 16)  # devices
LEVELS = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (4, 4))  # devices per server, servers
RATES = ("200Mbps", "300Mbps", "500Mbps", "1Gbps", "1Gbps", "2Gbps", "4Gbps", "10Gbps")
FASTER = (2, 4)  # links within servers, as a multiple of those between them
MESSAGE_BYTES = 1_000_000  # of messages that links are measured with: many clusters are


@dataclass(frozen=True)
class Row(Compared):
    """A drawn case and what became of it."""

    model: str
    devices: str
    plan: str
    schedule: str = ""
    levels: int = 1
    replicated: bool = False
    compress: str = "none"


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare_cases(__doc__, "drawn", draw, cases=30)


def compare_cases(
    doc: str | None, name: str, draw: Callable[[int, int], list[Case]], cases: int
) -> None:
    """Run the cases of a draw as the command line asks; `name`: of their table and of its marks in
    the docs.
    """
    compare(
        doc,
        f"testbed.{name}",
        Row,
        draw=draw,
        words=_described,
        run=measured,
        table=report,
        cases=cases,
        seconds=8.0,
        page=PAGE,
        whole=True,
    )


def draw(seed: int, count: int) -> list[Case]:
    """Return random cases: the same ones for the same seed, and the first ones of a longer list."""
    return list(islice(endless(seed), count))


def endless(seed: int) -> Iterator[Case]:
    """Yield random cases."""
    rng = random.Random(seed)
    paths = sorted((ROOT / "profiles").glob("*/cpu.json"))
    blocks = {path.parent.name: len(as_chain(load_profile(path))) for path in paths}
    while True:
        yield _draw(rng, blocks)


def _draw(rng: random.Random, blocks: Mapping[str, int]) -> Case:
    """Draw a case; `blocks`: of each model, the number of its emulated layers."""
    model = rng.choice(list(blocks))
    if rng.random() < 2 / 3:
        sizes: tuple[int, ...] = (rng.choice(FLAT),)
        rates: tuple[str, ...] = (rng.choice(RATES),)
        link_bytes_per_s = LINK_BYTES_PER_S
    else:
        sizes, faster, outer = rng.choice(LEVELS), rng.choice(FASTER), rng.choice(RATES)
        value = float(outer.removesuffix("Mbps").removesuffix("Gbps")) * faster
        rates, link_bytes_per_s = (f"{value:g}{outer[-4:]}", outer), 2 * LINK_BYTES_PER_S / faster
    schedule = rng.choice(SCHEDULES)
    microbatches = rng.choice((2, 4, 8)) if schedule.divides else 1
    case = Case(model, sizes, rates, None, schedule.name, microbatches, link_bytes_per_s)
    gpus = hierarchical_cluster(sizes, [1.0] * len(sizes)).gpus
    if schedule.chunked:
        # Each of the GPUs has several stages, which only a search places.
        return case.given(chunks=schedule.fixed_chunks or 2, seed=rng.randrange(2**31))
    if rng.random() < 0.4:
        return case.given(max_stages=rng.randint(1, min(gpus, 4)), seed=rng.randrange(2**31))
    config = _config(rng, gpus, min(gpus, 5, blocks[model] // 2))
    depths = schedule.depths(config, microbatches)
    if not all(
        schedule.versions_suffice(microbatches, r, d) for r, d in zip(config, depths, strict=True)
    ):
        return case.given(max_stages=len(config), seed=rng.randrange(2**31))
    # Of a number of layers in proportion to these, or else of equal time.
    uneven = tuple(rng.uniform(0.7, 1.4) for _ in config) if rng.random() < 0.5 else None
    return case.given(config=config, layers=uneven)


def _config(rng: random.Random, gpus: int, most: int) -> tuple[int, ...]:
    """Return the replicas of up to `most` stages, on all GPUs; each way to divide them is as
    likely.
    """
    stages = rng.randint(1, most)
    ends = [0, *sorted(rng.sample(range(1, gpus), stages - 1)), gpus]
    return tuple(end - start for start, end in pairwise(ends))


def measured(
    cases: Sequence[Case], chosen: Sequence[int], seconds: float
) -> Iterator[tuple[int, Row]]:
    """Run the cases of these numbers."""
    most = max(
        (hierarchical_cluster(cases[n].sizes, [1.0] * len(cases[n].sizes)).gpus for n in chosen),
        default=0,
    )

    def row(case: Case) -> Row:
        model, devices, plan = _described(case)
        return Row(
            model,
            devices,
            plan,
            schedule=case.schedule,
            levels=len(case.sizes),
            compress=case.compress,
        )

    def run(bed: Testbed, case: Case, folder: Path) -> Row:
        ran = run_case(bed, case, seconds, folder, MESSAGE_BYTES)
        return _ran(
            row(case), ran.cluster, f"{ran.config} {ran.schedule}", ran.predicted_s, ran.measured_s
        )

    return on_hosts(most, cases, chosen, run, row)


def on_hosts(
    hosts: int,
    cases: Sequence[CaseT],
    chosen: Iterable[int],
    run: Callable[[Testbed, CaseT, Path], RowT],
    row: Callable[[CaseT], RowT],
) -> Iterator[tuple[int, RowT]]:
    """Run the cases of these numbers on one set of hosts, after a failure on a new one; yield each
    with its row.

    Args:
        hosts: how many.
        cases: all.
        chosen: their numbers.
        run: returns the row of a case, whose files go to a folder.
        row: that of a case which failed, without the failure.
    """
    left = list(chosen)
    while left:
        with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(hosts) as bed:
            while left:
                number = left.pop(0)
                try:
                    yield number, run(bed, cases[number], Path(folder) / str(number))
                except PlannerError as error:
                    yield (
                        number,
                        replace(
                            row(cases[number]),
                            failure=f"{type(error).__name__}: {first_line(error)}",
                        ),
                    )
                    if isinstance(error, TestbedError):
                        break  # its workers may hang


def _ran(row: Row, devices: str, plan: str, predicted_s: float, measured_s: float) -> Row:
    replicated = any(count != "1" for count in plan.split()[0].split("-"))
    plan += _sent_as(row.compress)
    said = asdict(row) | {"devices": devices, "plan": plan, "replicated": replicated}
    return Row(**said | {"predicted_s": predicted_s, "measured_s": measured_s})


def _described(case: Case) -> tuple[str, str, str]:
    plan = "solved" if case.config is None else "-".join(map(str, case.config))
    if case.max_stages is not None:
        plan += f" for {case.max_stages} stages"
    schedule = case.schedule + (f" x{case.microbatches}" if find(case.schedule).divides else "")
    return (
        case.model,
        f"{'x'.join(map(str, case.sizes))}, {', '.join(case.bandwidths)}",
        f"{plan} {schedule}{_sent_as(case.compress)}",
    )


def _sent_as(compress: str) -> str:
    return "" if compress == "none" else f", {compress}"


def report(rows: Sequence[Row], about: str) -> str:
    """Return the table, its summary, and summaries of the rows with something in common."""
    ran = [row for row in rows if not row.failure]
    table = tabulate([_cells(row) for row in rows], HEADERS, tablefmt="github", floatfmt=FORMATS)
    lines = [f"Cases drawn at random, on emulated devices, {about}:", "", table, ""]
    if ran:
        lines.append(
            f"predicted: {_errors(ran)} over {len(ran)} runs; {len(rows) - len(ran)} did not start"
        )
        groups: defaultdict[str, list[Row]] = defaultdict(list)
        for row in ran:
            groups["on one level" if row.levels == 1 else "on two levels"].append(row)
            groups["with replicas" if row.replicated else "without replicas"].append(row)
            groups[row.schedule].append(row)
            if row.compress != "none":
                groups[row.compress].append(row)
        lines += [
            "",
            *(
                f"- {name}: {_errors(some)} over {len(some)}"
                for name, some in sorted(groups.items())
            ),
        ]
    return "\n".join(lines)


def _errors(rows: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in rows]
    return f"median error {median(errors):.1%}, worst {max(errors):.1%}"


def _cells(row: Row) -> list[object]:
    if row.failure:
        return [row.model, row.devices, row.plan, None, None, row.failure]
    return [row.model, row.devices, row.plan, row.predicted_s, row.measured_s, row.error]


if __name__ == "__main__":
    main()
