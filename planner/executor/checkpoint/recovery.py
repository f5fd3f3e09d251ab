"""Begin a run that may lose hosts, or go on with it: agree on the newest state that is left, and bring it in place.

All workers that were started do so before they build anything, also those that the plan leaves idle. Whoever has a copy
of a state tells its files. The newest state of which all files are on some host is the one to go on from; each host
then gets the files of the stages that its workers will hold. No copy at all is the beginning of the run.
"""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from planner.errors import InputError, WorkerError
from planner.executor.checkpoint.folders import INDEX, SavedCheckpoint
from planner.executor.checkpoint.host_memory import (
    FOR_EVER,
    CopyIndex,
    Fault,
    HostMemory,
    Start,
    Transfer,
    allocate,
    exchange_files,
    files_of,
)
from planner.executor.communication.control import control_group, join_group, message_timeout, share
from planner.executor.observe.run_log import FILE as LOSSES
from planner.formats.files import Record
from planner.workers.ending import GRACE_S
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.meeting import exchange, worker_store
from planner.workers.place import own_seat
from planner.workers.watch import cause_in, own_keys

_TRIES = 5  # starts in a row that may end before the next copy
_ENDED, _LEFT = "elastic/ended", "elastic/left"
_IDLE_S = 0.2


class _Held(Record):
    """What a host has in its memory."""

    identity: str
    name: str
    copies: dict[str, dict[str, int]]  # bytes of files, by copy and name
    last: Start | None
    fault: Fault | None


@dataclass(frozen=True)
class Recovery:
    """Where a start begins, and what happened before it."""

    memory: HostMemory
    start: Start  # its first minibatch and its newest event are known when the state has been read
    what: str  # happened; empty at the first start
    since_s: float | None  # since the epoch: when it was noticed
    saved: SavedCheckpoint | None  # of this worker's stages
    idle: int  # workers that the plan has no use for


def recover(job: Job, heartbeat: Heartbeat) -> Recovery:
    """Meet all workers, choose the state to go on from, and bring its files to the hosts that need them.

    Raise InputError when the run does not get on: then a further start would not help.
    """
    memory, timeout = HostMemory.of(job), message_timeout(job.run_options.hang_timeout_s)
    heartbeat.enter("meeting the other hosts", meeting=True)
    seats = exchange(worker_store(timeout), own_seat())
    join_group(FOR_EVER)
    group, rank = control_group(), dist.get_rank()
    heartbeat.enter("looking for copies of the state", meeting=True)
    own = ""
    if memory.leads:
        identity, name = memory.identity()
        last, fault = memory.last_start(), memory.take_fault()
        held = _Held(identity=identity, name=name, copies=memory.copies(), last=last, fault=fault)
        own = held.model_dump_json()
    by_leader = {n: _Held.model_validate_json(text) for n, text in enumerate(share(own, group)) if text}
    chosen, index = _choose(memory, by_leader, group)
    saved = None
    if chosen is not None and index is not None:
        leader_of = {seat.server: n for n, seat in enumerate(seats) if n in by_leader}
        wanted = dict[int, set[str]]()  # layers, by leader
        for stage in job.plan.stages:
            for each in stage.ranks:
                wanted.setdefault(leader_of[seats[each].server], set()).update(stage.layers)
        have = {n: held.copies.get(chosen, {}) for n, held in by_leader.items()}
        transfers = [
            Transfer(name, file.size_bytes, _holder(name, file.size_bytes, have), leader)
            for leader, layers in sorted(wanted.items())
            for name, file in files_of(index.parts_with(layers)).items()
            if have[leader].get(name) != file.size_bytes
        ]
        heartbeat.enter("fetching the state from other hosts")
        allocate(memory.folder / chosen, transfers)
        moved = lambda: heartbeat.enter("fetching the state from other hosts")  # noqa: E731
        exchange_files(memory.folder / chosen, transfers, group, moved)
        _bring_records(memory, chosen, index, by_leader, group)
        layers = {layer for stage in job.plan.stages if rank in stage.ranks for layer in stage.layers}
        parts = index.checkpoint.model_copy(update={"parts": index.parts_with(layers)})
        saved = SavedCheckpoint(memory.folder / chosen, parts)
    start, what, since_s = _history(by_leader.values(), 0 if index is None else index.checkpoint.minibatch)
    dist.barrier(group)
    dist.destroy_process_group()
    idle = int(os.environ["WORLD_SIZE"]) - job.plan.workers
    os.environ["WORLD_SIZE"] = str(job.plan.workers)
    return Recovery(memory, start, what, since_s, saved, idle)


