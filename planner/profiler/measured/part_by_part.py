"""Measure a model that is larger than its device: some layers at a time are there, the values between them on the host.

A part is a run of layers. It is measured as the whole model is: whole steps of it with marks between its layers. What
it takes from earlier parts comes from their forward; the gradients of what it gives are made up, because times do not
depend on them. Bytes count as in the whole step: what an earlier part has saved already is not counted again, and what
lies on the device between the parts in a whole step is added.

The values that cross from part to part of a model that is measured part by part: copied to the host.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import LayerObserver
from planner.profiler.make_profile import LayerMeasurement, Measurement, first_uses
from planner.profiler.measured.step_measurement import StepMeasurement
from planner.profiler.step.allocation import address_of, saved_by, tensors_of_batch, workspaces
from planner.profiler.step.timing import Effort, HasBackward, StepTimes, clock_for, step_failure
from planner.profiler.step.update import layer_updates


@dataclass
class StoredMemory:
    """A storage that values between parts lie in, copied to the host."""

    content: Tensor  # bytes
    saved: bool  # for a backward, by a layer of an earlier part

    @property
    def size_bytes(self) -> int:
        return self.content.nbytes


@dataclass(frozen=True)
class StoredValue:
    """A value that crosses from part to part: where it lies in its memory."""

    memory: StoredMemory
    like: Tensor  # on the meta device: dtype, shape, strides
    offset: int

    def at(self, content: Tensor) -> Tensor:
        """Return the value, given its memory's bytes on a device."""
        empty = torch.empty(0, dtype=self.like.dtype, device=content.device)
        return empty.set_(content.untyped_storage(), self.offset, self.like.shape, self.like.stride())


@dataclass(frozen=True)
class PartResults:
    """What a part has made, and what it has saved of what it was given."""

    values: dict[str, StoredValue]
    saved: tuple[StoredMemory, ...]
    batch_saved: set[int]


class Between:
    """The values that cross from part to part, on the host.

    Args:
        batch: on the device, where it stays.
    """

    def __init__(self, graph: LayerGraph, batch: Batch) -> None:
        self.batch_bytes = {address_of(t): t.nbytes for t in tensors_of_batch(batch)}
        self.batch_saved: set[int] = set()  # addresses
        self._values: dict[str, StoredValue] = {}
        self._specs = [
            (graph.owner[node], graph.last_use(node), graph.specs[node], node.name) for node in graph.crossing
        ]
        self._samples = batch.size
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(graph.layers):
            for name in layer.parameters:
                users.setdefault(name, []).append(index)
        trained = {name: p.nbytes for name, p in graph.model.named_parameters() if p.requires_grad}
        self._weights = [(users[name], size) for name, size in trained.items() if name in users]

    def commit(self, results: PartResults) -> None:
        """Take what a part has made."""
        self._values |= results.values
        for memory in results.saved:
            memory.saved = True
        self.batch_saved |= results.batch_saved

    def value(self, name: str) -> StoredValue:
        """Return a value that an earlier part has made."""
        return self._values[name]

    def unsaved_bytes(self, first: int) -> int:
        """Return the bytes that layers before `first` have made for it and later ones, and nobody has saved."""
        alive = {name for owner, last, _, name in self._specs if owner < first <= last}
        memories = {id(each.memory): each.memory for name, each in self._values.items() if name in alive}
        return sum(memory.size_bytes for memory in memories.values() if not memory.saved)

    def gradient_bytes(self, first: int, end: int) -> int:
        """Return the bytes of gradients that layers from `end` on have made.

        They are of values from before `first`, and of weights that layers before `end` use, too.
        """
        values = (
            spec.of_gradient.size_bytes(self._samples)
            for owner, last, spec, _ in self._specs
            if spec.requires_grad and owner < first and last >= end
        )
        weights = (size for users, size in self._weights if users[0] < end <= users[-1])
        return sum(values) + sum(weights)


# Of the device's free memory, the weights of a part: its gradients, its optimizer's state and what it saves need more.
_WEIGHTS_SHARE = 1 / 8


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
    between = Between(graph, batch)
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
    between: Between,
    span: range,
    effort: Effort,
) -> Measurement:
    part = _PartMeasurement(spec, graph, batch, device, span, between)
    try:
        measured = part.measure_uncompiled(effort)
    finally:
        part.leave()
    between.commit(part.results)
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
    (update,) = layer_updates(spec, [{name: number}], clock_for(device), device)
    return update.seconds


def _sum(parts: Sequence[StepTimes], overhead_s: float) -> StepTimes:
    """Return the times of whole steps: the first repeats of all parts make the first step, and so on.

    An optimizer's overhead is that of one for all parts.
    """
    parts = [replace(part, update_s=[max(0.0, each - overhead_s) for each in part.update_s]) for part in parts]
    parts[-1].update_s = [each + overhead_s for each in parts[-1].update_s]

    def sums(columns: Sequence[Sequence[float]]) -> list[float]:
        return [sum(each) for each in zip(*columns, strict=False)]

    names = ("forward_s", "backward_s", "update_s", "forward_thread_s", "backward_thread_s")
    return StepTimes(*(sums([getattr(part, name) for part in parts]) for name in names))


