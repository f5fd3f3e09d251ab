"""Results go to stdout, and nothing else does: what a user's code prints goes to stderr.

A model file may print while it is imported, in `forward`, in `dataset()`, from C, or in a worker
process. In the midst of `--json` that would be no JSON. So while a verb runs, stdout leads to
stderr, also for the processes that it starts.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO

from planner.cli.colours import coloured, has_colours
from planner.streams import encodable_json
from planner.terminal import printable, printable_json

_STDOUT, _STDERR = 1, 2  # numbers of the process's streams

_results: TextIO | None = None  # while a verb runs
_moved = False  # whether they have a descriptor of their own meanwhile
_answered = False  # whether the command has printed any of its answer


def print_result(text: str) -> None:
    """Print a part of a verb's answer on stdout."""
    global _answered
    print(printable(text), file=_results, flush=True)
    _answered = True


def print_table(text: str) -> None:
    """Print a part of a verb's answer for people, with colours where the terminal has them."""
    global _answered
    stream = _results or sys.stdout
    shown = printable(text)
    print(coloured(shown) if has_colours(stream) else shown, file=stream, flush=True)
    _answered = True


def print_json(text: str) -> None:
    """Print a JSON document, or a part of one, on stdout: with JSON's escapes where its encoding
    lacks a character.
    """
    stream = _results or sys.stdout
    print_result(printable_json(encodable_json(text, stream.encoding)))


def begin_command() -> None:
    """Forget the answer of a command that ran in this process before."""
    global _answered
    _answered = False


def answered() -> bool:
    """Return whether this command has printed any of its answer."""
    return _answered


@contextmanager
def results_apart() -> Iterator[None]:
    """Keep stdout for `print_result`, and let all else that is printed there go to stderr."""
    global _results, _moved
    before = _results, _moved
    with _descriptor_apart() as results:
        _results = sys.stdout if results is None else results
        _moved = results is not None
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            _results, _moved = before


@contextmanager
def results_left_to_workers() -> Iterator[None]:
    """Let stdout lead to its own end again, for processes that are started meanwhile and print the
    answer.
    """
    if _results is None or not _moved:
        yield
        return

    os.dup2(_results.fileno(), _STDOUT)
    try:
        yield
    finally:
        os.dup2(_STDERR, _STDOUT)


@contextmanager
def _descriptor_apart() -> Iterator[TextIO | None]:
    """Let the process's own stdout lead to its stderr; yield what leads to the former, or None
    where it is replaced.
    """
    stdout = sys.__stdout__
    replaced = sys.stdout is not stdout or sys.stderr is not sys.__stderr__
    if stdout is None or replaced or stdout.fileno() != _STDOUT:
        yield None  # a notebook or a test, which has put streams of its own there
        return

    stdout.flush()
    results = os.fdopen(os.dup(_STDOUT), "w", encoding=stdout.encoding, errors=stdout.errors)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield results
    finally:
        stdout.flush()  # of what was printed to it by its name
        os.dup2(results.fileno(), _STDOUT)
        with suppress(BrokenPipeError):  # who read the results has left, and has been noticed
            results.close()
