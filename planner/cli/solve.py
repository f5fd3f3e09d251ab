"""`plan solve`, `plan fit` and `plan price`: a profile or a model's name, and a cluster -> plan."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import planner
from planner.cli import arguments, measured, output
from planner.errors import InfeasibleError, PlannerError
from planner.options.kinds import checked_counts
from planner.options.numbers import count
from planner.options.solving import SolveOptions
from planner.options.verbs import FitOptions, PriceOptions
from planner.profiler.estimated.devices import DEVICES, check_kind
from planner.schedule.registry import AUTO, NAMES, SCHEDULES, summaries

SOLVE = """\
Find the fastest plan: which layers form each stage, and how many GPUs run it. An exact search by
the cost model finds candidates and a lower bound. Simulating the candidates' schedules chooses
among them, and the answer says how far it is from the bound. A plan uses no more GPUs than its
speed needs.

    plan solve --servers 2 --gpus-per-server 4 --bandwidth pcie4,10Gbps
    plan solve --gpus 8 --bandwidth 10Gbps         # each GPU has such a link to all others
    plan solve --run run.json -o next.json         # plan.json's cluster, as a run measured it
"""
FIT = """\
Say in one screen whether a model fits your GPUs, how to split it, how fast it would train, what
baselines would give, and how few GPUs would do. All numbers are estimates: nothing is measured, and
no weights are made or downloaded.

    plan fit llama-7b --servers 2 --gpus-per-server 4 --gpu rtx-4090 --bandwidth 10Gbps
    plan fit llama-7b --gpus 8 --gpu a100-80gb     # one server of 8
    plan fit path/to/config.json --servers 2 --gpus-per-server 8 --gpu l4 --bandwidth 4GB/s,25Gbps
    plan fit model.py --gpus 4 --gpu rtx-4090
    plan fit gpt2-xl --gpu v100=12,t4=4            # kinds of GPUs, each in servers of its own

A name or a config.json of Hugging Face needs the package transformers. A folder then gets model.py,
which builds that model; profile.json and plan.json are left beside it, for the other verbs.
"""
NEXT = """\
{folder} holds {files}profile.json and plan.json. Next:
  cd {folder}
  plan show                                     # stages, memory, what limits the plan
  plan report --open                            # all of it, with a timeline"""
TRAIN = """
  {train:45} # on those GPUs, with a dataset() in {model}"""
EXPORT = """
  plan export --to torchtitan                   # which shards sequences; plan train does not"""
PRICE = """\
Price stages that you chose yourself, by the same costs and the same simulation as `plan solve`:
what would my Megatron or DeepSpeed run give on this cluster? The plan is written like any other, so
that it can be simulated and trained.

    plan price --stages 4 --schedule 1f1b-flush --microbatches 32 \\
        --topology 8x2 --bandwidth nvlink4,100Gbps
    plan price --stages 6,6,7,5 --replicas 2 --recompute 0,1:4 \\
        --servers 2 --gpus-per-server 4 --bandwidth pcie4,10Gbps
    plan price --stages features.16,classifier.0 --replicas 2,1,1 --gpus 4 --bandwidth 10Gbps
"""


