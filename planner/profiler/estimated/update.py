"""Trace the optimizer's step and gradient accumulation, layer by layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from planner.errors import InputError, first_line
from planner.formats.files import replace
from planner.model.optimizer_part import TrainedParameter, optimizer_of_part, step_part
from planner.model.options import gradient_bytes
from planner.model.spec import TrainingSpec
from planner.model.torch_private import FakeTensorMode
from planner.profiler.estimated.devices import DeviceSpec
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.operations import Operation, OperationRecorder
from planner.profiler.estimated.roofline import Costs
from planner.profiler.step.update import LayerUpdate, state_bytes_of, still

# Of a layer's parameters, by name; and whether the optimizer takes each.
Shapes = tuple[tuple[str, torch.Size, torch.dtype, bool], ...]
Whole = Sequence[TrainedParameter]

_NUMBERS = re.compile(r"\d+")
# of a launch, for each tensor of a list: AdamW by `foreach` took a host 20 µs per weight
_LISTED = 1 / 16


@dataclass(frozen=True)
class UpdateTrace:
    """The optimizer's step on one layer's parameters, and the accumulation of their gradients."""

    step: Costs
    state_bytes: int
    accumulate: Costs
    workspace_bytes: int = 0  # of the step
    host_launches: float = 0.0  # of the step, in launches of a kernel

    def seconds(self, spec: DeviceSpec) -> float:
        """Return the time of the step on such a device."""
        # On GPUs torch's optimizers launch each of their operations once for all parameters
        # (foreach).
        launches = replace(spec, launch_s=0.0) if spec.kind == "cuda" else spec
        return float(self.step.seconds(launches).sum())

    def estimate(self, spec: DeviceSpec) -> LayerUpdate:
        """Return the cost of step and accumulation on such a device."""
        accumulate_s = float(self.accumulate.seconds(spec).sum())
        return LayerUpdate(self.seconds(spec), self.state_bytes, self.workspace_bytes, accumulate_s)


def trace_updates(
    layers: Sequence[Mapping[str, nn.Parameter]],
    training_spec: TrainingSpec,
    execution: Execution,
    known: dict[Shapes, UpdateTrace],
    whole: Whole | None = None,
) -> list[UpdateTrace]:
    """Trace the update of the parameters of each layer, but for those `known`, to which the others
    are added.

    Args:
        whole: all trained parameters of the model, from which optimizer() may choose; None for each
            layer's alone.
    """
    taken = None if whole is None else _taken(training_spec, whole)
    # Models have many layers of the same shapes and the same names but for their numbers, whose
    # updates are alike.
    updates = []
    for weights in layers:
        shapes = tuple(
            (_NUMBERS.sub("#", name), weight.shape, weight.dtype, taken is None or name in taken)
            for name, weight in weights.items()
        )
        if shapes not in known:
            known[shapes] = _trace_update(training_spec, weights, execution, whole)
        updates.append(known[shapes])

    return updates


def _taken(training_spec: TrainingSpec, whole: Whole) -> set[str]:
    """Return all names of the parameters that the optimizer takes."""
    stand_ins = {each.name: each.stand_in() for each in whole}
    optimizer = training_spec.optimizer(stand_ins)
    identities = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return {
        name for each in whole if id(stand_ins[each.name]) in identities for name in each.aliases
    }


def _trace_update(
    training_spec: TrainingSpec,
    weights: Mapping[str, nn.Parameter],
    execution: Execution,
    whole: Whole | None,
) -> UpdateTrace:
    if not weights:
        return UpdateTrace(Costs([]), 0, Costs([]))
    try:
        # Fake tensors of the CPU, because fused optimizers refuse the meta device.
        with FakeTensorMode():
            parameters = {}
            for name, weight in weights.items():
                dtype = torch.float32 if execution.master_weights else weight.dtype
                parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype))
                parameters[name].grad = torch.empty_like(parameters[name])
            masters = list(parameters.values())
            if whole is None:
                optimizer = still(training_spec.optimizer(parameters))
            else:
                optimizer = still(optimizer_of_part(training_spec, whole, parameters))
            for group in optimizer.param_groups if execution.kind == "cuda" else ():
                if not group.get("fused") and group.get("foreach", True) is None:
                    group["foreach"] = True  # as torch chooses on GPUs
            step_part(training_spec, optimizer)  # creates the state
            with OperationRecorder(op_class="update") as recorder:
                recorder.end_span()
                step_part(training_spec, optimizer)
                recorder.end_span()
    except (NotImplementedError, RuntimeError) as cause:
        raise InputError(
            f"the step of the optimizer in '{training_spec.origin}' cannot be estimated, it looks "
            f"at numbers: "
            f"{first_line(cause)}",
            hint="measure it on the device, or estimate with another optimizer",
        ) from cause

    state_bytes, workspace_bytes = state_bytes_of(optimizer), recorder.allocated.peaks[1]
    # Step counters are on no device, and their arithmetic takes no time worth counting.
    least = min(parameter.nbytes for parameter in masters)
    step = [operation for operation in recorder.operations if operation.bytes >= least]
    host_launches = sum(
        len(masters) * _LISTED if op.name.startswith(("_foreach", "_fused")) else 1.0 for op in step
    )
    if execution.master_weights:
        # Weights become half again after the step, and gradients float32 before it, if they were
        # not summed so.
        step += [
            _moving(weight.nbytes + master.nbytes)
            for weight, master in zip(weights.values(), masters, strict=True)
        ] * (1 + execution.sums_in_half)
        state_bytes += sum(master.nbytes for master in masters)

    # Accumulation reads both gradients and writes their sum.
    accumulate = [
        _moving(weight.nbytes + 2 * gradient_bytes(weight)) for weight in weights.values()
    ]
    return UpdateTrace(Costs(step), state_bytes, Costs(accumulate), workspace_bytes, host_launches)


def _moving(moved_bytes: int) -> Operation:
    return Operation("update", 0.0, float(moved_bytes), "float32")
