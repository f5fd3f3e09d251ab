"""`plan price`: profile, cluster and somebody's own stages -> plan."""

from __future__ import annotations

import argparse
from pathlib import Path

import planner
from planner.cli.arguments import PLAN, Verbs, add_output_argument, add_profile_argument, declare
from planner.cli.cluster import add_cluster_arguments, cluster_of
from planner.cli.output import print_answer, print_written
from planner.cli.records import add_options, given_options
from planner.errors import InfeasibleError, InputError
from planner.options.option import options_in, refuse
from planner.options.verbs import PriceOptions

DESCRIPTION = """\
Price stages that you chose yourself, by the same costs and the same simulation as `plan solve`: what would my Megatron
or DeepSpeed run give on this cluster? The plan is written like any other, so that it can be simulated and trained.

    plan price --stages 4 --schedule 1f1b-flush --microbatches 32 --topology 8x2 --bandwidth 300GB/s,100Gbps
    plan price --stages 6,6,7,5 --replicas 2 --recompute 0,1:4 --shard-optimizer all --gpus 8 --bandwidth 10Gbps
    plan price --stages features.16,classifier.0 --replicas 2,1,1 --gpus 4 --bandwidth 10Gbps
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "price", "price stages that you chose yourself", DESCRIPTION, run)
    add_cluster_arguments(parser)
    add_profile_argument(parser)
    add_output_argument(parser, PLAN)
    stages = parser.add_argument_group("stages", "--stages; or --given")
    stages.add_argument(
        "--stages",
        metavar="N|N,N|LAYER,LAYER",
        help="4: that many stages with equally many of the model's blocks, the elements of its lists of modules, or of "
        "its layers where it has no lists; 6,6,7,5: the blocks of each stage; or the last layer of each stage but the "
        "final one",
    )
    add_options(stages, PriceOptions)
    help = "stages and schedule as JSON, in place of the arguments above"
    stages.add_argument("--given", type=Path, metavar="FILE", help=help)


def run(args: argparse.Namespace) -> int:
    """Price, save, and print the plan; raise InfeasibleError if it does not fit the memory."""
    from planner.analysis.own_plan import missing_memory
    from planner.formats.importers import read_one_profile

    profile = read_one_profile(args.profile)
    cluster = cluster_of(args, profile)
    if args.given is not None:
        refuse(
            args, "given", "stages", *(each.name for each, _ in options_in(PriceOptions)), why=", which says so itself"
        )
    elif args.stages is None:
        raise InputError("there are no stages to price", hint="give --stages 4, or --given FILE")
    plan = planner.price(profile, cluster, args.given or args.stages, **given_options(PriceOptions, args))
    planner.save_plan(plan, args.output)
    missing = missing_memory(plan)
    if not (missing and args.json):  # which prints one record: the plan, or why there is none
        print_answer(plan, args.json)
    print_written(args.output)
    if missing:
        raise InfeasibleError(missing, hint="recompute more stages, or give them fewer layers")
    return 0
