"""Render the arguments that the library's messages name in backticks as flags of the command line."""

from __future__ import annotations

import argparse
import re

from planner.errors import InputError
from planner.options.option import flag_of, options_in
from planner.options.profiling import EstimateArguments, ProfileOptions
from planner.options.solving import SolveOptions
from planner.options.training import CheckpointOptions, RunOptions, TrainArguments, TrainingOptions

_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")
_PLAIN_NUMBER = re.compile(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?")
# Flags that belong to no record of options: what a verb reads, writes and shows, and the cluster.
_OWN = """
    against bandwidth by cluster colocate compress constraints estimate forbid_cut_after format given gpu gpus json
    kinds latency length links memory minibatches model no_overlap only output own_links pin pin_gpu plan plot
    points profile replicas sequence_parallel servers skip stages to top topology verify workers
"""
# Names of Python parameters that differ from the flag's, and the unit that the flag wants after a plain number.
_OTHER_NAMES = {
    "bandwidth_bytes_per_s": ("--bandwidth", "B/s"),
    "gpu_of": ("--pin-gpu", ""),
    "latency_s": ("--latency", "s"),
    "measured": ("--run", ""),
    "memory_bytes": ("--memory", "B"),
    "no_cut_after": ("--forbid-cut-after", ""),
    "place": ("--output", ""),
    "sizes": ("--topology", ""),
    "stage_of": ("--pin", ""),
    "system": ("--to", ""),
    "together": ("--colocate", ""),
}
_RECORDS = (
    SolveOptions,
    ProfileOptions,
    EstimateArguments,
    TrainArguments,
    TrainingOptions,
    CheckpointOptions,
    RunOptions,
)
_OPTIONS = {each.name: option for record in _RECORDS for each, option in options_in(record)}
FLAGS = {name: (f"--{name.replace('_', '-')}", "") for name in _OWN.split()} | _OTHER_NAMES
FLAGS |= {name: (flag, option.unit) for name, option in _OPTIONS.items() if (flag := flag_of(name, option))}
# What stands for False.
NEGATIONS = {"overlap": "--no-overlap", "shared": "--own-links"}
NEGATIONS |= {name: option.negation for name, option in _OPTIONS.items() if option.negation}


def as_flags(text: str) -> str:
    """Replace each argument in backticks by its flag: "`accumulate=0`" becomes "--accumulate 0".

    A boolean becomes its flag alone: "`scale_lr`" and "`scale_lr=True`" are both "--scale-lr". Other text in backticks
    stays as it is.
    """
    return _ARGUMENT.sub(_flag, text)


def _flag(argument: re.Match[str]) -> str:
    name, value = argument[1], argument[2]
    if name in NEGATIONS and value == "False":
        return NEGATIONS[name]
    flag, unit = FLAGS.get(name, ("", ""))
    if not flag:
        return argument[0]
    if value in (None, "True"):
        return flag
    return f"{flag} {value}{unit if _PLAIN_NUMBER.fullmatch(value) else ''}"


def given(args: argparse.Namespace, name: str) -> bool:
    """Return whether the user gave the argument."""
    return getattr(args, name) not in (None, False)


def refuse(args: argparse.Namespace, chosen: str, *others: str, why: str = "") -> None:
    """Refuse arguments that contradict the chosen one; raise InputError naming the first of them."""
    for name in others:
        if given(args, name):
            raise InputError(
                f"`{name}` has no meaning with `{chosen}`{why}", hint=f"leave out one of `{chosen}` and `{name}`"
            )
