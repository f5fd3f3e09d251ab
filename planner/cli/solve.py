"""`plan solve`: profile and cluster -> plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.units import parse_bandwidth, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from planner.profile_file import Profile

DESCRIPTION = """\
Find the fastest plan: which layers form which stage, and how many GPUs run each. The answer is exact for the cost model
and says how good it is. It uses no more GPUs than its speed needs.

    plan solve --gpus 8 --bandwidth 10Gbps --memory 16GB
"""
MICROBATCHES_PER_GPU = 4  # from which on GPipe calls its bubble negligible


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "solve",
        help="find the fastest plan for a profile and a cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs (workers)")
    cluster.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        required=True,
        metavar="RATE",
        help="of each GPU's link, each way: 10Gbps counts bits, 1.25GB/s counts bytes",
    )
    cluster.add_argument(
        "--latency", type=parse_seconds, default=0.0, metavar="TIME", help="of a message: 50us, 0.1ms (default: 0s)"
    )
    cluster.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="of each GPU: 16GB (10^9) or 16GiB (2^30) (default: that of the profiled GPU; no limit for a CPU)",
    )
    cluster.add_argument(
        "--no-overlap",
        action="store_true",
        help="messages do not travel while devices compute: for CPU workers that use every core of their host",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="profile.json of `plan profile`, or a graph.txt that PipeDream published (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("plan.json"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--schedule",
        choices=["1f1b", "1f1b-flush", "gpipe", "naive"],
        default="1f1b",
        help="1f1b: asynchronous, with weight stashing; gpipe and 1f1b-flush: the pipeline drains after every "
        "minibatch, 1f1b-flush in less memory; naive: one minibatch at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help=f"per minibatch, for gpipe and 1f1b-flush (default: {MICROBATCHES_PER_GPU} per GPU)",
    )
    parser.add_argument(
        "--depth",
        choices=["auto", "published"],
        default="auto",
        help="minibatches in flight of 1f1b: as many as PipeDream keeps (published), or more where workers would wait "
        "for messages or for each other otherwise, and at least 2%% is gained for each (default: %(default)s)",
    )
    parser.add_argument(
        "--cost-model",
        choices=["resource", "pipedream", "paper"],
        default="resource",
        help="resource: what each processor and link does; pipedream: the optimizer PipeDream published; paper: the "
        "equation of its SOSP 2019 paper (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Solve, save, and print the plan."""
    from planner.cluster import flat_cluster
    from planner.pipedream import read_profile
    from planner.plan_file import save_plan
    from planner.report.plan import plan_report
    from planner.solver import solve

    profile = read_profile(args.profile)
    cluster = flat_cluster(
        args.gpus, args.bandwidth, _memory(args.memory, profile), args.latency, overlap=not args.no_overlap
    )
    plan = solve(
        profile,
        cluster,
        cost_model=args.cost_model,
        schedule=args.schedule,
        microbatches=_microbatches(args.microbatches, args.schedule, args.gpus),
        depth=args.depth,
    )
    save_plan(plan, args.output)
    print(plan.model_dump_json(indent=1) if args.json else plan_report(plan))
    print(f"written to {args.output}", file=sys.stderr)
    return 0


def _memory(given: int | None, profile: Profile) -> int | None:
    """A CPU's memory is the whole machine's, which says little about one worker."""
    if given is not None or profile.device.kind == "cpu":
        return given
    return profile.device.memory_bytes


def _microbatches(given: int | None, schedule: str, gpus: int) -> int:
    if given is not None:
        return given
    return MICROBATCHES_PER_GPU * gpus if schedule in ("gpipe", "1f1b-flush") else 1
