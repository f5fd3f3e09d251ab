"""Measure a model that is larger than its device: some layers at a time are there, the values between them on the host.

A part is a run of layers. It is measured as the whole model is: whole steps of it with marks between its layers. What
it takes from earlier parts comes from their forward; the gradients of what it gives are made up, because times do not
depend on them. Bytes count as in the whole step: what an earlier part has saved already is not counted again, and what
lies on the device between the parts in a whole step is added.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import LayerObserver
from planner.profiler.make_profile import LayerMeasurement, Measurement, first_uses
from planner.profiler.measured.step_measurement import StepMeasurement
from planner.profiler.step.allocation import address_of, saved_bytes, tensors_of_batch, workspace_bytes
from planner.profiler.step.timing import PARTS, Clock, Effort, HasBackward, StepTimes, drop_gradients, step_failure
from planner.profiler.step.update import layer_updates

# Of the device's free memory, the weights of a part: its gradients, its optimizer's state and what it saves need more.
_WEIGHTS_SHARE = 1 / 8
_HOST = torch.device("cpu")


def measure_in_parts(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, device: torch.device, effort: Effort
) -> Measurement:
    """Measure the layers of `graph`, whose weights stay on the host but for those of the part that is measured.

    On a CPU each layer is a part of its own.

    Raises:
        ModelFileError: when a step fails, also for want of memory for a single layer.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    batch = batch.to(device)
    between = _Between(graph, batch)
    pending = list(_parts(graph, int(free * _WEIGHTS_SHARE)))[::-1]
    layers: list[LayerMeasurement] = []
    wholes: list[StepTimes] = []
    while pending:
        span = pending.pop()
        share = replace(effort, seconds=effort.seconds * len(span) / len(graph.layers))
        try:
            measured: Measurement | None = _measure_part(spec, graph, batch, device, between, span, share)
        except torch.OutOfMemoryError as cause:
            if len(span) == 1:
                raise step_failure(cause) from cause
            measured = None
        except RuntimeError as cause:
            raise step_failure(cause) from cause
        if measured is None:  # outside of the handler, whose traceback keeps the step's tensors alive
            half = len(span) // 2
            pending += [span[half:], span[:half]]
            gc.collect()
            torch.cuda.empty_cache()
            continue
        layers += measured.layers
        assert measured.whole is not None
        wholes.append(measured.whole)
    return Measurement(layers, _sum(wholes, _update_overhead_s(spec, graph, device)))


def _measure_part(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    device: torch.device,
    between: _Between,
    span: range,
    effort: Effort,
) -> Measurement:
    part = _PartMeasurement(spec, graph, batch, device, span, between)
    try:
        measured = part.measure_uncompiled(effort)
    finally:
        part.leave()
    between.add(*part.made)
    return measured


def _parts(graph: LayerGraph, most_bytes: int) -> Iterator[range]:
    """Yield runs of layers whose weights are at most `most_bytes`, or single layers."""
    tensors = dict(graph.model.named_parameters())
    sizes = [
        sum(tensors[name].nbytes for name in names) for names in first_uses(each.parameters for each in graph.layers)
    ]
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most_bytes:
            yield range(start, index)
            start, total = index, 0
        total += size
    yield range(start, len(sizes))


def _update_overhead_s(spec: TrainingSpec, graph: LayerGraph, device: torch.device) -> float:
    """Return the seconds of a step of the optimizer on a single number."""
    name = next(name for name, parameter in graph.model.named_parameters() if parameter.requires_grad)
    number = nn.Parameter(torch.zeros(1, device=device))
    number.grad = torch.zeros_like(number)
    (update,) = layer_updates(spec, [{name: number}], Clock(device), device)
    return update.update_s


def _sum(parts: Sequence[StepTimes], overhead_s: float) -> StepTimes:
    """Return the times of whole steps: the first repeats of all parts make the first step, and so on.

    An optimizer's overhead is that of one for all parts.
    """
    parts = [replace(part, update_s=[max(0.0, each - overhead_s) for each in part.update_s]) for part in parts]
    parts[-1].update_s = [each + overhead_s for each in parts[-1].update_s]
    columns = {name: [getattr(part, name) for part in parts] for name in (*PARTS, "update_s")}
    # Repeats of which some part has none are left out.
    return StepTimes(**{name: [sum(each) for each in zip(*column, strict=False)] for name, column in columns.items()})


