"""Measure the optimizer's step and gradient accumulation, layer by layer.

The first backward after an update sets the gradients. Each further one before the next update adds
to them: it reads both and writes the sum. That sum is timed by itself, because the difference
between two whole backwards would drown in noise (8 ms of 90 on VGG-16). As in a backward the new
gradient was written just before, and the other one long ago.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.model.optimizer_part import TrainedParameter, optimizer_of_part, step_part
from planner.model.options import gradient_dtype
from planner.model.spec import TrainingSpec
from planner.model.torch_private import copy_all, tree_leaves
from planner.profiler.step.allocation import meter_for
from planner.profiler.step.timing import Clock

Layers = Sequence[Mapping[str, nn.Parameter]]  # trained parameters by name, per layer
Whole = Sequence[TrainedParameter]
_ADDITIONS, _UPDATES = 5, 3  # that are timed
_LEAST_METERED_BYTES = 10**6


@dataclass(frozen=True)
class LayerUpdate:
    """Cost of the optimizer's step on one layer's parameters alone, and of adding to their
    gradients.
    """

    update_s: float
    optimizer_bytes: int  # its state
    update_workspace_bytes: int = 0  # the most that it allocates beyond its state
    accumulate_s: float = 0.0  # by which adding to the gradients takes longer than setting them
    accumulate_thread_s: float | None = None  # processor time of that, on a CPU


def still(optimizer: Optimizer) -> Optimizer:
    """Set the learning rate to zero: steps do the same work, and the weights stay what they are."""
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    return optimizer


def layer_updates(
    spec: TrainingSpec,
    layers: Layers,
    clock: Clock,
    device: torch.device,
    whole: Whole | None = None,
) -> list[LayerUpdate]:
    """Measure a step on the parameters of each layer, and additions to their gradients, which must
    be there.

    A layer none of whose parameters the optimizer takes has no update.

    Args:
        whole: all trained parameters of the model, from which optimizer() may choose; None for each
            layer's alone.
    """
    times = []
    for parameters in layers:
        if not parameters:
            times.append((0.0, 0))
            continue
        update = Update(spec, parameters, whole)
        update()  # which creates the state
        update_s = 0.0
        if update.takes_any:
            update_s = clock.median_s(update, _UPDATES)
        times.append((update_s, update.state_bytes))

    # All layers before any is repeated: the caches then hold other gradients, as in a training
    # step.
    rounds = [[_addition_s(parameters, clock) for parameters in layers] for _ in range(_ADDITIONS)]
    additions = [
        [median(part) for part in zip(*layer, strict=True)] for layer in zip(*rounds, strict=True)
    ]
    # Metered after all are timed, because metering slows steps down.
    sizes = update_workspaces(spec, layers, device, whole)
    return [
        LayerUpdate(*update, size, *added)
        for update, size, added in zip(times, sizes, additions, strict=True)
    ]


def _addition_s(parameters: Mapping[str, nn.Parameter], clock: Clock) -> list[float]:
    """Return the seconds of adding to the gradients once, and on a CPU the thread's."""
    spans = []
    for parameter in parameters.values():
        assert parameter.grad is not None
        new = torch.zeros_like(parameter.grad, dtype=parameter.dtype)
        start = clock.mark()
        parameter.grad.add_(new)
        spans.append((start, clock.mark()))

    clock.wait()
    if clock.times_threads:
        betweens = [clock.seconds, clock.thread_seconds]
    else:
        betweens = [clock.seconds]

    return [sum(between(start, end) for start, end in spans) for between in betweens]


def update_workspaces(
    spec: TrainingSpec, layers: Layers, device: torch.device, whole: Whole | None = None
) -> list[int]:
    """Return the most that a step on each layer's parameters, which must have gradients, allocates
    beyond its state.
    """
    sizes = []
    for parameters in layers:
        # Metering takes longer than a small step itself, whose workspace is of a parameter's size
        # and thus negligible.
        if sum(parameter.nbytes for parameter in parameters.values()) < _LEAST_METERED_BYTES:
            sizes.append(0)
            continue
        update = Update(spec, parameters, whole)
        meter = meter_for(device)
        update()
        with meter:
            meter.mark()
            update()
            meter.mark()
        sizes.append(meter.peaks()[1])

    return sizes


class Update:
    """Steps an optimizer at a learning rate of zero, of masters in float32 where weights have them.

    Args:
        parameters: those that are stepped, by name, as far as the optimizer takes them.
        whole: all trained parameters of the model, from which optimizer() may choose; None for
            `parameters` alone.
    """

    def __init__(
        self, spec: TrainingSpec, parameters: Mapping[str, nn.Parameter], whole: Whole | None = None
    ) -> None:
        self._spec = spec
        halves = [each for each in parameters.values() if gradient_dtype(each) != each.dtype]
        self._masters = {
            each: nn.Parameter(each.detach().to(gradient_dtype(each))) for each in halves
        }
        stepped = {
            name: self._masters.get(parameter, parameter) for name, parameter in parameters.items()
        }
        self.optimizer = still(
            spec.optimizer(stepped) if whole is None else optimizer_of_part(spec, whole, stepped)
        )

    def __call__(self) -> None:
        for parameter, master in self._masters.items():
            master.grad = parameter.grad
        step_part(self._spec, self.optimizer)
        weights = [weight.data for weight in self._masters]
        copy_all(weights, [master.data for master in self._masters.values()])

    @property
    def takes_any(self) -> bool:
        """Whether the optimizer takes any of the parameters."""
        return any(group["params"] for group in self.optimizer.param_groups)

    @property
    def state_bytes(self) -> int:
        """The bytes that it keeps between steps, once it has stepped."""
        return state_bytes_of(self.optimizer) + sum(
            master.nbytes for master in self._masters.values()
        )


def state_bytes_of(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that the optimizer keeps between steps."""
    state = [
        leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)
    ]
    return sum(tensor.nbytes for tensor in state)
