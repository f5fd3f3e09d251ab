"""Hand the state of a run over to another plan, from worker to worker and without a disk.

A stage that stays on its workers keeps its tensors: `planner.executor.checkpoint.staying`. For all
others the way is that of runs that lose hosts. Each worker writes the files of its stages into the
memory of its host, hosts send each other what their workers lack, and each worker restores its
stages of the new plan from these files, which are those of a checkpoint. So a run that changes its
plan does what one does that stops with a checkpoint and resumes.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from planner.executor.checkpoint.checkpointer import DataPosition, WorkerPart, index_of
from planner.executor.checkpoint.folders import Checkpoint, SavedCheckpoint
from planner.executor.checkpoint.host_memory import (
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
from planner.executor.checkpoint.staying import StayingStage, take_staying
from planner.executor.communication.control import control_group, share
from planner.formats.files import replace
from planner.formats.held_folder import held_folder
from planner.formats.plan import Plan
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.place import own_seat


@dataclass(frozen=True)
class Handover:
    """The state of a run in the memories of its hosts, on its way to another plan."""

    saved: SavedCheckpoint  # of this worker's stages under the new plan
    staying: dict[int, StayingStage]  # of which no file has anything, by their new numbers
    held: ExitStack  # removes the files of this host, where this worker made their folder

    @property
    def minibatch(self) -> int:
        """Minibatches done."""
        return self.saved.index.minibatch

    def restore(self, job: Job, stages: Sequence[Restorable]) -> None:
        """Fill a worker's stages of the new plan."""
        self.saved.check_fits(job.plan, job.seed)
        for own in stages:
            if own.stage in self.staying:
                # One after the other, so that the old weights of one stage at a time are there.
                self.staying.pop(own.stage).restore(own)
            else:
                restore_stage(own, self.saved)

    def finish(self) -> None:
        """Remove the files; all workers call it when they have restored their stages."""
        dist.barrier(control_group())
        self.held.close()


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
    held = ExitStack()
    servers = [int(text) for text in share(str(own_seat().server), group)]
    folder = _folder(Path(job.elastic.copy_folder), servers, held, group)

    # 1. Write what this worker has, but for stages that stay.
    staying, leaving = take_staying(job.plan, after, stages)
    written = _written(folder, leaving)
    reports = [
        WorkerPart.model_validate_json(text) for text in share(written.model_dump_json(), group)
    ]
    problems = [report.problem for report in reports if report.problem]

    # 2. Bring each host what its workers lack.
    index = index_of(job, data, minibatch, [part for each in reports for part in each.parts])
    transfers = [] if problems else _transfers(index, reports, servers, after)
    problem = ""
    try:
        if folder is not None:
            allocate(folder, transfers)
    except OSError as cause:
        problem = f"worker {dist.get_rank()}: {cause.strerror or cause}"

    problems += filter(None, share(problem, group))
    if problems or folder is None:
        held.close()
        return max(problems)

    moves = partial(heartbeat.enter, "fetching the state from other hosts")
    exchange_files(folder, transfers, group, moves)
    dist.barrier(group)

    layers = _layers(after, [dist.get_rank()])
    parts = replace(index, parts=index.parts_with(layers))
    return Handover(SavedCheckpoint(folder, parts), staying, held)


def _folder(
    place: Path, servers: Sequence[int], held: ExitStack, group: dist.ProcessGroup
) -> Path | None:
    """Return the folder of this host, which its first worker makes; None where it could not."""
    rank = dist.get_rank()
    leader = servers.index(servers[rank])
    made = ""
    if leader == rank:
        with suppress(OSError):  # told by all workers of the host, which have no folder then
            made = str(held.enter_context(held_folder("move", place)))
    folder = share(made, group)[leader]
    return Path(folder) if folder else None


def _written(folder: Path | None, stages: Sequence[Restorable]) -> WorkerPart:
    """Write this worker's part of its stages, and report what was written, or what went wrong."""
    # Before anything can fail, because ranks that divide a stage's weights gather them together.
    contents = [(own, content_of(own)) for own in stages]

    nothing = WorkerPart(losses="[]", evaluations=())
    rank = dist.get_rank()
    if folder is None:
        return replace(nothing, problem=f"worker {rank}: no folder can be made for it")

    parts = []
    try:
        for own, content in contents:
            if content is not None:
                parts.append(write_part(folder, own, content))
    except OSError as cause:
        return replace(nothing, problem=f"worker {rank}: {cause.strerror or cause}")

    return replace(nothing, parts=tuple(parts))


def _transfers(
    index: Checkpoint, reports: Sequence[WorkerPart], servers: Sequence[int], after: Plan
) -> list[Transfer]:
    """Return the files that hosts lack for the stages that their workers will hold.

    A host is named by the first of its workers.
    """
    workers: dict[int, list[int]] = {}
    for rank, server in enumerate(servers):
        workers.setdefault(servers.index(server), []).append(rank)

    holders: dict[str, list[int]] = {}
    wanted: dict[int, dict[str, int]] = {}
    for host, ranks in workers.items():
        for rank in ranks:
            for name in files_of(reports[rank].parts):
                holders.setdefault(name, []).append(host)

        files = files_of(index.parts_with(_layers(after, ranks)))
        wanted[host] = {name: file.size_bytes for name, file in files.items()}

    return list(missing_files(wanted, lambda name, _: holders[name]))


def _layers(plan: Plan, ranks: Sequence[int]) -> set[str]:
    """Return the layers that any of these workers holds."""
    layers: set[str] = set()
    for stage in plan.stages:
        if not set(ranks).isdisjoint(stage.ranks):
            layers.update(stage.layers)
    return layers
