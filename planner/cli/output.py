"""Print answers on stdout, and all else on stderr, with arguments shown as flags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from planner.cli.flags import as_flags
from planner.errors import PlannerError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Answer = TypeVar("Answer", bound=BaseModel)


STDOUT = Path("-")  # in place of a file's name


def print_answer(answer: Answer, as_json: bool, table: Callable[[Answer], str]) -> None:
    """Print a verb's answer on stdout: as JSON, or as the text that `table` makes of it."""
    print(answer.model_dump_json(indent=1) if as_json else as_flags(table(answer)))


def print_complaint(kind: str, message: str, hint: str = "") -> None:
    """Print an error, a warning or a note on stderr, its hint on a second line."""
    print(f"{kind}: {as_flags(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {as_flags(hint)}", file=sys.stderr)


def print_failure(error: PlannerError, exit_code: int) -> None:
    """Print an error on stdout for a machine that reads the answer there."""
    told = {"error": as_flags(error.message), "hint": as_flags(error.hint), "exit_code": exit_code}
    print(json.dumps(told, indent=1))


def print_progress(text: str) -> None:
    """Print what happens, or has happened, on stderr."""
    print(as_flags(text), file=sys.stderr, flush=True)


def print_written(path: Path, *, as_json: bool = False) -> None:
    """Print on stderr which file was written; as JSON on stdout, where the file is the whole answer."""
    if as_json:
        print(json.dumps({"written": str(path)}, indent=1))
    print_progress(f"written to {path}")


def try_outputs(args: argparse.Namespace) -> None:
    """Try whether the files that a verb is to write can be written, before it begins.

    Raises:
        PlannerError: for the first one that cannot.
    """
    from planner.formats.files import check_writable

    for name in ("output", "trace", "plot"):
        if isinstance(path := getattr(args, name, None), Path) and path != STDOUT:
            check_writable(path)


class ProgressLine:
    """One line on stderr that is rewritten in place."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line's text."""
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def keep(self) -> None:
        """Leave the text on the screen, and begin a new line."""
        if self._width:
            sys.stderr.write("\n")
        self._width = 0

    def clear(self) -> None:
        """Remove the text from the screen."""
        sys.stderr.write("\r" + " " * self._width + "\r")
        sys.stderr.flush()
        self._width = 0
