"""Checkpoints of a run: every stage's first replica writes its part, and rank 0 makes the whole of it complete.

`Checkpointer` is called on all workers at the same points of their streams, where the pipeline is drained. There is
no stop beyond that: a worker writes as soon as its own stages are done, tells rank 0, and goes on; rank 0 waits for
all, writes the index, and renames the folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.index import (
    INDEX,
    Checkpoint,
    StagePart,
    check_fits,
    folder_name,
    load_index,
    partial_name,
    prune,
    remove_leftovers,
    resolve,
    sign_name,
    sync_folder,
)
from planner.executor.checkpoint.read_parts import fill_module, fill_optimizer, scheduler_state
from planner.executor.checkpoint.write_parts import Restorable, has_part, write_part
from planner.executor.communication.collect import broadcast_bytes, encode_losses, gather_bytes, merge_losses
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.job import Evaluation, Job
from planner.executor.observe.run_log import Past, RunLog
from planner.executor.run.setup import message_timeout
from planner.formats.files import Record, save_record
from planner.version import __version__

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DataPosition:
    """What tells where in the data a minibatch is."""

    minibatch_size: int
    minibatches_per_epoch: int | None  # None without a dataset


class _Start(Record):
    """What rank 0 found, for all workers."""

    token: str
    resume: str | None


class _WorkerPart(Record):
    """What a worker wrote, or why not."""

    parts: tuple[StagePart, ...]
    losses: str  # since the last one; see `encode_losses`
    evaluations: tuple[Evaluation, ...]
    problem: str | None = None


class Checkpointer:
    """Restores and writes checkpoints of a job.

    All workers make one and call `restore`, then `save`, at the same points.

    Args:
        job: with the folder, how many to keep, and what to go on from.
        stages: this worker's.
        data: where minibatches are in the data.
        heartbeat: told what the worker does.
    """

    def __init__(self, job: Job, stages: list[Restorable], data: DataPosition, heartbeat: Heartbeat) -> None:
        self._job = job
        self._stages = stages
        self._data = data
        self._folder = Path(job.checkpoints.folder)
        self._rank = dist.get_rank()
        self._heartbeat = heartbeat
        timeout = message_timeout(job.run_options.hang_timeout_s)
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self._problem: str | None = None  # of the last checkpoint
        self._told = [0, 0]  # losses and evaluations of this worker that are in the log
        self._log: RunLog | None = None  # on rank 0
        self.past = Past()  # on rank 0: what is known of the run from before its workers were started again
        self.newest: Path | None = None  # on rank 0
        self.seconds = 0.0  # spent in `save`
        self._start = self._agree()
        self.resumed_from = None if self._start.resume is None else Path(self._start.resume)

    def restore(self) -> int:
        """Fill this worker's stages from the checkpoint to go on from, if there is one.

        Returns:
            The minibatches done before.

        Raises:
            InputError: when the checkpoint does not fit the run, or is damaged.
        """
        path = self.resumed_from
        if path is None:
            self._begin_log(0)
            return 0
        self._heartbeat.enter("reading the checkpoint")
        index = load_index(path)
        check_fits(index, path, self._job.plan, self._job.seed)
        for own in self._stages:
            fill_module(own.module, path, index, stage=own.stage, replica=own.replica)
            if own.optimizer is not None:
                factor = own.learning_rate_factor
                fill_optimizer(own.optimizer, own.module, path, index, stage=own.stage, learning_rate_factor=factor)
                groups = len(own.optimizer.param_groups)
                for name, stateful in own.extras.items():
                    stateful.load_state_dict(
                        scheduler_state(path, index, name, groups, stage=own.stage, learning_rate_factor=factor)
                    )
        first = position(index, path, self._data)
        self._begin_log(first)
        return first

    def save(
        self,
        minibatch: int,
        losses: Sequence[tuple[int, float]] = (),
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        """Write a checkpoint after `minibatch` minibatches; where that fails, the older ones are kept.

        Args:
            minibatch: where the pipeline has drained.
            losses: all (minibatch, part of its loss) that this worker has seen.
            evaluations: all that it has.

        Raises:
            InputError: when the model or optimizer keeps what no checkpoint can hold.
        """
        began_s = time.perf_counter()
        folder = self._folder / partial_name(minibatch, self._start.token)
        self._heartbeat.enter("writing a checkpoint")
        parts: tuple[StagePart, ...] = ()
        problem = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            parts = tuple(write_part(folder, own) for own in self._stages if has_part(own))
        except OSError as cause:
            problem = f"worker {self._rank}: {cause.strerror or cause}"
        written = _WorkerPart(
            parts=parts,
            losses=encode_losses(losses[self._told[0] :]).decode(),
            evaluations=tuple(evaluations[self._told[1] :]),
            problem=problem,
        )
        self._told = [len(losses), len(evaluations)]
        self._heartbeat.enter("waiting for the checkpoint's other parts", meeting=True)
        replies = gather_bytes(written.model_dump_json().encode(), _CPU, self._group)
        if self._rank == 0:
            self._heartbeat.enter("completing a checkpoint")
            self._complete(minibatch, folder, [_WorkerPart.model_validate_json(reply) for reply in replies])
        self.seconds += time.perf_counter() - began_s

    def check_last(self) -> None:
        """To be called at the end.

        Raises:
            PlannerError: when the last checkpoint could not be written: what was trained since is in none.
        """
        if self._problem is not None:
            kept = f"the newest is '{self.newest}'" if self.newest is not None else "there is none"
            raise PlannerError(
                f"the run ended, but its last checkpoint could not be written to '{self._folder}' ({self._problem}); "
                f"{kept}",
                hint="make room and go on from there with --resume",
            )

    def _agree(self) -> _Start:
        """Rank 0 looks for the checkpoint to go on from; all make sure that they see the folder that it sees."""
        self._heartbeat.enter("looking for checkpoints", meeting=True)
        writes = self._job.checkpoints.every is not None
        start = _Start(token=uuid.uuid4().hex[:8], resume=None)
        if self._rank == 0:
            found = resolve(self._job.checkpoints.resume, self._folder, writes=writes)
            start = start.model_copy(update={"resume": None if found is None else str(found)})
            if writes:
                self._claim(start.token)
        start = _Start.model_validate_json(broadcast_bytes(start.model_dump_json().encode(), self._group))
        if writes:
            sign = self._folder / sign_name(start.token)
            if not sign.exists():
                raise InputError(
                    f"worker {self._rank} on '{os.uname().nodename}' does not see what worker 0 writes to "
                    f"'{self._folder.absolute()}'",
                    hint="choose a --checkpoint-folder on a file system that all hosts share",
                )
            dist.barrier(self._group)
            if self._rank == 0:
                sign.rmdir()
        return start

    def _claim(self, token: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._folder)
            (self._folder / sign_name(token)).mkdir()
        except OSError as cause:
            raise InputError(
                f"checkpoints cannot be written to '{self._folder}': {cause.strerror}",
                hint="choose another --checkpoint-folder",
            ) from None

    def _begin_log(self, first: int) -> None:
        if self._rank == 0 and self._job.checkpoints.every is not None:
            self._log = RunLog(self._folder, self._job.run)
            self.past = self._log.begin(first, again=self._job.started_again)

    def _complete(self, minibatch: int, folder: Path, replies: list[_WorkerPart]) -> None:
        self._problem = next((reply.problem for reply in replies if reply.problem is not None), None)
        assert self._log is not None
        self._log.note(
            merge_losses(reply.losses.encode() for reply in replies),
            [evaluation for reply in replies for evaluation in reply.evaluations],
        )
        if self._problem is None:
            try:
                self._log.append(minibatch)
                parts = [part for reply in replies for part in reply.parts]
                save_record(self._index(minibatch, parts), folder / INDEX)
                sync_folder(folder)
                final = folder.with_name(folder_name(minibatch))
                folder.rename(final)
                sync_folder(self._folder)
                self.newest = final
                prune(self._folder, self._job.checkpoints.keep)
            except OSError as cause:
                self._problem = f"worker 0: {cause.strerror or cause}"
            except PlannerError as cause:
                self._problem = cause.message
        if self._problem is not None:
            shutil.rmtree(folder, ignore_errors=True)
            _log.warning(
                "the checkpoint after minibatch %d could not be written to '%s' (%s); training goes on, and older "
                "checkpoints are kept",
                minibatch,
                self._folder,
                self._problem,
            )

    def _index(self, minibatch: int, parts: list[StagePart]) -> Checkpoint:
        plan = self._job.plan
        assert plan.graph_hash is not None
        return Checkpoint(
            tool=__version__,
            torch=torch.__version__,
            model=plan.model,
            graph_hash=plan.graph_hash,
            config=plan.config,
            schedule=plan.schedule,
            seed=self._job.seed,
            minibatch=minibatch,
            minibatch_size=self._data.minibatch_size,
            minibatches_per_epoch=self._data.minibatches_per_epoch,
            parts=tuple(sorted(parts, key=lambda part: (part.stage, part.replica))),
        )


def position(index: Checkpoint, path: Path, data: DataPosition) -> int:
    """The minibatch that comes next, in minibatches of `data`.

    With minibatches of another size, the run goes on in the same epoch behind the samples that it has seen, at the next
    whole minibatch: none is seen twice.

    Raises:
        InputError: when the data is not what it was.
    """
    if index.minibatch_size == data.minibatch_size:
        if index.minibatches_per_epoch != data.minibatches_per_epoch:
            raise InputError(
                f"dataset() has {data.minibatches_per_epoch or 'no'} minibatches, but had "
                f"{index.minibatches_per_epoch or 'none'} in the run of the checkpoint '{path}'",
                hint="a run goes on with the data that it began with",
            )
        return index.minibatch
    if index.minibatches_per_epoch is None or data.minibatches_per_epoch is None:
        return -(-index.minibatch * index.minibatch_size // data.minibatch_size)
    epochs, rest = divmod(index.minibatch, index.minibatches_per_epoch)
    within = -(-rest * index.minibatch_size // data.minibatch_size)
    return epochs * data.minibatches_per_epoch + min(within, data.minibatches_per_epoch)
