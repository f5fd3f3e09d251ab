"""`plan solve`: profile and cluster -> plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planner.cli.cluster import add_cluster_arguments, cluster_of

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
    add_cluster_arguments(parser)
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
        choices=["1f1b", "2bw", "1f1b-flush", "gpipe", "interleaved", "naive"],
        default="1f1b",
        help="1f1b: asynchronous, with weight stashing; 2bw: asynchronous, with two weight versions and one update per "
        "minibatch of several microbatches; gpipe, 1f1b-flush and interleaved: the pipeline drains after every "
        "minibatch, 1f1b-flush in less memory, interleaved with several chunks of the model per GPU; naive: one "
        "minibatch at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help=f"per minibatch, for schedules that divide it (default: {MICROBATCHES_PER_GPU} per GPU)",
    )
    parser.add_argument(
        "--chunks", type=int, default=2, metavar="V", help="of the model on each GPU, for interleaved (default: 2)"
    )
    parser.add_argument(
        "--depth",
        choices=["auto", "published"],
        default="auto",
        help="minibatches in flight of 1f1b: as many as PipeDream keeps (published), or more where workers would wait "
        "for messages or for each other otherwise, and at least 2%% is gained for each (default: %(default)s)",
    )
    parser.add_argument(
        "--recompute",
        choices=["auto", "never", "always"],
        default="auto",
        help="whether stages run their forward again before a backward instead of keeping its activations: where "
        "memory demands it (auto), never, or always (default: %(default)s)",
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
    from planner.pipedream import read_profile
    from planner.plan_file import save_plan
    from planner.report.plan import plan_report
    from planner.solver import solve

    profile = read_profile(args.profile)
    cluster = cluster_of(args, profile)
    plan = solve(
        profile,
        cluster,
        cost_model=args.cost_model,
        schedule=args.schedule,
        microbatches=_microbatches(args.microbatches, args.schedule, cluster.gpus),
        depth=args.depth,
        recompute=args.recompute,
        chunks=args.chunks,
    )
    save_plan(plan, args.output)
    print(plan.model_dump_json(indent=1) if args.json else plan_report(plan))
    print(f"written to {args.output}", file=sys.stderr)
    return 0


def _microbatches(given: int | None, schedule: str, gpus: int) -> int:
    from planner.cost import DIVIDED

    if given is not None:
        return given
    return MICROBATCHES_PER_GPU * gpus if schedule in DIVIDED else 1
