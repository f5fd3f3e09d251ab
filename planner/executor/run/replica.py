"""Compute one stage on one worker: its layers, the versions of its weights, and the units in flight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.executor.communication.gradients import GradientAverager, whole_buckets
from planner.executor.communication.messages import SCALE
from planner.executor.run.context import HeldStage, PipelineContext
from planner.executor.stage.minibatch_statistics import MinibatchStatistics
from planner.executor.stage.split_backward import WeightGradients, input_gradients
from planner.executor.stage.versions import WeightVersions
from planner.model.capture.graph import LOSS
from planner.schedule.instructions import Unit


@dataclass(slots=True)
class _InFlight:
    """What a forward keeps for its backward."""

    received: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # until they are sent
    ends: dict[str, GradientEdge] = field(default_factory=dict)  # of the graph, where outputs' gradients enter it
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the outputs, from later stages


class StageReplica:
    """Computes one stage for the units that come to this worker.

    Args:
        replicas: process group of the stage's replicas; None for a single one.
    """

    def __init__(self, stage: HeldStage, context: PipelineContext, replicas: dist.ProcessGroup | None) -> None:
        parameters, sharding = list(stage.module.parameters()), stage.optimizer.sharding
        self.index = stage.number
        self.module = stage.module
        self.optimizer = stage.optimizer
        self.versions = WeightVersions(parameters, stage.module.arrange)
        self.shared = stage.shared
        self._transfers = context.transfers
        self._averager = None
        if replicas is not None:
            buckets = whole_buckets(parameters) if sharding is None else sharding.buckets
            self._averager = GradientAverager(buckets, replicas)
            if sharding is not None:
                sharding.connect(replicas)
        self._data = context.data
        self._device = context.place.compute
        self._seed = context.job.seed
        self._recomputes = context.plan.stages[stage.number].recomputes
        # Replicas have equal gradients, or each a part of them.
        self._counts_in_norm = context.is_first_replica(stage.number) or sharding is not None
        self._tells_loss = context.leads_tensor_group
        self._statistics = MinibatchStatistics(stage.module, replicas)
        self._units: dict[Unit, _InFlight] = {}
        self._averaged = 1  # minibatches whose gradients the next update averages
        self._rests: dict[Unit, WeightGradients] = {}  # second parts of backwards in two parts

    def accept_activation(self, unit: Unit, source: int, values: dict[str, Tensor]) -> None:
        """Store the inputs of `unit` that stage `source` sent."""
        for name in self._with_gradient(source, self.index):
            values[name].requires_grad_()
        self._record(unit).received.update(values)

    def forward(self, unit: Unit, version: int | None = None) -> None:
        """Run the layers on `unit` and keep what its backward needs.

        Args:
            version: of the weights, by the number of updates it has had; None for the newest.
        """
        record = self._record(unit)
        if self._data.size(unit) == 0:
            record.outputs = {
                spec.name: torch.zeros(spec.shape(0), dtype=spec.dtype, device=self._device)
                for spec in self.module.sent
            }
            return
        batch = self._data.batch(unit).to(self._device) if self.module.needs_batch else None
        self._statistics.begin(unit.minibatch)
        # Updates of a stage without trained parameters make no versions.
        self.versions.stash(unit, version if self.optimizer.parameters else None)
        self.module.set_random_key(self._seed, unit.minibatch, unit.microbatch)
        with self.versions.stashed(unit):
            record.outputs = self.module(batch, record.received)
        record.loss = record.outputs.pop(LOSS, None)
        # Once an output is sent, only its place in the graph is needed: its memory is freed, unless a layer saved it.
        record.ends = {name: get_gradient_edge(v) for name, v in record.outputs.items() if v.requires_grad}

    def activation(self, unit: Unit, target: int) -> dict[str, Tensor]:
        """Return the outputs of `unit` that stage `target` needs."""
        outputs = self._units[unit].outputs
        return {spec.name: outputs.pop(spec.name) for spec in self._transfers[self.index, target]}  # each is sent once

    def accept_gradient(self, unit: Unit, values: dict[str, Tensor]) -> None:
        """Store the gradients that a later stage returned for outputs of `unit`, at this stage's loss scale."""
        if self.optimizer.scaler is not None:
            # A power of two, mostly 1, which on a GPU the host does not know: the product is exact.
            torch._foreach_mul_(list(values.values()), self.optimizer.scaler.scale / values.pop(SCALE))
        self._units[unit].gradients.update(values)

    def backward(self, unit: Unit, *, last_of_round: bool, split: bool = False) -> Tensor | None:
        """Run the backward of `unit` with the weights that its forward saw.

        Args:
            last_of_round: whether it completes the gradients, which may then be all-reduced as they come.
            split: leave the gradients of the weights to `backward_weight`.

        Returns:
            The unit's part of the minibatch's loss, on the device, on the stage that has it; None elsewhere.
        """
        record = self._units[unit]
        if self._data.size(unit) == 0:
            self._forget_if_done(unit, record)
            return None
        with self.versions.restored(unit):
            loss = None if record.loss is None else self._weighted(unit, record.loss)
            scaled = loss if loss is None or self.optimizer.scaler is None else loss * self.optimizer.scaler.scale
            roots, gradients = _roots(scaled, record)
            if self._averager is not None and last_of_round:
                self._averager.begin()
            wanted = [value for value in record.received.values() if value.requires_grad]
            # With recomputation the backward is whole: a second part would keep all activations for longer.
            if roots and split and wanted and not self._recomputes:
                self._rests[unit] = input_gradients(roots, gradients, wanted, self.module.parameters())
            elif roots:
                torch.autograd.backward(roots, gradients)
        record.ends.clear()
        record.gradients.clear()
        record.loss = None
        self._forget_if_done(unit, record)
        return None if loss is None or not self._tells_loss else loss.detach()

    def backward_weight(self, unit: Unit, *, last_of_round: bool) -> None:
        """Run the part of a backward that `split` left."""
        # No version is restored: schedules that split the backward are synchronous, with no update between its parts.
        rest = self._rests.pop(unit, None)
        if self._averager is not None and last_of_round:
            self._averager.begin()
        if rest is not None:
            rest.run()

    def gradient(self, unit: Unit, source: int) -> dict[str, Tensor]:
        """Return the gradients, after the backward of `unit`, of the values that stage `source` sent."""
        record = self._units[unit]
        received = {name: record.received.pop(name) for name in self._with_gradient(source, self.index)}
        values = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in received.items()}
        self._forget_if_done(unit, record)
        self.optimizer.note_sent(values.values())
        if self.optimizer.scaler is not None:
            values[SCALE] = torch.full((), self.optimizer.scaler.scale, device=self._device)
        return values

    def average(self, divisor: int) -> None:
        """Wait for the all-reduce of the round's gradients over the replicas, and divide them by `divisor`."""
        self._averaged = divisor
        if self._averager is not None:
            self._averager.finish(divisor)
        elif divisor > 1:
            gradients = [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]
            torch._foreach_div_(gradients, divisor)

    def norm_share(self) -> float:
        """Return this replica's part of the squared norm over all stages."""
        return self.optimizer.squared_norm(self.shared.counted_elsewhere) if self._counts_in_norm else 0.0

    def update(self, round_: int, kept: Collection[int] = (), squared_norm: float | None = None) -> None:
        """Step the optimizer, which makes a new weight version.

        Args:
            round_: whose gradients it steps with; a minibatch's number, if minibatches are divided.
            kept: older versions that forwards yet to come use, by the number of updates they have had.
            squared_norm: of all gradients that are clipped together; None if the stage clips by itself.
        """
        if self.optimizer.parameters:
            self.versions.update(lambda: self.optimizer.step(squared_norm), kept)
            self.optimizer.forget_gradients()
        else:
            self.optimizer.step(squared_norm)
        self.optimizer.advance(self._averaged)
        self._averaged = 1
        self._statistics.commit(round_)

    def _record(self, unit: Unit) -> _InFlight:
        """Return what is kept for `unit`, from its first message on."""
        if (record := self._units.get(unit)) is None:
            record = self._units[unit] = _InFlight()
        return record

    def _weighted(self, unit: Unit, loss: Tensor) -> Tensor:
        """Weight a loss by the unit's share of the minibatch's.

        A unit in which nothing counts has a loss of zero and no backward: a mean over nothing is not a number.
        """
        share = self._data.share(unit)
        if not share:
            return torch.zeros_like(loss.detach())
        return loss if share == 1.0 else loss * share

    def _with_gradient(self, source: int, target: int) -> list[str]:
        """Return the values from stage `source` to `target` whose gradients go back."""
        return [spec.name for spec in self._transfers[source, target] if spec.requires_grad]

    def _forget_if_done(self, unit: Unit, record: _InFlight) -> None:
        """Drop the unit after its backward, unless gradients of received values have yet to be sent."""
        if not any(value.requires_grad for value in record.received.values()):
            del self._units[unit]


def _roots(loss: Tensor | None, record: _InFlight) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Return where a backward starts in the graph, and the gradients there; None for the loss."""
    roots: list[GradientEdge] = []
    gradients: list[Tensor | None] = []
    if loss is not None and loss.requires_grad:
        roots.append(get_gradient_edge(loss))
        gradients.append(None)
    for name, gradient in record.gradients.items():
        if name in record.ends:
            roots.append(record.ends[name])
            gradients.append(gradient)
    return roots, gradients
