"""Measure how the solver's time and memory grow with layers and GPUs. See README.md in this folder.

python -m benchmarks.speed.growth
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.kept import printed

LAYERS = (100, 300, 1000, 3000)
GPUS = (8, 128, 2048, 16384)


def main() -> None:
    """Solve every size in its own process, and print the table and the slopes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument(
        "--one", type=int, nargs=2, metavar=("LAYERS", "GPUS"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    arguments = parser.parse_args()
    if arguments.one:
        layers, gpus = arguments.one
        print(json.dumps(_measure(layers, gpus)))
        return
    with printed(Path(__file__).parent, save=arguments.save):
        _table(arguments.layers, arguments.gpus)


def _table(layers_of: Sequence[int], gpus_of: Sequence[int]) -> None:
    print(
        "| layers | GPUs | seconds of the processor | wall seconds | peak memory, MB | stages | "
        "status |"
    )
    print("|---|---|---|---|---|---|---|")
    results = {}
    for layers in layers_of:
        for gpus in gpus_of:
            command = [sys.executable, "-m", "benchmarks.speed.growth"]
            answer = subprocess.run(
                [*command, "--one", str(layers), str(gpus)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            one = json.loads(answer.stdout)
            results[layers, gpus] = one["cpu_s"]
            print(
                f"| {layers:,} | {gpus:,} | {one['cpu_s']:.2f} | {one['wall_s']:.2f} | "
                f"{one['peak_mb']:.0f} "
                f"| {one['stages']} | {one['status']} |",
                flush=True,
            )
    print("\nSlope of seconds over layers, log-log, by GPUs:")
    for gpus in gpus_of:
        print(
            f"  {gpus:,}: {_slope([(layers, results[layers, gpus]) for layers in layers_of]):.2f}"
        )
    print("Slope of seconds over GPUs, by layers:")
    for layers in layers_of:
        print(f"  {layers:,}: {_slope([(gpus, results[layers, gpus]) for gpus in gpus_of]):.2f}")


def _measure(layers: int, gpus: int) -> dict[str, float | str]:
    from benchmarks.speed.graphs import chain
    from planner.formats.cluster import flat_cluster
    from planner.solver import search_plan as solve

    profile = chain(layers)
    started, cpu = time.perf_counter(), time.process_time()
    plan = solve(profile, flat_cluster(gpus, 1.25e9), depth="published")
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "stages": len(plan.stages),
        "status": plan.solver.status,
    }


def _slope(points: list[tuple[int, float]]) -> float:
    """Return the exponent of the power law that fits best."""
    if len(points) < 2:
        return float("nan")
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


if __name__ == "__main__":
    main()
