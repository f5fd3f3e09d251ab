"""Checkpoints of a run: each worker writes its part, and rank 0 makes the whole of it complete.

All workers call `Checkpointer` at the same points of their streams, where the pipeline is empty.
"""

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint import folders
from planner.executor.checkpoint.folder_lock import lock_folder, unlock_folder
from planner.executor.checkpoint.stage_parts import (
    Restorable,
    content_of,
    restore_stage,
    write_part,
)
from planner.executor.communication.control import (
    broadcast_bytes,
    gather_bytes,
    merge_losses,
    message_timeout,
)
from planner.executor.observe.run_log import NOTHING, Past, RunLog
from planner.formats.files import Record, replace
from planner.version import __version__
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job

# nfs(5): acdirmax. A worker that looked for the folder before worker 0 made it sees it only then.
NFS_REMEMBERS_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataPosition:
    """What the data are, and how minibatches count their samples: see `Checkpoint`."""

    minibatch_size: int
    minibatches_per_epoch: int | None  # None without a dataset
    samples: int | None = None
    order: int | None = None
    fed: bool = False


class WorkerPart(Record):
    """What one worker has written."""

    parts: tuple[folders.StagePart, ...] = ()
    twins: tuple[folders.StagePart, ...] = ()  # the same as first replicas' parts, on another host
    losses: str  # since the last checkpoint; see `merge_losses`
    evaluations: tuple[Evaluation, ...]
    problem: str | None = None


class Keeper:
    """This worker's part in what keeps the state of its run."""

    def __init__(
        self,
        job: Job,
        stages: list[Restorable],
        data: DataPosition,
        heartbeat: Heartbeat,
        timeout: timedelta,
    ) -> None:
        self._job = job
        self._stages = stages
        self._data = data
        self._heartbeat = heartbeat
        self._rank = dist.get_rank()
        # A gloo group of its own: what travels here is made on the CPU, and must not queue behind
        # training's messages.
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self._reported = [0, 0]  # losses and evaluations of this worker that others have
        self._log: RunLog | None = None  # where this worker writes one
        self.saved: folders.SavedCheckpoint | None = None  # to go on from
        # on rank 0: losses and evaluations from before the workers were restarted
        self.past = Past()

    @property
    def found(self) -> int:
        """Minibatches done in the state to go on from."""
        if self.saved is None:
            return 0
        return position(self.saved, self._data)

    def restore(self) -> int:
        """Fill this worker's stages from the state to go on from; return the number of minibatches
        done.
        """
        if self.saved is not None:
            self._heartbeat.enter("reading the checkpoint")
            self.saved.check_fits(self._job.plan, self._job.seed)
            for own in self._stages:
                restore_stage(own, self.saved)
        return self.found

    def begin(self, first: int, known: Past = NOTHING) -> Past:
        """Log the run from minibatch `first` on, of which `known` is known; return what is known
        then, on rank 0.
        """
        if self._log is not None:
            again = self._job.started_again or self._job.elastic.elastic is not None
            self.past = self._log.begin(first, again=again, known=known)
        return self.past

    def go_on_with(self, job: Job, stages: list[Restorable]) -> None:
        """Keep the state of the same run under another plan from now on."""
        self._job = job
        self._stages = stages

    def _report(
        self, losses: Sequence[tuple[int, float]], evaluations: Sequence[Evaluation]
    ) -> WorkerPart:
        """Return what came since the last report, for what is now written."""
        told, evaluated = self._reported
        self._reported = [len(losses), len(evaluations)]
        return WorkerPart(
            losses=json.dumps(losses[told:]), evaluations=tuple(evaluations[evaluated:])
        )


