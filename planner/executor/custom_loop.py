"""A pipeline for one's own training loop: every worker runs the same script, and hands each minibatch in.

    with planner.pipeline(plan, "model.py") as pipeline:
        for batch in data:
            loss = pipeline.step(batch)

The schedule's stream of instructions is followed as far as the minibatches handed in allow. Under an asynchronous
schedule the newest ones stay in flight until more come, or until `drain`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.executor.job import Job, RunOptions, TrainingOptions
from planner.executor.run.data import even_sizes
from planner.executor.run.setup import check_schedule, check_world, join_group, local_place, message_timeout
from planner.executor.run.train import TrainingRun
from planner.formats.plan import Plan
from planner.model.batch import Batch, make_batch
from planner.model.spec import TrainingSpec, load_model_file
from planner.schedule.instructions import AddShared, AllReduce, Instruction, ReceiveShared, SendShared, Unit, Update
from planner.schedule.parts.segments import segment_stream

_ENDLESS = 2**40  # minibatches of a stream whose end is not known


class FedBatches:
    """Minibatches that were handed in, kept as long as a stage may need them.

    Args:
        microbatches: of a minibatch.
        kept: minibatches back to the oldest one that may be in flight.
    """

    random = False
    last_sizes: tuple[int, ...] = ()

    def __init__(self, microbatches: int, kept: int) -> None:
        self._microbatches = microbatches
        self._kept = kept
        self._parts: dict[int, list[Batch]] = {}
        self._sizes: dict[int, int] = {}
        self.count = 0

    def feed(self, batch: Batch) -> None:
        """The next minibatch."""
        parts = min(self._microbatches, batch.size)
        self._parts[self.count] = batch.split(parts)
        self._sizes[self.count] = batch.size
        self.count += 1
        self._parts.pop(self.count - 1 - self._kept, None)
        self._sizes.pop(self.count - 1 - self._kept, None)

    def batch(self, unit: Unit) -> Batch:
        """The samples of one microbatch."""
        return self._parts[unit.minibatch][unit.microbatch]

    def size(self, unit: Unit) -> int:
        """Samples of one microbatch."""
        return even_sizes(self._sizes[unit.minibatch], self._microbatches)[unit.microbatch]

    def minibatch_size(self, minibatch: int) -> int:
        """Samples of a minibatch."""
        return self._sizes[minibatch]

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """As many as will be handed in."""
        return _ENDLESS


class Pipeline:
    """One worker's part of a pipeline that is fed from outside; made by `planner.pipeline`.

    Args:
        plan: of this model.
        spec: the model with its loss and optimizer.
        seed: of initial weights and dropout.
        options: how to train.
    """

    def __init__(self, plan: Plan, spec: TrainingSpec, *, seed: int = 0, options: TrainingOptions) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            if name not in os.environ:
                raise InputError(
                    "planner.pipeline runs in workers, and this process is none: the environment has no " + name,
                    hint=f"start the script with: torchrun --nproc-per-node {plan.workers} script.py",
                )
        check_world(plan)
        check_schedule(plan)
        self.plan = plan
        self._place = local_place()
        self._joined = False
        depth = max(stage.in_flight * stage.replicas for stage in plan.stages)
        self._data = FedBatches(plan.microbatches, kept=2 * depth + 2 * max(plan.replicas) * options.accumulate)
        job = Job(model=spec.origin, plan=plan, seed=seed, options=options, run_options=RunOptions())
        torch.set_num_threads(plan.device.threads or 1)
        self._run = TrainingRun(job, spec, self._place, data=self._data)
        self._base = 0  # minibatches before the last drain
        self._executed = 0  # instructions since then
        self._next: Instruction | None = None
        self._losses: dict[int, list[float]] = {}

    def __enter__(self) -> Pipeline:
        """Join the other workers."""
        if not dist.is_initialized():
            join_group(self._place, message_timeout(self._run.job.run_options.hang_timeout_s))
            self._joined = True
        self._worker, self._stages, self._links = self._run.prepare()
        self._instructions = self._stream(_ENDLESS)
        dist.barrier()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain the pipeline, unless something failed, and leave the other workers."""
        try:
            if kind is None:
                self.drain()
                self._links.drain()
                dist.barrier()
        finally:
            if self._joined:
                dist.destroy_process_group()

    def step(self, batch: Any) -> float | None:
        """Train on one more minibatch, as far as the schedule goes with it.

        Args:
            batch: (args, target) or (args, kwargs, target), the same on every worker.

        Returns:
            The loss of the newest minibatch whose loss this worker has seen and not yet returned: under a synchronous
            schedule that of `batch`, under an asynchronous one that of an earlier one, or None when there is none
            yet. Workers that do not hold the last stage get None. Replicas of the last stage have a loss each: that
            of their own minibatches, or their own samples' part of it.
        """
        minibatch = make_batch(batch, "the batch given to step()")
        size = self._run.microbatch_size * self.plan.microbatches
        if minibatch.size > size:
            raise InputError(
                f"a minibatch of {minibatch.size} samples was given to step(), and the plan is for {size}",
                hint="give as many samples as the plan says, or fewer in a last one",
            )
        self._data.feed(minibatch)
        self._worker.run(self._ready())
        return self._newest_loss()

    def drain(self) -> float | None:
        """Finish all minibatches in flight, as at the end of a run; returns the newest loss, as `step` does."""
        minibatches = self._data.count - self._base
        if minibatches:
            # So far both streams are the same: the end shows in what comes after it only.
            self._worker.run(islice(self._stream(minibatches), self._executed, None))
            newest = self._newest_loss()
            self._base, self._executed, self._next = self._data.count, 0, None
            self._instructions = self._stream(_ENDLESS)
            for stage in self._stages.values():
                stage.versions.restart()
            return newest
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The newest weights of this worker's stages, by their names in the unsplit model; drain first."""
        return {name: t for module in self._run.modules.values() for name, t in module.state_dict().items()}

    def save_weights(self, path: str | Path) -> None:
        """Drain, and write the whole model's weights to one file on the first worker; all workers call it."""
        self.drain()
        self._run.save_weights(Path(path))
        dist.barrier()

    def _stream(self, minibatches: int) -> Iterator[Instruction]:
        run = self._run
        return segment_stream(run.shape, run.stages[0], run.rank, self._base, self._base + minibatches)

    def _ready(self) -> Iterator[Instruction]:
        """The instructions that the minibatches handed in allow, in order."""
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
        per_round = self._run.shape.minibatches_per_update(instruction.stage)
        return self._base + (round_ - self._base + 1) * per_round <= self._data.count

    def _newest_loss(self) -> float | None:
        """Of the newest minibatch of which all losses of this worker are there: the mean over its samples here."""
        run, log = self._run, self._worker.log
        for minibatch, part in log.losses:
            self._losses.setdefault(minibatch, []).append(part)
        log.losses.clear()
        newest = None
        for minibatch in sorted(self._losses):
            units = [Unit(minibatch, microbatch) for microbatch in range(self.plan.microbatches)]
            last = len(self.plan.stages) - 1
            own = [self._data.size(unit) for unit in units if run.shape.rank_of(last, self._local(unit)) == run.rank]
            if len(self._losses[minibatch]) == sum(size > 0 for size in own):
                share = sum(own) / self._data.minibatch_size(minibatch)
                newest = sum(self._losses.pop(minibatch)) / share
        return newest

    def _local(self, unit: Unit) -> Unit:
        """Who runs a minibatch is counted from the last drain on."""
        return Unit(unit.minibatch - self._base, unit.microbatch)


def pipeline(
    plan: Plan, model: str | Path | TrainingSpec, *, seed: int = 0, options: TrainingOptions | None = None
) -> Pipeline:
    """A pipeline for one's own loop, in a script that torchrun starts once per worker of the plan.

    Args:
        plan: from `solve` or `load_plan`.
        model: the model file that it was made for, or what `in_memory` gives.
        seed: of the initial weights of a model file, and of dropout.
        options: how to train; those of the data and of evaluation have no effect, both being the script's.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the environment.
    """
    spec = model if isinstance(model, TrainingSpec) else load_model_file(model)
    return Pipeline(plan, spec, seed=seed, options=options or TrainingOptions())
