"""Copies of a run's state in the memories of its hosts, made every N minibatches while training
goes on.

At the end of a segment each worker sets its state aside, and a thread does the rest: it writes the
files of a checkpoint into the memory of its host, and sends those that no other host has to the
next host. Replicas on other hosts have the same weights and optimizer state, and write them
themselves. When all files are in place on all hosts, each host writes the index, and only then
removes the copy before. So after the loss of any one host either some host that is left has the new
index, and then all files of the new copy are left, or none has, and then the copy before is.
"""

import json
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import InputError
from planner.executor.checkpoint.checkpointer import DataPosition, Keeper, WorkerPart, index_of
from planner.executor.checkpoint.folders import STEP
from planner.executor.checkpoint.host_memory import (
    FOR_EVER,
    Transfer,
    allocate,
    exchange_files,
    files_of,
)
from planner.executor.checkpoint.recovery import Recovery, describe, tell_end
from planner.executor.checkpoint.stage_parts import Content, Restorable, content_of, write_part
from planner.executor.communication.control import merge_losses, share
from planner.executor.observe.run_log import NOTHING, Past, RunLog
from planner.formats.files import replace
from planner.formats.late import LateFailure, log_failures, noting
from planner.units import format_bytes
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job

_Contents = list[tuple[Restorable, Content]]
_AT_A_TIME = 2  # copies that a host holds: a whole one, and the next one while it is made
_log = logging.getLogger(__name__)


