"""Measure the peak memory of this process or its device."""

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from planner.profiler.this_machine import return_free_pages, status_bytes
from planner.runtime import runtime_of


class PeakMemory:
    """Peak bytes in use since construction, or `forget`, plus the `already_bytes` of them that were
    allocated before.

    On a CPU it is the growth of the resident set's high-water mark, less pages of files: code of
    libraries.
    """

    def __init__(self, device: torch.device, already_bytes: int) -> None:
        self._device = device
        self._runtime = runtime_of(device)
        self._already_bytes = already_bytes
        gc.collect()
        if self._runtime.counts_memory:
            self._runtime.reset_peak(device)
            self._before_bytes = self._runtime.allocated_bytes(device)
        else:
            # malloc keeps freed pages: reusing them would not show as growth.
            return_free_pages()
            # not Linux, or not permitted: the mark of the whole process is an upper bound
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self._before_bytes = status_bytes("VmRSS")
            self._code_bytes = status_bytes("RssFile")
            self._before_own_bytes = status_bytes("RssAnon")

    def forget(self) -> None:
        """Forget a device's peak so far, which may be of memory that the allocator was only to take
        from the device.
        """
        if self._runtime.counts_memory:
            self._runtime.reset_peak(self._device)

    def bytes(self) -> int:
        """Return the peak so far."""
        if self._runtime.counts_memory:
            peak = self._runtime.peak_bytes(self._device)
        else:
            peak = status_bytes("VmHWM") - (status_bytes("RssFile") - self._code_bytes)
        return max(0, peak - self._before_bytes) + self._already_bytes

    def now_bytes(self) -> int:
        """Return what is in use now, counted as the peak is; on a CPU with freed pages that malloc
        keeps.
        """
        if self._runtime.counts_memory:
            grown = self._runtime.allocated_bytes(self._device) - self._before_bytes
        else:
            grown = status_bytes("RssAnon") - self._before_own_bytes
        return max(0, grown) + self._already_bytes

    def fields(self) -> dict[str, Any]:
        """Return what a worker reports of its memory; of a GPU also what it holds beyond tensors,
        at the peak.
        """
        peak = {"peak_memory_bytes": self.bytes()}
        if not self._runtime.counts_memory:
            return peak
        free_bytes, total_bytes = self._runtime.free_and_total_bytes(self._device)
        # The allocator gives nothing back before the end: fragments are in what it reserved.
        reserved_bytes = self._runtime.reserved_bytes(self._device, peak=True)
        return peak | {
            "reserved_memory_bytes": reserved_bytes,
            "used_memory_bytes": total_bytes - free_bytes,
        }
