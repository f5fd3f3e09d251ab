"""One worker: interprets its stream of instructions over a stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import assert_never

from planner.executor.data import BatchSource
from planner.executor.gradients import GradientAverager
from planner.executor.recompute import Buffers, ChangingBuffers
from planner.executor.versions import WeightVersions
from planner.model.batch import Batch
from planner.model.graph import ValueSpec
from planner.model.stage import StageModule
from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Send,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)

ComputeT = TypeVar("ComputeT", Forward, Backward, Update)


class Messenger(Protocol):
    """How messages travel; `Links` in a real run."""

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for a message and return its values."""
        ...

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending; never waits for the receiver's computation."""
        ...


@dataclass
class _InFlight:
    """What a forward leaves for its backward."""

    received: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the outputs, from later stages
    batch: Batch | None = None  # where the forward will run again
    buffers: Buffers = field(default_factory=dict)  # what they were before the forward, likewise


@dataclass(frozen=True)
class Completion:
    """A backward that ended: when, and how long the worker had computed until then."""

    ended_s: float
    busy_s: float


@dataclass
class WorkerLog:
    """What a worker saw. Times are of a clock that only differences of make sense."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # minibatch, its (part of the) loss
    completions: deque[Completion] = field(default_factory=lambda: deque(maxlen=100_000))
    busy_s: float = 0.0


class Worker:
    """Runs one stage replica.

    Args:
        stage: the layers.
        transfers: by (source, target) stage, the values that travel.
        optimizer_step: steps the optimizer of the stage's parameters; None when it has none to train.
        messenger: sends and receives.
        averager: sums gradients over the stage's replicas; None without replicas.
        data: where the stage reads model inputs and targets.
        loss_scale: factor on each unit's loss, 1 / microbatches for synchronous schedules.
        seed: of the random numbers inside layers.
        recompute: keep only what was received for the backward, and run the forward again for the rest.
        on_update: called after each optimizer step with the round's number.
    """

    def __init__(
        self,
        stage: StageModule,
        transfers: Mapping[tuple[int, int], Sequence[ValueSpec]],
        optimizer_step: Callable[[], object] | None,
        messenger: Messenger,
        averager: GradientAverager | None,
        data: BatchSource,
        *,
        loss_scale: float = 1.0,
        seed: int = 0,
        recompute: bool = False,
        on_update: Callable[[int, WorkerLog], None] | None = None,
    ) -> None:
        self.log = WorkerLog()
        self.versions = WeightVersions(list(stage.parameters()))
        self._stage = stage
        self._transfers = transfers
        self._optimizer_step = optimizer_step
        self._messenger = messenger
        self._averager = averager
        self._data = data
        self._loss_scale = loss_scale
        self._seed = seed
        self._recompute = recompute
        self._buffers = ChangingBuffers(stage)
        self._on_update = on_update
        self._units: dict[Unit, _InFlight] = {}

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute `instructions` in order."""
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case ReceiveActivation():
                self._receive_activation(instruction)
            case Forward():
                self._timed(self._forward, instruction)
            case SendActivation():
                self._send_activation(instruction)
            case ReceiveGradient():
                self._receive_gradient(instruction)
            case Backward():
                self._timed(self._backward, instruction)
                self.log.completions.append(Completion(time.perf_counter(), self.log.busy_s))
            case SendGradient():
                self._send_gradient(instruction)
            case AllReduce():
                assert self._averager is not None
                self._averager.finish(instruction.divisor)
            case Update():
                self._timed(self._update, instruction)
                if self._on_update is not None:
                    self._on_update(instruction.round, self.log)
            case _:
                assert_never(instruction)

    def _timed(self, compute: Callable[[ComputeT], None], instruction: ComputeT) -> None:
        start = time.perf_counter()
        compute(instruction)
        self.log.busy_s += time.perf_counter() - start

    def _values(self, source: int, target: int, *, with_gradient: bool = False) -> list[ValueSpec]:
        specs = self._transfers[source, target]
        return [spec for spec in specs if spec.requires_grad or not with_gradient]

    def _receive_activation(self, receive: ReceiveActivation) -> None:
        values = self._messenger.receive(receive)
        for spec in self._values(receive.peer_stage, receive.stage):
            values[spec.name].requires_grad_(spec.requires_grad)
        self._units.setdefault(receive.unit, _InFlight({})).received.update(values)

    def _forward(self, forward: Forward) -> None:
        unit = forward.unit
        record = self._units.setdefault(unit, _InFlight({}))
        record.batch = self._data.batch(unit) if self._stage.needs_batch else None
        self.versions.stash(unit)
        if self._recompute:
            with self._buffers.recorded() as record.buffers:
                outputs = self._run_stage(unit, record)
            # The values go on, their graph does not stay.
            record.outputs = {name: value.detach() for name, value in outputs.items()}
        else:
            record.outputs = self._run_stage(unit, record)
            record.batch = None

    def _run_stage(self, unit: Unit, record: _InFlight) -> dict[str, Tensor]:
        self._stage.set_random_key(self._seed, unit.minibatch, unit.microbatch)
        outputs: dict[str, Tensor] = self._stage(record.batch, record.received)
        return outputs

    def _send_activation(self, send: SendActivation) -> None:
        outputs, names = self._units[send.unit].outputs, [s.name for s in self._values(send.stage, send.peer_stage)]
        self._messenger.send(send, {name: outputs[name] for name in names})
        if self._recompute:
            for name in names:
                outputs.pop(name)  # each value is sent once

    def _receive_gradient(self, receive: ReceiveGradient) -> None:
        self._units[receive.unit].gradients.update(self._messenger.receive(receive))

    def _backward(self, backward: Backward) -> None:
        record = self._units[backward.unit]
        with self.versions.restored(backward.unit), self._buffers.restored(record.buffers):
            if self._recompute:
                record.outputs = self._run_stage(backward.unit, record)
            roots, gradients = self._roots(backward, record)
            if self._averager is not None and backward.last_of_round:
                self._averager.begin()
            if roots:
                torch.autograd.backward(roots, gradients)
        record.outputs.clear()
        record.gradients.clear()
        record.buffers.clear()
        record.batch = None
        if not any(value.requires_grad for value in record.received.values()):
            del self._units[backward.unit]

    def _roots(self, backward: Backward, record: _InFlight) -> tuple[list[Tensor], list[Tensor | None]]:
        """What the backward starts from, and the gradients there; None for the loss."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if self._stage.has_loss:
            loss = record.outputs["loss"] * self._loss_scale
            self.log.losses.append((backward.unit.minibatch, float(loss.detach())))
            if loss.requires_grad:
                roots.append(loss)
                gradients.append(None)
        for name, gradient in record.gradients.items():
            if record.outputs[name].requires_grad:
                roots.append(record.outputs[name])
                gradients.append(gradient)
        return roots, gradients

    def _send_gradient(self, send: SendGradient) -> None:
        received = self._units[send.unit].received
        values: dict[str, Tensor] = {}
        for spec in self._values(send.peer_stage, send.stage, with_gradient=True):
            value = received.pop(spec.name)
            values[spec.name] = value.grad if value.grad is not None else torch.zeros_like(value)
        self._messenger.send(send, values)
        if not any(value.requires_grad for value in received.values()):
            del self._units[send.unit]

    def _update(self, _: Update) -> None:
        if self._optimizer_step is not None:
            self.versions.update(self._optimizer_step)
            for parameter in self._stage.parameters():
                parameter.grad = None