class Checkpointer(Keeper):
    """This worker's part in checkpoints on disk."""

    def __init__(
        self, job: Job, stages: list[Restorable], data: DataPosition, heartbeat: Heartbeat
    ) -> None:
        super().__init__(
            job, stages, data, heartbeat, message_timeout(job.run_options.hang_timeout_s)
        )
        self.folder = Path(job.checkpoints.checkpoint_folder)
        if self._rank == 0 and job.checkpoints.checkpoint_every is not None:
            self._log = RunLog(self.folder, job.run)
        self._problem: str | None = None  # of the last checkpoint
        self.newest: Path | None = None  # on rank 0
        self.seconds = 0.0  # spent in `save`
        self._token, self.resumed_from = self._agree()
        # what this run has resumed from or written, without links, also what has been removed since
        self._known = set[Path]()
        if self.resumed_from is None:
            self.saved = None
        else:
            self.saved = folders.load_checkpoint(self.resumed_from)
            self._known.add(self.resumed_from.resolve())

    def save(
        self,
        minibatch: int,
        losses: Sequence[tuple[int, float]] = (),
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        """Write a checkpoint after `minibatch` minibatches; if that fails, the older ones are kept.

        Raise InputError when the model or optimizer has state that no checkpoint can hold.
        """
        began_s = time.perf_counter()
        folder = self.folder / folders.partial_name(f"{minibatch:08}", self._token)
        self._heartbeat.enter("writing a checkpoint")
        # Before anything can fail, because ranks that divide a stage's weights gather them
        # together.
        contents = [(own, content_of(own)) for own in self._stages]
        part = self._report(losses, evaluations)
        # A full disk is reported rather than raised: the others wait for this worker's part, and
        # training can go on.
        try:
            folder.mkdir(parents=True, exist_ok=True)
            parts = tuple(
                write_part(folder, own, content) for own, content in contents if content is not None
            )
            part = replace(part, parts=parts)
        except OSError as cause:
            part = replace(part, problem=f"worker {self._rank}: {cause.strerror or cause}")

        self._heartbeat.enter("waiting for the checkpoint's other parts", meeting=True)
        replies = gather_bytes(part.model_dump_json().encode(), self._group)
        if self._rank == 0:
            self._heartbeat.enter("completing a checkpoint")
            self._complete(
                minibatch, folder, [WorkerPart.model_validate_json(reply) for reply in replies]
            )

        self.seconds += time.perf_counter() - began_s

    def write_to(self, folder: Path, minibatch: int, *, keep: int) -> None:
        """Write to `folder` from now on, after `minibatch` minibatches, and keep so many
        checkpoints in it; all workers call it together.

        Raise InputError where it has checkpoints of another run.
        """
        before = self._job.checkpoints
        after = replace(before, checkpoint_folder=str(folder), checkpoint_every=1, keep=keep)
        if before.checkpoint_every is None or folder.resolve() != self.folder.resolve():
            self._move_to(folder)
            self.begin(minibatch)
        self._job = replace(self._job, checkpoints=after)

    def _move_to(self, folder: Path) -> None:
        """Leave the folder that was written to, if any, for another; all workers call it."""
        self._heartbeat.enter("looking for checkpoints", meeting=True)
        probe = self._probe(folder, self._token)
        if self._rank == 0:
            folders.check_continues(folder, self._known)
            self._take_folder(folder, probe)
            if self._log is not None:
                unlock_folder(self.folder)
            self._log = RunLog(folder, self._job.run)

        self.folder = folder
        broadcast_bytes(b"", self._group)  # so that nobody looks before worker 0 has the folder
        self._check_shared(folder, probe)

    def check_last(self) -> None:
        """Raise PlannerError, at the end of the run, when its last checkpoint was not written."""
        if self._problem is not None:
            kept = "there is none"
            if self.newest is not None:
                kept = f"the newest is '{self.newest}'"
            problem = (
                f"the last checkpoint could not be written to '{self.folder}' "
                f"({self._problem}); {kept}"
            )
            raise PlannerError(problem, hint="make room and continue from the newest with `resume`")

    def _agree(self) -> tuple[str, Path | None]:
        self._heartbeat.enter("looking for checkpoints", meeting=True)
        options = self._job.checkpoints
        writes = options.checkpoint_every is not None
        chosen = b""
        if self._rank == 0:
            token = uuid.uuid4().hex[:8]
            found = folders.resolve(options.resume, self.folder, writes=writes)
            chosen = json.dumps([token, None if found is None else str(found)]).encode()
            if writes:
                self._take_folder(self.folder, self._probe(self.folder, token))

        token, resume = json.loads(broadcast_bytes(chosen, self._group))
        if writes:
            self._check_shared(self.folder, self._probe(self.folder, token))
        return token, None if resume is None else Path(resume)

    def _probe(self, folder: Path, token: str) -> Path:
        """Return the folder by which all workers see whether they share a file system."""
        return folder / folders.partial_name(folders.PROBE, token)

    def _take_folder(self, folder: Path, probe: Path) -> None:
        """Lock a folder of checkpoints for this run, and write the probe to it.

        Raise PlannerError where that cannot be done.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_folder(folder, self._job.run)
            folders.remove_leftovers(folder)
            probe.mkdir()
        except OSError as cause:
            raise PlannerError(
                f"checkpoints cannot be written to '{folder}': {cause.strerror}",
                hint="choose another `checkpoint_folder`",
            ) from None

    def _check_shared(self, folder: Path, probe: Path) -> None:
        """Raise InputError on a worker that does not see what worker 0 has written."""
        deadline = time.monotonic() + NFS_REMEMBERS_S
        while not probe.exists():
            if time.monotonic() >= deadline:
                raise InputError(
                    f"worker {self._rank} on '{os.uname().nodename}' does not see what worker 0 "
                    f"writes to '{folder.absolute()}'",
                    hint="choose a `checkpoint_folder` on a file system that all hosts share",
                )
            time.sleep(0.2)

        dist.barrier(self._group)  # all have looked before the probe goes
        if self._rank == 0:
            probe.rmdir()

    def _complete(self, minibatch: int, folder: Path, replies: list[WorkerPart]) -> None:
        self._problem = next(
            (reply.problem for reply in replies if reply.problem is not None), None
        )
        assert self._log is not None
        evaluations = [evaluation for reply in replies for evaluation in reply.evaluations]
        self._log.note(merge_losses(reply.losses for reply in replies), evaluations)
        if self._problem is None:
            try:
                self._log.append(minibatch)
                self.newest = self._publish(
                    minibatch, folder, [part for reply in replies for part in reply.parts]
                )
                self._known.add(self.newest.resolve())
            except OSError as cause:
                self._problem = f"worker 0: {cause.strerror or cause}"
            except PlannerError as cause:
                self._problem = cause.message

        if self._problem is None:
            folders.prune(self.folder, self._job.checkpoints.keep)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            what = (
                f"the checkpoint after minibatch {minibatch} could not be written to "
                f"'{self.folder}' ({self._problem})"
            )
            _log.warning("%s; training continues, and older checkpoints are kept", what)

    def _publish(self, minibatch: int, folder: Path, parts: list[folders.StagePart]) -> Path:
        # The order matters. Workers synced their files before they reported; the index and the
        # names in the folder are synced before the rename, so that after a crash no complete name
        # stands for missing content. The parent is synced last: only then does the new name itself
        # outlive a crash, and older checkpoints may be removed.
        index = replace(
            index_of(self._job, self._data, minibatch, parts),
            sequence=folders.next_sequence(self.folder),
        )
        folders.save_index(folder, index)
        folders.sync_folder(folder)
        return folders.publish(folder, index)


def index_of(
    job: Job, data: DataPosition, minibatch: int, parts: Sequence[folders.StagePart]
) -> folders.Checkpoint:
    """Return the index of a checkpoint after `minibatch` minibatches."""
    plan = job.plan
    assert plan.graph_hash is not None
    return folders.Checkpoint(
        tool=__version__,
        torch=torch.__version__,
        model=plan.model,
        graph_hash=plan.graph_hash,
        config=plan.config,
        schedule=plan.schedule.name,
        seed=job.seed,
        minibatch=minibatch,
        minibatch_size=data.minibatch_size,
        minibatches_per_epoch=data.minibatches_per_epoch,
        samples=data.samples,
        order=data.order,
        fed=data.fed,
        layers=tuple(stage.layers for stage in plan.stages),
        parts=tuple(sorted(parts, key=lambda part: (part.stage, part.replica))),
    )


def position(saved: folders.SavedCheckpoint, data: DataPosition) -> int:
    """Return the minibatch that comes next, in minibatches of `data`; raise InputError when the
    data has changed.

    If their size has, the run continues in the same epoch at the next whole minibatch: no sample is
    seen twice.
    """
    _check_samples(saved, data)
    _check_order(saved, data)
    index = saved.index
    if index.minibatch_size == data.minibatch_size:
        return index.minibatch
    if index.minibatches_per_epoch is None or data.minibatches_per_epoch is None:
        return -(-index.minibatch * index.minibatch_size // data.minibatch_size)
    epochs, rest = divmod(index.minibatch, index.minibatches_per_epoch)
    within = -(-rest * index.minibatch_size // data.minibatch_size)
    return epochs * data.minibatches_per_epoch + min(within, data.minibatches_per_epoch)


def _check_samples(saved: folders.SavedCheckpoint, data: DataPosition) -> None:
    """Raise InputError when the data have other samples than those of a checkpoint."""
    index = saved.index
    then, now = index.minibatches_per_epoch, data.minibatches_per_epoch
    place = f"the run of the checkpoint '{saved.path}'"
    hint = "resume with the data that the run began with"
    if None not in (index.samples, data.samples) and index.samples != data.samples:
        problem = f"dataset() has {data.samples} samples, but had {index.samples} in {place}"
        raise InputError(problem, hint=hint)

    same_size = index.minibatch_size == data.minibatch_size
    if (then is None) == (now is None) and (then == now or not same_size):
        return
    if index.fed:
        problem = f"dataset() has {now} minibatches, but a script handed in those of {place}"
        raise InputError(problem, hint="resume in that script, with `Pipeline.load_checkpoint`")
    if data.fed:
        problem = f"a script hands in the minibatches, but dataset() had {then} in {place}"
        raise InputError(problem, hint="resume with `plan train`, or with `planner.train`")

    problem = f"dataset() has {now or 'no'} minibatches, but had {then or 'none'} in {place}"
    raise InputError(problem, hint=hint)


def _check_order(saved: folders.SavedCheckpoint, data: DataPosition) -> None:
    """Raise InputError when samples would come in another order than in the run of a checkpoint.

    Where it depends on the minibatches' size, these may change between two epochs.
    """
    index = saved.index
    # no samples: without a dataset, or of a version that did not note the order
    if index.samples is None or index.minibatches_per_epoch is None or index.order == data.order:
        return
    place = f"the run of the checkpoint '{saved.path}'"
    if index.minibatch_size == data.minibatch_size:
        problem = f"the samples of dataset() come in another order than in {place}"
        raise InputError(
            problem,
            hint="resume with the sampler() and the microbatches that the run began with",
        )

    if index.minibatch % index.minibatches_per_epoch:
        problem = (
            f"with minibatches of {data.minibatch_size} samples sampler() gives another order than "
            f"with those of {index.minibatch_size} in {place}, which is in the middle of an epoch"
        )
        raise InputError(
            problem,
            hint=f"resume with a plan for minibatches of {index.minibatch_size} samples, until the "
            "epoch ends",
        )
