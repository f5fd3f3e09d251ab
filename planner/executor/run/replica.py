"""Compute one stage on one worker: its layers, the versions of its weights, and the units in
flight.
"""

from collections import defaultdict
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from planner.executor.communication.gradients import GradientAverager, WholeBucket, chunks
from planner.executor.communication.later import Reading
from planner.executor.communication.messages import SCALE
from planner.executor.communication.shared_gradients import gradient_off_loss
from planner.executor.observe.replica_buffers import ReplicaBuffers
from planner.executor.run.context import HeldStage, PipelineContext
from planner.executor.run.some_minibatches import SomeMinibatches
from planner.executor.run.stages import accepts_divided_loss
from planner.executor.stage.split_backward import WeightGradients, input_gradients
from planner.executor.stage.versions import WeightVersions
from planner.model.buffers import buffers_kept
from planner.model.capture.graph import LOSS
from planner.model.stage.stage import StageModule
from planner.model.torch_private import divide_all, multiply_all
from planner.schedule.instructions import Unit


@dataclass(slots=True)
class _InFlight:
    """What a forward keeps for its backward."""

    received: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # until they are sent
    # of the graph, where outputs' gradients enter it
    ends: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the outputs, from later stages


class StageReplica:
    """Computes one stage for the units that come to this worker; `replicas` is the group of
    several, or of all ranks that divide the sequences of replicas, whose gradients add up.
    """

    def __init__(
        self, stage: HeldStage, context: PipelineContext, replicas: dist.ProcessGroup | None
    ) -> None:
        parameters = list(stage.module.parameters())
        sharding = stage.optimizer.sharding
        self.index = stage.number
        self.module = stage.module
        self.optimizer = stage.optimizer
        self.versions = WeightVersions(parameters, stage.module.arrange)
        self.shared = stage.shared
        self._context = context
        self._data = context.data
        # Names of what the stage sends, and of what it gets and whose gradients it sends back, by
        # the other stage.
        ends = context.transfers.items()
        self._sent = {
            to: [spec.name for spec in specs] for (own, to), specs in ends if own == self.index
        }
        self._with_gradient = {
            of: [spec.name for spec in specs if spec.requires_grad]
            for (of, own), specs in ends
            if own == self.index
        }
        # what it gets and the loss does not go back to
        self._off_loss = frozenset(
            spec.name
            for spec in self.module.received
            if spec.requires_grad and spec.name in self.module.off_loss
        )
        self._replica_buffers = None
        self._buffer_readings: list[Reading] = []
        apart = replicas is not None or context.plan.by_samples
        if apart and not accepts_divided_loss(context.job):
            self._replica_buffers = ReplicaBuffers(stage.module, stage.number)
        self._compared = SomeMinibatches(context.minibatches - 1)
        self._averager = None
        self._ddp: DistributedDataParallel | None = None
        if replicas is not None and context.job.baseline is not None:
            # What a loss does not depend on gets no gradient, and DistributedDataParallel must know
            # of it.
            unused = context.spec.defines("blocks") or leaves_out_weights(context, stage.module)
            self._ddp = DistributedDataParallel(
                stage.module, process_group=replicas, find_unused_parameters=unused
            )
        elif replicas is not None:
            whole = [WholeBucket(chunk) for chunk in chunks(parameters)]
            self._averager = GradientAverager(
                whole if sharding is None else sharding.buckets, replicas
            )
            if sharding is not None:
                sharding.connect(replicas)

        self._sharding = sharding
        # Whether replicas must run equally often: those of DistributedDataParallel, and those that
        # gather weights. One without samples then runs another microbatch, which counts for
        # nothing.
        self._together = self._ddp is not None or context.plan.stages[stage.number].shards_gradients
        self._reads_batches = context.reads_batches(stage.module)
        self._recomputes = context.plan.stages[stage.number].recomputes
        # Replicas have equal gradients, or each a part of them.
        has_part = sharding is not None and sharding.has_own_part
        self._counts_in_norm = context.is_first_replica(stage.number) or has_part
        self._loss_check = None
        if stage.module.has_loss:
            self._loss_check = context.loss_check
        # from their first message on
        self._units: defaultdict[Unit, _InFlight] = defaultdict(_InFlight)
        self._averaged = 1  # minibatches whose gradients the next update averages
        self._rests: dict[Unit, WeightGradients] = {}  # second parts of backwards in two parts

    def accept_activation(self, unit: Unit, source: int, values: dict[str, Tensor]) -> None:
        """Take the values that another stage has sent for a unit."""
        for name in values:
            # Those off the loss, too, as the stages' code was compiled for.
            if name in self._with_gradient[source] or name in self._off_loss:
                values[name].requires_grad_()
        self._units[unit].received.update(values)

    def forward(self, unit: Unit, version: int | None = None) -> None:
        """Run the layers on `unit`, with a `version` of the weights or the newest, and keep what
        its backward needs.
        """
        if self._context.state_watch is not None:
            self._context.state_watch.check(unit.minibatch)
        record = self._units[unit]
        if self._ddp is not None:
            # As no_sync() does: the forward says whether its backward all-reduces.
            own = self._context.shape.units_of(self.index, self._context.rank, unit.minibatch)
            self._ddp.require_backward_grad_sync = unit == own[-1]

        if self._data.size(unit) == 0 and not self._together:
            record.outputs = self._outputs_of_nothing(unit)
            return

        taken = self._counting(unit) if self._together else unit
        batch = None
        if self._reads_batches:
            batch = self._data.batch(taken).to(self._context.place.compute)

        # Updates of a stage without trained parameters make no versions.
        self.versions.stash(unit, version if self.optimizer.parameters else None)
        self.module.set_random_key(
            self._context.job.seed, unit.minibatch, self._data.numbered(unit).microbatch
        )
        run = self._ddp or self.module
        counts = self._data.size(unit) > 0
        # Another microbatch stands in for one without samples: buffers are to see it once.
        kept = nullcontext() if counts else buffers_kept(self.module)
        with self.versions.stashed(unit), kept:
            record.outputs = run(batch, record.received)

        if self._replica_buffers is not None and unit.minibatch in self._compared:
            self._buffer_readings += self._replica_buffers.readings(unit.minibatch)
        record.loss = record.outputs.pop(LOSS, None)
        if record.loss is not None and self._loss_check is not None:
            self._loss_check.see(unit, self._own_units, batch, record.outputs, record.loss)

        # Once an output is sent, only its place in the graph is needed: its memory is freed, unless
        # a layer saved it.
        record.ends = {
            name: get_gradient_edge(value)
            for name, value in record.outputs.items()
            if value.requires_grad
        }

    def _outputs_of_nothing(self, unit: Unit) -> dict[str, Tensor]:
        """Return what other stages get of a microbatch without samples."""
        device = self._context.place.compute
        extent = self._data.extent(unit)
        return {
            spec.name: torch.zeros(spec.shape(extent), dtype=spec.dtype, device=device)
            for spec in self.module.sent
        }

    def take_readings(self) -> list[Reading]:
        """Return what the host has to compare of the newest forward, when it is computed."""
        readings = self._buffer_readings
        self._buffer_readings = []
        if self._loss_check is None:
            return readings
        return readings + self._loss_check.take_readings()

    def activation(self, unit: Unit, target: int) -> dict[str, Tensor]:
        """Return the values that another stage gets of a unit."""
        outputs = self._units[unit].outputs
        return {name: outputs.pop(name) for name in self._sent[target]}  # each is sent once

    def accept_gradient(self, unit: Unit, values: dict[str, Tensor]) -> None:
        """Store the gradients that a later stage returned for outputs of `unit`, at this stage's
        loss scale.
        """
        if self.optimizer.scaler is not None:
            # A power of two, mostly 1, which on a GPU the host does not know: the product is exact.
            factor = self.optimizer.scaler.scale / values.pop(SCALE)
            multiply_all(list(values.values()), factor)
        self._units[unit].gradients.update(values)

    def backward(self, unit: Unit, *, last_of_round: bool, split: bool = False) -> Tensor | None:
        """Run the backward of `unit`; return its part of the minibatch's loss, on the stage that
        has it.

        Args:
            last_of_round: whether it completes the gradients, which may then be all-reduced as they
                come.
            split: leave the gradients of the weights to `backward_weight`.
        """
        record = self._units[unit]
        if self._data.size(unit) == 0 and not self._together:
            self._forget_if_done(unit, record)
            return None

        with self.versions.restored(unit):
            # Where the backward starts in the graph, and the gradients there; None for the loss.
            reached = [name for name in record.gradients if name in record.ends]
            roots = [record.ends[name] for name in reached]
            gradients: list[Tensor | None] = [record.gradients[name] for name in reached]
            loss = None
            if record.loss is not None:
                loss = self._weighted(unit, record.loss)
            if loss is not None and loss.requires_grad:
                scaled = loss
                if self.optimizer.scaler is not None:
                    scaled = loss * self.optimizer.scaler.scale
                if self._ddp is not None and self._context.shape.schedule.divides:
                    # it averages, and microbatches' gradients add up
                    scaled = scaled * self._ddp.process_group.size()
                roots.insert(0, get_gradient_edge(scaled))
                gradients.insert(0, None)
            if self._averager is not None and last_of_round:
                self._averager.begin()
            if self._sharding is not None:
                self._sharding.begin_backward(last=last_of_round)
            wanted = [value for value in record.received.values() if value.requires_grad]
            # With recomputation the backward is whole: a second part would keep all activations for
            # longer.
            if roots and split and wanted and not self._recomputes:
                self._rests[unit] = input_gradients(
                    roots, gradients, wanted, self.module.parameters()
                )
            elif roots:
                torch.autograd.backward(roots, gradients)

        self._check_off_loss(record)
        record.ends.clear()
        record.gradients.clear()
        record.loss = None
        self._forget_if_done(unit, record)
        empty = self._data.size(unit) == 0 and self._ddp is None
        told = self._context.leads_tensor_group or self._context.plan.by_samples
        if loss is None or empty or not told:
            return None
        return loss.detach()

    def backward_weight(self, unit: Unit, *, last_of_round: bool) -> None:
        """Run the part of a backward that `split` left."""
        # No version is restored: schedules that split the backward are synchronous, with no update
        # between its parts.
        rest = self._rests.pop(unit, None)
        if self._averager is not None and last_of_round:
            self._averager.begin()
        if rest is not None:
            rest.run()

    def gradient(self, unit: Unit, source: int) -> dict[str, Tensor]:
        """Return the gradients, after the backward of `unit`, of the values that stage `source`
        sent.
        """
        record = self._units[unit]
        received = {name: record.received.pop(name) for name in self._with_gradient[source]}
        values = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in received.items()}
        self._forget_if_done(unit, record)
        self.optimizer.note_sent(values.values())
        if self.optimizer.scaler is not None:
            values[SCALE] = torch.full(
                (), self.optimizer.scaler.scale, device=self._context.place.compute
            )

        return values

    def average(self, divisor: int) -> None:
        """Wait for the all-reduce of the round's gradients over the replicas, and divide them by
        `divisor`.
        """
        self._averaged = divisor
        if self._averager is not None:
            self._averager.finish(divisor)
        elif divisor > 1 and self._ddp is None:
            gradients = [
                parameter.grad
                for parameter in self.optimizer.parameters
                if parameter.grad is not None
            ]
            divide_all(gradients, divisor)

    def norm_share(self) -> float:
        """Return this replica's part of the squared norm over all stages."""
        if not self._counts_in_norm:
            return 0.0
        return self.optimizer.squared_norm(self.shared.counted_elsewhere)

    def update(self, kept: Collection[int] = (), squared_norm: float | None = None) -> None:
        """Step the optimizer with the gradients of a round, which makes a new weight version beside
        those `kept`.
        """
        if self.optimizer.parameters:
            self.versions.update(lambda: self.optimizer.step(squared_norm), kept)
            self.optimizer.forget_gradients()
        else:
            self.optimizer.step(squared_norm)
        self.optimizer.advance(self._averaged)
        self._averaged = 1

    def _own_units(self, minibatch: int) -> list[Unit]:
        """Return the microbatches of a minibatch that this worker computes, and that have
        samples.
        """
        units = self._context.shape.units_of(self.index, self._context.rank, minibatch)
        return [unit for unit in units if self._data.size(unit)]

    def _weighted(self, unit: Unit, loss: Tensor) -> Tensor:
        share = self._share(unit)
        # Nothing counts in it: a mean over nothing is not a number, and has no backward.
        if not share and not self._together:
            return torch.zeros_like(loss.detach())
        if share == 1.0:
            return loss
        return loss * share

    def _share(self, unit: Unit) -> float:
        if not self._data.size(unit):
            return 0.0
        return self._data.share(unit)

    def _counting(self, unit: Unit) -> Unit:
        """Return the unit, or the first one of its minibatch that counts where it does not."""
        others = (Unit(unit.minibatch, number) for number in range(self._data.microbatches))
        return next((each for each in chain([unit], others) if self._share(each)), unit)

    def _check_off_loss(self, record: _InFlight) -> None:
        """Raise WorkerError for a gradient that would not be sent."""
        for name in self._off_loss:
            if name in record.received and record.received[name].grad is not None:
                raise gradient_off_loss(f"value '{name}'")

    def _forget_if_done(self, unit: Unit, record: _InFlight) -> None:
        waiting = (value for name, value in record.received.items() if name not in self._off_loss)
        if not any(value.requires_grad for value in waiting):
            del self._units[unit]


def leaves_out_weights(context: PipelineContext, module: StageModule) -> bool:
    """Return whether some weight gets no gradient in a step of the module, which is run once to
    see.
    """
    found: set[int] = set()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks: list[RemovableHandle] = []
    for weight in trained:
        note = partial(lambda number, _: found.add(number), id(weight))
        hooks.append(weight.register_hook(note))  # type: ignore[no-untyped-call]

    context.run_once([module], [context.microbatch_size])
    for hook in hooks:
        hook.remove()
    return len(found) < len(trained)
