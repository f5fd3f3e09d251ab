"""Measure each stage of a plan on its own, and compare it with the sum of its layers in the
profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from planner.errors import InputError, PlanError
from planner.formats.profile import Profile
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LOSS
from planner.model.options import module_options
from planner.model.spec import TrainingSpec
from planner.model.stage.code import check_compiler
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.plan.shared_weights import copied_layers
from planner.profiler.measured.other_processes import check_processes, contention
from planner.profiler.step.timing import Clock, Effort, HasBackward, Steps, StepTimes, repeat
from planner.profiler.step.update import still
from planner.profiler.this_machine import parse_device, thread_count
from planner.runtime import runtime_of
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
        sum(
            layers[name].forward_s + layers[name].backward_s + layers[name].update_s
            for name in names
        )
        + sum(layer.update_s for layer in copied)
        for names, copied in zip(stages, copied_layers(profile, stages), strict=True)
    ]
    return [StageTime(one, other) for one, other in zip(summed, measured, strict=True)]


def _measured_s(
    spec: TrainingSpec,
    profile: Profile,
    stages: Sequence[Sequence[str]],
    device: str | None,
    seconds: float,
) -> list[float]:
    if not profile.trainable or profile.microbatch_size is None:
        raise InputError(
            f"the profile of '{profile.model}' is imported, so there is no model whose stages "
            f"could be measured",
            hint="profile your model file with: plan profile model.py",
        )
    target = parse_device(device or profile.device.kind)
    threads, processes = profile.device.threads or 1, profile.device.processes or 1
    check_processes(processes, threads, target, spec)
    with (
        thread_count(threads),
        computing(numerics_of(profile)),
        runtime_of(target).random_state_kept(target),
    ):
        torch.manual_seed(0)
        batch = spec.example_batch(profile.microbatch_size)
        options = replace(module_options(profile), device=target.type)
        if options.compiled:
            check_compiler(target.type)
        graph = capture_file(spec, batch, options=options)
        if graph.hash != profile.graph_hash:
            raise PlanError(
                f"'{spec.origin}' is another model than the one that was profiled: graph "
                f"{profile.graph_hash} in "
                f"the profile, {graph.hash} captured",
                hint="profile it again with: plan profile",
            )
        modules = [
            build_stage(graph, names, variant=Variant(compiled=options.compiled)).to(target)
            for names in stages
        ]
        runs = _runs(modules, spec, batch.to(target))
        times = [StepTimes() for _ in runs]
        effort = Effort(seconds, repeats=30, least_repeats=3, warmup=1)
        with contention(
            spec, profile.microbatch_size, processes - 1, threads=threads, options=options
        ):
            for run in runs * effort.warmup:
                run.step(StepTimes())
            repeat(
                effort,
                "measuring stages",
                [partial(run.step, into) for run, into in zip(runs, times, strict=True)],
            )
        steps = (zip(each.forward_s, each.backward_s, each.update_s, strict=True) for each in times)
        return [median(map(sum, each)) for each in steps]


def _runs(stages: Sequence[StageModule], spec: TrainingSpec, batch: Batch) -> list[_StageRun]:
    """Return each stage with the values that the stages before it send, and the gradients that
    later ones return.

    The gradients must be real ones, because the time of an optimizer's step depends on the numbers.
    On a CPU Adam's takes twice as long where most gradients are zero, and eight times as long where
    their squares are denormal.
    """
    known: dict[str, Tensor] = {}
    runs = []
    for stage in stages:
        received = {value.name: known[value.name].detach() for value in stage.received}
        with torch.no_grad():
            known.update(stage(batch if stage.needs_batch else None, received))
        runs.append(_StageRun(stage, spec, batch, received))
    gradients: dict[str, Tensor] = {}
    for run in reversed(runs):
        run.gradients |= gradients
        run.step(StepTimes())
        for name, gradient in run.returned.items():
            # A value that several stages use gets the sum of their gradients.
            gradients[name] = gradient + gradients[name] if name in gradients else gradient
    return runs


class _StageRun:
    """Steps of one stage on its own, always with the same inputs, detached, and the same gradients.

    Attributes:
        gradients: of what the stage sends.
        returned: the last step's gradients of what it received.
    """

    def __init__(
        self, stage: StageModule, spec: TrainingSpec, batch: Batch, received: Mapping[str, Tensor]
    ) -> None:
        self._stage, self._batch, self._received = (
            stage,
            batch if stage.needs_batch else None,
            received,
        )
        self._results: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}
        trained = {
            name: parameter
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }
        update = still(spec.optimizer(trained)).step if trained else lambda: None
        self._steps = Steps(Clock(torch.device(batch.device_type)), trained.values(), update)

    def step(self, into: StepTimes) -> None:
        """Run and time a step."""
        given = {
            value.name: self._received[value.name].detach().requires_grad_(value.requires_grad)
            for value in self._stage.received
        }

        def forward() -> HasBackward:
            self._results = self._stage(self._batch, given)
            return self

        self._steps.whole(forward, into)
        self._results = {}
        self.returned = {
            name: value.grad for name, value in given.items() if value.grad is not None
        }

    def backward(self) -> None:
        """Run the backward of what the forward made."""
        roots = {name: value for name, value in self._results.items() if value.grad_fn is not None}
        for name, value in roots.items():
            # Zeros stand for gradients that no later stage returned: made in the first step, which
            # nobody times.
            if name != LOSS and name not in self.gradients:
                self.gradients[name] = torch.zeros_like(value)
        if roots:
            torch.autograd.backward(
                list(roots.values()), [self.gradients.get(name) for name in roots]
            )
