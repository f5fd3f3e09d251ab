"""What is this machine, and what does a worker cost before it computes anything?

Its rows describe; they fail only where something cannot be found out.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from planner.cost.overheads import Overheads
from planner.profiler.measured.device import describe_device
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.selftest.lab import Lab, even_plan, location
from planner.selftest.rows import Case, Check, Outcome, passed
from planner.selftest.workers.cuda_memory import CudaMemory, free_bytes
from planner.selftest.workers.one_stage import measure_pairs
from planner.selftest.workers.start import run_workers
from planner.units import format_bytes
from planner.version import __version__

TRIVIAL, BATCH_SIZE = location("failing"), 4  # operations of some microseconds; it fails only when asked to
PAIRS, STEPS = 30, 20
DRIVER = Path("/proc/driver/nvidia/version")


def _cases(lab: Lab) -> Iterator[Case]:
    yield Case("software", _software)
    yield Case("machine", _machine)
    yield Case("network", _network)
    for index in range(torch.cuda.device_count()):
        yield Case(f"gpu {index}", partial(_gpu, index))
    yield Case("host overhead", partial(_overhead, lab))
    if lab.cuda:
        yield Case("gpu memory taken", partial(_cuda_memory, lab))


def _software() -> Outcome:
    cuda = torch.version.cuda or "none"
    found = torch.version.cuda and dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if found else "none"  # type: ignore[no-untyped-call]
    return passed(
        f"planner {__version__}, Python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}, "
        f"NCCL {nccl}, {platform.system()} {platform.release()}"
    )


def _machine() -> Outcome:
    cpu = describe_device(torch.device("cpu"), 1, 1)
    memory = "" if cpu.memory_bytes is None else f", {format_bytes(cpu.memory_bytes)}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return passed(f"{cpu.name}, {usable} of {os.cpu_count()} cores{memory}, load {os.getloadavg()[0]:.1f}")


def _network() -> Outcome:
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("GLOO_", "NCCL_"))]
    names = ", ".join(name for _, name in socket.if_nameindex())
    return passed(f"interfaces {names}; {', '.join(variables) or 'no GLOO_ or NCCL_ variables'}")


def _gpu(index: int) -> Outcome:
    gpu = torch.cuda.get_device_properties(index)
    return passed(
        f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}, "
        f"driver {_driver_version()}"
    )


def _driver_version() -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"
    return "unknown" if found is None else found[0]


def _overhead(lab: Lab) -> Outcome:
    """Compare steps of a trivial model in a pipeline of one stage with those of a plain loop."""
    plan = even_plan(lab.profile(TRIVIAL, BATCH_SIZE), ONE_F_ONE_B, (1,))
    pairs = measure_pairs(lab, TRIVIAL, plan, pairs=PAIRS, steps=STEPS)
    more_s = median(ours - plain for plain, ours in zip(pairs.plain_thread_s, pairs.pipeline_thread_s, strict=True))
    plain_s = median(pairs.plain_thread_s)
    return Outcome(
        "passed", f"{more_s * 1e6:+.0f} µs per microbatch beside a plain step of {plain_s * 1e6:.0f} µs", more_s
    )


def _cuda_memory(lab: Lab) -> Outcome:
    """See from outside how much of the GPU's memory a process takes that has allocated almost nothing."""
    free = free_bytes(lab.device)
    (text,) = run_workers("planner.selftest.workers.cuda_memory", lab.folder, str(free), workers=1)
    taken = CudaMemory.model_validate_json(text)
    counted = Overheads.of(lab.profile(TRIVIAL, BATCH_SIZE).device)
    assert counted is not None
    communicator = "no NCCL" if taken.communicator_bytes is None else format_bytes(taken.communicator_bytes)
    return passed(
        f"context {format_bytes(taken.context_bytes)} (plans count {format_bytes(counted.context_bytes)}), a "
        f"communicator of one worker {communicator} (plans count {format_bytes(counted.communicator_bytes)})"
    )


CHECK = Check("environment", "what is this machine, and what does a worker cost?", _cases)
