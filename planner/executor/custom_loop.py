"""Train a pipeline from a custom training loop: every worker runs the same script and hands each minibatch in.

    with planner.pipeline(plan, "model.py") as pipeline:
        for batch in data:
            loss = pipeline.step(batch)

A step executes the schedule's instructions as far as the minibatches handed in allow. Under an asynchronous schedule
the newest minibatches stay in flight until more come, or until `drain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from planner.devices.meeting import started_as_worker
from planner.errors import InputError
from planner.executor.communication.control import control_group
from planner.executor.health.script_supervisor import ScriptSupervisor
from planner.executor.job import Job, TrainingOptions
from planner.executor.run.agreement import take_place
from planner.executor.run.assemble import Groups, make_worker
from planner.executor.run.context import pipeline_context
from planner.executor.run.data import BatchSource
from planner.executor.run.frame import connect_all, joined, start_worker
from planner.executor.run.setup import check_schedule
from planner.executor.run.train import save_weights
from planner.executor.run.worker import Observers
from planner.formats.device_names import Backend, DeviceType
from planner.formats.plan import Plan
from planner.model.batch import Batch, make_batch
from planner.model.loss_weight import Shares, shares_by_samples, shares_function
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import AddShared, AllReduce, Instruction, ReceiveShared, SendShared, Unit, Update

_ENDLESS = 2**40  # minibatches of a stream whose end is not known


class FedBatches(BatchSource):
    """Minibatches that were handed in, kept as long as a stage may need them.

    Args:
        microbatches: per minibatch.
        kept: minibatches back to the oldest one that may be in flight.
        shares: of a minibatch's microbatches; None where they are those of their samples.
    """

    def __init__(self, microbatches: int, kept: int, shares: Shares | None = None) -> None:
        super().__init__(microbatches)
        self._kept = kept
        self._shares_of = shares or shares_by_samples
        self._parts: dict[int, list[Batch]] = {}
        self._sizes: dict[int, int] = {}
        self._shares: dict[int, list[float]] = {}
        self.count = 0

    def feed(self, batch: Batch) -> None:
        """Take the next minibatch."""
        self._parts[self.count] = batch.split(min(self.microbatches, batch.size))
        self._sizes[self.count] = batch.size
        self._shares[self.count] = self._shares_of(self._parts[self.count])
        self.count += 1
        for kept in (self._parts, self._sizes, self._shares):
            kept.pop(self.count - 1 - self._kept, None)

    def batch(self, unit: Unit) -> Batch:
        return self._parts[unit.minibatch][unit.microbatch]

    def share(self, unit: Unit) -> float:
        return self._shares[unit.minibatch][unit.microbatch] if self.size(unit) else 0.0

    def minibatch_size(self, minibatch: int) -> int:
        return self._sizes[minibatch]

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return _ENDLESS


class Pipeline:
    """One worker's part of a pipeline that a custom loop feeds; made by `planner.pipeline`.

    Args:
        job: with the plan for this model.
        spec: the model with its loss and optimizer.
    """

    def __init__(self, job: Job, spec: TrainingSpec) -> None:
        plan, options = job.plan, job.options
        if not started_as_worker():
            raise InputError(
                "planner.pipeline runs in workers, and this process is none: the environment has no RANK and no "
                "WORLD_SIZE",
                hint=f"start the script with: torchrun --nproc-per-node {plan.workers} script.py",
            )
        self.plan = plan
        heartbeat = start_worker(job)
        check_schedule(plan)
        depth = max(stage.in_flight * stage.replicas for stage in plan.stages)
        kept = 2 * depth + 2 * max(plan.replicas) * options.accumulate
        self._data = FedBatches(plan.microbatches, kept, shares_function(plan.loss, spec))
        self._context = pipeline_context(job, spec, take_place(job, heartbeat), heartbeat, self._data)
        self._group = ExitStack()
        self._base = 0  # minibatches before the last drain
        self._executed = 0  # instructions since then
        self._next: Instruction | None = None
        self._losses: dict[int, list[float]] = {}

    def __enter__(self) -> Pipeline:
        """Join the other workers, unless the script has already done so."""
        supervisor = ScriptSupervisor(self._context.job, self._context.heartbeat)
        with ExitStack() as entering:  # an error in here leaves the others as one in the loop does
            entering.enter_context(joined(self._context, supervisor))
            groups, observers = Groups.create(self._context), Observers(self._context.heartbeat)
            # Links cannot look ahead: nobody knows whether a minibatch will follow.
            self._worker = make_worker(self._context, groups, observers, lambda: ())
            self._instructions = self._stream(_ENDLESS)
            connect_all(self._context)
            dist.barrier(control_group())
            self._group = entering.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain the pipeline, unless something failed, and leave the other workers."""
        if kind is not None:
            self._group.__exit__(kind, error, trace)
            return
        with self._group:  # which is told of a failure here as well
            self.drain()
            self._worker.drain()
            dist.barrier(control_group())

    def step(self, batch: Any) -> float | None:
        """Train on one more minibatch, as far as the schedule allows.

        Args:
            batch: (args, target) or (args, kwargs, target), the same on every worker.

        Returns:
            The loss of the newest minibatch whose loss this worker has seen and not yet returned: of `batch` under a
            synchronous schedule, of an earlier one under an asynchronous schedule. None if there is none yet, and on
            workers that do not hold the last stage. Replicas of the last stage each return their own loss: that of
            their minibatches, or of their samples of a minibatch.
        """
        minibatch = make_batch(batch, "the batch given to step()")
        size = self._context.minibatch_size
        if minibatch.size > size:
            raise InputError(
                f"a minibatch of {minibatch.size} samples was given to step(), and the plan is for {size}",
                hint="give as many samples as the plan says, or fewer in a last one",
            )
        self._data.feed(minibatch)
        self._worker.run(self._ready())
        self._context.heartbeat.enter("running the script's own code")
        return self._newest_loss()

    def drain(self) -> float | None:
        """Finish all minibatches in flight, as at the end of a run; return the newest loss, as `step` does."""
        minibatches = self._data.count - self._base
        if minibatches:
            # A stream that ends there begins with what was executed of the endless one: they differ at the end only.
            self._worker.run(islice(self._stream(minibatches), self._executed, None))
            newest = self._newest_loss()
            self._base, self._executed, self._next = self._data.count, 0, None
            self._instructions = self._stream(_ENDLESS)
            self._worker.restart()
            return newest
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the newest weights of this worker's stages, by their names in the unsplit model; drain first."""
        modules = (stage.module for stage in self._context.stages.values())
        return {name: tensor for module in modules for name, tensor in module.state_dict().items()}

    def save_weights(self, path: str | Path) -> None:
        """Drain, and write the whole model's weights to one file on the first worker; all workers call it."""
        self.drain()
        save_weights(self._context, Path(path))
        dist.barrier(control_group())

    def _stream(self, minibatches: int) -> Iterator[Instruction]:
        return self._context.stream(self._base, self._base + minibatches)

    def _ready(self) -> Iterator[Instruction]:
        """Return the instructions that the minibatches handed in allow, in order."""
        allowed: list[Instruction] = []
        while True:
            if self._next is None:
                self._next = next(self._instructions)
            if not self._allows(self._next):
                break
            allowed.append(self._next)
            self._next = None
        self._executed += len(allowed)
        return iter(allowed)

    def _allows(self, instruction: Instruction) -> bool:
        match instruction:
            case AllReduce(round=round_) | AddShared(round=round_) | Update(round=round_):
                pass
            case SendShared(unit=unit) | ReceiveShared(unit=unit):
                round_ = unit.minibatch
            case _:
                return instruction.unit.minibatch < self._data.count
        per_round = self._context.shape.minibatches_per_update(instruction.stage)
        return self._base + (round_ - self._base + 1) * per_round <= self._data.count

    def _newest_loss(self) -> float | None:
        """Return the mean loss, over this worker's samples, of the newest minibatch whose losses are complete here."""
        for minibatch, part in self._worker.log.losses:
            self._losses.setdefault(minibatch, []).append(part)
        self._worker.log.losses.clear()
        newest = None
        for minibatch in sorted(self._losses):
            units = self._own_units(minibatch)
            if len(self._losses[minibatch]) == len(units):
                share = sum(self._data.share(unit) for unit in units)
                newest = sum(self._losses.pop(minibatch)) / (share or 1.0)
        return newest

    def _own_units(self, minibatch: int) -> list[Unit]:
        """Return the microbatches with samples that this worker runs at the last stage."""
        shape, last = self._context.shape, len(self.plan.stages) - 1
        return [
            unit
            for unit in (Unit(minibatch, microbatch) for microbatch in range(self.plan.microbatches))
            # Replicas take turns from the last drain on.
            if shape.rank_of(last, Unit(minibatch - self._base, unit.microbatch)) == self._context.rank
            and self._data.size(unit)
        ]


def pipeline(
    plan: Plan,
    model: str | Path | TrainingSpec,
    *,
    seed: int = 0,
    device: DeviceType | None = None,
    backend: Backend | None = None,
    options: TrainingOptions | None = None,
) -> Pipeline:
    """Return a pipeline for a custom training loop, in a script that torchrun starts once per worker of the plan.

    Args:
        plan: from `solve` or `load_plan`.
        model: the model file that it was made for, or what `in_memory` returns.
        seed: of the initial weights of a model file, and of dropout.
        device: "cpu" or "cuda"; None for the kind that the plan was made for.
        backend: of messages: "nccl", with a GPU for each worker, or "gloo"; None for what suits the device.
        options: how to train; those of data and evaluation have no effect, because the script does both itself.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the environment.
    """
    spec = model if isinstance(model, TrainingSpec) else TrainingSpec.from_file(model)
    options = options or TrainingOptions()
    job = Job(model=spec.origin, plan=plan, seed=seed, device=device, backend=backend, options=options)
    return Pipeline(job, spec)
