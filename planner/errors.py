"""Every error that a user can cause or meet.

    PlannerError                 1  something failed
    ├── InputError               2  a command line, file or model that cannot be used
    │   ├── UnitError               a quantity such as "10Gb" that has no meaning
    │   ├── ModelFileError          the user's model.py
    │   ├── CaptureError            a model that no graph can be made of
    │   ├── ProfileError            profile.json
    │   ├── PlanError               plan.json
    │   └── ClusterError            the cluster description
    ├── InfeasibleError          3  no plan fits the cluster
    ├── StoppedError           130  a search that was interrupted before it had an answer
    ├── LayerError               1  an operation of the user's model raised while it trained
    └── WorkerError              1  a worker died or hung

The numbers are exit codes. A message is one sentence that names the offending value and its place;
`hint` says what to do about it. Both name arguments in backticks, by their Python name: "give
`microbatches` 1 or more". The command line shows the flag instead.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches


class PlannerError(Exception):
    """Base of all errors: one sentence, a hint that is empty where nothing helps, and the command's
    exit code.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        return f"{self.message}\nhint: {self.hint}"


class InputError(PlannerError):
    """A command line, file or model that cannot be used as it is."""

    exit_code = 2


class UnitError(InputError):
    """A quantity whose unit is missing, ambiguous or unknown."""


class ModelFileError(InputError):
    """A model file that lacks a required function, or whose function returns the wrong thing."""


class CaptureError(InputError):
    """A model that cannot be captured as a graph, or cut where asked."""


class ProfileError(InputError):
    """A profile file that is malformed or contradicts itself."""


class PlanError(InputError):
    """A plan file that is malformed, or does not belong to the model or cluster at hand."""


class ClusterError(InputError):
    """A cluster description that makes no sense."""


class InfeasibleError(PlannerError):
    """No plan exists for this model on this cluster; `least_bytes` of memory per GPU would do,
    where that is known.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", least_bytes: float = math.inf) -> None:
        super().__init__(message, hint=hint)
        self.least_bytes = least_bytes


class StoppedError(PlannerError):
    """A search that was interrupted before it had any answer."""

    exit_code = 130


class LayerError(PlannerError):
    """An operation of the captured model raised; `place`: "model.py:12", or "module 'path'" for
    library code.
    """

    def __init__(self, message: str, *, hint: str = "", place: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.place = place


class WorkerError(PlannerError):
    """A worker process died, hung or lost its connection."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the question that begins a hint: which of the known names could have been meant; ""
    where none.
    """
    names = list(known)
    given = given.lower()
    alike = [name for name in names if given in name] or get_close_matches(given, names, 3)
    if not alike:
        return ""
    return f"did you mean {' or '.join(alike)}? "


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason_of(error: BaseException) -> str:
    """Return type and first line of an error: "KeyError: 'x'"."""
    if str(error).strip():
        return f"{type(error).__name__}: {first_line(error)}"
    return type(error).__name__
