"""`plan compare`, `plan sweep` and `plan explain`: alternatives to a plan, and what limits it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import planner
from planner.cli import arguments, output
from planner.errors import ClusterError
from planner.formats.link_names import link_bandwidth
from planner.options.numbers import count
from planner.options.solving import SolveOptions
from planner.units import parse_bytes

if TYPE_CHECKING:
    from planner.analysis.sweep import Quantity

COMPARE = """\
Compare the fastest plan, or --plan, with what one would do without a planner: data parallelism, pipelines of equal
blocks and of equal times, and GPipe with the plan's own stages. All are priced on the same cluster by the same cost
model and, with the default one, by simulation.

    plan compare --gpus 8 --bandwidth 10Gbps
    plan compare --plan plan.json
    plan compare --plan plan.json --topology 4x2 --bandwidth 128Gbps,10Gbps     its stages on another cluster
"""
SWEEP = """\
Solve for a range of clusters, and show how the plan changes. One of --bandwidth, --gpus and --memory is a
range LOW:HIGH; all other arguments are those of `plan solve`.

    plan sweep --gpus 8 --bandwidth 1Gbps:100Gbps
    plan sweep --gpus 2:16 --bandwidth 10Gbps
"""
EXPLAIN = """\
Explain what limits the fastest plan, or --plan: the busiest resource and the slack of all others, what it would cost
to move each stage boundary by one layer, the best plan with another config, and what more bandwidth, one more GPU or
more memory would gain.

    plan explain --gpus 8 --bandwidth 10Gbps
    plan explain --plan plan.json
    plan explain --plan plan.json --gpus 8 --bandwidth 1Gbps     its stages on another cluster
"""
POINTS, GPU_POINTS = 9, 16
Range = tuple[float, float]


def add_parser(verbs: arguments.Verbs) -> None:
    summary = "compare a plan with data parallelism and hand-made pipelines"
    arguments.add_question_arguments(arguments.declare(verbs, "compare", summary, COMPARE, run_question), plan=True)
    parser = arguments.declare(
        verbs, "sweep", "show how the plan changes with bandwidth, GPUs or memory", SWEEP, run_sweep
    )
    parser.conflict_handler = "resolve"  # three of the cluster's arguments may be ranges here
    arguments.add_question_arguments(parser, plan=False)
    swept = parser.add_argument_group("swept", "one of these is a range LOW:HIGH")
    swept.add_argument("--gpus", type=_range_of(count), metavar="N", help="number of GPUs: 8, or 2:16")
    swept.add_argument(
        "--bandwidth",
        type=lambda text: [_range_of(link_bandwidth)(part) for part in text.split(",")],
        metavar="RATE",
        help="bandwidth of each GPU's link in each direction: 10Gbps, or 1Gbps:100Gbps; with --topology one per level, "
        "inner to outer: 128Gbps,1Gbps:100Gbps",
    )
    swept.add_argument(
        "--memory", type=_range_of(parse_bytes), metavar="SIZE", help="memory per GPU: 16GB, or 4GB:32GB"
    )
    help = f"solve for N values (default: {POINTS}; {GPU_POINTS} for GPUs)"
    parser.add_argument("--points", type=int, metavar="N", help=help)
    summary = "explain what limits a plan, and what would make it faster"
    arguments.add_question_arguments(arguments.declare(verbs, "explain", summary, EXPLAIN, run_question), plan=True)


def run_question(args: argparse.Namespace) -> int:
    """Compare or explain the plan of the arguments, and print the answer."""
    from planner.formats.device_kinds import read_one_profile

    question: Callable[..., Any] = getattr(planner, args.verb)
    with arguments.patience_of(args) as patience:
        profile = read_one_profile(args.profile)
        answer = question(profile, plan=arguments.plan_of(args, profile, patience), patience=patience)
    output.print_answer(answer, args.json)
    return 0


def run_sweep(args: argparse.Namespace) -> int:
    from planner.analysis.sweep import spread
    from planner.formats.device_kinds import read_one_profile

    quantity, (low, high) = _swept(args)
    default = GPU_POINTS if quantity == "gpus" else POINTS
    values = spread(low, high, default if args.points is None else args.points, whole=quantity == "gpus")

    def cluster_at(value: float) -> planner.Cluster:
        given = argparse.Namespace(**vars(args))
        if quantity == "bandwidth":
            given.bandwidth = [value if isinstance(each, tuple) else each for each in args.bandwidth]
        else:
            setattr(given, quantity, int(value))
        return arguments.cluster_of(given, profile)

    with arguments.patience_of(args) as patience:
        profile = read_one_profile(args.profile)
        swept = planner.sweep(
            profile, quantity, values, cluster_at, options=arguments.read_options(SolveOptions, args), patience=patience
        )
    output.print_answer(swept, args.json)
    return 0


def _swept(args: argparse.Namespace) -> tuple[Quantity, Range]:
    """Return the one range among the arguments, and what it is of."""
    given: list[tuple[Quantity, object]] = [("bandwidth", rate) for rate in args.bandwidth or ()]
    given += [("gpus", args.gpus), ("memory", args.memory)]
    ranges = [(quantity, value) for quantity, value in given if isinstance(value, tuple)]
    if len(ranges) != 1:
        raise ClusterError(
            f"one of --bandwidth, --gpus and --memory has to be a range, not {len(ranges) or 'none'}",
            hint="write one of them as LOW:HIGH, as in --bandwidth 1Gbps:100Gbps",
        )
    return ranges[0]


def _range_of(parse: Callable[[str], float]) -> Callable[[str], float | Range]:
    """Return a parser of one value, or of two with a colon between them."""

    def read(text: str) -> float | Range:
        low, colon, high = text.partition(":")
        return (parse(low), parse(high)) if colon else parse(low)

    return read
