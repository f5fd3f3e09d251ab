"""The stages of a plan, each run by itself on this device, beside what the profile's layers add up to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from planner.errors import InputError, PlanError
from planner.formats.profile import Profile
from planner.formats.shared_weights import copied_layers
from planner.model.batch import Batch
from planner.model.load import capture_file
from planner.model.options import module_options
from planner.model.spec import TrainingSpec
from planner.model.stage.compiling import check_compiler
from planner.model.stage.parts import LOSS
from planner.model.stage.stage import StageModule, build_stage
from planner.profiler.measured.clock import Clock, clock_for
from planner.profiler.measured.contention import at_work, check_processes
from planner.profiler.measured.profile import parse_device, thread_count
from planner.profiler.measured.update import still

DEFAULT_SECONDS = 10.0
_LEAST_REPEATS, _MOST_REPEATS, _WARMUP = 3, 30, 1


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage per microbatch: forward, backward and one update.

    Attributes:
        summed_s: of its layers in the profile.
        measured_s: median of the stage run by itself, its inputs detached.
    """

    summed_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the sum is from the measurement, as a share of it; negative where the sum is too low."""
        return self.summed_s / self.measured_s - 1


def verify(
    spec: TrainingSpec,
    profile: Profile,
    stages: Sequence[Sequence[str]],
    *,
    device: str | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> list[StageTime]:
    """Measure the stages of a plan.

    Args:
        spec: that was profiled.
        profile: that the plan was made from.
        stages: names of the consecutive layers of each.
        device: to measure on; None for the kind that was profiled.
        seconds: for all stages together.

    Raises:
        PlanError: when the model is another than the profile's.
        InputError: when the device is not there, or the profile knows no batch size.
    """
    if not profile.trainable or profile.microbatch_size is None:
        raise InputError(
            f"the profile of '{profile.model}' is imported, so there is no model whose stages could be measured",
            hint="leave --verify out, or profile your model file with: plan profile model.py",
        )
    target = parse_device(device or profile.device.kind)
    check_processes(profile.device.processes or 1, profile.device.threads or 1, target, spec)
    with thread_count(profile.device.threads or 1), torch.random.fork_rng():
        torch.manual_seed(0)
        batch = spec.example_batch(profile.microbatch_size)
        options = module_options(profile)
        if options.compiled:
            check_compiler(target.type)
        graph = capture_file(spec, batch, options=options)
        if graph.hash != profile.graph_hash:
            raise PlanError(
                f"'{spec.origin}' is another model than the one that was profiled: graph {profile.graph_hash} in "
                f"the profile, {graph.hash} captured",
                hint="profile it again with: plan profile",
            )
        modules = [build_stage(graph, names, compile_=options.compiled).to(target) for names in stages]
        runs = _runs(modules, spec, batch.to(target))
        clock = clock_for(target)
        _return_gradients(runs, clock)
        threads, others = profile.device.threads or 1, (profile.device.processes or 1) - 1
        with at_work(spec, profile.microbatch_size, others, threads=threads, options=options):
            measured = _measure(runs, clock, seconds)
    layers = {layer.name: layer for layer in profile.layers}
    # A copy of a weight that an earlier stage has is updated, too.
    summed = [
        sum(layers[name].forward_s + layers[name].backward_s + layers[name].update_s for name in names)
        + sum(layer.update_s for layer in copied)
        for names, copied in zip(stages, copied_layers(profile, stages), strict=True)
    ]
    return [StageTime(one, other) for one, other in zip(summed, measured, strict=True)]


def _runs(stages: Sequence[StageModule], spec: TrainingSpec, batch: Batch) -> list[_Run]:
    """Each stage with the values that the stages before it make."""
    known: dict[str, Tensor] = {}
    runs = []
    for stage in stages:
        received = {value.name: known[value.name] for value in stage.received}
        with torch.no_grad():
            known.update(stage(batch if stage.needs_batch else None, received))
        runs.append(_Run(stage, spec, batch, received))
    return runs


def _return_gradients(runs: Sequence[_Run], clock: Clock[Any]) -> None:
    """A step of each stage, the last one first, from the gradients that the later ones return.

    Those are kept for the steps to come: how long an optimizer's step takes depends on the numbers. On a CPU Adam's
    takes twice as long where most gradients are zero, and eight times where their squares are denormal.
    """
    gradients: dict[str, Tensor] = {}
    for run in reversed(runs):
        run.gradients = gradients
        run.step(clock)
        # Of a value with several users the sum, for whoever made it.
        gradients = {**gradients, **{n: g + gradients[n] if n in gradients else g for n, g in run.returned.items()}}


class _Run:
    def __init__(self, stage: StageModule, spec: TrainingSpec, batch: Batch, received: dict[str, Tensor]) -> None:
        self._stage = stage
        self._batch = batch if stage.needs_batch else None
        self._received = {name: value.detach() for name, value in received.items()}
        self.gradients: dict[str, Tensor] = {}  # of what it sends
        self.returned: dict[str, Tensor] = {}  # of what it received
        self._parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._optimizer = still(spec.optimizer(list(self._parameters))) if self._parameters else None

    def step(self, clock: Clock[Any]) -> float:
        """Seconds of a forward, a backward and an update."""
        for parameter in self._parameters:
            parameter.grad = None
        received = {
            value.name: self._received[value.name].detach().requires_grad_(value.requires_grad)
            for value in self._stage.received
        }
        clock.wait()
        start = clock.mark()
        results = self._stage(self._batch, received)
        middle = clock.mark()
        roots = [name for name, value in results.items() if value.grad_fn is not None]
        seeds = [None if name == LOSS else self._gradient(name, results[name]) for name in roots]
        backward = clock.mark()
        if roots:
            torch.autograd.backward([results[name] for name in roots], seeds)
        if self._optimizer is not None:
            self._optimizer.step()
        end = clock.mark()
        clock.wait()
        self.returned = {name: value.grad for name, value in received.items() if value.grad is not None}
        return clock.seconds(start, middle) + clock.seconds(backward, end)

    def _gradient(self, name: str, value: Tensor) -> Tensor:
        gradient = self.gradients.get(name)
        return torch.zeros_like(value) if gradient is None else gradient


def _measure(runs: Sequence[_Run], clock: Clock[Any], seconds: float) -> list[float]:
    for run in runs:
        for _ in range(_WARMUP):
            run.step(clock)
    times: list[list[float]] = [[] for _ in runs]
    started = time.perf_counter()
    for repeat in range(_MOST_REPEATS):
        if repeat >= _LEAST_REPEATS and time.perf_counter() - started > seconds:
            break
        # In turn, so that whatever else the machine does slows all alike.
        for run, of_run in zip(runs, times, strict=True):
            of_run.append(run.step(clock))
    return [median(of_run) for of_run in times]
