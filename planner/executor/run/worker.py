"""Execute a worker's stream of instructions, and log losses and times."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import assert_never

from planner.executor.communication.later import Later
from planner.executor.communication.links import Links
from planner.executor.observe.clock import BusyTime
from planner.executor.observe.progress import WorkerLog
from planner.executor.observe.recording import TraceRecorder
from planner.executor.observe.window_sampler import WindowSampler
from planner.executor.run.replica import StageReplica
from planner.runtime import Event as Mark
from planner.runtime import runtime_of
from planner.schedule import instructions as do
from planner.schedule.instructions import AllReduce, Instruction, Unit, Update
from planner.workers.failures import LossNotFiniteError
from planner.workers.heartbeat import Heartbeat

_COMPUTE = frozenset(get_args(do.Compute))
_WAITS = frozenset((*get_args(do.Receive), AllReduce))
_CHECKS = 8  # comparisons that are on their way at once
_COMPLETES = frozenset((do.Backward, do.BackwardWeight))  # the end of a unit at a stage


@dataclass(frozen=True)
class Observers:
    """Who is told what a worker does."""

    heartbeat: Heartbeat  # before every instruction
    on_update: Callable[[Update, WorkerLog], None] | None = None  # after each optimizer step
    recorder: TraceRecorder | None = None  # of all instructions and their times
    sampler: WindowSampler | None = None  # of some minibatches


class PipelineWorker:
    """Executes the stream of one rank's stages: one, or several chunks.

    With a `joint_group`, of all workers that have stages, these clip or skip an update together, by
    the norm of all their gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, StageReplica],
        links: Links,
        observers: Observers,
        device: torch.device,
        *,
        stop_on_nan: bool = False,
        joint_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stages = stages
        self.links = links
        self.log = WorkerLog()
        # of the newest update, where the stages clip or scale together
        self.gradient_norm: float | None = None
        self._observers = observers
        self._stop_on_nan = stop_on_nan
        self._busy = BusyTime(device, self.log)
        self._later = Later(device)
        self._checks = Later(device, _CHECKS)  # apart, because the newest losses may stay unread
        self._runtime = runtime_of(device)
        if self._runtime.asynchronous:
            observers.heartbeat.follow(self._busy.at)
        self._newest_loss: Tensor | None = None
        self._joint_group = joint_group
        for stage in stages.values():
            if stage.optimizer.sharding is not None:
                stage.optimizer.sharding.note = self._note_wait

        # updates of this worker's stages that wait for those of its other stages
        self._due: list[Update] = []

    def run(self, instructions: Iterable[Instruction], unread: int = 0) -> None:
        """Execute `instructions` in order, and wait for all losses but the `unread` newest."""
        beat = self._observers.heartbeat.begin
        recorder = self._observers.recorder
        sampler = self._observers.sampler
        busy = self._busy
        execute = self._execute
        for instruction in instructions:
            beat(instruction)
            sampled = sampler is not None and sampler.records(instruction)
            start = self._mark() if sampled or recorder is not None else None
            kind = type(instruction)
            if kind in _COMPUTE:
                busy.begin(instruction)
                execute(instruction)
                busy.end(completes=kind in _COMPLETES)
            else:
                execute(instruction)
                if kind in _WAITS:
                    busy.waits = instruction
            if start is not None:
                self._record(instruction, start, sampled=sampled)

        self._later.flush(unread)
        if not unread:
            self._checks.flush()

    def _mark(self) -> Mark:
        mark = self._runtime.event(timing=True)
        mark.record()
        return mark

    def _record(self, instruction: Instruction, start: Mark, *, sampled: bool) -> None:
        end = self._mark()
        if self._observers.recorder is not None:
            self._observers.recorder.record(instruction, start, end)
        if self._observers.sampler is not None and sampled:
            self._observers.sampler.record(instruction, start, end)

    def settle(self) -> None:
        """Wait for the checks of all messages received so far, and for all computations; the
        pipeline must be empty.
        """
        self.links.settle()
        self._busy.flush()

    def drain(self) -> None:
        """Wait until all messages have left, too."""
        self.links.drain()
        self.settle()

    def _execute(self, instruction: Instruction) -> None:
        stage = self.stages[instruction.stage]
        match instruction:
            case do.ReceiveActivation(unit=unit, peer_stage=source):
                stage.accept_activation(unit, source, self.links.receive(instruction))
            case do.Forward(unit=unit, version=version):
                stage.forward(unit, version)
                for numbers, compare in stage.take_readings():
                    self._checks.read(numbers, compare)
            case do.SendActivation(unit=unit, peer_stage=target):
                self.links.send(instruction, stage.activation(unit, target))
            case do.ReceiveGradient(unit=unit):
                stage.accept_gradient(unit, self.links.receive(instruction))
            case do.Backward(unit=unit):
                self._log_loss(unit, stage.backward(unit, last_of_round=instruction.last_of_round))
            case do.BackwardInput(unit=unit):
                self._log_loss(unit, stage.backward(unit, last_of_round=False, split=True))
            case do.BackwardWeight(unit=unit):
                stage.backward_weight(unit, last_of_round=instruction.last_of_round)
            case do.SendGradient(unit=unit, peer_stage=source):
                self.links.send(instruction, stage.gradient(unit, source))
            case do.SendShared(unit=unit, peer_stage=peer):
                self.links.send(instruction, stage.shared.take(unit.minibatch, peer))
            case do.ReceiveShared(unit=unit, peer_stage=peer):
                stage.shared.accept(unit.minibatch, peer, self.links.receive(instruction))
            case do.AddShared(round=round_):
                stage.shared.add(round_)
            case AllReduce():
                stage.average(instruction.divisor)
            case Update():
                self._update(instruction)
            case _:
                assert_never(instruction)

    def _note_wait(self, activity: str, waits: bool) -> None:
        """Note that an update waits for other replicas, or no more: no hang of its own, and no
        computing time.
        """
        self._observers.heartbeat.enter(activity, meeting=waits)
        if waits:
            self._busy.end(completes=False)
        else:
            if self._due:
                self._busy.waits = AllReduce(self._due[0].stage, self._due[0].round, 1)
            self._busy.begin()

    def _update(self, instruction: Update) -> None:
        """Update the stage, or all of this worker's stages at once when their gradients are
        complete.
        """
        self._due.append(instruction)
        norm = None
        if self._joint_group is not None:
            if len(self._due) < len(self.stages):
                return
            # Squares, so that workers' parts add up: each makes one sum per update.
            squared = torch.tensor(
                sum(each.norm_share() for each in self.stages.values()), dtype=torch.float64
            )
            self._observers.heartbeat.enter("waiting for all gradients' norm", meeting=True)
            dist.all_reduce(squared, group=self._joint_group)
            norm = float(squared)
            self.gradient_norm = math.sqrt(norm)
            self._observers.heartbeat.begin(instruction)

        for each in self._due:
            self.stages[each.stage].update(each.kept, norm)
            self._note_update(each)

        self._due.clear()

    def _log_loss(self, unit: Unit, loss: Tensor | None) -> None:
        if loss is None:
            return
        self._newest_loss = loss
        self._later.read(loss, lambda value: self._note_loss(unit, float(value)))

    def _note_loss(self, unit: Unit, loss: float) -> None:
        if self._stop_on_nan and not math.isfinite(loss):
            raise LossNotFiniteError(
                f"the loss of minibatch {unit.minibatch} is {loss}",
                hint="lower the learning rate, or continue from an earlier checkpoint with "
                "`resume`",
            )
        self.log.losses.append((unit.minibatch, loss))

    def _note_update(self, update: Update) -> None:
        on_update = self._observers.on_update
        if on_update is not None and self._newest_loss is not None:
            # Behind the losses of its minibatches, so that they are in the log.
            self._later.read(self._newest_loss, lambda _: on_update(update, self.log))
        elif on_update is not None:
            on_update(update, self.log)
