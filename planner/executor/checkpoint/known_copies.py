"""Which copies of a run's state exist, also on hosts that are not there: each host tells it in the
store of the run.

A start sees the memories of the hosts that take part in it. After two quick faults these may be
few: torchrun's agents start with whoever has come when the last call is over. The copies of those
that are late are newer than what the few have, so a start that would begin before such a copy waits
for its holders. When one comes, the agents start all workers anew, with it.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch.distributed as dist
from pydantic import Field
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.executor.checkpoint.folders import STEP
from planner.executor.checkpoint.host_memory import HostMemory, Start
from planner.executor.communication.control import control_group, share
from planner.formats.files import Record
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.run_store import run_store
from planner.workers.secret_store import read_record

AWAITED_S = 60.0  # for which a start waits for the holders of a newer copy, at most
# Hosts tell the names of copies, and others make folders by them: none is a path.
CopyName = Annotated[str, Field(pattern=rf"^{STEP}[0-9]+-[0-9]+$")]
_PLACES = "places"
_LOOKS_EVERY_S = 0.2
_log = logging.getLogger(__name__)


def minibatch_of(copy: str) -> int:
    """Return after how many minibatches a copy was made, by its name: 40 of
    "step-00000040-0003".
    """
    minibatch, _, _ = copy.removeprefix(STEP).partition("-")
    return int(minibatch)


class HostCopies(Record):
    """What the memory of one host has."""

    identity: str  # of the memory
    name: str  # of the host, for people
    # complete ones; each name has the minibatch and the start that made it
    copies: tuple[CopyName, ...]


@dataclass(frozen=True)
class NewerCopy:
    """The newest copy of those that hosts have which take no part in a start."""

    copy: str
    hosts: tuple[str, ...]  # their names
    others: tuple[str, ...] = ()  # older copies, and newer than what the start can begin with

    def __str__(self) -> str:
        hosts = f"host{'s' * (len(self.hosts) > 1)} {', '.join(self.hosts)}"
        return f"the copy after minibatch {minibatch_of(self.copy)}, which {hosts} had"


class KnownCopies:
    """What all hosts of a run told of their copies, by the places of their memories."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def of(cls, job: Job) -> "KnownCopies":
        """Return what the run's store knows of copies."""
        return cls(run_store(job))

    def tell(self, memory: HostMemory) -> None:
        """Tell what the memory of this host has now."""
        identity, name = memory.identity()
        what = HostCopies(identity=identity, name=name, copies=tuple(memory.whole_copies()))
        self._store.set(_key(memory.place), what.model_dump_json())
        self._register(memory.place)

    def tell_of_others(self, memory: HostMemory, last: Start) -> None:
        """Tell what other hosts had in the last start, unless the store knows of them: it may be a
        new one.

        They had the copies that this host has.
        """
        copies = tuple(memory.whole_copies())
        for identity, place in last.places.items():
            what = HostCopies(identity=identity, name=last.hosts[identity], copies=copies)
            self._store.compare_set(_key(place), "", what.model_dump_json())
            self._register(place)

    def hosts(self) -> dict[str, HostCopies]:
        """Return what was told last of each place."""
        return {
            place: read_record(self._store, _key(place), HostCopies) for place in self._places()
        }

    def count_start(self) -> int:
        """Return how many starts were counted before this one."""
        return int(self._store.add("starts", 1)) - 1

    def give_up(self, newer: NewerCopy) -> None:
        """Let no later start wait for the holders of these copies."""
        for copy in (newer.copy, *newer.others):
            self._store.set(f"given up {copy}", "")

    def newer_than(self, minibatch: int, present: Collection[str]) -> NewerCopy | None:
        """Return the newest copy after `minibatch` on hosts whose places are not `present`, unless
        it was given up.
        """
        holders = newer_copies(self.hosts(), minibatch, present)
        awaited = [copy for copy in holders if not self._store.check([f"given up {copy}"])]
        if not awaited:
            return None
        newest, *others = sorted(awaited, key=minibatch_of, reverse=True)
        return NewerCopy(newest, tuple(sorted(holders[newest])), tuple(others))

    def _register(self, place: str) -> None:
        places = self._places()
        while place not in places:
            before = json.dumps(places) if places else ""
            answer = self._store.compare_set(_PLACES, before, json.dumps([*places, place]))
            places = json.loads(answer)

    def _places(self) -> list[str]:
        text = self._store.compare_set(_PLACES, "", "")  # empty where it is missing, without a wait
        places: list[str] = json.loads(text) if text else []
        return places


def newer_copies(
    hosts: Mapping[str, HostCopies], minibatch: int, present: Collection[str]
) -> dict[str, list[str]]:
    """Return the names of the absent hosts that have each copy after `minibatch`, by the copy."""
    holders = dict[str, list[str]]()
    for place, host in hosts.items():
        newer = [copy for copy in host.copies if minibatch_of(copy) > minibatch]
        if place not in present:
            for copy in newer:
                holders.setdefault(copy, []).append(host.name)
    return holders


def await_holders(
    known: KnownCopies | None,
    begins: Callable[[], int],
    present: Collection[str],
    heartbeat: Heartbeat,
) -> str:
    """Wait while hosts that are not there have a newer state than this start would begin with; all
    workers call it.

    Worker 0 decides. Return what was waited for in vain, in words; empty where nothing was.

    Args:
        known: None where another worker speaks for the host.
        begins: returns the minibatch with which the start can begin; called on worker 0 alone.
        present: the places of the hosts that take part.
    """
    group = control_group()
    deadline = time.monotonic() + AWAITED_S
    newer = None
    if known is not None and dist.get_rank() == 0:
        first = begins()
        newer = known.newer_than(first, present)
        if newer is not None:
            than = f"newer than what this start can begin with (minibatch {first})"
            _log.warning("%s, is %s: it waits up to %.0f s for them", newer, than, AWAITED_S)

    waits = newer is not None
    while json.loads(share(json.dumps(waits), group)[0]):
        heartbeat.enter("waiting for hosts with a newer copy of the state")
        time.sleep(_LOOKS_EVERY_S)
        waits = waits and time.monotonic() < deadline

    lacking = ""
    if known is not None and newer is not None:
        known.give_up(newer)
        lacking = f"{newer}, was waited for in vain"

    return share(lacking, group)[0]


def count_start(known: KnownCopies | None) -> int:
    """Return how many starts were counted before this one; all workers call it, and worker 0
    counts.
    """
    counted = 0
    if known is not None and dist.get_rank() == 0:
        counted = known.count_start()
    return int(share(str(counted), control_group())[0])


def _key(place: str) -> str:
    return f"copies at {place}"
