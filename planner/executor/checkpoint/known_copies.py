"""Which copies of a run's state exist, also on hosts that are not there: each host tells it in the store of the run.

A start sees the memories of the hosts that take part in it. After two quick faults these may be few: torchrun's agents
start with whoever has come when the last call is over. The copies of those that are late are newer than what the few
have, so a start that would begin before such a copy waits for its holders. When one comes, the agents start all workers
anew, with it.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.executor.checkpoint.folders import STEP
from planner.executor.checkpoint.host_memory import HostMemory, Start
from planner.formats.files import Record
from planner.workers.job import Job
from planner.workers.run_store import run_store
from planner.workers.secret_store import read_record

AWAITED_S = 60.0  # for which a start waits for the holders of a newer copy, at most
# Hosts tell the names of copies, and others make folders by them: none is a path.
CopyName = Annotated[str, Field(pattern=rf"^{STEP}[0-9]+-[0-9]+$")]
_PLACES = "places"


def minibatch_of(copy: str) -> int:
    """Return after how many minibatches a copy was made, by its name: 40 of "step-00000040-0003"."""
    minibatch, _, _ = copy.removeprefix(STEP).partition("-")
    return int(minibatch)


class HostCopies(Record):
    """What the memory of one host has."""

    identity: str  # of the memory
    name: str  # of the host, for people
    copies: tuple[CopyName, ...]  # complete ones; each name has the minibatch and the start that made it


@dataclass(frozen=True)
class NewerCopy:
    """The newest copy that hosts have which take no part in a start."""

    copy: str
    hosts: tuple[str, ...]  # their names

    def __str__(self) -> str:
        return f"the copy after minibatch {minibatch_of(self.copy)}, which host{'s' * (len(self.hosts) > 1)} " + (
            f"{', '.join(self.hosts)} had"
        )


class KnownCopies:
    """What all hosts of a run told of their copies, by the places of their memories."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def of(cls, job: Job) -> "KnownCopies":
        return cls(run_store(job))

    def tell(self, memory: HostMemory) -> None:
        """Tell what the memory of this host has now."""
        identity, name = memory.identity()
        what = HostCopies(identity=identity, name=name, copies=tuple(memory.whole_copies()))
        self._store.set(_key(memory.place), what.model_dump_json())
        self._register(memory.place)

    def tell_of_others(self, memory: HostMemory, last: Start) -> None:
        """Tell what other hosts had in the last start, unless the store knows of them: it may be a new one.

        They had the copies that this host has.
        """
        copies = tuple(memory.whole_copies())
        for identity, place in last.places.items():
            what = HostCopies(identity=identity, name=last.hosts[identity], copies=copies)
            self._store.compare_set(_key(place), "", what.model_dump_json())
            self._register(place)

    def hosts(self) -> dict[str, HostCopies]:
        """Return what was told last of each place."""
        return {place: read_record(self._store, _key(place), HostCopies) for place in self._places()}

    def count_start(self) -> int:
        """Return how many starts were counted before this one."""
        return int(self._store.add("starts", 1)) - 1

    def give_up(self, copy: str) -> None:
        """Let no later start wait for the holders of a copy."""
        self._store.set(f"given up {copy}", "")

    def is_given_up(self, copy: str) -> bool:
        return bool(self._store.check([f"given up {copy}"]))

    def newer_than(self, minibatch: int, present: Collection[str]) -> NewerCopy | None:
        """Return the newest copy after `minibatch` on hosts whose places are not `present`, unless it was given up."""
        holders = newer_copies(self.hosts(), minibatch, present)
        for copy in sorted(holders, key=minibatch_of, reverse=True):
            if not self.is_given_up(copy):
                return NewerCopy(copy, tuple(sorted(holders[copy])))
        return None

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


def newer_copies(hosts: Mapping[str, HostCopies], minibatch: int, present: Collection[str]) -> dict[str, list[str]]:
    """Return the names of the absent hosts that have each copy after `minibatch`, by the copy."""
    holders = dict[str, list[str]]()
    for place, host in hosts.items():
        newer = [copy for copy in host.copies if minibatch_of(copy) > minibatch]
        if place not in present:
            for copy in newer:
                holders.setdefault(copy, []).append(host.name)
    return holders


def _key(place: str) -> str:
    return f"copies at {place}"
