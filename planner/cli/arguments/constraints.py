"""The arguments that say what a plan must respect."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments.numbers import is_count
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.formats.constraints import Constraints


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "constraints"; `constraints_of` reads it."""
    group = parser.add_argument_group("constraints", "layers are named as in the profile; each option may be repeated")
    group.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="LAYER=STAGE",
        help="put the layer in that stage, counted from 0",
    )
    group.add_argument(
        "--pin-gpu",
        action="append",
        default=[],
        metavar="LAYER=RANK",
        help="run the layer on the GPU of that rank, in a cluster whose GPUs differ",
    )
    group.add_argument(
        "--colocate", action="append", default=[], metavar="LAYER,LAYER", help="keep these layers in one stage"
    )
    group.add_argument(
        "--forbid-cut-after",
        action="append",
        default=[],
        metavar="LAYER",
        help="keep the layer in one stage with the next one in the profile",
    )
    group.add_argument(
        "--constraints", type=Path, metavar="FILE", help="constraints.json, in place of the arguments above"
    )


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
