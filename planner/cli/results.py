"""Results go to stdout, and nothing else does: what a user's code prints goes to stderr.

A model file may print while it is imported, in `forward`, in `dataset()`, from C, or in a worker process. In the midst
of `--json` that would be no JSON. So while a verb runs, stdout leads to stderr, also for the processes that it starts.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO

_STDOUT, _STDERR = 1, 2  # numbers of the process's streams

_results: TextIO | None = None  # while a verb runs
_own_stdout: TextIO | None = None  # the same, where the descriptor of stdout leads to stderr meanwhile


def print_result(text: str) -> None:
    """Print a part of a verb's answer on stdout."""
    print(text, file=_results, flush=True)


@contextmanager
def verbs_answer() -> Iterator[None]:
    """Give the processes that are started meanwhile the stdout of results: they are verbs, which keep it apart, too."""
    if _own_stdout is None:
        yield
        return

    os.dup2(_own_stdout.fileno(), _STDOUT)
    try:
        yield
    finally:
        os.dup2(_STDERR, _STDOUT)


@contextmanager
def results_apart() -> Iterator[None]:
    """Keep stdout for `print_result`, and let all else that is printed there go to stderr."""
    global _results, _own_stdout
    if sys.stdout is None or sys.stderr is None:  # closed by whoever started the process
        yield
        return

    before = _results
    outer_stdout = _own_stdout
    with _descriptor_apart() as results:
        _results = sys.stdout if results is None else results
        _own_stdout = results
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            _results = before
            _own_stdout = outer_stdout


@contextmanager
def _descriptor_apart() -> Iterator[TextIO | None]:
    """Let the process's own stdout lead to its stderr; yield what leads to the former, or None where it is replaced."""
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
