"""What a day of a spot market leaves of a run: simulated over a published trace. See ../README.md.

python -m benchmarks.published.spot           # simulate, print the table, and draw
                                              # docs/images/elastic-spot.svg
python -m benchmarks.published.spot --solve   # solve for all numbers of instances anew before
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

import planner
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.kept import ROOT
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.reporting.svg import CURVES, Font, document, line, text

FOLDER = Path(__file__).parent
PICTURE = ROOT / "docs" / "images" / "elastic-spot.svg"
MOST, LINK, GPU = 12, "5Gbps", "t4"  # instances; g4dn.xlarge: one T4, and 5 Gbit/s that it keeps up
MODEL = Gpt("gpt2-medium", 24, 1024, 16, 4096, 50257, 512)
MICROBATCH, MICROBATCHES = 2, 32
LINK_BYTES_PER_S = 5e9 / 8  # of each instance, and of the file server that has the checkpoints
BYTES_PER_PARAMETER = 12  # of AdamW in single precision: weight and two moments
# From the loss of an instance to the first update, without the transfer of state. Measured on CPUs;
# see ../README.md.
RESTART_S = 20.0
COPIES_COST = 0.01  # of the time between two copies
DRAWS = 200  # of which instances are lost
HOUR_S = 3600.0
_Speeds = Mapping[int, float]  # seconds per minibatch, by instances


@dataclass(frozen=True)
class Way:
    """How a run keeps its state."""

    name: str
    copies: int | None  # minibatches between copies in the memories of others; None for none
    # between checkpoints on a disk that all share; None for the best interval (Young 1974)
    checkpoint_s: float | None


WAYS = (
    Way("copies in memory every 10 minibatches, and a checkpoint every 10 minutes", 10, 600.0),
    Way("a checkpoint at the best interval for this trace", None, None),
    Way("a checkpoint every 10 minutes", None, 600.0),
    Way("a checkpoint every hour", None, HOUR_S),
)


def read_trace(path: Path = FOLDER / "instances.csv") -> list[tuple[float, int]]:
    """Return when the number of instances changed, in seconds, and to how many."""
    rows = [
        each.split(",")
        for each in path.read_text(encoding="utf-8").splitlines()
        if not each.startswith("#")
    ]
    points = [(float(second), int(count)) for second, count in rows]
    return [now for before, now in pairwise([(0.0, -1), *points]) if before[1] != now[1]]


def train(
    trace: Sequence[tuple[float, int]],
    end_s: float,
    speeds: _Speeds,
    state_bytes: float,
    way: Way,
    draw: random.Random,
) -> list[tuple[float, float]]:
    """Return how many minibatches are done that need not be done again, at each change of the trace
    and at its end.

    Each change starts all workers again, from the newest state that is left: a copy, unless two
    neighbours of the ring are lost at once or all instances are, or else the newest checkpoint.
    """
    curve, done, on_disk, from_memory = [(0.0, 0.0)], 0.0, 0.0, False
    disk_s = state_bytes / LINK_BYTES_PER_S
    between_s = (end_s - next(second for second, count in trace if count)) / len(trace)
    for (begin_s, count), (change_s, after) in pairwise([*trace, (end_s, trace[-1][1])]):
        if count:
            every_s = way.checkpoint_s or math.sqrt(2 * disk_s * between_s)
            step_s = (
                speeds[count] * (1 + (COPIES_COST if way.copies else 0.0)) * (1 + disk_s / every_s)
            )
            # From memory to memory each moves its own stage, at the same time.
            began_s = begin_s + RESTART_S + (disk_s / count if from_memory else disk_s)
            trained = max(0.0, change_s - began_s) / step_s
            if trained >= every_s / step_s:
                on_disk = done + math.floor(trained * step_s / every_s) * every_s / step_s
            in_memory = done + (math.floor(trained / way.copies) * way.copies if way.copies else 0)
            ended = change_s == end_s
            lost = 0 if ended else max(0, count - after)
            safe = way.copies and after and not _neighbours(count, lost, draw)
            from_memory = bool(safe) and in_memory >= on_disk
            done = done + trained if ended else in_memory if from_memory else on_disk
        curve.append((change_s, done))
    return curve


def _neighbours(count: int, lost: int, draw: random.Random) -> bool:
    """Draw which instances of a ring are lost; return whether two of them are neighbours."""
    gone = set(draw.sample(range(count), lost))
    return any((place + 1) % count in gone for place in gone) and count > 1


def ideal(trace: Sequence[tuple[float, int]], end_s: float, speeds: _Speeds) -> float:
    """Return the minibatches of a run that loses nothing and starts at once."""
    whole = pairwise([*trace, (end_s, 0)])
    return sum((after - begin) / speeds[count] for (begin, count), (after, _) in whole if count)


def solve() -> dict[str, object]:
    """Return the plans for every number of instances, and what they say."""
    profile = estimate_profile(MODEL.training_spec(), MICROBATCH, EstimateOptions(GPU))
    cluster = planner.cluster(profile, gpus=MOST, bandwidth=LINK)
    plan = planner.solve(
        profile,
        cluster,
        schedule="1f1b-flush",
        microbatches=MICROBATCHES,
        survive=MOST - 1,
        time_limit_s=240.0,
    )
    plans = [
        {
            "instances": each.cluster.gpus,
            "plan": each.config,
            "seconds": each.predicted.seconds_per_minibatch,
        }
        for each in (plan, *plan.smaller)
    ]
    parameters = sum(layer.weight_bytes for layer in profile.layers) / 4
    return {"parameters": parameters, "plans": plans}


def main() -> int:
    """Simulate, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solve", action="store_true", help="make the plans anew")
    args = parser.parse_args()
    path = FOLDER / "plans.json"
    if args.solve:
        path.write_text(json.dumps(solve(), indent=1) + "\n", encoding="utf-8")
    found = json.loads(path.read_text(encoding="utf-8"))
    speeds = {each["instances"]: each["seconds"] for each in found["plans"]}
    trace, end_s = read_trace(), 24.5 * HOUR_S
    most = ideal(trace, end_s, speeds)
    rows, curves = [], list[list[tuple[float, float]]]()
    for way in WAYS:
        state_bytes = found["parameters"] * BYTES_PER_PARAMETER
        drawn = [
            train(trace, end_s, speeds, state_bytes, way, random.Random(seed))
            for seed in range(DRAWS)
        ]
        ends = sorted(curve[-1][1] / most for curve in drawn)
        rows.append(
            [
                way.name,
                f"{statistics.median(ends):.0%}",
                f"{ends[DRAWS // 20]:.0%}",
                f"{ends[-1]:.0%}",
            ]
        )
        curves.append(
            min(drawn, key=lambda curve: abs(curve[-1][1] / most - statistics.median(ends)))
        )
    headers = ["state is kept in", "useful work, median", "5% of draws", "best draw"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    PICTURE.write_text(picture(trace, end_s, curves, most), encoding="utf-8")
    return 0


_WIDTH, _LEFT, _RIGHT, _UPPER, _LOWER, _TOP = 900, 70, 20, 120, 300, 30


def picture(
    trace: Sequence[tuple[float, int]],
    end_s: float,
    curves: Sequence[Sequence[tuple[float, float]]],
    most: float,
) -> str:
    """Draw the instances above, and what each way has trained below."""
    bottom = _TOP + _UPPER + 50 + _LOWER

    def x(second: float) -> float:
        return _LEFT + second / end_s * (_WIDTH - _LEFT - _RIGHT)

    def y(done: float) -> float:
        return bottom - done / most * _LOWER

    def count_y(count: float) -> float:
        return _TOP + _UPPER - count / MOST * _UPPER

    parts = [text(_LEFT, _TOP - 10, f"spot instances, of {MOST} wanted")]
    parts.append(
        text(
            _LEFT,
            bottom - _LOWER - 10,
            "minibatches that are kept, of those of a run that loses no time",
        )
    )
    for hour in range(0, 25, 4):
        parts += [line((x(hour * HOUR_S), _TOP), (x(hour * HOUR_S), bottom), "#dddddd")]
        parts.append(text(x(hour * HOUR_S), bottom + 18, f"{hour} h", Font(anchor="middle")))
    for count in (0, 6, 12):
        parts.append(text(_LEFT - 8, count_y(count) + 4, str(count), Font(anchor="end")))
    for tenth in (0, 5, 10):
        parts.append(
            text(_LEFT - 8, y(tenth / 10 * most) + 4, f"{tenth * 10}%", Font(anchor="end"))
        )
    for (begin, count), (after, next_count) in pairwise([*trace, (end_s, trace[-1][1])]):
        parts.append(line((x(begin), count_y(count)), (x(after), count_y(count)), "#444444"))
        parts.append(line((x(after), count_y(count)), (x(after), count_y(next_count)), "#444444"))
    for number, (way, curve) in enumerate(zip(WAYS, curves, strict=True)):
        parts += [
            line((x(a), y(p)), (x(b), y(q)), CURVES[number]) for (a, p), (b, q) in pairwise(curve)
        ]
        place = bottom - _LOWER + 20 + 18 * number
        parts.append(line((_LEFT + 12, place - 4), (_LEFT + 36, place - 4), CURVES[number]))
        parts.append(text(_LEFT + 44, place, way.name))
    return document(_WIDTH, bottom + 30, parts)


if __name__ == "__main__":
    sys.exit(main())
