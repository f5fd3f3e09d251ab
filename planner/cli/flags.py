"""Render the arguments that the library's messages name in backticks as flags of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")
_PLAIN_NUMBER = re.compile(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?")
# Names in the Python API that differ from the flag's, and the unit that the flag wants after a plain number.
_OTHER_NAMES = {
    "bandwidth_bytes_per_s": ("--bandwidth", "B/s"),
    "compiled": ("--compile", ""),
    "every": ("--checkpoint-every", ""),
    "folder": ("--checkpoint-folder", ""),
    "gpu_of": ("--pin-gpu", ""),
    "latency_s": ("--latency", "s"),
    "memory_bytes": ("--memory", "B"),
    "no_cut_after": ("--forbid-cut-after", ""),
    "sizes": ("--topology", ""),
    "stage_of": ("--pin", ""),
    "system": ("--to", ""),
    "time_limit_s": ("--time-limit", "s"),
    "together": ("--colocate", ""),
}
# Booleans of the Python API whose False is a flag.
_NEGATIONS = {"defer_weights": "--no-defer-weights", "overlap": "--no-overlap", "shared": "--own-links"}
# The flag of every argument of every verb. Learned, not imported: the verbs' files import this one.
_options: dict[str, str] = {}


def as_flags(text: str) -> str:
    """Replace each argument in backticks by its flag: "`accumulate=0`" becomes "--accumulate 0".

    A boolean becomes its flag alone: "`scale_lr`" and "`scale_lr=True`" are both "--scale-lr". Other text in backticks
    stays as it is.
    """
    return _ARGUMENT.sub(_flag, text)


def _flag(argument: re.Match[str]) -> str:
    name, value = argument[1], argument[2]
    if name in _NEGATIONS and value == "False":
        return _NEGATIONS[name]
    flag, unit = _OTHER_NAMES.get(name) or (_options.get(name, ""), "")
    if not flag:
        return argument[0]
    if value in (None, "True"):
        return flag
    return f"{flag} {value}{unit if _PLAIN_NUMBER.fullmatch(value) else ''}"


def learn(verbs: Iterable[argparse.ArgumentParser]) -> None:
    """Learn the flags of the verbs' arguments."""
    for verb in verbs:
        for action in verb._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    # The first wins: --json, where it is short for --format json, comes after --format.
                    _options.setdefault(action.dest, option)
