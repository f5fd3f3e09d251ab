"""Measure how long `plan simulate` takes. See README.md in this folder.

python -m benchmarks.speed.simulator --save
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.graphs import chain
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan, save_plan
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem

README = Path(__file__).with_name("README.md")
MARKER = "<!-- result -->"


@dataclass(frozen=True)
class Case:
    """A plan of `stages` stages with `replicas` replicas each."""

    stages: int
    replicas: int
    minibatches: int
    schedule: str = "1f1b"
    microbatches: int = 1
    server: int = 1  # workers per server, which share its link
    trace: bool = False
    target_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster, flat or of servers."""
        workers = self.stages * self.replicas
        if self.server == 1:
            return flat_cluster(workers, 1.25e9)
        return hierarchical_cluster((self.server, workers // self.server), (1.6e10, 1.25e9))


CASES = (
    Case(16, 1, 1000, target_s=2.0),
    Case(2, 8, 1000),
    Case(16, 1, 1000, server=4),
    Case(16, 1, 100, schedule="gpipe", microbatches=16),
    Case(16, 1, 1000, trace=True),
    Case(1024, 1, 100, target_s=60.0),
    Case(32, 32, 100),
    Case(128, 8, 100, server=8),
    Case(128, 8, 100, schedule="1f1b-flush", microbatches=8),
)


def main() -> None:
    """Simulate every case in its own process, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the table into the README")
    save = parser.parse_args().save
    lines = [
        "| workers | stages x replicas | schedule | servers of | minibatches | events | seconds | "
        "of the processor "
        "| peak memory, MB | target, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            lines.append(_row(case, Path(folder)))
            print(lines[-1], flush=True)
    if save:
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        about = (
            f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, "
            f"Linux {platform.release()}, "
        )
        about += (
            f"Python {platform.python_version()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f} before.\n"
        )
        README.write_text(
            f"{head}{MARKER}\n\n{about}\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


def _row(case: Case, folder: Path) -> str:
    path = folder / "plan.json"
    save_plan(_plan(case), path)
    command = [sys.executable, "-m", "planner", "simulate", "--plan", str(path)]
    command += ["--minibatches", str(case.minibatches)]
    if case.trace:
        command += ["--trace", str(folder / "trace.json")]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command} failed")
    schedule = (
        case.schedule
        if case.microbatches == 1
        else f"{case.schedule}, {case.microbatches} microbatches"
    )
    return (
        f"| {case.stages * case.replicas:,} | {case.stages:,} x {case.replicas} | {schedule}"
        f"{', with a trace' if case.trace else ''} | {case.server} | {case.minibatches:,} | "
        f"{_events(case):,} "
        f"| {wall_s:.2f} | {used.ru_utime + used.ru_stime:.2f} | {used.ru_maxrss * 1024 / 1e6:.0f} "
        f"| {case.target_s or ''} |"
    )


def _events(case: Case) -> int:
    """Return the number of events: forward, backward, messages at both ends, updates and
    all-reduces.
    """
    units = case.minibatches * case.microbatches
    rounds = case.minibatches if case.microbatches > 1 else -(-case.minibatches // case.replicas)
    per_round = case.stages * case.replicas * (1 + (case.replicas > 1))
    return units * (2 * case.stages + 4 * (case.stages - 1)) + rounds * per_round


def _plan(case: Case) -> Plan:
    layer_costs, count = LayerCosts(chain(case.stages)), case.stages
    stages = candidates([[number] for number in range(count)], [case.replicas] * count)
    problem = Problem(layer_costs, Setting(case.cluster, find(case.schedule), case.microbatches))
    return assemble(problem, priced(problem, stages))


if __name__ == "__main__":
    main()
