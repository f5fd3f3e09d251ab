"""`plan solve`: profile and cluster -> plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import planner
from planner.cli.arguments import (
    PLAN,
    Verbs,
    add_output_argument,
    add_profile_argument,
    add_rule_arguments,
    declare,
    patience_of,
    profile_path,
)
from planner.cli.cluster import add_cluster_arguments, add_constraint_arguments, cluster_of, constraints_of
from planner.cli.output import as_flags, print_answer, print_complaint, print_written, stopped_by_interrupt
from planner.cli.records import add_options, read_options
from planner.errors import InputError, PlannerError
from planner.options.numbers import batch_sizes
from planner.options.solving import SolveOptions
from planner.schedule.registry import DEFAULT, NAMES

if TYPE_CHECKING:
    from planner.solver.problem.budget import Patience

ALL = ("auto", "all")  # in place of a schedule's name

DESCRIPTION = """\
Find the fastest plan: which layers form each stage, and how many GPUs run it. An exact search by the cost model finds
candidates and a lower bound. Simulating the candidates' schedules chooses among them, and the answer says how far it is
from the bound. A plan uses no more GPUs than its speed needs.

    plan solve --gpus 8 --bandwidth 10Gbps --memory 16GB
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "solve", "find the fastest plan for a profile and a cluster", DESCRIPTION, run)
    add_cluster_arguments(parser)
    add_constraint_arguments(parser)
    several = "; or several of one model at different batch sizes, with commas between, to choose among"
    add_profile_argument(parser, several)
    help = "choose among the profiles that `plan profile --batch-size N,N` wrote beside --profile"
    parser.add_argument("--batch-size", type=batch_sizes, metavar="N,N", help=help)
    add_output_argument(parser, PLAN)
    help = "model file: run each stage of the plan by itself on this machine, and compare its time with the sum of "
    parser.add_argument("--verify", metavar="MODEL", help=f"{help}its layers' times")
    every = "; auto or all: compare all but naive, and take the fastest per sample"
    add_options(parser, SolveOptions, "schedule", choices=[*NAMES, *ALL], more=every)
    sizes = "; with several batch sizes, those of the smallest size, and the others make as large a minibatch"
    add_options(parser, SolveOptions, "microbatches", more=sizes)
    add_options(parser, SolveOptions, "minibatch", "chunks", "depth", "accept_divided_loss", "vertical_sync")
    add_rule_arguments(parser)
    add_options(parser, SolveOptions, "cost_model", "solver")


def run(args: argparse.Namespace) -> int:
    """Solve, save, and print the plan."""
    from planner.api.planning import solved
    from planner.formats.importers import read_profiles

    if args.verify is not None:
        planner.load_model_file(args.verify)  # before the search, whose answer would wait for a file that is not there
    with patience_of(args) as patience:
        profiles = read_profiles(_profile_paths(args.profile, args.batch_size))
        cluster = cluster_of(args, profiles[0])
        schedule = {"schedule": DEFAULT} if args.schedule in ALL else {}
        options = read_options(SolveOptions, args, constraints=constraints_of(args), **schedule)
        with stopped_by_interrupt(patience.deadline.stop):
            if len(profiles) > 1 or schedule:
                plan = _chosen(args, profiles, cluster, options, patience)
            else:
                plan = solved(profiles[0], cluster, options, patience)
        profile = next(one for one in profiles if one.digest == plan.profile_digest)
    complaints = list(_complaints(args, plan, profile))
    planner.save_plan(plan, args.output)
    print_answer(plan, args.json)
    print_written(args.output)
    for kind, message, hint in complaints:
        print_complaint(kind, message, hint)
    if args.verify is not None:
        # With --json stdout holds the plan alone.
        print(f"\n{_verified(args.verify, profile, plan)}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _complaints(
    args: argparse.Namespace, plan: planner.Plan, profile: planner.Profile
) -> Iterator[tuple[str, str, str]]:
    """Yield the notes and warnings on a plan: which they are, what they say, and a hint."""
    from planner.plan.shared_weights import obstacle, shared_weights, trained_parameters
    from planner.reporting.tables.plan import staleness_warning
    from planner.reporting.tables.profile import shared_host_notes
    from planner.units import format_bytes

    if replaced := _replaced(args.output, plan):
        yield "note", replaced, ""
    if warning := staleness_warning(plan):
        yield "warning", *warning
    if profile.tensor and args.tensor is None:
        degrees = ",".join(str(costs.degree) for costs in profile.tensor)
        divided = f"layers might be divided, too: the profile knows the degrees {degrees}"
        yield "note", divided, f"give `tensor=1,{degrees}`"
    shared = list(shared_weights([stage.layers for stage in plan.stages], trained_parameters(profile)))
    if problem := obstacle(plan, shared):
        yield "warning", *problem
    elif shared:
        size = format_bytes(sum(pair.gradient_bytes for pair in plan.shared))
        left_out = "" if plan.predicted.by == "simulation" else ", which the prediction leaves out"
        yield "note", shared[0].sentence(f"; they exchange gradients of up to {size} per update{left_out}"), ""
    for text, hint in shared_host_notes(plan, profile):
        yield "note", text, hint


