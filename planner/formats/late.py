"""What could not be written when the answer was already known: the answer stands, and says what is
missing.

A long run must not lose its result because a disk is full at its end. So what is written after the
result is known fails into a list that the result carries. The command prints the result first, and
then these.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import Logger

from planner.errors import PlannerError, WorkerError
from planner.formats.files import Record


class LateFailure(Record):
    """One thing that could not be written."""

    message: str
    hint: str = ""
    # Whether the user asked for what is missing: then the command fails, and otherwise it warns.
    asked: bool = True


@contextmanager
def noting(failures: list[LateFailure], *, asked: bool = True) -> Iterator[None]:
    """Add a failure of the block to the list instead of raising it.

    What workers fail with is raised: then a peer is lost, and not a file.
    """
    try:
        yield
    except WorkerError:
        raise
    except PlannerError as error:
        failures.append(LateFailure(message=error.message, hint=error.hint, asked=asked))
    except OSError as error:
        failures.append(LateFailure(message=f"the system refused: {error}", asked=asked))


def log_failures(failures: Iterable[LateFailure], log: Logger) -> None:
    """Log each failure as a warning, for who calls from Python."""
    for failure in failures:
        hint = f"; {failure.hint}" if failure.hint else ""
        log.warning("%s%s", failure.message, hint)
