"""Measure each stage of a plan on its own, and compare it with the sum of its layers in the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from planner.errors import InputError, PlanError
from planner.formats.profile import Profile
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LOSS
from planner.model.options import module_options
from planner.model.randomness import random_state_kept
from planner.model.spec import TrainingSpec
from planner.model.stage.code import check_compiler
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.plan.shared_weights import copied_layers
from planner.profiler.measured.other_processes import check_processes, contention
from planner.profiler.step.timing import Clock, Effort, clock_for, drop_gradients, repeat
from planner.profiler.step.update import still
from planner.profiler.this_machine import parse_device, thread_count
from planner.workers.numerics import computing, numerics_of

DEFAULT_SECONDS = 10.0


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage per microbatch: forward, backward and one update.

    Attributes:
        summed_s: of its layers in the profile.
        measured_s: median of the stage on its own.
    """

    summed_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the sum; negative where it is too low."""
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
        device: to measure on; None for the kind that was profiled.

    Raises:
        PlanError: when the model is another than the profile's.
        InputError: when the device does not exist, or the profile knows no batch size.
    """
    measured = _measured_s(spec, profile, stages, device, seconds)
    layers = {layer.name: layer for layer in profile.layers}
    # A stage also updates its copies of weights that it shares with earlier stages.
    summed = [
        sum(layers[name].forward_s + layers[name].backward_s + layers[name].update_s for name in names)
        + sum(layer.update_s for layer in copied)
        for names, copied in zip(stages, copied_layers(profile, stages), strict=True)
    ]
    return [StageTime(one, other) for one, other in zip(summed, measured, strict=True)]


def _measured_s(
    spec: TrainingSpec, profile: Profile, stages: Sequence[Sequence[str]], device: str | None, seconds: float
) -> list[float]:
    if not profile.trainable or profile.microbatch_size is None:
        raise InputError(
            f"the profile of '{profile.model}' is imported, so there is no model whose stages could be measured",
            hint="profile your model file with: plan profile model.py",
        )
    target = parse_device(device or profile.device.kind)
    threads, processes = profile.device.threads or 1, profile.device.processes or 1
    check_processes(processes, threads, target, spec)
    with thread_count(threads), computing(numerics_of(profile)), random_state_kept(target):
        torch.manual_seed(0)
        batch = spec.example_batch(profile.microbatch_size)
        options = replace(module_options(profile), device=target.type)
        if options.compiled:
            check_compiler(target.type)
        graph = capture_file(spec, batch, options=options)
        if graph.hash != profile.graph_hash:
            raise PlanError(
                f"'{spec.origin}' is another model than the one that was profiled: graph {profile.graph_hash} in "
                f"the profile, {graph.hash} captured",
                hint="profile it again with: plan profile",
            )
        modules = [build_stage(graph, names, variant=Variant(compiled=options.compiled)).to(target) for names in stages]
        runs = _runs(modules, spec, batch.to(target))
        clock = clock_for(target)
        _return_gradients(runs, clock)
        with contention(spec, profile.microbatch_size, processes - 1, threads=threads, options=options):
            return _measure(runs, clock, Effort(seconds, repeats=30, least_repeats=3, warmup=1))


def _runs(stages: Sequence[StageModule], spec: TrainingSpec, batch: Batch) -> list[_StageRun]:
    """Return each stage with the values that the stages before it send."""
    known: dict[str, Tensor] = {}
    runs = []
    for stage in stages:
        received = {value.name: known[value.name] for value in stage.received}
        with torch.no_grad():
            known.update(stage(batch if stage.needs_batch else None, received))
        runs.append(_StageRun(stage, spec, batch, received))
    return runs


def _return_gradients(runs: Sequence[_StageRun], clock: Clock[Any]) -> None:
    """Run a step of each stage, the last one first, and keep the gradients that later stages return for the next steps.

    The gradients must be real ones, because the time of an optimizer's step depends on the numbers. On a CPU Adam's
    takes twice as long where most gradients are zero, and eight times as long where their squares are denormal.
    """
    gradients: dict[str, Tensor] = {}
    for run in reversed(runs):
        run.gradients = gradients
        run.step(clock)
        # A value that several stages use gets the sum of their gradients.
        gradients = {**gradients, **{n: g + gradients[n] if n in gradients else g for n, g in run.returned.items()}}


class _StageRun:
    """Steps of one stage on its own, always with the same inputs, detached, and the same gradients."""

    def __init__(self, stage: StageModule, spec: TrainingSpec, batch: Batch, received: dict[str, Tensor]) -> None:
        self._stage = stage
        self._batch = batch if stage.needs_batch else None
        self._received = {name: value.detach() for name, value in received.items()}
        self.gradients: dict[str, Tensor] = {}  # of what it sends
        self.returned: dict[str, Tensor] = {}  # of what it received
        self._parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        trained = {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
        self._optimizer = still(spec.optimizer(trained)) if trained else None

    def step(self, clock: Clock[Any]) -> float:
        """Return the seconds of a forward, a backward and an update."""
        drop_gradients(self._parameters)
        received = {
            value.name: self._received[value.name].detach().requires_grad_(value.requires_grad)
            for value in self._stage.received
        }
        clock.wait()
        start = clock.mark()
        results = self._stage(self._batch, received)
        middle = clock.mark()
        roots = [name for name, value in results.items() if value.grad_fn is not None]
        # Zeros stand for gradients that no later stage returned. The stage does not make them, so they are not timed.
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


def _measure(runs: list[_StageRun], clock: Clock[Any], effort: Effort) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]

    def in_turn() -> None:
        for run, of_run in zip(runs, times, strict=True):
            of_run.append(run.step(clock))

    for run in runs * effort.warmup:
        run.step(clock)
    repeat(effort, "measuring stages", [in_turn])
    return [median(of_run) for of_run in times]
