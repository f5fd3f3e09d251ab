"""What is this machine, what does a worker cost on it, and how fast are the links between its workers?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import cast

import torch
import torch.distributed as dist

from planner.formats.names import Backend
from planner.model.loss import loss_of
from planner.model.spec import load_model_file
from planner.profiler.links.measure_cluster import measure_host
from planner.profiler.this_machine import (
    describe_gpu,
    describe_processor,
    describe_software,
    gpus_of_kinds,
    thread_count,
)
from planner.runtime import kinds_here, runtime_of
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.selfcheck.lab import BATCH_SIZE, Case, Lab, Outcome, even_plan, location
from planner.units import format_bandwidth, format_bytes, format_seconds

TRIVIAL, STEPS = location("build_trivial"), 300


def environment_cases(lab: Lab) -> Iterator[Case]:
    """Yield cases that describe the machine, which fail only where something cannot be found out."""
    yield "software", lambda: Outcome("passed", describe_software())
    yield "machine", lambda: Outcome("passed", f"{describe_processor()}, load {os.getloadavg()[0]:.1f}")
    yield "network", _network
    for index, gpu in enumerate(gpus_of_kinds(kinds_here())):
        yield f"gpu {index}", partial(_gpu, lab, gpu)
    yield "host overhead", partial(_overhead, lab)


def _network() -> Outcome:
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("GLOO_", "NCCL_"))]
    names = ", ".join(name for _, name in socket.if_nameindex())
    return Outcome("passed", f"interfaces {names}; {', '.join(variables) or 'no GLOO_ or NCCL_ variables'}")


def _gpu(lab: Lab, gpu: torch.device) -> Outcome:
    context = lab.profile(TRIVIAL).device.context_bytes if lab.on_gpu else None
    taken = "" if context is None else f", of which a process takes {format_bytes(context)} before it computes"
    return Outcome("passed", f"{describe_gpu(gpu)}{taken}")


def _overhead(lab: Lab) -> Outcome:
    """Compare the steps of a trivial model in a pipeline of one stage with those of a plain loop."""
    spec, times_s = load_model_file(TRIVIAL), []
    model, batch = spec.build_model().to(lab.device), spec.example_batch(BATCH_SIZE)
    optimizer = spec.optimizer(dict(model.named_parameters()))
    with thread_count(1):
        for _ in range(STEPS):
            started_s, here = time.perf_counter(), batch.to(lab.device)
            optimizer.zero_grad()
            loss = loss_of(model(*here.args, **here.kwargs), here.target, spec.loss)
            torch.autograd.backward(loss)
            optimizer.step()
            loss.item()  # as a pipeline reads it
            times_s.append(time.perf_counter() - started_s)
    plain_s = median(times_s)
    result = lab.train(TRIVIAL, even_plan(lab.profile(TRIVIAL), ONE_F_ONE_B, (1,)), STEPS)
    more_s = BATCH_SIZE / result.samples_per_s - plain_s
    return Outcome(
        "passed", f"{more_s * 1e6:+.0f} µs per microbatch beside a plain step of {plain_s * 1e6:.0f} µs", more_s
    )


def link_cases(lab: Lab) -> Iterator[Case]:
    """Yield a case for each backend; the rows of training show that what is sent arrives."""
    yield "gloo", partial(_link, lab, "gloo")
    own = runtime_of(lab.device).backend
    yield "nccl", partial(_link, lab, "nccl" if own == "gloo" else cast("Backend", own))


def _link(lab: Lab, backend: Backend) -> Outcome:
    """Measure the link between two workers, as `plan profile` with links does."""
    if lab.workers < 2:
        return Outcome("skipped", "one worker has no links")
    there = lab.on_gpu and dist.is_backend_available(backend) and runtime_of(lab.device).count() > 1
    if backend != "gloo" and not there:
        return Outcome("skipped", "NCCL sends between GPUs: it needs two of them, and a PyTorch that has it")
    (level,) = measure_host(2, lab.device.type, backend).levels
    return Outcome(
        "passed",
        f"{format_bandwidth(level.bandwidth_bytes_per_s)} each way at once, {format_seconds(level.latency_s)} of "
        f"latency, {format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or 0.0)} in sums",
    )
