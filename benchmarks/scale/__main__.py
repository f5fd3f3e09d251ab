"""Solve transformers of 3.6 to 70 billion parameters on 64 to 512 GPUs. See README.md in this
folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import printed
from benchmarks.scale.models import MODELS
from planner.errors import PlannerError
from planner.formats.cluster import hierarchical_cluster
from planner.formats.link_names import link_bandwidth
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.units import format_seconds

PER_SERVER, INSIDE, BETWEEN, MEMORY_BYTES = 8, "nvlink3", "400Gbps", 80 * 10**9
OPTIONS = EstimateOptions("a100-80gb", "bfloat16", master_weights=True)
# Model, GPUs, schedule, ranks that may divide layers.
QUESTIONS: tuple[tuple[str, int, str, tuple[int, ...]], ...] = (
    ("llama-7b", 64, "1f1b", (1,)),
    ("llama-7b", 64, "1f1b-flush", (1,)),
    ("gpt-3.6b", 64, "1f1b-flush", (1,)),
    ("gpt-18.4b", 256, "1f1b-flush", (1,)),
    ("gpt-39.1b", 512, "1f1b-flush", (1,)),
    ("llama-70b", 64, "1f1b-flush", (1,)),
    ("llama-70b", 512, "1f1b-flush", (1,)),
    ("llama-70b", 512, "1f1b-flush", (1, 2, 4, 8)),
)
HEADERS = (
    "model",
    "GPUs",
    "schedule",
    "t",
    "plan",
    "late",
    "per minibatch",
    "of one GPU",
    "gap",
    "by",
    "s",
    "CPU",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate, solve and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)} (default: all)")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="S", help="seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    args = parser.parse_args(argv)
    with printed(Path(__file__).parent, save=args.save):
        print(
            tabulate(
                list(_rows(args.models or list(MODELS), args.time_limit)),
                headers=HEADERS,
                tablefmt="github",
            )
        )
    return 0


def _rows(models: Sequence[str], time_limit_s: float) -> Iterator[list[object]]:
    profiles: dict[str, Profile] = {}
    for name, gpus, schedule, tensor in QUESTIONS:
        if name not in models:
            continue
        print(f"{name} on {gpus} GPUs", file=sys.stderr)
        if name not in profiles:
            degrees = {
                degree for asked, _, _, degrees in QUESTIONS if asked == name for degree in degrees
            }
            options = replace(OPTIONS, tensor=sorted(degrees - {1}))
            profiles[name] = estimate_profile(MODELS[name].training_spec(), 1, options)
        begun, busy = time.perf_counter(), time.process_time()
        answer = _answer(profiles[name], gpus, schedule, tensor, time_limit_s)
        ranks = ",".join(map(str, tensor))
        spent = time.perf_counter() - begun, time.process_time() - busy
        yield [name, gpus, schedule, ranks, *answer, *(f"{each:.0f}" for each in spent)]


def _answer(
    profile: Profile, gpus: int, schedule: str, tensor: Sequence[int], time_limit_s: float
) -> list[object]:
    bandwidths = [link_bandwidth(INSIDE), link_bandwidth(BETWEEN)]
    cluster = hierarchical_cluster([PER_SERVER, gpus // PER_SERVER], bandwidths, MEMORY_BYTES)
    microbatches = MICROBATCHES_PER_GPU * gpus if find(schedule).divides else 1
    try:
        plan = solve(
            profile,
            cluster,
            schedule=schedule,
            microbatches=microbatches,
            tensor=tensor,
            time_limit_s=time_limit_s,
        )
    except PlannerError as error:
        return [error.message, "", "", "", "", ""]
    return _cells(plan)


def _cells(plan: Plan) -> list[object]:
    sharded = ", sharded" if any(stage.sharded for stage in plan.stages) else ""
    again = ", recomputing" if any(stage.recomputes for stage in plan.stages) else ""
    predicted = plan.predicted
    return [
        f"{short_config(plan.config)} on {plan.workers}{sharded}{again}",
        plan.staleness,
        format_seconds(predicted.seconds_per_minibatch),
        f"{predicted.speedup_over_one_gpu:.1f}x",
        f"{plan.solver.gap:.0%}",
        predicted.by,
    ]


if __name__ == "__main__":
    sys.exit(main())
