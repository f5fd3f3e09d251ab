"""One worker: interprets its stream of instructions over the stages it holds, mostly one."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from typing_extensions import assert_never

from planner.executor.health.failures import LossNotFiniteError
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.run.joint import JointNorm
from planner.executor.run.replica import StageReplica
from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    ReceiveShared,
    Send,
    SendActivation,
    SendGradient,
    SendShared,
    Unit,
    Update,
)


class Messenger(Protocol):
    """How messages travel; `Links` in a real run."""

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for a message and return its values."""
        ...

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending; never waits for the receiver's computation."""
        ...


class Recorder(Protocol):
    """Is told of everything a worker did, for a trace of the run."""

    def settle(self, instruction: Instruction) -> None:
        """`instruction` has been started; on a GPU it may still run."""
        ...

    def record(self, instruction: Instruction, start_s: float, end_s: float) -> None:
        """`instruction` ran from `start_s` to `end_s` on `time.perf_counter`'s clock; a receive waits that long."""
        ...


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
    paused_s: float = 0.0  # spent on what is no training


class Worker:
    """Runs the stage replicas of one rank.

    Args:
        stages: by number of the stage.
        messenger: sends and receives.
        on_update: called after each optimizer step with the instruction.
        recorder: for a trace.
        heartbeat: is told of every instruction before it runs.
        stop_on_nan: raise when a loss is no finite number.
        joint_norm: for gradients that are clipped by the norm of all stages' together.
    """

    def __init__(
        self,
        stages: Mapping[int, StageReplica],
        messenger: Messenger,
        *,
        on_update: Callable[[Update, WorkerLog], None] | None = None,
        recorder: Recorder | None = None,
        heartbeat: Heartbeat | None = None,
        stop_on_nan: bool = False,
        joint_norm: JointNorm | None = None,
    ) -> None:
        self.log = WorkerLog()
        self._stages = stages
        self._messenger = messenger
        self._on_update = on_update
        self._recorder = recorder
        self._heartbeat = heartbeat if heartbeat is not None else Heartbeat()
        self._stop_on_nan = stop_on_nan
        self._joint_norm = joint_norm
        self._due: list[Update] = []  # updates of this worker's stages that wait for those of the others

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute `instructions` in order."""
        for instruction in instructions:
            self._heartbeat.begin(instruction)
            start_s = time.perf_counter()
            self._execute(instruction)
            if self._recorder is not None:
                self._recorder.settle(instruction)
            end_s = time.perf_counter()
            if isinstance(instruction, Compute):
                self.log.busy_s += end_s - start_s
            if isinstance(instruction, (Backward, BackwardWeight)):
                self.log.completions.append(Completion(end_s - self.log.paused_s, self.log.busy_s))
            if self._recorder is not None:
                self._recorder.record(instruction, start_s, end_s)

    def _execute(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        match instruction:
            case ReceiveActivation(unit=unit, peer_stage=source):
                stage.accept_activation(unit, source, self._messenger.receive(instruction))
            case Forward(unit=unit, version=version):
                stage.forward(unit, version)
            case SendActivation(unit=unit, peer_stage=target):
                self._messenger.send(instruction, stage.activation(unit, target))
            case ReceiveGradient(unit=unit):
                stage.accept_gradient(unit, self._messenger.receive(instruction))
            case Backward(unit=unit):
                self._log_loss(unit, stage.backward(unit, last_of_round=instruction.last_of_round))
            case BackwardInput(unit=unit):
                self._log_loss(unit, stage.backward(unit, last_of_round=False, split=True))
            case BackwardWeight(unit=unit):
                stage.backward_weight(unit, last_of_round=instruction.last_of_round)
            case SendGradient(unit=unit, peer_stage=source):
                self._messenger.send(instruction, stage.gradient(unit, source))
            case SendShared(unit=unit, peer_stage=peer):
                self._messenger.send(instruction, stage.shared_gradients(unit.minibatch, peer))
            case ReceiveShared(unit=unit, peer_stage=peer):
                stage.accept_shared(unit.minibatch, peer, self._messenger.receive(instruction))
            case AddShared(round=round_):
                stage.add_shared(round_)
            case AllReduce():
                stage.average(instruction.divisor)
            case Update():
                self._update(instruction)
            case _:
                assert_never(instruction)

    def _log_loss(self, unit: Unit, loss: float | None) -> None:
        if loss is not None:
            if self._stop_on_nan and not math.isfinite(loss):
                raise not_finite(loss, unit)
            self.log.losses.append((unit.minibatch, loss))

    def _update(self, instruction: Update) -> None:
        """Update the stage, or all of this worker's stages at once when their gradients are complete."""
        self._due.append(instruction)
        if self._joint_norm is not None and len(self._due) < len(self._stages):
            return
        norm = None
        if self._joint_norm is not None:
            share = sum(stage.norm_share() for stage in self._stages.values())
            self._heartbeat.enter("waiting for all gradients' norm", meeting=True)
            norm = self._joint_norm.sum(share)
            self._heartbeat.begin(instruction)
        for each in self._due:
            self._stages[each.stage].update(each.round, each.kept, norm)
            if self._on_update is not None:
                self._on_update(each, self.log)
        self._due.clear()


def not_finite(loss: float, unit: Unit) -> LossNotFiniteError:
    """What `--stop-on-nan` says."""
    return LossNotFiniteError(
        f"the loss of minibatch {unit.minibatch} is {loss}",
        hint="lower the learning rate, or go on from a checkpoint before it with --resume",
    )
