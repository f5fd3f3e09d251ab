"""Make the table of judged errors that answers take their intervals from.

    python -m benchmarks.gpu_truth.intervals             # judged_rows.csv
                                                         # -> planner/plan/judged_errors.json
    python -m benchmarks.gpu_truth.intervals --measure   # predicts all rows again first
    python -m benchmarks.gpu_truth.intervals --measure recipes      # those of some sets alone

An interval is the shortest that holds 80% of a set's rows, and of the one that comes next: 0.8 of
n + 1 (Vovk et al., Algorithmic Learning in a Random World, 2005). A kind that several sets belong
to has the interval that holds those of each, and of all together, so that it keeps its promise for
a set that is harder than the others. Fewer than five rows say nothing of their own.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.gpu_truth import (
    aceso,
    amp,
    bigscience,
    calculon,
    dgxc,
    mist,
    nanotron,
    primus,
    recipes,
    vocab_parallel,
    vtrain,
)
from benchmarks.gpu_truth.rows import Row
from planner.formats.names import StackName
from planner.plan.confidence import (
    Interval,
    Kind,
    Links,
    Network,
    interval_of_kind,
    judged_intervals,
)
from planner.profiler.estimated.stacks import find_stack

ROWS = Path(__file__).with_name("judged_rows.csv")
TABLE = Path(__file__).parents[2] / "planner" / "plan" / "judged_errors.json"
SHARE = 0.8  # of a set's rows that its interval holds
LEAST_ROWS = 5
NANOTRON = "nanotron"


@dataclass(frozen=True)
class JudgedSet:
    """Runs, and what joined their GPUs.

    Attributes:
        rows: the runs.
        links: whether their links between servers were measured.
        per_server: GPUs of a server.
        between: what joins several servers.
        stack: whose kernels were estimated; None for those of the program that ran.
    """

    rows: Callable[[], Iterator[Row]]
    links: Links
    per_server: int
    between: Network
    stack: StackName | None = None

    def network(self, gpus: int) -> Network:
        """Return what joins so many GPUs."""
        return "one server" if gpus <= self.per_server else self.between


_SETS: Mapping[str, JudgedSet] = {
    "vtrain": JudgedSet(vtrain.rows, "known", 8, "fast"),
    "mist": JudgedSet(mist.rows, "known", 8, "slow"),
    "aceso": JudgedSet(aceso.rows, "known", 8, "slow"),
    "calculon": JudgedSet(calculon.rows, "known", 8, "fast"),
    "dgxc": JudgedSet(dgxc.rows, "data sheet", 8, "fast"),
    "amp": JudgedSet(amp.rows, "data sheet", 4, "slow"),
    "bigscience": JudgedSet(bigscience.rows, "known", 8, "slow"),
    "bigscience by data sheet": JudgedSet(bigscience.rows_by_data_sheet, "data sheet", 8, "fast"),
    "vocab-parallel": JudgedSet(vocab_parallel.rows_by_estimate, "data sheet", 8, "fast"),
    "primus": JudgedSet(primus.rows, "data sheet", 8, "fast"),
    "recipes": JudgedSet(recipes.rows, "data sheet", 8, "fast", "megatron"),
}


@dataclass(frozen=True)
class Judged:
    """A measured run and its prediction."""

    source: str
    gpu: str
    links: Links
    network: Network
    divided: bool
    replicated: bool
    measured_s: float
    predicted_s: float
    stack: StackName | None = None

    @property
    def speed(self) -> float:
        """Measured speed relative to the predicted one."""
        return self.predicted_s / self.measured_s

    @property
    def kind(self) -> Kind:
        """What was estimated."""
        return Kind(self.gpu, self.links, self.network, self.divided, self.replicated, self.stack)


def interval(speeds: Sequence[float], share: float = SHARE) -> tuple[float, float]:
    """Return the shortest interval that holds this share of the speeds."""
    ordered = sorted(speeds)
    count = min(math.ceil(share * (len(ordered) + 1)), len(ordered))
    starts = range(len(ordered) - count + 1)
    first = min(starts, key=lambda start: ordered[start + count - 1] - ordered[start])
    return ordered[first], ordered[first + count - 1]


def table_of(rows: Sequence[Judged]) -> list[dict[str, object]]:
    """Return the kinds with their intervals, the widest last."""
    members = defaultdict[Kind, list[Judged]](list)
    for row in rows:
        for kind in row.kind.wider():
            members[kind].append(row)
    kinds = sorted(members, key=lambda kind: (kind.gpu == "", str(kind)))
    return [
        {**asdict(kind), **_described(members[kind])}
        for kind in kinds
        if len(members[kind]) >= LEAST_ROWS
    ]


def _described(rows: Sequence[Judged]) -> dict[str, object]:
    """Return what holds these rows, and those of each set among them."""
    sets = defaultdict[str, list[float]](list)
    for row in rows:
        sets[row.source].append(row.speed)
    groups = [speeds for speeds in sets.values() if len(speeds) >= LEAST_ROWS]
    ends = [interval(speeds) for speeds in [*groups, [row.speed for row in rows]]]
    return {
        "least": math.floor(1000 * min(least for least, _ in ends)) / 1000,
        "most": math.ceil(1000 * max(most for _, most in ends)) / 1000,
        "rows": len(rows),
        "sets": sorted(sets),
    }


def read() -> list[Judged]:
    """Read the rows that were predicted."""
    with ROWS.open(encoding="utf-8") as file:
        return [
            Judged(
                record["source"],
                record["gpu"],
                "known" if record["links"] == "known" else "data sheet",
                _network(record["network"]),
                record["divided"] == "True",
                record["replicated"] == "True",
                float(record["measured_s"]),
                float(record["predicted_s"]),
                _stack(record["stack"]),
            )
            for record in csv.DictReader(file)
        ]


def _network(text: str) -> Network:
    known: tuple[Network, ...] = ("one server", "fast", "slow")
    return next(each for each in known if each == text)


def _stack(text: str) -> StackName | None:
    return find_stack(text).name if text else None


def measure(names: Collection[str]) -> Iterator[Judged]:
    """Predict all rows of these sets."""
    for name, judged in _SETS.items():
        for row in judged.rows() if name in names else ():
            found = row.now()
            if found.predicted is None or found.spec is None:
                continue
            yield Judged(
                found.source,
                found.spec.name,
                judged.links,
                judged.network(_gpus(found.job)),
                is_divided(found.plan),
                is_replicated(found.plan),
                found.measured_s,
                round(found.predicted.seconds, 5),
                judged.stack,
            )
    if NANOTRON in names:
        yield from _of_nanotron()


def _of_nanotron() -> Iterator[Judged]:
    runs = [run for run in nanotron.runs() if run.seconds is not None]
    for each in nanotron.judge(nanotron.H100, runs, nanotron.EAGER):
        run = each.run
        yield Judged(
            NANOTRON,
            nanotron.H100.name,
            "known",
            "one server" if run.gpus <= nanotron.PER_SERVER else "fast",
            run.llama.tensor > 1,
            run.replicas > 1,
            round(each.measured_s, 7),
            round(each.seconds, 7),
        )


def _gpus(job: str) -> int:
    """Return the GPUs that the words of a job name; one server's where they name none."""
    found = re.search(r"\b(\d+) (?:GPUs|T4|L4|A10G|A100|H100|G?B200|MI300X)", job, re.I)
    return 1 if found is None else int(found[1])


