"""Plain training, profile, plan and training by the plan of models on this device, in this one
process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import planner
from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.launch import free_port
from planner.executor.run.train import train_worker
from planner.formats.profile import Profile
from planner.model.loss import loss_of
from planner.model.options import ModuleOptions
from planner.model.spec import load_model_file
from planner.workers.job import Job
from planner.workers.place import set_gpu_variables

BANDWIDTH = 12.5e9  # bytes/s of the links of a cluster of one, which nothing crosses
WARM = 5  # plain steps that are not timed
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A model file of `profiles/`, how it is trained, and for how many minibatches."""

    model: str
    batch: int
    dtype: str
    steps: int
    channels_last: bool = False
    recompute: bool = False
    builder: str = ""  # of the model file; "": the usual one

    @property
    def name(self) -> str:
        """The case in words, as a key."""
        said = [self.model, str(self.batch), self.dtype]
        said += ["channels-last"] * self.channels_last + ["recomputed"] * self.recompute
        return " ".join(said)

    @property
    def file(self) -> str:
        """The model file, as the verbs take it."""
        path = str(ROOT / "profiles" / self.model / "model.py")
        return f"{path}:{self.builder}" if self.builder else path


CASES = (
    Case("gpt2", 256, "bfloat16", 40),
    Case("gpt2", 32, "bfloat16", 120),
    Case("resnet50", 128, "bfloat16", 80, channels_last=True),
    Case("vgg16", 64, "float32", 150),
    Case("bert", 64, "bfloat16", 60),
    Case("gpt2", 128, "float16", 40),
    Case("gpt2", 256, "bfloat16", 30, recompute=True),
    Case("unet", 8, "tf32", 40),
    Case("llama", 64, "bfloat16", 50),
)


@dataclass(frozen=True)
class Row:
    """What was predicted and measured for a case; rates in samples per second."""

    batch: int
    plain_host_s: float  # of a plain step, until its last kernel is launched
    plain_s: float
    plain_peak_bytes: int
    layers_s: float  # a step by the profile: the sum of its layers
    whole_s: float  # a step of the whole model, as the profile measured it
    predicted_per_s: float
    measured_per_s: float
    predicted_bytes: int  # of tensors
    peak_bytes: int
    reserved_bytes: int | None  # by the allocator
    used_bytes: int | None  # of the GPU, the context included
    losses: tuple[float, float]  # the first and the last
    seconds: float  # of everything that this row took


def measure(case: Case, device: str = "cuda") -> Row:
    """Train the model plainly, then profile it, plan it for one worker and train it by the plan."""
    began = time.perf_counter()
    _be_the_only_worker()
    host_s, plain_s, plain_peak = _plain(case, device)
    _empty_cache(device)
    profile = _profile(case.file, case.batch, case.dtype, case.channels_last, device)
    cluster = planner.flat_cluster(
        1, bandwidth_bytes_per_s=BANDWIDTH, memory_bytes=profile.device.memory_bytes
    )
    plan = planner.solve(profile, cluster, recompute="always" if case.recompute else "never")
    _empty_cache(device)
    result = train_worker(Job(model=case.file, plan=plan, steps=case.steps))
    _empty_cache(device)
    assert result is not None  # rank 0 has one
    assert result.predicted_samples_per_s is not None
    assert profile.whole_step is not None
    (report,) = result.reports
    losses = [entry.loss for entry in result.losses if entry.loss is not None]
    whole = profile.whole_step
    return Row(
        batch=case.batch,
        plain_host_s=host_s,
        plain_s=plain_s,
        plain_peak_bytes=plain_peak,
        layers_s=sum(each.forward_s + each.backward_s + each.update_s for each in profile.layers),
        whole_s=whole.forward_s + whole.backward_s + whole.update_s,
        predicted_per_s=result.predicted_samples_per_s,
        measured_per_s=result.samples_per_s,
        predicted_bytes=report.predicted_memory_bytes,
        peak_bytes=report.peak_memory_bytes,
        reserved_bytes=report.reserved_memory_bytes,
        used_bytes=report.used_memory_bytes,
        losses=(losses[0], losses[-1]),
        seconds=time.perf_counter() - began,
    )


def _be_the_only_worker() -> None:
    """Set what torchrun would have set for a run of one worker, with a port that is free."""
    set_gpu_variables()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@cache
def _profile(file: str, batch: int, dtype: str, channels_last: bool, device: str) -> Profile:
    layout: dict[str, Any] = {"memory_format": "channels-last"} if channels_last else {}
    return planner.profile(
        file, batch_size=batch, dtype=dtype, device=device, seconds=1.0, **layout
    )


def _plain(case: Case, device: str) -> tuple[float, float, int]:
    """Return the host's seconds and all seconds of a step as PyTorch's users write it, and the peak
    of its memory.
    """
    step = _plain_step(case, device)
    on_gpu, steps = device == "cuda", max(10, case.steps // 4)
    for _ in range(WARM):
        step()
    _wait(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    host_s = (time.perf_counter() - began) / steps
    _wait(device)
    all_s = (time.perf_counter() - began) / steps
    return host_s, all_s, torch.cuda.max_memory_allocated() if on_gpu else 0


def _plain_step(case: Case, device: str) -> Callable[[], None]:
    spec = load_model_file(case.file)
    torch.manual_seed(0)
    model = spec.build_model().to(device).train()
    batch = spec.example_batch(case.batch)
    if case.channels_last:
        options = ModuleOptions(channels_last=True)
        options.prepare(model)
        batch = batch.prepared(options)
    batch = batch.to(torch.device(device))
    optimizer = spec.optimizer(dict(model.named_parameters()))
    half = HALF.get(case.dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, half, enabled=half is not None):
            loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _empty_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
