"""Check numbers and devices to measure with, describe a device, and set its threads."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.errors import InputError
from planner.formats.profile import Device

# An assumption: no context is larger, so more than this is another process'.
_MOST_CONTEXT_BYTES = 2 * 2**30


def check_positive(name: str, number: int) -> None:
    """Refuse an argument that is less than 1.

    Raises:
        InputError: for that.
    """
    if number < 1:
        raise InputError(f"`{name}={number}` is less than 1", hint="give a positive whole number")


def parse_device(name: str) -> torch.device:
    """Return the device of that name; raise InputError when there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"'{name}' is not a device", hint="give cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device '{name}' is neither a CPU nor a CUDA GPU", hint="give cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no device '{name}': PyTorch sees {torch.cuda.device_count()} GPUs",
            hint="give `device=cpu`, or install PyTorch with CUDA on a machine with a GPU",
        )
    return device


def describe_device(device: torch.device, threads: int, processes: int) -> Device:
    """Return what a profile says of `device`; on a GPU after the measurement, which loads the kernels."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            context_bytes=_context_bytes(device),
        )
    return Device(
        kind="cpu",
        name=_cpu_name(),
        threads=threads,
        processes=processes if processes > 1 else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _context_bytes(device: torch.device) -> int | None:
    """Return what this process takes of a GPU beside the allocator's segments: context, kernels, handles of libraries.

    The device tells only what all processes take. None where that cannot be this one's context alone.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    context_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return context_bytes if 0 < context_bytes <= _MOST_CONTEXT_BYTES else None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Use `count` intra-op threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