def _replaced(path: Path, plan: planner.Plan) -> str:
    """Say which plan a file has that is for another model or from another profile; "" if there is none."""
    try:
        before = planner.load_plan(path)
    except PlannerError:
        return ""  # no file, or none that could be trained
    if before.profile_digest == plan.profile_digest:
        return ""
    of_what = f"for the model '{before.model}'" if before.model != plan.model else "from another profile of the model"
    return f"'{path}' held a plan {of_what}, {before.config} on {before.workers} GPUs, which this one replaces"


def _verified(model: str, profile: planner.Profile, plan: planner.Plan) -> str:
    """Compare the sum of the layers of each stage with the stage as it is measured by itself, for one microbatch."""
    from planner.profiler.measured.verify import verify
    from planner.profiler.this_machine import keep_freed_pages
    from planner.reporting.tables.stages import layer_range
    from planner.reporting.tables.table import table_of
    from planner.units import format_seconds

    keep_freed_pages()  # as the workers do
    stages = [stage.layers for stage in plan.stages]
    times = verify(planner.load_model_file(model), profile, stages)
    rows = [
        {
            "stage": number,
            "layers": layer_range(layers),
            "sum of layers": format_seconds(time.summed_s),
            "measured": format_seconds(time.measured_s),
            "sum is off by": f"{time.error:+.1%}",
        }
        for number, (layers, time) in enumerate(zip(stages, times, strict=True))
    ]
    worst = max((time.error for time in times), key=abs)
    return f"{table_of(rows).text()}\n\nworst stage: the sum of its layers is off by {worst:+.1%}"


def _chosen(
    args: argparse.Namespace,
    profiles: list[planner.Profile],
    cluster: planner.Cluster,
    options: SolveOptions,
    patience: Patience,
) -> planner.Plan:
    from planner.analysis.choose import COMPARED, choose, with_best_synchronous
    from planner.analysis.usual_ways import with_baselines
    from planner.api.planning import SEARCHING

    if options.alone or options.cost_model != "resource":
        alone = "--solver, --vertical-sync, constraints and cost models other than resource"
        hint = "give one --schedule and one --profile"
        raise InputError(f"{alone} are for one schedule and one profile", hint=hint)
    schedules = COMPARED if args.schedule in ALL else [options.order]
    choice = choose(profiles, cluster, options, schedules, patience.part(SEARCHING))
    if not args.json:
        print(as_flags(str(choice)), end="\n\n")
    plan = with_best_synchronous(choice)
    return with_baselines(next(one for one in profiles if one.digest == plan.profile_digest), plan, patience)


def _profile_paths(given: str, sizes: list[int] | None) -> str:
    """Return the files of the profiles, for `read_profiles`."""
    if sizes is None:
        return given
    if "," in given:
        raise InputError(
            f"--batch-size {','.join(map(str, sizes))} and several profiles say the same twice",
            hint="leave out --batch-size, or give one --profile",
        )
    return ",".join(str(profile_path(Path(given), size)) for size in sizes)