def is_divided(plan: str) -> bool:
    """Return whether the words of a plan name several ranks that divide layers."""
    degrees = plan.partition("tp ")[2].partition(", microbatch")[0].partition(" ")[0]
    return degrees.strip(",") not in ("", "1")


def is_replicated(plan: str) -> bool:
    """Return whether the words of a plan name several replicas, in all or by stage."""
    named = re.search(r"\bdp (\d+)|stages x([\d,]+)", plan)
    if named is None:
        return False
    return any(count != "1" for count in (named[1] or named[2]).strip(",").split(","))


def write(rows: Sequence[Judged]) -> None:
    """Write the rows to their file."""
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Judged.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def sets_table(rows: Sequence[Judged]) -> str:
    """Return for each set how many of its rows the intervals of their kinds hold, and how wide
    these are beside the median error.
    """
    cells = []
    for source, gpu in dict.fromkeys((row.source, row.gpu) for row in rows):
        own = [row for row in rows if (row.source, row.gpu) == (source, gpu)]
        held, width, error = promise(own)
        cells.append([source, gpu, len(own), f"{error:.1%}", f"{held:.0%}", f"{width:.1%}"])
    headers = ["set", "GPU", "rows", "median error", "held", "half the width"]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def promise(rows: Sequence[Judged]) -> tuple[float, float, float]:
    """Return the share of rows that their intervals hold, half of the intervals' median width, and
    the median error.
    """
    intervals = [_interval_of(row) for row in rows]
    held = sum(
        each.least <= row.speed <= each.most for each, row in zip(intervals, rows, strict=True)
    )
    width = median((each.most - each.least) / 2 for each in intervals)
    error = median(abs(row.predicted_s / row.measured_s - 1) for row in rows)
    return held / len(rows), width, error


def _interval_of(row: Judged) -> Interval:
    return interval_of_kind(row.kind)


def main() -> None:
    """Write the table, and print what it holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*_SETS, NANOTRON]
    parser.add_argument(
        "--measure",
        nargs="*",
        choices=every,
        metavar="SET",
        help="predict the rows of these sets again first, or all",
    )
    wanted = parser.parse_args().measure
    if wanted is not None:
        again = list(measure(wanted or every))
        sources = {row.source for row in again}
        write([*(row for row in read() if row.source not in sources), *again])
    rows = read()
    kinds = table_of(rows)
    made = {"made_by": "python -m benchmarks.gpu_truth.intervals", "share": SHARE, "kinds": kinds}
    TABLE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    judged_intervals.cache_clear()  # the table before was read where rows were priced
    print(sets_table(rows))


if __name__ == "__main__":
    main()
