"""`plan train MODEL --gpus N`: profile the model and solve for the workers of this host, then
train.
"""

from __future__ import annotations

import argparse

import planner
from planner.cli import arguments, output
from planner.errors import InputError
from planner.options.cluster import ClusterOptions
from planner.options.profiling import ProfileOptions
from planner.options.solving import SolveOptions

_DESCRIBING = ("bandwidth", "batch_size", "schedule")  # what only a plan to be solved for needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --gpus and what goes with it; `solved` reads them."""
    from planner.schedule.registry import AUTO, NAMES

    group = parser.add_argument_group(
        "without a plan",
        "with --gpus, the model is profiled and solved for first: profile.json and --plan are "
        "written anew",
    )
    arguments.add_options(
        group,
        ClusterOptions,
        "gpus",
        help="GPUs of this host, or workers on its cores, to solve for",
        told="those of the plan",
    )
    arguments.add_options(
        group,
        ClusterOptions,
        "bandwidth",
        help="bandwidth between them: nvlink4, pcie4, 10Gbps",
        told="measured",
    )
    arguments.add_options(group, ProfileOptions, "batch_size")
    arguments.add_options(group, SolveOptions, "schedule", choices=[*NAMES, AUTO])


def is_asked(args: argparse.Namespace) -> bool:
    """Return whether to solve first; raise InputError for options that only say how."""
    if args.gpus is not None:
        return True
    for name in _DESCRIBING:
        if getattr(args, name) is not None:
            raise InputError(
                f"`{name}` is for a plan that is solved for first, and '{args.plan}' is one",
                hint=f"add `gpus`, or leave out `{name}`",
            )

    return False


def solved(args: argparse.Namespace) -> planner.Plan:
    """Profile the model, solve for the workers, print the verdict, and save profile and plan."""
    from planner.formats.files import check_writable
    from planner.formats.profile import replace_profile

    for path in (arguments.PROFILE, args.plan):
        check_writable(path)
    profile = _profiled(args)
    replace_profile(profile, arguments.PROFILE)

    cluster = _cluster(args, profile)
    with output.searching() as progress:
        plan = planner.solve(
            profile, cluster, **arguments.given_options(SolveOptions, args), progress=progress
        )

    planner.save_plan(plan, args.plan)

    output.print_verdict(plan)
    output.print_progress(f"written to {arguments.PROFILE} and {args.plan}; training ...")
    return plan


def _profiled(args: argparse.Namespace) -> planner.Profile:
    from planner.profiler.links.this_host import neighbours_of

    processes = neighbours_of(args.gpus, _kind(args))
    given = arguments.given_options(ProfileOptions, args)
    with output.profiling() as show:
        return planner.profile(args.model, **given, processes=processes, progress=show)


def _cluster(args: argparse.Namespace, profile: planner.Profile) -> planner.Cluster:
    if args.bandwidth is not None:
        return arguments.cluster_of(args, profile)

    from planner.profiler.links.this_host import cluster_here

    output.print_progress("measuring the link between the workers ...")
    return cluster_here(profile, args.gpus, _kind(args), args.backend)


def _kind(args: argparse.Namespace) -> str:
    from planner.workers.place import kind_here

    return args.device or kind_here()
