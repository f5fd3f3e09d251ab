"""Make the table of judged errors that answers take their intervals from.

    python -m benchmarks.gpu_truth.intervals             # judged_rows.csv
                                                         # -> planner/plan/judged_errors.json
    python -m benchmarks.gpu_truth.intervals --measure   # predicts all rows again first

An interval is the shortest that holds 80% of a set's rows, and of the one that comes next: 0.8 of
n + 1 (Vovk et al., Algorithmic Learning in a Random World, 2005). A kind that several sets belong
to has the interval that holds those of each, so that it keeps its promise for a set that is harder
than the others. Sets of fewer than five rows say nothing of their own, and where a kind has fewer
than twenty, rows with and without divided layers speak together.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.gpu_truth import aceso, amp, bigscience, calculon, dgxc, mist, vtrain
from benchmarks.gpu_truth.rows import Row
from planner.formats.profile import Device
from planner.plan.confidence import Interval, Links, interval_of_kind

ROWS = Path(__file__).with_name("judged_rows.csv")
TABLE = Path(__file__).parents[2] / "planner" / "plan" / "judged_errors.json"
SHARE = 0.8  # of a set's rows that its interval holds
LEAST_ROWS = 5
_FEW_ROWS = 20

# Sets and whether their links between servers were measured.
_SETS: Mapping[str, tuple[Callable[[], Iterator[Row]], str]] = {
    "vtrain": (vtrain.rows, "known"),
    "mist": (mist.rows, "known"),
    "aceso": (aceso.rows, "known"),
    "calculon": (calculon.rows, "known"),
    "dgxc": (dgxc.rows, "data sheet"),
    "amp": (amp.rows, "data sheet"),
    "bigscience": (bigscience.rows, "known"),
    "bigscience by data sheet": (bigscience.rows_by_data_sheet, "data sheet"),
}


@dataclass(frozen=True)
class Judged:
    """A measured run and its prediction."""

    source: str
    gpu: str
    divided: bool
    links: str
    measured_s: float
    predicted_s: float

    @property
    def speed(self) -> float:
        """Measured speed relative to the predicted one."""
        return self.predicted_s / self.measured_s


def interval(speeds: Sequence[float], share: float = SHARE) -> tuple[float, float]:
    """Return the shortest interval that holds this share of the speeds."""
    ordered = sorted(speeds)
    count = min(math.ceil(share * (len(ordered) + 1)), len(ordered))
    starts = range(len(ordered) - count + 1)
    first = min(starts, key=lambda start: ordered[start + count - 1] - ordered[start])
    return ordered[first], ordered[first + count - 1]


def table_of(rows: Sequence[Judged]) -> list[dict[str, object]]:
    """Return the kinds with their intervals; "" stands for all GPUs."""
    kinds = list[dict[str, object]]()
    for gpu in ["", *sorted({row.gpu for row in rows})]:
        for links in ("known", "data sheet"):
            for divided in (False, True):
                near = [row for row in rows if gpu in ("", row.gpu) and row.links == links]
                own = [row for row in near if row.divided == divided]
                few = len(own) < _FEW_ROWS
                if found := _kind([near, own] if few else [own]):
                    kinds.append({"gpu": gpu, "divided": divided, "links": links, **found})
    return kinds


def _kind(groups: Sequence[Sequence[Judged]]) -> dict[str, object]:
    """Return what holds the rows of each set in each group; nothing where all sets are small."""
    ends = list[tuple[float, float]]()
    names = dict[str, int]()
    for rows in groups:
        sets = defaultdict[str, list[float]](list)
        for row in rows:
            sets[row.source].append(row.speed)
        for name, speeds in sets.items():
            if len(speeds) >= LEAST_ROWS:
                ends.append(interval(speeds))
                names[name] = max(len(speeds), names.get(name, 0))
    if not ends:
        return {}
    return {
        "least": math.floor(1000 * min(least for least, _ in ends)) / 1000,
        "most": math.ceil(1000 * max(most for _, most in ends)) / 1000,
        "rows": sum(names.values()),
        "sets": list(names),
    }


def read() -> list[Judged]:
    """Read the rows that were predicted."""
    with ROWS.open(encoding="utf-8") as file:
        return [
            Judged(
                record["source"],
                record["gpu"],
                record["divided"] == "True",
                record["links"],
                float(record["measured_s"]),
                float(record["predicted_s"]),
            )
            for record in csv.DictReader(file)
        ]


def measure() -> Iterator[Judged]:
    """Predict all rows of the sets."""
    for make, links in _SETS.values():
        for row in make():
            found = row.now()
            if found.predicted is not None and found.spec is not None:
                yield Judged(
                    found.source,
                    found.spec.name,
                    is_divided(found.plan),
                    links,
                    found.measured_s,
                    found.predicted.seconds,
                )


def is_divided(plan: str) -> bool:
    """Return whether the words of a plan name several ranks that divide layers."""
    degrees = plan.partition("tp ")[2].partition(", microbatch")[0].partition(" ")[0]
    return degrees.strip(",") not in ("", "1")


def write(rows: Sequence[Judged]) -> None:
    """Write the rows to their file."""
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Judged.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def sets_table(rows: Sequence[Judged]) -> str:
    """Return for each set how many of its rows the interval of their kind holds, and how wide that
    is beside the median error.
    """
    cells = []
    for source, gpu in dict.fromkeys((row.source, row.gpu) for row in rows):
        own = [row for row in rows if (row.source, row.gpu) == (source, gpu)]
        intervals = [_interval_of(row) for row in own]
        held = sum(
            each.least <= row.speed <= each.most for each, row in zip(intervals, own, strict=True)
        )
        width = max((each.most - each.least) / 2 for each in intervals)
        error = median(abs(row.predicted_s / row.measured_s - 1) for row in own)
        cells.append(
            [source, gpu, len(own), f"{error:.1%}", f"{held / len(own):.0%}", f"{width:.1%}"]
        )
    headers = ["set", "GPU", "rows", "median error", "held", "half the width"]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def _interval_of(row: Judged) -> Interval:
    links: Links = "known" if row.links == "known" else "data sheet"
    device = Device(kind="cuda", name=row.gpu)
    return interval_of_kind(device, divided=row.divided, links=links)


def main() -> None:
    """Write the table, and print what it holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="predict all rows again first")
    if parser.parse_args().measure:
        write(list(measure()))
    rows = read()
    kinds = table_of(rows)
    made = {"made_by": "python -m benchmarks.gpu_truth.intervals", "share": SHARE, "kinds": kinds}
    TABLE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(sets_table(rows))


if __name__ == "__main__":
    main()
