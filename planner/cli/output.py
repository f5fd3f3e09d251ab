"""Print answers on stdout and all else on stderr, with the arguments that messages name in
backticks as flags.
"""

import argparse
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.results import print_json, print_result, print_table
from planner.options.cluster import ClusterOptions
from planner.options.option import flag_of, options_in
from planner.options.profiling import EstimateArguments, ProfileOptions
from planner.options.solving import Progress, SolveOptions
from planner.options.training import (
    CheckpointOptions,
    DriftOptions,
    ElasticOptions,
    RunOptions,
    TrainArguments,
    TrainingOptions,
)
from planner.options.verbs import (
    FitOptions,
    PriceOptions,
    QuickstartOptions,
    ReportOptions,
    ScheduleOptions,
    SelftestOptions,
)
from planner.terminal import ProgressLine, printable
from planner.units import format_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

    from planner.formats.late import LateFailure
    from planner.formats.plan import Plan

_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")
_PLAIN_NUMBER = re.compile(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?")
# Flags that belong to no record of options: what a verb reads, writes and shows, and the cluster.
_OWN = """
    against by csv estimate json links open output plan plot profile schedule_from stages to top
"""
# Names of Python parameters that differ from the flag's, and the unit that the flag wants after a
# plain number.
_OTHER_NAMES = {
    "bandwidth_bytes_per_s": ("--bandwidth", "B/s"),
    "latency_s": ("--latency", "s"),
    "memory_bytes": ("--memory", "B"),
    "sizes": ("--topology", ""),
    "system": ("--to", ""),
}
_VERBS = (
    ScheduleOptions,  # before those whose options of the same names are shown differently
    PriceOptions,
    FitOptions,
    ReportOptions,
    QuickstartOptions,
    SelftestOptions,
    SolveOptions,
)
_RUNNING = (ProfileOptions, EstimateArguments, TrainArguments, TrainingOptions)
_KEEPING = (CheckpointOptions, DriftOptions, ElasticOptions, RunOptions)
_RECORDS = (ClusterOptions, *_VERBS, *_RUNNING, *_KEEPING)
_OPTIONS = {each.name: option for record in _RECORDS for each, option in options_in(record)}
FLAGS = {name: (f"--{name.replace('_', '-')}", "") for name in _OWN.split()} | _OTHER_NAMES
FLAGS |= {
    name: (flag, option.unit)
    for name, option in _OPTIONS.items()
    if (flag := flag_of(name, option))
}
# Names of flags that other programs have.
ALIASES = frozenset(
    alias for record in _RECORDS for _, option in options_in(record) for alias in option.aliases
)
# What stands for False.
NEGATIONS = {"overlap": "--no-overlap", "shared": "--own-links"}
NEGATIONS |= {name: option.negation for name, option in _OPTIONS.items() if option.negation}

STDOUT = Path("-")  # in place of a file's name
QUIET_S = 2.0  # before anything is shown
EVERY_S = 0.5  # on a terminal, whose line is rewritten
SELDOM_S = 10.0  # elsewhere, where every line stays


def as_flags(text: str) -> str:
    """Replace arguments in backticks by flags: "`keep=0`" is "--keep 0", "`scale_lr=True`" is
    "--scale-lr".
    """

    def flag_in(argument: re.Match[str]) -> str:
        name = argument[1]
        value = argument[2]
        if name in NEGATIONS and value == "False":
            return NEGATIONS[name]
        flag, unit = FLAGS.get(name, (argument[0], ""))
        if value in (None, "True") or name not in FLAGS:
            return flag
        return f"{flag} {value}{unit if _PLAIN_NUMBER.fullmatch(value) else ''}"

    return _ARGUMENT.sub(flag_in, text)


def print_answer(answer: "BaseModel", as_json: bool, table: str | None = None) -> None:
    """Print a verb's answer on stdout: as JSON, or as its tables, or the one given."""
    import planner.reporting.shown  # noqa: F401 - makes answers show their tables

    if as_json:
        print_json(answer.model_dump_json(indent=1))
    else:
        print_table(as_flags(str(answer) if table is None else table))


def print_plan(plan: "Plan", args: argparse.Namespace) -> None:
    """Print a plan as the answer: with -v also how it was found."""
    from planner.reporting.tables.plan import plan_report

    table = ""
    if not args.json:
        table = plan_report(plan, verbose=is_verbose(args))
    print_answer(plan, args.json, table)


def print_verdict(plan: "Plan") -> None:
    """Print what a plan comes to on stderr, beside an answer that is something else."""
    from planner.analysis.limits import simulated_limits
    from planner.reporting.tables.verdict import verdict_lines

    for line in verdict_lines(plan, simulated_limits(plan)):
        print_progress(line)


def is_verbose(args: argparse.Namespace) -> bool:
    """Return whether more of an answer was asked for."""
    return getattr(args, "verbosity", 0) > 0


def print_complaint(kind: str, message: str, hint: str = "") -> None:
    """Print an error, a warning or a note on stderr, its hint on a second line."""
    print(printable(f"{kind}: {as_flags(message)}"), file=sys.stderr)
    if hint:
        print(printable(f"hint: {as_flags(hint)}"), file=sys.stderr)


def print_progress(text: str) -> None:
    """Print what happens, or has happened, on stderr."""
    print(printable(as_flags(text)), file=sys.stderr, flush=True)


def print_late(failures: "Iterable[LateFailure]") -> int:
    """Print what could not be written once the answer was known; return the exit code, 1 if it was
    asked for.
    """
    code = 0
    for failure in failures:
        print_complaint("error" if failure.asked else "warning", failure.message, failure.hint)
        code = max(code, int(failure.asked))
    return code


@contextmanager
def saving(save: Callable[[], None], path: Path) -> Iterator[None]:
    """Save the answer that the block prints, in a file that is then named.

    The file comes second: where it cannot be written, the answer was printed. It is written all the
    same where the answer cannot be printed, because whoever reads stdout has left or its disk is
    full.
    """
    try:
        yield
    finally:
        save()
    print_written(path)


def print_written(path: Path, *, as_json: bool = False) -> None:
    """Print on stderr which file was written; as JSON on stdout, where the file is the whole
    answer.
    """
    if as_json:
        print_result(json.dumps({"written": str(path)}, indent=1))
    print_progress(f"written to {path}")


def try_outputs(args: argparse.Namespace) -> None:
    """Raise PlannerError for the first file that a verb is to write and cannot, before it
    begins.
    """
    from planner.formats.files import check_writable

    for name in ("output", "trace"):
        if isinstance(path := getattr(args, name, None), Path) and path != STDOUT:
            check_writable(path)


@contextmanager
def searching() -> Iterator[Progress]:
    """Show on stderr what the searches know that the progress is given to, from two seconds on."""
    progress = Progress()
    done = threading.Event()
    line = ProgressLine() if sys.stderr.isatty() else None
    show, wait_s = (print_progress, SELDOM_S) if line is None else (line.show, EVERY_S)

    def watch() -> None:
        pause_s = QUIET_S
        before = ""
        while not done.wait(pause_s):
            text = progress_text(progress)
            if text and (line is not None or text != before):  # lines that stay are not repeated
                show(text)
            before = text
            pause_s = wait_s

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield progress
    finally:
        done.set()
        watcher.join()
        if line is not None:
            line.clear()


@contextmanager
def profiling() -> Iterator[Callable[[str, float], None]]:
    """Show on stderr how far a profile is, as what it yields is told."""
    line = ProgressLine()
    phases = set[str]()

    def show(phase: str, done: float) -> None:
        if sys.stderr.isatty():
            line.show(f"{phase} {done:.0%}")
        elif phase not in phases:
            print_progress(f"{phase} ...")
        phases.add(phase)

    try:
        yield show
    finally:
        line.clear()


@contextmanager
def stopped_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C set the event, so that searches answer with the best plan so far; the
    second ends all.
    """

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print_progress("stopped: the best plan so far is the answer; Ctrl-C again ends without one")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def progress_text(progress: Progress) -> str:
    """Write the best plan so far, the bound, and how much time is left; nothing before a search
    begins.
    """
    from planner.formats.plan_parts import config_words

    if progress == Progress(stop=progress.stop):
        return ""

    parts = ["no plan so far"]
    if progress.config:
        least = "" if progress.simulated else "at least "
        parts = [
            f"best so far {config_words(progress.config)}, {least}"
            f"{format_seconds(progress.best_s)} per minibatch"
        ]

    if 0 < progress.bound_s < math.inf:  # no plan is known to fit where it is infinite
        parts.append(f"no plan takes less than {format_seconds(progress.bound_s)}")
    if progress.ends_at_s is not None:
        parts.append(f"{max(progress.ends_at_s - time.monotonic(), 0):.0f} s left")
    step = [progress.step] if progress.step else []
    return ": ".join([*step, "; ".join(parts)] if progress.config or not step else step)
