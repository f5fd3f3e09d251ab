"""Solve the published workloads and print the table of the README.

python -m benchmarks.dnn_partitioning [--ilp SECONDS] [FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tabulate import tabulate

from planner.errors import PlannerError
from planner.formats.cluster import Cluster, Kind, Level
from planner.formats.pipedream import read_profile
from planner.formats.plan import Plan
from planner.formats.workload import BYTES_PER_S
from planner.solver import solve
from planner.solver.methods import SolverName

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "anchors" / "dnn-partitioning"
DEVICES = 6
# What the authors' search answers, in milliseconds, and its seconds.
PUBLISHED = {"bert24": (41.7458, "0.06"), "resnet50": (78.6318, "0.6"), "gnmt": (107.004, "17-60")}
# The files' one CPU: ten times slower, and the authors charge it no transfers and no memory.
CPU = Kind(count=1, speed=0.1, memory_bytes=2**60, pays_transfers=False)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--ilp", type=float, default=60.0, metavar="SECONDS", help="time limit of each integer program")
    args = parser.parse_args()
    rows = [
        _row(args.folder / f"{name}_training.json", name, cpu, args.ilp) for name in PUBLISHED for cpu in (False, True)
    ]
    headers = ["workload", "devices", "published, ms", "seconds", "search, ms", "CPU s", "ILP, ms", "CPU s"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def _row(path: Path, name: str, cpu: bool, ilp_s: float) -> list[str]:
    published, seconds = PUBLISHED[name]
    profile = read_profile(path)
    cluster = Cluster(
        levels=(Level(size=DEVICES + cpu, bandwidth_bytes_per_s=BYTES_PER_S),),
        memory_bytes=profile.device.memory_bytes,
        kinds=(Kind(count=DEVICES), CPU) if cpu else (),
    )
    cells = [name, f"{DEVICES} and the CPU" if cpu else str(DEVICES), f"{published:g}" if cpu else "", seconds]
    methods: tuple[tuple[SolverName, float | None], ...] = (("search", None), ("ilp", ilp_s))
    for solver, limit_s in methods:
        started = time.process_time()
        try:
            plan = solve(profile, cluster, cost_model="max-load", solver=solver, time_limit_s=limit_s)
        except PlannerError as error:
            cells += [error.message, ""]
            continue
        cells += [_answer(plan), f"{time.process_time() - started:.3f}"]
    return cells


def _answer(plan: Plan) -> str:
    answer = f"{plan.predicted.seconds_per_minibatch * 1e3:.4f}"
    return answer if plan.solver.status == "optimal" else f"{answer}, gap {plan.solver.gap:.1%}"


if __name__ == "__main__":
    main()
