"""Describe this machine and its devices, check what is asked of them, and prepare a process to
measure on them.
"""

import ctypes
import math
import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from planner.errors import InputError
from planner.formats.profile import Device
from planner.runtime import check_kind, kinds_here, library_versions, runtime_of
from planner.units import format_bytes
from planner.version import __version__
from planner.workers.place import available_cores

# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1
_GROW_BYTES = 2**26
_OWN_PAGES_BYTES, _MOST_MAPPINGS = 2**18, 2**15  # fewer than the 65,530 that Linux gives a process
_keeps_pages = False


def keep_freed_pages(apart_bytes: int | None = None) -> None:
    """Let this process keep the memory that it frees, because the next training step asks for the
    same sizes again.

    glibc returns large blocks to the system at once. Getting them back costs a page fault per 4
    KiB: 15% of the time of VGG-16 on a CPU. Call this at the start of a process. It does nothing
    without glibc, or where the environment already tells glibc how to allocate
    (`MALLOC_MMAP_THRESHOLD_` and the like). Blocks from `apart_bytes` on are returned all the same,
    if it is given.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return

    global _keeps_pages
    _keeps_pages = True
    # Blocks from mmap are returned when they are freed, whatever the trim threshold, so there must
    # be no others.
    if apart_bytes is None:
        settings = {_M_MMAP_MAX: 0}
    else:
        settings = {_M_MMAP_MAX: _MOST_MAPPINGS, _M_MMAP_THRESHOLD: apart_bytes}

    if (mallopt := _glibc("mallopt")) is not None:
        for parameter, value in (
            settings | {_M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _GROW_BYTES}
        ).items():
            mallopt(parameter, value)


def return_free_pages() -> None:
    """Return the pages that are free now to the system; later ones are kept as before. Without
    glibc, do nothing.
    """
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Give large blocks pages of their own within the context, which are returned when they are
    freed.

    What lives long in small blocks, as the profiler's records do, otherwise comes to lie within the
    freed large ones, which then fit no further tensor: a step of a recurrent scan took 12 times its
    memory.
    """
    global _keeps_pages
    before = _keeps_pages
    _keeps_pages = False
    mallopt = _glibc("mallopt") or (lambda *_: 0)
    mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
    mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
    try:
        yield
    finally:
        _keeps_pages = before
        # The most that glibc's own, moving threshold becomes: setting it has ended that it moves.
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        if _keeps_pages:
            mallopt(_M_MMAP_MAX, 0)


def status_bytes(field: str) -> int:
    """Return what the system says of this process's memory; outside of Linux its peak, whatever the
    field.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def free_memory_bytes() -> float:
    """Return the host's memory that is free, or could be; infinity where the system does
    not tell.
    """
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return math.inf


def _glibc(function: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libc.so.6"), function)
    except (OSError, AttributeError):
        return None


# An assumption: no context is larger, so more than this is another process'. On an H200 a worker's
# is 2.0 GB.
_MOST_CONTEXT_BYTES = 4 * 2**30


def check_positive(name: str, number: int) -> None:
    """Raise InputError for an argument that is less than 1."""
    if number < 1:
        raise InputError(f"`{name}={number}` is less than 1", hint="give a positive whole number")


def parse_device(name: str) -> torch.device:
    """Return the device of that name; raise InputError when there is none."""
    check_kind(name.partition(":")[0])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"'{name}' is not a device",
            hint="give a kind, as cpu or cuda, or one of them, as cuda:0",
        ) from None

    if (device.index or 0) >= (count := runtime_of(device).count()):
        raise InputError(
            f"there is no device '{name}': PyTorch sees {count} GPUs",
            hint=f"give `device=cpu`, or install PyTorch built for {device.type} on a machine "
            f"with a GPU",
        )

    return device


def describe_device(device: torch.device, threads: int, processes: int) -> Device:
    """Return what a profile says of `device`; on a GPU after the measurement, which loads the
    kernels.
    """
    if runtime_of(device).counts_memory:
        properties = runtime_of(device).properties(device)
        return Device(
            kind=device.type,
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
    """Return what this process takes of a GPU beside the allocator's segments: context, kernels,
    handles of libraries.

    The device tells only what all processes take. None where that cannot be this one's context
    alone.
    """
    free_bytes, total_bytes = runtime_of(device).free_and_total_bytes(device)
    context_bytes = total_bytes - free_bytes - runtime_of(device).reserved_bytes(device)
    if 0 < context_bytes <= _MOST_CONTEXT_BYTES:
        return context_bytes
    return None


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


DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine() -> str:
    """Return the versions, then a line for each device."""
    gpus = [f"{gpu}  {describe_gpu(gpu)}" for gpu in gpus_of_kinds(kinds_here())]
    return "\n".join([describe_software(), f"cpu     {describe_processor()}", *gpus])


def describe_software() -> str:
    """Return the versions of this package, Python, PyTorch and its libraries, and the system."""
    return (
        f"planner {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{library_versions()}, "
        f"{platform.system()} {platform.release()}"
    )


def describe_processor() -> str:
    """Return the processor's name, the cores that this process may use, and the memory."""
    cpu = describe_device(torch.device("cpu"), 1, 1)
    memory = ""
    if cpu.memory_bytes is not None:
        memory = f", {format_bytes(cpu.memory_bytes)}"
    return f"{cpu.name}, {available_cores()} of {os.cpu_count()} cores{memory}"


def gpus_of_kinds(kinds: Sequence[str]) -> list[torch.device]:
    """Return all devices of these kinds that PyTorch sees here, but for CPUs."""
    return [
        torch.device(kind, index)
        for kind in kinds
        if kind != "cpu"
        for index in range(runtime_of(kind).count())
    ]


def describe_gpu(device: torch.device) -> str:
    """Return a GPU's name and memory; of NVIDIA's and AMD's the compute capability, and NVIDIA's
    driver.
    """
    gpu = runtime_of(device).properties(device)
    more = ""
    if hasattr(gpu, "major"):
        more = f", compute capability {gpu.major}.{gpu.minor}, driver {_driver_version()}"
    return f"{gpu.name}, {format_bytes(gpu.total_memory)}{more}"


def _driver_version() -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"
    if found is None:
        return "unknown"
    return found[0]
