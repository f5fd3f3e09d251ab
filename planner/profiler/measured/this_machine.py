"""Describe this machine in a few lines: versions, processor and GPUs."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
import torch.distributed as dist

from planner.profiler.measured.device import describe_device
from planner.units import format_bytes
from planner.version import __version__

DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine() -> str:
    """Return the versions, then a line for each device."""
    gpus = [f"cuda:{index}  {describe_gpu(index)}" for index in range(torch.cuda.device_count())]
    return "\n".join([describe_software(), f"cpu     {describe_processor()}", *gpus])


def describe_software() -> str:
    """Return the versions of this package, Python, PyTorch and its libraries, and the system."""
    cuda = torch.version.cuda or "none"
    found = torch.version.cuda and dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if found else "none"  # type: ignore[no-untyped-call]
    return (
        f"planner {__version__}, Python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}, "
        f"NCCL {nccl}, {platform.system()} {platform.release()}"
    )


def describe_processor() -> str:
    """Return the processor's name, the cores that this process may use, and the memory."""
    cpu = describe_device(torch.device("cpu"), 1, 1)
    memory = "" if cpu.memory_bytes is None else f", {format_bytes(cpu.memory_bytes)}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu.name}, {usable} of {os.cpu_count()} cores{memory}"


def describe_gpu(index: int) -> str:
    """Return a GPU's name, memory, compute capability and driver."""
    gpu = torch.cuda.get_device_properties(index)
    return (
        f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}, "
        f"driver {_driver_version()}"
    )


def _driver_version() -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"
    return "unknown" if found is None else found[0]
