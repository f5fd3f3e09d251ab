"""Begin a run that may lose hosts, or go on with it: agree on the newest state that is left, and
bring it in place.

All workers that were started do so before they build anything, also those that the plan leaves
idle. Whoever has a copy of a state tells its files. The newest state of which all files are on some
host is the one to go on from; each host then gets the files of the stages that its workers will
hold. No copy at all is the beginning of the run.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import InputError
from planner.executor.checkpoint.folders import (
    Checkpoint,
    SavedCheckpoint,
    load_checkpoint,
    resolve,
)
from planner.executor.checkpoint.host_memory import (
    FOR_EVER,
    Fault,
    HostMemory,
    Start,
    Transfer,
    allocate,
    exchange_files,
    files_of,
    missing_files,
)
from planner.executor.checkpoint.known_copies import (
    CopyName,
    KnownCopies,
    await_holders,
    count_start,
    minibatch_of,
)
from planner.executor.communication.control import control_group, join_group, message_timeout, share
from planner.executor.observe.run_log import FILE as LOSSES
from planner.formats.files import Record, replace
from planner.plan.rank_groups import sample_parts
from planner.workers.ending import GRACE_S
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.meeting import exchange, worker_store
from planner.workers.place import own_seat

_TRIES = 5  # starts in a row that may end before the next copy
_ENDED = "elastic/ended"
_LEFT = "elastic/left"
_IDLE_S = 0.2
_Copies = Mapping[int, "_Held"]  # what hosts have, by the worker that speaks for each


class _Held(Record):
    """What a host has in its memory."""

    identity: str
    name: str
    place: str
    copies: dict[str, dict[str, int]]  # bytes of files, by copy and name
    indices: dict[CopyName, Checkpoint]  # of copies that were complete
    makers: dict[CopyName, Start]  # the starts that made them
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
    servers: Sequence[int]  # of all workers, also those that the plan has no use for
    store: Store  # of all workers: that of the group which trains has keys of its own
    known: KnownCopies | None  # what all hosts have told, where this worker speaks for its host


def recover(job: Job, heartbeat: Heartbeat) -> Recovery:
    """Meet all workers, choose the state to go on from, and bring its files to the hosts that need
    them.

    Where hosts that are not there have a newer one, wait for them first; when one comes, this
    process is ended.

    Raise InputError when the run does not get on: then a further start would not help.
    """
    memory = HostMemory.of(job)
    heartbeat.enter("meeting the other hosts", meeting=True)
    store = worker_store(message_timeout(job.run_options.hang_timeout_s))
    seats = exchange(store, own_seat())
    join_group(FOR_EVER)
    group = control_group()

    heartbeat.enter("looking for copies of the state", meeting=True)
    known = KnownCopies.of(job) if memory.leads else None
    hosts = _share_held(memory, known, group)
    chosen = _newest_left(hosts)
    places = [held.place for held in hosts.values()]
    lacking = await_holders(known, partial(_newest_minibatch, job, chosen), places, heartbeat)
    counted = count_start(known)

    servers = [seat.server for seat in seats]
    saved = None
    first = 0
    maker = None
    if chosen is not None:
        maker = next(
            (held.makers[chosen] for held in hosts.values() if chosen in held.makers), None
        )
        saved = _fetch(job, chosen, maker, hosts, servers, memory, heartbeat)
        first = saved.index.minibatch
        if known is not None:
            known.tell(memory)

    start, what, since_s = _history(hosts.values(), first, maker, counted)
    what = "; ".join(filter(None, (what, lacking)))
    dist.barrier(group)
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = str(job.plan.workers)
    return Recovery(memory, start, what, since_s, saved, servers, store, known)


def _share_held(memory: HostMemory, known: KnownCopies | None, group: dist.ProcessGroup) -> _Copies:
    """Return what each host has, once all have told it in the store of the run, too."""
    own = ""
    if known is not None:
        identity, name = memory.identity()
        held = _Held(
            identity=identity,
            name=name,
            place=memory.place,
            copies=memory.copies(),
            indices=memory.indices(),
            makers=memory.makers(),
            last=memory.read(Start),
            fault=memory.read(Fault),
        )
        known.tell(memory)
        if held.last is not None:
            known.tell_of_others(memory, held.last)
        own = held.model_dump_json()

    return {
        rank: _Held.model_validate_json(text) for rank, text in enumerate(share(own, group)) if text
    }


def _newest_left(hosts: _Copies) -> str | None:
    """Return the newest copy of which these hosts have all files."""
    indices = {name: index for held in hosts.values() for name, index in held.indices.items()}
    return next(
        (name for name in sorted(indices, reverse=True) if _is_left(name, indices[name], hosts)),
        None,
    )


def _newest_minibatch(job: Job, chosen: str | None) -> int:
    """Return the minibatch with which a start begins: that of a copy, or of the checkpoint on disk
    if it is newer.
    """
    options = job.checkpoints
    path = None
    if options.checkpoint_every is not None or options.resume is not None:
        path = resolve(
            options.resume,
            Path(options.checkpoint_folder),
            writes=options.checkpoint_every is not None,
        )
    on_disk = 0
    if path is not None:
        index = load_checkpoint(path).index
        # Copies count minibatches of the plan's size. There are no data yet, whose epochs may end
        # with smaller ones.
        each = job.plan.minibatch_size
        size = index.minibatch_size if each is None else each * sample_parts(job.plan)
        on_disk = -(-index.minibatch * index.minibatch_size // size)
    return max(on_disk, 0 if chosen is None else minibatch_of(chosen))


def _fetch(
    job: Job,
    chosen: str,
    maker: Start | None,
    hosts: _Copies,
    servers: Sequence[int],
    memory: HostMemory,
    heartbeat: Heartbeat,
) -> SavedCheckpoint:
    """Bring the files of a copy to the hosts that need them; return those of this worker's
    stages.
    """
    rank = dist.get_rank()
    index = next(held.indices[chosen] for held in hosts.values() if chosen in held.indices)
    leaders = {servers[leader]: leader for leader in hosts}
    wanted = dict[int, set[str]]()  # layers of each host
    for stage in job.plan.stages:
        for member in stage.ranks:
            wanted.setdefault(leaders[servers[member]], set()).update(stage.layers)

    transfers = list(_missing(chosen, index, wanted, hosts))
    moves = partial(heartbeat.enter, "fetching the state from other hosts")
    moves()
    allocate(memory.folder / chosen, transfers)
    exchange_files(memory.folder / chosen, transfers, control_group(), moves)
    if memory.leads and rank in wanted:
        memory.go_on_from(chosen, index, maker)

    layers = {layer for stage in job.plan.stages if rank in stage.ranks for layer in stage.layers}
    parts = replace(index, parts=index.parts_with(layers))
    return SavedCheckpoint(memory.folder / chosen, parts)


def _is_left(copy: str, index: Checkpoint, hosts: _Copies) -> bool:
    files = files_of(index.parts).values()
    return all(_having(hosts, copy, file.name, file.size_bytes) for file in files)


def _having(hosts: _Copies, copy: str, file: str, size_bytes: int) -> list[int]:
    """Return who speaks for the hosts that have a file of a copy, all of it."""
    return [
        rank
        for rank, held in sorted(hosts.items())
        if held.copies.get(copy, {}).get(file) == size_bytes
    ]


def _missing(
    copy: str, index: Checkpoint, wanted: Mapping[int, set[str]], hosts: _Copies
) -> Iterator[Transfer]:
    """Yield the files that hosts lack for the layers that they are to have, and the losses."""
    losses = {
        LOSSES: next(held.copies[copy][LOSSES] for held in hosts.values() if copy in held.indices)
    }
    files = {}
    for receiver, layers in wanted.items():
        own = files_of(index.parts_with(layers)).values()
        files[receiver] = {file.name: file.size_bytes for file in own} | losses
    yield from missing_files(files, partial(_having, hosts, copy))


def _history(
    hosts: Collection[_Held], first: int, maker: Start | None, counted: int
) -> tuple[Start, str, float | None]:
    """Say what happened since the last start, and when; raise InputError when nothing is gained by
    another start.

    `maker` is the start that made the copy to go on from. `counted` are the starts before this one
    that the store of the run knows of, also those on other hosts.
    """
    now = {held.identity: held.name for held in hosts}
    places = {held.identity: held.place for held in hosts}
    starts = [held.last for held in hosts if held.last is not None]
    if not starts:
        return Start(number=counted, hosts=now, places=places, first=first), "", None

    last = max(starts, key=lambda start: start.number)
    faults = sorted(
        (held.fault for held in hosts if held.fault and held.fault.start == last.number),
        key=lambda fault: fault.at_s,
    )
    cause = f" ({faults[0].message})" if faults else ""
    vain = 0
    if first == last.first and now == last.hosts:
        vain = last.vain + 1
    if vain >= _TRIES:
        raise InputError(
            f"the last {_TRIES} starts ended before the first copy after minibatch {first}{cause}",
            hint="look for the reason there, or copy more often with a smaller `copy_every`",
        )

    what = _change(last.hosts, now, cause)
    events = last.events
    if maker is not None and maker.number < last.number and last.first < first:
        # The copy came with hosts that were not there when the last start began, with an older
        # state.
        events = maker.events
        what = (
            f"{what}; what was trained from minibatch {last.first} on since that copy counts "
            f"no more"
        )

    # No two starts have one number, or else their copies would have one name.
    number = max(last.number + 1, counted)
    start = Start(number=number, hosts=now, places=places, first=first, events=events, vain=vain)
    return start, what, faults[0].at_s if faults else None


def _change(before: Mapping[str, str], now: Mapping[str, str], cause: str) -> str:
    """Say which hosts were lost and which came, from their names by identity.

    `cause` is of the first fault, in parentheses; empty where there was none.
    """
    lost = [name for identity, name in before.items() if identity not in now]
    came = [name for identity, name in now.items() if identity not in before]
    if came and not lost and not cause:
        return f"took in {_hosts(came)}"

    what = f"the workers were started again{cause}"
    if lost:
        what = f"lost {_hosts(lost)}{cause}"
    if came:
        what = f"{what}, took in {_hosts(came)}"
    return what


def _hosts(names: Sequence[str]) -> str:
    return f"host{'s' * (len(names) > 1)} {', '.join(sorted(names))}"


def describe(recovery: Recovery, first: int, job: Job) -> str:
    """Return the line on what happened; empty at the first start."""
    if not recovery.what:
        return ""
    now_s = time.time()
    at = f"at {time.strftime('%H:%M:%S on %d %B', time.localtime(recovery.since_s or now_s))}"
    after = at
    if recovery.since_s is not None:
        after = f"{now_s - recovery.since_s:.1f} s after that was noticed {at}"
    goes_on = f"training goes on from minibatch {first} with the plan {job.plan.config}"
    return f"{recovery.what}: {goes_on}, {job.left}, {after}"


def await_end(store: Store) -> None:
    """Wait, as a worker that the plan has no use for, until the others have trained.

    Raise RuntimeError when worker 0's store is gone: then they have failed.
    """
    while not store.check([_ENDED]):
        time.sleep(_IDLE_S)
    store.add(_LEFT, 1)


def tell_end(store: Store, idle: int) -> None:
    """Let the idle workers end; worker 0 calls it at the end of the run, before its store
    closes.
    """
    deadline = time.monotonic() + GRACE_S
    store.set(_ENDED, "")
    while store.add(_LEFT, 0) < idle and time.monotonic() < deadline:
        time.sleep(_IDLE_S)