class _Between:
    """The values that cross from part to part, on the host; those that share memory in a whole step share it here.

    Args:
        batch: on the device, where it stays.

    Attributes:
        values: by name.
        saved: addresses of their storages that an earlier part has saved for its backward.
        batch_bytes: by the address of the batch's storages.
        batch_saved: addresses of those that an earlier part has saved.
    """

    def __init__(self, graph: LayerGraph, batch: Batch) -> None:
        self._graph, self._samples = graph, batch.size
        self.values: dict[str, Tensor] = {}
        self.saved: set[int] = set()
        self.batch_bytes = {address_of(t): t.nbytes for t in tensors_of_batch(batch)}
        self.batch_saved: set[int] = set()

    def add(self, values: Mapping[str, Tensor], saved: set[int], batch_saved: set[int]) -> None:
        """Take over what a part has made, and the addresses of what it has saved of that and of the batch."""
        self.values |= values
        self.saved |= saved
        self.batch_saved |= batch_saved

    def unsaved_bytes(self, first: int) -> int:
        """Return the bytes that are on the device before layer `first`, and that nobody has saved: the batch's, too."""
        graph = self._graph
        alive = (node.name for node in graph.crossing if graph.owner[node] < first <= graph.last_use(node))
        values = [self.values[name] for name in alive if name in self.values]
        sizes = {address_of(value): value.untyped_storage().nbytes() for value in values}
        left = sum(size for address, size in sizes.items() if address not in self.saved)
        return left + sum(size for address, size in self.batch_bytes.items() if address not in self.batch_saved)

    def gradient_bytes(self, first: int, end: int) -> int:
        """Return the bytes of gradients that layers from `end` on have made.

        They are of values from before `first`, and of weights that layers before `end` use, too.
        """
        graph = self._graph
        passing = [node for node in graph.crossing if graph.owner[node] < first and graph.last_use(node) >= end]
        specs = [graph.specs[node] for node in passing]
        values = sum(spec.of_gradient.size_bytes(self._samples) for spec in specs if spec.requires_grad)
        before, after = (
            {name for layer in layers for name in layer.parameters}
            for layers in (graph.layers[:end], graph.layers[end:])
        )
        weights = [p for name, p in graph.model.named_parameters() if name in before & after and p.requires_grad]
        return values + sum(weight.nbytes for weight in weights)


def _copied(tensors: Mapping[str, Tensor], device: torch.device, copies: dict[int, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to a device, where those that share a storage share its copy.

    Args:
        copies: as bytes, by the address of the storage that they are of; new ones are added.
    """
    found = {}
    for name, tensor in tensors.items():
        address = address_of(tensor)
        if address not in copies:
            copies[address] = _content(tensor).to(device, copy=True)
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        found[name] = empty.set_(copies[address].untyped_storage(), *place)
    return found


def _content(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's whole storage, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class _Give(torch.autograd.Function):
    """What later parts do: its backward gives every output of a part a gradient, and keeps no output."""

    @staticmethod
    def forward(ctx: Any, part: _PartMeasurement, *outputs: Tensor) -> Tensor:
        ctx.part = part
        ctx.likes = [output.to("meta") for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.part.gradient(index, like) for index, like in enumerate(ctx.likes))


class _Shifted:
    """An observer of a part, whose first layer is its layer 0."""

    def __init__(self, observer: LayerObserver, first: int) -> None:
        self._observer, self._first = observer, first

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._observer.after_layer(index - self._first, value)


class _PartMeasurement(StepMeasurement):
    """Measures steps of some layers."""

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
        self._given = {name: between.values[name] for name in self._grads}
        self._received = _copied(self._given, device, {})
        self._gradients: dict[int, Tensor] | None = {}
        # What the forward made, the addresses of what has been saved since, and those of the batch.
        self.made: tuple[dict[str, Tensor], set[int], set[int]] = {}, set(), set()

    def leave(self) -> None:
        """Bring the weights back to the host."""
        drop_gradients(self._parameters.values())
        self._stage.to(_HOST)

    def gradient(self, index: int, like: Tensor) -> Tensor:
        """Return a gradient of output `index`, which is like a tensor on the meta device; any number will do.

        It is made once, as times want it, or in every backward, as the memory of a whole step does.
        """
        if self._gradients is None:
            return torch.full_like(like, 1e-3, device=self._device)
        if index not in self._gradients:
            self._gradients[index] = torch.full_like(like, 1e-3, device=self._device)
        return self._gradients[index]

    def _forward(self, observer: LayerObserver | None) -> HasBackward:
        results = self._run(observer)
        outputs = [value for name, value in results.items() if name not in self._given and value.requires_grad]
        if LOSS in results and len(outputs) == 1:
            return results[LOSS]
        if not outputs:
            return torch.zeros((), requires_grad=True)  # no gradient returns, and this backward does nothing
        given: Tensor = _Give.apply(self, *outputs)  # type: ignore[no-untyped-call]
        return given

    def _run(self, observer: LayerObserver | None) -> Mapping[str, Tensor]:
        self._stage.set_observer(None if observer is None else _Shifted(observer, self._span.start))
        given = {name: value.detach().requires_grad_(self._grads[name]) for name, value in self._received.items()}
        results: dict[str, Tensor] = self._stage(self._batch, given)
        return results

    def _saved(self) -> list[int]:
        between = self._between
        # By the address on the device: on the host, the storages of what was given.
        hosts = {address_of(self._received[name]): _content(value) for name, value in self._given.items()}
        known = {address for address, host in hosts.items() if address_of(host) in between.saved} | between.batch_saved

        def forward(observer: LayerObserver) -> object:
            results = self._run(observer)
            sent = {value.name: results[value.name].detach() for value in self._stage.sent}
            values = _copied({name: value for name, value in sent.items() if name not in self._given}, _HOST, hosts)
            saved = {address_of(host) for address, host in hosts.items() if address in known}
            self.made = values, saved, between.batch_bytes.keys() & known
            return results

        return saved_bytes([self._stage], forward, len(self._span), known)

    def _workspaces(self, saved: Sequence[int], gradients: Sequence[int]) -> list[int]:
        self._gradients = None
        between, first, end = self._between, self._span.start, self._span.stop
        before = between.unsaved_bytes(first)
        return workspace_bytes(
            self._forward, self._device, saved, gradients, (before, before + between.gradient_bytes(first, end))
        )
