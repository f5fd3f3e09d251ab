"""The arguments that describe a cluster and what a plan on it must respect, the same for every verb."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import planner
from planner.cli.records import add_options, given_options
from planner.errors import InputError
from planner.options.cluster import ClusterOptions
from planner.options.numbers import is_count
from planner.options.option import options_in

if TYPE_CHECKING:
    from planner.formats.constraints import Constraints

CLUSTER = tuple(each.name for each, _ in options_in(ClusterOptions))


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "cluster"; `cluster_of` reads it."""
    group = parser.add_argument_group("cluster", "--bandwidth with --gpus or --topology; or --cluster")
    add_options(group, ClusterOptions)


def cluster_of(args: argparse.Namespace, profile: planner.Profile) -> planner.Cluster:
    """Return the cluster that the arguments describe; raise ClusterError when they do not describe one."""
    return planner.cluster(profile, **given_options(ClusterOptions, args))


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "constraints"; `constraints_of` reads it."""
    group = parser.add_argument_group("constraints", "layers are named as in the profile; each option may be repeated")
    for flag, metavar, help in (
        ("--pin", "LAYER=STAGE", "put the layer in that stage, counted from 0"),
        ("--pin-gpu", "LAYER=RANK", "run the layer on the GPU of that rank, in a cluster whose GPUs differ"),
        ("--colocate", "LAYER,LAYER", "keep these layers in one stage"),
        ("--forbid-cut-after", "LAYER", "keep the layer in one stage with the next one in the profile"),
    ):
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=help)
    help = "constraints.json, in place of the arguments above"
    group.add_argument("--constraints", type=Path, metavar="FILE", help=help)


def constraints_of(args: argparse.Namespace) -> Constraints:
    """Return the constraints that the arguments describe; raise InputError when they do not describe any."""
    from planner.formats.constraints import Constraints, load_constraints

    given = Constraints(
        stage_of=dict(_pair(text, "--pin", "STAGE") for text in args.pin),
        gpu_of=dict(_pair(text, "--pin-gpu", "RANK") for text in args.pin_gpu),
        together=tuple(tuple(text.split(",")) for text in args.colocate),
        no_cut_after=tuple(args.forbid_cut_after),
    )
    if args.constraints is None:
        return given
    if not given.empty:
        raise InputError("--constraints and other constraints are both given", hint="write all of them into the file")
    return load_constraints(args.constraints)


def _pair(text: str, option: str, what: str) -> tuple[str, int]:
    layer, separator, number = text.rpartition("=")
    if not separator or not is_count(number):
        raise InputError(f"{option} '{text}' is not LAYER={what}", hint=f"for example: {option} classifier.6=1")
    return layer, int(number)
