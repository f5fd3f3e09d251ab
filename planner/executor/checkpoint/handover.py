"""Hand the state of a run over to another plan, from worker to worker and without a disk.

The way is that of runs that lose hosts. Each worker writes the files of its stages into the memory
of its host, hosts send each other what their workers lack, and each worker restores its stages of
the new plan from these files, which are those of a checkpoint. So a run that changes its plan does
what one does that stops with a checkpoint and resumes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from planner.executor.checkpoint.checkpointer import DataPosition, WorkerPart, index_of
from planner.executor.checkpoint.folders import STEP, Checkpoint, SavedCheckpoint
from planner.executor.checkpoint.host_memory import (
    HostMemory,
    Transfer,
    allocate,
    exchange_files,
    files_of,
    missing_files,
)
from planner.executor.checkpoint.stage_parts import (
    Restorable,
    content_of,
    restore_stage,
    write_part,
)
from planner.executor.communication.control import control_group, share
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.place import own_seat


@dataclass(frozen=True)
class Handover:
    """The state of a run in the memories of its hosts, on its way to another plan."""

    memory: HostMemory
    saved: SavedCheckpoint  # of this worker's stages under the new plan

    @property
    def minibatch(self) -> int:
        """Minibatches done."""
        return self.saved.index.minibatch

    def restore(self, job: Job, stages: Sequence[Restorable]) -> None:
        """Fill a worker's stages of the new plan."""
        self.saved.check_fits(job.plan, job.seed)
        for own in stages:
            restore_stage(own, self.saved)

    def finish(self) -> None:
        """Remove the files; all workers call it when they have restored their stages."""
        dist.barrier(control_group())
        if self.memory.leads:
            self.memory.remove()


def hand_over(
    job: Job,
    after: Plan,
    stages: Sequence[Restorable],
    data: DataPosition,
    minibatch: int,
    heartbeat: Heartbeat,
) -> Handover | str:
    """Bring the state after `minibatch` minibatches to where another plan needs it; return why that
    cannot be done where a host has no room. All workers call it, with empty pipelines.
    """
    group = control_group()
    heartbeat.enter("setting its state aside", meeting=True)
    token, servers = _agree(group)
    memory = HostMemory(Path(job.elastic.copy_folder) / f"planner-move-{token}")
    folder = memory.folder / f"{STEP}{minibatch:08}"

    # 1. Write what this worker has.
    written = _written(memory, folder, stages)
    reports = [
        WorkerPart.model_validate_json(text) for text in share(written.model_dump_json(), group)
    ]
    problems = [report.problem for report in reports if report.problem]

    # 2. Bring each host what its workers lack.
    index = index_of(job, data, minibatch, [part for each in reports for part in each.parts])
    transfers = _transfers(index, reports, servers, after)
    problem = ""
    try:
        allocate(folder, [] if problems else transfers)
    except OSError as cause:
        problem = f"worker {dist.get_rank()}: {cause.strerror or cause}"
    problems += filter(None, share(problem, group))
    if problems:
        if memory.leads:
            memory.remove()
        return max(problems)
    moves = partial(heartbeat.enter, "fetching the state from other hosts")
    exchange_files(folder, transfers, group, moves)
    dist.barrier(group)

    layers = _layers(after, [dist.get_rank()])
    return Handover(memory, SavedCheckpoint(folder, replace(index, parts=index.parts_with(layers))))


def _agree(group: dist.ProcessGroup) -> tuple[str, list[int]]:
    """Return a name for this handover, and the servers of all workers."""
    told = [json.loads(text) for text in share(json.dumps([uuid4().hex, own_seat().server]), group)]
    return told[0][0], [server for _, server in told]


def _written(memory: HostMemory, folder: Path, stages: Sequence[Restorable]) -> WorkerPart:
    # Before anything can fail, because ranks that divide a stage's weights gather them together.
    contents = [(own, content_of(own)) for own in stages]
    nothing = WorkerPart(losses="[]", evaluations=())
    try:
        memory.make()
        folder.mkdir(parents=True, exist_ok=True)
        parts = tuple(
            write_part(folder, own, content) for own, content in contents if content is not None
        )
    except OSError as cause:
        return replace(nothing, problem=f"worker {dist.get_rank()}: {cause.strerror or cause}")
    return replace(nothing, parts=parts)


def _transfers(
    index: Checkpoint, reports: Sequence[WorkerPart], servers: Sequence[int], after: Plan
) -> list[Transfer]:
    """Return the files that hosts lack for the stages that their workers will hold."""
    leaders = {server: rank for rank, server in reversed([*enumerate(servers)])}
    holders: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in files_of(report.parts):
            holders.setdefault(name, []).append(leaders[servers[rank]])

    wanted = {}
    for server, leader in leaders.items():
        ranks = [rank for rank, own in enumerate(servers) if own == server]
        files = files_of(index.parts_with(_layers(after, ranks)))
        wanted[leader] = {name: file.size_bytes for name, file in files.items()}
    return list(missing_files(wanted, lambda name, _: holders[name]))


def _layers(plan: Plan, ranks: Sequence[int]) -> set[str]:
    """Return the layers that any of these workers holds."""
    return {layer for stage in plan.stages if {*ranks} & {*stage.ranks} for layer in stage.layers}
