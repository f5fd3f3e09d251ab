"""Tell an exhausted memory from other errors, and say what took it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from planner.executor.health.ending import within
from planner.units import format_bytes

HINT = (
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
