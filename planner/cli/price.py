"""`plan price`: profile, cluster and somebody's own stages -> plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import planner
from planner.cli.arguments import (
    PLAN,
    Verbs,
    add_options,
    add_output_argument,
    add_profile_argument,
    declare,
)
from planner.cli.cluster import add_cluster_arguments, cluster_of
from planner.cli.output import print_answer, print_written, refuse
from planner.errors import InfeasibleError, InputError
from planner.options.numbers import at_least, is_count
from planner.options.solving import SolveOptions
from planner.schedule.instructions import CHUNKS
from planner.schedule.registry import DEFAULT, find

if TYPE_CHECKING:
    from planner.formats.own_plan import OwnStage

DESCRIPTION = """\
Price stages that you chose yourself, by the same costs and the same simulation as `plan solve`: what would my Megatron
or DeepSpeed run give on this cluster? The plan is written like any other, so that it can be simulated and trained.

    plan price --stages 4 --schedule 1f1b-flush --microbatches 32 --topology 8x2 --bandwidth 300GB/s,100Gbps
    plan price --stages 6,6,7,5 --replicas 2 --recompute 0,1:4 --shard-optimizer all --gpus 8 --bandwidth 10Gbps
    plan price --stages features.16,classifier.0 --replicas 2,1,1 --gpus 4 --bandwidth 10Gbps
"""
_STAGES = ("stages", "replicas", "recompute", "shard_optimizer", "schedule", "microbatches", "chunks")


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
    stages.add_argument(
        "--replicas",
        metavar="R|R,R",
        help="replicas of each stage, or of all; 2x4 are two replicas of four ranks that divide layers between them "
        "(default: as many replicas as the GPUs allow for all)",
    )
    stages.add_argument(
        "--recompute",
        metavar="all|S,S:N",
        help="stages, counted from 0, that run their forward again instead of keeping activations; with :N only the "
        "first N of the model's blocks in the stage do, each by itself, as in all:4 or 0:4,1:2 (default: none)",
    )
    stages.add_argument(
        "--shard-optimizer",
        metavar="all|S,S",
        help="stages whose replicas divide the optimizer's state and its update; all: those that have two replicas or "
        "more (default: none)",
    )
    add_options(stages, SolveOptions, "schedule")
    add_options(stages, SolveOptions, "microbatches", "chunks", type=at_least(1))
    help = "stages and schedule as JSON, in place of the arguments above"
    stages.add_argument("--given", type=Path, metavar="FILE", help=help)


def run(args: argparse.Namespace) -> int:
    """Price, save, and print the plan; raise InfeasibleError if it does not fit the memory."""
    from planner.analysis.own_plan import missing_memory
    from planner.analysis.usual_ways import with_baselines
    from planner.formats.importers import read_one_profile
    from planner.reporting.tables.plan import plan_report
    from planner.solver.problem.budget import Patience

    profile = read_one_profile(args.profile)
    cluster = cluster_of(args, profile)
    plan = planner.price(profile, cluster, _own_plan(args, profile, cluster))
    plan = with_baselines(profile, plan, Patience())
    planner.save_plan(plan, args.output)
    missing = missing_memory(plan)
    if not (missing and args.json):  # which prints one record: the plan, or why there is none
        print_answer(plan, args.json, plan_report)
    print_written(args.output)
    if missing:
        raise InfeasibleError(missing, hint="recompute more stages, or give them fewer layers")
    return 0


def _own_plan(args: argparse.Namespace, profile: planner.Profile, cluster: planner.Cluster) -> planner.OwnPlan:
    from planner.formats.own_plan import load_own_plan

    if args.given is not None:
        refuse(args, "given", *_STAGES, why=", which says so itself")
        return load_own_plan(args.given)
    if args.stages is None:
        raise InputError("there are no stages to price", hint="give --stages 4, or --given FILE")
    schedule = find(args.schedule or DEFAULT)
    stages = _stages(args.stages, profile)
    chunks = schedule.fixed_chunks or args.chunks or CHUNKS
    replicas = _replicas(args.replicas, len(stages), cluster.gpus * chunks // len(stages))
    again = dict(_chosen("recompute", args.recompute, range(len(stages))))
    several = [stage for stage, (count, _) in enumerate(replicas) if count > 1]
    sharded = [stage for stage, _ in _chosen("shard-optimizer", args.shard_optimizer, several)]
    for number in (*again, *sharded):
        if number >= len(stages):
            raise InputError(f"there is no stage {number}", hint=f"stages count from 0 to {len(stages) - 1}")
    if alone := [number for number in sharded if number not in several]:
        raise InputError(
            f"stage {alone[0]} has one replica, which has nobody to divide the optimizer's state with",
            hint="give it --replicas 2 or more",
        )
    described = tuple(
        stage.model_copy(
            update={
                "replicas": count,
                "tensor": degree,
                "recompute": again.get(number, False),
                "sharded": number in sharded,
            }
        )
        for number, (stage, (count, degree)) in enumerate(zip(stages, replicas, strict=True))
    )
    chosen = {name: getattr(args, name) for name in ("microbatches", "chunks") if getattr(args, name) is not None}
    return planner.OwnPlan(stages=described, schedule=schedule, **chosen)


def _stages(text: str, profile: planner.Profile) -> list[OwnStage]:
    from planner.analysis.own_plan import equal_stages, stages_ending_at

    parts = text.split(",")
    if not all(is_count(part) for part in parts):
        return stages_ending_at(profile, parts)
    if len(parts) == 1:
        return equal_stages(profile, int(text))
    if "0" in parts:
        raise InputError(f"--stages {text} has a stage without blocks", hint="give each stage at least one block")
    return [planner.OwnStage(blocks=int(part)) for part in parts]


def _replicas(text: str | None, stages: int, possible: int) -> list[tuple[int, int]]:
    """Return the replicas of each stage, and the ranks of each of them."""
    if text is None:
        return [(max(1, possible), 1)] * stages
    parts = [part.partition("x") for part in text.split(",")]
    pairs = [(count, degree if times else "1") for count, times, degree in parts]
    if not all(is_count(number) and int(number) for pair in pairs for number in pair) or len(pairs) not in (1, stages):
        raise InputError(
            f"--replicas {text} does not say how many replicas each of {stages} stages has",
            hint=f"give one number for all, or {stages} numbers, each 1 or more: --replicas 2,1,1",
        )
    return [(int(count), int(degree)) for count, degree in pairs] * (stages if len(pairs) == 1 else 1)


def _chosen(flag: str, text: str | None, all_stages: Iterable[int]) -> Iterator[tuple[int, bool | int]]:
    """Yield the stages that "all" or "0,1:4" names, each with what follows its colon, or True."""
    for part in text.split(",") if text is not None else ():
        which, colon, units = part.partition(":")
        has_units = flag == "recompute" and is_count(units) and int(units) > 0
        if not (which == "all" or is_count(which)) or (colon and not has_units):
            raise InputError(f"--{flag} {text} is no list of stages", hint=f"for example: --{flag} 0,1, or all")
        for stage in all_stages if which == "all" else [int(which)]:
            yield stage, int(units) if colon else True
