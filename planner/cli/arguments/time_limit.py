"""How long to search, and what is shown meanwhile: the same for every verb that solves."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from planner.cli.output import ProgressLine, print_progress
from planner.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from planner.solver.problem.budget import Progress

TIME_LIMIT = "60s"
QUIET_S = 2.0  # before anything is shown
EVERY_S = 0.5  # on a terminal, whose line is rewritten
SELDOM_S = 10.0  # elsewhere, where every line stays


def add_time_limit_argument(parser: argparse.ArgumentParser, default: str = TIME_LIMIT) -> None:
    """Declare --time-limit."""
    parser.add_argument(
        "--time-limit",
        type=_limit,
        default=default,
        metavar="TIME",
        help="answer after a time such as 30s, which all searches share, with the best plans so far; none: however "
        "long it takes (default: %(default)s)",
    )


def _limit(text: str) -> float | None:
    return None if text == "none" else parse_seconds(text)


@contextmanager
def shown() -> Iterator[Progress]:
    """Show on stderr what the searches know that the progress is given to, from two seconds on."""
    from planner.solver.problem.budget import Progress

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
