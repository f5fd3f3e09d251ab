"""Solve the published workloads and print the table of the README.

python -m benchmarks.published.dnn_partitioning [--ilp SECONDS] [FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import ANCHORS
from benchmarks.published.dnn_partitioning.objective import Host, LoadProblem
from benchmarks.published.dnn_partitioning.solve import solve_ilp, solve_loads
from benchmarks.published.dnn_partitioning.workload import BYTES_PER_S, load_workload
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.solver.clock import Clock
from planner.solver.problem.result import IlpAnswer

FOLDER = ANCHORS / "dnn-partitioning"
DEVICES = 6
# What the authors' search answers, in milliseconds, and its seconds.
PUBLISHED = {"bert24": (41.7458, "0.06"), "resnet50": (78.6318, "0.6"), "gnmt": (107.004, "17-60")}
# The files' one CPU: ten times slower, and the authors charge it no transfers and no memory.
CPU = Host(count=1, speed=0.1, memory_bytes=2**60)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument(
        "--ilp",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of each integer program",
    )
    args = parser.parse_args()
    rows = [
        _row(args.folder / f"{name}_training.json", name, cpu, args.ilp)
        for name in PUBLISHED
        for cpu in (False, True)
    ]
    headers = [
        "workload",
        "devices",
        "published, ms",
        "seconds",
        "search, ms",
        "CPU s",
        "ILP, ms",
        "CPU s",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def _row(path: Path, name: str, cpu: bool, ilp_s: float) -> list[str]:
    published, seconds = PUBLISHED[name]
    profile = load_workload(path)
    cluster = Cluster(
        levels=(Level(size=DEVICES + cpu, bandwidth_bytes_per_s=BYTES_PER_S),),
        memory_bytes=profile.device.memory_bytes,
        kinds=(DeviceKind(count=DEVICES), CPU) if cpu else (),
    )
    cells = [
        name,
        f"{DEVICES} and the CPU" if cpu else str(DEVICES),
        f"{published:g}" if cpu else "",
        seconds if cpu else "",
    ]
    for solver, limit_s in ((solve_loads, None), (solve_ilp, ilp_s)):
        started = time.process_time()
        try:
            answer = solver(LoadProblem(LayerCosts(profile), Setting(cluster)), Clock.of(limit_s))
        except TimeoutError:
            cells += ["none in time", ""]
            continue
        cells += [_cell(answer), f"{time.process_time() - started:.3f}"]
    return cells


def _cell(answer: IlpAnswer | None) -> str:
    if answer is None:
        return "no plan fits"
    milliseconds = f"{answer.seconds * 1e3:.4f}"
    return (
        milliseconds
        if answer.optimal
        else f"{milliseconds}, gap {1 - answer.bound_s / answer.seconds:.1%}"
    )


if __name__ == "__main__":
    main()
