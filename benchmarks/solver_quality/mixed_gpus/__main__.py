"""Compare the search for GPUs of several kinds with every plan. See README.md in this folder."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import printed
from benchmarks.solver_quality.mixed_gpus.every_plan import best_s
from benchmarks.solver_quality.mixed_gpus.instances import MICROBATCHES, Instance, draw
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.device_kinds import cluster_for
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem

SAME, FAR = 1e-6, 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Draw instances and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver_quality.mixed_gpus", description=__doc__
    )
    parser.add_argument(
        "--instances", type=int, default=50, help="per row of the table (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=2211, help="(default: %(default)s)")
    parser.add_argument(
        "--simulated", type=int, default=10, help="of all plans, the best (default: %(default)s)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    args = parser.parse_args(argv)
    rows = [
        _row(
            schedule,
            args.instances if not levels else args.instances // 2,
            args.seed,
            args.simulated,
            levels=levels,
        )
        for levels in (False, True)
        for schedule in MICROBATCHES
    ]
    headers = [
        "levels",
        "schedule",
        "instances",
        "no plan",
        "at least as fast",
        "slower by 2%",
        "median",
        "worst",
        "CPU s",
    ]
    with printed(Path(__file__).parent, save=args.save):
        print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 0


def _row(schedule: str, instances: int, seed: int, simulated: int, *, levels: bool) -> list[str]:
    started, gaps = time.process_time(), list[float]()
    none = 0
    for number in range(instances):
        instance = draw(
            random.Random(f"{seed} {schedule} {levels} {number}"), schedule, levels=levels
        )
        found_s, least_s = _found_s(instance), _least_s(instance, simulated)
        if least_s is None and found_s is None:
            none += 1
            continue
        gap = float("inf") if found_s is None else 0.0 if least_s is None else found_s / least_s - 1
        gaps.append(gap)
        if gap > FAR:
            print(
                f"{schedule} {'on levels' if levels else ''} {number}: {gap:+.1%}",
                file=sys.stderr,
                flush=True,
            )
    exact = sum(gap <= SAME for gap in gaps)
    return [
        "two" if levels else "one",
        schedule,
        str(instances),
        str(none),
        f"{exact} of {len(gaps)}",
        str(sum(gap > FAR for gap in gaps)),
        f"{statistics.median(gaps):+.2%}",
        f"{max(gaps):+.1%}",
        f"{time.process_time() - started:.0f}",
    ]


def _found_s(instance: Instance) -> float | None:
    rules = instance.rules
    try:
        plan = solve(
            instance.profile,
            instance.cluster,
            schedule=instance.schedule,
            microbatches=instance.microbatches,
            recompute=rules.recompute,
            solver="search",
        )
    except InfeasibleError:
        return None
    return plan.predicted.seconds_per_minibatch


def _least_s(instance: Instance, simulated: int) -> float | None:
    cluster = cluster_for(instance.profile, instance.cluster)
    setting = Setting(cluster, find(instance.schedule), instance.microbatches)
    problem = Problem(
        LayerCosts(instance.profile), setting, instance.rules, budget=Budget.unlimited()
    )
    return best_s(problem, simulated)


if __name__ == "__main__":
    sys.exit(main())
