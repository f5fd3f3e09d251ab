"""Say in one sentence why a worker failed: which one, what it was doing, where in the user's file, what took memory."""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, LayerError, PlannerError, WorkerError, reason_of
from planner.model.spec import split_location
from planner.units import format_bytes
from planner.workers.ending import within
from planner.workers.heartbeat import Beat, Heartbeat, State
from planner.workers.job import Failure, Job

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1], Path(os.__file__).parent, Path(sys.prefix))
Frame = tuple[str, int, str]  # file, line, function


class ConnectionLostError(WorkerError):
    """The connection to a peer broke: a consequence of the peer's failure, not the cause."""


class LossNotFiniteError(PlannerError):
    """The loss is NaN or infinite, and the run was asked to stop then."""


class WorkersFailedError(PlannerError):
    """A worker failed, and why.

    Attributes:
        again: whether restarting the workers may help.
    """

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
    message = known.message if known else f"{reason_of(error)}{_at(_place(error, job))}"
    hint = known.hint if known else "the whole traceback: plan -vv train ..."
    memory = memory_failure(error)
    if memory is not None:
        message, hint = memory, MEMORY_HINT
    if isinstance(known, LayerError):
        message = f"{memory or known.message}{_at(_resolve(known.place, job))}"
    elif memory is not None:
        message += _at(_place(error, job))
    return Failure(
        rank=rank,
        stage=stage_of(job, rank, beat),
        activity=None if beat is None or not beat.beats else beat.describe(),
        message=message,
        hint=hint,
        traceback="".join(traceback.format_exception(error)),
        exit_code=known.exit_code if known else WorkerError.exit_code,
        again=not isinstance(error, InputError | LossNotFiniteError),
        consequence=memory is None and (isinstance(error, ConnectionLostError) or _is_connection_loss(error)),
    )


def error_of(failure: Failure) -> WorkersFailedError:
    """Return `failure` as the error that the user reads."""
    message = failure.message
    # All workers meet a mistake in the input; only what happened to one of them names the worker.
    if failure.exit_code != InputError.exit_code:
        where = worker_name(failure.rank, failure.stage)
        message = f"{where}, {failure.activity}: {message}" if failure.activity else f"{where}: {message}"
    error = WorkersFailedError(message, hint=failure.hint, exit_code=failure.exit_code, again=failure.again)
    if failure.traceback:
        error.__cause__ = WorkerTraceback("\n" + failure.traceback)
    return error


def worker_name(rank: int, stage: int | None) -> str:
    """Return "worker 1 (stage 0)"."""
    return f"worker {rank}" + (f" (stage {stage})" if stage is not None else "")


def stage_of(job: Job, rank: int, beat: Beat | None) -> int | None:
    """Return the stage that worker `rank` is at, or else the first stage that it holds."""
    if beat is not None and beat.state not in (State.PREPARING, State.MEETING):
        return beat.stage
    return next((index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks), None)


def _is_connection_loss(error: BaseException) -> bool:
    """Return whether torch.distributed lost a peer; gloo raises a plain RuntimeError for that."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Socket", "NCCL"))
    )


def innermost(stacks: Sequence[Sequence[Frame]], job: Job) -> str | None:
    """Return the innermost frame that tells the user most: in the user's folder, or outside all libraries, or any.

    Args:
        stacks: of each thread, its frames, outermost first. Among equals the first thread's tells more: the others may
            read the user's data ahead, while the first waits for them.
        job: names the user's folder.
    """
    frames = [frame for stack in stacks for frame in reversed(stack)]
    folder = split_location(job.model)[0].resolve().parent
    own = (frame for frame in frames if _is_in(folder, frame[0]))
    others = (frame for frame in frames if not _in_libraries(frame[0]))
    chosen = next(chain(own, others, frames), None)
    return None if chosen is None else _shorter(f"{chosen[0]}:{chosen[1]} in {chosen[2]}()")


def _place(error: BaseException, job: Job) -> str | None:
    """Return file and line where `error` was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = innermost([[(frame.filename, frame.lineno or 0, frame.name) for frame in frames]], job)
    return None if place is None else place.partition(" in ")[0]


def _at(place: str | None) -> str:
    return f" ({_shorter(place)})" if place else ""


def _shorter(place: str) -> str:
    """Return `place` relative to the current folder, if it is inside."""
    return place.replace(f"{Path.cwd()}{os.sep}", "")


def _resolve(place: str | None, job: Job) -> str | None:
    """Add file and line to a function of the model file, such as "loss()"."""
    if place is None or not place.endswith("()"):
        return place
    path = split_location(job.model)[0]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == place.removesuffix("()"):
            return f"{place} at {path}:{node.lineno}"
    return f"{place} of {path}"


def _is_in(folder: Path, filename: str) -> bool:
    # "<frozen runpy>" is no file, though as a path it would be one in the current folder, which may be the user's.
    return not filename.startswith("<") and Path(filename).resolve().parent == folder


def _in_libraries(filename: str) -> bool:
    return filename.startswith("<") or any(Path(filename).is_relative_to(library) for library in _LIBRARIES)


MEMORY_HINT = (
    "profile with a smaller `batch_size`, or plan with less `memory_bytes`, with `recompute=always`, or for more GPUs, "
    "which makes more stages"
)
# What raises no error type of its own: cuBLAS and NCCL when their own allocations fail, and the allocator of the CPU.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")
_ANSWER_S = 1.0
_ASKED = re.compile(r"[Tt]ried to allocate (?P<amount>[\d.]+)\s*(?P<unit>GiB|MiB|KiB|bytes)")


def memory_failure(error: BaseException) -> str | None:
    """Return in one sentence how memory was exhausted, if that is what `error` says or was raised for.

    The numbers are those of now: tensors that the traceback holds have not been freed yet.
    """
    for cause in _causes(error):
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(cause, RuntimeError) and any(word in str(cause) for word in _WORDS)
        ):
            return f"out of memory{_asked(str(cause))}{_gpu_use(cause)}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _asked(text: str) -> str:
    asked = _ASKED.search(text)
    if asked is None:
        return ""
    scale = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[asked["unit"]]
    return f" when {format_bytes(round(float(asked['amount']) * scale))} more were needed"


def _gpu_use(cause: BaseException) -> str:
    """Return what the GPU's memory is used for; "" where it was not the GPU's that was exhausted."""
    on_cpu = isinstance(cause, MemoryError) or "DefaultCPUAllocator" in str(cause)
    if on_cpu or not torch.cuda.is_available():
        return ""
    device = torch.cuda.current_device()  # of this thread
    # The reason must not wait for the device, which may be past answering.
    return next(iter(within(_ANSWER_S, lambda: _read_gpu(device))), "")


def _read_gpu(device: int) -> str:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f": {format_bytes(allocated)} allocated and {format_bytes(reserved)} reserved of the "
        f"{format_bytes(total_bytes)} of cuda:{device}, {format_bytes(free_bytes)} free"
    )
