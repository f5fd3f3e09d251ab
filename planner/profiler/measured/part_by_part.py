"""Measure a model that is larger than its device: some layers at a time are there, the values
between them on the host.

A part is a run of layers. It is measured as the whole model is: whole steps of it with marks
between its layers. What it takes from earlier parts comes from their forward; the gradients of what
it gives are made up, because times do not depend on them. Bytes count as in the whole step: what an
earlier part has saved already is not counted again, and what lies on the device between the parts
in a whole step is added.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.lengths import extent_of
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import LayerObserver
from planner.profiler.make_profile import LayerMeasurement, Measurement, first_uses
from planner.profiler.measured.step_measurement import StepMeasurement
from planner.profiler.step.allocation import (
    address_of,
    saved_bytes,
    tensors_of_batch,
    workspace_bytes,
)
from planner.profiler.step.timing import (
    PARTS,
    Effort,
    HasBackward,
    StepTimes,
    drop_gradients,
    step_failure,
)
from planner.runtime import runtime_of

# Of the device's free memory, the weights of a part: its gradients, its optimizer's state and what
# it saves need more.
_WEIGHTS_SHARE = 1 / 8
_HOST = torch.device("cpu")


def measure_in_parts(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, device: torch.device, effort: Effort
) -> Measurement:
    """Measure the layers of `graph`, whose weights stay on the host but for those of the part that
    is measured.

    On a CPU each layer is a part of its own. Raise ModelFileError when a step fails, also for want
    of memory for a single layer.
    """
    runtime = runtime_of(device)
    free = 0
    if runtime.counts_memory:
        free = runtime.free_and_total_bytes(device)[0]
    batch = batch.to(device)
    between = _Between(graph, batch)
    pending = list(_parts(graph, int(free * _WEIGHTS_SHARE)))[::-1]
    layers: list[LayerMeasurement] = []
    wholes: list[StepTimes] = []
    while pending:
        span = pending.pop()
        share = replace(effort, seconds=effort.seconds * len(span) / len(graph.layers))
        try:
            measured: Measurement | None = _measure_part(
                spec, graph, batch, device, between, span, share
            )
        except torch.OutOfMemoryError as cause:
            if len(span) == 1:
                raise step_failure(cause) from cause
            measured = None
        except RuntimeError as cause:
            raise step_failure(cause) from cause
        # outside of the handler, whose traceback keeps the step's tensors alive
        if measured is None:
            half = len(span) // 2
            pending += [span[half:], span[:half]]
            gc.collect()
            runtime.empty_cache()
            continue
        layers += measured.layers
        assert measured.whole is not None
        wholes.append(measured.whole)

    # The first repeats of all parts make the first step, and so on, as far as all parts have one.
    columns = {name: [getattr(part, name) for part in wholes] for name in (*PARTS, "update_s")}
    whole = {
        name: [sum(each) for each in zip(*column, strict=False)] for name, column in columns.items()
    }
    return Measurement(layers, StepTimes(**whole))


def _measure_part(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    device: torch.device,
    between: "_Between",
    span: range,
    effort: Effort,
) -> Measurement:
    part = _PartMeasurement(spec, graph, batch, device, span, between)
    try:
        measured = part.measure_uncompiled(effort)
    finally:
        part.leave()
    between.values |= part.made
    between.saved |= part.saved_names
    return measured


def _parts(graph: LayerGraph, most_bytes: int) -> Iterator[range]:
    """Yield runs of layers whose weights are at most `most_bytes`, or single layers."""
    tensors = dict(graph.model.named_parameters())
    sizes = [
        sum(tensors[name].nbytes for name in names)
        for names in first_uses(each.parameters for each in graph.layers)
    ]
    start = 0
    total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most_bytes:
            yield range(start, index)
            start = index
            total = 0
        total += size

    yield range(start, len(sizes))


class _Between:
    """The values that cross from part to part, on the host, and the batch, which stays on the
    device.

    Attributes:
        values: by name.
        saved: names of those that an earlier part has saved for its backward, and of such leaves of
            the batch.
        batch: its leaves, by names that no value has.
    """

    def __init__(self, graph: LayerGraph, batch: Batch) -> None:
        self._graph = graph
        self._extent = extent_of(batch, graph.lengths)
        self.values: dict[str, Tensor] = {}
        self.saved: set[str] = set()
        self.batch = {
            f"batch {number}": tensor for number, tensor in enumerate(tensors_of_batch(batch))
        }

    def unsaved_bytes(self, first: int) -> int:
        """Return the bytes that are on the device before layer `first`, and that nobody has
        saved.
        """
        graph = self._graph
        alive = [
            node.name
            for node in graph.crossing
            if graph.owner[node] < first <= graph.last_use(node)
        ]
        there = self.batch | {name: self.values[name] for name in alive if name in self.values}
        return sum(tensor.nbytes for name, tensor in there.items() if name not in self.saved)

    def gradient_bytes(self, first: int, end: int) -> int:
        """Return the bytes of gradients, of values from before `first`, that layers from `end` on
        have made.
        """
        graph = self._graph
        passing = [
            node
            for node in graph.crossing
            if graph.owner[node] < first and graph.last_use(node) >= end
        ]
        specs = [graph.specs[node] for node in passing]
        return sum(
            spec.of_gradient.size_bytes(self._extent) for spec in specs if spec.requires_grad
        )


class _Give(torch.autograd.Function):
    """What later parts do: its backward gives every output of a part a gradient, and keeps no
    output.
    """

    @staticmethod
    def forward(ctx: Any, part: "_PartMeasurement", *outputs: Tensor) -> Tensor:
        ctx.part = part
        ctx.likes = [output.to("meta") for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.part.gradient(index, like) for index, like in enumerate(ctx.likes))


class _Shifted:
    """An observer of a part, whose first layer is its layer 0."""

    def __init__(self, observer: LayerObserver, first: int) -> None:
        self._observer = observer
        self._first = first

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._observer.after_layer(index - self._first, value)


class _PartMeasurement(StepMeasurement):
    """Measures steps of some layers.

    Attributes:
        made: what the forward made for later parts, on the host.
        saved_names: of what crosses and of the batch, what the part has saved.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        graph: LayerGraph,
        batch: Batch,
        device: torch.device,
        span: range,
        between: _Between,
    ) -> None:
        super().__init__(spec, graph, batch, device, span)
        self._between = between
        self._grads = {value.name: value.requires_grad for value in self._stage.received}
        self._received = {name: between.values[name].to(device, copy=True) for name in self._grads}
        self._gradients: dict[int, Tensor] | None = {}
        self.made: dict[str, Tensor] = {}
        self.saved_names: set[str] = set()

    def leave(self) -> None:
        """Bring the weights back to the host."""
        drop_gradients(self._parameters.values())
        self._stage.to(_HOST)

    def gradient(self, index: int, like: Tensor) -> Tensor:
        """Return a gradient of output `index`, which is like a tensor on the meta device; any
        number will do.

        It is made once, as times want it, or in every backward, as the memory of a whole step does.
        """
        if self._gradients is None:
            return torch.full_like(like, 1e-3, device=self._device)
        if index not in self._gradients:
            self._gradients[index] = torch.full_like(like, 1e-3, device=self._device)
        return self._gradients[index]

    def _forward(self, observer: LayerObserver | None) -> HasBackward:
        results = self._run(observer)
        outputs = [
            value
            for name, value in results.items()
            if name not in self._received and value.requires_grad
        ]
        if LOSS in results and len(outputs) == 1:
            return results[LOSS]
        if not outputs:
            # no gradient returns, and this backward does nothing
            return torch.zeros((), requires_grad=True)

        given: Tensor = _Give.apply(self, *outputs)  # type: ignore[no-untyped-call]
        return given

    def _run(self, observer: LayerObserver | None) -> Mapping[str, Tensor]:
        shifted = None
        if observer is not None:
            shifted = _Shifted(observer, self._span.start)
        self._stage.set_observer(shifted)

        given = {
            name: value.detach().requires_grad_(self._grads[name])
            for name, value in self._received.items()
        }
        results: dict[str, Tensor] = self._stage(self._batch, given)
        return results

    def _saved(self) -> list[int]:
        there = self._received | self._between.batch
        known = {
            address_of(tensor) for name, tensor in there.items() if name in self._between.saved
        }

        def forward(observer: LayerObserver) -> object:
            results = self._run(observer)
            sent = {value.name: results[value.name].detach() for value in self._stage.sent}
            self.made = {
                name: value.to(_HOST, copy=True)
                for name, value in sent.items()
                if name not in there
            }
            self.saved_names = {
                name for name, tensor in (there | sent).items() if address_of(tensor) in known
            }
            return results

        return saved_bytes([self._stage], forward, len(self._span), known)

    def _workspaces(self, saved: Sequence[int], gradients: Sequence[int]) -> list[int]:
        self._gradients = None
        first = self._span.start
        end = self._span.stop
        before = self._between.unsaved_bytes(first)
        passing = self._between.gradient_bytes(first, end)
        return workspace_bytes(
            self._forward, self._device, saved, gradients, (before, before + passing)
        )
