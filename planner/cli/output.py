"""Print answers on stdout, and all else on stderr, with arguments shown as flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from planner.cli.flags import as_flags

if TYPE_CHECKING:
    from pydantic import BaseModel

    Answer = TypeVar("Answer", bound=BaseModel)


def print_answer(answer: Answer, as_json: bool, table: Callable[[Answer], str]) -> None:
    """Print a verb's answer on stdout: as JSON, or as the text that `table` makes of it."""
    print(answer.model_dump_json(indent=1) if as_json else as_flags(table(answer)))


def print_complaint(kind: str, message: str, hint: str = "") -> None:
    """Print an error, a warning or a note on stderr, its hint on a second line."""
    print(f"{kind}: {as_flags(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {as_flags(hint)}", file=sys.stderr)


def print_progress(text: str) -> None:
    """Print what has been done on stderr."""
    print(as_flags(text), file=sys.stderr, flush=True)