class _Give(torch.autograd.Function):
    """What later parts do: its backward gives every output of a part a gradient, and keeps no output."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.likes = [output.to("meta") for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.gradients.of(index, like) for index, like in enumerate(ctx.likes))


class _Gradients:
    """Gradients of a part's outputs; any will do.

    Args:
        kept: whether they are made once, as times want it, or in every backward, as the memory of a whole step does.
    """

    def __init__(self, device: torch.device, *, kept: bool) -> None:
        self._device = device
        self._kept: dict[int, Tensor] | None = {} if kept else None

    def of(self, index: int, like: Tensor) -> Tensor:
        """Return the gradient of output `index`, which is like a tensor on the meta device."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        made = torch.full_like(like, 1e-3, device=self._device)
        if self._kept is not None:
            self._kept[index] = made
        return made


class _Nothing:
    """The backward of a part to which no gradient returns."""

    def backward(self) -> None:
        """Do nothing."""


class _Shifted:
    """An observer of a part, whose first layer is its layer 0."""

    def __init__(self, observer: LayerObserver, first: int) -> None:
        self._observer, self._first = observer, first

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._observer.after_layer(index - self._first, value)


class _PartMeasurement(StepMeasurement):
    """Measures steps of some layers.

    Attributes:
        results: what the forward made, once it was run.
    """

    results: PartResults

    def __init__(
        self,
        spec: TrainingSpec,
        graph: LayerGraph,
        batch: Batch,
        device: torch.device,
        span: range,
        between: Between,
    ) -> None:
        super().__init__(spec, graph, batch, device, span)
        self._between = between
        self._given = {each.name: (each, between.value(each.name)) for each in self._stage.received}
        memories = {id(value.memory): value.memory for _, value in self._given.values()}
        # What shares memory in a whole step shares it here.
        self._there = {key: memory.content.to(device, copy=True) for key, memory in memories.items()}
        self._memories = memories
        self._received = {name: value.at(self._there[id(value.memory)]) for name, (_, value) in self._given.items()}
        self._gradients = _Gradients(device, kept=True)

    def leave(self) -> None:
        """Bring the weights back to the host."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._stage.to("cpu")

    def _forward(self, observer: LayerObserver | None) -> HasBackward:
        results = self._run(observer)
        outputs = [value for name, value in results.items() if name not in self._given and value.requires_grad]
        if LOSS in results and len(outputs) == 1:
            return results[LOSS]
        given: Tensor | None = _Give.apply(self._gradients, *outputs) if outputs else None  # type: ignore[no-untyped-call]
        return _Nothing() if given is None else given

    def _run(self, observer: LayerObserver | None) -> dict[str, Tensor]:
        self._stage.set_observer(None if observer is None else _Shifted(observer, self._span.start))
        given = {
            name: value.detach().requires_grad_(self._given[name][0].requires_grad)
            for name, value in self._received.items()
        }
        results: dict[str, Tensor] = self._stage(self._batch, given)
        return results

    def _plain_forward(self) -> HasBackward:
        return self._forward(None)

    def _saved(self) -> list[int]:
        known = {address_of(self._there[key]) for key, memory in self._memories.items() if memory.saved}
        known |= self._between.batch_saved

        def forward(observer: LayerObserver) -> object:
            results = self._run(observer)
            self.results = self._results(results, known)
            return results

        return saved_by([self._stage], forward, len(self._span), known)

    def _results(self, made: Mapping[str, Tensor], known: set[int]) -> PartResults:
        """Copy what was made to the host; `known` are the addresses of what has been saved by now."""
        addresses = {address_of(self._there[key]): memory for key, memory in self._memories.items()}
        values: dict[str, StoredValue] = {}
        for each in self._stage.sent:
            tensor, address = made[each.name].detach(), address_of(made[each.name])
            if each.name in self._given:
                continue
            if address not in addresses:
                content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                addresses[address] = StoredMemory(content.to("cpu", copy=True), address in known)
            values[each.name] = StoredValue(addresses[address], tensor.to("meta"), int(tensor.storage_offset()))
        saved = tuple(memory for address, memory in addresses.items() if address in known)
        return PartResults(values, saved, self._between.batch_bytes.keys() & known)

    def _workspaces(self, saved: list[int]) -> list[int]:
        gradients = self._gradient_bytes()
        self._gradients = _Gradients(self._device, kept=False)
        between, first, end = self._between, self._span.start, self._span.stop
        before = sum(between.batch_bytes.values()) - sum(between.batch_bytes[each] for each in between.batch_saved)
        before += between.unsaved_bytes(first)
        passing = between.gradient_bytes(first, end)

        def beside(layer: int, backward: bool) -> int:
            return before + (passing if backward else 0)

        return workspaces(self._forward, self._device, saved, gradients, beside)
