"""Saying in one sentence why a worker failed: which one, at what, and where in the user's file."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, LayerError, PlannerError, WorkerError
from planner.executor.health.heartbeat import Beat, Heartbeat, State
from planner.executor.job import Failure, Job
from planner.formats.files import save_record

GRACE_S = 3.0  # how long a worker that lost its peer waits before it ends, so that the first cause is seen first
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2], Path(os.__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class ConnectionLostError(WorkerError):
    """A peer is gone: the consequence of its failure, not the cause."""


class LossNotFiniteError(PlannerError):
    """The loss is NaN or infinite, and the run was to stop then."""


class WorkersFailedError(PlannerError):
    """A worker failed, and told why.

    Attributes:
        again: whether starting the workers once more may help.
    """

    def __init__(self, message: str, *, hint: str, exit_code: int, again: bool) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.again = again


class WorkerTraceback(Exception):  # noqa: N818 - not an error of its own: text for `-vv`
    """The traceback of another process."""


def failure_of(job: Job, error: BaseException, heartbeat: Heartbeat | None = None) -> Failure:
    """What this process, a worker that `error` ends, has to say."""
    rank = int(os.environ.get("RANK", "0"))
    beat = heartbeat.read() if heartbeat is not None else None
    known = error if isinstance(error, PlannerError) else None
    message = known.message if known else f"{_reason(error)}{_at(_place(error, job))}"
    if isinstance(known, LayerError):
        message = f"{known.message}{_at(_resolve(known.place, job))}"
    return Failure(
        rank=rank,
        stage=_stage_of(job, rank, beat),
        activity=None if beat is None or not beat.beats else beat.describe(),
        message=message,
        hint=known.hint if known else "the whole traceback: plan -vv train ...",
        traceback="".join(traceback.format_exception(error)),
        exit_code=known.exit_code if known else WorkerError.exit_code,
        again=not isinstance(error, InputError | LossNotFiniteError),
        consequence=isinstance(error, ConnectionLostError) or _is_connection_loss(error),
    )


def leave_failure(job: Job, failure: Failure) -> None:
    """Leave the reason where the launcher finds it; what is only a consequence waits for the first cause."""
    if job.failure_folder is not None:
        save_record(failure, Path(job.failure_folder) / f"failure-{failure.rank}.json")
        if failure.consequence:
            time.sleep(GRACE_S)


def explain(exit_codes: Mapping[int, int], folder: Path, job: Job) -> WorkersFailedError:
    """The first cause among everything that failed; the launcher itself ended the rest with SIGTERM.

    Args:
        exit_codes: by rank, of the workers that did not end by themselves; negative for a signal.
        folder: where the workers left their failures and heartbeats.
        job: that they ran.
    """
    left = [Failure.model_validate_json(path.read_text("utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    for failure in left:
        if not failure.consequence:
            return error_of(failure)
    for rank, code in sorted(exit_codes.items()):
        if code < 0 and code != -signal.SIGTERM:
            return _killed(rank, signal.Signals(-code).name, read_beat(folder, rank), job)
    if left:
        return error_of(left[0])
    rank, code = min(exit_codes.items())
    return WorkersFailedError(
        f"{_name(rank, _stage_of(job, rank, None))} ended with exit code {code} and left no reason",
        hint="look for the reason in its last messages",
        exit_code=WorkerError.exit_code,
        again=True,
    )


def error_of(failure: Failure) -> WorkersFailedError:
    """As the user reads it."""
    message = failure.message
    # A mistake in the input is every worker's; only what happened to one is told with its name.
    if failure.exit_code != InputError.exit_code:
        where = _name(failure.rank, failure.stage)
        message = f"{where}, {failure.activity}: {message}" if failure.activity else f"{where}: {message}"
    error = WorkersFailedError(message, hint=failure.hint, exit_code=failure.exit_code, again=failure.again)
    if failure.traceback:
        error.__cause__ = WorkerTraceback("\n" + failure.traceback)
    return error


def beat_path(folder: Path, rank: int) -> Path:
    """Of the page on which worker `rank` writes what it does."""
    return folder / f"heartbeat-{rank}"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """What worker `rank` did last; None when it never began."""
    try:
        page = beat_path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    return Beat.read(page) if page else None


def place_in_dump(dump: str, job: Job) -> str | None:
    """Where a worker is, from faulthandler's dump, which begins with the innermost line; None of an empty one."""
    frames = [(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(dump)]
    return innermost(frames[::-1], job)


def model_folder(job: Job) -> Path:
    """The folder of the user's file."""
    return _model_path(job).resolve().parent


def _killed(rank: int, signal_name: str, beat: Beat | None, job: Job) -> WorkersFailedError:
    activity = "while starting" if beat is None else beat.describe()
    hint = "look for the reason in its last messages"
    if signal_name == "SIGKILL":
        hint = "the system ends processes that exhaust its memory; see the kernel's log"
    return WorkersFailedError(
        f"{_name(rank, _stage_of(job, rank, beat))} was killed by {signal_name}, {activity}",
        hint=hint,
        exit_code=WorkerError.exit_code,
        again=True,
    )


def _name(rank: int, stage: int | None) -> str:
    return f"worker {rank}" + (f" (stage {stage})" if stage is not None else "")


def _stage_of(job: Job, rank: int, beat: Beat | None) -> int | None:
    if beat is not None and beat.state not in (State.PREPARING, State.MEETING):
        return beat.stage
    return next((index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks), None)


def _is_connection_loss(error: BaseException) -> bool:
    """Whether torch.distributed lost a peer: it has no type of its own for that on gloo."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Socket"))
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def innermost(stack: Sequence[tuple[str, int, str]], job: Job) -> str | None:
    """Of (file, line, function), outermost first: the last of the user's folder, or of nobody's library, or at all."""
    own = [frame for frame in stack if Path(frame[0]).resolve().parent == model_folder(job)]
    others = [frame for frame in stack if not _in_libraries(frame[0])]
    chosen = next(iter((*own[::-1], *others[::-1], *stack[::-1])), None)
    return None if chosen is None else _shorter(f"{chosen[0]}:{chosen[1]} in {chosen[2]}()")


def _place(error: BaseException, job: Job) -> str | None:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = innermost([(frame.filename, frame.lineno or 0, frame.name) for frame in frames], job)
    return None if place is None else place.partition(" in ")[0]


def _at(place: str | None) -> str:
    return f" ({_shorter(place)})" if place else ""


def _shorter(place: str) -> str:
    """Relative to the current folder, where it is inside."""
    return place.replace(f"{Path.cwd()}{os.sep}", "")


def _resolve(place: str | None, job: Job) -> str | None:
    """A function of the model file, "loss()", as its file and line."""
    if place is None or not place.endswith("()"):
        return place
    path = _model_path(job)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == place.removesuffix("()"):
            return f"{place} at {path}:{node.lineno}"
    return f"{place} of {path}"


def _model_path(job: Job) -> Path:
    path, _, builder = job.model.rpartition(":")
    return Path(path) if path and builder.isidentifier() else Path(job.model)


def _in_libraries(filename: str) -> bool:
    return filename.startswith("<") or any(Path(filename).is_relative_to(library) for library in _libraries())


def _libraries() -> Iterable[Path]:
    return (*_LIBRARIES, Path(sys.prefix))
