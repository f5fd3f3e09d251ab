"""What is this machine, and what does a worker cost before it computes anything?

Its rows describe; they fail only where something cannot be found out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from planner.cost.overheads import Overheads
from planner.profiler.this_machine import describe_gpu, describe_processor, describe_software
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.selftest.lab import Lab, even_plan, location
from planner.selftest.rows import Case, Check, Outcome, passed
from planner.selftest.workers.cuda_memory import CudaMemory, free_bytes
from planner.selftest.workers.one_stage import measure_pairs
from planner.selftest.workers.start import run_workers
from planner.units import format_bytes

TRIVIAL, BATCH_SIZE = location("failing"), 4  # operations of some microseconds; it fails only when asked to
PAIRS, STEPS = 30, 20


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
    return passed(describe_software())


def _machine() -> Outcome:
    return passed(f"{describe_processor()}, load {os.getloadavg()[0]:.1f}")


def _network() -> Outcome:
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("GLOO_", "NCCL_"))]
    names = ", ".join(name for _, name in socket.if_nameindex())
    return passed(f"interfaces {names}; {', '.join(variables) or 'no GLOO_ or NCCL_ variables'}")


def _gpu(index: int) -> Outcome:
    return passed(describe_gpu(index))


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