class Copies(Keeper):
    """This worker's part in copies."""

    def __init__(
        self,
        job: Job,
        stages: list[Restorable],
        data: DataPosition,
        heartbeat: Heartbeat,
        recovery: Recovery,
    ) -> None:
        super().__init__(job, stages, data, heartbeat, FOR_EVER)
        self._recovery = recovery
        self._memory = recovery.memory
        self.saved = recovery.saved
        self._hosts = recovery.servers[: job.plan.workers]
        if self._memory.leads:
            self._log = RunLog(self._memory.folder, job.run)
        self._set_aside: dict[tuple[int, int, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._moved = threading.Event()  # set for every piece of a file
        self.events = recovery.start.events
        self._check_room()

    def begin(self, first: int, known: Past = NOTHING) -> Past:
        """Begin to log the run as a checkpointer does, on every host, and tell what happened."""
        # Worker 0 knows what the log beside checkpoints has, and says how long it took by its
        # clock.
        line = ""
        if self._rank == 0:
            line = describe(self._recovery, first, self._job)
        line, text = json.loads(share(json.dumps([line, known.model_dump_json()]), self._group)[0])
        if line:
            self.events = (*self.events, line)
            if self._rank == 0:
                _log.warning("%s", line)

        if self._memory.leads:
            self._memory.note(replace(self._recovery.start, first=first, events=self.events))
        return super().begin(first, Past.model_validate_json(text))

    def save(
        self, minibatch: int, losses: Sequence[tuple[int, float]], evaluations: Sequence[Evaluation]
    ) -> None:
        """Set the state after `minibatch` minibatches aside, and let a thread copy it; wait for the
        copy before.
        """
        self._wait()
        self._heartbeat.enter("setting its state aside")
        contents = _Contents()
        twins = _Contents()
        for own in self._stages:
            if (content := content_of(own)) is not None:
                contents.append((own, self._aside(own, content)))
            if self._has_twin(own) and (content := content_of(replace(own, replica=0))) is not None:
                twins.append((replace(own, replica=0), self._aside(own, content)))

        self._moved.set()
        made = (minibatch, contents, twins, self._report(losses, evaluations))
        self._thread = threading.Thread(target=self._copy, args=made, name="copies", daemon=True)
        self._thread.start()

    def go_on_with(self, job: Job, stages: list[Restorable]) -> None:
        """See base class. The copy under way is of the plan before, so it comes to its end
        first.
        """
        self._wait()
        super().go_on_with(job, stages)
        self._set_aside.clear()

    def finish(self) -> None:
        """End with the run, whose state needs no copy any more: that the last one failed is worth a
        warning.
        """
        failures: list[LateFailure] = []
        with noting(failures, asked=False):
            self._wait()
        log_failures(failures, _log)
        self._heartbeat.enter("waiting for the last copies", meeting=True)
        dist.barrier(self._group)
        if self._rank == 0:
            tell_end(self._recovery.store, len(self._recovery.servers) - len(self._hosts))

    def _wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            if self._moved.is_set():  # a hang must show
                self._moved.clear()
                self._heartbeat.enter("waiting for the copy before")
            self._thread.join(1.0)
        if self._error is not None:
            raise self._error

    def _has_twin(self, own: Restorable) -> bool:
        """Whether this worker writes what the first replica does: it is the first one on its host,
        another one.
        """
        stage = self._job.plan.stages[own.stage]
        firsts = {self._hosts[rank]: rank for rank in reversed(stage.ranks)}
        alike = (
            not stage.divides_layers
            and not stage.shards_optimizer
            and not any(True for _ in own.module.buffers())
        )
        return alike and self._rank in firsts.values() and self._rank != stage.ranks[0]

    def _aside(self, own: Restorable, content: Content) -> Content:
        """Copy tensors to memory of the CPU, which is used again for the next copy; tied ones,
        which are one, once.
        """
        copied: dict[tuple[object, ...], Tensor] = {}

        def aside(name: str, tensor: Tensor) -> Tensor:
            same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if same not in copied:
                held = self._set_aside.get((own.stage, own.replica, name))
                if held is None or held.stride() != tensor.stride():
                    held = torch.empty_like(tensor, device="cpu")
                    self._set_aside[own.stage, own.replica, name] = held
                copied[same] = held.copy_(tensor.detach())
            return copied[same]

        weights = {name: aside(name, tensor) for name, tensor in content.weights.items()}
        tensors = {
            name: aside(f"optimizer {name}", tensor)
            for name, tensor in content.optimizer_tensors.items()
        }
        return content._replace(weights=weights, optimizer_tensors=tensors)

    def _copy(
        self, minibatch: int, contents: _Contents, twins: _Contents, written: WorkerPart
    ) -> None:
        try:
            name = f"{STEP}{minibatch:08}-{self._recovery.start.number:04}"
            self._make(self._memory.folder / name, minibatch, contents, twins, written)
        # the main thread raises it; a lost peer it has met itself by then
        except Exception as error:
            self._error = error

    def _make(
        self,
        folder: Path,
        minibatch: int,
        contents: _Contents,
        twins: _Contents,
        written: WorkerPart,
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            parts = tuple(write_part(folder, *content) for content in contents)
            same = tuple(write_part(folder, *content) for content in twins)
            written = replace(written, parts=parts, twins=same)
        except OSError as cause:
            written = replace(written, problem=f"worker {self._rank}: {cause.strerror or cause}")

        reports = [
            WorkerPart.model_validate_json(text)
            for text in share(written.model_dump_json(), self._group)
        ]
        problems = [report.problem for report in reports if report.problem]
        transfers = [] if problems else self._transfers(reports)
        problem = ""
        try:
            allocate(folder, transfers)
        except OSError as cause:
            problem = f"worker {self._rank}: {cause.strerror or cause}"

        problems += filter(None, share(problem, self._group))

        if self._log is not None:
            evaluations = [evaluation for report in reports for evaluation in report.evaluations]
            self._log.note(merge_losses(report.losses for report in reports), evaluations)
        if problems:
            self._discard(folder, minibatch, max(problems))
            return

        exchange_files(folder, transfers, self._group, self._moved.set)
        dist.barrier(self._group)
        if self._log is not None:
            self._log.append(minibatch)
            self._complete(folder, minibatch, reports)

    def _complete(self, folder: Path, minibatch: int, reports: Sequence[WorkerPart]) -> None:
        """Make a copy of which all files are here and on the next host the one to go on from."""
        parts = [part for report in reports for part in report.parts]
        self._memory.complete(folder.name, index_of(self._job, self._data, minibatch, parts))
        self._memory.keep([folder.name])
        if self._recovery.known is not None:
            self._recovery.known.tell(self._memory)

    def _discard(self, folder: Path, minibatch: int, problem: str) -> None:
        """Remove what there is of a copy that some host could not write; the one before is kept."""
        if not self._memory.leads:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if self._rank == 0:
            _log.warning(
                "the state after minibatch %d could not be copied to memory (%s); training "
                "continues, and the copy before is kept",
                minibatch,
                problem,
            )

    def _transfers(self, reports: Sequence[WorkerPart]) -> list[Transfer]:
        """Return what is to be sent: the files that only one host has, each to the next host."""
        hosts = list(dict.fromkeys(self._hosts))
        after = dict(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
        twins = {
            (file.name, file.sha256)
            for report in reports
            for file in files_of(report.twins).values()
        }
        found = list[Transfer]()
        if len(hosts) == 1:
            return found

        for sender, report in enumerate(reports):
            next_host = after[self._hosts[sender]]
            receivers = [rank for rank, host in enumerate(self._hosts) if host == next_host]
            receiver = receivers[sender % len(receivers)]
            for file in files_of(report.parts).values():
                if (file.name, file.sha256) not in twins:
                    found.append(Transfer(file.name, file.size_bytes, sender, receiver))

        return found

    def _own_bytes(self) -> int:
        """Return the bytes of this worker's weights, buffers and optimizer."""
        total = 0
        for own in self._stages:
            total += sum(tensor.nbytes for tensor in own.module.state_dict().values())
            total += self._job.plan.stages[own.stage].memory.optimizer_bytes
        return total

    def _check_room(self) -> None:
        """Raise InputError for a host without memory for its own state and the copy of another
        host's.
        """
        self._memory.folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self._memory.folder).free
        # Copies that are there make room for the next ones.
        free_bytes += sum(sum(files.values()) for files in self._memory.copies().values())

        state = Counter[int]()
        free = dict[int, int]()
        texts = share(json.dumps([self._own_bytes(), free_bytes]), self._group)
        for host, text in zip(self._hosts, texts, strict=True):
            own_bytes, free[host] = json.loads(text)
            state[host] += own_bytes

        # whose copies this host receives
        for host, before in zip(state, [*state][-1:] + [*state][:-1], strict=True):
            needed = _AT_A_TIME * sum(state[each] for each in {host, before})
            if needed > free[host]:
                what = (
                    f"copies of the state take {format_bytes(needed)} of "
                    f"'{self._job.elastic.copy_folder}'"
                )
                hint = "choose another `copy_folder`; one on a disk is slower, and does"
                raise InputError(
                    f"{what} on host {host}, which has {format_bytes(free[host])} left", hint=hint
                )
