"""Peak memory of this process or its device."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from planner.profiler.measured.malloc import return_free_pages

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Bytes needed since construction, on top of `already_bytes` that were allocated before.

    On a CUDA device: the allocator's peak. On a CPU: growth of the resident set's high-water mark, less the pages of
    files, which are the libraries' code as it is first used. Workspaces of the libraries count. Pages that the C
    library kept from before are returned first, so that reusing them shows as growth.
    """

    def __init__(self, device: torch.device, already_bytes: int) -> None:
        self._device = device
        self._already_bytes = already_bytes
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before_bytes = torch.cuda.memory_allocated(device)
        else:
            return_free_pages()
            _reset_high_water_mark()
            self._before_bytes = _resident_bytes()
            self._code_bytes = _status_bytes("RssFile")

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _high_water_mark_bytes() - (_status_bytes("RssFile") - self._code_bytes)
        return max(0, peak - self._before_bytes) + self._already_bytes


def _reset_high_water_mark() -> None:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or not allowed: the mark is then the process's, an upper bound
        return


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _high_water_mark_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
