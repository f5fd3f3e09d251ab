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
from planner.profiler.step.timing import Clock, Effort, HasBackward, StepTimes, step_failure
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
    part.commit()
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
    return update.seconds


def _sum(parts: Sequence[StepTimes], overhead_s: float) -> StepTimes:
    """Return the times of whole steps: the first repeats of all parts make the first step, and so on.

    An optimizer's overhead is that of one for all parts.
    """
    parts = [replace(part, update_s=[max(0.0, each - overhead_s) for each in part.update_s]) for part in parts]
    parts[-1].update_s = [each + overhead_s for each in parts[-1].update_s]
    names = ("forward_s", "backward_s", "update_s", "forward_thread_s", "backward_thread_s")
    columns = ([getattr(part, name) for part in parts] for name in names)
    return StepTimes(*([sum(each) for each in zip(*column, strict=False)] for column in columns))


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
        self.values: dict[str, Tensor] = {}
        self.saved: set[int] = set()
        self.batch_bytes = {address_of(t): t.nbytes for t in tensors_of_batch(batch)}
        self.batch_saved: set[int] = set()
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

    def unsaved_bytes(self, first: int) -> int:
        """Return the bytes that layers before `first` have made for it and later ones, and nobody has saved."""
        alive = {name for owner, last, _, name in self._specs if owner < first <= last}
        sizes = {address_of(t): t.untyped_storage().nbytes() for name, t in self.values.items() if name in alive}
        return sum(size for address, size in sizes.items() if address not in self.saved)

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
        self._made: tuple[dict[str, Tensor], set[int], set[int]] = {}, set(), set()

    def leave(self) -> None:
        """Bring the weights back to the host."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._stage.to(_HOST)

    def commit(self) -> None:
        """Leave what the forward made to later parts."""
        values, saved, batch_saved = self._made
        self._between.values |= values
        self._between.saved |= saved
        self._between.batch_saved |= batch_saved

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
        given: Tensor | None = _Give.apply(self, *outputs) if outputs else None  # type: ignore[no-untyped-call]
        return _Nothing() if given is None else given

    def _run(self, observer: LayerObserver | None) -> Mapping[str, Tensor]:
        self._stage.set_observer(None if observer is None else _Shifted(observer, self._span.start))
        given = {name: value.detach().requires_grad_(self._grads[name]) for name, value in self._received.items()}
        results: dict[str, Tensor] = self._stage(self._batch, given)
        return results

    def _plain_forward(self) -> HasBackward:
        return self._forward(None)

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
            self._made = values, saved, between.batch_bytes.keys() & known
            return results

        return saved_bytes([self._stage], forward, len(self._span), known)

    def _workspaces(self, saved: Sequence[int], gradients: Sequence[int]) -> list[int]:
        self._gradients = None
        between, first, end = self._between, self._span.start, self._span.stop
        before = sum(size for address, size in between.batch_bytes.items() if address not in between.batch_saved)
        before += between.unsaved_bytes(first)
        passing = between.gradient_bytes(first, end)
        return workspace_bytes(self._forward, self._device, saved, gradients, (before, before + passing))
