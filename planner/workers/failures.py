"""Say in one sentence why a worker failed: which one, what it was doing, where in the user's file,
what took memory.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, LayerError, PlannerError, WorkerError, first_line, reason_of
from planner.model.spec import split_location
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import Failure, Job

_LIBRARIES = (
    Path(torch.__file__).parent,
    Path(__file__).parents[1],
    Path(os.__file__).parent,
    Path(sys.prefix),
)
_LOST = ("gloo", "Connection", "Socket", "NCCL")  # in errors of a lost connection
TRACEBACK_HINT = "the whole traceback: plan -vv train ..."
Frame = tuple[str, int, str]  # file, line, function


class ConnectionLostError(WorkerError):
    """The connection to a peer broke: a consequence of the peer's failure, not the cause."""


class LossNotFiniteError(PlannerError):
    """The loss is NaN or infinite, and the run was asked to stop then."""


class WorkersFailedError(PlannerError):
    """A worker failed, and why; `again`: whether restarting the workers may help."""

    def __init__(self, message: str, *, hint: str, exit_code: int, again: bool) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.again = again


class WorkerTraceback(Exception):  # noqa: N818 - no error of its own, but text for `-vv`
    """The traceback of another process."""


def failure_of(job: Job, error: BaseException, heartbeat: Heartbeat | None = None) -> Failure:
    """Return the report of this worker, which `error` ends."""
    rank = int(os.environ.get("RANK", "0"))
    beat = heartbeat.read() if heartbeat is not None else None
    known = error if isinstance(error, PlannerError) else None
    memory = memory_failure(error)
    message = memory or (known.message if known else reason_of(error))
    hint = MEMORY_HINT
    if not memory:
        hint = known.hint if known else TRACEBACK_HINT
    if isinstance(known, LayerError):
        message += _at(_resolve(known.place, job))
    elif memory or not known:
        frames = traceback.extract_tb(error.__traceback__)
        place = innermost(
            [[(frame.filename, frame.lineno or 0, frame.name) for frame in frames]], job
        )
        message += _at(None if place is None else place.partition(" in ")[0])

    return Failure(
        rank=rank,
        stage=stage_of(job, rank, beat),
        activity=beat.doing if beat is not None and beat.beats else None,
        message=message,
        hint=hint,
        traceback="".join(traceback.format_exception(error)),
        exit_code=known.exit_code if known else WorkerError.exit_code,
        again=not isinstance(error, InputError | LossNotFiniteError),
        # gloo raises a plain RuntimeError when it loses a peer.
        consequence=memory is None
        and (
            isinstance(error, ConnectionLostError | dist.DistError)
            or (isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST))
        ),
    )


def error_of(failure: Failure) -> WorkersFailedError:
    """Return the error that a worker's failure raises in the launching process."""
    message = failure.message
    # All workers meet a mistake in the input; only what happened to one of them names the worker.
    if failure.exit_code != InputError.exit_code:
        where = worker_name(failure.rank, failure.stage)
        if failure.activity:
            message = f"{where}, {failure.activity}: {message}"
        else:
            message = f"{where}: {message}"

    error = WorkersFailedError(
        message, hint=failure.hint, exit_code=failure.exit_code, again=failure.again
    )
    if failure.traceback:
        error.__cause__ = WorkerTraceback("\n" + failure.traceback)
    return error


def worker_name(rank: int, stage: int | None) -> str:
    """Return "worker 1 (stage 0)"."""
    return f"worker {rank}" + (f" (stage {stage})" if stage is not None else "")


def stage_of(job: Job, rank: int, beat: Beat | None) -> int | None:
    """Return the stage that worker `rank` is at, or else the first stage that it holds; None for a
    worker that the plan leaves out.
    """
    if beat is not None and beat.left_out:
        return None
    if beat is not None and beat.stage is not None:
        return beat.stage
    if beat is not None and beat.holds is not None:
        return beat.holds
    return next((index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks), None)


def innermost(stacks: Sequence[Sequence[Frame]], job: Job) -> str | None:
    """Return the innermost frame that tells the user most: in the user's folder, or outside all
    libraries, or any.

    Of the `stacks`, outermost frame first, the first thread's tells most.
    """
    frames = [frame for stack in stacks for frame in reversed(stack)]
    folder = split_location(job.model)[0].resolve().parent
    # "<frozen runpy>" is no file, though as a path it would be one in the current folder, which may
    # be the user's.
    files = [frame for frame in frames if not frame[0].startswith("<")]
    own = (frame for frame in files if Path(frame[0]).resolve().parent == folder)
    others = (
        frame
        for frame in files
        if not any(Path(frame[0]).is_relative_to(library) for library in _LIBRARIES)
    )
    chosen = next(chain(own, others, frames), None)
    if chosen is None:
        return None
    return _shorter(f"{chosen[0]}:{chosen[1]} in {chosen[2]}()")


def _at(place: str | None) -> str:
    if not place:
        return ""
    return f" ({_shorter(place)})"


def _shorter(place: str) -> str:
    return place.replace(f"{Path.cwd()}{os.sep}", "")


def _resolve(place: str | None, job: Job) -> str | None:
    if place is None or not place.endswith("()"):
        return place
    path = split_location(job.model)[0]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(f"def {place.removesuffix(')')}"):
            return f"{place} at {path}:{number}"
    return f"{place} of {path}"


MEMORY_HINT = (
    "profile with a smaller `batch_size`, or plan with less `memory`, with "
    "`recompute=always`, or for more GPUs, "
    "which makes more stages"
)
# What raises no error type of its own: cuBLAS and NCCL when their own allocations fail, and the
# allocator of the CPU.
_WORDS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def memory_failure(error: BaseException) -> str | None:
    """Return how memory was exhausted, in PyTorch's words, if that is what `error` says or was
    raised for.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(cause, RuntimeError) and any(word in str(cause) for word in _WORDS)
        ):
            return f"out of memory: {first_line(cause)}"
        cause = cause.__cause__
    return None