def add_parser(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(
        verbs, "solve", "find the fastest plan for a profile and a cluster", SOLVE, solve
    )
    arguments.add_cluster_arguments(parser)
    measured.add_arguments(parser)
    arguments.add_profile_argument(parser)
    arguments.add_output_argument(parser, arguments.PLAN)
    every = (
        f"\n{AUTO}: the fastest of all that train as one device does, and with "
        f"--max-staleness of all"
    )
    arguments.add_options(parser, SolveOptions, "schedule", choices=[*NAMES, AUTO], more=every)
    arguments.add_options(parser, SolveOptions, "microbatches", "minibatch", "chunks", "depth")
    arguments.add_options(parser, SolveOptions, "accept_divided_loss", "survive")
    arguments.add_rule_arguments(parser)
    arguments.add_options(parser, SolveOptions, "solver")

    summary = "from a model's name: does it fit, how to split it, how fast is it"
    parser = arguments.declare(verbs, "fit", summary, FIT, fit)
    help = "llama-7b, gpt2-xl, ...; a class of transformers; its config.json; or a model file"
    parser.add_argument("model", help=help)
    known = ", ".join(name for name in DEVICES if name != "cpu")
    arguments.add_options(parser, FitOptions, "gpu", more=f". Kinds: {known}")
    arguments.add_options(parser, FitOptions, "servers", "gpus_per_server", "topology")
    parser.add_argument("--gpus", type=count, metavar="N", help="number of GPUs in all")
    arguments.add_options(parser, FitOptions, "bandwidth", "cluster", "memory", "compress")
    arguments.add_options(parser, FitOptions, "length")
    arguments.add_options(parser, FitOptions, "offload", "host_bandwidth")
    arguments.add_options(parser, FitOptions, "lora", "bits", "optimizer_states")
    arguments.add_options(parser, FitOptions, "megatron", "torchtitan", "deepspeed", "accelerate")
    arguments.add_options(
        parser, FitOptions, "batch_size", "minibatch", "tokens", "dtype", "autocast"
    )
    arguments.add_options(parser, FitOptions, "precision", "stack")
    arguments.add_options(parser, FitOptions, "context")
    arguments.add_options(parser, FitOptions, "train_tokens", "dollars_per_gpu_hour")
    whole = [schedule for schedule in SCHEDULES if not schedule.chunked]
    arguments.add_options(
        parser, FitOptions, "schedule", choices=list(map(str, whole)), help=summaries(whole)
    )
    arguments.add_rule_arguments(parser, FitOptions)
    help = (
        "folder for model.py, profile.json and plan.json (default: the model's name; for a "
        "model file, its own)"
    )
    arguments.add_folder_argument(parser, help)

    parser = arguments.declare(verbs, "price", "price stages that you chose yourself", PRICE, price)
    arguments.add_cluster_arguments(parser)
    arguments.add_profile_argument(parser)
    arguments.add_output_argument(parser, arguments.PLAN)
    stages = parser.add_argument_group("stages")
    help = (
        "4: that many stages, of equally many of the model's blocks, or of its layers where "
        "it has no lists of "
    )
    help += (
        "modules; 6,6,7,5: the blocks of each stage; or the last layer of each stage but the "
        "final one"
    )
    stages.add_argument("--stages", metavar="N|N,N|LAYER,LAYER", required=True, help=help)
    arguments.add_options(stages, PriceOptions)


def solve(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.api.planning import answer
    from planner.formats.device_kinds import read_profile
    from planner.solver.request import Request

    with arguments.clock_of(args) as clock:
        profile = read_profile(args.profile)
        run = measured.given(args)
        if run is None:
            cluster = arguments.cluster_of(args, profile)
        else:
            cluster = run[1].cluster
        options = arguments.read_options(SolveOptions, args)
        with output.stopped_by_interrupt(clock.stop):
            plan = answer(Request(profile, cluster, options, clock))

    with output.saving(partial(planner.save_plan, plan, args.output), args.output):
        output.print_plan(plan, args)
    if run is not None:
        measured.print_measured(profile, *run, plan)
    for kind, message, hint in complaints(plan, profile):
        output.print_complaint(kind, message, hint)
    output.print_progress(next_commands(plan, args))
    return 0


def next_commands(plan: planner.Plan, args: argparse.Namespace) -> str:
    """Return the line with which an answer ends: what to type next."""
    from planner.plan.trainable import is_trained_here, trains_sequences

    named = ""
    if args.output != arguments.PLAN:
        named = f" --plan {shlex.quote(str(args.output))}"
    profile = ""
    if args.profile != str(arguments.PROFILE):
        profile = f" --profile {shlex.quote(args.profile)}"
    train = ""
    if not trains_sequences(plan):
        train = f", or plan export --to torchtitan{named}"
    elif is_trained_here(plan):
        train = f", or plan train MODEL.py{named}"

    return f"next: plan report --open{named}{profile}{train}"


def complaints(plan: planner.Plan, profile: planner.Profile) -> Iterator[tuple[str, str, str]]:
    """Yield the notes and warnings on a plan: which they are, what they say, and a hint."""
    from planner.formats.device_kinds import planned_bytes
    from planner.formats.names import PLANNED
    from planner.plan.shared_weights import obstacle, shared_weights, trained_parameters
    from planner.reporting.tables.links import links_warning
    from planner.reporting.tables.plan import staleness_warning
    from planner.reporting.tables.profile import shared_host_notes, uncut_notes
    from planner.units import format_bytes, format_memory

    if plan.cluster.memory_bytes is not None and plan.cluster.memory_bytes == planned_bytes(
        profile.device
    ):
        share = (
            f"{PLANNED:.0%} of the {format_memory(profile.device.memory_bytes or 0)} that "
            f"the profiled GPU has"
        )
        yield (
            "note",
            f"plans fill {share}, for fragments and what libraries take",
            "`memory` gives another limit",
        )

    if warning := staleness_warning(plan):
        yield "warning", *warning
    if warning := links_warning(plan):
        yield "warning", *warning
    shared = list(
        shared_weights([stage.layers for stage in plan.stages], trained_parameters(profile))
    )
    if problem := obstacle(plan, shared):
        yield "warning", *problem
    elif shared:
        size = format_bytes(sum(pair.gradient_bytes for pair in plan.shared))
        left_out = ", which the prediction leaves out"
        if plan.predicted.by == "simulation":
            left_out = ""
        yield (
            "note",
            shared[0].sentence(f"; they exchange gradients of up to {size} per update{left_out}"),
            "",
        )

    for text, hint in (*uncut_notes(profile), *shared_host_notes(plan, profile)):
        yield "note", text, hint


def _kinds(gpu: str | Mapping[str, int] | None) -> Sequence[str]:
    """Return the kinds of GPUs that were asked about."""
    if gpu is None:
        return ()
    return (gpu,) if isinstance(gpu, str) else tuple(checked_counts(gpu))


def fit(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.plan.trainable import is_trained_here, trains_sequences
    from planner.reporting.tables.links import links_warning

    for kind in _kinds(args.gpu):
        check_kind(kind, alone=not isinstance(args.gpu, dict))
    with output.searching() as progress:
        output.print_progress(f"estimating {args.model} ...")
        answer = planner.fit(
            args.model, args.gpus, **arguments.given_options(FitOptions, args), progress=progress
        )

    output.print_answer(answer, args.json)
    if answer.asked.plan is not None and (warning := links_warning(answer.asked.plan)):
        output.print_complaint("warning", *warning)
    code = output.print_late(answer.late_failures)
    if answer.asked.plan is None:
        if answer.asked.unknown:
            return PlannerError.exit_code
        return InfeasibleError.exit_code

    if code:
        return code
    model = answer.model_file  # of another folder, with the way from here to there
    files = "" if Path(model).name != model else f"{model}, "
    steps = NEXT.format(folder=answer.folder, files=files)
    plan = answer.asked.plan
    if not trains_sequences(plan):
        steps += EXPORT
    elif is_trained_here(plan):
        steps += TRAIN.format(train=f"plan train {model}", model=Path(model).name)

    output.print_progress("\n" + steps)
    return 0


def price(args: argparse.Namespace) -> int:
    """Price, print, and save the plan; raise InfeasibleError if it does not fit the memory."""
    from planner.analysis.given_plan import missing_memory
    from planner.formats.device_kinds import read_profile

    profile = read_profile(args.profile)
    cluster = arguments.cluster_of(args, profile)
    plan = planner.price(
        profile, cluster, args.stages, **arguments.given_options(PriceOptions, args)
    )
    missing = missing_memory(plan)
    with output.saving(partial(planner.save_plan, plan, args.output), args.output):
        if not (missing and args.json):  # which prints one record: the plan, or why there is none
            output.print_plan(plan, args)

    if missing:
        raise InfeasibleError(missing, hint="recompute more stages, or give them fewer layers")
    output.print_progress(next_commands(plan, args))
    return 0