def _choose(
    memory: HostMemory, by_leader: Mapping[int, _Held], group: dist.ProcessGroup
) -> tuple[str | None, CopyIndex | None]:
    """Return the newest copy of which all files are left, with its index."""
    telling: dict[str, int] = {}  # by copy: the worker that tells its index
    for rank, held in sorted(by_leader.items()):
        telling |= {name: rank for name, files in held.copies.items() if INDEX in files and name not in telling}
    own = {name: memory.index(name) for name, rank in telling.items() if rank == dist.get_rank()}
    indices = {name: text for each in share(json.dumps(own), group) for name, text in json.loads(each).items()}
    have = {rank: held.copies for rank, held in by_leader.items()}
    for name in sorted(indices, reverse=True):
        index = CopyIndex.model_validate_json(indices[name])
        of_copy = {rank: copies.get(name, {}) for rank, copies in have.items()}
        files = files_of(index.checkpoint.parts).values()
        if all(any(each.get(file.name) == file.size_bytes for each in of_copy.values()) for file in files):
            return name, index
    return None, None


def _holder(name: str, size_bytes: int, have: Mapping[int, Mapping[str, int]]) -> int:
    return next(rank for rank, files in sorted(have.items()) if files.get(name) == size_bytes)


def _bring_records(
    memory: HostMemory, chosen: str, index: CopyIndex, by_leader: Mapping[int, _Held], group: dist.ProcessGroup
) -> None:
    """Give all hosts the index and the losses of the copy, and remove what was written after it."""
    source = next(rank for rank, held in sorted(by_leader.items()) if INDEX in held.copies.get(chosen, {}))
    own = (memory.folder / LOSSES).read_text(encoding="utf-8") if dist.get_rank() == source else ""
    losses = share(own, group)[source]
    if memory.leads:
        (memory.folder / chosen).mkdir(exist_ok=True)
        (memory.folder / LOSSES).write_text(losses, encoding="utf-8")
        (memory.folder / chosen / INDEX).write_text(index.model_dump_json(), encoding="utf-8")
        memory.keep([name for name in memory.copies() if name <= chosen])


def _history(hosts: Collection[_Held], first: int) -> tuple[Start, str, float | None]:
    """Say what happened since the last start, and when; raise InputError when nothing is gained by another start."""
    now = {held.identity: held.name for held in hosts}
    last = max((held.last for held in hosts if held.last is not None), key=lambda each: each.number, default=None)
    if last is None:
        return Start(hosts=now, first=first), "", None
    faults = sorted((held.fault for held in hosts if held.fault is not None), key=lambda fault: fault.at_s)
    cause = f" ({faults[0].message})" if faults else ""
    lost = [name for identity, name in last.hosts.items() if identity not in now]
    came = [name for identity, name in now.items() if identity not in last.hosts]
    what = f"lost {_hosts(lost)}{cause}" if lost else f"the workers were started again{cause}"
    if came:
        what = f"{what}, took in {_hosts(came)}" if lost or faults else f"took in {_hosts(came)}"
    vain = last.vain + 1 if first == last.first and now == last.hosts else 0
    if vain >= _TRIES:
        problem = f"the last {_TRIES} starts ended before the first copy after minibatch {first}{cause}"
        raise InputError(problem, hint="look for the reason there, or copy more often with a smaller `copy_every`")
    start = Start(number=last.number + 1, hosts=now, first=first, events=last.events, vain=vain)
    return start, what, faults[0].at_s if faults else None


def _hosts(names: Sequence[str]) -> str:
    return f"host{'s' * (len(names) > 1)} {', '.join(sorted(names))}"


def describe(recovery: Recovery, job: Job) -> str:
    """Return the line on what happened; empty at the first start."""
    if not recovery.what:
        return ""
    after = "" if recovery.since_s is None else f", {time.time() - recovery.since_s:.1f} s after that was noticed"
    goes_on = f"training goes on from minibatch {recovery.start.first} with the plan {job.plan.config}"
    return f"{recovery.what}: {goes_on}, {job.left}{after}"


def await_end(recovery: Recovery) -> None:
    """Wait, as a worker that the plan has no use for, until the others have trained; raise WorkerError if they fail."""
    store = worker_store(FOR_EVER)
    try:
        while not store.check([_ENDED]):
            if cause_in(own_keys(store)) is not None:
                raise WorkerError("another worker failed", hint="see its message")
            time.sleep(_IDLE_S)
        store.add(_LEFT, 1)
    except RuntimeError as cause:
        raise WorkerError("the first worker's store is gone", hint="see the other hosts' messages") from cause
    if recovery.memory.leads:
        recovery.memory.remove()


def tell_end(recovery: Recovery) -> None:
    """Let the idle workers end; worker 0 calls it at the end of the run, before its store closes."""
    store, deadline = worker_store(FOR_EVER), time.monotonic() + GRACE_S
    store.set(_ENDED, "")
    with suppress(RuntimeError):
        while store.add(_LEFT, 0) < recovery.idle and time.monotonic() < deadline:
            time.sleep(_IDLE_S)
