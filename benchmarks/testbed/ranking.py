"""Compare the measured order of plans with the predicted one. See README.md in this folder.

python -m benchmarks.testbed.ranking --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import ROOT
from benchmarks.testbed.bed import testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import emulate, fitting_scale
from benchmarks.testbed.measure import Measured, described, run_plan
from benchmarks.testbed.predict import balanced_stages, given_plan
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.solver import search_plan as solve
from planner.units import parse_bandwidth

TABLE = Path(__file__).with_name("ranking.md")
PLANS = 20
CONFIGS = ((2, 1, 1), (3, 1), (1, 1, 1, 1), (2, 2), (1, 2, 1), (1, 3), (1, 1, 2), (4,))
SHIFTS = (0, 2, -2)  # layers that the first cut is moved by


def main() -> None:
    """Measure, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="vgg16", help="folder in profiles/ (default: %(default)s)"
    )
    parser.add_argument(
        "--bandwidth",
        default="1Gbps",
        help="of the devices that are emulated (default: %(default)s)",
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each run, after its start-up"
    )
    parser.add_argument("--save", action="store_true", help=f"write {TABLE.name}")
    arguments = parser.parse_args()
    profile = load_profile(ROOT / "profiles" / arguments.model / "cpu.json")
    there = flat_cluster(arguments.gpus, parse_bandwidth(arguments.bandwidth))
    scale = fitting_scale(profile, there)
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder, testbed(arguments.gpus) as bed:
        emulated = emulate(profile, scale, Path(folder))
        links = bed.links(scale.cluster(there), byte_factor=scale.byte_factor)
        with scaled_buckets(scale.byte_factor):
            plans = different_plans(emulated.profile, links, arguments.plans)
        for number, plan in enumerate(plans):
            runs.append(run_plan(bed, emulated, plan, described(links), arguments.seconds))
            print(f"{number + 1}/{len(plans)}: {runs[-1]}", file=sys.stderr, flush=True)
    text = report(runs, [stages_of(plan) for plan in plans])
    print(text)
    if arguments.save:
        TABLE.write_text(text + "\n", encoding="utf-8")


def different_plans(profile: Profile, links: Cluster, count: int) -> list[Plan]:
    """Return the solver's plan, then plans of all configurations with cuts of equal time, and
    shifted ones.
    """
    found = [solve(profile, links)]
    for plan in _candidates(profile, links):
        if len(found) < count and all(stages_of(plan) != stages_of(other) for other in found):
            found.append(plan)
    return found


def _candidates(profile: Profile, links: Cluster) -> Iterator[Plan]:
    for shift in SHIFTS:
        for config in CONFIGS:
            if sum(config) != links.gpus or (shift and len(config) == 1):
                continue
            stages = balanced_stages(profile, len(config))
            if shift:
                stages[0] += shift
                stages[1] -= shift
            if min(stages) > 0:
                yield given_plan(profile, links, stages, config)


def stages_of(plan: Plan) -> str:
    """Return the replicas, and the number of layers before each cut."""
    cuts = list(accumulate(len(stage.layers) for stage in plan.stages))[:-1]
    return plan.config + (f", cut after {', '.join(map(str, cuts))}" if cuts else "")


def report(runs: Sequence[Measured], names: Sequence[str]) -> str:
    """Return the plans by measured time, and how well the orders agree."""
    order = sorted(range(len(runs)), key=lambda index: runs[index].measured_s)
    rows = [
        [
            names[i] + (" (solver)" if i == 0 else ""),
            runs[i].predicted_s,
            runs[i].measured_s,
            runs[i].error,
        ]
        for i in order
    ]
    table = tabulate(
        rows,
        ("plan", "predicted, s", "measured, s", "error"),
        tablefmt="github",
        floatfmt=("", ".4f", ".4f", "+.1%"),
    )
    tau = kendall_tau([run.predicted_s for run in runs], [run.measured_s for run in runs])
    behind = runs[0].measured_s / runs[order[0]].measured_s - 1
    return (
        f"{table}\n\n{runs[0].model}, {runs[0].cluster}: Kendall tau {tau:.2f} over {len(runs)} "
        f"plans; "
        f"the solver's choice takes {behind:.1%} longer than the measured best"
    )


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return concordant less discordant pairs as a share of all; predictions within 0.1% count as
    neither.
    """
    score = 0
    pairs = list(combinations(range(len(one)), 2))
    for i, j in pairs:
        if abs(one[i] / one[j] - 1) > 1e-3:
            score += 1 if (one[i] < one[j]) == (other[i] < other[j]) else -1
    tied = sum(abs(one[i] / one[j] - 1) <= 1e-3 for i, j in pairs)
    return score / ((len(pairs) * (len(pairs) - tied)) ** 0.5 or 1)


if __name__ == "__main__":
    main()
