"""The command line's surface, frozen: verbs, flags, choices and defaults change only together with
`surface.txt`.

After a change on purpose, write the file anew: `python -m tests.cli.test_surface`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from planner.cli.main import build_parser
from planner.cli.parser import is_advanced

FILE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """Each verb's arguments as lines: names, how many values, choices, and the default that its
    help states.
    """
    parser = build_parser()
    verbs = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ).choices
    return "\n".join(f"plan {name}\n{_arguments(verb)}\n" for name, verb in verbs.items())


def _arguments(parser: argparse.ArgumentParser) -> str:
    return "\n".join(sorted(_line(parser, action) for action in parser._actions))


def _line(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    parts = [", ".join(action.option_strings) or str(action.dest)]
    if action.choices is not None:
        parts.append("{" + ",".join(map(str, action.choices)) + "}")
    elif action.nargs != 0:
        parts.append(str(action.metavar or action.dest.upper()))
    if action.nargs not in (None, 0):
        parts.append(f"nargs={action.nargs}")
    if action.required:
        parts.append("required")
    told = " ".join(parser._get_formatter()._expand_help(action).split())
    if stated := re.search(r"\(default: ((?:[^()]|\([^()]*\))*)\)", told):
        parts.append(f"default: {stated[1]}")
    if is_advanced(action):
        parts.append("(--help-all)")
    return "  " + " ".join(parts)


def test_the_command_line_is_as_frozen() -> None:
    assert surface() == FILE.read_text(encoding="utf-8")


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
