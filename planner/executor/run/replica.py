"""One replica of one stage: its layers, the versions of its weights, and the units between forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.executor.communication.gradients import GradientAverager
from planner.executor.communication.shared import SharedGradients
from planner.executor.run.data import BatchSource
from planner.executor.run.loss_scaler import SCALE
from planner.executor.run.minibatch_statistics import MinibatchStatistics
from planner.executor.run.optimizer import StageOptimizer
from planner.executor.run.recompute import Buffers, ChangingBuffers
from planner.executor.run.split_backward import WeightGradients, input_gradients
from planner.executor.run.versions import WeightVersions
from planner.model.batch import Batch
from planner.model.capture.graph import ValueSpec
from planner.model.stage.stage import StageModule
from planner.schedule.instructions import Unit


@dataclass
class _InFlight:
    """What a forward leaves for its backward."""

    received: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the outputs, from later stages
    batch: Batch | None = None  # where the forward will run again
    buffers: Buffers = field(default_factory=dict)  # what they were before the forward, likewise


class StageReplica:
    """Computes one stage for the units that come to this worker.

    Args:
        index: of the stage in the plan.
        module: the layers, on the device they run on.
        transfers: by (source, target) stage, the values that travel to and from this one.
        optimizer: of the stage's parameters.
        averager: sums gradients over the stage's replicas; None without replicas.
        data: where the stage reads model inputs and targets.
        seed: of the random numbers inside layers.
        recompute: keep only what was received for the backward, and run the forward again for the rest.
        shared: the gradients of weights that other stages hold, too.
        statistics: of deferred BatchNorms.
        counts_in_norm: whether it is the replica of the stage that adds its gradients to the norm of all.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        transfers: Mapping[tuple[int, int], Sequence[ValueSpec]],
        optimizer: StageOptimizer,
        averager: GradientAverager | None,
        data: BatchSource,
        *,
        device: torch.device,
        seed: int = 0,
        recompute: bool = False,
        counts_in_norm: bool = True,
        shared: SharedGradients | None = None,
        statistics: MinibatchStatistics | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.versions = WeightVersions(list(module.parameters()))
        self._transfers = transfers
        self.optimizer = optimizer
        self._averager = averager
        self._data = data
        self._device = device
        self._seed = seed
        self._recompute = recompute
        self._counts_in_norm = counts_in_norm
        self._shared = shared if shared is not None else SharedGradients(index, ())
        self._statistics = statistics if statistics is not None else MinibatchStatistics(module, None)
        self._buffers = ChangingBuffers(module)
        self._units: dict[Unit, _InFlight] = {}
        self._averaged = 1  # minibatches whose gradients the next update averages
        self._rests: dict[Unit, WeightGradients] = {}  # of backwards in two parts

    def accept_activation(self, unit: Unit, source: int, values: dict[str, Tensor]) -> None:
        """Take the inputs of `unit` that stage `source` sent."""
        for spec in self._values(source, self.index):
            values[spec.name].requires_grad_(spec.requires_grad)
        self._units.setdefault(unit, _InFlight({})).received.update(values)

    def forward(self, unit: Unit, version: int | None = None) -> None:
        """Run the layers on `unit` and keep what its backward needs.

        `version` of the weights: the updates it has had; the newest when None.
        """
        record = self._units.setdefault(unit, _InFlight({}))
        if self._data.size(unit) == 0:
            record.outputs = {spec.name: self._nothing(spec) for spec in self.module.sent}
            return
        record.batch = self._data.batch(unit).to(self._device) if self.module.needs_batch else None
        self._statistics.begin(unit.minibatch)
        # A stage that trains nothing has one version, whatever its updates.
        self.versions.stash(unit, version if self.optimizer.parameters else None)
        with self.versions.at(unit):
            if self._recompute:
                with self._buffers.recorded() as record.buffers:
                    outputs = self._run(unit, record)
                # The values go on, their graph does not stay.
                record.outputs = {name: value.detach() for name, value in outputs.items()}
            else:
                record.outputs = self._run(unit, record)
                record.batch = None

    def activation(self, unit: Unit, target: int) -> dict[str, Tensor]:
        """What stage `target` needs of `unit`."""
        outputs, names = self._units[unit].outputs, [spec.name for spec in self._values(self.index, target)]
        values = {name: outputs[name] for name in names}
        if self._recompute:
            for name in names:
                outputs.pop(name)  # each value is sent once
        return values

    def accept_gradient(self, unit: Unit, values: dict[str, Tensor]) -> None:
        """Take the gradients of outputs of `unit` that a later stage returned, and bring them to this stage's scale."""
        if self.optimizer.scaler is not None:
            ratio = self.optimizer.scaler.scale / float(values.pop(SCALE))
            if ratio != 1:
                values = {name: value * ratio for name, value in values.items()}
        self._units[unit].gradients.update(values)

    def backward(self, unit: Unit, *, last_of_round: bool, split: bool = False) -> float | None:
        """Run the backward of `unit` with the weights its forward saw.

        `split`: leave what no other stage waits for to `backward_weight`.

        Returns:
            The (part of the) minibatch's loss, on the stage that has it.
        """
        record = self._units[unit]
        if self._data.size(unit) == 0:
            record.outputs.clear()
            self._forget_if_done(unit, record)
            return None
        with self.versions.restored(unit), self._buffers.restored(record.buffers):
            if self._recompute:
                record.outputs = self._run(unit, record)
            loss = record.outputs["loss"] * self._share(unit) if self.module.has_loss else None
            scaled = loss if loss is None or self.optimizer.scaler is None else loss * self.optimizer.scaler.scale
            roots, gradients = _roots(scaled, record)
            if self._averager is not None and last_of_round:
                self._averager.begin()
            wanted = [value for value in record.received.values() if value.requires_grad]
            if roots and split and wanted and not self._recompute:  # whose activations should not stay longer
                self._rests[unit] = input_gradients(roots, gradients, wanted, self.module.parameters())
            elif roots:
                torch.autograd.backward(roots, gradients)
        record.outputs.clear()
        record.gradients.clear()
        record.buffers.clear()
        record.batch = None
        self._forget_if_done(unit, record)
        return None if loss is None else float(loss.detach())

    def backward_weight(self, unit: Unit, *, last_of_round: bool) -> None:
        """Run what `backward` with `split` left."""
        rest = self._rests.pop(unit, None)
        if self._averager is not None and last_of_round:
            self._averager.begin()
        if rest is not None:
            rest.run()

    def gradient(self, unit: Unit, source: int) -> dict[str, Tensor]:
        """What the backward of `unit` left for the values that stage `source` sent."""
        record = self._units[unit]
        values: dict[str, Tensor] = {}
        for spec in self._values(source, self.index):
            if spec.requires_grad:
                value = record.received.pop(spec.name)
                values[spec.name] = value.grad if value.grad is not None else torch.zeros_like(value)
        self._forget_if_done(unit, record)
        self.optimizer.note_sent(values.values())
        if self.optimizer.scaler is not None:
            values[SCALE] = torch.tensor(self.optimizer.scaler.scale)
        return values

    def average(self, divisor: int) -> None:
        """Wait for the sum of the round's gradients over the replicas, and divide it."""
        self._averaged = divisor
        if self._averager is not None:
            self._averager.finish(divisor)
        elif divisor > 1:
            gradients = [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]
            torch._foreach_div_(gradients, divisor)

    def shared_gradients(self, round_: int, peer: int) -> dict[str, Tensor]:
        """This stage's gradients of the weights that stage `peer` holds, too; its own updates step with sums only."""
        return self._shared.take(round_, peer)

    def accept_shared(self, round_: int, peer: int, values: dict[str, Tensor]) -> None:
        """Take those of stage `peer`."""
        self._shared.accept(round_, peer, values)

    def add_shared(self, round_: int) -> None:
        """Let the next update step with the sums of `round_`."""
        self._shared.add(round_)

    def norm_share(self) -> float:
        """What this replica adds to the squared norm of all gradients: those of a replicated stage count once."""
        return self.optimizer.squared_norm(self._shared.counted_elsewhere) if self._counts_in_norm else 0.0

    def update(self, round_: int, kept: Collection[int] = (), squared_norm: float | None = None) -> None:
        """Step the optimizer: this makes a new weight version, beside those `kept` for forwards to come.

        Args:
            round_: whose gradients it steps with; of one minibatch, where these are divided.
            kept: older versions, by the updates that they have had.
            squared_norm: of the gradients that are clipped together, where those of other stages are among them.
        """
        if self.optimizer.parameters:
            self.versions.update(lambda: self.optimizer.step(squared_norm), kept)
            for parameter in self.optimizer.parameters:
                parameter.grad = None
        else:
            self.optimizer.step(squared_norm)
        self.optimizer.advance(self._averaged)
        self._averaged = 1
        self._statistics.commit(round_)

    def _share(self, unit: Unit) -> float:
        """Factor on the unit's loss: its share of the minibatch's samples, so that these all count the same."""
        return self._data.size(unit) / self._data.minibatch_size(unit.minibatch)

    def _nothing(self, spec: ValueSpec) -> Tensor:
        """What stands for a value of no samples."""
        return torch.zeros(spec.shape(0), dtype=spec.dtype, device=self._device)

    def _values(self, source: int, target: int) -> Sequence[ValueSpec]:
        return self._transfers[source, target]

    def _run(self, unit: Unit, record: _InFlight) -> dict[str, Tensor]:
        self.module.set_random_key(self._seed, unit.minibatch, unit.microbatch)
        outputs: dict[str, Tensor] = self.module(record.batch, record.received)
        return outputs

    def _forget_if_done(self, unit: Unit, record: _InFlight) -> None:
        """After the backward, only values whose gradients have yet to be sent keep the unit."""
        if not any(value.requires_grad for value in record.received.values()):
            del self._units[unit]


def _roots(loss: Tensor | None, record: _InFlight) -> tuple[list[Tensor], list[Tensor | None]]:
    """What a backward starts from, and the gradients there; None for the loss."""
    roots: list[Tensor] = []
    gradients: list[Tensor | None] = []
    if loss is not None and loss.requires_grad:
        roots.append(loss)
        gradients.append(None)
    for name, gradient in record.gradients.items():
        if record.outputs[name].requires_grad:
            roots.append(record.outputs[name])
            gradients.append(gradient)
    return roots, gradients
