"""Measure layers that ranks divide between them, on one device: as the first rank of a group that is not there.

The rank computes with its parts of the weights, as in training. Its collectives move nothing, through PyTorch's backend
`fake`: their bytes are counted, because what they take depends on the links of a cluster and not on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import InputError
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.division import DividedWeights, division_of, keep_parts
from planner.model.tensor.found import tensor_parallel_plan
from planner.profiler.measured.device import describe_device
from planner.profiler.measured.make_profile import make_profile
from planner.profiler.measured.step_measurement import StepMeasurement
from planner.profiler.measured.steps import Effort, HasBackward

# A ring sends (t - 1)/t of the bytes for either, and an all-reduce is one after the other.
_SHARES = {"all_reduce": 1.0, "all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 0.5}


def measure_degrees(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, effort: Effort, degrees: Sequence[int]
) -> tuple[DegreeCosts, ...]:
    """Measure the layers as ranks of groups of these sizes compute them, on the device where the model is.

    Raises:
        InputError: if the model does not say how it is divided, or this process has joined others.
        PlanError: where so many ranks cannot divide it.
    """
    if dist.is_initialized():
        raise InputError(
            "divided layers are measured by one process alone, and this one has joined others",
            hint="start plan profile without torchrun; the times of all-reduces follow from the cluster's links",
        )
    device = next(graph.model.parameters()).device
    found = []
    for degree in sorted(set(degrees)):
        plan = tensor_parallel_plan(spec, graph, degree)
        with _group_of(degree, device) as group:
            measurement = _DividedMeasurement(spec, graph, batch, device, division_of(graph, plan, group))
            found.append(measurement.costs(effort, degree))
    return tuple(found)


@contextmanager
def _group_of(degree: int, device: torch.device) -> Iterator[Any]:
    """Make a group of which this process is the only rank that is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from planner.model.tensor.group import TensorGroup

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        group = TensorGroup(degree, 0)
        assert dist.group.WORLD is not None
        group.connect(dist.group.WORLD, device)
        yield group
    finally:
        dist.destroy_process_group()


class _DividedMeasurement(StepMeasurement):
    def __init__(
        self, spec: TrainingSpec, graph: LayerGraph, batch: Batch, device: torch.device, division: DividedWeights
    ) -> None:
        self._division = division
        super().__init__(spec, graph, batch, device)

    def costs(self, effort: Effort, degree: int) -> DegreeCosts:
        """Measure what the layers cost a rank."""
        measured = self.measure_uncompiled(effort)
        reduced = self._reduced()
        part = make_profile("", self._graph, self._batch.size, measured, describe_device(self._device, 1, 1))
        columns = {name: tuple(getattr(layer, name) for layer in part.layers) for name in DEGREE_COLUMNS}
        own = dict(self._stage.named_parameters())
        layers = self._by_layer(own)
        columns["weight_bytes"] = tuple(sum(p.nbytes for p in layer.values()) for layer in layers)
        columns["gradient_bytes"] = tuple(sum(p.nbytes for p in layer.values() if p.requires_grad) for layer in layers)
        return DegreeCosts(degree=degree, source="measured", **reduced, **columns)

    def _reduced(self) -> dict[str, tuple[int, ...]]:
        """Count the bytes and the number of each layer's collectives, as all-reduces."""
        counter = _Collectives()
        marks = self._counted(counter, lambda: (counter.size_bytes, counter.calls))
        found = {}
        for place, name in enumerate(("reduced_bytes", "reduces")):
            sums = marks.sums(lambda start, end, place=place: end[place] - start[place])  # type: ignore[misc]
            for way, column in zip(("forward", "backward"), sums, strict=True):
                found[f"{way}_{name}"] = tuple(map(round, column))
        return found

    def _built(self, names: Sequence[str]) -> StageModule:
        stage = build_stage(self._graph, names, variant=Variant(observable=True, division=self._division))
        keep_parts(stage)
        return stage

    def _plain_forward(self) -> HasBackward:
        return self._forward(None)

    def _flops(self) -> list[tuple[int, int]]:
        return [(0, 0)] * len(self._span)


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of a base class without types
    """Counts what runs within its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size_bytes, self.calls = 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls the operations of its parts, which come here, too
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
        if space.startswith("_c10d_functional") and name in _SHARES:
            self.size_bytes += _SHARES[name] * max(args[0].nbytes, out.nbytes)
            self.calls += 1
        return out
