"""Print answers on stdout, and all else on stderr, with arguments shown as flags."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from planner.cli.flags import as_flags
from planner.errors import PlannerError
from planner.options.solving import Progress
from planner.terminal import ProgressLine
from planner.units import format_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

    Answer = TypeVar("Answer", bound=BaseModel)

STDOUT = Path("-")  # in place of a file's name
QUIET_S = 2.0  # before anything is shown
EVERY_S = 0.5  # on a terminal, whose line is rewritten
SELDOM_S = 10.0  # elsewhere, where every line stays


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


@contextmanager
def searching() -> Iterator[Progress]:
    """Show on stderr what the searches know that the progress is given to, from two seconds on."""
    progress, done = Progress(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(progress, done), name="progress", daemon=True)
    watcher.start()
    try:
        yield progress
    finally:
        done.set()
        watcher.join()


def _watch(progress: Progress, done: threading.Event) -> None:
    line = ProgressLine() if sys.stderr.isatty() else None
    wait_s = QUIET_S
    while not done.wait(wait_s):
        if line is None:
            print_progress(progress_text(progress))
        else:
            line.show(progress_text(progress))
        wait_s = SELDOM_S if line is None else EVERY_S
    if line is not None:
        line.clear()


def progress_text(progress: Progress) -> str:
    """Write the best plan so far, the bound, and how much time is left."""
    from planner.formats.plan_parts import short_config

    parts = []
    if progress.config:
        parts.append(f"best so far {short_config(progress.config)}, {format_seconds(progress.best_s)} per minibatch")
    else:
        parts.append("no plan so far")
    if progress.bound_s > 0:
        parts.append(f"no plan takes less than {format_seconds(progress.bound_s)}")
    if progress.ends_at_s is not None:
        parts.append(f"{max(progress.ends_at_s - time.monotonic(), 0):.0f} s left")
    return "; ".join(parts)
